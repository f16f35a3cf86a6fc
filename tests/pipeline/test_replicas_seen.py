"""Collectives of replicas in the view of collectives, with the replica that the others wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from small import SGD, data, model
from torch import nn
from torch.nn import functional
from worlds import until, world

from rpcbench.base.ids import Row
from rpcbench.pipeline import Pipeline, data_parallel, split
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.telemetry import collector as collect
from rpcbench.telemetry.message_views import collectives_view

FOUR = ["worker1", "worker2", "worker3", "worker4"]
GATE = threading.Event()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    GATE.set()
    with world(tmp_path, 5) as made:
        yield made


def replicas(*between: nn.Module) -> Pipeline:
    stages = split(model(*between), FOUR, replicas=2)
    return Pipeline(stages, microbatches=2, loss_fn=functional.cross_entropy, optimizer=SGD, batch_norm="microbatch")


def seen() -> list[Row]:
    collector = collect.current_collector()
    stop = collector.subscribe(lambda: None)
    assert collector.settle(20)
    rows = collectives_view(collector.world())["collectives"].values()
    stop()
    return list(rows)


def test_the_view_has_a_row_for_each_all_reduce_of_a_step(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "BYTES", 1)
    net = model()
    replicas().step(*data(8))
    bytes_of = [[p.nbytes + p.element_size() for p in net[begin:end].parameters()] for begin, end in ((0, 2), (2, 4))]
    for stage, members in enumerate((["worker1", "worker3"], ["worker2", "worker4"])):
        own = [row for row in seen() if row["group"] == f"replicas of stage {stage}"]
        assert [row["op"] for row in own] == ["barrier"] + ["all_reduce(SUM)"] * len(bytes_of[stage])
        assert [row["bytes"] for row in own[1:]] == bytes_of[stage], (
            "gradients, and the number of replicas that have one"
        )
        assert {(*row["members"], row["state"]) for row in own} == {(*members, "done")}
        assert [row["number"] for row in own] == list(range(1, len(own) + 1)) and None not in [r["last"] for r in own]


def test_the_view_separates_steps_and_pipelines_and_shows_broadcasts_of_buffers(agents: list[Agent]) -> None:
    pipe = replicas(nn.BatchNorm1d(16).double())
    for _ in range(2):
        pipe.step(*data(8))
    replicas().step(*data(8))
    ops = [row["op"] for row in seen()]
    assert (ops.count("barrier"), ops.count("all_reduce(SUM)"), ops.count("broadcast(src=0)")) == (6, 6, 2)
    assert {row["state"] for row in seen()} == {"done"} and len(seen()) == 14


class Gate(nn.Module):
    """Holds worker4 until the test lets it go on; then it may fail."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if current.current_agent().name == "worker4":
            GATE.wait(20)
            if self.fails:
                raise ArithmeticError("worker4 cannot")
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_the_view_names_the_replica_that_the_others_wait_for_and_the_result(agents: list[Agent], fails: bool) -> None:
    GATE.clear()
    pipe = replicas(Gate(fails))

    def barriers() -> list[tuple[object, ...]]:
        own = [row for row in seen() if (row["op"], row["group"]) == ("barrier", "replicas of stage 1")]
        return [(row["state"], row["last"], row["missing"]) for row in own]

    with ThreadPoolExecutor(1, initializer=current.make_current, initargs=(agents[0],)) as pool:
        step = pool.submit(pipe.step, *data(8))
        until(lambda: barriers() == [("open", None, ["worker4"])])
        GATE.set()
        error = step.exception(20)
    assert isinstance(error, ArithmeticError) == fails
    until(lambda: barriers() == [("failed", None, ["worker4"]) if fails else ("done", 4, [])])
