"""Rows that some ranks scale, drop or add otherwise: gates and capacity of experts, residuals, means over a count."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from parts import (
    LABELS,
    NET,
    PARAMETERS,
    WIDTH,
    WORDS,
    CopyTo,
    Feed,
    RowLinear,
    SumOver,
    average_gradients,
    backward_of_rows,
    cut_net,
    loss_of,
    net_on_each,
    rows_of,
    seeded,
    share,
    step_by_hand,
    step_net_on_ranks,
    sum_plainly,
    words_of,
)
from program import Program
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


# -- experts, of which each row takes the best one
class GatedExperts(nn.Module):
    """(rows, WIDTH): the best expert of each row, by its chance. It may have some of the experts only."""

    group: ProcessGroup | None = None
    power = 1  # of the gates
    capacity = 64  # rows of an expert

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(self.copy(x)).softmax(-1)
        gate, best = chances.max(-1)
        mixed = torch.zeros_like(x)
        for name, expert in self.experts.items():
            rows = (best == int(name)).nonzero()[: self.capacity, 0]
            mixed = mixed.index_add(0, rows, expert(self.copy(x)[rows]) * gate[rows, None] ** self.power)
        return mixed if self.group is None else SumOver.apply(mixed, self.group)

    def copy(self, x: Tensor) -> Tensor:
        return x if self.group is None else CopyTo.apply(x, self.group)


class ExpertNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gated, self.head = nn.Linear(WIDTH, WIDTH), GatedExperts(), nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gated(self.enter(x)))


def make_expert_net() -> ExpertNet:
    return seeded(ExpertNet)


def experts_on_ranks(mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Each rank has two of the experts, and all rows."""
    model = make_expert_net()
    first = 2 * mesh.get_local_rank()
    gated = model.gated
    here = {name: each for name, each in gated.experts.items() if first <= int(name) < first + 2}
    gated.experts = nn.ModuleDict(here)
    gated.group = mesh.get_group()
    for name, value in options.items():
        setattr(gated, name, value)
    return model


def experts_gated_twice(mesh: DeviceMesh) -> nn.Module:
    return experts_on_ranks(mesh, power=2)


def experts_without_gates(mesh: DeviceMesh) -> nn.Module:
    return experts_on_ranks(mesh, power=0)


def experts_of_less_capacity(mesh: DeviceMesh) -> nn.Module:
    return experts_on_ranks(mesh, capacity=1)


def step_many(model: nn.Module) -> Tensor:
    x, y = rows_of(12)
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def step_many_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = step_many(model)
    dist.all_reduce(model.gated.router.weight.grad, group=mesh.get_group())
    dist.all_reduce(model.gated.router.bias.grad, group=mesh.get_group())
    return loss


# -- the mean of each row's words, of which a rank has some
class Bag(nn.Module):
    """Words (rows, places) to the mean of their vectors; word 0 is padding."""

    group: ProcessGroup | None = None
    counts_here = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        there = (x > 8)[..., None].float()
        total, count = (self.embed(x) * there).sum(1), there.sum(1)
        if self.group is None:
            return total / count
        total, own = SumOver.apply(total, self.group), count.clamp(min=1)
        return total / (own if self.counts_here else sum_plainly(count, self.group))


class BagNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = Bag(), nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x))


def make_bags() -> BagNet:
    return seeded(BagNet)


def bags_in_pieces(mesh: DeviceMesh) -> nn.Module:
    model = make_bags()
    model.bag.group = mesh.get_group()
    return model


def bags_by_own_count(mesh: DeviceMesh) -> nn.Module:
    model = bags_in_pieces(mesh)
    model.bag.counts_here = True
    return model


def labels_of_bags() -> Tensor:
    return torch.tensor([0, 3, 1, 2])


def step_bags(model: nn.Module) -> Tensor:
    loss = loss_of(model(words_of()[0]), labels_of_bags())
    loss.backward()
    return loss.detach()


def step_bags_in_pieces(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = loss_of(model(share(words_of()[0], mesh, 1)), labels_of_bags())
    loss.backward()
    dist.all_reduce(model.bag.embed.weight.grad, group=mesh.get_group())
    return loss.detach()


# -- a residual
class FeedWithin(Feed):
    """The residual is added before the sum over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        part = functional.linear(functional.gelu(self.up(self.norm(x))), self.down.weight)
        return SumOver.apply(x + part, self.down.group) + self.down.bias


def net_with_residual_on_each(mesh: DeviceMesh) -> nn.Module:
    model = cut_net(mesh)
    model.blocks[1].__class__ = FeedWithin
    return model


# -- a reduction over some ranks only
def halves(mesh: DeviceMesh) -> ProcessGroup:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[dist.get_rank() // 2]


def step_in_halves(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_rows(model, mesh)
    average_gradients(model, halves(mesh))
    return loss


def step_without_last(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_rows(model, mesh)
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() < 3:
        average_gradients(model, group)
    return loss


def step_over_other_dimension(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    x, y = (each.chunk(4)[dist.get_rank()] for each in rows_of())
    loss = loss_of(model(x), y)
    loss.backward()
    average_gradients(model, mesh.get_group("shard"))
    return loss.detach()


def step_over_both(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    x, y = (each.chunk(4)[dist.get_rank()] for each in rows_of())
    loss = loss_of(model(x), y)
    loss.backward()
    for each in model.parameters():
        each.grad = sum_plainly(each.grad, None) / 4
    return loss.detach()


class RowLinearOfHalves(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        return SumOver.apply(functional.linear(x, self.weight), self.half) + self.bias


def net_with_sum_of_halves(mesh: DeviceMesh) -> nn.Module:
    model = cut_net(mesh)
    model.blocks[1].down.__class__, model.blocks[1].down.half = RowLinearOfHalves, halves(mesh)
    return model


# -- a state that goes from rank to rank
class Reader(nn.Module):
    """Words (rows, places) to labels, by the last state of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.memory, self.head = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, WORDS)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        read, state = self.memory(self.embed(x), state)
        return self.head(read), state


