"""Both sides prove that they know the cluster's secret, before anything is unpickled.

    dialler                                listener
    hello: who I am, fresh nonce  ───────>
                                  <─────── hello: who I am, fresh nonce
    proof over both hellos        ───────>
                                  <─────── proof over both hellos and the verdict; the verdict

A proof is an HMAC-SHA256 of the role and both hellos under the secret, so it is worth nothing on another connection
or in the other direction. Records have a fixed size; the listener shows its proof only after it has seen one; a
stranger gets no word. The verdict of the listener says why this process, which is no stranger, does not get in: it is
left from an earlier world, say, or was given up; or it gives the incarnation that was asked for. Processes whose
versions do not fit both learn of it from the hellos. Sans-I/O: a generator yields bytes to send and the count to read.

`Versions` says what two processes must have in common to understand each other, and what they had better have in
common.
"""

from __future__ import annotations

import hashlib
import hmac
import platform
import secrets
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import NamedTuple

import cloudpickle
import msgpack
import torch

from rpcbench.base.config import PROTOCOL
from rpcbench.base.errors import AuthenticationError, ProtocolError, RefusedError, VersionMismatch


class Versions(NamedTuple):
    """Of one process. Functions that travel by value need the same minor version of Python."""

    protocol: int
    python: str
    torch: str
    cloudpickle: str

    @property
    def needed(self) -> tuple[int, list[str]]:
        """What must be the same."""
        return self.protocol, self.python.split(".")[:2]

    def __str__(self) -> str:
        return f"protocol {self.protocol}, Python {self.python}, torch {self.torch}, cloudpickle {self.cloudpickle}"


HERE = Versions(PROTOCOL, platform.python_version(), str(torch.__version__), cloudpickle.__version__)


def check_versions(mine: Versions, theirs: Versions, who: str) -> None:
    """VersionMismatch where the two cannot talk to each other."""
    if mine.needed != theirs.needed:
        raise VersionMismatch(str(mine), str(theirs), who)


def warn_of_versions(mine: Versions, theirs: Versions, who: str) -> None:
    """A warning that names the packages in which the two differ, where that may only do harm."""
    for package in ("torch", "cloudpickle"):
        here, there = getattr(mine, package), getattr(theirs, package)
        if here != there:
            warnings.warn(
                f"{who} has {package} {there}, this process {here}: what one of them sends, the other may not read",
                RuntimeWarning,
                stacklevel=2,
            )


MAGIC = b"rpcbench"
RECORD = 512
VERDICT = 256
_REASON = 224
NEWCOMER = 0
"""The epoch of who is in no world yet."""
UNBORN = -1
"""The incarnation of who only asks which one it is to be."""
_NONCE = 32
_PROOF = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """Who stands at one end: a member of one cluster, in one incarnation, on one host.

    `epoch` is drawn by who founds the world: what is left of an earlier one has another. A process numbers its
    handshakes: `serial` is that of this one. Who dials says with `base` that of its connections to this peer all with a
    lower serial have ended, whatever they look like from here. `offer`: the incarnation that a dialler who asked for
    one (UNBORN) is given, in the verdict.
    """

    cluster: str
    id: int
    name: str
    incarnation: int
    host: str = ""
    epoch: int = NEWCOMER
    serial: int = 0
    base: int = 0
    versions: Versions = HERE
    offer: int = 0


class Objection(NamedTuple):
    """Why a process that knows the secret is not let in. `again`: that may change soon."""

    reason: str
    again: bool = False


Step = tuple[bytes, int]
"""(bytes to send, bytes to read after that)"""
Handshake = Generator[Step, bytes, Identity]
Object = Callable[[Identity], Objection | None]
"""What there is against a process that knows the secret; None: it gets in."""
Offer = Callable[[Identity], int]
"""The incarnation that a process which asks for one is given."""


def _hello(me: Identity) -> bytes:
    nonce = secrets.token_bytes(_NONCE)
    who = (me.cluster, me.id, me.name, me.incarnation, me.host, me.epoch, me.serial, me.base)
    fields = (MAGIC, *me.versions, *who, nonce)
    packed: bytes = msgpack.packb(fields)
    if len(packed) > RECORD - 2:
        raise ProtocolError(f"the name {me.name!r} or host id {me.host!r} is too long for a handshake")
    return len(packed).to_bytes(2, "little") + packed.ljust(RECORD - 2, b"\0")


