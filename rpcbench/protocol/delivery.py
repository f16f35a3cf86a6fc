"""Delivery between this member and its peers: sequence numbers, acknowledgements, retransmits with backoff.

Messages may be lost, duplicated or reordered on the way.

Guarantees
- A message is handled at most once. A control message is handled at least once, while both processes are in the world.
- A message with users' data is never retransmitted. If it is lost, its sender learns so for certain, and withdraws the
  RRef forks in it.
- A message to or from a departed process never reaches its successor under the same id.
- When all messages are acknowledged, nothing is kept.
"""

# Theory of operation
# A sequence number has 64 bits. A message of another incarnation is recognised by the number alone.
#     63            52 51              40 39                                  0
#     ┌───────────────┬──────────────────┬─────────────────────────────────────┐
#     │ sender's life │ receiver's life  │ count of messages of this pair      │    life: incarnation, modulo 4096
#     └───────────────┴──────────────────┴─────────────────────────────────────┘
#
#     sender                                         receiver
#     number_message: kept[count] = message  ──────> is_first_time(seq)? handle : drop the duplicate
#     drop acknowledged messages   <── Seen(floor, early) ── every 256 messages, and one tick after the last one
#
#     not acknowledged for two ticks:
#     a control message            ── the same number again, with backoff ──>
#     users' data, if lost         ── CancelDelivery(counts) ──> never accept these counts from now on
#     `process_report`: take it back      <── DeliveryReport(lost, had) ── the counts that had not arrived, and those
# that had
#
# `kept` holds control messages whole; of messages with users' data it holds all but the data. `Seen` has no number of
# its own. `CancelDelivery` and `DeliveryReport` are control messages, so they arrive. Data counts as lost only if
# it can be: if it was sent before the connection broke, or over a lossy link. Otherwise a large message merely takes
# long; its sender waits.
# A tick is scheduled (`Wake`) only while an acknowledgement is owed or a message is not acknowledged.

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from rpcbench.base.ids import MessageObserver
from rpcbench.protocol.effects import Effects, Send, Wake
from rpcbench.wire import messages as m

DEFERRABLE: frozenset[type[Any]] = frozenset((m.ChildAccept, m.UserDelete, m.ReleaseContext, m.ForkAccept))
"""Types of messages for which no thread waits, see `is_deferrable`."""


def is_deferrable(message: m.Message) -> bool:
    """Return whether no thread waits for it: it is sent with the next message to the same peer, or a moment later."""
    return type(message) in DEFERRABLE and (type(message) is not m.ForkAccept or message.first)


class ReceiveWindow:
    def __init__(self) -> None:
        self.first_missing = 0  # all numbers below have arrived
        self.ahead: set[int] = set()  # numbers above the first gap that have arrived

    def is_first_time(self, number: int) -> bool:
        """Return True once for each number."""
        if number == self.first_missing and not self.ahead:  # the usual case: in order
            self.first_missing += 1
            return True
        if number < self.first_missing or number in self.ahead:
            return False
        self.ahead.add(number)
        while self.first_missing in self.ahead:
            self.ahead.remove(self.first_missing)
            self.first_missing += 1
        return True

    def early_numbers(self, most: int) -> tuple[int, ...]:
        """Return the lowest numbers seen above the first gap, at most `most`."""
        return tuple(sorted(self.ahead)[:most])

    def __len__(self) -> int:
        return len(self.ahead)


SEQUENCE_COUNT_BITS, LIFE_BITS = 40, 12
_COUNT, _LIFE = (1 << SEQUENCE_COUNT_BITS) - 1, (1 << LIFE_BITS) - 1  # masks
OWED = 256
"""The number of messages after which the receiver acknowledges at once."""
_EARLY = 1024  # the most numbers above the first gap that one acknowledgement lists
_AGAIN = frozenset(1 + ticks for ticks in accumulate(round(2 * 1.5**turn) for turn in range(8)))
"""The ticks at which a control message is retransmitted: after two whole ones, then with a backoff of 1.5."""
_SELDOM = 64  # after the last of those, every 64 ticks
_LOST = 10  # ticks after which users' data counts as lost
# Messages with users' data, which is sent at most once; and messages with a body, which is not kept for a retransmit.
_ONCE: frozenset[type[Any]] = frozenset((m.Call, m.Create, m.Fetch, m.Result, m.Gradients, m.Parcel))
_WITH_BODY: frozenset[type[Any]] = frozenset(
    (m.Call, m.Create, m.Result, m.Failure, m.Gradients, m.BackwardFailed, m.Parcel)
)

