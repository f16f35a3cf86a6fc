"""What ranks do together, with the names and rules of torch.distributed 0.4, by torch's own process groups.

Before a tensor moves the ranks compare what each of them calls. Guarantees
- Where they differ, in the operation, a shape, names of dimensions, a dtype or who gives and who takes, or where one of
  them asks for what cannot be, every rank raises a CollectiveError that tells what each one called; the group goes on
  after it. So what has names keeps them.
- Each wait ends as `world` says, and a rank that has not come is named.
- Point to point: the sender says first what comes, and sends once the receiver has a tensor like it. Messages of one
  rank to another arrive in order, also those of sends and receives in the background.
- `*_multigpu` functions take several tensors of each rank, one on each of its devices. torch has dropped them for one
  process to each GPU. Here a rank first combines its own tensors, and then its group does, so they work on whatever
  devices the backend knows. All ranks pass lists of the same length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as c10d
from torch.distributed import ReduceOp

from rpcbench.base.errors import CollectiveError, counted
from rpcbench.distributed import groups
from rpcbench.distributed.events import Part
from rpcbench.distributed.executor import Pending
from rpcbench.distributed.groups import AnyGroup, Member
from rpcbench.distributed.world import Wait

NOTE = 256
"""Bytes of what a rank says of its call."""
_LINEAR = ("SUM", "AVG")


def broadcast(tensor: torch.Tensor, src: int, group: AnyGroup = None) -> None:
    """Give all ranks what `src`, a rank of the world, has in `tensor`; in place."""
    end = groups.member(group)
    together(end, f"broadcast(src={src})", [tensor], lambda: c10d.broadcast(tensor, src, end.group), stranger(end, src))


def all_reduce(tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None) -> None:
    """Combine the tensors of all ranks; each gets the same result, to the last bit, in place."""
    end = groups.member(group)
    together(
        end, f"all_reduce({op_name(op)})", [tensor], lambda: c10d.all_reduce(tensor, op, end.group), refused(op, tensor)
    )


def reduce(tensor: torch.Tensor, dst: int, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None) -> None:
    """Combine the tensors of all ranks at `dst`; what the others hold afterwards is undefined."""
    end = groups.member(group)
    what = f"reduce({op_name(op)}, dst={dst})"
    together(
        end, what, [tensor], lambda: c10d.reduce(tensor, dst, op, end.group), stranger(end, dst) or refused(op, tensor)
    )


def all_gather(tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: AnyGroup = None) -> None:
    """Put the tensor of each rank into `tensor_list`, one for each rank of the group, on all of them."""
    end = groups.member(group)
    wrong = _unlike(tensor_list, tensor, end, "tensor_list")
    together(end, "all_gather", [tensor], lambda: c10d.all_gather(list(tensor_list), tensor, end.group), wrong)


def gather(
    tensor: torch.Tensor, dst: int = 0, gather_list: Sequence[torch.Tensor] | None = None, group: AnyGroup = None
) -> None:
    """Put the tensor of each rank into `gather_list`, one for each rank of the group; only `dst` passes one."""
    end = groups.member(group)
    wrong = stranger(end, dst) or _one_sided(gather_list, tensor, end, dst, "gather_list")
    into = None if gather_list is None else list(gather_list)
    together(end, f"gather(dst={dst})", [tensor], lambda: c10d.gather(tensor, into, dst, end.group), wrong)


def scatter(
    tensor: torch.Tensor, src: int = 0, scatter_list: Sequence[torch.Tensor] | None = None, group: AnyGroup = None
) -> None:
    """Give each rank its tensor of `scatter_list`, one for each rank of the group; only `src` passes one."""
    end = groups.member(group)
    wrong = stranger(end, src) or _one_sided(scatter_list, tensor, end, src, "scatter_list")
    parts = None if scatter_list is None else list(scatter_list)
    together(end, f"scatter(src={src})", [tensor], lambda: c10d.scatter(tensor, parts, src, end.group), wrong)


def barrier(group: AnyGroup = None) -> None:
    """Wait until all ranks of the group have come here."""
    end = groups.member(group)
    together(end, "barrier", [], lambda: None)  # to compare is to have met


def together(
    end: Member, what: str, tensors: Sequence[torch.Tensor], act: Callable[[], object], wrong: str = ""
) -> None:
    """Act, if all ranks of the group call the same with tensors alike, and none of them is wrong."""
    faults = [fault for tensor in tensors if (fault := groups.backend_fault(end.world.backend, tensor))]
    layouts = ", ".join(map(groups.layout_name, tensors))
    call = f"{what} of {layouts}" if tensors else what
    wrong = next(iter(faults), wrong)

    def job() -> None:
        _compare(end, f"{call}: {wrong}" if wrong else call, bool(wrong))
        act()

    end.carry(job, what, layouts, sum(getattr(tensor, "nbytes", 0) for tensor in tensors))


def _compare(end: Member, words: str, wrong: bool) -> None:
    """CollectiveError, on all ranks, unless all say the same and none is wrong."""
    alone = len(end.ranks) == 1
    if not wrong and (alone or _agreed(end, words)):
        return
    if wrong and not alone:
        _agreed(end, f"{end.world.rank} is wrong")  # so none agrees, even if all are wrong alike
    lines = [f"  {end.world.named(rank)} calls {each}" for rank, each in zip(end.ranks, _told(end, words), strict=True)]
    raise CollectiveError("\n".join(["ranks of a process group do not fit together:", *lines]))


def _agreed(end: Member, words: str) -> bool:
    """Whether all say the same: then the largest digest is the least one, too."""
    mine = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest())
    both = torch.tensor([mine, -mine])
    c10d.all_reduce(both, ReduceOp.MAX, end.group)
    return both.tolist() == [mine, -mine]


def _told(end: Member, words: str) -> list[str]:
    """What each rank says."""
    if len(end.ranks) == 1:
        return [words]
    notes = [torch.empty(NOTE, dtype=torch.uint8) for _ in end.ranks]
    c10d.all_gather(notes, note(words), end.group)
    return [said(each) for each in notes]


def note(text: str) -> torch.Tensor:
    """A text as a tensor of fixed size; what is longer is cut off."""
    return torch.frombuffer(bytearray(text.encode()[:NOTE].ljust(NOTE, b"\0")), dtype=torch.uint8)


def said(note: torch.Tensor) -> str:
    """The text of a note."""
    return bytes(note.tolist()).rstrip(b"\0").decode(errors="ignore")


def op_name(op: object) -> str:
    return str(op).rpartition(".")[2]


def refused(op: object, tensor: object) -> str:
    """Why tensors like this one cannot be combined so; empty if they can."""
    if not isinstance(tensor, torch.Tensor):
        return ""  # which the backend says better
    dtype, name = tensor.dtype, op_name(op)
    exact = not dtype.is_floating_point and not dtype.is_complex
    if name not in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        return f"{name} is no reduce op for all devices"
    if (name.startswith("B") and not exact) or (name == "AVG" and exact) or (dtype.is_complex and name not in _LINEAR):
        return f"{name} has no meaning for {dtype}"
    return ""


def stranger(end: Member, rank: int) -> str:
    """That a rank is not in the group; empty if it is."""
    return "" if rank in end.ranks else f"rank {rank} is not in the group of ranks {list(end.ranks)}"


def _unlike(tensors: Sequence[torch.Tensor], tensor: torch.Tensor, end: Member, name: str) -> str:
    """What is wrong with a list of one tensor for each rank; empty if nothing is."""
    if len(tensors) != len(end.ranks):
        return f"{name} has {counted(len(tensors), 'tensor')} for a group of {len(end.ranks)}"
    faults = [fault for each in tensors if (fault := groups.backend_fault(end.world.backend, each))]
    others = [each for each in map(groups.layout_name, tensors) if each != groups.layout_name(tensor)]
    return next(iter([*faults, *(f"{name} has a {other} for {groups.layout_name(tensor)}" for other in others)]), "")


def _one_sided(tensors: Sequence[torch.Tensor] | None, tensor: torch.Tensor, end: Member, where: int, name: str) -> str:
    """As `_unlike`, of a list that only rank `where` passes."""
    me = end.world.rank
    if me != where:
        return f"{name} is for rank {where}, not for rank {me}" if tensors is not None else ""
    return f"rank {me} passes no {name}" if tensors is None else _unlike(tensors, tensor, end, name)


_OFFER, _ANSWER, _DATA = 0x5E4D01, 0x5E4D02, 0x5E4D03
"""Tags that programs do not use."""
_FITS = "fits"


class Request:
    """A send or receive in the background. Its tensor must not be touched before `wait` has returned."""

    def __init__(self, end: Member, pending: Pending[int], wait: Wait) -> None:
        self._end, self._pending, self._wait = end, pending, wait

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._pending.done or self._end.world.broken

    def wait(self) -> int:
        """Until it is over; the rank at the other end. Raises what has gone wrong."""
        return self._end.world.finish(self._pending, self._wait)


def send(tensor: torch.Tensor, dst: int, group: AnyGroup = None) -> None:
    """Send a tensor to rank `dst`; returns once that has received it."""
    isend(tensor, dst, group).wait()


def isend(tensor: torch.Tensor, dst: int, group: AnyGroup = None) -> Request:
    """As `send`, in the background."""
    end = _end(tensor, dst, group)
    wait = Wait(f"send to rank {dst}", f"send {end.key}", 0, (dst,))
    entered = end.begin(end.between(end.world.rank, dst, tensor))
    return Request(end, end.world.lane((end.key, "to", dst)).put(lambda: _send(end, tensor, dst, entered)), wait)


def recv(tensor: torch.Tensor, src: int | None = None, group: AnyGroup = None) -> int:
    """Receive into `tensor` from rank `src`, or None: from whoever sends first. The sender's rank."""
    if src is not None:
        return irecv(tensor, src, group).wait()
    end = _end(tensor, None, group)
    if any(end.world.lane(_from(end, rank)).busy for rank in end.ranks):
        raise CollectiveError("recv from any rank, while an irecv waits for one: wait for that first")
    wait = Wait("recv from any rank", f"recv {end.key}", 0, end.wait("").members)
    entered = end.begin(end.from_any(tensor))
    return end.world.finish(end.world.lane(_from(end, -1)).put(lambda: _receive(end, tensor, None, entered)), wait)


