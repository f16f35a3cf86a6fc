"""Who is let in: both sides without sockets, every step disturbed; then, on a socket, that nobody can take his time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import msgpack
import pytest
from streams import AnySocket

from rpcbench.transport import ends, handshake
from rpcbench.transport.handshake import RECORD, Handshake, Identity, dial, listen
from rpcbench.words.errors import AuthenticationError, ProtocolError

SECRET = b"s" * 32
ALICE = Identity("digits", 1, "worker1", 3)
BOB = Identity("digits", 0, "notebook", 0)
Meddle = Callable[[str, bytes], bytes]
"""(step, data) -> what arrives instead. Steps: "hello", "answer", "proof", "welcome"."""


def untouched(step: str, data: bytes) -> bytes:
    return data


def meet(
    dialler: Handshake, listener: Handshake, meddle: Meddle = untouched
) -> tuple[Identity | Exception, Identity | Exception | None]:
    """What the dialler and the listener find out, or the error that ends each; None for one that was not answered."""
    _, count = next(listener)
    hello, _ = next(dialler)
    assert len(hello) == count == RECORD
    answer = _step(listener, meddle("hello", hello))
    if not isinstance(answer, tuple):
        return ConnectionError(), answer
    proof = _step(dialler, meddle("answer", answer[0]))
    if not isinstance(proof, tuple):
        return proof, None
    welcome = _step(listener, meddle("proof", proof[0]))
    if not isinstance(welcome, tuple):
        return ConnectionError(), welcome
    assert welcome[1] == 0, "the listener reads no more after its proof"
    return _step(dialler, meddle("welcome", welcome[0])), _step(listener, b"")


def _step(side: Handshake, data: bytes):
    try:
        return side.send(data)
    except StopIteration as done:
        return done.value
    except (AuthenticationError, ProtocolError) as error:
        return error


def forged(**changes: object) -> bytes:
    """A hello of worker1 with some fields changed."""
    fields = {
        "magic": handshake.MAGIC, "version": handshake.VERSION, "cluster": "digits", "id": 1, "name": "worker1",
        "incarnation": 3, "nonce": bytes(32),
    }  # fmt: skip
    packed = msgpack.packb(list({**fields, **changes}.values()))
    return bytes([len(packed)]) + packed.ljust(RECORD - 1, b"\0")


def test_each_learns_who_the_other_is() -> None:
    assert meet(dial(ALICE, SECRET), listen(BOB, SECRET)) == (BOB, ALICE)


def test_a_wrong_secret_is_found_by_the_listener_which_shows_no_proof() -> None:
    seen = []

    def watch(step: str, data: bytes) -> bytes:
        seen.append(step)
        return data

    _, listener = meet(dial(ALICE, b"w" * 32), listen(BOB, SECRET), watch)
    assert isinstance(listener, AuthenticationError) and "does not know this cluster's secret" in str(listener)
    assert "welcome" not in seen


def test_a_dialler_is_not_fooled_by_a_listener_without_the_secret() -> None:
    def blind(step: str, data: bytes) -> bytes:
        return bytes(32) if step == "welcome" else data

    dialler, _ = meet(dial(ALICE, SECRET), listen(BOB, SECRET), blind)
    assert isinstance(dialler, AuthenticationError)


HELLOS = {
    "nothing": (bytes(RECORD), "does not speak rpcbench"),
    "noise": (b"\xc1" * RECORD, "does not speak rpcbench"),
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n".ljust(RECORD), "does not speak rpcbench"),
    "magic": (forged(magic=b"rpcbrunch"), "does not speak rpcbench"),
    "short nonce": (forged(nonce=b"1"), "does not speak rpcbench"),
    "no nonce": (forged(nonce=None), "does not speak rpcbench"),
    "length beyond": (b"\xff" + forged()[1:], "does not speak rpcbench"),
    "cut off": (bytes([40]) + forged()[1:], "does not speak rpcbench"),
    "version": (forged(version=handshake.VERSION + 1), "speaks version 2 of the protocol, this process version 1"),
    "cluster": (forged(cluster="letters"), "another cluster"),
    "id": (forged(id="1"), "makes no sense"),
    "name": (forged(name=["worker1"]), "makes no sense"),
    "incarnation": (forged(incarnation=None), "makes no sense"),
}


@pytest.mark.parametrize("side", ["hello", "answer"])
@pytest.mark.parametrize("what", HELLOS)
def test_a_hello_that_is_none_ends_it_on_either_side(what: str, side: str) -> None:
    record, reason = HELLOS[what]
    dialler, listener = meet(dial(ALICE, SECRET), listen(BOB, SECRET), lambda step, d: record if step == side else d)
    error = listener if side == "hello" else dialler
    assert isinstance(error, ProtocolError) and reason in str(error)


@pytest.mark.parametrize("step", ["hello", "answer", "proof", "welcome"])
def test_one_changed_bit_anywhere_is_noticed(step: str) -> None:
    for position in range(RECORD if step in ("hello", "answer") else 32):

        def flip(at: str, data: bytes, position: int = position) -> bytes:
            return data if at != step else data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]

        dialler, listener = meet(dial(ALICE, SECRET), listen(BOB, SECRET), flip)
        assert isinstance(dialler, Exception), position
        assert (listener == ALICE) == (step == "welcome"), position


def test_what_was_said_once_is_worth_nothing_again() -> None:
    heard: dict[str, bytes] = {}

    def record(step: str, data: bytes) -> bytes:
        return heard.setdefault(step, data)

    assert meet(dial(ALICE, SECRET), listen(BOB, SECRET), record) == (BOB, ALICE)
    listener = listen(BOB, SECRET)
    next(listener)
    listener.send(heard["hello"])
    with pytest.raises(AuthenticationError):
        listener.send(heard["proof"])
    dialler = dial(ALICE, SECRET)
    next(dialler)
    dialler.send(heard["answer"])
    with pytest.raises(AuthenticationError):
        dialler.send(heard["welcome"])


def test_a_side_does_not_accept_its_own_words_sent_back() -> None:
    dialler = dial(ALICE, SECRET)
    hello, _ = next(dialler)
    proof, _ = dialler.send(hello)
    with pytest.raises(AuthenticationError):
        dialler.send(proof)


def test_a_proof_asked_of_one_member_does_not_serve_another() -> None:
    """Mallory passes worker1's words on to another listener: worker1 answered to a hello that this one never sent."""
    first, other = listen(BOB, SECRET), listen(Identity("digits", 2, "worker2", 0), SECRET)
    dialler = dial(ALICE, SECRET)
    hello, _ = next(dialler)
    for side in (first, other):
        next(side)
    answer, _ = first.send(hello)
    other.send(hello)
    proof, _ = dialler.send(answer)
    with pytest.raises(AuthenticationError):
        other.send(proof)


