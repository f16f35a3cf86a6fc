"""Delivery between this member and its peers, where messages may be lost, come twice, or in any order.

Guarantees
- A message is handled once at most. A control message is handled once at least, while both processes are in the world.
- What carries users' data is never sent again. Its sender learns for certain when it is lost, and takes back its forks.
- Words to or from a process that has gone never reach the one started after it under the same id.
- When all is acknowledged, nothing is kept.

How
    number    incarnations of sender and receiver, and a count for each pair of processes
    kept      what is not known to have come: control messages whole, of the others all but the data
    Seen      an acknowledgement, itself without a number: every 256 messages, and a tick after the last one
    Forget    "if you have not had these numbers, never take them"; `Fate` is the answer. Both are control messages.

Ticks are asked for (`Wake`) only while something is owed or missing. What is not acknowledged for two of them goes
again, at growing intervals. Data counts as lost only where it may be: if it went out before the connection broke, or
over a lossy link. Otherwise it is merely long, and its sender waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from rpcbench.base.events import Told
from rpcbench.protocol.effects import Effects, Send, Wake
from rpcbench.wire import messages as m


class SeenWindow:
    def __init__(self) -> None:
        self.floor = 0
        self.ahead: set[int] = set()  # what has come early

    def first_time(self, number: int) -> bool:
        """True once for each number."""
        if number == self.floor and not self.ahead:
            self.floor += 1
            return True
        if number < self.floor or number in self.ahead:
            return False
        self.ahead.add(number)
        while self.floor in self.ahead:
            self.ahead.remove(self.floor)
            self.floor += 1
        return True

    def early(self, most: int) -> tuple[int, ...]:
        """The first numbers seen beyond a gap."""
        return tuple(sorted(self.ahead)[:most])

    def __len__(self) -> int:
        return len(self.ahead)


COUNT_BITS, LIFE_BITS = 40, 12
_COUNT, _LIFE = (1 << COUNT_BITS) - 1, (1 << LIFE_BITS) - 1
OWED = 256
"""After so many messages their sender should hear that they have come."""
_EARLY = 1024
"""The most numbers beyond the first gap that one acknowledgement names."""
_AGAIN = frozenset(1 + ticks for ticks in accumulate(round(2 * 1.5**turn) for turn in range(8)))
"""At which tick a control message goes again: after two whole ones, then each time half as long again."""
_SELDOM = 64
_LOST = 10
"""Ticks after which users' data counts as lost."""
_ONCE: frozenset[type[Any]] = frozenset((m.Call, m.Create, m.Fetch, m.Result, m.Gradients, m.Parcel))
_WITH_BODY: frozenset[type[Any]] = frozenset(
    (m.Call, m.Create, m.Result, m.Failure, m.Gradients, m.WalkFailed, m.Parcel)
)

_new = tuple.__new__  # a step less than the class itself takes


