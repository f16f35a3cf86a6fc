"""The handshake: both sides without sockets, with each step disturbed; then its deadline on a socket."""

from __future__ import annotations

import contextlib
import pickle
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import msgpack
from streams import AnySocket

from rpcbench.base.errors import AuthenticationError, ProtocolError, RefusedError, VersionMismatch
from rpcbench.transport import addresses, handshake
from rpcbench.transport.addresses import Opener
from rpcbench.transport.handshake import (
    HERE,
    RECORD,
    VERDICT,
    Handshake,
    Identity,
    Objection,
    handshake_as_dialler,
    handshake_as_listener,
)

SECRET = b"s" * 32
ALICE = Identity("digits", 1, "worker1", 3, "here")
BOB = Identity("digits", 0, "notebook", 0, "there", epoch=77)
Meddle = Callable[[str, bytes], bytes]
"""(step, data) -> what arrives instead. Steps: "hello", "answer", "proof", "welcome"."""


def untouched(step: str, data: bytes) -> bytes:
    return data


def meet(
    dialler: Handshake, listener: Handshake, meddle: Meddle = untouched
) -> tuple[Identity | Exception, Identity | Exception | None]:
    """Return the results of dialler and listener: the identity of the other, or an error; None without an answer."""
    _, count = next(listener)
    hello, _ = next(dialler)
    assert len(hello) == count == RECORD
    answer = _step(listener, meddle("hello", hello))
    if not isinstance(answer, tuple):
        return ConnectionError(), answer
    proof = _step(dialler, meddle("answer", answer[0]))
    if not isinstance(proof, tuple):
        return proof, _step(listener, b"") if answer[1] == 0 else None
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
        "magic": handshake.MAGIC, **HERE._asdict(), "cluster": "digits", "id": 1, "name": "worker1", "incarnation": 3,
        "host": "here", "epoch": 0, "serial": 0, "base": 0, "nonce": bytes(32),
    }  # fmt: skip
    packed = msgpack.encode(list({**fields, **changes}.values()))
    return len(packed).to_bytes(2, "little") + packed.ljust(RECORD - 2, b"\0")


def test_both_sides_learn_the_identity_of_the_other() -> None:
    assert meet(handshake_as_dialler(ALICE, SECRET), handshake_as_listener(BOB, SECRET)) == (BOB, ALICE)


def test_a_listener_refuses_a_wrong_secret_and_sends_no_proof() -> None:
    seen = []

    def watch(step: str, data: bytes) -> bytes:
        seen.append(step)
        return data

    _, listener = meet(handshake_as_dialler(ALICE, b"w" * 32), handshake_as_listener(BOB, SECRET), watch)
    assert isinstance(listener, AuthenticationError) and "does not know this cluster's secret" in str(listener)
    assert "welcome" not in seen


def test_a_dialler_refuses_a_listener_without_the_secret() -> None:
    def blind(step: str, data: bytes) -> bytes:
        return bytes(32) if step == "welcome" else data

    dialler, _ = meet(handshake_as_dialler(ALICE, SECRET), handshake_as_listener(BOB, SECRET), blind)
    assert isinstance(dialler, AuthenticationError)


HELLOS = {
    "nothing": (bytes(RECORD), "does not speak rpcbench"),
    "noise": (b"\xc1" * RECORD, "does not speak rpcbench"),
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n".ljust(RECORD), "does not speak rpcbench"),
    "magic": (forged(magic=b"rpcbrunch"), "does not speak rpcbench"),
    "short nonce": (forged(nonce=b"1"), "does not speak rpcbench"),
    "no nonce": (forged(nonce=None), "does not speak rpcbench"),
    "length beyond": (b"\xff\xff" + forged()[2:], "does not speak rpcbench"),
    "cut off": (bytes([40, 0]) + forged()[2:], "does not speak rpcbench"),
    "version": (
        forged(protocol=HERE.protocol + 1),
        f"this process has protocol {HERE.protocol}, .*the peer has protocol {HERE.protocol + 1}, ",
    ),
    "python": (forged(python="3.7.1"), rf"the peer has protocol {HERE.protocol}, Python 3\.7\.1, .*Use the same"),
    "versions": (forged(torch=2), "makes no sense"),
    "cluster": (forged(cluster="letters"), "another cluster"),
    "id": (forged(id="1"), "makes no sense"),
    "name": (forged(name=["worker1"]), "makes no sense"),
    "incarnation": (forged(incarnation=None), "makes no sense"),
    "epoch": (forged(epoch=True), "makes no sense"),
    "host": (forged(host=b"here"), "makes no sense"),
}


