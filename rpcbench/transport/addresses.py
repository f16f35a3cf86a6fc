"""Addresses, and the opening of authenticated connections; the layers above do not depend on the kind of socket.

    unix:PATH         a unix socket
    tcp://HOST:PORT   plain TCP, for loopback
    tls://HOST:PORT   TCP with TLS, for all other interfaces

To open a connection takes HANDSHAKE_SECONDS at most, within a host LOCAL_HANDSHAKE_SECONDS, however the peer behaves; a
failure leaves no socket open.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from pathlib import Path
from typing import Protocol

from rpcbench.base.conditions import time_left
from rpcbench.base.config import HANDSHAKE_SECONDS, LOCAL_HANDSHAKE_SECONDS
from rpcbench.base.errors import AuthenticationError, NotConnectedError
from rpcbench.transport import listeners, tls
from rpcbench.transport.base import Stream
from rpcbench.transport.handshake import Handshake, Identity, Object, Offer, handshake_as_dialler, handshake_as_listener
from rpcbench.transport.lobby import Refusals
from rpcbench.transport.preambles import make_preamble

_TRANSPORTS = ("unix", "tcp")
_LATE = "the handshake took too long"


class Listener(Protocol):
    """Takes connections at one address."""

    def accept(self) -> socket.socket | None:
        """Return the next peer's socket, not authenticated; None once the listener is closed."""

    def open_stream(self, sock: socket.socket, deadline: float) -> Stream:
        """Return the stream of an accepted socket. AuthenticationError for a stranger, OSError past the deadline."""

    def close(self) -> None:
        """Stop listening, and remove the socket file if there is one."""

    def after_fork(self) -> None:
        """Close the descriptor in a forked child: the socket belongs to the parent."""


# -- addresses
def transport_kind() -> str:
    """Return "unix" or "tcp": the value of RPCBENCH_TRANSPORT, else the best that this system has."""
    kind = os.environ.get("RPCBENCH_TRANSPORT") or ("unix" if hasattr(socket, "AF_UNIX") else "tcp")
    if kind not in _TRANSPORTS:
        raise ValueError(f"RPCBENCH_TRANSPORT={kind!r} is not a transport; use one of {_TRANSPORTS}")
    return kind


def is_listening(address: str, seconds: float) -> bool:
    """Return whether a process listens at an address. Needs no secret. Over TCP the answer takes `seconds` at most.
    OSError if that cannot be found out."""
    kind, place = _split_scheme(address)
    if kind == "unix":
        return listeners.is_socket_listening(Path(place))
    try:
        socket.create_connection(listeners.split_address(place), seconds).close()
    except ConnectionRefusedError:
        return False
    return True


def own_address(directory: Path, member: int, incarnation: int) -> str:
    """Return the address for a member of a world on one host to listen on."""
    if transport_kind() == "tcp":
        return "tcp://127.0.0.1:0"  # the system picks a free port
    return f"unix:{directory / f'{member}.{incarnation}.sock'}"


# -- opening
class Opener:
    """A factory of listeners and connections for a member of the cluster with this secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @functools.cached_property
    def _tls_credentials(self) -> tls.Credentials:  # on first use: few worlds need TLS, and its import takes time
        return tls.Credentials(self._secret)

    def open_listener(self, address: str, bind: str = "", refusals: Refusals | None = None) -> tuple[Listener, str]:
        """Return a listener and its address. NotConnectedError where another process listens there. `bind`: the host to
        listen on, if it differs from the one that peers dial. `refusals`: counts strangers."""
        kind, place = _split_scheme(address)
        if kind == "unix":
            return listeners.LocalListener(Path(place)), address
        host, port = listeners.split_address(place)
        arguments = listeners.join_address(bind or host, port), self._secret, refusals or Refusals()
        listener = (
            listeners.TcpListener(*arguments) if kind == "tcp" else tls.TlsListener(*arguments, self._tls_credentials)
        )
        return listener, f"{kind}://{listeners.join_address(host, listener.port)}"

    def dial_peer(self, address: str, me: Identity, seconds: float = HANDSHAKE_SECONDS) -> tuple[Stream, Identity]:
        """Connect and authenticate; return the stream and the peer. OSError where no process listens (yet)."""
        deadline = time.monotonic() + seconds
        stream = self.connect_stream(address, deadline)
        try:
            return stream, _run_handshake(stream, handshake_as_dialler(me, self._secret), deadline, False)
        except BaseException:
            stream.close_descriptor()
            raise

    def connect_stream(self, address: str, deadline: float) -> Stream:
        """Return a stream to an unauthenticated peer. OSError where no process listens; AuthenticationError where one
        with another secret does, as far as the kind of socket can tell."""
        kind, place = _split_scheme(address)
        if kind == "unix":
            return listeners.connect_unix(place, deadline)
        first = make_preamble(self._secret)
        if kind == "tcp":
            return listeners.connect_tcp(place, first, deadline)
        return tls.connect_tls(place, first, self._tls_credentials, deadline)

    def authenticate_peer(
        self,
        listener: Listener,
        sock: socket.socket,
        me: Identity,
        objection: Object = lambda peer: None,
        offer: Offer = lambda peer: 0,
    ) -> tuple[Stream, Identity]:
        """Authenticate an accepted connection; return the stream and the peer. Close the socket on any error."""
        # As patient as a dialler on this host: if one side gave up earlier, a busy machine would look like a refusal.
        local = isinstance(listener, listeners.LocalListener)
        deadline = time.monotonic() + (LOCAL_HANDSHAKE_SECONDS if local else HANDSHAKE_SECONDS)
        try:
            stream = listener.open_stream(sock, deadline)
            return stream, _run_handshake(
                stream, handshake_as_listener(me, self._secret, objection, offer), deadline, True
            )
        except BaseException:
            sock.close()
            raise


def _split_scheme(address: str) -> tuple[str, str]:
    kind, _, rest = address.partition(":")
    if kind not in ("unix", "tcp", "tls"):
        raise NotConnectedError(f"{address!r} is not an address")
    return kind, rest.removeprefix("//") if kind != "unix" else rest


def _run_handshake(stream: Stream, handshake: Handshake, deadline: float, last: bool) -> Identity:
    """Drive a handshake over a stream; TimeoutError at the deadline. `last`: whether this side sends the last word."""
    data, count = next(handshake)
    while True:
        stream.set_time_limit(time_left(deadline, _LATE))  # of each operation, as a peer may send byte by byte
        stream.write([data], True)
        answer = _read_exactly(stream, count, deadline)
        try:
            data, count = handshake.send(answer)
        except StopIteration as done:
            stream.share_memory(deadline, last)  # memory goes only to a peer that has proved its identity
            stream.set_time_limit(None)
            identity: Identity = done.value
            return identity


def _read_exactly(stream: Stream, count: int, deadline: float) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        stream.set_time_limit(time_left(deadline, _LATE))
        try:
            got = stream.read_into(view)
        except BlockingIOError:  # only a part of a TLS record has come
            continue
        if not got:
            raise AuthenticationError("the peer ended the handshake: does it use another secret or cluster?")
        view = view[got:]
    return bytes(data)