def irecv(tensor: torch.Tensor, src: int, group: AnyGroup = None) -> Request:
    """As `recv` from one rank, in the background."""
    end = _end(tensor, src, group)
    wait = Wait(f"recv from rank {src}", f"recv {end.key}", 0, (src,))
    entered = end.begin(end.between(src, end.world.rank, tensor))
    return Request(end, end.world.lane(_from(end, src)).put(lambda: _receive(end, tensor, src, entered)), wait)


def _from(end: Member, rank: int) -> tuple[str, str, int]:
    return end.key, "from", rank


def _end(tensor: torch.Tensor, other: int | None, group: AnyGroup) -> Member:
    """This rank's end; CollectiveError where it cannot send or receive this."""
    end = groups.member(group)
    wrong = groups.backend_fault(end.world.backend, tensor)
    if other is not None:
        wrong = wrong or stranger(end, other) or (f"rank {other} is this one" if other == end.world.rank else "")
    if wrong:
        raise CollectiveError(f"{end.world.named(end.world.rank)} cannot send or receive: {wrong}")
    return end


def _send(end: Member, tensor: torch.Tensor, dst: int, entered: Part) -> int:
    with entered:
        c10d.send(note(groups.layout_name(tensor)), dst, end.group, _OFFER)
        answer = torch.empty(NOTE, dtype=torch.uint8)
        c10d.recv(answer, dst, end.group, _ANSWER)
        if said(answer) != _FITS:
            raise CollectiveError(said(answer))
        c10d.send(tensor, dst, end.group, _DATA)
    return dst


