"""Values that are added on each rank before a sum over the ranks, pieces of other ranks, and norms that a stage or a
flat piece takes of itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from corpus_pipelining import layers_in_loops, make_deep, step_rows, step_rows_alone
from parts import (
    LIMIT,
    NET,
    PARAMETERS,
    WIDTH,
    ColumnLinear,
    Feed,
    SumOver,
    cut_net,
    loss_of,
    make_net,
    net_on_each,
    rows_of,
    seeded,
    step_net,
    step_net_on_ranks,
)
from program import Program
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


# -- in a block that reduces its own sum
class SummandLinear(nn.Module):
    """A linear layer of which each rank has some inputs; nobody adds its results up."""

    def __init__(self, whole: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(whole.weight.detach().chunk(count, 1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach() / count)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class SummingFeed(Feed):
    """Adds up what `down` returns."""

    group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        return x + SumOver.apply(self.down(functional.gelu(self.up(self.norm(x)))), self.group)


class EarlyResidualFeed(SummingFeed):
    """Adds the residual on each rank, before the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return SumOver.apply(x + self.down(functional.gelu(self.up(self.norm(x)))), self.group)


def make_plain() -> Any:
    model = seeded(lambda: nn.Sequential(Feed(), Feed(), nn.Linear(WIDTH, 5)))
    nn.init.zeros_(model[1].down.bias)
    return model


def cut_summing(mesh: DeviceMesh) -> Any:
    model, group = make_plain(), mesh.get_group("tp")
    feed = model[1]
    feed.__class__, feed.group = SummingFeed, group
    feed.up, down = ColumnLinear(feed.up, group), feed.down
    feed.down = SummandLinear(down, group)
    return model


def cut_with_early_residual(mesh: DeviceMesh) -> nn.Module:
    model = cut_summing(mesh)
    model[1].__class__ = EarlyResidualFeed
    return model


def step_plain(model: nn.Module) -> Tensor:
    rows, labels = rows_of()
    loss = loss_of(model(rows), labels)
    loss.backward()
    return loss


def step_plain_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_plain(model)


# -- pieces as they begin
def net_of_wide_weights(mesh: DeviceMesh) -> nn.Module:
    """A weight is scaled by the width of the rank's piece."""
    model = cut_net(mesh)
    with torch.no_grad():
        model.blocks[0].down.weight *= 2**0.5
    return model


def net_of_first_piece(mesh: DeviceMesh) -> nn.Module:
    """A broadcast runs over ranks that have different pieces."""
    model = cut_net(mesh)
    dist.broadcast(model.blocks[0].up.weight.data, 0)
    return model


def net_of_drawn_pieces(mesh: DeviceMesh) -> nn.Module:
    """Each rank draws its piece, with one seed."""
    model = cut_net(mesh)
    weight = model.blocks[0].up.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(8)))
    return model


# -- rows
def step_of_place(model: nn.Module, mesh: DeviceMesh, place: int) -> Tensor:
    rows, labels = (each.chunk(4)[place] for each in rows_of())
    loss = loss_of(model(rows), labels)
    loss.backward()
    for each in model.parameters():
        dist.all_reduce(each.grad)
        each.grad /= 4
    return loss


def step_of_both(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_of_place(model, mesh, dist.get_rank())


def step_of_shard(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Replicas read the same rows."""
    return step_of_place(model, mesh, mesh.get_local_rank("shard"))


def step_dealt(model: nn.Module, mesh: DeviceMesh, rank: int) -> Tensor:
    rows, labels = (each[rank::2] for each in rows_of())
    loss = loss_of(model(rows), labels)
    loss.backward()
    for each in model.parameters():
        dist.all_reduce(each.grad, group=mesh.get_group())
        each.grad /= 2
    return loss


def step_dealt_rows(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_dealt(model, mesh, mesh.get_local_rank())


def step_dealt_to_one(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each rank's sampler has rank 0."""
    return step_dealt(model, mesh, 0)


# -- norms of a part
def step_deep_clipped(model: nn.Module) -> Tensor:
    loss = step_rows_alone(model)
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT / 10)
    return loss


def step_stages_clipped(model: nn.Module, mesh: DeviceMesh) -> Tensor | None:
    loss = step_rows(model, mesh)
    square = nn.utils.get_total_norm([each.grad for each in model.parameters()]).square()
    dist.all_reduce(square, group=mesh.get_group("pp"))
    nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT / 10, square.sqrt())
    return loss


def step_stages_clipped_alone(model: nn.Module, mesh: DeviceMesh) -> Tensor | None:
    loss = step_rows(model, mesh)
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT / 10)
    return loss


# -- steps of a flat piece
@torch.no_grad()
def move(model: nn.Module, flat: Tensor) -> None:
    for each in model.parameters():
        each -= 0.1 * (flat[: each.numel()].view_as(each) + 0.01 * each)
        flat, each.grad = flat[each.numel() :], None


