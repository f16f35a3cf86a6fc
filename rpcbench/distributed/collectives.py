"""What ranks do together, with the names and rules of torch.distributed 0.4, by torch's own process groups.

Before a tensor moves the ranks compare what each of them calls. Guarantees
- Where they differ, in the operation, a shape, names of dimensions, a dtype or who gives and who takes, or where one of
  them asks for what cannot be, every rank raises a CollectiveError that tells what each one called; the group goes on
  after it. So what has names keeps them.
- Each wait ends as `world` says, and a rank that has not come is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as c10d
from torch.distributed import ReduceOp

from rpcbench.base.errors import CollectiveError, counted
from rpcbench.distributed import backends, groups
from rpcbench.distributed.groups import AnyGroup, Member

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
    faults = [fault for tensor in tensors if (fault := backends.fault(end.world.backend, tensor))]
    layouts = ", ".join(map(backends.layout, tensors))
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
    faults = [fault for each in tensors if (fault := backends.fault(end.world.backend, each))]
    others = [each for each in map(backends.layout, tensors) if each != backends.layout(tensor)]
    return next(iter([*faults, *(f"{name} has a {other} for {backends.layout(tensor)}" for other in others)]), "")


def _one_sided(tensors: Sequence[torch.Tensor] | None, tensor: torch.Tensor, end: Member, where: int, name: str) -> str:
    """As `_unlike`, of a list that only rank `where` passes."""
    me = end.world.rank
    if me != where:
        return f"{name} is for rank {where}, not for rank {me}" if tensors is not None else ""
    return f"rank {me} passes no {name}" if tensors is None else _unlike(tensors, tensor, end, name)
