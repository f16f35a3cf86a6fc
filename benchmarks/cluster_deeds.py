"""Deeds of a cluster, counted: a cell, a pipeline's operations, a collective watched and not, a panel's refresh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import rpcbench
from benchmarks.deed_counts import Counters, DeedCount, MessageTotal, count_deed, count_messages, read_counters
from benchmarks.rows import Operation
from rpcbench.base.conditions import Condition
from rpcbench.launch.cluster import Cluster
from rpcbench.pipeline import Pipeline, split
from rpcbench.telemetry.collector import current_collector

_MICROBATCHES = 8
_COLLECTIVES = 50  # in one call: they share its own cost
_PATIENCE = 20.0


def _run_cell(cluster: Cluster) -> Operation:
    return Operation(lambda: cluster.run("worker1", "6 * 7"), lambda result: result == 42)


def _step_pipeline(cluster: Cluster) -> Operation:
    """Forward and backward of two stages, for each micro-batch."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    stages = split(model, cluster.workers)
    pipe = Pipeline(stages, "1f1b", _MICROBATCHES, functional.mse_loss)
    x, y = torch.rand(_MICROBATCHES, 16), torch.rand(_MICROBATCHES, 16)

    def run() -> float:
        with pipe.batch(x, y) as batch:
            return float(batch.loss)

    expected = float(functional.mse_loss(model(x), y).detach())
    return Operation(run, lambda loss: abs(loss - expected) < 1e-4, calls=_MICROBATCHES)


def reduce_many(count: int) -> float:
    """All-reduce a small tensor so many times in a row."""
    value = torch.ones(16)
    for _ in range(count):
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value.sum())


def _reduce(cluster: Cluster) -> Operation:
    return Operation(
        lambda: cluster.spmd(reduce_many, _COLLECTIVES), lambda sums: sums == [16.0] * len(sums), calls=_COLLECTIVES
    )


def _reduce_watched(cluster: Cluster) -> Operation:
    @contextlib.contextmanager
    def watch() -> Iterator[None]:
        collector = current_collector()
        unsubscribe = collector.subscribe(lambda: None)
        try:
            if not collector.settle(_PATIENCE):
                raise AssertionError("a worker does not report")
            yield
        finally:
            unsubscribe()

    operation = _reduce(cluster)
    return Operation(operation.run, operation.right, watch, operation.calls)


def _refresh_panel(cluster: Cluster) -> Operation:
    """An RRef comes, and the open panel has a row for it."""
    shown: list[object] = []
    changes = Condition()

    @contextlib.contextmanager
    def opened() -> Iterator[None]:
        panel = rpcbench.panel("rrefs")
        panel.observe(lambda _: changes.notify_all(), "state")
        shown.append(panel)
        try:
            yield
        finally:
            shown.remove(panel)
            panel.close()

    def run() -> int:
        panel = shown[-1]
        rref = cluster.remote("worker1", int, ("7",))
        name = str(rref._rref)
        if not changes.wait_for(lambda: _shows(panel, name), _PATIENCE):
            raise AssertionError(f"the panel does not show {name}")
        return int(rref.to_here())

    return Operation(run, lambda value: value == 7, opened)


def _shows(panel: Any, name: str) -> bool:
    return any(row["rref"] == name for row in panel.state["view"]["rrefs"].values())


_MADE: dict[str, Callable[[Cluster], Operation]] = {
    "a cell on a worker": _run_cell,
    "a pipeline's step, per micro-batch": _step_pipeline,
    "an all-reduce of two ranks": _reduce,
    "the same, watched": _reduce_watched,
    "a change, and a panel's refresh": _refresh_panel,
}
DEEDS = tuple(_MADE)
_FEW = {"a change, and a panel's refresh": 20}  # a panel is refreshed some times a second


def count(titles: Sequence[str], deeds: int) -> Iterator[tuple[str, DeedCount, MessageTotal]]:
    """Count these deeds on a cluster of two workers. AssertionError where a result is wrong."""
    if not titles:
        return
    with Cluster(2) as cluster:

        def read() -> list[Counters]:
            return [read_counters(), *(cluster.rpc_sync(name, read_counters) for name in cluster.workers)]

        for title in titles:
            operation = _MADE[title](cluster)
            some = max(1, min(deeds, _FEW.get(title, deeds)) // operation.calls)
            yield title, count_deed(operation, read, some), count_messages(operation, some)
