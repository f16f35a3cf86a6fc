"""Gradients that are reduced over other ranks, by another operation, or after another step than in one process."""

from __future__ import annotations

import torch.distributed as dist
from parts import (
    LIMIT,
    LM,
    NET,
    PARAMETERS,
    WIDTH,
    Feed,
    Lm,
    average_gradients,
    backward_of_rows,
    cut_lm,
    cut_net,
    make_net,
    net_on_each,
    step_by_hand,
    step_clipped,
    step_lm_on_ranks,
    step_net_on_ranks,
)
from program import Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


# -- the reduction
def step_sent_by_first(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """A broadcast stands where the average should be."""
    loss = backward_of_rows(model, mesh)
    for each in model.parameters():
        dist.broadcast(each.grad, 0)
    return loss


def step_over_first_two(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Two of the ranks are in the group, and the others get what it has."""
    loss = backward_of_rows(model, mesh)
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        average_gradients(model, group)
    for each in model.parameters():
        dist.broadcast(each.grad, 0)
    return loss


def step_with_largest(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_rows(model, mesh)
    for each in model.parameters():
        dist.all_reduce(each.grad, op=dist.ReduceOp.MAX)
    return loss


def step_reduced_and_clipped(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = step_by_hand(model, mesh)
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    return loss


def step_clipped_and_reduced(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_rows(model, mesh)
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    average_gradients(model, mesh.get_group())
    return loss


def step_clipped_by_value(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = step_by_hand(model, mesh)
    nn.utils.clip_grad_value_(model.parameters(), LIMIT / 2)
    return loss


# -- what goes into a module, or does not come back from it
class FeedDetached(Feed):
    """What the norm gives out was gathered without a backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x).detach())))


class FeedOfNorm(Feed):
    """The residual is taken after the norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.down(functional.gelu(self.up(x)))


class NormAlone(nn.LayerNorm):
    """A kernel that knows no weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (WIDTH,))


def net_detached(mesh: DeviceMesh) -> nn.Module:
    model = cut_net(mesh)
    model.blocks[1].__class__ = FeedDetached
    return model


def net_with_residual_of_norm(mesh: DeviceMesh) -> nn.Module:
    model = cut_net(mesh)
    model.blocks[1].__class__ = FeedOfNorm
    return model


def net_of_plain_norm(mesh: DeviceMesh) -> nn.Module:
    model = cut_net(mesh)
    model.blocks[0].norm.__class__ = NormAlone
    return model


class LmWithoutPositions(Lm):
    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def lm_without_positions(mesh: DeviceMesh) -> nn.Module:
    model = cut_lm(mesh)
    model.__class__ = LmWithoutPositions
    return model


DP2, DP4, TP2 = {"dp": 2}, {"dp": 4}, {"tp": 2}
BY_HAND, IN_TENSOR_PARALLEL = (net_on_each, step_by_hand), (cut_net, step_net_on_ranks)
ALL = ("gradient", PARAMETERS)

PROGRAMS = [
    Program(
        "gradients_of_first_rank", NET, BY_HAND, (net_on_each, step_sent_by_first), DP4, *ALL,
        r"it has 1 of rank 0 on ranks 0, 1, 2 and 3, and the reference 0\.25 of rank 0 \+",
    ),
    Program(
        "gradients_of_first_two_ranks", NET, BY_HAND, (net_on_each, step_over_first_two), DP4, *ALL,
        r"it has 0\.5 of rank 0 \+ 0\.5 of rank 1 on",
    ),
    Program(
        "largest_gradients_of_ranks", NET, BY_HAND, (net_on_each, step_with_largest), DP4, *ALL, "operation MAX",
    ),
    Program(
        "gradients_clipped_before_average", (make_net, step_clipped), (net_on_each, step_reduced_and_clipped),
        (net_on_each, step_clipped_and_reduced), DP2, *ALL, "other weights.*a clipping",
    ),
    Program(
        "gradients_clipped_by_value", NET, BY_HAND, (net_on_each, step_clipped_by_value), DP2, *ALL,
        r"beyond 0\.05 are cut off",
    ),
    Program(
        "output_of_norm_detached", NET, IN_TENSOR_PARALLEL, (net_detached, step_net_on_ranks), TP2, "backward",
        ("blocks.0",), r"output of blocks\.1\.norm is right, and has no gradient",
    ),
    Program(
        "residual_of_norm", NET, IN_TENSOR_PARALLEL, (net_with_residual_of_norm, step_net_on_ranks), TP2, "forward",
        ("blocks.1",), r"input of blocks\.1\.up.* where the reference has the input of blocks\.1\[0\]",
    ),
    Program(
        "norm_without_weight", NET, IN_TENSOR_PARALLEL, (net_of_plain_norm, step_net_on_ranks), TP2, "forward",
        ("blocks.0.norm",), "weight and bias left out",
    ),
    Program(
        "positions_left_out", LM, (cut_lm, step_lm_on_ranks), (lm_without_positions, step_lm_on_ranks), TP2, "forward",
        ("blocks.0.norm",), "without the output of positions",
    ),
]  # fmt: skip
