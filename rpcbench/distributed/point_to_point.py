"""Sends and receives between two ranks, in the foreground and in the background, with tags, and in batches.

Guarantees
- The sender first sends the layout, and the tensor only once the receiver has one of that layout. If they differ, both
  ranks raise a CollectiveError, and the group stays usable.
- Messages of one tag from one rank to another arrive in order, including those in the background. Messages of different
  tags do not wait for each other.
- A receive from any rank gets the message that comes first. It is refused during a receive of the same tag that names
  its rank, and the reverse: gloo could give either the other's message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as c10d

from rpcbench.base.errors import CollectiveError
from rpcbench.distributed import groups
from rpcbench.distributed.arguments import choose_rank, complete_help
from rpcbench.distributed.comparison import NOTE, read_note, write_note
from rpcbench.distributed.events import CollectivePart
from rpcbench.distributed.groups import AnyGroup, GroupMember
from rpcbench.distributed.memory_layouts import backend_fault, flat, layout_name
from rpcbench.distributed.work import Work
from rpcbench.distributed.world import Wait

# Point to point:   sender ── offer: layout ───────────────────> receiver
#                          <── answer: _FITS, or the fault ─────
#                          ── data: the tensor, if it fits ────>
_OFFER, _ANSWER, _DATA, _EACH = 1, 2, 3, 4
_FIRST = 0x5E4D00
"""Torch's tags of the messages of tag t are `_FIRST + 4 * t` and the three after it: programs that also use torch's own
functions are unlikely to use them."""
MOST_TAG = (2**31 - 1 - _FIRST) // _EACH - 1
_FITS = "fits"
_ANY = -1  # in place of the source's rank


@complete_help
def send(
    tensor: torch.Tensor, dst: int | None = None, group: AnyGroup = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send a tensor, and return once the peer has received it, in a tensor of the same layout."""
    isend(tensor, dst, group, tag, group_dst).wait()


@complete_help
def isend(
    tensor: torch.Tensor, dst: int | None = None, group: AnyGroup = None, tag: int = 0, group_dst: int | None = None
) -> Work:
    """Send a tensor in the background; the `wait` of the Work returns the peer's rank and raises the errors of `send`.

    An invalid call raises CollectiveError at once.
    """
    end, to = _find_peer(tensor, dst, group_dst, "dst", group, tag)
    return send_as(end, tensor, to, tag, layout_name(tensor))


def send_as(end: GroupMember, tensor: torch.Tensor, to: int, tag: int, layout: str) -> Work:
    """Send a tensor in the background, by a name for its layout that the receiver must give, too. For `objects`."""
    entered = end.begin(end.between(end.world.rank, to, tensor, tag))
    job = lambda: _send_tensor(end, tensor, to, _FIRST + _EACH * tag, layout, entered)  # noqa: E731
    wait = Wait(f"send to rank {to}{_tag_suffix(tag)}", f"send {end.key}", 0, (to,), end.seconds)
    pending = end.world.executor((end.key, "to", to, tag)).put(job)
    return Work(end.world, pending, wait, [tensor], name=f"{end.backend}:send")


