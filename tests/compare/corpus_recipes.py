"""What stands around the model: wrappers, optimizers that are cut, samplers, and losses that look at a whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parts import (
    LABELS,
    NET,
    PARAMETERS,
    WIDTH,
    SumOver,
    average_gradients,
    backward_of_rows,
    cut_net,
    loss_of,
    make_net,
    net_in_ddp,
    net_in_fsdp,
    optimizer_of,
    rows_of,
    seeded,
    share,
    step_by_hand,
    step_net,
    sum_plainly,
)
from program import DIFFER, REDUCE, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


# -- wrappers that miss a part
def new_head() -> nn.Linear:
    return seeded(lambda: nn.Linear(WIDTH, LABELS), 18)


def make_tuned() -> nn.Module:
    """A trained net with a new head."""
    model = make_net()
    model.head = new_head()
    return model


def tuned_in_ddp(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(make_tuned(), process_group=mesh.get_group("dp"))


def tuned_after_ddp(mesh: DeviceMesh) -> nn.Module:
    """DDP knows the parameters that were there when it was made."""
    model = DistributedDataParallel(make_net(), process_group=mesh.get_group("dp"), find_unused_parameters=True)
    model.module.head = new_head()
    return model


def blocks_in_fsdp(mesh: DeviceMesh) -> nn.Module:
    """The blocks are cut; the layers around them are forgotten."""
    model = make_net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return model


# -- optimizers
def step_adam(model: nn.Module) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.Adam, lr=0.01)
    optimizer.zero_grad()
    loss = step_net(model)
    optimizer.step()
    return loss


def step_zero(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each rank has the state of some parameters, and sends what has become of them, two at a time."""
    return step_cut_adam(model, mesh, len(list(model.parameters())))


def step_zero_short(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The last two are never sent."""
    return step_cut_adam(model, mesh, len(list(model.parameters())) - 2)


def step_cut_adam(model: nn.Module, mesh: DeviceMesh, count: int) -> Tensor:
    parameters = list(model.parameters())
    mine = parameters[mesh.get_local_rank() :: mesh.size()]
    optimizer = optimizer_of(model, lambda _, lr: torch.optim.Adam(mine, lr=lr), lr=0.01)
    model.zero_grad()
    loss = backward_of_rows(model, mesh)
    optimizer.step()
    for first in range(0, count, 2):
        for number in (first, first + 1):
            dist.broadcast(parameters[number].data, group=mesh.get_group(), group_src=number % mesh.size())
    return loss


def step_sgd(model: nn.Module) -> Tensor:
    loss = step_net(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss


def step_sgd_in_ddp(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_rows(model, mesh)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss


def step_sgd_of_scaled_rate(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """A helper multiplies the rate by the ranks, for batches that grow with them; this one does not."""
    loss = backward_of_rows(model, mesh)
    torch.optim.SGD(model.parameters(), lr=0.1 * mesh.size()).step()
    return loss


# -- rows
def step_rows_of_world(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The sampler goes by the rank in the world, so ranks of `tp` have other rows."""
    x, y = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in rows_of())
    loss = loss_of(model(x), y)
    loss.backward()
    average_gradients(model, mesh.get_group("dp"))
    return loss.detach()


# -- losses that look at a whole batch
def rewards() -> Tensor:
    return torch.randn(8, generator=torch.Generator().manual_seed(9)) + torch.arange(8)


