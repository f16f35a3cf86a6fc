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

from rpcbench.base.errors import counted
from rpcbench.distributed import groups
from rpcbench.distributed.arguments import accept_older_order, choose_rank, complete_help
from rpcbench.distributed.comparison import compare_exchange, op_fault, op_name, run_collective
from rpcbench.distributed.groups import AnyGroup, GroupMember
from rpcbench.distributed.memory_layouts import backend_fault, flat, layout_name, order_fault
from rpcbench.distributed.work import Work


@complete_help
def broadcast(
    tensor: torch.Tensor, src: int | None = None, group: AnyGroup = None, async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:  # fmt: skip
    """Copy the tensor of one rank into the tensors of all others, in place.

    `tensor` has one shape, dtype and order of dimensions in memory on all ranks, and no gaps.
    """
    end = groups.member(group)
    source, fault = choose_rank(end.ranks, src, group_src, "src")
    act = lambda: c10d.broadcast(flat(tensor), group=end.group, group_src=end.place_of(source))  # noqa: E731
    return run_collective(end, f"broadcast(src={source})", [tensor], act, fault, async_op)


@complete_help
def all_reduce(
    tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Combine the tensors of all ranks; each gets the same result, to the last bit, in place.

    `tensor` has one shape and dtype on all ranks. It is dense, or with gloo and SUM sparse (`torch.sparse_coo`).
    """
    end = groups.member(group)
    act = lambda: c10d.all_reduce(flat(tensor), op, end.group)  # noqa: E731
    what = f"all_reduce({op_name(op)})"
    return run_collective(end, what, [tensor], act, op_fault(op, tensor), async_op, sparse=True)


@complete_help
def reduce(
    tensor: torch.Tensor, dst: int | None = None, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None,
    async_op: bool = False, group_dst: int | None = None,
) -> Work | None:  # fmt: skip
    """Combine the tensors of all ranks in that of `dst`, in place; the tensors of other ranks are undefined afterwards.

    `tensor` has one shape and dtype on all ranks.
    """
    end = groups.member(group)
    to, fault = choose_rank(end.ranks, dst, group_dst, "dst")
    act = lambda: c10d.reduce(flat(tensor), op=op, group=end.group, group_dst=end.place_of(to))  # noqa: E731
    what = f"reduce({op_name(op)}, dst={to})"
    return run_collective(end, what, [tensor], act, fault or op_fault(op, tensor), async_op)


@complete_help
def all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Copy the tensor of each rank into `tensor_list`, on all ranks.

    `tensor_list` has one output for each rank of the group, with the shape and dtype of `tensor`.
    """
    end = groups.member(group)
    fault = _list_fault(tensor_list, tensor, end, "tensor_list")
    act = lambda: c10d.all_gather(list(map(flat, tensor_list)), flat(tensor), end.group)  # noqa: E731
    return run_collective(end, "all_gather", [tensor], act, fault, async_op, results=tensor_list)


@complete_help
def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: AnyGroup = None, async_op: bool = False
) -> Work | None:
    """Copy the tensor of each rank into one tensor, on all ranks.

    `output_tensor` has the inputs of all ranks in order, joined along their first dimension or stacked along a new one.
    `input_tensor` has one shape and dtype on all ranks.
    """
    end = groups.member(group)
    fault = _joined_fault(output_tensor, input_tensor, len(end.ranks), "output_tensor")

    def act() -> None:  # flat, as gloo refuses stacked outputs
        c10d.all_gather_into_tensor(output_tensor.view(-1), input_tensor.view(-1), end.group)

    what = "all_gather_into_tensor"
    return run_collective(end, what, [input_tensor], act, fault, async_op, results=[output_tensor])


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
    end = groups.member(group)
    to, fault = choose_rank(end.ranks, dst, group_dst, "dst", default=0)
    fault = fault or _one_sided_fault(gather_list, tensor, end, to, "gather_list")
    into = None if not gather_list else list(map(flat, gather_list))
    act = lambda: c10d.gather(flat(tensor), into, group=end.group, group_dst=end.place_of(to))  # noqa: E731
    return run_collective(end, f"gather(dst={to})", [tensor], act, fault, async_op, results=gather_list or ())


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
    end = groups.member(group)
    source, fault = choose_rank(end.ranks, src, group_src, "src", default=0)
    fault = fault or _one_sided_fault(scatter_list, tensor, end, source, "scatter_list")
    parts = None if not scatter_list else list(map(flat, scatter_list))
    act = lambda: c10d.scatter(flat(tensor), parts, group=end.group, group_src=end.place_of(source))  # noqa: E731
    return run_collective(end, f"scatter(src={source})", [tensor], act, fault, async_op)


@complete_help
def reduce_scatter(
    output: torch.Tensor, input_list: Sequence[torch.Tensor], op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: AnyGroup = None, async_op: bool = False,
) -> Work | None:  # fmt: skip
    """Combine the lists of all ranks, tensor by tensor; each rank gets the result at its position in the group.

    `output` has one shape and dtype on all ranks; `input_list` has one such tensor for each rank of the group.
    """
    end = groups.member(group)
    fault = _list_fault(input_list, output, end, "input_list") or op_fault(op, output)
    act = lambda: c10d.reduce_scatter(flat(output), list(map(flat, input_list)), op, end.group)  # noqa: E731
    return run_collective(end, f"reduce_scatter({op_name(op)})", [output], act, fault, async_op)


@complete_help
def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None,
    async_op: bool = False,
) -> Work | None:  # fmt: skip
    """Combine the tensors of all ranks; each rank gets one part of the result, that of its position in the group.

    `output` is the part, of one shape and dtype on all ranks. `input` has the parts for all ranks in order, joined
    along their first dimension or stacked along a new one.
    """
    end = groups.member(group)
    fault = _joined_fault(input, output, len(end.ranks), "input") or op_fault(op, output)
    act = lambda: c10d.reduce_scatter_tensor(output.view(-1), input.view(-1), op, end.group)  # noqa: E731
    what = f"reduce_scatter_tensor({op_name(op)})"
    return run_collective(end, what, [input], act, fault, async_op, results=[output])


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
    end = groups.member(group)
    outputs, inputs = list(output_tensor_list), list(input_tensor_list)
    fault = _count_fault(outputs, end, "output_tensor_list") or _count_fault(inputs, end, "input_tensor_list")
    fault = fault or _dtypes_fault([*outputs, *inputs], end)

    def act() -> None:
        takes, gives = [each.numel() for each in outputs], [each.numel() for each in inputs]
        compare_exchange(end, gives, takes, "element")
        # As one tensor: gloo's own form for lists takes only tensors of one size.
        joined = outputs[0].new_empty(sum(takes))
        c10d.all_to_all_single(joined, torch.cat([each.reshape(-1) for each in inputs]), takes, gives, end.group)
        for into, part in zip(outputs, torch.split(joined, takes), strict=True):
            into.copy_(part.view_as(into))

    size = 0 if fault else sum(each.nbytes for each in inputs)
    what = "all_to_all" if fault else f"all_to_all of {_dtype_name(outputs[0])} lists"
    return run_collective(end, what, [], act, fault, async_op, results=() if fault else outputs, size=size)


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
    end, size = groups.member(group), len(groups.member(group).ranks)
    takes, output_fault = _check_splits(output, output_split_sizes, size, "output")
    gives, input_fault = _check_splits(input, input_split_sizes, size, "input")
    fault = output_fault or input_fault or _dtypes_fault([output, input], end) or order_fault(output, input)
    if not fault and _layout_of_rows(output) != _layout_of_rows(input):
        fault = f"output is {_layout_of_rows(output)}, and input {_layout_of_rows(input)}"

    def act() -> None:
        compare_exchange(end, gives, takes, "row")
        c10d.all_to_all_single(output, input, takes, gives, end.group)

    what, sent = ("all_to_all_single", 0) if fault else (f"all_to_all_single of {_layout_of_rows(input)}", input.nbytes)
    return run_collective(end, what, [], act, fault, async_op, results=() if fault else [output], size=sent)


