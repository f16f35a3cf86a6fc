"""The messages about the stages after a failure, and the operation of a worker in its crash record."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from rpcbench.pipeline.failures import CommitState, Lost, make_lost_error
from rpcbench.pipeline.ops import parse_ops
from rpcbench.pipeline.step_log import CrashRecord, WorkerPhase, create_record_files, describe_position

(OPS,) = parse_ops("1F0 1B0")


def test_stages_with_the_same_optimizer_step_are_reported_together() -> None:
    commit_state = CommitState(range(4))
    assert commit_state.common_step == 0 and commit_state.mark_stepping() == 1
    commit_state.record_step(1, [0, 2])
    assert commit_state.common_step is None and commit_state.least_step == 0
    words = "stages 0 and 2 hold optimizer step 1, stages 1 and 3 hold optimizer step 0 or 1"
    assert commit_state.describe_stages([0, 1, 2, 3]) == words
    commit_state.record_step(1)
    assert commit_state.common_step == 1


def test_the_optimizer_step_is_unknown_after_a_failed_load() -> None:
    commit_state = CommitState(range(2))
    with pytest.raises(OSError), commit_state.loading_step(7):
        raise OSError
    assert commit_state.common_step is None and "unknown mixture" in commit_state.describe_stages([0])
    with commit_state.loading_step(7):
        pass
    assert commit_state.common_step == 7


def test_an_error_names_all_lost_workers_and_can_be_pickled() -> None:
    commit_state = CommitState(range(3))
    commit_state.record_step(4)
    lost = [Lost("worker1", "in F0 of stage 0", "it was killed", (0,)), Lost("worker3", "at rest", "so was it", (2,))]
    error = make_lost_error(lost, "in step 9", commit_state, changed=False)
    assert str(error) == (
        "worker1 was lost in step 9, in F0 of stage 0; worker3 was lost in step 9, at rest; stages 0 and 2, at "
        "optimizer step 4, went with them; no parameter has changed: stage 1 holds optimizer step 4; start them again "
        "(cluster.restart('worker1'), cluster.restart('worker3')), make the Pipeline again and load a checkpoint into "
        "all its stages: pipe.resume(), or pipe.load(folder) with what pipe.save(folder) has written. "
        "The reason: it was killed; so was it"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.at, copy.stages, copy.held) == (str(error), error.at, (0, 2), error.held)


@pytest.mark.parametrize(
    ("doing", "where", "told"),
    [
        (WorkerPhase.NOTHING, 0, "before its first operation"),
        (WorkerPhase.WAITS, 1, "waiting to begin B0 of stage 1"),
        (WorkerPhase.RUNS, 0, "in F0 of stage 1"),
        (WorkerPhase.SENDS, 1, "sending what B0 of stage 1 has made"),
        (WorkerPhase.READY, 0, "after its last operation"),
        (WorkerPhase.APPLIES, 1, "in the optimizer of stage 1"),
        (WorkerPhase.APPLIED, 0, "after its optimizers"),
    ],
)
def test_a_crash_record_can_be_read_through_another_mapping(
    tmp_path: Path, doing: WorkerPhase, where: int, told: str
) -> None:
    with create_record_files(str(tmp_path), [1, 2]) as paths:
        mine, theirs = CrashRecord.open_file(paths[1]), CrashRecord.open_file(paths[1])
    assert list(tmp_path.iterdir()) == []
    theirs.store_phase(2**40, doing, where)
    assert describe_position(mine.last_position, 2**40, OPS) == told
    assert describe_position(mine.last_position, 2**40 + 1, OPS) == "before its first operation"
