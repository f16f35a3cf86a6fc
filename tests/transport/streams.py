"""Pairs of connected streams, of each kind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from rpcbench.transport import shared_memory
from rpcbench.transport.addresses import Opener
from rpcbench.transport.base import Stream
from rpcbench.transport.listeners import LocalStream
from rpcbench.transport.sockets import SocketStream

KINDS = ["unix", "full", "tcp", "tls"]
ALL = [*KINDS, "shared"]
"""On the last one large messages go past the stream; in "full" there is room for few of them."""
SECRET = b"s" * 32


def spawn(job: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


class AnySocket:
    """A listener that opens any socket without checks."""

    def open_stream(self, sock: socket.socket, deadline: float) -> Stream:
        return SocketStream(sock)


def pair(kind: str) -> tuple[Stream, Stream]:
    if kind == "unix":
        one, other = socket.socketpair()
        return SocketStream(one), SocketStream(other)
    if kind in ("shared", "full"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_memory, "SIZE", shared_memory.SIZE if kind == "shared" else 1 << 20)
            return _sharing()
    opener = Opener(SECRET)
    listener, address = opener.open_listener(f"{kind}://127.0.0.1:0")
    opened: list[Stream] = []
    deadline = time.monotonic() + 5

    def accept() -> None:
        sock = listener.accept()
        assert sock is not None
        opened.append(listener.open_stream(sock, deadline))

    accepting = spawn(accept)
    opened.append(opener.connect_stream(address, deadline))
    accepting.join()
    listener.close()
    for stream in opened:
        stream.set_time_limit(None)
    one, other = opened
    return one, other


def _sharing() -> tuple[Stream, Stream]:
    one, other = (LocalStream(sock) for sock in socket.socketpair())
    deadline = time.monotonic() + 5
    sharing = spawn(lambda: other.share_memory(deadline, True))
    one.share_memory(deadline, False)
    sharing.join()
    for stream in (one, other):
        stream.set_time_limit(None)
    return one, other
