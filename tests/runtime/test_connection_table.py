"""Breaks of connections, step by step: what went into a connection that falls is never lost without a word."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from rpcbench.base.errors import NotConnectedError, RefusedError
from rpcbench.runtime.reconnect import ConnectionEntry, ConnectionTable, Reconnector
from rpcbench.transport.handshake import Identity
from rpcbench.transport.stream import ConnectionEnd

CUT = ConnectionEnd("cut", True)
ENDED = ConnectionEnd("it said so", False)


@dataclass
class Wire:
    """A connection as far as the table knows one; `got` are the numbers of messages that went in."""

    ended: bool = False
    got: list[int] = field(default_factory=list)

    def cut(self) -> None:
        self.ended = True


class Pair:
    """This process, and the process 1 as it looks from here. Attempts to dial it run `attempts`, one after another."""

    def __init__(self) -> None:
        self.entries = ConnectionTable()
        self.reunion = Reconnector(self.entries, self, self._dial, grace=30.0)
        self.told: list[str] = []
        self.attempts: list[Callable[[], object]] = []
        self.sent = self.before = self.serials = 0
        self.made: list[ConnectionEntry] = []
        self.on_broken: Callable[[], object] = lambda: None

    # -- what happens to it
    def connect(self, afresh: bool = False, incarnation: int = 0) -> ConnectionEntry:
        """The peer comes in; `afresh`: it has lost all connections of before."""
        self.serials += 1
        base = self.serials if afresh else 0
        peer = Identity("test", 1, "worker1", incarnation, serial=self.serials, base=base)
        entry = ConnectionEntry(peer, 1, Wire())  # type: ignore[arg-type]
        self.reunion.remove_replaced(peer)
        if self.entries.add(entry):
            self.made.append(entry)
            self.reunion.stands(peer)
        return entry

    def write(self) -> None:
        """A message gets its number, and goes into the connection there is."""
        self.sent += 1
        wire = self.entries.find(1)
        assert isinstance(wire, Wire)
        wire.got.append(self.sent)

    def fall(self, entry: ConnectionEntry, ending: ConnectionEnd = CUT) -> None:
        entry.connection.cut()
        self.reunion.over(entry, ending)

    def _dial(self, to: int, ways: Sequence[str], seconds: float) -> None:
        self.attempts.pop(0)()

    # -- what the machine hears
    def ended(self, peer: Identity, reason: str) -> None:
        self.told.append(f"ended {peer.incarnation}")

    def broken(self, peer: Identity, reason: str) -> None:
        self.before = self.sent
        self.on_broken()
        self.told.append("broken")

    def resumed(self, peer: Identity) -> None:
        self.told.append("resumed")

    def ways(self, peer: Identity) -> Sequence[str]:
        return ("here",)

    def silently_lost(self) -> list[int]:
        """Messages in a connection that has fallen, of which the machine believes that they are under way."""
        fallen = [entry.connection for entry in self.made if entry.connection.ended]
        return [number for wire in fallen for number in wire.got if number > self.before]  # type: ignore[attr-defined]


@pytest.fixture
def pair() -> Pair:
    return Pair()


def out_of_reach() -> None:
    raise NotConnectedError("no way") from OSError(113, "No route to host")


def hung_up() -> None:
    raise NotConnectedError("it hung up") from ConnectionResetError()


def nobody() -> None:
    raise NotConnectedError("nobody") from ConnectionRefusedError()


def test_a_break_and_a_return(pair: Pair) -> None:
    first = pair.connect()
    assert pair.told == []
    pair.write()
    pair.attempts = [hung_up, pair.connect]
    pair.fall(first)
    assert pair.told == ["broken", "resumed"] and not pair.silently_lost()


def test_one_that_comes_and_falls_while_the_peer_is_looked_for(pair: Pair) -> None:
    """The search for it is one of its own: that of before ends, and takes nothing away from it."""
    first = pair.connect()

    def come_and_fall() -> None:
        second = pair.connect()
        pair.write()
        pair.fall(second)
        hung_up()

    pair.attempts = [come_and_fall, hung_up, pair.connect]
    pair.fall(first)
    assert pair.told == ["broken", "resumed"] * 2 and not pair.silently_lost()
    assert pair.attempts == []


def test_one_that_falls_after_an_early_word_of_the_break_before(pair: Pair) -> None:
    first = pair.connect()

    def come_twice() -> None:
        pair.connect()
        pair.write()
        pair.connect(afresh=True)  # the peer has lost the second one, and this side does not know

    pair.attempts = [out_of_reach, come_twice]
    pair.fall(first)
    assert pair.made[1].connection.ended
    assert pair.told == ["broken", "resumed"] * 2 and not pair.silently_lost()


def test_what_an_earlier_search_finds_says_nothing_of_a_later_one(pair: Pair) -> None:
    first, searching, found = pair.connect(), threading.Event(), threading.Event()

    def find_later() -> None:
        searching.set()
        assert found.wait(20)
        pair.connect()

    def fall_again() -> None:
        second = pair.connect()
        later.append(threading.Thread(target=pair.fall, args=(second,)))
        later[0].start()
        assert searching.wait(20)
        nobody()

    later: list[threading.Thread] = []
    pair.attempts = [fall_again, find_later]
    pair.fall(first)
    assert pair.told == ["broken", "resumed"], "what the second break means is not clear yet"
    found.set()
    later[0].join(20)
    assert pair.told == ["broken", "resumed"] * 2


def test_one_of_two_falls_and_the_other_is_replaced_meanwhile(pair: Pair) -> None:
    first, _ = pair.connect(), pair.connect()
    pair.write()
    first.connection.cut()
    falling = threading.Thread(target=pair.reunion.over, args=(first, CUT))
    falling.start()
    pair.connect(afresh=True)
    falling.join(20)
    assert not falling.is_alive()
    assert "broken" in pair.told and pair.told[-1] == "resumed" and not pair.silently_lost()


def test_one_of_two_falls_for_itself(pair: Pair) -> None:
    first, second = pair.connect(), pair.connect()
    pair.write()
    pair.fall(first)
    assert pair.told == ["broken", "resumed"]
    assert pair.entries.find(1) is second.connection


def test_that_it_is_together_again_is_not_heard_before_the_break(pair: Pair) -> None:
    """The peer comes in while the machine is being told, and the messages of then go into the new connection."""
    first = pair.connect()
    pair.on_broken = lambda: (pair.connect(), setattr(pair, "on_broken", lambda: None))
    pair.attempts = [out_of_reach]
    pair.fall(first)
    assert pair.told == ["broken", "resumed"] and not pair.silently_lost()


def test_a_process_that_has_ended(pair: Pair) -> None:
    first, second = pair.connect(), pair.connect()
    second.connection.cut()
    pair.attempts = [hung_up, nobody]
    falling = threading.Thread(target=pair.reunion.over, args=(second, CUT))
    falling.start()
    pair.fall(first)
    falling.join(20)
    assert pair.told == ["ended 0"], "and no word of a break"
    assert pair.entries.barred(first.peer)
    assert not pair.entries.add(first), "not even one whose handshake had begun before"


def test_one_that_its_peer_ends_on_purpose(pair: Pair) -> None:
    pair.fall(pair.connect(), ENDED)
    assert pair.told == ["ended 0"]


def test_a_refusal_counts_for_nothing_where_the_peer_has_come_meanwhile(pair: Pair) -> None:
    first = pair.connect()

    def come_and_refuse() -> None:
        pair.connect()
        raise RefusedError("not you")

    pair.attempts = [come_and_refuse]
    pair.fall(first)
    assert pair.told == ["broken", "resumed"] and pair.entries.barred(first.peer) is None


def test_a_successor_comes_while_its_predecessor_is_looked_for(pair: Pair) -> None:
    first = pair.connect()
    pair.attempts = [lambda: pair.connect(incarnation=1)]
    pair.fall(first)
    assert pair.told == ["ended 0"]


def test_a_peer_that_is_given_up_is_not_looked_for(pair: Pair) -> None:
    first = pair.connect()

    def given_up() -> None:
        pair.entries.drop(1, 0, "nothing was received from it")
        hung_up()

    pair.attempts = [given_up]
    pair.fall(first)
    assert pair.told == [] and not pair.entries.add(first)


@pytest.mark.parametrize("noticed", [False, True])
def test_who_has_something_to_send_waits_for_those_who_look_for_the_peer(pair: Pair, noticed: bool) -> None:
    first, found = pair.connect(), []
    first.connection.cut()
    sender = threading.Thread(target=lambda: found.append(pair.entries.find_or_dial(1)))

    def begin_to_send() -> None:
        sender.start()
        sender.join(0.1)  # it must not return
        if noticed:
            pair.connect()

    pair.attempts = [begin_to_send if noticed else pair.connect]
    if not noticed:
        begin_to_send()
    pair.reunion.over(first, CUT)
    sender.join(20)
    assert found == [pair.made[1].connection], "and has not dialled"


def test_of_two_senders_one_dials(pair: Pair) -> None:
    assert pair.entries.find_or_dial(1) is None
    found: list[object] = []
    other = threading.Thread(target=lambda: found.append(pair.entries.find_or_dial(1)))
    other.start()
    entry = pair.connect()
    pair.entries.dialled(1)
    other.join(20)
    assert found == [entry.connection]


def test_nobody_waits_once_all_is_closed(pair: Pair) -> None:
    first = pair.connect()
    first.connection.cut()
    pair.entries.close()
    assert pair.entries.find_or_dial(1) is None
    pair.reunion.over(first, CUT)
    assert pair.told == []
