"""The handshake: both sides prove that they have the cluster's secret, before anything is unpickled. Without I/O.

Guarantees
- Mutual authentication. A process without the secret is rejected without an explanation; the listener sends its proof
  only after it has verified the dialler's.
- A proof is valid for one connection and one direction: it covers both nonces and the role.
- Over TCP a dialler shows first, by its preamble, that it has the secret: a listener spends nothing on strangers.
- Both processes detect incompatible `Versions` from the hellos, and raise VersionMismatch.
- A process that has the secret but is not admitted receives the reason: it belongs to an earlier world, for example.
"""

# Theory of operation
#
#     dialler                               listener
#     preamble: fresh nonce, its proof ───►           over TCP only, and before TLS; `lobby` verifies it
#                                   ◄────── one byte
#     hello: identity, fresh nonce  ──────►
#                                   ◄────── hello: identity, fresh nonce
#     proof over both hellos        ──────►           verifies it, then decides whether to admit the peer
#                                   ◄────── proof over both hellos and the verdict; the verdict
#     verifies it, reads the verdict
#
# A preamble (`preambles`) can be replayed to another listener, so it replaces no later step.
#
# A proof is an HMAC-SHA256, under the secret, of the role and both hellos. Records have a fixed size, so each side
# knows how many bytes to read before it has parsed any. The verdict holds the reason of a refusal, or the incarnation
# that the dialler has asked for (UNBORN). `handshake_as_dialler` and `handshake_as_listener` are generators: they yield
# (bytes to send, count of bytes to read then), receive these bytes, and return the identity of the peer; `addresses`
# drives them over a stream.

from __future__ import annotations

import hmac
import platform
import secrets
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import NamedTuple

import cloudpickle
import msgspec
import torch

from rpcbench.base.config import PROTOCOL
from rpcbench.base.errors import AuthenticationError, ProtocolError, RefusedError, VersionMismatch
from rpcbench.transport.preambles import NONCE, PROOF, make_proof
from rpcbench.wire.encoding import encode_plain


class Versions(NamedTuple):
    """The versions of one process."""

    protocol: int
    python: str
    torch: str
    cloudpickle: str

    @property
    def required_versions(self) -> tuple[int, list[str]]:
        """The versions that must be equal: functions that are sent by value need the same minor version of Python."""
        return self.protocol, self.python.split(".")[:2]

    def __str__(self) -> str:
        return f"protocol {self.protocol}, Python {self.python}, torch {self.torch}, cloudpickle {self.cloudpickle}"


HERE = Versions(PROTOCOL, platform.python_version(), str(torch.__version__), cloudpickle.__version__)


def warn_of_versions(mine: Versions, theirs: Versions, who: str) -> None:
    """Warn of packages whose versions differ, which is a risk, not an error."""
    for package in ("torch", "cloudpickle"):
        here, there = getattr(mine, package), getattr(theirs, package)
        if here != there:
            warnings.warn(
                f"{who} has {package} {there}, this process {here}: what one of them sends, the other may not read",
                RuntimeWarning,
                stacklevel=2,
            )


MAGIC = b"rpcbench"
RECORD = 512  # bytes of a hello
VERDICT = 256  # bytes of a verdict
_REASON = 224  # bytes of the reason in it; a longer one is cut
NO_WORLD = 0
"""The epoch of a process that is in no world yet."""
NO_INCARNATION = -1
"""The incarnation of a process that requests one."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One side of a connection: a member of one cluster, in one incarnation, on one host."""

    cluster: str
    id: int
    name: str
    incarnation: int
    host: str = ""
    epoch: int = NO_WORLD  # a random number of the founder of the world: processes of an earlier world have another
    serial: int = 0  # the number of this handshake among those of its process
    base: int = 0  # the dialler's connections to this peer with a lower serial have ended, even if they look alive here
    versions: Versions = HERE
    offer: int = 0  # the incarnation that the verdict assigns to a dialler with UNBORN


class Objection(NamedTuple):
    """The reason why a process that has the secret is not admitted. `again`: it may try again soon."""

    reason: str
    again: bool = False


Step = tuple[bytes, int]
"""(bytes to send, count of bytes to read after that)"""
Handshake = Generator[Step, bytes, Identity]
Object = Callable[[Identity], Objection | None]
"""Returns the objection to a process that has the secret; None: it is admitted."""
Offer = Callable[[Identity], int]
"""Returns the incarnation for a process that requests one."""


def _make_hello(me: Identity) -> bytes:
    nonce = secrets.token_bytes(NONCE)
    who = (me.cluster, me.id, me.name, me.incarnation, me.host, me.epoch, me.serial, me.base)
    packed = encode_plain((MAGIC, *me.versions, *who, nonce))
    if len(packed) > RECORD - 2:
        raise ProtocolError(f"the name {me.name!r} or host id {me.host!r} is too long for a handshake")
    return _fill_record(packed, RECORD)


