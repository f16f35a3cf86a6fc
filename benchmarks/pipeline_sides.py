"""Both sides of the comparison of pipelines: ours on a cluster of two workers, torch's in two processes over gloo.

- A side accepts orders (model, schedule, number of steps) and reports the seconds of each step and its loss. A side
  without an order waits for one and uses no CPU time. A step is forward, backward and optimizer; one thread computes.
- Models and data are made from a seed alone, so each process makes the same ones.
- `FixedCost` is a stage that takes a fixed time and computes next to nothing, so schedules can be compared with their
  simulation. Its forward sleeps once, its backward twice: once for the input, once for the weights.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from benchmarks.pairs import BenchError
from rpcbench.launch.cluster import Cluster
from rpcbench.pipeline import Pipeline, split
from rpcbench.pipeline.ops import Kind, Op


class _Input(Function):
    """Sleeps on the way there, and on the way back to the input."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class _Weight(Function):
    """Sleeps on the way back to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class FixedCost(nn.Module):
    """A stage whose forward takes so many seconds, its backward twice as many. Its output is of its input's shape."""

    def __init__(self, seconds: float, width: int = 4) -> None:
        super().__init__()
        self._seconds = seconds
        self.before, self.weight = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, value: Tensor) -> Tensor:
        # `before` makes the first stage, whose input needs no gradient, sleep as long as the others.
        way: Tensor = _Input.apply(value + self.before, self._seconds)  # type: ignore[no-untyped-call]
        branch: Tensor = _Weight.apply(self.weight, self._seconds)  # type: ignore[no-untyped-call]
        return way + branch


def cost(op: Op) -> float:
    """In units of a forward. The first stage makes no gradient of its input: all its backward is in its weights."""
    if op.kind is Kind.BACKWARD:
        return 2.0
    if op.stage == 0 and op.kind in (Kind.INPUT, Kind.WEIGHT):
        return 0.0 if op.kind is Kind.INPUT else 2.0
    return 1.0


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean()


MICROBATCHES = 8
RATE = 0.05
SCHEDULES = ("gpipe", "1f1b")
_LETTERS, _LENGTH, _WIDTH = 64, 32, 64


@dataclass(frozen=True, slots=True)
class Work:
    """A model as two stages, a batch with its targets, and the loss."""

    stages: tuple[nn.Sequential, nn.Sequential]
    x: Tensor
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


def mlp(dtype: torch.dtype = torch.float32) -> Work:
    """Eight linear layers of 256, and 256 samples."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())]
    stages = tuple(nn.Sequential(*layers[begin : begin + 8]).to(dtype) for begin in (0, 8))
    return Work(stages, torch.randn(256, 256, dtype=dtype), torch.randn(256, 256, dtype=dtype), functional.mse_loss)  # type: ignore[arg-type]


def transformer(dtype: torch.dtype = torch.float32) -> Work:
    """Four layers of 64 over letters, and 32 texts of 32 letters."""
    layers = [nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, 0.0, batch_first=True) for _ in range(4)]
    first = nn.Sequential(nn.Embedding(_LETTERS, _WIDTH), *layers[:2]).to(dtype)
    second = nn.Sequential(*layers[2:], nn.Linear(_WIDTH, _LETTERS)).to(dtype)
    texts = torch.randint(_LETTERS, (32, _LENGTH + 1))
    return Work((first, second), texts[:, :-1], texts[:, 1:], letters_loss)


def letters_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


MODELS: dict[str, Callable[[torch.dtype], Work]] = {"MLP": mlp, "transformer": transformer}


def work(model: str, seed: int, dtype: torch.dtype = torch.float32) -> Work:
    """The same wherever the seed is."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[model](dtype)


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