_new = tuple.__new__  # saves one call against the named tuple's own constructor


class Pair:
    """The delivery state of this process and one peer process, or itself."""

    __slots__ = (
        "_base",
        "before",
        "first",
        "kept",
        "late",
        "owed",
        "peer",
        "peer_incarnation",
        "pending_cancels",
        "sent",
        "stamp",
        "window",
    )

    def __init__(self, peer: int, mine: int, theirs: int) -> None:
        self.peer = peer
        self.peer_incarnation = theirs & _LIFE
        self.stamp = self.peer_incarnation << LIFE_BITS | mine & _LIFE  # the upper bits of the peer's numbers,
        self.first = self.stamp << SEQUENCE_COUNT_BITS  # and the first of these numbers
        self._base = (
            (mine & _LIFE) << LIFE_BITS | self.peer_incarnation
        ) << SEQUENCE_COUNT_BITS  # the upper bits of our numbers
        self.sent = self.before = 0  # counts below `before` were sent before the last break, or over a lossy link
        self.kept: dict[int, m.Message] = {}  # not acknowledged; with a body: (type, other fields), quick to make
        self.late: dict[int, int] = {}  # count → ticks without an acknowledgement
        self.pending_cancels: dict[
            int, m.Message
        ] = {}  # CancelDelivery was sent for these; DeliveryReport has not arrived
        self.window = ReceiveWindow()
        self.owed = 0  # messages received since the last acknowledgement

    # -- sending
    def number_message(self, message: m.Message) -> Send:
        count = self.sent
        self.sent = count + 1
        kind = type(message)
        self.kept[count] = (kind, message[:-1]) if kind in _WITH_BODY else message
        return _new(Send, (self.peer, self._base | count, message))

    def replace_message(self, seq: int, instead: m.Message) -> Send:
        """Give the number of a message that will not be sent to a smaller one."""
        self.kept[seq & _COUNT] = instead
        return Send(self.peer, seq, instead)

    def is_own_number(self, seq: int) -> bool:
        """Return whether the number is one of ours to this incarnation of the peer."""
        return seq & ~_COUNT == self._base

    def process_ack(self, seen: m.Seen) -> None:
        early = set(seen.early)
        for count in [count for count in self.kept if count < seen.first_missing or count in early]:
            del self.kept[count]
            self.late.pop(count, None)

    def has_unacknowledged(self) -> bool:
        return bool(self.kept or self.pending_cancels)

    def retransmit_messages(self, counts: Iterable[int]) -> list[Send]:
        return [Send(self.peer, self._base | count, _whole_message(self.kept[count])) for count in counts]

    def cancel_messages(self, counts: Iterable[int]) -> list[Send]:
        """Cancel the delivery of these, and ask which of them have arrived already."""
        numbers = tuple(counts)
        for count in numbers:
            self.pending_cancels[count] = _whole_message(self.kept.pop(count))
            self.late.pop(count, None)
        return [self.number_message(m.CancelDelivery(numbers))] if numbers else []

    def process_report(self, fate: m.DeliveryReport) -> list[Send]:
        """Return the messages that the peer has not had, and will not accept any more."""
        for count in fate.had:
            self.pending_cancels.pop(count, None)
        return [
            Send(self.peer, self._base | n, self.pending_cancels.pop(n)) for n in fate.lost if n in self.pending_cancels
        ]

    def retransmits_due(self, lossy: bool) -> list[Send]:
        """Return the messages that this tick retransmits, and the `CancelDelivery` for data that counts as lost."""
        again, lost = [], []
        for count, message in self.kept.items():
            data = is_sent_once(message)
            if data and not lossy and count >= self.before:
                continue  # it cannot be lost on an unbroken connection
            ticks = self.late[count] = self.late.get(count, 0) + 1
            if data:
                lost += [count] if ticks >= _LOST else []
            elif ticks in _AGAIN or ticks % _SELDOM == 0:
                again.append(count)
        return self.retransmit_messages(again) + self.cancel_messages(lost)

    def after_reconnect(self) -> list[Send]:
        """Retransmit control messages, and cancel data of the old connection: a new one is open."""
        again = [count for count, message in self.kept.items() if not is_sent_once(message)]
        lost = [count for count, message in self.kept.items() if is_sent_once(message) and count < self.before]
        return self.retransmit_messages(again) + self.cancel_messages(lost)

    # -- receiving
    def make_ack(self, answer: bool = False) -> Send:
        self.owed = 0
        return Send(self.peer, self._base, m.Seen(self.window.first_missing, self.window.early_numbers(_EARLY), answer))

    def make_report(self, message: m.CancelDelivery) -> m.DeliveryReport:
        lost = {count for count in message.counts if self.window.is_first_time(count)}
        return m.DeliveryReport(tuple(lost), tuple(count for count in message.counts if count not in lost))