def _peer(record: bytes, me: Identity) -> Identity:
    """Who sent this hello. VersionMismatch for one that another version made: its first fields stay what they are."""
    try:
        length = int.from_bytes(record[:2], "little")
        magic, *fields = msgpack.unpackb(record[2 : 2 + length], use_list=False)
        theirs = Versions(*fields[:4])
        _check_types(theirs, (int, str, str, str))
        if magic != MAGIC:
            raise ValueError("no rpcbench hello")
        check_versions(me.versions, theirs, "the peer")
        *who, nonce = fields[4:]
        if len(nonce) != _NONCE:
            raise ValueError("no rpcbench hello")
    except VersionMismatch:
        raise
    except Exception as error:
        raise ProtocolError(f"the peer does not speak rpcbench: {error}") from error
    _check_types(tuple(who), (str, int, str, int, str, int, int, int))
    peer = replace(Identity(*who), versions=theirs)
    if peer.cluster != me.cluster:
        raise AuthenticationError("the peer belongs to another cluster")
    return peer


def _check_types(fields: tuple[object, ...], kinds: tuple[type, ...]) -> None:
    if tuple(map(type, fields)) != kinds:
        raise ProtocolError("the peer's hello makes no sense")


def _proof(secret: bytes, role: bytes, *said: bytes) -> bytes:
    return hmac.new(secret, role + b"".join(said), hashlib.sha256).digest()


def _verify(given: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(given, expected):
        raise AuthenticationError("the peer does not know this cluster's secret")


def dial(me: Identity, secret: bytes) -> Handshake:
    """The dialler's side; returns who listens. RefusedError with the reason where that does not let us in."""
    mine = _hello(me)
    theirs = yield mine, RECORD
    peer = _peer(theirs, me)
    answer = yield _proof(secret, b"dialler", mine, theirs), _PROOF + VERDICT
    verdict = answer[_PROOF:]
    _verify(answer[:_PROOF], _proof(secret, b"listener", mine, theirs, verdict))
    reason, again, offer = _read_verdict(verdict)
    if reason:
        raise RefusedError(f"{peer.name} does not let this process in: {reason}", again)
    return replace(peer, offer=offer)


def listen(
    me: Identity, secret: bytes, objection: Object = lambda peer: None, offer: Offer = lambda peer: 0
) -> Handshake:
    """The listener's side; returns who dialled. RefusedError where that is told not to come in."""
    theirs = yield b"", RECORD
    mine = _hello(me)
    try:
        peer = _peer(theirs, me)
    except VersionMismatch:
        yield mine, 0  # so that the other side finds out, too
        raise
    proof = yield mine, _PROOF
    _verify(proof, _proof(secret, b"dialler", theirs, mine))
    against = _stray(me, peer) or objection(peer)
    given = offer(peer) if against is None and peer.incarnation == UNBORN else 0
    verdict = _verdict(against or Objection(""), given)
    yield _proof(secret, b"listener", theirs, mine, verdict) + verdict, 0
    if against is not None:
        raise RefusedError(f"{peer.name} was not let in: {against.reason}", against.again)
    return peer


def _stray(me: Identity, peer: Identity) -> Objection | None:
    """Why a process of another world, or of none, has no business here."""
    if me.epoch == NEWCOMER:
        return Objection(f"{me.name} is in no world yet", True)
    if peer.epoch not in (me.epoch, NEWCOMER):
        return Objection(f"{peer.name} belongs to an earlier world at this address, which is over")
    return None


def _verdict(objection: Objection, offer: int) -> bytes:
    reason = objection.reason.encode()[:_REASON].decode(errors="ignore")
    packed: bytes = msgpack.packb((reason, objection.again, offer))
    return packed.ljust(VERDICT, b"\0")


def _read_verdict(record: bytes) -> tuple[str, bool, int]:
    try:
        reading = msgpack.Unpacker(use_list=False)
        reading.feed(record)
        reason, again, offer = reading.unpack()
    except Exception as error:
        raise ProtocolError(f"the peer's verdict makes no sense: {error}") from error
    _check_types((reason, again, offer), (str, bool, int))
    return reason, again, offer
