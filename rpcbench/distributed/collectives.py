"""Collectives and point-to-point transfers, with the names and rules of torch.distributed 0.4, by torch's own groups.

The ranks compare their calls before any tensor moves. Guarantees
- If they differ in operation, shape, names of dimensions, dtype, source or destination, or if one call is invalid, all
  ranks raise a CollectiveError that lists the calls, and the group stays usable. So tensors keep their dimension names.
- Each wait ends as described in `world`, and the error names a rank that has not come.
- Point to point: the sender first sends the layout, and the tensor only once the receiver has one of that layout.
  Messages from one rank to another arrive in order, including sends and receives in the background.
- `*_multigpu` functions take several tensors of each rank, one on each of its devices, in lists of the same length on
  all ranks. torch has dropped them in favour of one process per GPU. Here each rank first combines its own tensors, and
  then the group combines the results, so they work on all devices of the backend.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as c10d
from torch.distributed import ReduceOp

from rpcbench.base.errors import CollectiveError, counted
from rpcbench.distributed import groups
from rpcbench.distributed.events import CollectivePart
from rpcbench.distributed.executor import Pending
from rpcbench.distributed.groups import AnyGroup, GroupMember
from rpcbench.distributed.world import Wait

NOTE = 256
"""Bytes of the description of a call that ranks exchange."""
_LINEAR = ("SUM", "AVG")  # the reduce ops that are defined for complex numbers


def broadcast(tensor: torch.Tensor, src: int, group: AnyGroup = None) -> None:
    """Copy the tensor of one rank into the tensors of all others, in place.

    Args:
        tensor: Of the same shape and dtype on all ranks.
        src: Source, as a rank of the world.
        group: By default all ranks.

    Raises:
        CollectiveError: The calls of the ranks differ, or one is invalid; the group stays usable. Or, as the following
            errors, the world is broken.
        RpcTimeoutError: A rank has not come in time.
        WorkerLostError: A rank has ended.
    """
    end = groups.member(group)
    together(end, f"broadcast(src={src})", [tensor], lambda: c10d.broadcast(tensor, src, end.group), stranger(end, src))


def all_reduce(tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None) -> None:
    """Combine the tensors of all ranks; each gets the same result, to the last bit, in place.

    Args:
        tensor: Of the same shape and dtype on all ranks.
        op: The reduce op.
        group: By default all ranks.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError: As of `broadcast`.
    """
    end = groups.member(group)
    together(
        end, f"all_reduce({op_name(op)})", [tensor], lambda: c10d.all_reduce(tensor, op, end.group), refused(op, tensor)
    )


def reduce(tensor: torch.Tensor, dst: int, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None) -> None:
    """Combine the tensors of all ranks in that of `dst`, in place; the tensors of other ranks are undefined afterwards.

    Args:
        tensor: Of the same shape and dtype on all ranks.
        dst: Destination, as a rank of the world.
        op: The reduce op.
        group: By default all ranks.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError: As of `broadcast`.
    """
    end = groups.member(group)
    what = f"reduce({op_name(op)}, dst={dst})"
    together(
        end, what, [tensor], lambda: c10d.reduce(tensor, dst, op, end.group), stranger(end, dst) or refused(op, tensor)
    )


def all_gather(tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: AnyGroup = None) -> None:
    """Copy the tensor of each rank into `tensor_list`, on all ranks.

    Args:
        tensor_list: The outputs, one for each rank of the group, with the shape and dtype of `tensor`.
        tensor: The tensor of this rank.
        group: By default all ranks.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError: As of `broadcast`.
    """
    end = groups.member(group)
    wrong = _list_fault(tensor_list, tensor, end, "tensor_list")
    together(end, "all_gather", [tensor], lambda: c10d.all_gather(list(tensor_list), tensor, end.group), wrong)


def gather(
    tensor: torch.Tensor, dst: int = 0, gather_list: Sequence[torch.Tensor] | None = None, group: AnyGroup = None
) -> None:
    """Copy the tensor of each rank into `gather_list` of one rank.

    Args:
        tensor: The tensor of this rank.
        dst: Destination, as a rank of the world.
        gather_list: On `dst` only: the outputs, one for each rank of the group, with the shape and dtype of `tensor`.
        group: By default all ranks.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError: As of `broadcast`.
    """
    end = groups.member(group)
    wrong = stranger(end, dst) or _one_sided(gather_list, tensor, end, dst, "gather_list")
    into = None if gather_list is None else list(gather_list)
    together(end, f"gather(dst={dst})", [tensor], lambda: c10d.gather(tensor, into, dst, end.group), wrong)


def scatter(
    tensor: torch.Tensor, src: int = 0, scatter_list: Sequence[torch.Tensor] | None = None, group: AnyGroup = None
) -> None:
    """Copy to each rank its tensor of one rank's `scatter_list`.

    Args:
        tensor: The output.
        src: Source, as a rank of the world.
        scatter_list: On `src` only: one tensor for each rank of the group, with the shape and dtype of `tensor`.
        group: By default all ranks.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError: As of `broadcast`.
    """
    end = groups.member(group)
    wrong = stranger(end, src) or _one_sided(scatter_list, tensor, end, src, "scatter_list")
    parts = None if scatter_list is None else list(scatter_list)
    together(end, f"scatter(src={src})", [tensor], lambda: c10d.scatter(tensor, parts, src, end.group), wrong)


def barrier(group: AnyGroup = None) -> None:
    """Wait until all ranks of the group have called it. Raises the errors of `broadcast`."""
    end = groups.member(group)
    together(end, "barrier", [], lambda: None)  # the comparison of the calls is the barrier


def together(
    end: GroupMember, what: str, tensors: Sequence[torch.Tensor], act: Callable[[], object], wrong: str = ""
) -> None:
    """Run `act` if all ranks of the group make the same call, with tensors of one layout, and no call is wrong."""
    faults = [fault for tensor in tensors if (fault := groups.backend_fault(end.world.backend, tensor))]
    layouts = ", ".join(map(groups.layout_name, tensors))
    call = f"{what} of {layouts}" if tensors else what
    wrong = next(iter(faults), wrong)

    # A wrong call takes part in the comparison as well: so the other ranks raise at once, and do not wait for this one.
    def job() -> None:
        _compare(end, f"{call}: {wrong}" if wrong else call, bool(wrong))
        act()

    end.carry(job, what, layouts, sum(getattr(tensor, "nbytes", 0) for tensor in tensors))


def _compare(end: GroupMember, words: str, wrong: bool) -> None:
    """Raise CollectiveError on all ranks unless all descriptions are equal and none is wrong."""
    alone = len(end.ranks) == 1
    if not wrong and (alone or _agreed(end, words)):
        return
    if wrong and not alone:
        _agreed(end, f"{end.world.rank} is wrong")  # unique, so that no rank agrees even if all are wrong alike
    lines = [f"  {end.world.named(rank)} calls {each}" for rank, each in zip(end.ranks, _told(end, words), strict=True)]
    raise CollectiveError("\n".join(["ranks of a process group do not fit together:", *lines]))


def _agreed(end: GroupMember, words: str) -> bool:
    """Return whether all descriptions are equal."""
    # One small all-reduce: with MAX of d and of -d, the largest and the smallest digest are equal iff all are. 7 bytes
    # of digest fit a signed int64.
    mine = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest())
    both = torch.tensor([mine, -mine])
    c10d.all_reduce(both, ReduceOp.MAX, end.group)
    return both.tolist() == [mine, -mine]


def _told(end: GroupMember, words: str) -> list[str]:
    """Return the descriptions of all ranks."""
    if len(end.ranks) == 1:
        return [words]
    notes = [torch.empty(NOTE, dtype=torch.uint8) for _ in end.ranks]
    c10d.all_gather(notes, note(words), end.group)
    return [said(each) for each in notes]


def note(text: str) -> torch.Tensor:
    """Return a text as a tensor of `NOTE` bytes; longer texts are cut off."""
    return torch.frombuffer(bytearray(text.encode()[:NOTE].ljust(NOTE, b"\0")), dtype=torch.uint8)


def said(note: torch.Tensor) -> str:
    """Return the text of a note."""
    return bytes(note.tolist()).rstrip(b"\0").decode(errors="ignore")


def op_name(op: object) -> str:
    return str(op).rpartition(".")[2]


def refused(op: object, tensor: object) -> str:
    """Return the reason that the op cannot combine such tensors; empty if it can."""
    # The rules are the same for all backends and devices: a program that runs with gloo runs with NCCL too.
    if not isinstance(tensor, torch.Tensor):
        return ""  # `backend_fault` has the better message
    dtype, name = tensor.dtype, op_name(op)
    exact = not dtype.is_floating_point and not dtype.is_complex
    if name not in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        return f"{name} is not a reduce op of all devices"
    if (name.startswith("B") and not exact) or (name == "AVG" and exact) or (dtype.is_complex and name not in _LINEAR):
        return f"{name} has no meaning for {dtype}"
    return ""


def stranger(end: GroupMember, rank: int) -> str:
    """Return that a rank is not in the group; empty if it is."""
    return "" if rank in end.ranks else f"rank {rank} is not in the group of ranks {list(end.ranks)}"


def _list_fault(tensors: Sequence[torch.Tensor], tensor: torch.Tensor, end: GroupMember, name: str) -> str:
    """Return the fault of a list of one tensor for each rank; empty if it has none."""
    if len(tensors) != len(end.ranks):
        return f"{name} has {counted(len(tensors), 'tensor')} for a group of {len(end.ranks)}"
    faults = [fault for each in tensors if (fault := groups.backend_fault(end.world.backend, each))]
    others = [each for each in map(groups.layout_name, tensors) if each != groups.layout_name(tensor)]
    return next(iter([*faults, *(f"{name} has a {other} for {groups.layout_name(tensor)}" for other in others)]), "")


def _one_sided(
    tensors: Sequence[torch.Tensor] | None, tensor: torch.Tensor, end: GroupMember, where: int, name: str
) -> str:
    """Return the fault of a list that only rank `where` passes, as `_list_fault`."""
    me = end.world.rank
    if me != where:
        return f"{name} is for rank {where}, not for rank {me}" if tensors is not None else ""
    return f"rank {me} passes no {name}" if tensors is None else _list_fault(tensors, tensor, end, name)


# Point to point:   sender ── _OFFER: layout ──────────────────> receiver
#                          <── _ANSWER: _FITS, or the fault ────
#                          ── _DATA: the tensor, if it fits ───>
_OFFER, _ANSWER, _DATA = 0x5E4D01, 0x5E4D02, 0x5E4D03
"""Tags of these messages; chosen so that programs are unlikely to use them."""
_FITS = "fits"


class Request:
    """A send or receive in the background. Its tensor must not be touched before `wait` has returned."""

    def __init__(self, end: GroupMember, pending: Pending[int], wait: Wait) -> None:
        self._end, self._pending, self._wait = end, pending, wait

    def is_completed(self) -> bool:
        """Return whether it has completed or failed."""
        return self._pending.done or self._end.world.broken

    def wait(self) -> int:
        """Wait until it has completed, and return the rank of the peer. Raises its error."""
        return self._end.world.finish(self._pending, self._wait)


def send(tensor: torch.Tensor, dst: int, group: AnyGroup = None) -> None:
    """Send a tensor, and return once the peer has received it.

    Args:
        tensor: Any tensor of the backend's devices and dtypes.
        dst: Destination, as a rank of the world.
        group: By default all ranks.

    Raises:
        CollectiveError: The receiver's tensor has another layout, or this call is invalid; the group stays usable. Or,
            as the following errors, the world is broken.
        RpcTimeoutError: The receiver has not come in time.
        WorkerLostError: A rank has ended.
    """
    isend(tensor, dst, group).wait()


def isend(tensor: torch.Tensor, dst: int, group: AnyGroup = None) -> Request:
    """Send a tensor in the background.

    Args:
        tensor, dst, group: As of `send`.

    Returns:
        A Request, whose `wait` returns `dst` and raises the errors of `send`.

    Raises:
        CollectiveError: This call is invalid.
    """
    end = _end(tensor, dst, group)
    wait = Wait(f"send to rank {dst}", f"send {end.key}", 0, (dst,))
    entered = end.begin(end.between(end.world.rank, dst, tensor))
    return Request(end, end.world.executor((end.key, "to", dst)).put(lambda: _send(end, tensor, dst, entered)), wait)


def recv(tensor: torch.Tensor, src: int | None = None, group: AnyGroup = None) -> int:
    """Receive a tensor.

    Args:
        tensor: The output, of the sender's layout.
        src: Source, as a rank of the world; None: the rank that sends first.
        group: By default all ranks.

    Returns:
        The sender's rank.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError: As of `send`; the first also during an `irecv`, if `src` is
            None.
    """
    if src is not None:
        return irecv(tensor, src, group).wait()
    end = _end(tensor, None, group)
    # gloo could give either the other's message.
    if any(end.world.executor(_from(end, rank)).busy for rank in end.ranks):
        raise CollectiveError("recv from any rank is not possible while an irecv waits: wait for the irecv first")
    wait = Wait("recv from any rank", f"recv {end.key}", 0, end.wait("").members)
    entered = end.begin(end.from_any(tensor))
    return end.world.finish(end.world.executor(_from(end, -1)).put(lambda: _receive(end, tensor, None, entered)), wait)


def irecv(tensor: torch.Tensor, src: int, group: AnyGroup = None) -> Request:
    """Receive a tensor from one rank in the background.

    Args:
        tensor, src, group: As of `recv`.

    Returns:
        A Request, whose `wait` returns `src` and raises the errors of `recv`.

    Raises:
        CollectiveError: This call is invalid.
    """
    end = _end(tensor, src, group)
    wait = Wait(f"recv from rank {src}", f"recv {end.key}", 0, (src,))
    entered = end.begin(end.between(src, end.world.rank, tensor))
    return Request(end, end.world.executor(_from(end, src)).put(lambda: _receive(end, tensor, src, entered)), wait)


def _from(end: GroupMember, rank: int) -> tuple[str, str, int]:
    # One thread for each sender: receives from one rank run in order, those from different ranks run at once.
    return end.key, "from", rank


def _end(tensor: torch.Tensor, other: int | None, group: AnyGroup) -> GroupMember:
    """Return this rank's membership. Raises CollectiveError where it cannot send or receive this tensor."""
    end = groups.member(group)
    wrong = groups.backend_fault(end.world.backend, tensor)
    if other is not None:
        wrong = wrong or stranger(end, other) or (f"rank {other} is this rank" if other == end.world.rank else "")
    if wrong:
        raise CollectiveError(f"{end.world.named(end.world.rank)} cannot send or receive: {wrong}")
    return end


