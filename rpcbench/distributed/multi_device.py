"""The `*_multigpu` functions of torch.distributed 0.4: collectives of several tensors of each rank, one on each device.

Guarantees
- The lists have the same length on all ranks, and all their tensors one layout; else all ranks raise a CollectiveError.
- Each rank first combines its own tensors, and then the group combines the results. So they work on all devices of the
  backend, also on one device. torch has dropped them in favour of one process for each GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as c10d
from torch.distributed import ReduceOp

from rpcbench.base.errors import count_noun
from rpcbench.distributed import groups
from rpcbench.distributed.arguments import complete_help, rank_fault
from rpcbench.distributed.comparison import op_name, run_collective
from rpcbench.distributed.groups import AnyGroup
from rpcbench.distributed.memory_layouts import layout_name, order_fault

_COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # the ops that a rank can apply to its own tensors
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "PRODUCT": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
}


@complete_help
def broadcast_multigpu(tensor_list: Sequence[torch.Tensor], src: int, group: AnyGroup = None) -> None:
    """Copy `tensor_list[0]` of rank `src` into all tensors of all ranks: one on each device, all of one layout."""
    member = groups.member_of(group)
    what = f"broadcast_multigpu(src={src})"
    act = lambda: c10d.broadcast(tensor_list[0], group=member.group, group_src=member.group_rank_of(src))  # noqa: E731
    run_collective(member, what, tensor_list, act, _multigpu_fault(tensor_list) or rank_fault(member.ranks, src))
    _copy_first(tensor_list)


@complete_help
def all_reduce_multigpu(
    tensor_list: Sequence[torch.Tensor], op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None
) -> None:
    """Combine all tensors of all ranks; each of them gets the result.

    `tensor_list` has one tensor on each device, all of one layout. `op` is SUM, PRODUCT, MIN or MAX.
    """
    member = groups.member_of(group)

    def reduce_and_copy() -> None:
        tensor_list[0].copy_(_combine_tensors(tensor_list, op))
        c10d.all_reduce(tensor_list[0], op, member.group)
        _copy_first(tensor_list)

    run_collective(
        member, f"all_reduce_multigpu({op_name(op)})", tensor_list, reduce_and_copy, _multigpu_fault(tensor_list, op)
    )


@complete_help
def reduce_multigpu(
    tensor_list: Sequence[torch.Tensor], dst: int, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None
) -> None:
    """Combine all tensors of all ranks in `tensor_list[0]` of rank `dst`; other ranks' tensors do not change.

    `tensor_list` and `op` are as of `all_reduce_multigpu`.
    """
    member = groups.member_of(group)

    def reduce_to_dst() -> None:
        combined = _combine_tensors(tensor_list, op)
        c10d.reduce(combined, op=op, group=member.group, group_dst=member.group_rank_of(dst))
        if member.world.rank == dst:
            tensor_list[0].copy_(combined)

    wrong = _multigpu_fault(tensor_list, op) or rank_fault(member.ranks, dst)
    run_collective(member, f"reduce_multigpu({op_name(op)}, dst={dst})", tensor_list, reduce_to_dst, wrong)


@complete_help
def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]], input_tensor_list: Sequence[torch.Tensor],
    group: AnyGroup = None,
) -> None:  # fmt: skip
    """Copy tensor j of rank r into `output_tensor_lists[i][r * n + j]`, for each of the n lists, on all ranks.

    `input_tensor_list` has the n tensors of this rank, one on each device. Each of the n output lists has n tensors for
    each rank of the group, all of one layout.
    """
    member = groups.member_of(group)
    n, size = len(input_tensor_list), len(member.ranks)
    wrong = _multigpu_fault(input_tensor_list)
    if not wrong and [len(each) for each in output_tensor_lists] != [n * size] * n:
        wrong = f"output_tensor_lists must have {count_noun(n, 'list')} of {n * size} tensors"
    wrong = wrong or _multigpu_fault(
        [input_tensor_list[0], *(each for outputs in output_tensor_lists for each in outputs)]
    )

    def gather_and_copy() -> None:
        mine = torch.stack([each.to(input_tensor_list[0].device) for each in input_tensor_list])
        parts = [torch.empty_like(mine) for _ in range(size)]
        c10d.all_gather(parts, mine, member.group)
        for outputs in output_tensor_lists:
            for into, part in zip(outputs, torch.cat(parts), strict=True):
                into.copy_(part)

    run_collective(member, "all_gather_multigpu", input_tensor_list, gather_and_copy, wrong)


def _multigpu_fault(tensors: Sequence[torch.Tensor], op: object = ReduceOp.SUM) -> str:
    if not tensors:
        return "the list of tensors is empty"
    if len({layout_name(each) for each in tensors}) > 1:
        return "the tensors of a list must be alike"
    if wrong := order_fault(*tensors):
        return wrong
    return "" if op_name(op) in _COMBINE else f"{op_name(op)} is not supported: use one of {', '.join(_COMBINE)}"


def _combine_tensors(tensors: Sequence[torch.Tensor], op: object) -> torch.Tensor:
    return _COMBINE[op_name(op)](torch.stack([each.to(tensors[0].device) for each in tensors]))


def _copy_first(tensors: Sequence[torch.Tensor]) -> None:
    for each in tensors[1:]:
        each.copy_(tensors[0])
