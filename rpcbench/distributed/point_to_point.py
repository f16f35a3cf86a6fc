"""Tensors from one rank to another.

The sender says first what comes, and sends once the receiver has a tensor like it. Guarantees
- Where the two differ both raise a CollectiveError that tells of both, and go on after it.
- What one rank sends to another arrives in order, also of sends and receives in the background.
"""

from __future__ import annotations

import torch
import torch.distributed as c10d

from rpcbench.base.errors import CollectiveError
from rpcbench.distributed import backends, groups
from rpcbench.distributed.collectives import NOTE, note, said, stranger
from rpcbench.distributed.groups import AnyGroup, Member
from rpcbench.distributed.lanes import Pending
from rpcbench.distributed.told import Part
from rpcbench.distributed.world import Wait

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
    wrong = backends.fault(end.world.backend, tensor)
    if other is not None:
        wrong = wrong or stranger(end, other) or (f"rank {other} is this one" if other == end.world.rank else "")
    if wrong:
        raise CollectiveError(f"{end.world.named(end.world.rank)} cannot send or receive: {wrong}")
    return end


def _send(end: Member, tensor: torch.Tensor, dst: int, entered: Part) -> int:
    with entered:
        c10d.send(note(backends.layout(tensor)), dst, end.group, _OFFER)
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
        here, there = backends.layout(tensor), said(offer)
        differs = f"{world.named(source)} sends {there}, but {world.named(world.rank)} receives {here}"
        c10d.send(note(_FITS if here == there else differs), source, end.group, _ANSWER)
        if here != there:
            raise CollectiveError(differs)
        c10d.recv(tensor, source, end.group, _DATA)
    return source
