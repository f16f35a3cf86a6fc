"""Two streams that are connected to each other, of each kind there is."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from rpcbench.transport.base import Stream
from rpcbench.transport.ends import Opener
from rpcbench.transport.sockets import SocketStream

KINDS = ["unix", "tcp", "tls"]
SECRET = b"s" * 32


def spawn(job: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


class AnySocket:
    """A listener that opens whatever socket it is given."""

    def open(self, sock: socket.socket, deadline: float) -> Stream:
        return SocketStream(sock)


def pair(kind: str) -> tuple[Stream, Stream]:
    if kind == "unix":
        one, other = socket.socketpair()
        return SocketStream(one), SocketStream(other)
    opener = Opener(SECRET)
    listener, address = opener.listen(f"{kind}://127.0.0.1:0")
    opened: list[Stream] = []
    deadline = time.monotonic() + 5

    def accept() -> None:
        sock = listener.accept()
        assert sock is not None
        opened.append(listener.open(sock, deadline))

    accepting = spawn(accept)
    opened.append(opener.connect(address, deadline))
    accepting.join()
    listener.close()
    for stream in opened:
        stream.limit(None)
    one, other = opened
    return one, other
