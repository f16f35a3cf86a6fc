"""More than one backward or less than float32: accumulation over micro-batches, scaled losses, autocast, bfloat16."""

from __future__ import annotations

import torch
import torch.distributed as dist
from corpus_data import rows_with_gaps, step_gaps
from corpus_tensor import ColumnLinearAlone, RowLinearAlone
from parts import (
    LIMIT,
    NET,
    PARAMETERS,
    backward_of_rows,
    cut_feeds,
    cut_net,
    loss_of,
    make_net,
    net_in_ddp,
    net_in_fsdp,
    net_on_each,
    optimizer_of,
    rows_of,
    share,
    step_by_hand,
    step_clipped,
    step_net,
    sum_plainly,
)
from program import REDUCE, TIMES, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

PARTS = 2  # micro-batches


# -- micro-batches
def parts_here(mesh: DeviceMesh) -> list[tuple[Tensor, Tensor]]:
    x, y = (share(each, mesh["dp"]) for each in rows_of())
    return list(zip(x.chunk(PARTS), y.chunk(PARTS), strict=True))


def accumulate(model: nn.Module, mesh: DeviceMesh, divisor: int) -> Tensor:
    """DDP reduces at the last micro-batch. Returns the mean loss."""
    total, parts = torch.zeros(()), parts_here(mesh)
    for number, (x, y) in enumerate(parts):
        model.require_backward_grad_sync = number == len(parts) - 1
        loss = loss_of(model(x), y)
        (loss / divisor).backward()
        total += loss.detach() / PARTS
    return total


