"""Ranks that are not what they should be: one differs, replicas drift apart, random numbers agree or differ wrongly."""

from __future__ import annotations

import torch
from parts import (
    LABELS,
    NET,
    PARAMETERS,
    WIDTH,
    Net,
    backward_of_rows,
    cut_feeds,
    cut_net,
    make_net,
    net_in_ddp,
    net_on_each,
    optimizer_of,
    seeded,
    step_by_hand,
    step_net,
    step_net_on_ranks,
    sum_plainly,
)
from program import DIFFER, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


# -- parameters at the beginning
def net_with_stale_weight(mesh: DeviceMesh) -> nn.Module:
    """Rank 2 has read an older file."""
    model = make_net()
    if mesh.get_local_rank() == 2:
        with torch.no_grad():
            model.blocks[1].up.weight *= 0.9
    return model


def net_of_own_seed(mesh: DeviceMesh) -> nn.Module:
    """A seed for each rank is right for the order of rows, and wrong for parameters."""
    return seeded(Net, 17 + mesh.get_local_rank())


def cut_net_of_own_head(mesh: DeviceMesh) -> nn.Module:
    """The head is drawn after a rank has set its own seed for dropout."""
    model = cut_net(mesh)
    model.head = seeded(lambda: nn.Linear(WIDTH, LABELS), 17 + mesh.get_local_rank())
    return model


# -- hyperparameters
def net_of_other_eps(mesh: DeviceMesh) -> nn.Module:
    """The configuration on one host is older."""
    model = make_net()
    if mesh.get_local_rank() == 3:
        model.blocks[0].norm.eps = 1e-2
    return model


# -- optimizers
def step_adam(model: nn.Module) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.Adam, lr=0.01)
    optimizer.zero_grad()
    loss = step_net(model)
    optimizer.step()
    return loss


def adam_on_ranks(model: nn.Module, mesh: DeviceMesh, rate: float) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.Adam, lr=rate)
    optimizer.zero_grad()
    loss = step_by_hand(model, mesh)
    optimizer.step()
    return loss


def step_adam_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return adam_on_ranks(model, mesh, 0.01)


