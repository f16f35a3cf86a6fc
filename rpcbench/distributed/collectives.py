"""Collectives of tensors, with the names and rules of torch.distributed, of today and of 0.4, by torch's own groups.

Guarantees
- The ranks compare their calls before any tensor moves, as `comparison` describes. So tensors keep their dimension
  names.
- Each wait ends as described in `world`, and the error names a rank that has not come.
- With `async_op=True` the call returns at once, with a Work whose `wait` raises these errors. Operations of a group run
  in the order of the calls.
- Signatures stand here, with types, as most of torch's have none. Arguments that many functions have, results and
  errors are described in `arguments`; `help` shows both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as c10d
from torch.distributed import ReduceOp

from rpcbench.base.errors import count_noun
from rpcbench.distributed import groups
from rpcbench.distributed.arguments import accept_older_order, choose_rank, complete_help
from rpcbench.distributed.comparison import compare_exchange, op_fault, op_name, run_collective
from rpcbench.distributed.groups import AnyGroup, GroupMember
from rpcbench.distributed.memory_layouts import backend_fault, contiguous_view, layout_name, order_fault
from rpcbench.distributed.work import Work


@complete_help
def broadcast(
    tensor: torch.Tensor, src: int | None = None, group: AnyGroup = None, async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:  # fmt: skip
    """Copy the tensor of one rank into the tensors of all others, in place.

    `tensor` has one shape, dtype and order of dimensions in memory on all ranks, and no gaps.
    """
    member = groups.member_of(group)
    source, fault = choose_rank(member.ranks, src, group_src, "src")
    act = lambda: c10d.broadcast(contiguous_view(tensor), group=member.group, group_src=member.group_rank_of(source))  # noqa: E731
    return run_collective(member, f"broadcast(src={source})", [tensor], act, fault, async_op)


@complete_help
def all_reduce(
    tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Combine the tensors of all ranks; each gets the same result, to the last bit, in place.

    `tensor` has one shape and dtype on all ranks. It is dense, or with gloo and SUM sparse (`torch.sparse_coo`).
    """
    member = groups.member_of(group)
    act = lambda: c10d.all_reduce(contiguous_view(tensor), op, member.group)  # noqa: E731
    what = f"all_reduce({op_name(op)})"
    return run_collective(member, what, [tensor], act, op_fault(op, tensor), async_op, sparse=True)


@complete_help
def reduce(
    tensor: torch.Tensor, dst: int | None = None, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None,
    async_op: bool = False, group_dst: int | None = None,
) -> Work | None:  # fmt: skip
    """Combine the tensors of all ranks in that of `dst`, in place; the tensors of other ranks are undefined afterwards.

    `tensor` has one shape and dtype on all ranks.
    """
    member = groups.member_of(group)
    to, fault = choose_rank(member.ranks, dst, group_dst, "dst")
    act = lambda: c10d.reduce(contiguous_view(tensor), op=op, group=member.group, group_dst=member.group_rank_of(to))  # noqa: E731
    what = f"reduce({op_name(op)}, dst={to})"
    return run_collective(member, what, [tensor], act, fault or op_fault(op, tensor), async_op)


@complete_help
def all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Copy the tensor of each rank into `tensor_list`, on all ranks.

    `tensor_list` has one output for each rank of the group, with the shape and dtype of `tensor`.
    """
    member = groups.member_of(group)
    fault = _list_fault(tensor_list, tensor, member, "tensor_list")
    act = lambda: c10d.all_gather(list(map(contiguous_view, tensor_list)), contiguous_view(tensor), member.group)  # noqa: E731
    return run_collective(member, "all_gather", [tensor], act, fault, async_op, results=tensor_list)


@complete_help
def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Copy the tensor of each rank into one tensor, on all ranks.

    `output_tensor` has the inputs of all ranks in order, joined along their first dimension or stacked along a new one.
    `input_tensor` has one shape and dtype on all ranks.
    """
    member = groups.member_of(group)
    fault = _joined_fault(output_tensor, input_tensor, len(member.ranks), "output_tensor")

    def gather_flat() -> None:  # flat, as gloo refuses stacked outputs
        c10d.all_gather_into_tensor(output_tensor.view(-1), input_tensor.view(-1), member.group)

    what = "all_gather_into_tensor"
    return run_collective(member, what, [input_tensor], gather_flat, fault, async_op, results=[output_tensor])


