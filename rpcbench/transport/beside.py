"""Keeps two threads of two processes that take turns on one core: who calls and waits, and who answers it.

Of two that take turns only one runs, yet the system wakes each on a core of its own: one that rests, so that it takes
5 to 50 us and finds its caches cold. So who is about to send a call and to wait says in shared memory where it runs,
and stays there; who waits for calls, waits there.

Guarantees
- A thread is bound only while it sends, or sleeps, and for `MOMENT` seconds at most. What a call runs, and what its
  caller does next, runs wherever it might before.
- It is left alone for `_PAUSE` calls where something was sent that nobody waited for: both may have work to do then.
- What a peer says is a hint: a core that this thread may not use is none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from rpcbench.transport.eager import asked_for

MOMENT = 0.002
_PAUSE = 64
_BYTES = 128
"""Of a mask of cores, one bit each; a system with more than 1024 says no."""


class Thread(Protocol):
    """Where this thread runs, and may run."""

    def core(self) -> int: ...

    def may(self) -> bytes | None:
        """A mask; None where the system does not tell."""

    def bind(self, mask: bytes) -> bool:
        """Whether the system did it."""


class _Thread:
    """The thread that asks. Quicker than what `os` has, which makes a set of all cores each time."""

    def __init__(self) -> None:
        system = ctypes.PyDLL(None)  # keeps Python's lock: each of these takes less time than to give that away
        self.core: Callable[[], int] = system.sched_getcpu
        self._get, self._set = system.sched_getaffinity, system.sched_setaffinity

    def may(self) -> bytes | None:
        mask = ctypes.create_string_buffer(_BYTES)
        return mask.raw if self._get(0, _BYTES, mask) == 0 else None

    def bind(self, mask: bytes) -> bool:
        return bool(self._set(0, _BYTES, mask) == 0)


class Beside:
    """For one connection. `ours` is memory that the peer sees, and `theirs` the peer's: the last bytes of each."""

    def __init__(
        self,
        ours: mmap.mmap,
        theirs: mmap.mmap,
        thread: Thread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._says = memoryview(ours)[-8:].cast("Q")  # the core that a caller waits on, and one
        self._hears = memoryview(theirs)[-8:].cast("Q")
        self._thread = thread
        self._clock = clock
        self._caller: int | None = None
        self._pause = 0
        self._before: bytes | None = None  # where the caller might run
        self._home: bytes | None = None  # and who answers
        self._short = True
        self._since = 0.0

    def end(self) -> None:
        """The connection has ended, and with it what it knew of the peer's memory."""
        self._says = self._hears = memoryview(bytearray(8)).cast("Q")

    # -- who calls; one thread at a time
    def call(self) -> None:
        """This thread is about to send a call, and to wait for the answer."""
        if self._pause:
            self._pause -= 1
            return
        core, mask = self._thread.core(), self._thread.may()
        if mask is None or not self._thread.bind(_only(core)):
            return
        self._before, self._caller = mask, threading.get_ident()
        self._says[0] = core + 1

    def called(self) -> None:
        """It does not wait any more."""
        if self._before is not None:
            mask, self._before, self._caller = self._before, None, None
            self._thread.bind(mask)

    def sent(self) -> None:
        """Something was sent, by any thread."""
        if self._says[0] and threading.get_ident() != self._caller:
            self._says[0], self._pause = 0, _PAUSE

    # -- who waits for calls; one thread at a time
    def rest(self) -> bool:
        """Before this thread waits: whether it is to wait no longer than a moment, and to call `rise` then."""
        core = self._hears[0]
        if not core:
            return False
        if not self._short:
            self._since = self._clock()
            return False
        mask = self._thread.may()
        if mask is None or not _has(mask, core - 1) or not self._thread.bind(_only(core - 1)):
            return False
        self._home = mask
        return True

    def rise(self, called: bool) -> None:
        """It has waited; `called`: not in vain."""
        assert self._home is not None, "it rests"
        mask, self._home = self._home, None
        self._thread.bind(mask)
        self._short = called

    def came(self) -> None:
        """After a wait without `rest`: calls that come slowly are not waited for in this way."""
        if not self._short:
            self._short = self._clock() - self._since < MOMENT


_masks: dict[int, bytes] = {}


def _only(core: int) -> bytes:
    mask = _masks.get(core)
    if mask is None:
        mask = _masks[core] = (1 << core).to_bytes(_BYTES, "little")
    return mask


def _has(mask: bytes, core: int) -> bool:
    return core < 8 * len(mask) and bool(mask[core >> 3] >> (core & 7) & 1)


def beside(ours: mmap.mmap | None, theirs: mmap.mmap | None) -> Beside | None:
    """None where one has no memory for it, the system cannot bind a thread, or the user wants none of it: who looks
    eagerly, or says RPCBENCH_BESIDE=0."""
    if ours is None or theirs is None or asked_for() or os.environ.get("RPCBENCH_BESIDE") == "0":
        return None
    try:
        return Beside(ours, theirs, _Thread())
    except AttributeError:
        return None
