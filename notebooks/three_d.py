"""3-D parallel training of a small network, for lesson 34: data, tensor and pipeline parallel at once, by hand.

The arithmetic and all communication are real: all-reduces of tensor parallel, messages between stages, all-reduces of
gradients. The matrices are small, and each layer *sleeps* for the time that a large one would compute, so that four
workers need no four cores. A layout changes no result: the lesson compares losses.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rpcbench.pipeline import schedule

LAYERS, WIDTH, HIDDEN = 4, 128, 512
ROWS = 32  # of a micro-batch
MICROBATCHES = 8  # of the whole batch
FORWARD = 0.004  # seconds that a whole layer computes in forward; backward takes twice that
PARAMETERS = LAYERS * 2 * WIDTH * HIDDEN


class Computes(torch.autograd.Function):
    """Sleeps where a large layer would compute."""

    @staticmethod
    def forward(ctx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Enter(torch.autograd.Function):
    """Into the part that tensor parallel has cut: each rank has only its part of the gradient, so backward adds up."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class Leave(torch.autograd.Function):
    """Out of it: each rank has its part of a sum, so forward adds up."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone()
    if dist.get_world_size(group) > 1:
        dist.all_reduce(x, group=group)
    return x


class Layer(nn.Module):
    """x + relu(x @ up) @ down, with this rank's columns of `up` and rows of `down` (lesson 23)."""

    def __init__(self, up: Tensor, down: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.up = nn.Parameter(up.chunk(ranks, dim=1)[rank].clone())
        self.down = nn.Parameter(down.chunk(ranks, dim=0)[rank].clone())
        self.group, self.seconds = group, FORWARD / ranks

    def forward(self, x: Tensor) -> Tensor:
        part = torch.relu(Enter.apply(x, self.group) @ self.up) @ self.down
        return x + Leave.apply(Computes.apply(part, self.seconds), self.group)


def weights() -> list[tuple[Tensor, Tensor]]:
    """The same on each rank."""
    seeded = torch.Generator().manual_seed(34)
    return [
        (torch.randn(WIDTH, HIDDEN, generator=seeded) / 12, torch.randn(HIDDEN, WIDTH, generator=seeded) / 23)
        for _ in range(LAYERS)
    ]


def batch() -> list[tuple[Tensor, Tensor]]:
    """The micro-batches: inputs and targets."""
    seeded = torch.Generator().manual_seed(43)
    x, y = (torch.randn(MICROBATCHES, ROWS, WIDTH, generator=seeded) for _ in range(2))
    return list(zip(x, y, strict=True))


def train(mesh: DeviceMesh, steps: int = 4, rate: float = 0.1) -> dict[str, float | list[float]]:
    """Train on this rank of a mesh with the dimensions dp, pp and tp.

    Returns: the loss of each step, the time of the quickest step but the first, and the parameters of this rank.
    """
    dp, pp = mesh["dp"].get_group(), mesh["pp"].get_group()
    stage, stages = dist.get_rank(pp), dist.get_world_size(pp)
    share = LAYERS // stages
    mine = weights()[stage * share : (stage + 1) * share]
    model = nn.Sequential(*[Layer(up, down, mesh["tp"].get_group()) for up, down in mine])
    own = batch()[dist.get_rank(dp) :: dist.get_world_size(dp)]
    losses, times = [], []
    for _ in range(steps):
        dist.barrier()
        began = time.monotonic()
        loss = run_stage(model, own, pp)
        for parameter in model.parameters():
            parameter.grad /= MICROBATCHES
        reduce_gradients(model, dp)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
                parameter.grad = None
        times.append(time.monotonic() - began)
        dist.all_reduce(loss, group=dp)
        dist.broadcast(loss, group=pp, group_src=stages - 1)
        losses.append(loss.item() / MICROBATCHES)
    return {
        "losses": losses,
        "seconds": min(times[1:]),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def run_stage(model: nn.Module, own: list[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> Tensor:
    """Run this stage's operations of a 1F1B schedule. Returns the sum of the losses on the last stage, elsewhere 0."""
    stage, stages = dist.get_rank(group), dist.get_world_size(group)
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    sends = []
    loss = torch.zeros(())
    for op in schedule("1f1b", workers=stages, microbatches=len(own)).ops[stage]:
        x, y = own[op.microbatch]
        if str(op.kind) == "F":
            if stage > 0:
                x = torch.empty_like(x)
                dist.recv(x, group=group, group_src=stage - 1)
                x.requires_grad_()
            out = model(x)
            if stage < stages - 1:
                sends.append(dist.isend(out.detach(), group=group, group_dst=stage + 1))
            else:
                out = (out - y).square().mean()
                loss += out.detach()
            kept[op.microbatch] = x, out
        else:
            x, out = kept.pop(op.microbatch)
            gradient = None
            if stage < stages - 1:
                gradient = torch.empty_like(out)
                dist.recv(gradient, group=group, group_src=stage + 1)
            out.backward(gradient)
            if stage > 0:
                sends.append(dist.isend(x.grad, group=group, group_dst=stage - 1))
    for send in sends:
        send.wait()
    return loss


def reduce_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Add up the gradients over the replicas, as one tensor."""
    if dist.get_world_size(group) == 1:
        return
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat, group=group)
    parts = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)


def alone(steps: int = 4, rate: float = 0.1) -> list[float]:
    """The losses of one process without any cut, and without sleeping."""
    layers = [(up.requires_grad_(), down.requires_grad_()) for up, down in weights()]
    losses = []
    for _ in range(steps):
        total = torch.zeros(())
        for x, y in batch():
            for up, down in layers:
                x = x + torch.relu(x @ up) @ down
            total = total + (x - y).square().mean()
        loss = total / MICROBATCHES
        loss.backward()
        with torch.no_grad():
            for each in (each for layer in layers for each in layer):
                each -= rate * each.grad
                each.grad = None
        losses.append(loss.item())
    return losses


def time_all_reduce(size: int, group: dist.ProcessGroup | None = None, times: int = 20) -> float:
    """The median time of an all-reduce of so many bytes, in seconds."""
    x = torch.ones(size // 4)
    took = []
    for _ in range(times + 3):
        dist.barrier(group)
        began = time.monotonic()
        dist.all_reduce(x.fill_(1.0), group=group)
        took.append(time.monotonic() - began)
    return statistics.median(took[3:])