def step_parts(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return accumulate(model, mesh, PARTS)


def step_parts_not_divided(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return accumulate(model, mesh, 1)


def step_parts_without_sync(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """`no_sync` is around all micro-batches, the last as well."""
    with model.no_sync():
        total = torch.zeros(())
        for x, y in parts_here(mesh):
            loss = loss_of(model(x), y)
            (loss / PARTS).backward()
            total += loss.detach() / PARTS
    return total


def step_parts_in_fsdp(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return accumulate_in_fsdp(model, mesh, PARTS - 1)


def step_parts_in_fsdp_without_sync(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The count begins at 0 and the comparison at 1, so the last micro-batch never comes."""
    return accumulate_in_fsdp(model, mesh, PARTS)


def accumulate_in_fsdp(model: nn.Module, mesh: DeviceMesh, last: int) -> Tensor:
    total = torch.zeros(())
    for number, (x, y) in enumerate(parts_here(mesh)):
        model.set_requires_gradient_sync(number == last)
        loss = loss_of(model(x), y) / PARTS
        loss.backward()
        total += loss.detach()
    return total


# -- micro-batches with other counts of labels
def step_gaps_by_count(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each micro-batch's sum is divided by the count of all labels; DDP divides by the ranks."""
    x, y = (share(each, mesh["dp"]) for each in rows_with_gaps())
    count = sum_plainly((y >= 0).sum(), mesh.get_group("dp")) / mesh["dp"].size()
    total = torch.zeros(())
    for number, (part, labels) in enumerate(zip(x.chunk(PARTS), y.chunk(PARTS), strict=True)):
        model.require_backward_grad_sync = number == PARTS - 1
        loss = functional.cross_entropy(model(part), labels, reduction="sum") / count
        loss.backward()
        total += loss.detach()
    return total


def step_gaps_by_part(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each micro-batch has a mean of its own."""
    x, y = (share(each, mesh["dp"]) for each in rows_with_gaps())
    total = torch.zeros(())
    for number, (part, labels) in enumerate(zip(x.chunk(PARTS), y.chunk(PARTS), strict=True)):
        model.require_backward_grad_sync = number == PARTS - 1
        loss = loss_of(model(part), labels) / PARTS
        loss.backward()
        total += loss.detach()
    return total


# -- two steps
def step_adagrad(model: nn.Module) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.Adagrad, lr=0.01)
    optimizer.zero_grad()
    loss = step_net(model)
    optimizer.step()
    return loss


def step_adagrad_in_fsdp(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.Adagrad, lr=0.01)
    optimizer.zero_grad()
    loss = backward_of_rows(model, mesh)
    optimizer.step()
    return loss


def step_without_zeroing(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The gradients of the step before are still there."""
    optimizer = optimizer_of(model, torch.optim.Adagrad, lr=0.01)
    loss = backward_of_rows(model, mesh)
    optimizer.step()
    return loss


# -- a scaled loss
SCALE = 1024.0


def backward_of_scaled(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    x, y = (share(each, mesh["dp"]) for each in rows_of())
    loss = loss_of(model(x), y)
    (loss * SCALE).backward()
    return loss.detach()


def unscale(model: nn.Module) -> None:
    for each in model.parameters():
        each.grad /= SCALE


def step_scaled(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_scaled(model, mesh)
    unscale(model)
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    return loss


def step_clipped_before_unscale(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_scaled(model, mesh)
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    unscale(model)
    return loss


# -- bfloat16
def net_in_fsdp_float32(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(make_net(), mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))


def net_in_fsdp_bfloat16(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(make_net(), mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def step_in_bfloat16(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Gradients travel in half as many bytes."""
    loss = backward_of_rows(model, mesh)
    for each in model.parameters():
        small = each.grad.bfloat16()
        dist.all_reduce(small, group=mesh.get_group("dp"))
        each.grad.copy_(small / mesh["dp"].size())
    return loss


def step_autocast(model: nn.Module) -> Tensor:
    x, y = rows_of()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def step_autocast_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_autocast(model)


def cut_net_without_reduce(mesh: DeviceMesh) -> nn.Module:
    model = cut_net(mesh)
    model.blocks[0].down.__class__ = RowLinearAlone
    return model


def make_small() -> nn.Module:
    return make_net().bfloat16()


def step_small(model: nn.Module) -> Tensor:
    x, y = rows_of()
    loss = loss_of(model(x.bfloat16()).float(), y)
    loss.backward()
    return loss.detach()


def step_small_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_small(model)


def cut_small(mesh: DeviceMesh) -> nn.Module:
    return cut_feeds(make_small(), mesh.get_group("tp"))


def cut_small_without_copy(mesh: DeviceMesh) -> nn.Module:
    model = cut_small(mesh)
    model.blocks[1].up.__class__ = ColumnLinearAlone
    return model


DP4, DP2, TP2 = {"dp": 4}, {"dp": 2}, {"tp": 2}

PROGRAMS = [
    Program(
        "accumulation_not_divided", NET, (net_in_ddp, step_parts), (net_in_ddp, step_parts_not_divided), DP2,
        "gradient", PARAMETERS, TIMES,
    ),
    Program(
        "accumulation_without_sync", NET, (net_in_ddp, step_parts), (net_in_ddp, step_parts_without_sync), DP2,
        "gradient", PARAMETERS, REDUCE,
    ),
    Program(
        "accumulation_without_sync_in_fsdp", NET, (net_in_fsdp, step_parts_in_fsdp),
        (net_in_fsdp, step_parts_in_fsdp_without_sync), DP2, "gradient", PARAMETERS,
        r"no gradient|without|missing|none|lack|reduc",
    ),
    Program(
        "accumulation_mean_of_means", (make_net, step_gaps), (net_in_ddp, step_gaps_by_count),
        (net_in_ddp, step_gaps_by_part), DP2, "loss", ("loss", "head", ""),
        r"count|token|label|mean|weigh|normali|valid",
    ),
    Program(
        "gradients_not_zeroed", (make_net, step_adagrad), (net_in_fsdp, step_adagrad_in_fsdp),
        (net_in_fsdp, step_without_zeroing), DP2, "gradient", PARAMETERS,
        r"zero|step before|previous|accumul|add|\bsum|fit|none of the ways", steps=2,
    ),
    Program(
        "clip_before_unscale", (make_net, step_clipped), (net_in_ddp, step_scaled),
        (net_in_ddp, step_clipped_before_unscale), DP2, "gradient", PARAMETERS, rf"norm|clip|{TIMES}",
    ),
    Program(
        "autocast_row_parallel_without_reduce", (make_net, step_autocast), (cut_net, step_autocast_on_ranks),
        (cut_net_without_reduce, step_autocast_on_ranks), TP2, "forward", ("blocks.0.down", "blocks.0"), REDUCE,
    ),
    Program(
        "bfloat16_column_parallel_without_copy", (make_small, step_small), (cut_small, step_small_on_ranks),
        (cut_small_without_copy, step_small_on_ranks), TP2, "backward",
        ("blocks.1.norm", "blocks.1.up", "blocks.0", "blocks.0.down", "blocks.1"), REDUCE,
    ),
    Program(
        "gradients_reduced_in_bfloat16", NET, (net_on_each, step_by_hand), (net_on_each, step_in_bfloat16), DP4,
        "gradient", PARAMETERS, r"bfloat16|bf16|precision|round|dtype",
    ),
    Program(
        "gradients_reduced_in_bfloat16_by_fsdp", NET, (net_in_fsdp_float32, backward_of_rows),
        (net_in_fsdp_bfloat16, backward_of_rows), DP4, "gradient", PARAMETERS, r"bfloat16|bf16|precision|round|dtype",
    ),
]  # fmt: skip