@complete_help
def recv(
    tensor: torch.Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receive a tensor of the sender's layout, and return the sender's rank.

    The sender is by default the rank that sends first. Raises CollectiveError also for a receive from any rank during
    another receive of this tag, or the reverse.
    """
    return irecv(tensor, src, group, tag, group_src).wait()


@complete_help
def irecv(
    tensor: torch.Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0, group_src: int | None = None
) -> Work:
    """Receive a tensor in the background; the `wait` and `source_rank` of the Work return the sender's rank.

    `wait` raises the errors of `recv`; an invalid call raises CollectiveError at once.
    """
    end, source = _find_peer(tensor, src, group_src, "src", group, tag)
    return receive_as(end, tensor, source, tag, layout_name(tensor))


def receive_as(end: GroupMember, tensor: torch.Tensor, source: int, tag: int, layout: str) -> Work:
    """Receive a tensor in the background, from the rank `source` or -1 for any, by the layout's name of `send_as`."""
    anyone, me = source == _ANY, end.world.rank
    # gloo could give either the other's message.
    if any(end.world.executor(_key_of_receives(end, rank, tag)).busy for rank in (end.ranks if anyone else [_ANY])):
        one, other = ("recv from any rank", "an irecv") if anyone else ("recv", "an irecv from any rank")
        raise CollectiveError(f"{one} is not possible while {other} waits: wait for the irecv first")
    part = end.from_any(tensor, tag) if anyone else end.between(source, me, tensor, tag)
    what = f"recv from {'any rank' if anyone else f'rank {source}'}{_tag_suffix(tag)}"
    members = end.wait("").members if anyone else (source,)
    entered = end.begin(part)
    job = lambda: _receive_tensor(end, tensor, source, tag, layout, entered)  # noqa: E731
    wait = Wait(what, f"recv {end.key}", 0, members, end.seconds)
    pending = end.world.executor(_key_of_receives(end, source, tag)).put(job)
    return Work(end.world, pending, wait, [tensor], end.ranks, f"{end.backend}:recv")


class P2POp:
    """A send or receive for `batch_isend_irecv`, which begins it: `op` is `isend` or `irecv`.

    `peer` is the other rank, as a rank of the world; `group_peer` its position in the group, in place of `peer`.
    """

    def __init__(
        self, op: Callable[..., object], tensor: torch.Tensor, peer: int | None = None, group: AnyGroup = None,
        tag: int = 0, group_peer: int | None = None,
    ) -> None:  # fmt: skip
        """Check the arguments. Raises CollectiveError where they are wrong."""
        known = {isend: isend, irecv: irecv, c10d.isend: isend, c10d.irecv: irecv}
        if op not in known:
            raise CollectiveError(f"a P2POp is an isend or an irecv, not {getattr(op, '__name__', op)}")
        end, self.peer = _find_peer(tensor, peer, group_peer, "peer", group, tag)
        self.op = known[op]
        self.tensor, self.group, self.tag = tensor, group, tag
        self.group_peer = end.ranks.index(self.peer)

    def begin(self) -> Work:
        """Begin it."""
        return self.op(self.tensor, self.peer, self.group, self.tag)

    def __repr__(self) -> str:
        where = f"{'to' if self.op is isend else 'from'} rank {self.peer}{_tag_suffix(self.tag)}"
        return f"P2POp({self.op.__name__} of {layout_name(self.tensor)} {where})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begin the sends and receives of `p2p_op_list`, which then run at once; return a Work for each, in order.

    Their order matters only among those of one direction, peer and tag. Raises CollectiveError if the list is empty or
    has anything else in it; none has begun then.
    """
    wrong = [each for each in p2p_op_list if not isinstance(each, P2POp)]
    if wrong or not p2p_op_list:
        found = type(wrong[0]).__name__ if wrong else "an empty list"
        raise CollectiveError(f"batch_isend_irecv takes a list of P2POp of rpcbench.distributed, not {found}")
    return [each.begin() for each in p2p_op_list]


def _key_of_receives(end: GroupMember, rank: int, tag: int) -> tuple[str, str, int, int]:
    # One thread for each sender and tag: receives from one rank run in order, those from different ranks run at once.
    return end.key, "from", rank, tag


def _tag_suffix(tag: int) -> str:
    return f" with tag {tag}" if tag else ""


def _find_peer(
    tensor: torch.Tensor, other: int | None, group_other: int | None, name: str, group: AnyGroup, tag: int
) -> tuple[GroupMember, int]:
    """Return this rank's membership, and the other rank. Raises CollectiveError where it cannot send or receive."""
    end = groups.member(group)
    fault = backend_fault(end.backend, tensor) or tag_fault(tag)
    return end, choose_peer(end, other, group_other, name, fault)


def choose_peer(end: GroupMember, other: int | None, group_other: int | None, name: str, fault: str = "") -> int:
    """Return the other rank; -1 for a receive from any. Raises CollectiveError for it, or for a fault found before."""
    peer = _ANY
    if not (name == "src" and other is None and group_other is None):  # a receive may be from any rank
        peer, unknown = choose_rank(end.ranks, other, group_other, name)
        fault = fault or unknown or (f"rank {peer} is this rank" if peer == end.world.rank else "")
    if fault:
        raise CollectiveError(f"{end.world.named(end.world.rank)} cannot send or receive: {fault}")
    return peer


def tag_fault(tag: object) -> str:
    """Return the fault of a tag; "" if it has none."""
    fine = isinstance(tag, int) and not isinstance(tag, bool) and 0 <= tag <= MOST_TAG
    return "" if fine else f"tag={tag!r} is not a number from 0 to {MOST_TAG}"


def _send_tensor(
    end: GroupMember, tensor: torch.Tensor, to: int, first: int, layout: str, entered: CollectivePart
) -> int:
    with entered:
        _send_message(end, write_note(layout).to(end.notes_on), to, first + _OFFER)
        answer = torch.empty(NOTE, dtype=torch.uint8, device=end.notes_on)
        _receive_message(end, answer, to, first + _ANSWER)
        if read_note(answer) != _FITS:
            raise CollectiveError(read_note(answer))
        _send_message(end, tensor, to, first + _DATA)
    return to


def _receive_tensor(
    end: GroupMember, tensor: torch.Tensor, source: int, tag: int, layout: str, entered: CollectivePart
) -> int:
    world, offer = end.world, torch.empty(NOTE, dtype=torch.uint8, device=end.notes_on)
    first = _FIRST + _EACH * tag
    with entered:
        sender = _receive_message(end, offer, source, first + _OFFER)
        if source == _ANY:  # recorded so far as a receive from any rank
            entered.becomes(end.between(sender, world.rank, tensor, tag))
        there = read_note(offer)
        differs = f"{world.named(sender)} sends {there}, but {world.named(world.rank)} receives {layout}"
        answer = write_note(_FITS if layout == there else differs)
        _send_message(end, answer.to(end.notes_on), sender, first + _ANSWER)
        if layout != there:
            raise CollectiveError(differs)
        _receive_message(end, tensor, sender, first + _DATA)
    return sender


def _send_message(end: GroupMember, tensor: torch.Tensor, to: int, tag: int) -> None:
    """Send one message of torch."""
    c10d.send(flat(tensor), group=end.group, tag=tag, group_dst=end.place_of(to))


def _receive_message(end: GroupMember, tensor: torch.Tensor, source: int, tag: int) -> int:
    """Receive one message of torch, and return the rank that has sent it."""
    place = None if source == _ANY else end.place_of(source)
    work: Any = c10d.irecv(flat(tensor), group=end.group, tag=tag, group_src=place)
    work.wait()
    return end.ranks[work._source_rank()] if place is None else source
