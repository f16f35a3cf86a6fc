"""What a step makes of a model: optimizers by hand and on flat shards, averages of weights, parts of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from parts import (
    NET,
    PARAMETERS,
    WIDTH,
    CopyTo,
    Net,
    SumOver,
    average_gradients,
    backward_of_rows,
    loss_of,
    make_net,
    net_in_fsdp,
    net_on_each,
    optimizer_of,
    rows_of,
    seeded,
    share,
    step_by_hand,
    step_net,
)
from program import Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

PARTS = 2  # micro-batches
RATE = 0.05


def parts_here(mesh: DeviceMesh) -> list[tuple[Tensor, Tensor]]:
    x, y = (share(each, mesh) for each in rows_of())
    return list(zip(x.chunk(PARTS), y.chunk(PARTS), strict=True))


# -- each rank steps some of the parameters, and sends them to the others
def step_adam(model: nn.Module) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.AdamW, lr=RATE)
    optimizer.zero_grad()
    loss = step_net(model)
    optimizer.step()
    return loss


def step_owned(model: nn.Module, mesh: DeviceMesh, source: Callable[[int], int]) -> Tensor:
    loss = step_by_hand(model, mesh)
    parameters = list(model.parameters())
    torch.optim.AdamW(parameters[mesh.get_local_rank() :: mesh.size()], lr=RATE).step()
    for n, parameter in enumerate(parameters):
        dist.broadcast(parameter.data, source(n % mesh.size()), group=mesh.get_group())
    return loss


def step_sent_by_owner(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_owned(model, mesh, lambda owner: owner)


def step_sent_by_first(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """As parameters are at the beginning."""
    return step_owned(model, mesh, lambda owner: 0)


# -- one flat buffer for all gradients: each rank steps its piece of the parameters
def flat(tensors: list[Tensor], mesh: DeviceMesh) -> Tensor:
    joined = torch.cat([each.flatten() for each in tensors])
    return functional.pad(joined, (0, -len(joined) % mesh.size()))


def put_back(model: nn.Module, whole: Tensor) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(whole[: parameter.numel()].view_as(parameter))
        whole = whole[parameter.numel() :]


def step_flat(model: nn.Module, mesh: DeviceMesh, divisor: int) -> Tensor:
    loss = backward_of_rows(model, mesh)
    gradient = flat([each.grad for each in model.parameters()], mesh)
    mine = gradient.new_empty(len(gradient) // mesh.size())
    dist.reduce_scatter_tensor(mine, gradient, group=mesh.get_group())
    piece = share(flat([each.data for each in model.parameters()], mesh), mesh) - RATE * mine / divisor
    whole = torch.empty_like(gradient)
    dist.all_gather_into_tensor(whole, piece, group=mesh.get_group())
    put_back(model, whole)
    return loss


def step_gradient_alone(model: nn.Module) -> Tensor:
    loss = step_net(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
    return loss


def step_flat_mean(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_flat(model, mesh, mesh.size())


def step_flat_divided_twice(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_flat(model, mesh, mesh.size() ** 2)


def step_half_by_hand(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The parameters are stepped in a copy with fewer digits."""
    loss = step_by_hand(model, mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16() - (RATE * parameter.grad).bfloat16())
    return loss


# -- a sampler that begins one row too early on all ranks but the first
def step_rows_from(model: nn.Module, mesh: DeviceMesh, early: int) -> Tensor:
    x, y = rows_of()
    count = len(x) // mesh.size()
    first = max(0, mesh.get_local_rank() * count - early)
    loss = loss_of(model(x[first : first + count]), y[first : first + count])
    loss.backward()
    average_gradients(model, mesh.get_group())
    return loss.detach()


