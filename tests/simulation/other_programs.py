"""Programs with the collectives that the course's recipes do not use: each a step for four ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

Step = Callable[[], Any]
WIDTH, ROWS = 32, 8


def perceptron() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def plain_calls(mesh: DeviceMesh) -> Step:
    """Each function of `torch.distributed` once."""
    me, size = dist.get_rank(), dist.get_world_size()

    def step() -> None:
        x, wide = torch.ones(4), torch.ones(4 * size)
        parts = [torch.ones(4) for _ in range(size)]
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 1)
        dist.reduce(x, 2)
        dist.all_gather(parts, x)
        dist.all_gather_single(wide, x)
        dist.reduce_scatter_single(x, wide)
        dist.reduce_scatter(x, parts)
        dist.gather(x, parts if me == 0 else None, 0)
        dist.scatter(x, parts if me == 0 else None, 0)
        dist.all_to_all_single(torch.empty(4 * size), wide)
        dist.all_to_all_single(torch.empty(4), x, [1] * size, [1] * size)
        dist.barrier()
        if me < 2:
            dist.send(x, 2 + me)
        else:
            dist.recv(x, me - 2)

    return step


def functional_calls(mesh: DeviceMesh) -> Step:
    """Each functional collective once, also those of several tensors."""
    group = mesh["dp"].get_group()

    def step() -> None:
        x = torch.ones(4, 4)
        found = [
            funcol.all_reduce(x, "sum", group),
            funcol.all_reduce(x, "max", group),
            funcol.broadcast(x, 0, group),
            funcol.all_gather_single(x, 1, group),
            funcol.reduce_scatter_single(x, "sum", 0, group),
            funcol.all_to_all_single(x, None, None, group),
            *funcol.all_reduce_coalesced([x, x], "sum", group),
            *funcol.all_gather_single_coalesced([x, x], group),
            *funcol.reduce_scatter_single_coalesced([x, x], "sum", [0, 0], group),
        ]
        for each in found:
            each + 1

    return step


def layouts(mesh: DeviceMesh) -> Step:
    """A DTensor, through its placements."""

    def step() -> None:
        x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
        x = x.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()])
        y = DTensor.from_local(torch.ones(8, 8), mesh, [Shard(1)], run_check=False)
        (y.sum() + (y @ y.t()).redistribute(placements=[Shard(0)]).sum()).full_tensor()
        x.mean().full_tensor()

    return step


def ddp_with_buffers(mesh: DeviceMesh) -> Step:
    """Buffers that DDP sends, several buckets, and a step of two micro-batches."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        with model.no_sync():
            model(torch.ones(ROWS, WIDTH)).sum().backward()
        model(torch.ones(ROWS, WIDTH)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp_in_bfloat16(mesh: DeviceMesh) -> Step:
    """Mixed precision, recomputed blocks, clipping, two micro-batches, and a hybrid mesh."""

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(Recomputed(), Recomputed())
    for each in model:
        fully_shard(each, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model(torch.ones(ROWS, WIDTH)).float().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def split_loss(mesh: DeviceMesh) -> Step:
    """Tensor parallel up to the loss."""
    model = parallelize_module(perceptron(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    head = parallelize_module(nn.Linear(WIDTH, 64), mesh, ColwiseParallel(use_local_output=False))

    def step() -> None:
        with loss_parallel():
            functional.cross_entropy(
                head(model(torch.ones(ROWS, WIDTH))), torch.ones(ROWS, dtype=torch.int64)
            ).backward()
        model.zero_grad()
        head.zero_grad()

    return step


def zero(mesh: DeviceMesh) -> Step:
    """The states of the optimizer are shared out, and its results sent."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: torch warns of its own script

    model = DistributedDataParallel(perceptron())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)

    def step() -> None:
        model(torch.ones(ROWS, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline(mesh: DeviceMesh) -> Step:
    """torch's own pipelining, one stage on each rank."""
    group, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    model = perceptron()
    stage = PipelineStage(model, rank, 4, torch.device("cpu"), *example(), group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=distance)
    return make_pipeline_step(schedule, [model], rank)


def interleaved_pipeline(mesh: DeviceMesh) -> Step:
    """Two stages on each rank."""
    group, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    models = [copy.deepcopy(perceptron()) for _ in range(2)]
    stages = [
        PipelineStage(model, rank + 4 * n, 8, torch.device("cpu"), *example(), group=group)
        for n, model in enumerate(models)
    ]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=distance)
    return make_pipeline_step(schedule, models, rank)


def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x - y).square().mean()  # `mse_loss` keeps the squares of a real tensor alive


def example() -> tuple[torch.Tensor, torch.Tensor]:
    """What a stage takes and returns: a simulated rank cannot ask the stage before."""
    return torch.ones(ROWS, WIDTH, requires_grad=True), torch.ones(ROWS, WIDTH, requires_grad=True)


def make_pipeline_step(schedule: Any, models: list[nn.Module], rank: int) -> Step:
    def step() -> None:
        x = [torch.ones(4 * ROWS, WIDTH)] if rank == 0 else []
        target = {"target": torch.ones(4 * ROWS, WIDTH)} if rank == 3 else {}
        schedule.step(*x, **target)
        for model in models:
            model.zero_grad()

    return step


PROGRAMS = {
    "plain_calls": (plain_calls, {"dp": 4}),
    "functional_calls": (functional_calls, {"dp": 4}),
    "layouts": (layouts, {"tp": 4}),
    "ddp_with_buffers": (ddp_with_buffers, {"dp": 4}),
    "fsdp_in_bfloat16": (fsdp_in_bfloat16, {"replicas": 2, "shards": 2}),
    "split_loss": (split_loss, {"tp": 4}),
    "zero": (zero, {"dp": 4}),
    "pipeline": (pipeline, {"pp": 4}),
    "interleaved_pipeline": (interleaved_pipeline, {"pp": 4}),
}
