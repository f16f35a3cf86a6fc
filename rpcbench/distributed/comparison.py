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

from rpcbench.base.errors import CollectiveError, count_noun
from rpcbench.distributed.arguments import timeout_seconds
from rpcbench.distributed.groups import GroupMember
from rpcbench.distributed.memory_layouts import backend_fault, layout_name
from rpcbench.distributed.work import Work
from rpcbench.runtime.handles import tensor_bytes

NOTE = 256
"""Bytes of the description of a call that ranks exchange."""
_LINEAR = ("SUM", "AVG")  # the reduce ops that are defined for complex numbers


def run_collective(
    member: GroupMember, what: str, tensors: Sequence[torch.Tensor], act: Callable[[], object], fault: str = "",
    async_op: bool = False, timeout: float | timedelta | None = None, results: Sequence[torch.Tensor] = (),
    size: int | None = None, sparse: bool = False,
) -> Work | None:  # fmt: skip
    """Run `act` if all ranks of the group make the same call, with tensors of one layout, and no call is wrong.

    Args:
        end: This rank's membership.
        what: The operation and its arguments other than tensors, which must be the same on all ranks.
        tensors: The tensors whose layouts must be the same on all ranks.
        act: Runs on the group's thread.
        fault: That of this rank's call; "" if it has none.
        async_op: Whether to return at once, with a Work.
        timeout: Seconds, or None for those of the group.
        results: The tensors that get the result, where these are not `tensors`.
        size: Bytes that this rank contributes, for panels; None: those of `tensors`.
        sparse: Whether tensors may be sparse.
    """
    faults = [wrong for tensor in [*tensors, *results] if (wrong := backend_fault(member.backend, tensor, sparse))]
    fault = next(iter(faults), fault)
    layouts = ", ".join(map(layout_name, tensors))
    words = f"{what} of {layouts}" if tensors else what
    words = f"{words}: {fault}" if fault else words

    def compare_and_run() -> int:
        compare_calls(member, words, bool(fault))
        act()
        return True

    if size is None:
        size = sum(tensor_bytes(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
    pending, wait = member.begin_job(compare_and_run, what, layouts, size, timeout_seconds(timeout))
    name = f"{member.backend}:{what.partition('(')[0].partition(' ')[0]}"
    work = Work(member.world, pending, wait, results or tensors, name=name)
    if async_op:
        return work
    work.wait()
    return None


def compare_calls(member: GroupMember, words: str, is_wrong: bool) -> None:
    """Raise CollectiveError on all ranks unless all descriptions are equal and none is wrong."""
    alone = len(member.ranks) == 1
    if not is_wrong and (alone or _is_equal_on_all(member, words)):
        return
    if is_wrong and not alone:
        _is_equal_on_all(member, f"{member.world.rank} is wrong")  # unique: no rank agrees even if all are wrong alike
    calls = zip(member.ranks, _gather_words(member, words), strict=True)
    lines = [f"  {member.world.rank_label(rank)} calls {each}" for rank, each in calls]
    raise CollectiveError("\n".join(["ranks of a process group do not fit together:", *lines]))


def compare_exchange(member: GroupMember, gives: Sequence[int], takes: Sequence[int], unit: str) -> None:
    """Raise CollectiveError on all ranks unless each rank gives each other one as much as that one takes.

    Args:
        end: This rank's membership.
        gives, takes: For each rank of the group, in `unit`s: "row" or "element".
        unit: What is counted.
    """
    mine = torch.tensor([*gives, *takes], device=member.notes_device)
    table = [torch.empty_like(mine) for _ in member.ranks]
    c10d.all_gather(table, mine, member.group)
    size, counts = len(member.ranks), [each.tolist() for each in table]
    faults = [
        f"  {member.world.rank_label(member.ranks[i])} sends {count_noun(counts[i][j], unit)} to "
        f"{member.world.rank_label(member.ranks[j])}, which takes {counts[j][size + i]}"
        for i in range(size)
        for j in range(size)
        if counts[i][j] != counts[j][size + i]
    ]
    if faults:
        raise CollectiveError("\n".join(["ranks of a process group do not fit together:", *faults]))


def _is_equal_on_all(member: GroupMember, words: str) -> bool:
    # One small all-reduce: with MAX of d and of -d, the largest and the smallest digest are equal iff all are. 7 bytes
    # of digest fit a signed int64.
    mine = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest())
    both = torch.tensor([mine, -mine], device=member.notes_device)
    c10d.all_reduce(both, ReduceOp.MAX, member.group)
    return both.tolist() == [mine, -mine]


def _gather_words(member: GroupMember, words: str) -> list[str]:
    if len(member.ranks) == 1:
        return [words]
    notes = [torch.empty(NOTE, dtype=torch.uint8, device=member.notes_device) for _ in member.ranks]
    c10d.all_gather(notes, write_note(words).to(member.notes_device), member.group)
    return [read_note(each) for each in notes]


def write_note(text: str) -> torch.Tensor:
    """Return a text as a tensor of `NOTE` bytes; longer texts are cut off."""
    return torch.frombuffer(bytearray(text.encode()[:NOTE].ljust(NOTE, b"\0")), dtype=torch.uint8)


def read_note(note: torch.Tensor) -> str:
    return bytes(note.tolist()).rstrip(b"\0").decode(errors="ignore")


def op_name(op: object) -> str:
    """Return the name of a reduce op, as "SUM"."""
    return str(op).rpartition(".")[2]


def op_fault(op: object, tensor: object) -> str:
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