def _fill_record(packed: bytes, size: int) -> bytes:
    return len(packed).to_bytes(2, "little") + packed.ljust(size - 2, b"\0")


def _cut_padding(record: bytes) -> bytes:
    return record[2 : 2 + int.from_bytes(record[:2], "little")]


def _parse_hello(record: bytes, me: Identity) -> Identity:
    """Return the sender of a hello. VersionMismatch for one of an incompatible version."""
    try:  # the magic and the versions keep their place in all versions of the hello, the other fields may not
        magic, *fields = msgspec.msgpack.decode(_cut_padding(record))
        theirs = Versions(*fields[:4])
        _check_types(theirs, (int, str, str, str))
        if magic != MAGIC:
            raise ValueError("not an rpcbench hello")
        # before the fields that another version may not have
        if me.versions.required_versions != theirs.required_versions:
            raise VersionMismatch(str(me.versions), str(theirs), "the peer")
        *who, nonce = fields[4:]
        if len(nonce) != NONCE:
            raise ValueError("not an rpcbench hello")
    except VersionMismatch:
        raise
    except Exception as error:  # unpacking bytes of a stranger may fail in many ways
        raise ProtocolError(f"the peer does not speak rpcbench: {error}") from error
    _check_types(tuple(who), (str, int, str, int, str, int, int, int))
    peer = replace(Identity(*who), versions=theirs)
    if peer.cluster != me.cluster:
        raise AuthenticationError("the peer belongs to another cluster")
    return peer


def _check_types(fields: tuple[object, ...], kinds: tuple[type, ...]) -> None:
    if tuple(map(type, fields)) != kinds:
        raise ProtocolError("the peer's hello makes no sense")


def _verify_proof(given: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(given, expected):
        raise AuthenticationError("the peer does not know this cluster's secret")


def handshake_as_dialler(me: Identity, secret: bytes) -> Handshake:
    """Run the dialler's side; return the listener's identity. RefusedError with the reason if it does not admit us."""
    mine = _make_hello(me)
    theirs = yield mine, RECORD
    peer = _parse_hello(theirs, me)
    answer = yield make_proof(secret, b"dialler", mine, theirs), PROOF + VERDICT
    verdict = answer[PROOF:]
    # only then is the verdict read
    _verify_proof(answer[:PROOF], make_proof(secret, b"listener", mine, theirs, verdict))
    reason, again, offer = _read_verdict(verdict)
    if reason:
        raise RefusedError(f"{peer.name} does not let this process in: {reason}", again)
    return replace(peer, offer=offer)


def handshake_as_listener(
    me: Identity, secret: bytes, objection: Object = lambda peer: None, offer: Offer = lambda peer: 0
) -> Handshake:
    """Run the listener's side; return the dialler's identity. RefusedError if the dialler was not admitted."""
    theirs = yield b"", RECORD
    mine = _make_hello(me)
    try:
        peer = _parse_hello(theirs, me)
    except VersionMismatch:
        yield mine, 0  # so that the dialler raises VersionMismatch, too
        raise
    proof = yield mine, PROOF
    _verify_proof(proof, make_proof(secret, b"dialler", theirs, mine))
    against = _wrong_world(me, peer) or objection(peer)
    given = offer(peer) if against is None and peer.incarnation == NO_INCARNATION else 0
    verdict = _encode_verdict(against or Objection(""), given)
    yield make_proof(secret, b"listener", theirs, mine, verdict) + verdict, 0  # a refusal carries a proof, too
    if against is not None:
        raise RefusedError(f"{peer.name} was not let in: {against.reason}", against.again)
    return peer


def _wrong_world(me: Identity, peer: Identity) -> Objection | None:
    """Return the objection to a process of an earlier world, or to any while this one is in no world."""
    if me.epoch == NO_WORLD:
        return Objection(f"{me.name} is in no world yet", True)
    if peer.epoch not in (me.epoch, NO_WORLD):
        return Objection(f"{peer.name} belongs to an earlier world at this address, which is over")
    return None


def _encode_verdict(objection: Objection, offer: int) -> bytes:
    reason = objection.reason.encode()[:_REASON].decode(errors="ignore")  # the cut may split a character
    return _fill_record(encode_plain((reason, objection.again, offer)), VERDICT)


def _read_verdict(record: bytes) -> tuple[str, bool, int]:
    try:
        return msgspec.msgpack.decode(_cut_padding(record), type=tuple[str, bool, int])
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the peer's verdict makes no sense: {error}") from error
