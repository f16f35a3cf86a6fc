"""The identity of this host, and the addresses by which other hosts reach this process.

Two processes with one host identity (`host_id`) share a kernel and its network. Between them the end of a process
always ends its connections, so silence is no failure. RPCBENCH_HOST_ID overrides the identity, for containers that
share a kernel and network but should count as several hosts, or the reverse. A process that shares the kernel and the
network, but not the directories, as in a container on its host's network, counts as a host of its own (`is_shared`).

Other hosts dial the interface that routes to them (`outbound_address`). RPCBENCH_BIND overrides it: the address to
listen on, which others also dial unless it means all interfaces.
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
_NETWORK, _MOUNTS = Path("/proc/self/ns/net"), Path("/proc/self/ns/mnt")
_ID_VARIABLE = "RPCBENCH_HOST_ID"


def host_id() -> str:
    """Return the identity of this host: equal in all its processes, until it reboots."""
    return os.environ.get(_ID_VARIABLE) or _compute_host_id()


def is_shared(host: str, directory: str) -> bool:
    """Return whether this process can use a directory that a member on `host` has made. If this is the same host and it
    cannot, this process and its children count as another host from now on."""
    if host != host_id():
        return False
    if os.access(directory, os.R_OK | os.W_OK | os.X_OK):  # its name is random: no other directory has it
        return True
    mounts = _MOUNTS.readlink() if _MOUNTS.exists() else ""  # equal in all processes of a container
    os.environ[_ID_VARIABLE] = _digest_of_parts(host, str(mounts), str(os.geteuid()))
    return False


@functools.cache
def _compute_host_id() -> str:
    linux = _BOOT.exists()  # there, containers with a network of their own count as hosts of their own
    parts = [_BOOT.read_text(), str(_NETWORK.readlink())] if linux else [platform.node(), str(uuid.getnode())]
    return _digest_of_parts(*parts)


def _digest_of_parts(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def is_this_host(host: str) -> bool:
    """Return whether a name or address belongs to this host. OSError for a name without an address."""
    known = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    found = _resolve_addresses(host)
    # Interfaces have one address of loopback, and Debian gives the name of the host another one, 127.0.1.1.
    return not found.isdisjoint(known) or any(listeners.is_loopback(each) for each in found)


def canonical_name(host: str) -> str:
    """Return one name for all names and addresses of a host, as this host sees it; of itself it is "localhost"."""
    try:
        return "localhost" if is_this_host(host) else min(_resolve_addresses(host))
    except OSError:  # whoever dials it reports that
        return host.lower()


def _resolve_addresses(host: str) -> set[str]:
    return {str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}


BIND_VARIABLE = "RPCBENCH_BIND"
_ALL = ("", "0.0.0.0", "::")  # values of RPCBENCH_BIND that mean all interfaces
_OUTSIDE = "192.0.2.1"  # an address for documentation (RFC 5737): its route is the default route; no packet is sent


def bind_address() -> str:
    """Return the address to listen on, if it differs from the one that peers dial; else ""."""
    return os.environ.get(BIND_VARIABLE, "")


def address_towards(leader: str) -> str:
    """Return this process's address for other hosts, given its leader's host:port. RpcError without a route there."""
    if bind_address() not in _ALL:
        return f"tls://{listeners.join_address(bind_address(), 0)}"
    try:
        return f"tls://{listeners.join_address(listeners.interface_towards(*listeners.split_address(leader)), 0)}"
    except OSError as error:
        raise RpcError(f"this host cannot reach worker 0 at {leader}: {error.strerror or error}") from error


def outbound_address(address: str | None = None) -> str:
    """Return the address of a process that leads a world: `address` ("host", "host:port", ":port"), completed.
    ValueError for an invalid address, RpcError where this host has no interface that leads outward."""
    host, port = _parse_address(address or "")
    bound = bind_address()
    return f"tls://{listeners.join_address(host or (bound if bound not in _ALL else _default_interface()), port)}"


def _parse_address(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        if parts.netloc == address and "@" not in address:  # no path, query or user
            return parts.hostname or "", parts.port or 0
    except ValueError:  # the port is no number, or a bracket is missing
        pass
    raise ValueError(f'address={address!r} is invalid; write "host", "host:port" or ":port", an IPv6 host in brackets')


def _default_interface() -> str:
    """Return the address of the interface with the default route, or without one of the only interface."""
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
    raise RpcError(f'no interface of this host leads outward ({there}): pass address="host", which others can reach')
