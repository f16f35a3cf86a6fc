"""Data parallel: each rank of `dp` has its share of the rows, and gradients are averaged by DDP, by FSDP or by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parts import (
    LABELS,
    NET,
    PARAMETERS,
    WIDTH,
    Gather,
    Net,
    SumBothWays,
    backward_of_rows,
    cut_net,
    loss_of,
    make_net,
    net_in_ddp,
    net_in_fsdp,
    net_on_each,
    rows_of,
    seeded,
    share,
    step_by_hand,
    step_net,
    sum_plainly,
)
from program import REDUCE, TIMES, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


# -- right programs, from which wrong ones differ
# -- gradients: no reduction, two, and others than the mean over `dp`
def step_of_inner_module(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The call goes round the wrapper, so DDP does not reduce."""
    return backward_of_rows(model.module, mesh)


def step_reduced_twice(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """DDP has averaged, and a loop from the days before DDP adds up again."""
    loss = backward_of_rows(model, mesh)
    for each in model.parameters():
        dist.all_reduce(each.grad, group=mesh.get_group("dp"))
    return loss


def step_with_sum(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_rows(model, mesh)
    for each in model.parameters():
        dist.all_reduce(each.grad, group=mesh.get_group("dp"))
    return loss


def step_over_world_size(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_rows(model, mesh)
    for each in model.parameters():
        dist.all_reduce(each.grad, group=mesh.get_group("dp"))
        each.grad /= dist.get_world_size()
    return loss


def step_over_world(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The group of all ranks, where some have other parts of the layers."""
    loss = backward_of_rows(model, mesh)
    for each in model.parameters():
        dist.all_reduce(each.grad)
        each.grad /= dist.get_world_size()
    return loss


def cut_net_in_fsdp(mesh: DeviceMesh) -> nn.Module:
    model = fully_shard(cut_net(mesh), mesh=mesh["dp"])
    model.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return model


def cut_net_in_fsdp_divided(mesh: DeviceMesh) -> nn.Module:
    model = cut_net_in_fsdp(mesh)
    model.set_gradient_divide_factor(float(dist.get_world_size()))
    return model


# -- rows and losses
def step_same_rows(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """No sampler cuts the rows: each rank takes the first of them."""
    x, y = (each.chunk(mesh.size())[0] for each in rows_of())
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


IGNORED = torch.tensor([1, 2, 6])  # rows without a label


def rows_with_gaps() -> tuple[Tensor, Tensor]:
    x, y = rows_of()
    return x, y.index_fill(0, IGNORED, -100)


def step_gaps(model: nn.Module) -> Tensor:
    x, y = rows_with_gaps()
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def step_gaps_in_ddp(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """DDP divides by the ranks, so the sum here is divided by the mean count of labels on a rank."""
    x, y = (share(each, mesh) for each in rows_with_gaps())
    count = sum_plainly((y >= 0).sum(), mesh.get_group()) / mesh.size()
    loss = functional.cross_entropy(model(x), y, reduction="sum") / count
    loss.backward()
    return loss.detach()


def step_mean_of_means(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    x, y = (share(each, mesh) for each in rows_with_gaps())
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def step_metric(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The loss to be shown is that of all rows."""
    return sum_plainly(step_by_hand(model, mesh), mesh.get_group("dp")) / mesh["dp"].size()


def step_metric_of_world(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = step_by_hand(model, mesh)
    dist.all_reduce(loss)
    return loss / mesh["dp"].size()


# -- a loss in which each row meets all others
def contrast(here: Tensor, others: Tensor, first: int) -> Tensor:
    """Each row's first half shall be most like its own second half."""
    scores = here[:, :8] @ others[:, 8:].T
    return functional.cross_entropy(scores, torch.arange(first, first + len(here)))


def contrast_net() -> nn.Module:
    model = Net()
    model.head = nn.Linear(WIDTH, WIDTH)
    return model


def make_contrast() -> nn.Module:
    return seeded(contrast_net)


def contrast_in_ddp(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(make_contrast(), process_group=mesh.get_group("dp"))


def step_contrast(model: nn.Module) -> Tensor:
    vectors = model(rows_of()[0])
    loss = contrast(vectors, vectors, 0)
    loss.backward()
    return loss.detach()


def step_contrast_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    here = model(share(rows_of()[0], mesh))
    others = Gather.apply(here, mesh.get_group(), 0)
    loss = contrast(here, others, len(here) * mesh.get_local_rank())
    loss.backward()
    return loss.detach()


def step_contrast_plain(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """`dist.all_gather` has no backward: rows of other ranks are constants."""
    here = model(share(rows_of()[0], mesh))
    parts = [torch.empty_like(here) for _ in range(mesh.size())]
    dist.all_gather(parts, here.detach(), group=mesh.get_group())
    parts[mesh.get_local_rank()] = here
    loss = contrast(here, torch.cat(parts), len(here) * mesh.get_local_rank())
    loss.backward()
    return loss.detach()


# -- statistics over the batch
class BatchNorm(nn.Module):
    """Batch normalization with statistics for later, without weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean_over_rows(x)
        square = self.mean_over_rows((x - mean).square())
        self.running_mean.lerp_(mean.detach(), 0.1)
        return (x - mean) * torch.rsqrt(square + 1e-5)

    def mean_over_rows(self, x: Tensor) -> Tensor:
        return x.mean(0)


class SyncBatchNorm(BatchNorm):
    def mean_over_rows(self, x: Tensor) -> Tensor:
        return SumBothWays.apply(x.mean(0), self.group) / dist.get_world_size(self.group)


class BatchNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.batch_norm = BatchNorm()
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.gelu(self.batch_norm(self.enter(x))))


def make_batch_net() -> nn.Module:
    return seeded(BatchNet)


def batch_net_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_batch_net()


def batch_net_in_sync(mesh: DeviceMesh) -> nn.Module:
    model = make_batch_net()
    model.batch_norm.__class__, model.batch_norm.group = SyncBatchNorm, mesh.get_group("dp")
    return model


# -- a branch that some ranks don't take
class BranchNet(nn.Module):
    """Rows of the second kind, marked by their first number, have a head of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, LABELS)
        self.rare_head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        rare = x[:, 0] > 50
        y = functional.gelu(self.enter(x))
        scores = y.new_zeros(len(x), LABELS)
        for head, rows in ((self.head, ~rare), (self.rare_head, rare)):
            if rows.any():
                scores = scores.index_put((rows.nonzero()[:, 0],), head(y[rows]))
        return scores


def make_branches() -> nn.Module:
    return seeded(BranchNet)


def branches_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_branches()


def branches_in_ddp(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(make_branches(), process_group=mesh.get_group(), find_unused_parameters=True)


def branch_loss(model: nn.Module, rows: slice) -> Tensor:
    x, y = rows_of()
    x[1, 0] = 60.0
    loss = loss_of(model(x[rows]), y[rows])
    loss.backward()
    return loss.detach()


def step_branches(model: nn.Module) -> Tensor:
    return branch_loss(model, slice(None))


def step_branches_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    first = 2 * mesh.get_local_rank()
    return branch_loss(model, slice(first, first + 2))


def step_branches_skipped(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """All-reduce would hang where a rank has no gradient, so such parameters are left out."""
    loss = step_branches_on_ranks(model, mesh)
    for each in model.parameters():
        has = torch.tensor(each.grad is not None, dtype=torch.int32)
        dist.all_reduce(has, dist.ReduceOp.MIN, group=mesh.get_group())
        if has:
            dist.all_reduce(each.grad, group=mesh.get_group())
            each.grad /= mesh.size()
    return loss


DP4, DP_TP = {"dp": 4}, {"dp": 2, "tp": 2}
BY_HAND, IN_DDP = (net_on_each, step_by_hand), (net_in_ddp, backward_of_rows)
BY_HAND_CUT = (cut_net, step_by_hand)

PROGRAMS = [
    Program(
        "gradients_not_reduced", NET, BY_HAND, (net_on_each, backward_of_rows), DP4, "gradient", PARAMETERS, REDUCE,
    ),
    Program(
        "gradients_not_reduced_by_ddp", NET, IN_DDP, (net_in_ddp, step_of_inner_module), DP4, "gradient", PARAMETERS,
        REDUCE,
    ),
    Program(
        "gradients_reduced_twice", NET, IN_DDP, (net_in_ddp, step_reduced_twice), DP4, "gradient", PARAMETERS, TIMES,
    ),
    Program("gradients_summed", NET, BY_HAND, (net_on_each, step_with_sum), DP4, "gradient", PARAMETERS, TIMES),
    Program(
        "gradients_divided_by_world_size", NET, BY_HAND_CUT, (cut_net, step_over_world_size), DP_TP,
        "gradient", PARAMETERS, TIMES,
    ),
    Program(
        "gradients_divided_by_world_size_in_fsdp", NET, (cut_net_in_fsdp, backward_of_rows),
        (cut_net_in_fsdp_divided, backward_of_rows), DP_TP, "gradient", PARAMETERS, TIMES,
    ),
    Program(
        "gradients_over_world", NET, BY_HAND_CUT, (cut_net, step_over_world), DP_TP, "gradient",
        tuple(name for name in PARAMETERS if name.endswith((".up.weight", ".up.bias", ".down.weight"))),
        r"group|dimension|\btp\b|none of the ways|equal|same",
    ),
    Program(
        "same_rows_on_all_ranks", NET, (net_in_fsdp, backward_of_rows), (net_in_fsdp, step_same_rows), DP4, "forward",
        ("enter", ""), r"same|equal|row|input|batch|sampl",
    ),
    Program(
        "mean_of_means", (make_net, step_gaps), (net_in_ddp, step_gaps_in_ddp), (net_in_ddp, step_mean_of_means), DP4,
        "loss", ("loss", "head", ""), r"count|token|label|mean|weigh|normali|valid",
    ),
    Program(
        "loss_metric_over_world", NET, (cut_net, step_metric), (cut_net, step_metric_of_world),
        DP_TP, "loss", ("loss", "head", ""), TIMES,
    ),
    Program(
        "gather_without_backward", (make_contrast, step_contrast), (contrast_in_ddp, step_contrast_on_ranks),
        (contrast_in_ddp, step_contrast_plain), DP4, "backward", ("head", "loss", "blocks.1", ""),
        r"reduc|gather|summand|partial|none of the ways|differentia|backward",
    ),
    Program(
        "batch_norm_of_rank", (make_batch_net, step_net), (batch_net_in_sync, step_by_hand),
        (batch_net_on_each, step_by_hand), DP4, "forward", ("batch_norm",), r"statistic|batch|rows|norm",
    ),
    Program(
        "unused_branch_skipped", (make_branches, step_branches), (branches_in_ddp, step_branches_on_ranks),
        (branches_on_each, step_branches_skipped), DP4, "gradient",
        ("rare_head", "rare_head.weight", "rare_head.bias"), r"no gradient|without|some ranks|missing|reduc|lack",
    ),
]  # fmt: skip