all_gather_single = all_gather_into_tensor


@complete_help
@accept_older_order(1, "dst", "gather_list", "group")
def gather(
    tensor: torch.Tensor, gather_list: Sequence[torch.Tensor] | None = None, dst: int | None = None,
    group: AnyGroup = None, async_op: bool = False, group_dst: int | None = None,
) -> Work | None:  # fmt: skip
    """Copy the tensor of each rank into `gather_list` of one rank. The order (tensor, dst, gather_list) works, too.

    Only on `dst`, by default 0, `gather_list` has one output for each rank of the group, with the shape and dtype of
    `tensor`; elsewhere it is None or [].
    """
    member = groups.member_of(group)
    to, fault = choose_rank(member.ranks, dst, group_dst, "dst", default=0)
    fault = fault or _one_sided_fault(gather_list, tensor, member, to, "gather_list")
    into = None if not gather_list else list(map(contiguous_view, gather_list))
    act = lambda: c10d.gather(contiguous_view(tensor), into, group=member.group, group_dst=member.group_rank_of(to))  # noqa: E731
    return run_collective(member, f"gather(dst={to})", [tensor], act, fault, async_op, results=gather_list or ())


@complete_help
@accept_older_order(1, "src", "scatter_list", "group")
def scatter(
    tensor: torch.Tensor, scatter_list: Sequence[torch.Tensor] | None = None, src: int | None = None,
    group: AnyGroup = None, async_op: bool = False, group_src: int | None = None,
) -> Work | None:  # fmt: skip
    """Copy to each rank its tensor of one rank's `scatter_list`. The order (tensor, src, scatter_list) works, too.

    Only on `src`, by default 0, `scatter_list` has one tensor for each rank of the group, with the shape and dtype of
    the output `tensor`; elsewhere it is None or [].
    """
    member = groups.member_of(group)
    source, fault = choose_rank(member.ranks, src, group_src, "src", default=0)
    fault = fault or _one_sided_fault(scatter_list, tensor, member, source, "scatter_list")
    parts = None if not scatter_list else list(map(contiguous_view, scatter_list))
    root = member.group_rank_of(source)
    act = lambda: c10d.scatter(contiguous_view(tensor), parts, group=member.group, group_src=root)  # noqa: E731
    return run_collective(member, f"scatter(src={source})", [tensor], act, fault, async_op)


@complete_help
def reduce_scatter(
    output: torch.Tensor, input_list: Sequence[torch.Tensor], op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None, async_op: bool = False,
) -> Work | None:  # fmt: skip
    """Combine the lists of all ranks, tensor by tensor; each rank gets the result at its position in the group.

    `output` has one shape and dtype on all ranks; `input_list` has one such tensor for each rank of the group.
    """
    member = groups.member_of(group)
    fault = _list_fault(input_list, output, member, "input_list") or op_fault(op, output)
    act = lambda: c10d.reduce_scatter(contiguous_view(output), list(map(contiguous_view, input_list)), op, member.group)  # noqa: E731
    return run_collective(member, f"reduce_scatter({op_name(op)})", [output], act, fault, async_op)