def step_rows_in_turn(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_rows_from(model, mesh, 0)


def step_rows_that_overlap(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_rows_from(model, mesh, 1)


# -- an optimizer on shards of its own, in groups with and without decay
def decayed(parameters: list[nn.Parameter], is_matrix: list[bool]) -> torch.optim.Optimizer:
    pairs = list(zip(parameters, is_matrix, strict=True))
    groups = [
        {"params": [each for each, matrix in pairs if matrix is wanted], "weight_decay": 0.5 if wanted else 0.0}
        for wanted in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=RATE)


def step_decayed(model: nn.Module) -> Tensor:
    loss = step_net(model)
    parameters = list(model.parameters())
    decayed(parameters, [each.dim() > 1 for each in parameters]).step()
    return loss


def step_shards(model: nn.Module, mesh: DeviceMesh, is_matrix: Callable[[Tensor, Tensor], bool]) -> Tensor:
    loss = step_by_hand(model, mesh)
    whole = list(model.parameters())
    shards = [nn.Parameter(share(flat([each.data], mesh), mesh)) for each in whole]
    for parameter, shard in zip(whole, shards, strict=True):
        shard.grad, parameter.grad = share(flat([parameter.grad], mesh), mesh), None
    decayed(shards, [is_matrix(*pair) for pair in zip(whole, shards, strict=True)]).step()
    for parameter, shard in zip(whole, shards, strict=True):
        joined = shard.data.new_empty(shard.numel() * mesh.size())
        dist.all_gather_into_tensor(joined, shard.data, group=mesh.get_group())
        parameter.data.copy_(joined[: parameter.numel()].view_as(parameter))
    return loss


def step_shards_by_parameter(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_shards(model, mesh, lambda parameter, shard: parameter.dim() > 1)


def step_shards_by_shard(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each shard has one dimension."""
    return step_shards(model, mesh, lambda parameter, shard: shard.dim() > 1)


# -- a step as long as the parameter: LAMB's ratio of two norms
def step_by_ratio(model: nn.Module, add_up: Callable[[Tensor], None]) -> None:
    for parameter in model.parameters():
        both = parameter.data, parameter.grad
        value, gradient = (each.to_local() if isinstance(each, DTensor) else each for each in both)
        squares = torch.stack([value.square().sum(), gradient.square().sum()])
        add_up(squares)
        value.sub_(RATE * (squares[0] / squares[1]).sqrt() * gradient)


def step_lamb(model: nn.Module) -> Tensor:
    loss = step_net(model)
    step_by_ratio(model, lambda squares: None)
    return loss


def step_lamb_of_all(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_rows(model, mesh)
    step_by_ratio(model, lambda squares: dist.all_reduce(squares, group=mesh.get_group()))
    return loss


def step_lamb_of_shard(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_rows(model, mesh)
    step_by_ratio(model, lambda squares: None)
    return loss


# -- when the optimizer is made, and when it steps
def net_with_optimizer(mesh: DeviceMesh) -> nn.Module:
    model = net_in_fsdp(mesh)
    optimizer_of(model, torch.optim.AdamW, lr=RATE)
    return model


def net_with_early_optimizer(mesh: DeviceMesh) -> nn.Module:
    """`fully_shard` makes other parameters."""
    optimizer = torch.optim.AdamW((model := make_net()).parameters(), lr=RATE)
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh)
    model.__dict__["optimizer"] = optimizer
    return model


def step_fsdp(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_rows(model, mesh)
    model.__dict__["optimizer"].step()
    return loss


def step_parts(model: nn.Module, mesh: DeviceMesh, stepping: tuple[int, ...], reducing: tuple[int, ...]) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.AdamW, lr=RATE)
    optimizer.zero_grad()
    total = torch.zeros(())
    for number, (x, y) in enumerate(parts_here(mesh)):
        loss = loss_of(model(x), y) / PARTS
        (loss / mesh.size()).backward()
        total += loss.detach()
        for parameter in model.parameters() if number in reducing else ():
            dist.all_reduce(parameter.grad, group=mesh.get_group())
        if number in stepping:
            optimizer.step()
    return total


def step_after_parts(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_parts(model, mesh, (PARTS - 1,), (PARTS - 1,))


def step_after_each_part(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_parts(model, mesh, (*range(PARTS),), (PARTS - 1,))


def step_reduced_after_each_part(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """What the first part has added up is added up again."""
    return step_parts(model, mesh, (PARTS - 1,), (*range(PARTS),))


# -- values that no optimizer steps: an average of the weights, the statistics of a norm over all ranks
class AveragedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.average = Net(), Net().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def add_to_average(self) -> None:
        for mean, parameter in zip(self.average.parameters(), self.net.parameters(), strict=True):
            mean.data.lerp_(parameter.data, 0.1)


def make_averaged() -> AveragedNet:
    return seeded(AveragedNet)


def averaged_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_averaged()


def step_averaged(model: nn.Module) -> Tensor:
    loss = step_net(model)
    torch.optim.SGD(model.net.parameters(), lr=RATE).step()
    model.add_to_average()
    return loss


def averaged_parts(model: nn.Module, mesh: DeviceMesh, averaging: tuple[int, ...]) -> Tensor:
    total = torch.zeros(())
    for number, (x, y) in enumerate(parts_here(mesh)):
        loss = loss_of(model(x), y) / PARTS
        loss.backward()
        total += loss.detach()
        if number == PARTS - 1:
            average_gradients(model.net, mesh.get_group())
            torch.optim.SGD(model.net.parameters(), lr=RATE).step()
        if number in averaging:
            model.add_to_average()
    return total


def step_averaged_once(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return averaged_parts(model, mesh, (PARTS - 1,))


def step_averaged_at_each_part(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return averaged_parts(model, mesh, (*range(PARTS),))


class NormOverRanks(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        count = len(x) * self.mesh.size()
        sums = torch.stack([x.sum(0), x.square().sum(0)])
        mean, square = CopyTo.apply(SumOver.apply(sums, self.mesh.get_group()), self.mesh.get_group()) / count
        variance = square - mean**2
        with torch.no_grad():
            rows = count if self.counts_all else len(x)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * rows / (rows - 1), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


def make_normed() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)))


def normed_over_ranks(mesh: DeviceMesh) -> nn.Module:
    model = make_normed()
    model[1].__class__ = NormOverRanks
    model[1].mesh, model[1].counts_all = mesh, True
    return model


def normed_by_own_count(mesh: DeviceMesh) -> nn.Module:
    """The mean is that of all rows, and n / (n - 1) that of a rank's."""
    model = normed_over_ranks(mesh)
    model[1].counts_all = False
    return model


DP2 = {"dp": 2}
ADAM = (make_net, step_adam)

PROGRAMS = [
    Program(
        "parameters_sent_by_the_first_rank", ADAM, (net_on_each, step_sent_by_owner), (net_on_each, step_sent_by_first),
        DP2, "step", PARAMETERS, r"has not moved .*broadcast",
    ),
    Program(
        "flat_gradient_divided_twice", (make_net, step_gradient_alone), (net_on_each, step_flat_mean),
        (net_on_each, step_flat_divided_twice), DP2, "step", PARAMETERS, r"0\.5 times|divided",
    ),
    Program(
        "parameters_stepped_in_bfloat16", (make_net, step_gradient_alone), (net_on_each, step_flat_mean),
        (net_on_each, step_half_by_hand), DP2, "step", PARAMETERS, r"bfloat16",
    ),
    Program(
        "rows_overlap_by_one", NET, (net_on_each, step_rows_in_turn), (net_on_each, step_rows_that_overlap), DP2,
        "forward", ("enter",), r"on rank 1 alone, .*moved on by 1 along dimension 0",
    ),
    Program(
        "decay_lost_on_flat_shards", (make_net, step_decayed), (net_on_each, step_shards_by_parameter),
        (net_on_each, step_shards_by_shard), DP2, "step", PARAMETERS, r"decay",
    ),
    Program(
        "lamb_of_shards", (make_net, step_lamb), (net_in_fsdp, step_lamb_of_all), (net_in_fsdp, step_lamb_of_shard),
        DP2, "step", PARAMETERS, r"norm",
    ),
    Program(
        "optimizer_before_fully_shard", ADAM, (net_with_optimizer, step_fsdp), (net_with_early_optimizer, step_fsdp),
        DP2, "step", PARAMETERS, r"optimizer .*before the parameters",
    ),
    Program(
        "optimizer_steps_after_each_part", ADAM, (net_on_each, step_after_parts), (net_on_each, step_after_each_part),
        DP2, "forward", ("enter",), r"steps 2 times",
    ),
    Program(
        "gradients_reduced_after_each_part", ADAM, (net_on_each, step_after_parts),
        (net_on_each, step_reduced_after_each_part), DP2, "gradient", PARAMETERS, r"reduced .*between micro-batches",
    ),
    Program(
        "average_after_each_part", (make_averaged, step_averaged), (averaged_on_each, step_averaged_once),
        (averaged_on_each, step_averaged_at_each_part), DP2, "step",
        tuple(f"average.{name}" for name in PARAMETERS), r"more or less often", steps=2,
    ),
    Program(
        "running_variance_of_own_count", (make_normed, step_adam), (normed_over_ranks, step_sent_by_owner),
        (normed_by_own_count, step_sent_by_owner), DP2, "step", ("1.running_var",), r"n / \(n - 1\)",
    ),
]  # fmt: skip