def _send(end: GroupMember, tensor: torch.Tensor, dst: int, entered: CollectivePart) -> int:
    with entered:
        c10d.send(note(groups.layout_name(tensor)), dst, end.group, _OFFER)
        answer = torch.empty(NOTE, dtype=torch.uint8)
        c10d.recv(answer, dst, end.group, _ANSWER)
        if said(answer) != _FITS:
            raise CollectiveError(said(answer))
        c10d.send(tensor, dst, end.group, _DATA)
    return dst


def _receive(end: GroupMember, tensor: torch.Tensor, src: int | None, entered: CollectivePart) -> int:
    world, offer = end.world, torch.empty(NOTE, dtype=torch.uint8)
    with entered:
        source = int(c10d.recv(offer, src, end.group, _OFFER))
        if src is None:  # recorded so far as a receive from any rank
            entered.becomes(end.between(source, world.rank, tensor))
        here, there = groups.layout_name(tensor), said(offer)
        differs = f"{world.named(source)} sends {there}, but {world.named(world.rank)} receives {here}"
        c10d.send(note(_FITS if here == there else differs), source, end.group, _ANSWER)
        if here != there:
            raise CollectiveError(differs)
        c10d.recv(tensor, source, end.group, _DATA)
    return source


_COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # the ops that a rank can apply to its own tensors
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "PRODUCT": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
}


