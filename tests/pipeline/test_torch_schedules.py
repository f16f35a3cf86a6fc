"""Schedules of torch.distributed.pipelining: read from its texts and lists, and recorded while they run on workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import cluster_fixture

import rpcbench
from rpcbench.pipeline import PipelineError, Plan, schedule
from rpcbench.telemetry.collector import Collector
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.views import View, pipeline_view

SEVERAL = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]  # stages per rank
V_SHAPED = ["ZBVZeroBubble", "DualPipeV"]
cluster = cluster_fixture(4)


def torch_ops(name: str, workers: int, microbatches: int, **options: Any) -> Any:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    return get_schedule_ops(name, workers, microbatches, **options)


@pytest.mark.parametrize("with_comms", [False, True])
@pytest.mark.parametrize("name", SEVERAL)
def test_torchs_lists_and_its_csv_are_schedules(name: str, with_comms: bool, tmp_path: Path) -> None:
    lists = torch_ops(name, 2, 8, with_comms=with_comms)
    plan = schedule(lists)
    assert isinstance(plan, Plan) and (len(plan.ops), plan.stages, plan.microbatches) == (2, 4, 8)
    csv = tmp_path / "schedule.csv"
    csv.write_text("\n".join(",".join("" if each is None else str(each) for each in own) for own in lists))
    assert schedule(csv).ops == plan.ops
    assert 0 < plan.simulate().idle < 0.3


def test_a_pair_that_overlaps_is_two_operations_in_turn() -> None:
    (own, *_) = schedule(torch_ops("DualPipeV", 2, 8)).ops
    listed = torch_ops("DualPipeV", 2, 8)[0]
    pairs = [each for each in listed if each is not None and each.sub_actions]
    assert pairs
    at = own.index(next(op for op in own if str(op) == str(pairs[0].sub_actions[0])))
    assert str(own[at + 1]) == str(pairs[0].sub_actions[1])


@pytest.mark.parametrize("text", ["0F0,0X0", "0F0,(0F1;0Q0)OVERLAP_F_B", "0F0,1SEND_Q0"])
def test_a_word_that_is_no_action_is_named(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "bad.csv").write_text(text)
    with pytest.raises(PipelineError, match="is not an operation"):
        schedule(path)


# ---- on workers
def stages_of(rank: int, size: int, chunks: int, name: str) -> list[int]:
    if name in V_SHAPED:
        return [rank, 2 * size - 1 - rank]
    return [rank + size * chunk for chunk in range(chunks)]


def train(name: str, chunks: int, steps: int = 2, pipelines: int = 1, fails: bool = False) -> list[float]:
    """On a worker: train by torch's schedule, and return the mean loss of each step on the rank of the last stage."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    groups, size = None, dist.get_world_size() // pipelines
    if pipelines > 1:
        groups = dist.new_subgroups_by_enumeration(
            [[*range(n, pipelines * size, pipelines)] for n in range(pipelines)]
        )[0]
    rank = dist.get_group_rank(groups, dist.get_rank()) if groups else dist.get_rank()
    mine = stages_of(rank, size, chunks, name)
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(size * chunks)]
    stages = [PipelineStage(blocks[n], n, len(blocks), torch.device("cpu"), group=groups) for n in mine]
    if fails and rank == size - 1:
        calls = iter([False, False, True])  # torch runs one backward first, to learn shapes
        blocks[mine[0]].register_full_backward_hook(lambda *_: fail() if next(calls) else None)
    made = get_schedule_class(name)(stages[0] if chunks == 1 else stages, 4 * chunks, loss_fn=nn.functional.mse_loss)
    inputs, targets, last = torch.randn(16, 8), torch.randn(16, 8), len(blocks) - 1 in mine
    means = []
    for _ in range(steps):
        losses: list[torch.Tensor] = []
        made.step(*([inputs] if 0 in mine else []), losses=losses, **({"target": targets} if last else {}))
        means += [torch.stack(losses).mean().item()] if last else []
    if name not in V_SHAPED:  # torch has no eval for these
        made.eval(*([inputs] if 0 in mine else []), **({"target": targets} if last else {}))
    return means


def fail() -> None:
    raise ValueError("a stage that fails")


@contextmanager
def watching(cluster: rpcbench.Cluster) -> Iterator[Collector]:
    collector = cluster.agent.part(Collector)
    stop = collector.subscribe(lambda: None)
    try:
        yield collector
    finally:
        stop()


def seen(collector: Collector) -> View:
    assert collector.settle(20)
    return pipeline_view(collector.world())


