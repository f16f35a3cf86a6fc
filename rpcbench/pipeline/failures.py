"""Losses of workers, as a pipeline's driver sees them: which are lost, in which phase, and which steps the stages hold.

    all stages hold 6 ── all have gradients ── apply ──┬── all have answered: all hold 7
                                                       └── else a stage that has not answered holds 6 or 7

Guarantees
- The driver counts answers only, so it never claims more than was reported.
- An error that the loss of a worker has caused becomes a StageLostError; any other error stays as it is.
- A pipeline that has lost a stage raises the same error, in the same words, at every later request.
- A worker that was restarted under its name is another process without any part of the pipeline: it counts as lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rpcbench.base.errors import ConnectionLostError, StageLostError, WorkerLostError
from rpcbench.pipeline.ops import Op
from rpcbench.pipeline.placement import WorkerMesh
from rpcbench.pipeline.step_log import CrashRecord, WorkerPhase, create_record_files, describe_position
from rpcbench.pipeline.tasks import Task
from rpcbench.protocol.node import Node
from rpcbench.runtime.agent import Agent

RECOVERY_ADVICE = (
    "make the Pipeline again and load a checkpoint into all its stages: pipe.resume(), or pipe.load(folder) with what "
    "pipe.save(folder) has written"
)

RESTARTED = "it has been restarted since"

Held = tuple[int, int] | None
"""The least and the most optimizer steps that a stage may hold; None: unknown."""


class Lost(NamedTuple):
    """A worker that was lost: the phase it was in, the reason, and its stages."""

    worker: str
    at: str
    reason: str
    stages: tuple[int, ...]
    has_left: bool = False  # in good order, as `cluster.scale` has a worker leave: nothing is there to restart


class CommitState:
    """Which optimizer step each stage holds, by the number of the stage in the layout."""

    def __init__(self, stages: Collection[int], layout: WorkerMesh | None = None) -> None:
        self.held: dict[int, Held] = dict.fromkeys(stages, (0, 0))
        self.layout = layout or WorkerMesh(len(stages))

    @property
    def common_step(self) -> int | None:
        """The optimizer step that all stages hold; None where they differ, or may differ."""
        found = set(self.held.values())
        held = found.pop()  # equal for all stages if `found` is empty now
        return held[0] if not found and held is not None and held[0] == held[1] else None

    def mark_stepping(self) -> int:
        """Record that all stages may step now. Returns the step that they hold if all do."""
        number = self.common_step
        assert number is not None, "an optimizer step on top of different ones"
        self.held = dict.fromkeys(self.held, (number, number + 1))  # until each has answered
        return number + 1

    def record_step(self, number: int, stages: Iterable[int] | None = None) -> None:
        """Record that these stages, by default all, hold this optimizer step."""
        self.held.update(dict.fromkeys(self.held if stages is None else list(stages), (number, number)))

    @property
    def least_step(self) -> int:
        """The optimizer step that all stages have reached for sure; 0 if none is known."""
        return min((held[0] for held in self.held.values() if held is not None), default=0)

    @contextlib.contextmanager
    def loading_step(self, number: int) -> Iterator[None]:
        """Around code that loads this step into the stages. If it fails, their steps are unknown."""
        self.held = dict.fromkeys(self.held)
        yield
        self.record_step(number)

    def describe_stages(self, stages: Collection[int]) -> str:
        """Return text as "stages 0 and 2 hold optimizer step 7, stage 1 holds optimizer step 6 or 7"."""
        groups: dict[Held, list[int]] = {}
        for stage in sorted(stages):
            groups.setdefault(self.held[stage], []).append(stage)
        return ", ".join(
            f"{self.layout.describe_stages(same)} {'hold' if len(same) > 1 else 'holds'} {_describe_held(held)}"
            for held, same in groups.items()
        )


def make_lost_error(lost: Sequence[Lost], when: str, commit_state: CommitState, changed: bool) -> StageLostError:
    """Return the error for lost workers. `changed`: parameters were about to change, or had changed."""
    gone = sorted(stage for each in lost for stage in each.stages)
    left = [stage for stage in commit_state.held if stage not in gone]  # the survivors
    them = "it" if len(lost) == 1 else "them"
    phrases = [f"{each.worker} was lost {when}, {each.at}" for each in lost]
    amounts = " and ".join(dict.fromkeys(_describe_held(commit_state.held[stage]) for stage in gone))
    phrases.append(f"{commit_state.layout.describe_stages(gone)}, at {amounts}, went with {them}")
    if left:
        sure = not changed and all(held is not None and held[0] == held[1] for held in map(commit_state.held.get, left))
        phrases.append(("no parameter has changed: " if sure else "") + commit_state.describe_stages(left))
    restarts = ", ".join(
        f"cluster.scale adds {each.worker}" if each.has_left else f"cluster.restart({each.worker!r})"
        for each in lost
        if each.reason != RESTARTED
    )
    phrases.append(f"start {them} again ({restarts}), {RECOVERY_ADVICE}" if restarts else RECOVERY_ADVICE)
    reasons = "; ".join(dict.fromkeys(each.reason for each in lost))
    at = {each.worker: each.at for each in lost}
    return StageLostError("; ".join(phrases) + f". The reason: {reasons}", at, tuple(gone), dict(commit_state.held))


def _describe_held(held: Held) -> str:
    if held is None:
        return "an unknown mixture of optimizer steps"
    least, most = held
    return f"optimizer step {least}" if least == most else f"optimizer step {least} or {most}"


class LostStages:
    """The losses of one pipeline. `placement`: stage → id of its worker."""

    def __init__(self, watch: ProcessWatch, placement: Mapping[int, int], commit_state: CommitState) -> None:
        self.watch, self._placement, self._commit_state = watch, placement, commit_state
        self.tasks: Mapping[int, Task] = {}  # id → its task in the latest step
        self._known_loss: StageLostError | None = None  # to be raised at every later request

    def raise_known_loss(self) -> None:
        """Raise the error of an earlier loss again."""
        if self._known_loss is not None:
            raise StageLostError(*self._known_loss.args)  # a new one: its traceback grows with each raise

    def check_for_losses(self, *, changed: bool) -> None:
        """Raise StageLostError if a worker was lost between two steps."""
        if gone := self.watch.lost_workers():
            raise self._make_loss_error(gone, "between two steps", changed)

    def raise_if_lost(self, error: BaseException, when: str, *, changed: bool) -> None:
        """Raise StageLostError if the cause of an error is the loss of a worker; else return."""
        if isinstance(error, WorkerLostError | ConnectionLostError) and (
            gone := self.watch.wait_for_lost_workers(error)
        ):
            raise self._make_loss_error(gone, when, changed) from error

    def _make_loss_error(self, gone: Sequence[int], when: str, changed: bool) -> StageLostError:
        """Return the error to raise now, and keep one for later."""
        lost = []
        for id_ in gone:
            task = self.tasks.get(id_)
            at = self.watch.describe_phase(id_, task.step if task else 0, task.ops if task else ())
            stages = tuple(stage for stage, worker_id in self._placement.items() if worker_id == id_)
            name, reason = self.watch.worker_name(id_), self.watch.loss_reason(id_)
            lost.append(Lost(name, at, reason, stages, self.watch.has_left(id_)))
        error = make_lost_error(lost, when, self._commit_state, changed)
        self._known_loss = StageLostError(*error.args)  # without a traceback, which would keep frames alive
        return error


_REPORT_SECONDS = 6.0
"""How long the report of a loss may take to arrive here after another process has noticed it: the leader of the world
waits up to 5 s for the launcher's reason."""