def _receive(end: Member, tensor: torch.Tensor, src: int | None, entered: Part) -> int:
    world, offer = end.world, torch.empty(NOTE, dtype=torch.uint8)
    with entered:
        source = int(c10d.recv(offer, src, end.group, _OFFER))
        if src is None:
            entered.becomes(end.between(source, world.rank, tensor))
        here, there = groups.layout_name(tensor), said(offer)
        differs = f"{world.named(source)} sends {there}, but {world.named(world.rank)} receives {here}"
        c10d.send(note(_FITS if here == there else differs), source, end.group, _ANSWER)
        if here != there:
            raise CollectiveError(differs)
        c10d.recv(tensor, source, end.group, _DATA)
    return source


_COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "PRODUCT": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
}


def broadcast_multigpu(tensor_list: Sequence[torch.Tensor], src: int, group: AnyGroup = None) -> None:
    """Give all tensors of all ranks what `tensor_list[0]` of rank `src` holds."""
    end = groups.member(group)
    what = f"broadcast_multigpu(src={src})"
    act = lambda: c10d.broadcast(tensor_list[0], src, end.group)  # noqa: E731
    together(end, what, tensor_list, act, _wrong(tensor_list) or stranger(end, src))
    _spread(tensor_list)


def all_reduce_multigpu(
    tensor_list: Sequence[torch.Tensor], op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None
) -> None:
    """Combine all tensors of all ranks; each of them gets the result."""
    end = groups.member(group)

    def act() -> None:
        tensor_list[0].copy_(_combined(tensor_list, op))
        c10d.all_reduce(tensor_list[0], op, end.group)
        _spread(tensor_list)

    together(end, f"all_reduce_multigpu({op_name(op)})", tensor_list, act, _wrong(tensor_list, op))