@pytest.mark.parametrize(("name", "chunks"), [("GPipe", 1), ("1F1B", 1), *((name, 2) for name in SEVERAL)])
def test_its_steps_are_seen_as_ours(cluster: rpcbench.Cluster, name: str, chunks: int) -> None:
    with watching(cluster) as collector:
        results = cluster.spmd(train, name, chunks, workers="worker1,worker2")
        view = seen(collector)
    means = next(each for each in results if each)
    rows = [view["steps"][str(number)] for number in range(1, 4 - (name in V_SHAPED))]
    stages, microbatches = 2 * chunks, 4 * chunks
    assert [row["state"] for row in rows] == ["complete"] * len(rows)
    assert [row["trains"] for row in rows] == [True, True, False][: len(rows)]
    assert [row["loss"] for row in rows[:2]] == pytest.approx(means)
    assert {row["samples"] for row in rows} == {16}
    assert 0 < rows[0]["minimum"] < rows[0]["bubble"] < 1 and all(row["minimum"] is None for row in rows[2:])
    ops = [row for row in view["ops"].values() if row["step"] == 2]
    kinds = Counter(row["op"] for row in ops)
    forwards = stages * microbatches
    assert kinds["F"] == forwards and kinds["B"] + kinds["I"] == forwards and kinds["I"] == kinds["W"]
    assert (kinds["W"] > 0) == (name in (*V_SHAPED, "InterleavedZeroBubble"))
    # Each lane's plan is what has run, and what crosses between ranks is counted: 4 samples of 8 floats, or 2.
    lanes = [view["lanes"][key] for key in view["lanes"] if key.startswith("2/")]
    assert all(lane["done"] == lane["planned"] and lane["next"] == "" and lane["peak"] is None for lane in lanes)
    crossing = stages - 1 - (name in V_SHAPED)  # between the two stages at the tip of the V nothing crosses
    sent = [row["bytes"] for row in ops if row["op"] == "F" and row["bytes"]]
    assert len(sent) == crossing * microbatches and {*sent} == {16 // microbatches * 8 * 4}
    assert "step 2 (complete)" in summarize_view(view)


def test_pipelines_side_by_side_are_replicas(cluster: rpcbench.Cluster) -> None:
    with watching(cluster) as collector:
        cluster.spmd(train, "1F1B", 1, pipelines=2)
        view = seen(collector)
    lanes = {cluster.agent.member(view["lanes"][f"1/{n}"]["worker"]).name: view["lanes"][f"1/{n}"] for n in range(1, 5)}
    assert {name: (lane["replica"], lane["stages"]) for name, lane in lanes.items()} == {
        "worker1": (0, [0]), "worker2": (1, [0]), "worker3": (0, [1]), "worker4": (1, [1]),
    }  # fmt: skip


def test_a_step_that_fails_is_seen_as_failed(cluster: rpcbench.Cluster) -> None:
    with watching(cluster) as collector:
        with pytest.raises(Exception, match="Failed to run stage backward"):
            cluster.spmd(train, "GPipe", 1, fails=True, workers="worker1,worker2")
        view = seen(collector)
    row = view["steps"]["1"]
    assert row["state"] == "failed" and row["loss"] is None
    assert [op["op"] for op in view["ops"].values() if op["failed"]] == ["B"]


def test_a_new_run_displaces_the_steps_of_the_one_before(cluster: rpcbench.Cluster) -> None:
    with watching(cluster) as collector:
        cluster.spmd(train, "LoopedBFS", 2, 5, workers="worker1,worker2")
        cluster.spmd(train, "GPipe", 1, workers="worker1,worker2")
        view = seen(collector)
    assert [*view["steps"]] == ["1", "2", "3"]
    assert sum(row["step"] == 2 for row in view["ops"].values()) == 2 * 2 * 4


def test_an_order_that_the_plan_does_not_have_is_followed(cluster: rpcbench.Cluster) -> None:
    from rpcbench.pipeline.ops import Op
    from rpcbench.pipeline.step_log import OpLog

    log = cluster.agent.part(OpLog)
    record = log.open_step("a", 0, "0F0 0F1 0B0 0B1", [cluster.agent.id], 0.0, None, None)
    for word in ["0F0", "0B0", "0W9"]:
        record.expect_op(Op.parse_op(word))
        record.begin_op()
        record.end_op(0, None)
    assert record.row["plan"] == ["0F0", "0B0", "0W9", "0F1", "0B1"]
    assert [f"{row['stage']}{row['op']}{row['microbatch']}" for row in record.op_rows().values()] == [
        "0F0",
        "0B0",
        "0W9",
    ]
    record.end_step("done")
