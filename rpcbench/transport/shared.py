"""Memory that two processes on one host share: an anonymous file of each, handed over once, with a bell of each.

Neither file has a name, so nothing of it outlives the two. It is handed to a peer that has proved who it is, and is
sealed, so that nobody can cut it short under the other. Where a system has no such files, or does not let them be
mapped, or RPCBENCH_SHARED_MEMORY is 0, everything goes through the socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import socket
import time
from pathlib import Path

from rpcbench.base.errors import ProtocolError
from rpcbench.transport.arena import SIZE, Arena, Loans
from rpcbench.transport.bells import Bell, Ear
from rpcbench.transport.lane import POSSIBLE
from rpcbench.transport.store import Store

_LARGEST = 64 << 30
_NOTHING, _MEMORY = b"n", b"m"


def exchange(sock: socket.socket, deadline: float, last: bool) -> Store:
    """Hand our memory to the peer and take its own, as it does at this moment; each only where both can.

    last: whether this side has the last word, as one of the two does. Where the other side returns, this one waits for
    nothing any more, so it does not give up what the other takes for done.

    ProtocolError for a file that could do harm, OSError past the deadline, or where the peer hangs up.
    """
    with contextlib.ExitStack() as undo:
        ours, ear = _offered(sock, deadline, undo)
        theirs, bell = _taken(sock, deadline, undo)
        verdict = _NOTHING if theirs is None else _MEMORY
        if not last:
            _say(sock, deadline, verdict)
        accepted = _heard(sock, deadline)[0] == _MEMORY
        if last:
            _say(sock, math.inf, verdict)
        undo.pop_all()  # the store's own from now on
    arena = Arena(ours, mmap.MADV_REMOVE) if ours is not None and accepted else None
    return Store(arena, Loans(theirs) if theirs is not None else None, ear, bell)


def _offered(sock: socket.socket, deadline: float, undo: contextlib.ExitStack) -> tuple[mmap.mmap | None, Ear | None]:
    """Our memory, and the ear of the bell that the peer gets with it; neither where the peer was told of none."""
    descriptor = _file()
    try:
        ours = _mapped(descriptor, SIZE)
        if ours is None or descriptor is None:
            _say(sock, deadline, _NOTHING)
            return None, None
        ear = _ear()
        if ear is not None:
            undo.callback(ear.close)
        _say(sock, deadline, _MEMORY, descriptor, *(() if ear is None else (ear.descriptor,)))
        return ours, ear
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _ear() -> Ear | None:
    """None where lanes are not possible, or there are no descriptors for one."""
    if not POSSIBLE:
        return None
    with contextlib.suppress(OSError):
        return Ear()
    return None


def _file() -> int | None:
    """A sealed file that takes no memory until it is written to."""
    if os.environ.get("RPCBENCH_SHARED_MEMORY") == "0" or not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("rpcbench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:  # no memory, no descriptors, or the system forbids it
        return None
    try:
        os.ftruncate(descriptor, SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0


def _mapped(descriptor: int | None, size: int) -> mmap.mmap | None:
    if descriptor is None:
        return None
    with contextlib.suppress(OSError):
        return mmap.mmap(descriptor, size)
    return None


def _taken(sock: socket.socket, deadline: float, undo: contextlib.ExitStack) -> tuple[mmap.mmap | None, Bell | None]:
    """The peer's memory, and its bell; None where it has none for us, or it cannot be used here."""
    word, descriptors, cut = _heard(sock, deadline)
    try:
        if word == _NOTHING or cut or os.environ.get("RPCBENCH_SHARED_MEMORY") == "0":
            return None, None
        if not descriptors:
            raise ProtocolError("the peer announced shared memory, and sent none")
        memory = _mapped(descriptors[0], _size(descriptors[0]))
        if len(descriptors) == 1 or memory is None or not POSSIBLE:
            return memory, None
        _check_bell(descriptors[1])
        bell = Bell(descriptors.pop())
        undo.callback(bell.close)
        return memory, bell
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _check_bell(descriptor: int) -> None:
    """ProtocolError for a file that is none: what is written to it would do something else."""
    if str(Path(f"/proc/self/fd/{descriptor}").readlink()) != "anon_inode:[eventfd]":
        raise ProtocolError("the peer sent something else as a bell")


def _size(descriptor: int) -> int:
    """Of a file that keeps it whatever the peer does. ProtocolError for another one."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # no file in memory
        seals = 0
    size = os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or not 0 < size <= _LARGEST or size % mmap.PAGESIZE:
        raise ProtocolError("the peer sent a file as shared memory that could be cut short, or is none")
    return size


def _say(sock: socket.socket, deadline: float, word: bytes, *descriptors: int) -> None:
    _limit(sock, deadline)
    socket.send_fds(sock, [word], descriptors)


def _heard(sock: socket.socket, deadline: float) -> tuple[bytes, list[int], bool]:
    """A word, what came with it, and whether that had no room: this process may open no more files."""
    _limit(sock, deadline)
    word, descriptors, flags, _ = socket.recv_fds(sock, 1, 2, socket.MSG_CMSG_CLOEXEC)
    if not word:
        raise ConnectionResetError("the peer hung up before it had told of its memory")
    return word, descriptors, bool(flags & socket.MSG_CTRUNC)


def _limit(sock: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the peer took too long to tell of its memory")
    sock.settimeout(None if left == math.inf else left)
