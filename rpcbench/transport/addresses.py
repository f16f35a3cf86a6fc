"""Addresses, and connections opened by them: nothing above here knows what kind of socket it uses.

    unix:PATH         a unix socket
    tcp://HOST:PORT   plain TCP, for loopback
    tls://HOST:PORT   TCP with TLS, for all other interfaces

An opening takes HANDSHAKE_SECONDS at most, however the peer behaves, and leaves nothing behind where it fails.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from pathlib import Path
from typing import Protocol

from rpcbench.base.config import HANDSHAKE_SECONDS
from rpcbench.base.errors import AuthenticationError, NotConnectedError
from rpcbench.transport import listeners, tls
from rpcbench.transport.base import Stream
from rpcbench.transport.handshake import Handshake, Identity, Object, Offer, dial, listen

_TRANSPORTS = ("unix", "tcp")


class Listener(Protocol):
    """Takes connections at one address."""

    def accept(self) -> socket.socket | None:
        """The next peer's socket, not yet looked at; None once the listener is closed."""

    def open(self, sock: socket.socket, deadline: float) -> Stream:
        """The stream of an accepted socket. AuthenticationError for a stranger, OSError past the deadline."""

    def close(self) -> None:
        """Stop listening, and leave no file behind."""

    def forked(self) -> None:
        """In a forked child: the socket is the parent's."""


# -- addresses
def transport() -> str:
    """What RPCBENCH_TRANSPORT says, or the best this system has: "unix" or "tcp"."""
    kind = os.environ.get("RPCBENCH_TRANSPORT") or ("unix" if hasattr(socket, "AF_UNIX") else "tcp")
    if kind not in _TRANSPORTS:
        raise ValueError(f"RPCBENCH_TRANSPORT={kind!r} is no transport; use one of {_TRANSPORTS}")
    return kind


def own_address(directory: Path, member: int, incarnation: int) -> str:
    """Where a member of a world on one host listens."""
    if transport() == "tcp":
        return "tcp://127.0.0.1:0"
    return f"unix:{directory / f'{member}.{incarnation}.sock'}"


# -- opening
class Opener:
    """Listens and dials as one member of a cluster with this secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @functools.cached_property
    def _credentials(self) -> tls.Credentials:
        return tls.Credentials(self._secret)

    def listen(self, address: str, bind: str = "") -> tuple[Listener, str]:
        """A listener, and the address it has got. NotConnectedError where another process listens there.

        `bind`: the host to listen on, where that differs from the one by which others find it.
        """
        kind, place = _split(address)
        if kind == "unix":
            return listeners.LocalListener(Path(place)), address
        host, port = listeners.split_address(place)
        on = listeners.join_address(bind or host, port)
        listener = listeners.TcpListener(on) if kind == "tcp" else tls.TlsListener(on, self._credentials)
        return listener, f"{kind}://{listeners.join_address(host, listener.port)}"

    def dial(self, address: str, me: Identity, seconds: float = HANDSHAKE_SECONDS) -> tuple[Stream, Identity]:
        """Connect, and find out who listens. OSError where nobody does (yet)."""
        deadline = time.monotonic() + seconds
        stream = self.connect(address, deadline)
        try:
            return stream, _run(stream, dial(me, self._secret), deadline, False)
        except BaseException:
            stream.release()
            raise

    def connect(self, address: str, deadline: float) -> Stream:
        """A stream to whoever listens there: he has not proved who he is yet. OSError where nobody does."""
        kind, place = _split(address)
        if kind == "unix":
            return listeners.connect_unix(place, deadline)
        return (
            listeners.connect_tcp(place, deadline) if kind == "tcp" else tls.connect(place, self._credentials, deadline)
        )

    def let_in(
        self,
        listener: Listener,
        sock: socket.socket,
        me: Identity,
        objection: Object = lambda peer: None,
        offer: Offer = lambda peer: 0,
    ) -> tuple[Stream, Identity]:
        """The listener's side of an accepted connection: who is it? Closes the socket where nobody is let in."""
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        try:
            stream = listener.open(sock, deadline)
            return stream, _run(stream, listen(me, self._secret, objection, offer), deadline, True)
        except BaseException:
            sock.close()
            raise


def _split(address: str) -> tuple[str, str]:
    kind, _, rest = address.partition(":")
    if kind not in ("unix", "tcp", "tls"):
        raise NotConnectedError(f"{address!r} is no address")
    return kind, rest.removeprefix("//") if kind != "unix" else rest


def _run(stream: Stream, handshake: Handshake, deadline: float, last: bool) -> Identity:
    """Drive a handshake over a stream; TimeoutError at the deadline. `last`: whether this side has the last word."""
    data, count = next(handshake)
    while True:
        _limit(stream, deadline)
        stream.write([data], True)
        answer = _exactly(stream, count, deadline)
        try:
            data, count = handshake.send(answer)
        except StopIteration as done:
            stream.share(deadline, last)
            stream.limit(None)
            identity: Identity = done.value
            return identity


def _exactly(stream: Stream, count: int, deadline: float) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        _limit(stream, deadline)
        try:
            got = stream.read_into(view)
        except BlockingIOError:  # no whole byte yet
            continue
        if not got:
            raise AuthenticationError("the peer hung up during the handshake: has it another secret or cluster?")
        view = view[got:]
    return bytes(data)


def _limit(stream: Stream, deadline: float) -> None:
    """The next operation ends at the deadline of the whole handshake: a peer may send it byte by byte."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the handshake took more than {HANDSHAKE_SECONDS:g} s")
    stream.limit(left)