def step_adam_of_own_rate(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """One rank has not seen the end of the warm-up."""
    return adam_on_ranks(model, mesh, 0.005 if mesh.get_local_rank() == 1 else 0.01)


def step_momentum(model: nn.Module) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer.zero_grad()
    loss = step_net(model)
    optimizer.step()
    return loss


def step_momentum_in_ddp(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer.zero_grad()
    loss = backward_of_rows(model, mesh)
    optimizer.step()
    return loss


def step_momentum_unless_large(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """A rank leaves the step out when its own loss is a spike; others don't know."""
    optimizer = optimizer_of(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer.zero_grad()
    loss = backward_of_rows(model, mesh)
    if loss < 1.8:
        optimizer.step()
    return loss


def step_decay(model: nn.Module) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    optimizer.zero_grad()
    loss = step_net(model)
    optimizer.step()
    return loss


def step_decay_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    optimizer.zero_grad()
    loss = step_by_hand(model, mesh)
    optimizer.step()
    return loss


def step_decay_twice(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """A loop over parameters shrinks them, and so does AdamW."""
    optimizer = optimizer_of(model, torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    optimizer.zero_grad()
    loss = step_by_hand(model, mesh)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1 - 0.01 * 0.1)
    optimizer.step()
    return loss


# -- a buffer that is updated from counts
class Balanced(nn.Module):
    """Experts that are chosen by a score and a bias; the bias rises for those that get few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.register_buffer("balance", torch.zeros(4))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, LABELS) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chance = self.router(x).sigmoid()
        chosen = (chance + self.balance).argmax(-1)
        self.counts = chosen.bincount(minlength=4)
        answers = torch.stack([expert(x) for expert in self.experts], 1)
        kept = functional.one_hot(chosen, 4) * chance
        return (answers * kept[..., None]).sum(1)


def balance(model: nn.Module, counts: Tensor) -> None:
    model.balance += 0.5 * (counts.float().mean() - counts).sign()


def make_balanced() -> nn.Module:
    return seeded(Balanced)


def balanced_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_balanced()


def step_balance(model: nn.Module) -> Tensor:
    model.zero_grad()
    loss = step_net(model)
    balance(model, model.counts)
    return loss


def step_balance_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    model.zero_grad()
    loss = step_by_hand(model, mesh)
    balance(model, sum_plainly(model.counts, mesh.get_group("dp")))
    return loss


def step_balance_here(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each rank counts its own rows, so the buffers drift apart."""
    model.zero_grad()
    loss = step_by_hand(model, mesh)
    balance(model, model.counts)
    return loss


# -- dropout
class DropNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_drop() -> nn.Module:
    return seeded(DropNet)


def drop_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_drop()


def cut_drop(mesh: DeviceMesh) -> nn.Module:
    return cut_feeds(make_drop(), mesh.get_group("tp"))


def step_drop(model: nn.Module) -> Tensor:
    torch.manual_seed(3)
    return step_net(model)


def step_drop_of_own_seed(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    torch.manual_seed(3 + mesh.get_rank())
    return step_by_hand(model, mesh)


def step_drop_of_one_seed(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Ranks have other rows, and drop the same places of them."""
    torch.manual_seed(3)
    return step_by_hand(model, mesh)


def step_cut_drop(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    torch.manual_seed(3)
    return step_net(model)


def step_cut_drop_of_own_seed(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Ranks have the same rows, and drop other places of them."""
    torch.manual_seed(3 + mesh.get_rank())
    return step_net(model)


MASKS = r"dropout|mask|random"
DP4, TP4 = {"dp": 4}, {"tp": 4}
BY_HAND = (net_on_each, step_by_hand)

PROGRAMS = [
    Program(
        "stale_weight_on_rank_2", NET, BY_HAND, (net_with_stale_weight, step_by_hand), DP4, "initial",
        ("blocks.1.up.weight", "blocks.1.up"), DIFFER,
    ),
    Program(
        "seed_of_each_rank", NET, BY_HAND, (net_of_own_seed, step_by_hand), DP4, "initial", PARAMETERS, DIFFER,
    ),
    Program(
        "head_of_each_rank", NET, (cut_net, step_net_on_ranks), (cut_net_of_own_head, step_net_on_ranks), TP4,
        "initial", ("head.weight", "head.bias", "head"), DIFFER,
    ),
    Program(
        "other_eps_on_rank_3", NET, BY_HAND, (net_of_other_eps, step_by_hand), DP4, "forward",
        ("blocks.0.norm",), DIFFER,
    ),
    Program(
        "other_rate_on_rank_1", (make_net, step_adam), (net_on_each, step_adam_on_ranks),
        (net_on_each, step_adam_of_own_rate), DP4, "step", PARAMETERS, DIFFER, steps=2,
    ),
    Program(
        "optimizer_step_skipped_on_rank_0", (make_net, step_momentum), (net_in_ddp, step_momentum_in_ddp),
        (net_in_ddp, step_momentum_unless_large), DP4, "step", PARAMETERS, DIFFER,
    ),
    Program(
        "weight_decay_twice", (make_net, step_decay), (net_on_each, step_decay_on_ranks),
        (net_on_each, step_decay_twice), DP4, "step", PARAMETERS,
        r"decay|optimizer|update|step|times|twice|differ|fit",
    ),
    Program(
        "balance_of_each_rank", (make_balanced, step_balance), (balanced_on_each, step_balance_on_ranks),
        (balanced_on_each, step_balance_here), DP4, "step", ("balance",), rf"{DIFFER}|buffer|reduc|broadcast", steps=2,
    ),
    Program(
        "dropout_same_on_rows", (make_drop, step_drop), (drop_on_each, step_drop_of_own_seed),
        (drop_on_each, step_drop_of_one_seed), DP4, "forward", ("dropout",), MASKS,
    ),
    Program(
        "dropout_differs_in_tensor_parallel", (make_drop, step_drop), (cut_drop, step_cut_drop),
        (cut_drop, step_cut_drop_of_own_seed), TP4, "forward", ("dropout",), MASKS,
    ),
]  # fmt: skip
