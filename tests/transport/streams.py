"""Two streams that are connected to each other, of each kind there is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from rpcbench.transport import tcp
from rpcbench.transport.base import Stream
from rpcbench.transport.sockets import SocketStream
from rpcbench.transport.tcp import TcpListener

KINDS = ["unix", "tcp"]


def spawn(job: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


class AnySocket:
    """A listener that opens whatever socket it is given."""

    open = staticmethod(SocketStream)


def pair(kind: str) -> tuple[Stream, Stream]:
    if kind == "unix":
        one, other = socket.socketpair()
        return SocketStream(one), SocketStream(other)
    listener = TcpListener("127.0.0.1:0")
    dialled = tcp.connect(listener.place, 5.0)
    sock = listener.accept()
    assert sock is not None
    accepted = listener.open(sock)
    listener.close()
    for stream in (dialled, accepted):
        stream.limit(None)
    return dialled, accepted
