"""TCP: the same streams as unix sockets, by host and port.

Addresses are "host:port", an IPv6 host in brackets. A port of 0 takes a free one.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from urllib.parse import urlsplit

from rpcbench.base.errors import NotConnectedError
from rpcbench.transport.base import Stream
from rpcbench.transport.listener import SocketListener
from rpcbench.transport.sockets import SocketStream


class TcpListener(SocketListener):
    """A listening socket on one interface. NotConnectedError where the address is taken or no address of this host."""

    def __init__(self, place: str) -> None:
        host, port = split(place)
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # The port of a world that has just ended is free for the next one.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(1024)  # strangers may fill it: see `agent.half_open`
        except OSError as error:
            sock.close()
            raise NotConnectedError(_refusal(place, error)) from error
        super().__init__(sock)
        self.port: int = sock.getsockname()[1]

    def open(self, sock: socket.socket, deadline: float) -> Stream:
        """The stream of an accepted socket."""
        return SocketStream(tuned(sock))


def _refusal(place: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"another process already listens on {place}; where that is torch's own process group, give "
            "RPCBENCH_MASTER_PORT another port, the same for all workers"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{place} is no address of this host: set RPCBENCH_BIND to one that is"
    return f"this process cannot listen on {place}: {error.strerror}"


def connect(place: str, deadline: float) -> Stream:
    """Dial. OSError where nobody listens (yet)."""
    return SocketStream(connect_socket(place, deadline))


def connect_socket(place: str, deadline: float) -> socket.socket:
    return tuned(socket.create_connection(split(place), max(0.001, deadline - time.monotonic())))


def tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def is_loopback(host: str) -> bool:
    """Whether a host is this one, and cannot be reached from another."""
    if not host or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interface_towards(host: str, port: int) -> str:
    """The address of this host on the interface that reaches `host`. OSError where none does. Sends nothing."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        name: str = probe.getsockname()[0]
        return name


def split(place: str) -> tuple[str, int]:
    """Host and port. ValueError for anything else."""
    parts = urlsplit(f"//{place}")
    if not parts.hostname or parts.port is None:
        raise ValueError(f"{place!r} is no host:port")
    return parts.hostname, parts.port


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
