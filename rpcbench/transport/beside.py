"""Keeps two threads of two processes that take turns on one core: who calls and waits, and who answers it.

Of two that take turns only one runs, yet the system wakes each on a core of its own: one that rests, so that it takes
5 to 50 us and finds its caches cold. So who is about to send a call and to wait for the answer says in it where it
runs, and sleeps there; who has answered it sleeps there, too, until the next one.

Guarantees
- A thread is bound only while it sleeps, and for `MOMENT` seconds at most. No code of a user's runs bound, but for a
  handler of a signal that comes just then; no thread or process that is started inherits it.
- It is left alone for `_PAUSE` calls where something was sent that nobody waited for: both may have work to do then.
- What a peer says is a hint. It counts only where both share a kernel, and names a core that this thread may use.

A thread that has slept so has had its mask set: it does not follow where a system lets its processes use more cores
later.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
import zlib
from _thread import get_ident
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rpcbench.transport.eager import asked_for

MOMENT = 0.002
_PAUSE = 16
_CORE_BITS = 10
_CORES = (1 << _CORE_BITS) - 1
_BYTES = 128
"""Of a mask of cores, one bit each; a system with more than 1024 says no."""


class Thread(Protocol):
    """Where this thread runs, and may run."""

    def core(self) -> int: ...

    def may(self) -> bytes | None:
        """A mask; None where the system does not tell."""

    def bind(self, mask: bytes, /) -> int:
        """0 where the system did it."""


class _Thread:
    """The thread that asks, one at a time. Quicker than what `os` has, which makes a set of all cores each time."""

    def __init__(self) -> None:
        system = ctypes.PyDLL(None)  # keeps Python's lock: each of these takes less time than to give that away
        self.core: Callable[[], int] = system.sched_getcpu
        self._mask = ctypes.create_string_buffer(_BYTES)
        self._get = functools.partial(system.sched_getaffinity, 0, _BYTES, self._mask)
        self.bind: Callable[[bytes], int] = functools.partial(system.sched_setaffinity, 0, _BYTES)

    def may(self) -> bytes | None:
        return self._mask.raw if self._get() == 0 else None


class Beside:
    """For one connection."""

    def __init__(self, thread: Thread, kernel: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.hears = 0  # what the last message has said
        self._thread = thread
        self._kernel = kernel << _CORE_BITS
        self._clock = clock
        self._caller: int | None = None
        self._here = 0  # what its messages say
        self._said = 0  # what the last message that was sent did
        self._pause = 0
        self._before = b""  # where the thread that sleeps might run
        self._short = True
        self._since = 0.0

    # -- who calls; one thread at a time
    def expect(self) -> None:
        """This thread is about to send something, and to wait for the answer."""
        if self._pause:
            self._pause -= 1
        elif self._caller is None and 0 <= (core := self._thread.core()) < _CORES:
            self._here, self._caller = self._kernel | core + 1, get_ident()

    def stay(self) -> bool:
        """Before this thread sleeps: whether it is to do so for no longer than a moment, and to call `rise` then."""
        return self._caller == get_ident() and self._bound(self._thread.core())

    def expected(self) -> None:
        """It does not wait any more."""
        self._caller = None

    def in_vain(self) -> None:
        """It has not come to wait; by any thread."""
        if self._caller is not None:
            self._caller, self._said, self._pause = None, 0, _PAUSE

    def says(self, held: bool) -> int:
        """What a message is to say that this thread, which may be any, sends; `held`: with the next one."""
        if held:
            return self._said
        if self._caller == get_ident():
            self._said = self._here
        elif self._said:
            self._said, self._pause = 0, _PAUSE
        return self._said

    # -- who waits for calls; one thread at a time
    def rest(self) -> bool:
        """As `stay`, for where who calls is; `called` comes after `rise`."""
        if not self.hears or self.hears & ~_CORES != self._kernel:
            return False
        if not self._short:
            self._since = self._clock()
            return False
        return self._bound((self.hears & _CORES) - 1)

    def called(self, came: bool) -> None:
        """It has rested; `came`: not in vain."""
        self._short = came

    def came(self) -> None:
        """After a wait without `rest`: calls that come slowly are not waited for in this way."""
        if not self._short:
            self._short = self._clock() - self._since < MOMENT

    # -- both, while they have the token of the connection
    def _bound(self, core: int) -> bool:
        mask = self._thread.may()
        if mask is None or core < 0 or not mask[core >> 3] >> (core & 7) & 1:
            return False
        if self._thread.bind(_masks.get(core) or _only(core)) != 0:
            return False
        self._before = mask
        return True

    def rise(self) -> None:
        """This thread has slept, and is free to go."""
        self._thread.bind(self._before)


_masks: dict[int, bytes] = {}


def _only(core: int) -> bytes:
    mask = _masks[core] = (1 << core).to_bytes(_BYTES, "little")
    return mask


def beside() -> Beside | None:
    """None where the system cannot bind a thread, or the user wants none of it: who looks eagerly, or says
    RPCBENCH_BESIDE=0."""
    if asked_for() or os.environ.get("RPCBENCH_BESIDE") == "0":
        return None
    try:
        return Beside(_Thread(), _kernel())
    except (AttributeError, OSError):
        return None


@functools.cache
def _kernel() -> int:
    """A number that processes under another kernel are not likely to have."""
    return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes()) >> _CORE_BITS