def test_a_name_that_does_not_fit_is_refused_at_home() -> None:
    with pytest.raises(ProtocolError, match="too long"):
        next(dial(Identity("digits", 1, "w" * 250, 0), SECRET))


# -- on a socket
def test_a_dialler_who_sends_byte_by_byte_is_cut_off_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "HANDSHAKE_SECONDS", 0.3)
    mine, theirs = socket.socketpair()
    over = threading.Event()

    def dribble() -> None:
        with contextlib.suppress(BrokenPipeError):
            for byte in forged():
                if over.wait(0.1):
                    return
                mine.sendall(bytes([byte]))

    thread = threading.Thread(target=dribble)
    thread.start()
    begin = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            ends.let_in(AnySocket(), theirs, BOB, SECRET)
        assert time.monotonic() - begin < 5, "25 s would be the whole hello"
    finally:
        over.set()
        thread.join()
        mine.close()
    assert theirs.fileno() == -1, "and nothing is kept open for it"


@pytest.mark.parametrize("sent", [b"", forged()[:100], forged()])
def test_a_dialler_who_hangs_up_is_no_peer(sent: bytes) -> None:
    mine, theirs = socket.socketpair()
    mine.sendall(sent)
    mine.shutdown(socket.SHUT_WR)
    with mine, pytest.raises(AuthenticationError, match="hung up"):
        ends.let_in(AnySocket(), theirs, BOB, SECRET)
    assert theirs.fileno() == -1
