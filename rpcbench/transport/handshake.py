"""Both sides prove that they know the cluster's secret, before anything is unpickled.

    dialler                                listener
    hello: who I am, fresh nonce  ───────>
                                  <─────── hello: who I am, fresh nonce
    proof over both hellos        ───────>
                                  <─────── proof over both hellos

A proof is an HMAC-SHA256 of the role and both hellos under the secret, so it is worth nothing on another connection
or in the other direction. Records are at most 256 bytes; the listener shows its proof only after it has seen one; a
failure closes the connection without a word. Sans-I/O: a generator yields bytes to send and the count to read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Generator
from dataclasses import dataclass

import msgpack

from rpcbench.words.errors import AuthenticationError, ProtocolError

MAGIC = b"rpcbench"
VERSION = 1
RECORD = 256
_NONCE = 32
_PROOF = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """Who stands at one end: a member of one cluster, in one incarnation."""

    cluster: str
    id: int
    name: str
    incarnation: int


Step = tuple[bytes, int]
"""(bytes to send, bytes to read after that)"""
Handshake = Generator[Step, bytes, Identity]


def _hello(me: Identity) -> bytes:
    fields = (MAGIC, VERSION, me.cluster, me.id, me.name, me.incarnation, secrets.token_bytes(_NONCE))
    packed: bytes = msgpack.packb(fields)
    if len(packed) > RECORD - 1:
        raise ProtocolError(f"name {me.name!r} is too long for a handshake")
    return bytes([len(packed)]) + packed.ljust(RECORD - 1, b"\0")


def _peer(record: bytes, me: Identity) -> Identity:
    try:
        fields = msgpack.unpackb(record[1 : 1 + record[0]], use_list=False)
        magic, version, cluster, id_, name, incarnation, nonce = fields
        peer = Identity(cluster, id_, name, incarnation)
        if magic != MAGIC or len(nonce) != _NONCE:
            raise ValueError("no rpcbench hello")
    except Exception as error:
        raise ProtocolError(f"the peer does not speak rpcbench: {error}") from error
    if version != VERSION:
        raise ProtocolError(f"the peer speaks version {version} of the protocol, this process version {VERSION}")
    if cluster != me.cluster:
        raise AuthenticationError("the peer belongs to another cluster")
    if not (isinstance(id_, int) and isinstance(name, str) and isinstance(incarnation, int)):
        raise ProtocolError("the peer's hello makes no sense")
    return peer


def _proof(secret: bytes, role: bytes, dialler: bytes, listener: bytes) -> bytes:
    return hmac.new(secret, role + dialler + listener, hashlib.sha256).digest()


def _verify(given: bytes, secret: bytes, role: bytes, dialler: bytes, listener: bytes) -> None:
    if not hmac.compare_digest(given, _proof(secret, role, dialler, listener)):
        raise AuthenticationError("the peer does not know this cluster's secret")


def dial(me: Identity, secret: bytes) -> Handshake:
    """The dialler's side; returns who listens."""
    mine = _hello(me)
    theirs = yield mine, RECORD
    peer = _peer(theirs, me)
    proof = yield _proof(secret, b"dialler", mine, theirs), _PROOF
    _verify(proof, secret, b"listener", mine, theirs)
    return peer


def listen(me: Identity, secret: bytes) -> Handshake:
    """The listener's side; returns who dialled. The last yield sends and reads nothing more."""
    theirs = yield b"", RECORD
    peer = _peer(theirs, me)
    mine = _hello(me)
    proof = yield mine, _PROOF
    _verify(proof, secret, b"dialler", theirs, mine)
    yield _proof(secret, b"listener", theirs, mine), 0
    return peer
