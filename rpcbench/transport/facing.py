"""Where a process is found by others on other hosts: on the interface that leads to them.

RPCBENCH_BIND overrides what is found out: the address to listen on, which others dial as well unless it means all.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

import psutil

from rpcbench.base.errors import RpcError
from rpcbench.transport import tcp

VARIABLE = "RPCBENCH_BIND"
_ALL = ("", "0.0.0.0", "::")
_OUTSIDE = "192.0.2.1"  # for documentation (RFC 5737): the route there is the one that leads outward; nothing is sent


def bind() -> str:
    """The address to listen on, where that differs from the one others dial; else ""."""
    return os.environ.get(VARIABLE, "")


def towards(leader: str) -> str:
    """Where others of a world on several hosts find this process, which dials its leader at host:port.

    RpcError where no interface leads there.
    """
    if bind() not in _ALL:
        return f"tls://{tcp.join(bind(), 0)}"
    try:
        return f"tls://{tcp.join(tcp.interface_towards(*tcp.split(leader)), 0)}"
    except OSError as error:
        raise RpcError(f"this host cannot reach worker 0 at {leader}: {error.strerror or error}") from error


def outward(address: str | None = None) -> str:
    """Where a process that leads a world is to be found: at `address` ("host", "host:port", ":port"), or at what is
    found out of that. ValueError for one that is none, RpcError where this host has no interface that leads outward.
    """
    host, port = _read(address or "")
    return f"tls://{tcp.join(host or (bind() if bind() not in _ALL else _interface()), port)}"


def _read(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        if parts.netloc == address and "@" not in address:
            return parts.hostname or "", parts.port or 0
    except ValueError:
        pass
    raise ValueError(f'address={address!r} is none; write "host", "host:port" or ":port", an IPv6 host in brackets')


def _interface() -> str:
    """The address of the interface with the default route; without one that of the only interface there is."""
    try:
        return tcp.interface_towards(_OUTSIDE, 9)
    except OSError:
        found = [
            str(each.address)
            for addresses in psutil.net_if_addrs().values()
            for each in addresses
            if each.family == socket.AF_INET and not tcp.is_loopback(each.address)
        ]
    if len(found) == 1:
        return found[0]
    there = f"it has {', '.join(found)}" if found else "it has none but loopback"
    raise RpcError(f'no interface of this host leads outward ({there}): pass address="host", where others find it')