class Pair:
    """Messages to and from one other process (or this one)."""

    __slots__ = ("_base", "asked", "before", "first", "kept", "late", "life", "owed", "peer", "sent", "stamp", "window")

    def __init__(self, peer: int, mine: int, theirs: int) -> None:
        self.peer = peer
        self.life = theirs & _LIFE
        self.stamp = self.life << LIFE_BITS | mine & _LIFE  # of its numbers,
        self.first = self.stamp << COUNT_BITS  # of which this is the first
        self._base = ((mine & _LIFE) << LIFE_BITS | self.life) << COUNT_BITS
        self.sent = self.before = 0  # numbers below `before` went out before the last break, or by a lossy link
        self.kept: dict[int, m.Message] = {}  # of those with a body, a pair of kind and other fields: quick to make
        self.late: dict[int, int] = {}  # of those, ticks that have passed
        self.asked: dict[int, m.Message] = {}
        self.window = SeenWindow()
        self.owed = 0

    # -- sending
    def number(self, message: m.Message) -> Send:
        count = self.sent
        self.sent = count + 1
        kind = type(message)
        self.kept[count] = (kind, message[:-1]) if kind in _WITH_BODY else message
        return _new(Send, (self.peer, self._base | count, message))

    def replace(self, seq: int, instead: m.Message) -> Send:
        """Something smaller takes the number of a message that will never go out."""
        self.kept[seq & _COUNT] = instead
        return Send(self.peer, seq, instead)

    def sends(self, seq: int) -> bool:
        """Whether the number is one of ours to this very process."""
        return seq & ~_COUNT == self._base

    def acknowledged(self, seen: m.Seen) -> None:
        early = set(seen.early)
        for count in [count for count in self.kept if count < seen.floor or count in early]:
            del self.kept[count]
            self.late.pop(count, None)

    def missing(self) -> bool:
        return bool(self.kept or self.asked)

    def numbers(self, of: Callable[[Any], bool]) -> list[int]:
        """Of the messages kept, those for which that is true."""
        return [count for count, message in self.kept.items() if of(message)]

    def again(self, counts: Iterable[int]) -> list[Send]:
        return [Send(self.peer, self._base | count, _whole(self.kept[count])) for count in counts]

    def forget(self, counts: Iterable[int]) -> list[Send]:
        """Find out whether these have come, and see to it that they do not come any more."""
        numbers = tuple(counts)
        for count in numbers:
            self.asked[count] = _whole(self.kept.pop(count))
            self.late.pop(count, None)
        return [self.number(m.Forget(numbers))] if numbers else []

    def settled(self, fate: m.Fate) -> list[Send]:
        """The messages that are lost for certain, as they went out."""
        for count in fate.had:
            self.asked.pop(count, None)
        return [Send(self.peer, self._base | n, self.asked.pop(n)) for n in fate.lost if n in self.asked]

    def mend(self, lossy: bool) -> list[Send]:
        """A tick has passed: what goes out again, and what is given up."""
        again, lost = [], []
        for count, message in self.kept.items():
            data = once(message)
            if data and not lossy and count >= self.before:
                continue  # it cannot be lost
            ticks = self.late[count] = self.late.get(count, 0) + 1
            if data:
                lost += [count] if ticks >= _LOST else []
            elif ticks in _AGAIN or ticks % _SELDOM == 0:
                again.append(count)
        return self.again(again) + self.forget(lost)

    def mend_all(self) -> list[Send]:
        """A new connection stands: what went into the old one and is not known to have come is seen to now."""
        again = [count for count, message in self.kept.items() if not once(message)]
        lost = [count for count, message in self.kept.items() if once(message) and count < self.before]
        return self.again(again) + self.forget(lost)

    # -- receiving
    def seen(self, answer: bool = False) -> Send:
        self.owed = 0
        return Send(self.peer, self._base, m.Seen(self.window.floor, self.window.early(_EARLY), answer))

    def fate(self, message: m.Forget) -> m.Fate:
        lost = {count for count in message.counts if self.window.first_time(count)}
        return m.Fate(tuple(lost), tuple(count for count in message.counts if count not in lost))