@complete_help
def barrier(
    group: AnyGroup = None, async_op: bool = False, device_ids: object = None, timeout: float | timedelta | None = None
) -> Work | None:
    """Wait until all ranks of the group have called it.

    `device_ids` has no effect: ranks meet by tensors on the CPU.
    """
    return run_collective(groups.member(group), "barrier", [], _do_nothing, async_op=async_op, timeout=timeout)


@complete_help
def monitored_barrier(
    group: AnyGroup = None, timeout: float | timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks of the group have called it. The error names all ranks that have not come, on all ranks.

    So `wait_all_ranks` has no effect.
    """
    run_collective(groups.member(group), "monitored_barrier", [], _do_nothing, timeout=timeout)


def _do_nothing() -> None:
    """Do nothing: the comparison of the calls is the barrier."""


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _layout_of_rows(tensor: torch.Tensor) -> str:
    """Return the layout for any number of rows: `float32[*, 2]`."""
    return re.sub(r"\d+(?=[,\]])", "*", layout_name(tensor), count=1)


# Faults of lists and sizes; "" where there is none.
def _count_fault(tensors: Sequence[torch.Tensor], end: GroupMember, name: str) -> str:
    return "" if len(tensors) == len(end.ranks) else (
        f"{name} has {counted(len(tensors), 'tensor')} for a group of {len(end.ranks)}"
    )  # fmt: skip


def _list_fault(tensors: Sequence[torch.Tensor], tensor: torch.Tensor, end: GroupMember, name: str) -> str:
    """Return the fault of a list of one tensor for each rank, all with the layout of `tensor`."""
    if wrong := _count_fault(tensors, end, name):
        return wrong
    faults = [fault for each in tensors if (fault := backend_fault(end.backend, each))]
    others = [each for each in map(layout_name, tensors) if each != layout_name(tensor)]
    return next(iter([*faults, *(f"{name} has a {other} for {layout_name(tensor)}" for other in others)]), "")


def _one_sided_fault(
    tensors: Sequence[torch.Tensor] | None, tensor: torch.Tensor, end: GroupMember, where: int, name: str
) -> str:
    """Return the fault of a list that only rank `where` passes, as `_list_fault`."""
    me = end.world.rank
    if me != where:
        return f"{name} is for rank {where}, not for rank {me}" if tensors else ""
    return f"rank {me} passes no {name}" if tensors is None else _list_fault(tensors, tensor, end, name)


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


def _dtypes_fault(tensors: Sequence[torch.Tensor], end: GroupMember) -> str:
    faults = [fault for each in tensors if (fault := backend_fault(end.backend, each))]
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
        return [], f"{name} has {counted(rows, 'row')}, which do not split evenly among {size} ranks"
    return [rows // size] * size, ""