_DOUBT_SECONDS = 1.0
"""The same after a call has failed with its connection, which is a loss only if no new connection is made."""


class ProcessWatch:
    """The processes of the workers `ids`, all alive when this is made. `processes`: id → incarnation."""

    def __init__(self, agent: Agent, ids: Sequence[int]) -> None:
        self._agent = agent
        self.processes = agent.machine.read_node(
            lambda node: {id_: node.members.members[id_].incarnation for id_ in ids}
        )
        self._records: dict[int, CrashRecord] = {}  # those on this host

    @contextlib.contextmanager
    def open_records(self) -> Iterator[dict[int, str]]:
        """Yield the path of each worker's crash record, to be opened there inside the block; none for other hosts."""

        def local_workers(node: Node) -> list[int]:
            return [id_ for id_ in self.processes if node.members.members[id_].host == node.members.me.host]

        with create_record_files(self._agent.config.directory, self._agent.machine.read_node(local_workers)) as paths:
            self._records = {id_: CrashRecord.open_file(path) for id_, path in paths.items()}
            yield paths

    def lost_workers(self) -> list[int]:
        """Return the ids of the workers that are known to be lost."""
        return self._agent.links.members.departed_members(self.processes)

    def wait_for_lost_workers(self, error: BaseException | None) -> list[int]:
        """As `lost_workers`, after an error that a loss may have caused: waits for the report as long as it may
        take."""
        seconds = _REPORT_SECONDS if isinstance(error, WorkerLostError) else _DOUBT_SECONDS
        self._agent.links.members.wait_until_reached(lambda: bool(self.lost_workers()), seconds)
        return self.lost_workers()

    def describe_phase(self, id_: int, step: int, ops: Sequence[Op]) -> str:
        """Return the phase of a worker in its last step, in which it had these operations, as text."""
        record = self._records.get(id_)
        return (
            "on another host, so its last operation is unknown"
            if record is None
            else describe_position(record.last_position, step, ops)
        )

    def may_have_ended(self, id_: int, step: int) -> bool:
        """Return whether a worker may have ended its operations of this step, its last one."""
        place = None if (record := self._records.get(id_)) is None else record.last_position
        return place is None or (place.step == step and place.doing >= WorkerPhase.READY)  # no record: it may

    def loss_reason(self, id_: int) -> str:
        gone = self._agent.machine.read_node(lambda node: node.gone.find_departed(id_))
        return gone.reason if gone is not None else RESTARTED

    def has_left(self, id_: int) -> bool:
        """Return whether a worker has announced its departure, and none has come in its place."""
        gone = self._agent.machine.read_node(lambda node: node.gone.find_departed(id_))
        return gone is not None and not gone.lost

    def worker_name(self, id_: int) -> str:
        return self._agent.links.members.member_name(id_)
