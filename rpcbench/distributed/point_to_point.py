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
from rpcbench.distributed.memory_layouts import backend_fault, contiguous_view, layout_name
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
    member, to = _find_peer(tensor, dst, group_dst, "dst", group, tag)
    return send_with_layout(member, tensor, to, tag, layout_name(tensor))


def send_with_layout(member: GroupMember, tensor: torch.Tensor, to: int, tag: int, layout: str) -> Work:
    """Send a tensor in the background, by a name for its layout that the receiver must give, too. For `objects`."""
    entered = member.begin_part(member.make_transfer_part(member.world.rank, to, tensor, tag))
    job = lambda: _send_tensor(member, tensor, to, _FIRST + _EACH * tag, layout, entered)  # noqa: E731
    wait = Wait(f"send to rank {to}{_tag_suffix(tag)}", f"send {member.key}", 0, (to,), member.seconds)
    pending = member.world.executor_for((member.key, "to", to, tag)).submit_job(job)
    return Work(member.world, pending, wait, [tensor], name=f"{member.backend}:send")


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
    member, source = _find_peer(tensor, src, group_src, "src", group, tag)
    return receive_with_layout(member, tensor, source, tag, layout_name(tensor))


def receive_with_layout(member: GroupMember, tensor: torch.Tensor, source: int, tag: int, layout: str) -> Work:
    """Receive a tensor in the background, from the rank `source` or -1 for any, by the layout's name of
    `send_with_layout`."""
    from_any_rank, own_rank = source == _ANY, member.world.rank
    # gloo could give either the other's message.
    if any(
        member.world.executor_for(_key_of_receives(member, rank, tag)).is_busy
        for rank in (member.ranks if from_any_rank else [_ANY])
    ):
        refused_call, waiting_call = (
            ("recv from any rank", "an irecv") if from_any_rank else ("recv", "an irecv from any rank")
        )
        raise CollectiveError(f"{refused_call} is not possible while {waiting_call} waits: wait for the irecv first")
    part = (
        member.make_receive_any_part(tensor, tag)
        if from_any_rank
        else member.make_transfer_part(source, own_rank, tensor, tag)
    )
    what = f"recv from {'any rank' if from_any_rank else f'rank {source}'}{_tag_suffix(tag)}"
    members = member.make_wait("").members if from_any_rank else (source,)
    entered = member.begin_part(part)
    job = lambda: _receive_tensor(member, tensor, source, tag, layout, entered)  # noqa: E731
    wait = Wait(what, f"recv {member.key}", 0, members, member.seconds)
    pending = member.world.executor_for(_key_of_receives(member, source, tag)).submit_job(job)
    return Work(member.world, pending, wait, [tensor], member.ranks, f"{member.backend}:recv")


class P2POp:
    """A send or receive for `batch_isend_irecv`, which begins it: `op` is `isend` or `irecv`.

    `peer` is the other rank, as a rank of the world; `group_peer` its position in the group, in place of `peer`.
    """

    def __init__(
        self, op: Callable[..., object], tensor: torch.Tensor, peer: int | None = None, group: AnyGroup = None,
        tag: int = 0, group_peer: int | None = None,
    ) -> None:  # fmt: skip
        """Check the arguments. Raises CollectiveError where they are wrong."""
        functions = {isend: isend, irecv: irecv, c10d.isend: isend, c10d.irecv: irecv}
        if op not in functions:
            raise CollectiveError(f"a P2POp is an isend or an irecv, not {getattr(op, '__name__', op)}")
        member, self.peer = _find_peer(tensor, peer, group_peer, "peer", group, tag)
        self.op = functions[op]
        self.tensor, self.group, self.tag = tensor, group, tag
        self.group_peer = member.ranks.index(self.peer)

    def begin(self) -> Work:
        """Begin it."""
        return self.op(self.tensor, self.peer, self.group, self.tag)

    def __repr__(self) -> str:
        direction = f"{'to' if self.op is isend else 'from'} rank {self.peer}{_tag_suffix(self.tag)}"
        return f"P2POp({self.op.__name__} of {layout_name(self.tensor)} {direction})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begin the sends and receives of `p2p_op_list`, which then run at once; return a Work for each, in order.

    Their order matters only among those of one direction, peer and tag. Raises CollectiveError if the list is empty or
    has anything else in it; none has begun then.
    """
    invalid_ops = [p2p_op for p2p_op in p2p_op_list if not isinstance(p2p_op, P2POp)]
    if invalid_ops or not p2p_op_list:
        received = type(invalid_ops[0]).__name__ if invalid_ops else "an empty list"
        raise CollectiveError(f"batch_isend_irecv takes a list of P2POp of rpcbench.distributed, not {received}")
    return [p2p_op.begin() for p2p_op in p2p_op_list]


def _key_of_receives(member: GroupMember, rank: int, tag: int) -> tuple[str, str, int, int]:
    # One thread for each sender and tag: receives from one rank run in order, those from different ranks run at once.
    return member.key, "from", rank, tag


def _tag_suffix(tag: int) -> str:
    return f" with tag {tag}" if tag else ""


def _find_peer(
    tensor: torch.Tensor, peer_rank: int | None, peer_position: int | None, name: str, group: AnyGroup, tag: int
) -> tuple[GroupMember, int]:
    """Return this rank's membership, and the other rank. Raises CollectiveError where it cannot send or receive."""
    member = groups.member_of(group)
    fault = backend_fault(member.backend, tensor) or tag_fault(tag)
    return member, choose_peer(member, peer_rank, peer_position, name, fault)