def reduce_multigpu(
    tensor_list: Sequence[torch.Tensor], dst: int, op: ReduceOp.RedOpType = ReduceOp.SUM, group: AnyGroup = None
) -> None:
    """Combine all tensors of all ranks in `tensor_list[0]` of rank `dst`; other ranks' tensors stay as they are."""
    end = groups.member(group)

    def act() -> None:
        combined = _combined(tensor_list, op)
        c10d.reduce(combined, dst, op, end.group)
        if end.world.rank == dst:
            tensor_list[0].copy_(combined)

    wrong = _wrong(tensor_list, op) or stranger(end, dst)
    together(end, f"reduce_multigpu({op_name(op)}, dst={dst})", tensor_list, act, wrong)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]], input_tensor_list: Sequence[torch.Tensor],
    group: AnyGroup = None,
) -> None:  # fmt: skip
    """Put tensor j of rank r into `output_tensor_lists[i][r * n + j]`, for each of the n lists, on all ranks."""
    end = groups.member(group)
    n, size = len(input_tensor_list), len(end.ranks)
    wrong = _wrong(input_tensor_list)
    if not wrong and [len(each) for each in output_tensor_lists] != [n * size] * n:
        wrong = f"output_tensor_lists wants {counted(n, 'list')} of {n * size} tensors"
    wrong = wrong or _wrong([input_tensor_list[0], *(each for outputs in output_tensor_lists for each in outputs)])

    def act() -> None:
        mine = torch.stack([each.to(input_tensor_list[0].device) for each in input_tensor_list])
        parts = [torch.empty_like(mine) for _ in range(size)]
        c10d.all_gather(parts, mine, end.group)
        for outputs in output_tensor_lists:
            for into, part in zip(outputs, torch.cat(parts), strict=True):
                into.copy_(part)

    together(end, "all_gather_multigpu", input_tensor_list, act, wrong)


def _wrong(tensors: Sequence[torch.Tensor], op: object = ReduceOp.SUM) -> str:
    if not tensors:
        return "the list of tensors is empty"
    if len({groups.layout_name(each) for each in tensors}) > 1:
        return "the tensors of a list must be alike"
    return "" if op_name(op) in _COMBINE else f"{op_name(op)} is none of {', '.join(_COMBINE)}"


def _combined(tensors: Sequence[torch.Tensor], op: object) -> torch.Tensor:
    return _COMBINE[op_name(op)](torch.stack([each.to(tensors[0].device) for each in tensors]))


def _spread(tensors: Sequence[torch.Tensor]) -> None:
    for each in tensors[1:]:
        each.copy_(tensors[0])