def make_reader() -> Reader:
    return seeded(Reader)


def reader_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_reader()


def step_reader(model: nn.Module) -> Tensor:
    x, y = words_of()
    loss = loss_of(model(x)[0], y)
    loss.backward()
    return loss.detach()


def step_reader_in_pieces(model: nn.Module, mesh: DeviceMesh, passes: bool = True) -> Tensor:
    """The state of the rank before comes by a message, and its gradient goes back."""
    rank, last, group = mesh.get_local_rank(), mesh.size() - 1, mesh.get_group()
    x, y = (share(each, mesh, 1) for each in words_of())
    state = torch.zeros(1, len(x), 8)
    if rank and passes:
        dist.recv(state, group=group, group_src=rank - 1)
    state.requires_grad_()
    scores, after = model(x, state)
    if rank < last and passes:
        dist.send(after.detach(), group=group, group_dst=rank + 1)
    loss = loss_of(scores, y)
    gradient = torch.zeros_like(after)
    if rank < last and passes:
        dist.recv(gradient, group=group, group_src=rank + 1)
    torch.autograd.backward([loss, after], [torch.ones(()), gradient])
    if rank and passes:
        dist.send(state.grad, group=group, group_dst=rank - 1)
    average_gradients(model, group)
    return loss.detach()


def step_reader_apart(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_reader_in_pieces(model, mesh, passes=False)


DP4, TP4, CP2, EP2 = {"dp": 4}, {"tp": 4}, {"cp": 2}, {"ep": 2}
EXPERTS, BAGS, READER = (make_expert_net, step_many), (make_bags, step_bags), (make_reader, step_reader)
BY_HAND, IN_TENSOR_PARALLEL = (net_on_each, step_by_hand), (cut_net, step_net_on_ranks)
ON_EXPERTS, IN_PIECES = (experts_on_ranks, step_many_on_ranks), (bags_in_pieces, step_bags_in_pieces)
OWN_FACTOR = "each row .* factor of its own"

PROGRAMS = [
    Program(
        "gates_applied_twice", EXPERTS, ON_EXPERTS, (experts_gated_twice, step_many_on_ranks), EP2, "forward",
        ("gated",), rf"{OWN_FACTOR}.*router, which is applied once more",
    ),
    Program(
        "gates_not_applied", EXPERTS, ON_EXPERTS, (experts_without_gates, step_many_on_ranks), EP2, "forward",
        ("gated",), rf"{OWN_FACTOR}.*router, which is not applied",
    ),
    Program(
        "experts_of_less_capacity", EXPERTS, ON_EXPERTS, (experts_of_less_capacity, step_many_on_ranks), EP2,
        "forward", ("gated.experts.0",), "1 of the 2 rows",
    ),
    Program(
        "mean_over_own_count", BAGS, IN_PIECES, (bags_by_own_count, step_bags_in_pieces), CP2, "forward", ("bag",),
        OWN_FACTOR,
    ),
    Program(
        "residual_on_each_rank", NET, IN_TENSOR_PARALLEL, (net_with_residual_on_each, step_net_on_ranks), TP4,
        "forward", ("blocks.1",), "the input of .*added 4 times",
    ),
    Program(
        "gradients_over_halves", NET, BY_HAND, (net_on_each, step_in_halves), DP4, "gradient", PARAMETERS,
        "some ranks only.*ranks 0 and 1, ranks 2 and 3; the mean",
    ),
    Program(
        "gradients_without_last_rank", NET, BY_HAND, (net_on_each, step_without_last), DP4, "gradient", PARAMETERS,
        "some ranks only.*ranks 0, 1 and 2, rank 3; the mean",
    ),
    Program(
        "gradients_over_shard_only", NET, (net_on_each, step_over_both), (net_on_each, step_over_other_dimension),
        {"replicate": 2, "shard": 2}, "gradient", PARAMETERS, "Average it over replicate",
    ),
    Program(
        "sum_of_halves", NET, IN_TENSOR_PARALLEL, (net_with_sum_of_halves, step_net_on_ranks), TP4, "forward",
        ("blocks.1.down",), "some ranks only.*ranks 0 and 1, ranks 2 and 3; the sum",
    ),
    Program(
        "state_not_passed", READER, (reader_on_each, step_reader_in_pieces), (reader_on_each, step_reader_apart), CP2,
        "forward", ("memory",), "empty state",
    ),
]  # fmt: skip
