"""The comparison of the ranks' calls, which comes before each collective.

Guarantees
- If the ranks differ in operation, shape, names of dimensions, dtype, source or destination, or if one call is invalid,
  all ranks raise a CollectiveError that lists the calls. No tensor has moved then, and the group stays usable.
- A rank with an invalid call takes part, too: so the others raise at once, and do not wait for it.
- Two ranks that agree exchange 16 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as c10d
from torch.distributed import ReduceOp

from rpcbench.base.errors import CollectiveError, counted
from rpcbench.distributed.arguments import seconds_of
from rpcbench.distributed.groups import GroupMember
from rpcbench.distributed.memory_layouts import backend_fault, layout_name
from rpcbench.distributed.work import Work
from rpcbench.runtime.handles import tensor_bytes

NOTE = 256
"""Bytes of the description of a call that ranks exchange."""
_LINEAR = ("SUM", "AVG")  # the reduce ops that are defined for complex numbers


def together(
    end: GroupMember, what: str, tensors: Sequence[torch.Tensor], act: Callable[[], object], wrong: str = "",
    timeout: float | timedelta | None = None,
) -> None:  # fmt: skip
    """Run `act` if all ranks of the group make the same call, with tensors of one layout, and no call is wrong.

    Args:
        end: This rank's membership.
        what: The operation and its arguments other than tensors, which must be the same on all ranks.
        tensors: The tensors whose layouts must be the same on all ranks.
        act: Runs on the group's thread.
        wrong: The fault of this rank's call; "" if it has none.
        timeout: Seconds, or None for those of the group.
    """
    begun(end, what, tensors, act, wrong, timeout).wait()


def begun(
    end: GroupMember, what: str, tensors: Sequence[torch.Tensor], act: Callable[[], object], wrong: str = "",
    timeout: float | timedelta | None = None, results: Sequence[torch.Tensor] = (), size: int | None = None,
    sparse: bool = False,
) -> Work:  # fmt: skip
    """Do as `together`, in the background.

    Args:
        end, what, tensors, act, wrong, timeout: As of `together`.
        results: The tensors that get the result, where these are not `tensors`.
        size: Bytes that this rank contributes, for panels; None: those of `tensors`.
        sparse: Whether tensors may be sparse.
    """
    faults = [fault for tensor in [*tensors, *results] if (fault := backend_fault(end.backend, tensor, sparse))]
    wrong = next(iter(faults), wrong)
    layouts = ", ".join(map(layout_name, tensors))
    words = f"{what} of {layouts}" if tensors else what
    words = f"{words}: {wrong}" if wrong else words

    def job() -> int:
        compare(end, words, bool(wrong))
        act()
        return True

    if size is None:
        size = sum(tensor_bytes(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
    pending, wait = end.begin_job(job, what, layouts, size, seconds_of(timeout))
    name = f"{end.backend}:{what.partition('(')[0].partition(' ')[0]}"
    return Work(end.world, pending, wait, results or tensors, name=name)


def finished(work: Work, async_op: bool) -> Work | None:
    """Return the operation if it shall go on in the background; else wait for it, and return None."""
    if async_op:
        return work
    work.wait()
    return None


def compare(end: GroupMember, words: str, wrong: bool) -> None:
    """Raise CollectiveError on all ranks unless all descriptions are equal and none is wrong."""
    alone = len(end.ranks) == 1
    if not wrong and (alone or _agreed(end, words)):
        return
    if wrong and not alone:
        _agreed(end, f"{end.world.rank} is wrong")  # unique, so that no rank agrees even if all are wrong alike
    lines = [f"  {end.world.named(rank)} calls {each}" for rank, each in zip(end.ranks, _told(end, words), strict=True)]
    raise CollectiveError("\n".join(["ranks of a process group do not fit together:", *lines]))


def compare_exchange(end: GroupMember, gives: Sequence[int], takes: Sequence[int], unit: str) -> None:
    """Raise CollectiveError on all ranks unless each rank gives each other one as much as that one takes.

    Args:
        end: This rank's membership.
        gives, takes: For each rank of the group, in `unit`s: "row" or "element".
        unit: What is counted.
    """
    mine = torch.tensor([*gives, *takes], device=end.notes_on)
    table = [torch.empty_like(mine) for _ in end.ranks]
    c10d.all_gather(table, mine, end.group)
    size, counts = len(end.ranks), [each.tolist() for each in table]
    faults = [
        f"  {end.world.named(end.ranks[i])} sends {counted(counts[i][j], unit)} to {end.world.named(end.ranks[j])}, "
        f"which takes {counts[j][size + i]}"
        for i in range(size)
        for j in range(size)
        if counts[i][j] != counts[j][size + i]
    ]
    if faults:
        raise CollectiveError("\n".join(["ranks of a process group do not fit together:", *faults]))


def _agreed(end: GroupMember, words: str) -> bool:
    """Return whether all descriptions are equal."""
    # One small all-reduce: with MAX of d and of -d, the largest and the smallest digest are equal iff all are. 7 bytes
    # of digest fit a signed int64.
    mine = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest())
    both = torch.tensor([mine, -mine], device=end.notes_on)
    c10d.all_reduce(both, ReduceOp.MAX, end.group)
    return both.tolist() == [mine, -mine]


def _told(end: GroupMember, words: str) -> list[str]:
    """Return the descriptions of all ranks."""
    if len(end.ranks) == 1:
        return [words]
    notes = [torch.empty(NOTE, dtype=torch.uint8, device=end.notes_on) for _ in end.ranks]
    c10d.all_gather(notes, note(words).to(end.notes_on), end.group)
    return [said(each) for each in notes]


def note(text: str) -> torch.Tensor:
    """Return a text as a tensor of `NOTE` bytes; longer texts are cut off."""
    return torch.frombuffer(bytearray(text.encode()[:NOTE].ljust(NOTE, b"\0")), dtype=torch.uint8)


def said(note: torch.Tensor) -> str:
    """Return the text of a note."""
    return bytes(note.tolist()).rstrip(b"\0").decode(errors="ignore")


def op_name(op: object) -> str:
    """Return the name of a reduce op, as "SUM"."""
    return str(op).rpartition(".")[2]


def refused(op: object, tensor: object) -> str:
    """Return the reason that the op cannot combine such tensors; empty if it can."""
    # The rules are the same for all backends and devices: a program that runs with gloo runs with NCCL too.
    if not isinstance(tensor, torch.Tensor):
        return ""  # `backend_fault` has the better message
    dtype, name = tensor.dtype, op_name(op)
    exact = not dtype.is_floating_point and not dtype.is_complex
    if tensor.layout is torch.sparse_coo and name != "SUM":
        return f"{name} is not possible for sparse tensors: use SUM"
    if name not in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        return f"{name} is not a reduce op of all devices"
    if (name.startswith("B") and not exact) or (name == "AVG" and exact) or (dtype.is_complex and name not in _LINEAR):
        return f"{name} has no meaning for {dtype}"
    return ""
