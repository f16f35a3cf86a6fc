"""Which host this is, and where other hosts find this process.

Two processes with one host identity (`host_id`) share a kernel and its network. Among them the end of a process is
always noticed, so silence means nothing. RPCBENCH_HOST_ID overrides what is found out, for containers that share these
and should count as several hosts, or the other way round.

Other hosts find a process on the interface that leads to them (`outbound_address`). RPCBENCH_BIND overrides it: the
address to listen on, which others dial as well unless it means all interfaces.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import socket
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rpcbench.base.errors import RpcError
from rpcbench.transport import listeners

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def host_id() -> str:
    """The same on all processes of one host, until it starts again."""
    return os.environ.get("RPCBENCH_HOST_ID") or _found()


@functools.cache
def _found() -> str:
    linux = _BOOT.exists()
    parts = [_BOOT.read_text(), str(_NETWORK.readlink())] if linux else [platform.node(), str(uuid.getnode())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


BIND_VARIABLE = "RPCBENCH_BIND"
_ALL = ("", "0.0.0.0", "::")
_OUTSIDE = "192.0.2.1"  # for documentation (RFC 5737): the route there is the one that leads outward; nothing is sent


def bind_address() -> str:
    """The address to listen on, where that differs from the one others dial; else ""."""
    return os.environ.get(BIND_VARIABLE, "")


def address_towards(leader: str) -> str:
    """Where others of a world on several hosts find this process, which dials its leader at host:port.

    RpcError where no interface leads there.
    """
    if bind_address() not in _ALL:
        return f"tls://{listeners.join_address(bind_address(), 0)}"
    try:
        return f"tls://{listeners.join_address(listeners.interface_towards(*listeners.split_address(leader)), 0)}"
    except OSError as error:
        raise RpcError(f"this host cannot reach worker 0 at {leader}: {error.strerror or error}") from error


def outbound_address(address: str | None = None) -> str:
    """Where a process that leads a world is to be found: at `address` ("host", "host:port", ":port"), or at what is
    found out of that. ValueError for one that is none, RpcError where this host has no interface that leads outward.
    """
    host, port = _read(address or "")
    bound = bind_address()
    return f"tls://{listeners.join_address(host or (bound if bound not in _ALL else _interface()), port)}"


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
        return listeners.interface_towards(_OUTSIDE, 9)
    except OSError:
        found = [
            str(each.address)
            for addresses in psutil.net_if_addrs().values()
            for each in addresses
            if each.family == socket.AF_INET and not listeners.is_loopback(each.address)
        ]
    if len(found) == 1:
        return found[0]
    there = f"it has {', '.join(found)}" if found else "it has none but loopback"
    raise RpcError(f'no interface of this host leads outward ({there}): pass address="host", where others find it')