@complete_help
def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:  # fmt: skip
    """Combine the tensors of all ranks; each rank gets one part of the result, that of its position in the group.

    `output` is the part, of one shape and dtype on all ranks. `input` has the parts for all ranks in order, joined
    along their first dimension or stacked along a new one.
    """
    member = groups.member_of(group)
    fault = _joined_fault(input, output, len(member.ranks), "input") or op_fault(op, output)
    act = lambda: c10d.reduce_scatter_tensor(output.view(-1), input.view(-1), op, member.group)  # noqa: E731
    what = f"reduce_scatter_tensor({op_name(op)})"
    return run_collective(member, what, [input], act, fault, async_op, results=[output])


reduce_scatter_single = reduce_scatter_tensor


@complete_help
def all_to_all(
    output_tensor_list: Sequence[torch.Tensor], input_tensor_list: Sequence[torch.Tensor], group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:  # fmt: skip
    """Send tensor j of each rank i to rank j, which gets it as its tensor i.

    `output_tensor_list` and `input_tensor_list` have one tensor for each rank of the group, of any sizes and of one
    dtype on all ranks. Each input has as many elements as the rank that gets it takes; else all ranks raise
    CollectiveError.
    """
    member = groups.member_of(group)
    outputs, inputs = list(output_tensor_list), list(input_tensor_list)
    fault = _count_fault(outputs, member, "output_tensor_list") or _count_fault(inputs, member, "input_tensor_list")
    fault = fault or _dtypes_fault([*outputs, *inputs], member)

    def exchange_lists() -> None:
        takes, gives = [each.numel() for each in outputs], [each.numel() for each in inputs]
        compare_exchange(member, gives, takes, "element")
        # As one tensor: gloo's own form for lists takes only tensors of one size.
        joined = outputs[0].new_empty(sum(takes))
        c10d.all_to_all_single(joined, torch.cat([each.reshape(-1) for each in inputs]), takes, gives, member.group)
        for into, part in zip(outputs, torch.split(joined, takes), strict=True):
            into.copy_(part.view_as(into))

    size = 0 if fault else sum(each.nbytes for each in inputs)
    what = "all_to_all" if fault else f"all_to_all of {_dtype_name(outputs[0])} lists"
    return run_collective(
        member, what, [], exchange_lists, fault, async_op, results=() if fault else outputs, size=size
    )


@complete_help
def all_to_all_single(
    output: torch.Tensor, input: torch.Tensor, output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None, group: AnyGroup = None, async_op: bool = False,
) -> Work | None:  # fmt: skip
    """Send part j of the tensor of each rank i to rank j, which gets it as part i of its output.

    `output` and `input` have the parts in order; dtype and all sizes but the first are the same on all ranks.
    `output_split_sizes` are the rows from each rank, `input_split_sizes` those for each rank; by default all parts are
    equal. If a rank sends another number of rows than the receiver takes, all ranks raise CollectiveError.
    """
    member, size = groups.member_of(group), len(groups.member_of(group).ranks)
    takes, output_fault = _check_splits(output, output_split_sizes, size, "output")
    gives, input_fault = _check_splits(input, input_split_sizes, size, "input")
    fault = output_fault or input_fault or _dtypes_fault([output, input], member) or order_fault(output, input)
    if not fault and _layout_of_rows(output) != _layout_of_rows(input):
        fault = f"output is {_layout_of_rows(output)}, and input {_layout_of_rows(input)}"

    def exchange_rows() -> None:
        compare_exchange(member, gives, takes, "row")
        c10d.all_to_all_single(output, input, takes, gives, member.group)

    what, sent = ("all_to_all_single", 0) if fault else (f"all_to_all_single of {_layout_of_rows(input)}", input.nbytes)
    return run_collective(
        member, what, [], exchange_rows, fault, async_op, results=() if fault else [output], size=sent
    )


@complete_help
def barrier(
    group: AnyGroup = None, async_op: bool = False, device_ids: object = None, timeout: float | timedelta | None = None
) -> Work | None:
    """Wait until all ranks of the group have called it.

    `device_ids` has no effect: ranks meet by tensors on the CPU.
    """
    return run_collective(groups.member_of(group), "barrier", [], _do_nothing, async_op=async_op, timeout=timeout)


@complete_help
def monitored_barrier(
    group: AnyGroup = None, timeout: float | timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks of the group have called it. The error names all ranks that have not come, on all ranks.

    So `wait_all_ranks` has no effect.
    """
    run_collective(groups.member_of(group), "monitored_barrier", [], _do_nothing, timeout=timeout)


def _do_nothing() -> None:
    """Do nothing: the comparison of the calls is the barrier."""


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _layout_of_rows(tensor: torch.Tensor) -> str:
    """Return the layout for any number of rows: `float32[*, 2]`."""
    return re.sub(r"\d+(?=[,\]])", "*", layout_name(tensor), count=1)


# Faults of lists and sizes; "" where there is none.
def _count_fault(tensors: Sequence[torch.Tensor], member: GroupMember, name: str) -> str:
    return "" if len(tensors) == len(member.ranks) else (
        f"{name} has {count_noun(len(tensors), 'tensor')} for a group of {len(member.ranks)}"
    )  # fmt: skip


def _list_fault(tensors: Sequence[torch.Tensor], tensor: torch.Tensor, member: GroupMember, name: str) -> str:
    """Return the fault of a list of one tensor for each rank, all with the layout of `tensor`."""
    if wrong := _count_fault(tensors, member, name):
        return wrong
    faults = [fault for each in tensors if (fault := backend_fault(member.backend, each))]
    others = [each for each in map(layout_name, tensors) if each != layout_name(tensor)]
    return next(iter([*faults, *(f"{name} has a {other} for {layout_name(tensor)}" for other in others)]), "")


def _one_sided_fault(
    tensors: Sequence[torch.Tensor] | None, tensor: torch.Tensor, member: GroupMember, where: int, name: str
) -> str:
    """Return the fault of a list that only rank `where` passes, as `_list_fault`."""
    me = member.world.rank
    if me != where:
        return f"{name} is for rank {where}, not for rank {me}" if tensors else ""
    return f"rank {me} passes no {name}" if tensors is None else _list_fault(tensors, tensor, member, name)


def _joined_fault(whole: object, part: object, size: int, name: str) -> str:
    """Return the fault of a tensor that shall hold a `part` for each of `size` ranks."""
    if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor):
        return ""  # `backend_fault` has the better message
    if wrong := order_fault(whole, part):
        return wrong
    joined = torch.Size([size * part.shape[0], *part.shape[1:]]) if part.dim() else torch.Size([size])
    if whole.dtype == part.dtype and whole.shape in (joined, torch.Size([size, *part.shape])):
        return ""
    return f"{name} is {layout_name(whole)}; for {size} ranks it must be {_dtype_name(part)}{list(joined)}"


def _dtypes_fault(tensors: Sequence[torch.Tensor], member: GroupMember) -> str:
    faults = [fault for each in tensors if (fault := backend_fault(member.backend, each))]
    if faults:
        return faults[0]
    found = sorted({_dtype_name(each) for each in tensors})
    return f"its tensors are of several dtypes: {', '.join(found)}" if len(found) > 1 else ""


def _check_splits(tensor: torch.Tensor, sizes: Sequence[int] | None, size: int, name: str) -> tuple[list[int], str]:
    """Return the rows of each part, and the fault of a tensor that shall be split into them."""
    if not isinstance(tensor, torch.Tensor) or not tensor.dim():
        return [], f"{name} is not a tensor of rows" if isinstance(tensor, torch.Tensor) else ""
    rows = tensor.shape[0]
    if sizes:  # torch takes an empty list for None
        if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
            return [], f"{name}_split_sizes={list(sizes)} do not split {rows} rows among {size} ranks"
        return list(sizes), ""
    if rows % size:
        return [], f"{name} has {count_noun(rows, 'row')}, which do not split evenly among {size} ranks"
    return [rows // size] * size, ""
