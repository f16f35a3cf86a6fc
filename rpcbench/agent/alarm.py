"""Rings once, some time after it was last set; to set it again puts it off, in a microsecond, and wakes nobody."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from typing import Protocol

from rpcbench.words.changes import Flag

_MONOTONIC = 1
_NANOSECONDS = 1_000_000_000
_SPEC = struct.Struct("4l")
"""`struct itimerspec`: how often again, and when, each in seconds and nanoseconds."""

_NEVER = _SPEC.pack(0, 0, 0, 0)


class Alarm(Protocol):
    """For one thread that waits, and any that set it."""

    def set(self, seconds: float) -> None:
        """It is to ring in so many seconds from now, and not at any time set before."""

    def clear(self) -> None:
        """It need not ring any more."""

    def wait(self) -> None:
        """Until it rings."""

    def close(self) -> None:
        """Once nobody waits."""


class _Timer:
    """The system's own (timerfd_create(2)). OSError where it gives none."""

    def __init__(self) -> None:
        system = ctypes.PyDLL(None, use_errno=True)  # keeps Python's lock: it takes less time than to give that away
        self._settime = system.timerfd_settime
        self._fd: int = system.timerfd_create(_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "no timer")

    def set(self, seconds: float) -> None:
        whole, part = divmod(max(1, int(seconds * _NANOSECONDS)), _NANOSECONDS)
        self._settime(self._fd, 0, _SPEC.pack(0, 0, whole, part), None)

    def clear(self) -> None:
        self._settime(self._fd, 0, _NEVER, None)

    def wait(self) -> None:
        os.read(self._fd, 8)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


class _Sleeper:
    """Where the system has no such thing: whoever waits looks now and then whether it was put off."""

    def __init__(self) -> None:
        self._at = 0.0
        self._set = Flag()

    def set(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._set.set()

    def clear(self) -> None:
        """It rings for nothing."""

    def wait(self) -> None:
        self._set.wait()
        self._set.clear()  # before the look: what is set now is seen, or rings once more
        while (left := self._at - time.monotonic()) > 0:
            time.sleep(left)

    def close(self) -> None:
        """There is nothing to give back."""


def alarm() -> Alarm:
    """What this system has."""
    try:
        return _Timer()
    except (AttributeError, OSError):  # it has none, or no descriptor is left
        return _Sleeper()