def policy_loss(scores: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
    chosen = scores.log_softmax(-1).gather(1, actions[:, None])[:, 0]
    return -(chosen * advantages).mean()


def step_policy(model: nn.Module) -> Tensor:
    (x, y), reward = rows_of(), rewards()
    loss = policy_loss(model(x), y, (reward - reward.mean()) / reward.std(correction=0))
    loss.backward()
    return loss.detach()


def step_policy_in_ddp(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    x, y, reward = (share(each, mesh) for each in (*rows_of(), rewards()))
    mean, square = (sum_plainly(each.mean(), mesh.get_group()) / mesh.size() for each in (reward, reward.square()))
    loss = policy_loss(model(x), y, (reward - mean) / (square - mean.square()).sqrt())
    loss.backward()
    return loss.detach()


def step_policy_of_rank(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The mean and the deviation are those of this rank's rewards."""
    x, y, reward = (share(each, mesh) for each in (*rows_of(), rewards()))
    loss = policy_loss(model(x), y, (reward - reward.mean()) / reward.std(correction=0))
    loss.backward()
    return loss.detach()


class Routed(nn.Module):
    """All experts answer, weighed by a router; `load` is how often each is the first choice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, LABELS) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.chance = self.router(x).softmax(-1)
        answers = torch.stack([expert(x) for expert in self.experts], 1)
        return (answers * self.chance[..., None]).sum(1)

    def load(self) -> Tensor:
        return functional.one_hot(self.chance.argmax(-1), 4).float().mean(0)


def make_routed() -> nn.Module:
    return seeded(Routed)


def routed_in_ddp(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(make_routed(), process_group=mesh.get_group("dp"))


def balance_loss(layer: Routed, load: Tensor) -> Tensor:
    return 4 * (load * layer.chance.mean(0)).sum()


def step_routed(model: nn.Module) -> Tensor:
    x, y = rows_of()
    loss = loss_of(model(x), y) + balance_loss(model, model.load())
    loss.backward()
    return loss.detach()


def step_routed_in_ddp(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The load is that of all ranks."""
    x, y = (share(each, mesh) for each in rows_of())
    loss = loss_of(model(x), y)
    loss = loss + balance_loss(model.module, sum_plainly(model.module.load(), mesh.get_group()) / mesh.size())
    loss.backward()
    return loss.detach()


def step_routed_of_rank(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """A mean of products is not the product of the means."""
    x, y = (share(each, mesh) for each in rows_of())
    loss = loss_of(model(x), y)
    loss = loss + balance_loss(model.module, model.module.load())
    loss.backward()
    return loss.detach()


# -- a penalty on all weights
def penalty(model: nn.Module) -> Tensor:
    return 0.1 * torch.stack([each.square().sum() for each in model.parameters()]).sum()


def step_penalty(model: nn.Module) -> Tensor:
    x, y = rows_of()
    loss = loss_of(model(x), y) + penalty(model)
    loss.backward()
    return loss.detach()


def step_penalty_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Squares of cut parameters add up; each rank's gradient is that of its own."""
    x, y = rows_of()
    parts, wholes = [], []
    for name, each in model.named_parameters():
        cut = name.endswith((".up.weight", ".up.bias", ".down.weight"))
        (parts if cut else wholes).append(each.square().sum())
    squares = SumOver.apply(torch.stack(parts).sum(), mesh.get_group("tp")) + torch.stack(wholes).sum()
    loss = loss_of(model(x), y) + 0.1 * squares
    loss.backward()
    return loss.detach()


def step_penalty_of_rank(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each rank has the squares of its own parts only: other losses, though the gradients are right."""
    return step_penalty(model)


DP4, DP2, TP2 = {"dp": 4}, {"dp": 2}, {"tp": 2}

PROGRAMS = [
    Program(
        "head_replaced_after_ddp", (make_tuned, step_net), (tuned_in_ddp, backward_of_rows),
        (tuned_after_ddp, backward_of_rows), DP4, "gradient", ("head", "head.weight", "head.bias"), REDUCE,
    ),
    Program(
        "root_not_sharded", NET, (net_in_fsdp, backward_of_rows), (blocks_in_fsdp, backward_of_rows), DP4, "gradient",
        ("head", "head.weight", "head.bias", "enter", "enter.weight", "enter.bias"), REDUCE,
    ),
    Program(
        "last_parameters_not_broadcast", (make_net, step_adam), (net_in_ddp, step_zero),
        (net_in_ddp, step_zero_short), DP4, "step", ("head", "head.weight", "head.bias"), rf"{DIFFER}|broadcast",
    ),
    Program(
        "rate_scaled_by_ranks", (make_net, step_sgd), (net_in_ddp, step_sgd_in_ddp),
        (net_in_ddp, step_sgd_of_scaled_rate), DP4, "step", PARAMETERS,
        r"rate|optimizer|update|step|times|factor|scal|fit",
    ),
    Program(
        "rows_of_rank_in_world", NET, (cut_net, step_by_hand), (cut_net, step_rows_of_world), {"dp": 2, "tp": 2},
        "forward", ("enter", "blocks.0", "blocks.0.norm", "blocks.0.up", "blocks.0.down"),
        rf"row|input|batch|{DIFFER}|{REDUCE}",
    ),
    Program(
        "advantages_of_each_rank", (make_net, step_policy), (net_in_ddp, step_policy_in_ddp),
        (net_in_ddp, step_policy_of_rank), DP2, "loss", ("loss", "head", ""),
        r"fit|none of the ways|loss|mean|statistic|normali",
    ),
    Program(
        "balance_loss_of_each_rank", (make_routed, step_routed), (routed_in_ddp, step_routed_in_ddp),
        (routed_in_ddp, step_routed_of_rank), DP4, "loss", ("loss", ""), r"fit|none of the ways|loss|mean|count",
    ),
    Program(
        "penalty_of_each_rank", (make_net, step_penalty), (cut_net, step_penalty_on_ranks),
        (cut_net, step_penalty_of_rank), TP2, "loss", ("loss", ""), rf"{DIFFER}|{REDUCE}|fit|none of the ways",
    ),
]  # fmt: skip
