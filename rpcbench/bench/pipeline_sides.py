"""Both sides of the comparison of pipelines: ours on a cluster of two workers, torch's in two processes over gloo.

Each takes orders: a model, a schedule and how many steps; and tells the seconds of each step and its loss. Who has no
order waits for one and takes no time. A step is forward, backward and the optimizer's step; one thread computes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from time import perf_counter
from typing import NamedTuple, Protocol

import torch

from rpcbench.bench.pair import BenchError
from rpcbench.bench.pipeline_work import MICROBATCHES, RATE, work
from rpcbench.launch.cluster import Cluster
from rpcbench.pipeline import Pipeline, split

_PATIENCE = 120.0


class Order(NamedTuple):
    model: str
    schedule: str
    steps: int
    seed: int
    dtype: torch.dtype = torch.float32


class Steps(NamedTuple):
    """Of each step, in order; `cpu`: seconds that all processes of the side took for all of them."""

    seconds: list[float]
    losses: list[float]
    cpu: float


class Side(Protocol):
    def run(self, order: Order) -> Steps:
        """The next steps of this model under this schedule: the first order makes it, later ones train on."""


@contextlib.contextmanager
def ours() -> Iterator[Side]:
    with Cluster(2) as cluster:
        for worker in cluster.workers:
            cluster.rpc_sync(worker, torch.set_num_threads, (1,))
        yield Ours(cluster)


class Ours:
    """Pipelines on the cluster's two workers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: dict[Order, tuple[Pipeline, torch.Tensor, torch.Tensor]] = {}

    def run(self, order: Order) -> Steps:
        key = order._replace(steps=0)
        if key not in self._made:
            self._made[key] = self._make(order)
        pipe, x, y = self._made[key]
        seconds, losses, before = [], [], self._cpu()
        for _ in range(order.steps):
            begin = perf_counter()
            losses.append(pipe.step(x, y).loss)
            seconds.append(perf_counter() - begin)
        return Steps(seconds, losses, self._cpu() - before)

    def _cpu(self) -> float:
        workers: list[float] = [self._cluster.rpc_sync(name, time.process_time) for name in self._cluster.workers]
        return time.process_time() + sum(workers)

    def _make(self, order: Order) -> tuple[Pipeline, torch.Tensor, torch.Tensor]:
        made = work(order.model, order.seed, order.dtype)
        layers = [layer for stage in made.stages for layer in stage]
        stages = split(layers, self._cluster.workers, balance=[len(stage) for stage in made.stages])
        optimizer = (torch.optim.SGD, {"lr": RATE})
        return Pipeline(stages, order.schedule, MICROBATCHES, made.loss, optimizer), made.x, made.y


@contextlib.contextmanager
def theirs() -> Iterator[Side]:
    """`torch.distributed.pipelining`; its processes are gone afterwards."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="rpcbench-bench-") as directory:
        ends = [spawn.Pipe() for _ in range(2)]
        processes = [
            spawn.Process(target=_rank, args=(rank, f"{directory}/store", end[1]), daemon=True)
            for rank, end in enumerate(ends)
        ]
        for process in processes:
            process.start()
        try:
            yield Theirs([end[0] for end in ends])
        finally:
            for here, _ in ends:
                here.send(None)
            for process in processes:
                process.join(_PATIENCE)
                process.kill()


class Theirs:
    """Orders to the two processes; the last one has the losses."""

    def __init__(self, ends: list[Connection]) -> None:
        self._ends = ends

    def run(self, order: Order) -> Steps:
        for end in self._ends:
            end.send(order)
        found: list[Steps] = []
        for rank, end in enumerate(self._ends):
            if not end.poll(_PATIENCE):
                raise BenchError(f"torch.distributed.pipelining: rank {rank} has not answered in {_PATIENCE:.0f} s")
            found.append(end.recv())
        seconds = [max(pair) for pair in zip(*(each.seconds for each in found), strict=True)]
        return Steps(seconds, found[-1].losses, sum(each.cpu for each in found))


def _rank(rank: int, store: str, orders: Connection) -> None:
    """One of torch's processes, until it is told to end."""
    from torch import distributed

    warnings.filterwarnings("ignore", module=r"torch\.distributed")  # torch warns of its own use of itself
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    made: dict[Order, _TorchStage] = {}
    while (order := orders.recv()) is not None:
        key = order._replace(steps=0)
        if key not in made:
            made[key] = _TorchStage(rank, order)
        seconds, losses, before = [], [], time.process_time()
        for _ in range(order.steps):
            distributed.barrier()
            begin = perf_counter()
            losses.append(made[key].step())
            seconds.append(perf_counter() - begin)
        orders.send(Steps(seconds, losses, time.process_time() - before))
    distributed.destroy_process_group()


class _TorchStage:
    """What one of torch's processes has of a model."""

    def __init__(self, rank: int, order: Order) -> None:
        from torch.distributed import pipelining

        made = work(order.model, order.seed, order.dtype)
        self._rank, self._x, self._y = rank, made.x, made.y
        module = made.stages[rank]
        kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[order.schedule]
        stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
        self._schedule = kind(stage, MICROBATCHES, made.loss)
        self._optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def step(self) -> float:
        """The loss; of the first stage nothing is known of it, so 0."""
        losses: list[torch.Tensor] = []
        if self._rank == 0:
            self._schedule.step(self._x, return_outputs=False)
        else:
            self._schedule.step(target=self._y, losses=losses, return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / max(1, len(losses))
