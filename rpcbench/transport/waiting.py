"""Waits for a connection: spin for a bounded time, then sleep (spin-then-park).

A wake-up takes longer than a short call: 20 to 50 us each way on many machines, and a core that has slept runs slowly
at first. So a waiting thread spins for `SPIN_SECONDS` before it sleeps, but only where that is likely to pay:
- The last wait was short. After a long one, such as an idle hour, the thread sleeps at once.
- Another core is free. After a spin in which another thread or process took this core or the GIL, some waits do not
  spin (exponential backoff: twice as many each time that this happens again at once). A process that may use one core
  only never spins (a CPU quota is not considered).
- `RPCBENCH_EAGER` is not 0.
"""

from __future__ import annotations

import functools
import os
import select
import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SPIN_SECONDS = 0.0005
_TAKEN = 0.00005  # seconds between two polls that mean that another thread or process had the core or the GIL
_FEWEST, _MOST = 4, 256  # waits without a spin after that: at first, and at most
_DISARMED = getattr(select, "EPOLLONESHOT", 0)
_ARMED = getattr(select, "EPOLLIN", 0) | _DISARMED


def spins() -> bool:
    """Return whether threads of this process spin before they sleep."""
    return os.environ.get("RPCBENCH_EAGER", "1") not in ("", "0") and len(os.sched_getaffinity(0)) > 1


def time_left(deadline: float, late: str) -> float:
    """Return the seconds until a deadline, by time.monotonic; TimeoutError with the text `late` past it."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError(late)
    return left


class AdaptiveSpin:
    """The waits of one thread at a time. `ready()` polls the event, and takes about a microsecond."""

    def __init__(self, ready: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._ready, self._clock = ready, clock
        self._short = self._wanted = spins()  # `_short`: the last wait was shorter than a spin
        self._pause, self._backoff = 0, _FEWEST  # waits left without a spin, and their number the next time

    def wait(self, sleep: Callable[[], T]) -> T | None:
        """Spin, if that is likely to pay, then call `sleep` and return its result; None where the spin sufficed."""
        began = self._clock()
        if self._pause:
            self._pause -= 1
        elif self._short and self._comes(began):
            return None
        slept = sleep()
        self._short = self._wanted and self._clock() - began < SPIN_SECONDS
        return slept

    def _comes(self, now: float) -> bool:
        until = now + SPIN_SECONDS
        while not self._ready():
            os.sched_yield()  # another process that is ready to run gets the core, and the pause below shows it
            before, now = now, self._clock()
            if now - before > _TAKEN:
                self._pause, self._backoff = self._backoff, min(2 * self._backoff, _MOST)
                return False
            if now > until:
                return False
        self._backoff = _FEWEST
        return True


class SocketWaiter:
    """The readiness of a socket, for a thread that is about to read it and for the idle receive loop. The loop wakes
    only while the waiter is armed, once for each `arm`. To disarm takes one system call and wakes no thread, so other
    threads can read in between without a context switch."""

    def __init__(self, sock: socket.socket) -> None:
        self.closed = False
        self._fd = sock.fileno()
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        self._poll = poll.poll
        self.ready: Callable[[], object] = functools.partial(poll.poll, 0)
        """Return whether a read would not wait."""
        self._armed = select.epoll()  # its EPOLLONESHOT disarms after one event
        self._armed.register(self._fd, _DISARMED)

    def poll(self, seconds: float) -> bool:
        """Wait at most `seconds` for data or the end of the stream; return whether a read would not wait."""
        return bool(self._poll(seconds * 1000))

    def arm(self) -> None:
        """Let the next data, or the end of the stream, wake the loop."""
        self._armed.modify(self._fd, _ARMED)

    def disarm(self) -> None:
        """Let no data wake the loop; the end of the stream still does, once."""
        self._armed.modify(self._fd, _DISARMED)

    def sleep(self) -> None:
        """Wait until the armed waiter has an event, which another thread may have read already."""
        self._armed.poll()

    def close(self) -> None:
        """Close the descriptor: after the loop has woken, and before the socket is closed."""
        self.closed = True
        self._armed.close()
