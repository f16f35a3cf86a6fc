"""Addresses for servers that tests start: no other process takes one between its choice and the server's bind.

A port that was bound and closed again is free for every connection of this host, as a source port too; a kernel whose
port for IOPub was taken does not end, but hangs. So a port stays bound while its server runs, and kernels use sockets
in the file system.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

from jupyter_client.manager import KernelManager
from traitlets.config import Config

_numbers = itertools.count()


def port() -> contextlib.AbstractContextManager[int]:
    """A TCP port of 127.0.0.1 on which only a server with SO_REUSEADDR, as nearly all servers have it, can listen."""
    return ports(1)


@contextlib.contextmanager
def ports(count: int) -> Iterator[int]:
    """The first of `count` consecutive ports."""
    while True:
        with contextlib.ExitStack() as holders:
            first = _bound(holders, 0)
            try:
                for number in range(1, count):
                    _bound(holders, first + number)
            except OSError:  # one of the ports is taken
                continue
            yield first
            return


def _bound(holders: contextlib.ExitStack, number: int) -> int:
    holder = holders.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", number))
    return int(holder.getsockname()[1])


def kernel_manager(**options: Any) -> KernelManager:
    """A kernel manager with these options, whose kernel listens at paths of its own."""
    return KernelManager(transport="ipc", ip=f"{_folder().name}/{next(_numbers)}", **options)


def kernel_config() -> Config:
    """A configuration for notebook clients, whose kernels so listen at paths of their own."""
    return Config(KernelManager={"transport": "ipc", "ip": f"{_folder().name}/{next(_numbers)}"})


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Made on first use: workers import this module too, and end without removing anything."""
    return tempfile.TemporaryDirectory(prefix="rpcbench-kernels")