def choose_peer(
    member: GroupMember, peer_rank: int | None, peer_position: int | None, name: str, fault: str = ""
) -> int:
    """Return the other rank; -1 for a receive from any. Raises CollectiveError for it, or for a fault found before."""
    peer = _ANY
    if not (name == "src" and peer_rank is None and peer_position is None):  # a receive may be from any rank
        peer, rank_error = choose_rank(member.ranks, peer_rank, peer_position, name)
        fault = fault or rank_error or (f"rank {peer} is this rank" if peer == member.world.rank else "")
    if fault:
        raise CollectiveError(f"{member.world.rank_label(member.world.rank)} cannot send or receive: {fault}")
    return peer


def tag_fault(tag: object) -> str:
    """Return the fault of a tag; "" if it has none."""
    fine = isinstance(tag, int) and not isinstance(tag, bool) and 0 <= tag <= MOST_TAG
    return "" if fine else f"tag={tag!r} is not a number from 0 to {MOST_TAG}"


def _send_tensor(
    member: GroupMember, tensor: torch.Tensor, to: int, first: int, layout: str, entered: CollectivePart
) -> int:
    with entered:
        _send_message(member, write_note(layout).to(member.notes_device), to, first + _OFFER)
        answer = torch.empty(NOTE, dtype=torch.uint8, device=member.notes_device)
        _receive_message(member, answer, to, first + _ANSWER)
        if read_note(answer) != _FITS:
            raise CollectiveError(read_note(answer))
        _send_message(member, tensor, to, first + _DATA)
    return to


def _receive_tensor(
    member: GroupMember, tensor: torch.Tensor, source: int, tag: int, layout: str, entered: CollectivePart
) -> int:
    world, offer = member.world, torch.empty(NOTE, dtype=torch.uint8, device=member.notes_device)
    first = _FIRST + _EACH * tag
    with entered:
        sender = _receive_message(member, offer, source, first + _OFFER)
        if source == _ANY:  # recorded so far as a receive from any rank
            entered.adopt_identity(member.make_transfer_part(sender, world.rank, tensor, tag))
        there = read_note(offer)
        differs = f"{world.rank_label(sender)} sends {there}, but {world.rank_label(world.rank)} receives {layout}"
        answer = write_note(_FITS if layout == there else differs)
        _send_message(member, answer.to(member.notes_device), sender, first + _ANSWER)
        if layout != there:
            raise CollectiveError(differs)
        _receive_message(member, tensor, sender, first + _DATA)
    return sender


def _send_message(member: GroupMember, tensor: torch.Tensor, to: int, tag: int) -> None:
    """Send one message of torch."""
    c10d.send(contiguous_view(tensor), group=member.group, tag=tag, group_dst=member.group_rank_of(to))


def _receive_message(member: GroupMember, tensor: torch.Tensor, source: int, tag: int) -> int:
    """Receive one message of torch, and return the rank that has sent it."""
    place = None if source == _ANY else member.group_rank_of(source)
    work: Any = c10d.irecv(contiguous_view(tensor), group=member.group, tag=tag, group_src=place)
    work.wait()
    return member.ranks[work._source_rank()] if place is None else source