@pytest.mark.parametrize("side", ["hello", "answer"])
@pytest.mark.parametrize("what", HELLOS)
def test_an_invalid_hello_ends_the_handshake_on_either_side(what: str, side: str) -> None:
    record, reason = HELLOS[what]
    dialler, listener = meet(
        handshake_as_dialler(ALICE, SECRET),
        handshake_as_listener(BOB, SECRET),
        lambda step, d: record if step == side else d,
    )
    error = listener if side == "hello" else dialler
    assert isinstance(error, ProtocolError) and re.search(reason, str(error))


@pytest.mark.parametrize("step", ["hello", "answer", "proof", "welcome"])
def test_one_flipped_bit_anywhere_fails_the_handshake(step: str) -> None:
    size = {"proof": 32, "welcome": 32 + VERDICT}.get(step, RECORD)
    for position in range(size):

        def flip(at: str, data: bytes, position: int = position) -> bytes:
            return data if at != step else data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]

        dialler, listener = meet(handshake_as_dialler(ALICE, SECRET), handshake_as_listener(BOB, SECRET), flip)
        assert isinstance(dialler, Exception), position
        assert (listener == ALICE) == (step == "welcome"), position


def test_replayed_records_are_refused_by_both_sides() -> None:
    heard: dict[str, bytes] = {}

    def record(step: str, data: bytes) -> bytes:
        return heard.setdefault(step, data)

    assert meet(handshake_as_dialler(ALICE, SECRET), handshake_as_listener(BOB, SECRET), record) == (BOB, ALICE)
    listener = handshake_as_listener(BOB, SECRET)
    next(listener)
    listener.send(heard["hello"])
    with pytest.raises(AuthenticationError):
        listener.send(heard["proof"])
    dialler = handshake_as_dialler(ALICE, SECRET)
    next(dialler)
    dialler.send(heard["answer"])
    with pytest.raises(AuthenticationError):
        dialler.send(heard["welcome"])


def test_a_dialler_refuses_its_own_records_sent_back() -> None:
    dialler = handshake_as_dialler(ALICE, SECRET)
    hello, _ = next(dialler)
    proof, _ = dialler.send(hello)
    with pytest.raises(AuthenticationError):
        dialler.send(proof)


def test_a_listener_refuses_a_proof_that_was_made_for_another_listener() -> None:
    """Mallory forwards the proof of worker1 to another listener, whose hello worker1 has never received."""
    first, other = (
        handshake_as_listener(BOB, SECRET),
        handshake_as_listener(Identity("digits", 2, "worker2", 0), SECRET),
    )
    dialler = handshake_as_dialler(ALICE, SECRET)
    hello, _ = next(dialler)
    for side in (first, other):
        next(side)
    answer, _ = first.send(hello)
    other.send(hello)
    proof, _ = dialler.send(answer)
    with pytest.raises(AuthenticationError):
        other.send(proof)


def test_a_name_that_is_too_long_for_the_record_is_refused_before_dialling() -> None:
    with pytest.raises(ProtocolError, match="too long"):
        next(handshake_as_dialler(Identity("digits", 1, "w" * RECORD, 0), SECRET))
    next(handshake_as_dialler(Identity("d" * 64, 1 << 40, "w" * 127, 1 << 40, "h" * 64, 1 << 60), SECRET))


# -- diallers with the secret that are refused
MEMBER = replace(ALICE, epoch=BOB.epoch)
OTHER = Identity("digits", 2, "worker2", 0, "here", epoch=BOB.epoch)
REFUSED = {
    "of an earlier world": (replace(ALICE, epoch=5), BOB, "worker1 belongs to an earlier world"),
    "met by one in no world": (MEMBER, replace(OTHER, epoch=handshake.NO_WORLD), "worker2 is in no world yet"),
}


@pytest.mark.parametrize("who", REFUSED)
def test_a_member_of_another_world_is_refused_with_a_reason_on_both_sides(who: str) -> None:
    here, there, reason = REFUSED[who]
    dialler, listener = meet(handshake_as_dialler(here, SECRET), handshake_as_listener(there, SECRET))
    for error in (dialler, listener):
        assert isinstance(error, RefusedError) and reason in str(error)