class Delivery:
    """All pairs of this member. `stirred`: a `Wake` is to be sent out."""

    def __init__(self, life: int, lossy: bool) -> None:
        self.life = life & _LIFE
        self.lossy = lossy
        self.pairs: dict[int, Pair] = {}
        self.stirred = False
        self._then: Callable[[], object] | None = None  # called when what was sent is acknowledged:
        self._awaited: dict[Pair, set[int]] | None = None  # these numbers; None: all
        self.told: Told | None = None  # of every message, while somebody wants to know
        self.ticking = False

    def meet(self, peer: int, theirs: int) -> Pair:
        """A process that there was no word to or from yet; its predecessor is forgotten."""
        pair = self.pairs[peer] = Pair(peer, self.life, theirs)
        return pair

    def drop(self, peer: int) -> None:
        """There will be no more words to or from it."""
        self.pairs.pop(peer, None)
        self._tell_if_quiet()

    def acknowledged(self, pair: Pair, seen: m.Seen) -> list[Send]:
        pair.acknowledged(seen)
        self._tell_if_quiet()
        return [pair.seen()] if seen.answer else []

    def settled(self, pair: Pair, fate: m.Fate) -> list[m.Message]:
        lost = pair.settled(fate)
        self._tell_if_quiet()
        if self.told is not None:
            for send in lost:
                self.told("lost", send.to, send.seq, send.message)
        return [send.message for send in lost]

    def flush(self, then: Callable[[], object], of: Callable[[Any], bool] | None = None) -> Effects:
        """Ask for acknowledgements now; `then` is called when all that was sent has come.

        `of`: all messages for which that is true; they are control messages.
        """
        self._then = then
        self._awaited = {pair: set(pair.numbers(of)) for pair in self.pairs.values()} if of else None
        self._tell_if_quiet()
        return [pair.seen(answer=True) for pair in self.pairs.values() if self._awaits(pair)]

    def _awaits(self, pair: Pair) -> bool:
        """Whether somebody waits until messages of this pair have come."""
        if self._then is None:
            return False
        if self._awaited is None:
            return pair.missing()
        return not self._awaited.get(pair, set()).isdisjoint(pair.kept)

    def _tell_if_quiet(self) -> None:
        if self._then is not None and not any(map(self._awaits, self.pairs.values())):
            then, self._then = self._then, None
            then()

    def pair(self, peer: int, life: int) -> Pair | None:
        """The pair with this very process, if there has been a word."""
        pair = self.pairs.get(peer)
        return pair if pair is not None and pair.life == life & _LIFE else None

    def may_lose(self, lossy: bool) -> None:
        """Whether connections may lose messages, from now on. Those that went out while they might may be lost yet."""
        if self.lossy and not lossy:
            for pair in self.pairs.values():
                pair.before = pair.sent
        self.lossy = lossy

    def number(self, pair: Pair, message: m.Message) -> Send:
        if not self.ticking:
            self._stir()
        send = pair.number(message)
        if self.told is not None:
            self.told("sent", pair.peer, send.seq, message)
        return send

    def telling(self, sends: list[Send]) -> Effects:
        """These go out (again): told of to whoever wants to know."""
        if self.told is not None:
            for send in sends:
                self.told("sent", send.to, send.seq, send.message)
        return [*sends]

    def first_time(self, pair: Pair, seq: int, message: m.Message) -> bool:
        """Whether a message is new. It is owed an acknowledgement in any case: the last one may be lost."""
        if not self.ticking:
            self._stir()
        pair.owed += 1
        new = pair.window.first_time(seq & _COUNT)
        if new and self.told is not None:
            self.told("received", pair.peer, seq, message)
        return new

    def next_from(self, peer: int, seq: int) -> Pair | None:
        """The pair, where this is the number that comes next from there, and nothing else is to be said of it now."""
        pair = self.pairs.get(peer) if self.ticking else None
        if pair is None or pair.owed >= OWED - 1:
            return None
        window = pair.window
        return pair if seq == pair.first + window.floor and not window.ahead else None

    def came(self, pair: Pair, seq: int, message: m.Message) -> None:
        """As `first_time`, of a message from `next_from`."""
        pair.owed += 1
        pair.window.floor += 1
        if self.told is not None:
            self.told("received", pair.peer, seq, message)

    def owe(self, pair: Pair) -> None:
        """An acknowledgement could not be sent: another one a tick from now."""
        pair.owed += 1
        if not self.ticking:
            self._stir()

    def _stir(self) -> None:
        self.ticking = self.stirred = True

    def tick(self) -> Effects:
        sends: Effects = []
        for pair in self.pairs.values():
            sends += self.telling(pair.mend(self.lossy))
            if pair.owed or self._awaits(pair):
                sends.append(pair.seen(answer=self._awaits(pair)))
        self.ticking = any(pair.missing() for pair in self.pairs.values())
        return [*sends, *([Wake()] if self.ticking else [])]

    def left(self) -> dict[int, str]:
        """Pairs with something unfinished, for those who wonder."""
        return {
            pair.peer: f"kept {pair.kept}, asked {pair.asked}, early {len(pair.window)}, owed {pair.owed}"
            for pair in self.pairs.values()
            if pair.missing() or len(pair.window) or pair.owed or pair.late
        }


def lives(seq: int) -> tuple[int, int]:
    """Incarnations of sender and receiver, as far as a number holds them."""
    return seq >> COUNT_BITS + LIFE_BITS, seq >> COUNT_BITS & _LIFE


def count_of(seq: int) -> int:
    """A number without the incarnations."""
    return seq & _COUNT


def newer(life: int, than: int) -> bool:
    """Whether an incarnation came after the other; they go round, but only neighbours ever meet."""
    return 0 < (life - than & _LIFE) <= _LIFE // 2


def once(message: m.Message) -> bool:
    """Whether a message (or what is kept of it) carries users' data, and so is sent once at most."""
    return (message[0] if type(message) is tuple else type(message)) in _ONCE


def _whole(kept: m.Message) -> m.Message:
    """What is kept of a message, as a message without a body."""
    if type(kept) is not tuple:
        return kept
    kind, fields = kept
    return kind(*fields, m.EMPTY)