def broadcast_multigpu(tensor_list: Sequence[torch.Tensor], src: int, group: AnyGroup = None) -> None:
    """Copy `tensor_list[0]` of rank `src` into all tensors of all ranks.

    Args:
        tensor_list: One tensor on each device, all of one layout.
        src: Source, as a rank of the world.
        group: By default all ranks.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError: As of `broadcast`.
    """
    end = groups.member(group)
    what = f"broadcast_multigpu(src={src})"
    act = lambda: c10d.broadcast(tensor_list[0], src, end.group)  # noqa: E731
    together(end, what, tensor_list, act, _multigpu_fault(tensor_list) or stranger(end, src))
    _spread(tensor_list)


def all_reduce_multigpu(
    tensor_list: Sequence[torch.Tensor], op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None
) -> None:
    """Combine all tensors of all ranks; each of them gets the result.

    Args:
        tensor_list: One tensor on each device, all of one layout.
        op: SUM, PRODUCT, MIN or MAX.
        group: By default all ranks.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError: As of `broadcast`.
    """
    end = groups.member(group)

    def act() -> None:
        tensor_list[0].copy_(_combined(tensor_list, op))
        c10d.all_reduce(tensor_list[0], op, end.group)
        _spread(tensor_list)

    together(end, f"all_reduce_multigpu({op_name(op)})", tensor_list, act, _multigpu_fault(tensor_list, op))