def test_members_of_one_world_complete_the_handshake() -> None:
    assert meet(handshake_as_dialler(MEMBER, SECRET), handshake_as_listener(OTHER, SECRET)) == (OTHER, MEMBER)
    assert meet(handshake_as_dialler(MEMBER, SECRET), handshake_as_listener(BOB, SECRET, lambda peer: None)) == (
        BOB,
        MEMBER,
    )


def test_a_listener_can_refuse_with_a_reason_of_any_length() -> None:
    long = "it was given up " * 100
    objection = Objection(f"worker1: {long}", again=True)
    dialler, listener = meet(
        handshake_as_dialler(MEMBER, SECRET), handshake_as_listener(BOB, SECRET, lambda peer: objection)
    )
    assert isinstance(listener, RefusedError) and long in str(listener)
    assert isinstance(dialler, RefusedError) and "worker1: it was given up" in str(dialler) and dialler.again


def test_a_process_without_an_incarnation_is_offered_one() -> None:
    unborn = replace(ALICE, incarnation=handshake.NO_INCARNATION)
    offered: list[Identity] = []

    def offer(peer: Identity) -> int:
        offered.append(peer)
        return 7

    assert meet(handshake_as_dialler(unborn, SECRET), handshake_as_listener(BOB, SECRET, offer=offer)) == (
        replace(BOB, offer=7),
        unborn,
    )
    assert meet(handshake_as_dialler(ALICE, SECRET), handshake_as_listener(BOB, SECRET, offer=offer)) == (BOB, ALICE)
    meet(handshake_as_dialler(unborn, b"w" * 32), handshake_as_listener(BOB, SECRET, offer=offer))
    meet(handshake_as_dialler(unborn, SECRET), handshake_as_listener(BOB, SECRET, lambda peer: Objection("no"), offer))
    assert offered == [unborn], "members, strangers and refused processes use up no incarnation"


def test_a_dialler_without_the_secret_gets_no_reason() -> None:
    seen: list[str] = []

    def watch(step: str, data: bytes) -> bytes:
        seen.append(step)
        return data

    _, listener = meet(
        handshake_as_dialler(MEMBER, b"w" * 32), handshake_as_listener(BOB, SECRET, lambda peer: Objection("no")), watch
    )
    assert isinstance(listener, AuthenticationError) and "welcome" not in seen


# -- versions
def test_incompatible_versions_are_named_on_both_sides() -> None:
    old = replace(ALICE, versions=HERE._replace(python="3.7.1"))
    dialler, listener = meet(handshake_as_dialler(old, SECRET), handshake_as_listener(BOB, SECRET))
    assert isinstance(dialler, VersionMismatch) and isinstance(listener, VersionMismatch)
    assert (dialler.mine, dialler.theirs) == (listener.theirs, listener.mine) == (str(old.versions), str(HERE))
    assert pickle.loads(pickle.dumps(dialler)).args == dialler.args


@pytest.mark.parametrize("field", ["torch", "cloudpickle"])
def test_different_versions_of_torch_and_cloudpickle_cause_a_warning(field: str) -> None:
    other = HERE._replace(**{field: "0.0.1"})
    assert (
        meet(handshake_as_dialler(replace(ALICE, versions=other), SECRET), handshake_as_listener(BOB, SECRET))[0] == BOB
    )
    with pytest.warns(RuntimeWarning, match=rf"worker1 has {field} 0\.0\.1, this process "):
        handshake.warn_of_versions(HERE, other, "worker1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handshake.warn_of_versions(HERE, HERE._replace(python="3.11.99"), "worker1")


# -- on a socket
def test_a_dialler_that_sends_byte_by_byte_is_cut_off_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "HANDSHAKE_SECONDS", 0.3)
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
            Opener(SECRET).authenticate_peer(AnySocket(), theirs, BOB)
        assert time.monotonic() - begin < 5, "the whole hello would take 25 s"
    finally:
        over.set()
        thread.join()
        mine.close()
    assert theirs.fileno() == -1, "the socket is closed"


@pytest.mark.parametrize("sent", [b"", forged()[:100], forged()])
def test_a_dialler_that_hangs_up_fails_the_handshake(sent: bytes) -> None:
    mine, theirs = socket.socketpair()
    mine.sendall(sent)
    mine.shutdown(socket.SHUT_WR)
    with mine, pytest.raises(AuthenticationError, match="ended the handshake"):
        Opener(SECRET).authenticate_peer(AnySocket(), theirs, BOB)
    assert theirs.fileno() == -1
