"""Broken connections, step by step: messages on a broken connection are never lost without a report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from rpcbench.base.errors import NotConnectedError, RefusedError
from rpcbench.runtime import reconnect
from rpcbench.runtime.reconnect import ConnectionEntry, ConnectionTable, Reconnector
from rpcbench.transport.handshake import Identity
from rpcbench.transport.stream import ConnectionEnd

CUT = ConnectionEnd("cut", True)
ENDED = ConnectionEnd("it said so", False)


@dataclass
class Wire:
    """A connection as the table sees it; `got` lists the numbers of the messages that were written to it."""

    ended: bool = False
    got: list[int] = field(default_factory=list)

    def break_connection(self) -> None:
        self.ended = True


class Pair:
    """This process, and process 1 as seen from here. Each attempt to dial it runs the next one of `attempts`."""

    def __init__(self) -> None:
        self.entries = ConnectionTable()
        self.reunion = Reconnector(self.entries, self, self._dial, grace=30.0)
        self.told: list[str] = []
        self.attempts: list[Callable[[], object]] = []
        self.sent = self.before = self.serials = 0
        self.made: list[ConnectionEntry] = []
        self.on_broken: Callable[[], object] = lambda: None

    # -- events
    def connect(self, afresh: bool = False, incarnation: int = 0) -> ConnectionEntry:
        """The peer connects; `afresh`: it has lost all earlier connections."""
        self.serials += 1
        base = self.serials if afresh else 0
        peer = Identity("test", 1, "worker1", incarnation, serial=self.serials, base=base)
        entry = ConnectionEntry(peer, 1, Wire())  # type: ignore[arg-type]
        self.reunion.prepare_replacement(peer)
        if self.entries.add_connection(entry):
            self.made.append(entry)
            self.reunion.connection_established(peer)
        return entry

    def write(self) -> None:
        """Number a message, and write it to the current connection."""
        self.sent += 1
        wire = self.entries.find_connection(1)
        assert isinstance(wire, Wire)
        wire.got.append(self.sent)

    def fall(self, entry: ConnectionEntry, ending: ConnectionEnd = CUT) -> None:
        entry.connection.break_connection()
        self.reunion.connection_ended(entry, ending)

    def _dial(self, to: int, ways: Sequence[str], seconds: float) -> None:
        self.attempts.pop(0)()

    # -- reports to the machine
    def peer_lost(self, peer: Identity, reason: str) -> None:
        self.told.append(f"ended {peer.incarnation}")

    def connection_broken(self, peer: Identity, reason: str) -> None:
        self.before = self.sent
        self.on_broken()
        self.told.append("broken")

    def connection_resumed(self, peer: Identity) -> None:
        self.told.append("resumed")

    def peer_addresses(self, peer: Identity) -> Sequence[str]:
        return ("here",)

    def silently_lost(self) -> list[int]:
        """Return the messages on a broken connection that count as in flight for the machine."""
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


def test_a_broken_connection_is_reported_as_broken_and_then_as_resumed(pair: Pair) -> None:
    first = pair.connect()
    assert pair.told == []
    pair.write()
    pair.attempts = [hung_up, pair.connect]
    pair.fall(first)
    assert pair.told == ["broken", "resumed"] and not pair.silently_lost()


def test_a_connection_that_arrives_and_breaks_during_a_search_is_reported_separately(pair: Pair) -> None:
    """The second break has its own search; the earlier search ends without an effect on it."""
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


def test_a_connection_that_the_peer_replaces_is_reported_as_broken_and_resumed(pair: Pair) -> None:
    first = pair.connect()

    def come_twice() -> None:
        pair.connect()
        pair.write()
        pair.connect(afresh=True)  # the peer has lost the second connection; this side does not know

    pair.attempts = [out_of_reach, come_twice]
    pair.fall(first)
    assert pair.made[1].connection.ended
    assert pair.told == ["broken", "resumed"] * 2 and not pair.silently_lost()


def test_the_result_of_an_earlier_search_does_not_decide_a_later_one(pair: Pair) -> None:
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
    assert pair.told == ["broken", "resumed"], "the second break is not decided yet"
    found.set()
    later[0].join(20)
    assert pair.told == ["broken", "resumed"] * 2


def test_one_of_two_connections_can_break_while_the_other_is_replaced(pair: Pair) -> None:
    first, _ = pair.connect(), pair.connect()
    pair.write()
    first.connection.break_connection()
    falling = threading.Thread(target=pair.reunion.connection_ended, args=(first, CUT))
    falling.start()
    pair.connect(afresh=True)
    falling.join(20)
    assert not falling.is_alive()
    assert "broken" in pair.told and pair.told[-1] == "resumed" and not pair.silently_lost()


def test_one_of_two_connections_can_break_and_the_other_stays_in_use(pair: Pair) -> None:
    first, second = pair.connect(), pair.connect()
    pair.write()
    pair.fall(first)
    assert pair.told == ["broken", "resumed"]
    assert pair.entries.find_connection(1) is second.connection


def test_a_resumption_is_never_reported_before_its_break(pair: Pair) -> None:
    """The peer connects during the report of the break, and messages go to the new connection."""
    first = pair.connect()
    pair.on_broken = lambda: (pair.connect(), setattr(pair, "on_broken", lambda: None))
    pair.attempts = [out_of_reach]
    pair.fall(first)
    assert pair.told == ["broken", "resumed"] and not pair.silently_lost()


def test_a_process_that_has_ended_is_reported_once_and_barred(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "_TOGETHER", 20.0)  # for which the first of both threads waits for the other
    first, second = pair.connect(), pair.connect()
    second.connection.break_connection()
    pair.attempts = [hung_up, nobody]
    falling = threading.Thread(target=pair.reunion.connection_ended, args=(second, CUT))
    falling.start()
    pair.fall(first)
    falling.join(20)
    assert pair.told == ["ended 0"], "and no break"
    assert pair.entries.bar_reason(first.peer)
    assert not pair.entries.add_connection(first), "even a connection whose handshake began earlier is barred"


def test_a_connection_that_its_peer_ends_on_purpose_is_reported_as_ended(pair: Pair) -> None:
    pair.fall(pair.connect(), ENDED)
    assert pair.told == ["ended 0"]


def test_a_refusal_is_ignored_if_the_peer_has_connected_meanwhile(pair: Pair) -> None:
    first = pair.connect()

    def come_and_refuse() -> None:
        pair.connect()
        raise RefusedError("not you")

    pair.attempts = [come_and_refuse]
    pair.fall(first)
    assert pair.told == ["broken", "resumed"] and pair.entries.bar_reason(first.peer) is None


def test_a_new_incarnation_ends_the_search_for_the_old_one(pair: Pair) -> None:
    first = pair.connect()
    pair.attempts = [lambda: pair.connect(incarnation=1)]
    pair.fall(first)
    assert pair.told == ["ended 0"]


def test_a_peer_that_was_given_up_is_not_searched_for_and_cannot_return(pair: Pair) -> None:
    first = pair.connect()

    def given_up() -> None:
        pair.entries.bar_process(1, 0, "nothing was received from it")
        hung_up()

    pair.attempts = [given_up]
    pair.fall(first)
    assert pair.told == [] and not pair.entries.add_connection(first)


@pytest.mark.parametrize("noticed", [False, True])
def test_a_sender_waits_for_the_search_for_its_peer_and_does_not_dial(pair: Pair, noticed: bool) -> None:
    first, found = pair.connect(), []
    first.connection.break_connection()
    sender = threading.Thread(target=lambda: found.append(pair.entries.find_or_dial(1)))

    def begin_to_send() -> None:
        sender.start()
        sender.join(0.1)  # it must not return
        if noticed:
            pair.connect()

    pair.attempts = [begin_to_send if noticed else pair.connect]
    if not noticed:
        begin_to_send()
    pair.reunion.connection_ended(first, CUT)
    sender.join(20)
    assert found == [pair.made[1].connection], "the sender has not dialled"


def test_one_of_two_senders_dials_and_the_other_waits_for_the_connection(pair: Pair) -> None:
    assert pair.entries.find_or_dial(1) is None
    found: list[object] = []
    other = threading.Thread(target=lambda: found.append(pair.entries.find_or_dial(1)))
    other.start()
    entry = pair.connect()
    pair.entries.dial_finished(1)
    other.join(20)
    assert found == [entry.connection]


def test_no_sender_waits_and_no_break_is_reported_after_the_table_is_closed(pair: Pair) -> None:
    first = pair.connect()
    first.connection.break_connection()
    pair.entries.close()
    assert pair.entries.find_or_dial(1) is None
    pair.reunion.connection_ended(first, CUT)
    assert pair.told == []