def step_flat(model: nn.Module) -> Tensor:
    loss = step_net(model)
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    optimizer.step()
    return loss


def step_flat_by_hand(model: nn.Module) -> Tensor:
    loss = step_net(model)
    gradients = [each.grad for each in model.parameters()]
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    with torch.no_grad():
        for each, gradient in zip(model.parameters(), gradients, strict=True):
            each -= 0.1 * gradient
            each.grad = None
    return loss


def reduce_flat(model: nn.Module, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The loss of a rank's rows, and the mean of the ranks' gradients in one row."""
    rows, labels = (each.chunk(mesh.size())[mesh.get_local_rank()] for each in rows_of())
    loss = loss_of(model(rows), labels)
    loss.backward()
    flat = torch.cat([each.grad.flatten() for each in model.parameters()])
    dist.all_reduce(flat, group=mesh.get_group())
    return loss.detach(), flat / mesh.size()


def step_flat_pieces(model: nn.Module, mesh: DeviceMesh, whole: bool) -> Tensor:
    loss, flat = reduce_flat(model, mesh)
    pieces = [flat] if whole else flat.tensor_split(mesh.size())
    flat = torch.cat([piece * (LIMIT / piece.norm()).clamp(max=1) for piece in pieces])
    with torch.no_grad():
        for each in model.parameters():
            each -= 0.1 * flat[: each.numel()].view_as(each)
            flat, each.grad = flat[each.numel() :], None
    return loss


def step_clipped_whole(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_flat_pieces(model, mesh, whole=True)


def step_clipped_pieces(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each piece of the flat gradient is clipped by its own norm."""
    return step_flat_pieces(model, mesh, whole=False)


def step_flat_mean(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss, flat = reduce_flat(model, mesh)
    move(model, flat * (LIMIT / flat.norm()).clamp(max=1))
    return loss


def step_flat_sum(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The division by the number of ranks is left out, after the clipping."""
    loss, flat = reduce_flat(model, mesh)
    move(model, mesh.size() * flat * (LIMIT / flat.norm()).clamp(max=1))
    return loss


TP2, DP2, TP4 = {"tp": 2}, {"dp": 2}, {"tp": 4}
IN_TENSOR_PARALLEL = (cut_net, step_net_on_ranks)
DEEP = tuple(name for name, _ in make_deep().named_parameters())

PROGRAMS = [
    Program(
        "residual_before_sum", (make_plain, step_plain), (cut_summing, step_plain_on_ranks),
        (cut_with_early_residual, step_plain_on_ranks), TP4, "forward", ("1",), r"input of 1\[0\]\[0\]: it is added 4",
    ),
    Program(
        "weight_of_wide_piece", NET, IN_TENSOR_PARALLEL, (net_of_wide_weights, step_net_on_ranks), TP2, "initial",
        ("blocks.0.down.weight",), r"1\.414 times",
    ),
    Program(
        "piece_of_first_rank", NET, IN_TENSOR_PARALLEL, (net_of_first_piece, step_net_on_ranks), TP2, "initial",
        ("blocks.0.up.weight",), "rank 1 has the piece of rank 0",
    ),
    Program(
        "pieces_of_one_seed", NET, IN_TENSOR_PARALLEL, (net_of_drawn_pieces, step_net_on_ranks), TP2, "initial",
        ("blocks.0.up.weight",), "each draws its own piece",
    ),
    Program(
        "rows_of_shard_alone", NET, (net_on_each, step_of_both), (net_on_each, step_of_shard),
        {"replica": 2, "shard": 2}, "forward", ("enter",), "rank 2 has the piece of rank 0, rank 3 that of rank 1",
    ),
    Program(
        "dealt_rows_of_rank_0", NET, (net_on_each, step_dealt_rows), (net_on_each, step_dealt_to_one), DP2, "forward",
        ("enter",), "the same rows, those of rank 0",
    ),
    Program(
        "stages_clipped_alone", (make_deep, step_deep_clipped), (layers_in_loops, step_stages_clipped),
        (layers_in_loops, step_stages_clipped_alone), {"pp": 2}, "gradient", DEEP, "clipped by a norm that each rank",
    ),
    Program(
        "flat_pieces_clipped_alone", (make_net, step_flat_by_hand), (net_on_each, step_clipped_whole),
        (net_on_each, step_clipped_pieces), DP2, "step", PARAMETERS, "ranges of the parameter|another length",
    ),
    Program(
        "flat_sum_with_decay", (make_net, step_flat), (net_on_each, step_flat_mean), (net_on_each, step_flat_sum), DP2,
        "step", PARAMETERS, "2 times as large",
    ),
]  # fmt: skip