class Delivery:
    """All pairs of this member."""

    def __init__(self, incarnation: int, lossy: bool) -> None:
        self.incarnation = incarnation & _LIFE  # this process's incarnation
        self.lossy = lossy  # connections may lose messages without breaking
        self.pairs: dict[int, Pair] = {}
        self.tick_due = False  # the node should emit a `Wake`
        self._then: Callable[[], object] | None = None  # called once the messages of `request_flush` are acknowledged:
        self._awaited: dict[Pair, set[int]] | None = None  # these counts; None: all
        self.observer: MessageObserver | None = None  # receives every message while an observer is registered
        self.ticking = False  # a tick is scheduled

    def create_pair(self, peer: int, theirs: int) -> Pair:
        """Make the pair for a new process; it replaces that of its predecessor."""
        pair = self.pairs[peer] = Pair(peer, self.incarnation, theirs)
        return pair

    def remove_pair(self, peer: int) -> None:
        """Remove the pair of a process that has left."""
        self.pairs.pop(peer, None)
        self._finish_flush_if_acknowledged()

    def process_ack(self, pair: Pair, seen: m.Seen) -> list[Send]:
        pair.process_ack(seen)
        self._finish_flush_if_acknowledged()
        return [pair.make_ack()] if seen.answer else []

    def process_report(self, pair: Pair, fate: m.DeliveryReport) -> list[m.Message]:
        lost = pair.process_report(fate)
        self._finish_flush_if_acknowledged()
        return [send.message for send in self.report_sends(lost, "lost")]

    def request_flush(self, then: Callable[[], object], of: Callable[[Any], bool] | None = None) -> Effects:
        """Request acknowledgements; call `then` when all messages, or all control messages `of` a kind, have them."""
        self._then = then
        pairs = self.pairs.values()
        self._awaited = {pair: {n for n, one in pair.kept.items() if of(one)} for pair in pairs} if of else None
        self._finish_flush_if_acknowledged()
        return [pair.make_ack(answer=True) for pair in self.pairs.values() if self._is_flushing(pair)]

    def _is_flushing(self, pair: Pair) -> bool:
        """Return whether `request_flush` still waits for acknowledgements of this pair."""
        if self._then is None:
            return False
        if self._awaited is None:
            return pair.has_unacknowledged()
        return not self._awaited.get(pair, set()).isdisjoint(pair.kept)

    def _finish_flush_if_acknowledged(self) -> None:
        if self._then is not None and not any(map(self._is_flushing, self.pairs.values())):
            then, self._then = self._then, None
            then()

    def find_pair(self, peer: int, incarnation: int) -> Pair | None:
        """Return the pair with this incarnation of a peer, if there is one."""
        pair = self.pairs.get(peer)
        return pair if pair is not None and pair.peer_incarnation == incarnation & _LIFE else None

    def set_lossy(self, lossy: bool) -> None:
        """Set whether connections may lose messages from now on."""
        if self.lossy and not lossy:
            for pair in self.pairs.values():
                pair.before = pair.sent  # those sent over the lossy link may still be lost
        self.lossy = lossy

    def number_message(self, pair: Pair, message: m.Message) -> Send:
        if not self.ticking:
            self.ticking = self.tick_due = True
        send = pair.number_message(message)
        if self.observer is not None:
            self.observer("sent", pair.peer, send.seq, message)
        return send

    def report_sends(self, sends: list[Send], kind: str = "sent") -> Effects:
        """Report these messages as sent (again), or lost, to the observer."""
        if self.observer is not None:
            for send in sends:
                self.observer(kind, send.to, send.seq, send.message)
        return [*sends]

    def is_first_time(self, pair: Pair, seq: int, message: m.Message) -> bool:
        """Return whether a message is new."""
        if not self.ticking:
            self.ticking = self.tick_due = True
        pair.owed += 1  # for a duplicate, too: the acknowledgement before may be lost
        new = pair.window.is_first_time(seq & _COUNT)
        if new and self.observer is not None:
            self.observer("received", pair.peer, seq, message)
        return new

    def next_in_order(self, peer: int, seq: int) -> Pair | None:
        """Return the pair if `seq` is next in order, a tick is scheduled and no acknowledgement is due (fast path)."""
        pair = self.pairs.get(peer) if self.ticking else None
        if pair is None or pair.owed >= OWED - 1:
            return None
        window = pair.window
        return pair if seq == pair.first + window.first_missing and not window.ahead else None

    def accept_next(self, pair: Pair, seq: int, message: m.Message) -> None:
        """Do as `is_first_time` for a message that `next_in_order` has approved."""
        pair.owed += 1
        pair.window.first_missing += 1
        if self.observer is not None:
            self.observer("received", pair.peer, seq, message)

    def schedule_ack(self, pair: Pair) -> None:
        """Schedule another acknowledgement for the next tick: this one could not be sent."""
        pair.owed += 1
        if not self.ticking:
            self.ticking = self.tick_due = True

    def tick(self) -> Effects:
        sends: Effects = []
        for pair in self.pairs.values():
            sends += self.report_sends(pair.retransmits_due(self.lossy))
            if pair.owed or self._is_flushing(pair):
                sends.append(pair.make_ack(answer=self._is_flushing(pair)))
        self.ticking = any(pair.has_unacknowledged() for pair in self.pairs.values())
        return [*sends, *([Wake()] if self.ticking else [])]

    def describe_unfinished(self) -> dict[int, str]:
        """Describe the pairs with unfinished deliveries, for diagnosis."""
        return {
            pair.peer: f"kept {pair.kept}, asked {pair.pending_cancels}, early {len(pair.window)}, owed {pair.owed}"
            for pair in self.pairs.values()
            if pair.has_unacknowledged() or len(pair.window) or pair.owed or pair.late
        }


def incarnations_of(seq: int) -> tuple[int, int]:
    """Return the incarnations of sender and receiver in a number, modulo 4096."""
    return seq >> SEQUENCE_COUNT_BITS + LIFE_BITS, seq >> SEQUENCE_COUNT_BITS & _LIFE


def count_of(seq: int) -> int:
    """Return the count in a number, without the incarnations."""
    return seq & _COUNT


def is_newer(incarnation: int, than: int) -> bool:
    """Return whether an incarnation is later than the other."""
    # The numbers wrap around at 4096, but only neighbouring incarnations are ever compared.
    return 0 < (incarnation - than & _LIFE) <= _LIFE // 2


def is_sent_once(message: m.Message) -> bool:
    """Return whether a message, or its entry in `kept`, carries users' data, and so is sent at most once."""
    return (message[0] if type(message) is tuple else type(message)) in _ONCE


def _whole_message(kept: m.Message) -> m.Message:
    """Return an entry of `kept` as a message, without a body."""
    if type(kept) is not tuple:
        return kept
    kind, fields = kept
    return kind(*fields, m.EMPTY)