def reduce_multigpu(
    tensor_list: Sequence[torch.Tensor], dst: int, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None
) -> None:
    """Combine all tensors of all ranks in `tensor_list[0]` of rank `dst`; other ranks' tensors do not change.

    Args:
        tensor_list: One tensor on each device, all of one layout.
        dst: Destination, as a rank of the world.
        op: SUM, PRODUCT, MIN or MAX.
        group: By default all ranks.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError: As of `broadcast`.
    """
    end = groups.member(group)

    def act() -> None:
        combined = _combined(tensor_list, op)
        c10d.reduce(combined, dst, op, end.group)
        if end.world.rank == dst:
            tensor_list[0].copy_(combined)

    wrong = _multigpu_fault(tensor_list, op) or stranger(end, dst)
    together(end, f"reduce_multigpu({op_name(op)}, dst={dst})", tensor_list, act, wrong)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]], input_tensor_list: Sequence[torch.Tensor],
    group: AnyGroup = None,
) -> None:  # fmt: skip
    """Copy tensor j of rank r into `output_tensor_lists[i][r * n + j]`, for each of the n lists, on all ranks.

    Args:
        output_tensor_lists: n lists of n * (size of the group) tensors, all of one layout.
        input_tensor_list: The n tensors of this rank, one on each device.
        group: By default all ranks.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError: As of `broadcast`.
    """
    end = groups.member(group)
    n, size = len(input_tensor_list), len(end.ranks)
    wrong = _multigpu_fault(input_tensor_list)
    if not wrong and [len(each) for each in output_tensor_lists] != [n * size] * n:
        wrong = f"output_tensor_lists must have {counted(n, 'list')} of {n * size} tensors"
    wrong = wrong or _multigpu_fault(
        [input_tensor_list[0], *(each for outputs in output_tensor_lists for each in outputs)]
    )

    def act() -> None:
        mine = torch.stack([each.to(input_tensor_list[0].device) for each in input_tensor_list])
        parts = [torch.empty_like(mine) for _ in range(size)]
        c10d.all_gather(parts, mine, end.group)
        for outputs in output_tensor_lists:
            for into, part in zip(outputs, torch.cat(parts), strict=True):
                into.copy_(part)

    together(end, "all_gather_multigpu", input_tensor_list, act, wrong)


def _multigpu_fault(tensors: Sequence[torch.Tensor], op: object = ReduceOp.SUM) -> str:
    if not tensors:
        return "the list of tensors is empty"
    if len({groups.layout_name(each) for each in tensors}) > 1:
        return "the tensors of a list must be alike"
    return "" if op_name(op) in _COMBINE else f"{op_name(op)} is not supported: use one of {', '.join(_COMBINE)}"


def _combined(tensors: Sequence[torch.Tensor], op: object) -> torch.Tensor:
    return _COMBINE[op_name(op)](torch.stack([each.to(tensors[0].device) for each in tensors]))


def _spread(tensors: Sequence[torch.Tensor]) -> None:
    for each in tensors[1:]:
        each.copy_(tensors[0])
