"""Three jobs on four workers that take longer than they should, for lesson 32. Find out why before you read on here.

The stages of the pipelines sleep where real ones would compute, so that four workers need no four cores. The second job
computes.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from rpcbench import Cluster
from rpcbench.pipeline import Pipeline, StepResult, split
from rpcbench.testing import Faults, install

STAGE = 0.005  # seconds that a stage needs for the forward of a micro-batch; its backward needs twice that
SAMPLES, INPUTS, CLASSES = 9000, 16, 10  # of the second job; counting so many takes longer than a turn of a core


class Sleeps(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Stage(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleeps.apply(x * self.weight, self.seconds)


def pipeline(cluster: Cluster, microbatches: int, seconds: tuple[float, ...] = (STAGE,) * 4) -> StepResult:
    """Run steps of a pipeline whose stages need so long. Return the quickest, as the machine held up the others."""
    stages = split(nn.Sequential(*map(Stage, seconds)), cluster.workers, balance=[1] * len(seconds))
    pipe = Pipeline(stages, "1f1b", microbatches, loss_fn=F.mse_loss, optimizer=(torch.optim.SGD, {"lr": 0.0}))
    ones = torch.ones(microbatches, 1)
    results = [pipe.step(ones, ones) for _ in range(6)][2:]  # the first ones open the ways between the workers
    return min(results, key=lambda result: result.timeline.seconds)


# -- the jobs
def first_job(cluster: Cluster, microbatches: int = 3) -> StepResult:
    """A pipeline of four equal stages."""
    return pipeline(cluster, microbatches)


def second_job(cluster: Cluster, steps: int = 12, mended: bool = False) -> list[list[float]]:
    """Data parallel training. Returns, for each rank, when it came to the all-reduce of each step, in seconds."""
    return cluster.spmd(train, steps, mended)


def third_job(cluster: Cluster, mended: bool = False) -> StepResult:
    """The first job with more micro-batches."""
    cluster.run("worker2", f"import slow_jobs; slow_jobs.set_link({0.0 if mended else 0.020})")
    try:
        return pipeline(cluster, 8)
    finally:
        cluster.run("worker2", "slow_jobs.set_link(0.0)")


# -- their parts
def train(steps: int, mended: bool) -> list[float]:
    """Train a network of two layers on this rank's samples."""
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(SAMPLES, INPUTS), torch.randint(CLASSES, (SAMPLES,))
    model = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    came = []
    dist.barrier()  # all begin together
    for _ in range(steps):
        scores = model(x)
        F.cross_entropy(scores, y).backward()
        if dist.get_rank() == 2 and not mended:
            count_right(scores, y)
        came.append(time.monotonic())
        dist.all_reduce(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        model.zero_grad()
    return came


def count_right(scores: Tensor, y: Tensor) -> int:
    """How many answers are right. One by one; `(scores.argmax(1) == y).sum()` would do."""
    right = 0
    for guess, label in zip(scores.argmax(1), y, strict=True):
        right += (guess == label).item()
    return right


def set_link(seconds: float) -> None:
    """Hold back what this worker sends to worker3, by so many seconds."""
    faults = install(Faults())  # in place of earlier ones
    if seconds:
        faults.delay("Parcel", seconds, to=3)
