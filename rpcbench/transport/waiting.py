"""How a thread waits for a connection: it looks for a bounded moment, then it sleeps.

To wake up takes longer than a short call: 20 to 50 us each way on many machines, and a core that has slept runs slowly
at first. So a thread that waits spins for `SPIN_SECONDS` before it sleeps (spin-then-park), but only where that is
likely to pay:
- where the last wait was a short one; after a long one, such as an idle hour, it sleeps at once;
- where another core is free: not for some waits after another thread or process has run here meanwhile, which wants
  this core or Python's lock (exponential backoff: twice as many each time that this happens again at once); and never
  where this process may use one core only (a quota on its time counts for none);
- unless `RPCBENCH_EAGER=0`.
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
_TAKEN = 0.00005  # seconds between two looks only where something else has run meanwhile
_FEWEST, _MOST = 4, 256  # waits without a spin after that
_DISARMED = getattr(select, "EPOLLONESHOT", 0)
_ARMED = getattr(select, "EPOLLIN", 0) | _DISARMED


def spins() -> bool:
    """Whether threads of this process look before they sleep."""
    return os.environ.get("RPCBENCH_EAGER", "1") not in ("", "0") and len(os.sched_getaffinity(0)) > 1


class AdaptiveSpin:
    """The waits of one thread at a time. `ready()`: whether what it waits for has come; takes a microsecond."""

    def __init__(self, ready: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._ready, self._clock = ready, clock
        self._short = self._wanted = spins()
        self._pause, self._backoff = 0, _FEWEST

    def wait(self, sleep: Callable[[], T]) -> T | None:
        """Look for a moment, if at all, then sleep; what `sleep` returns, or None where it was not needed."""
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
            os.sched_yield()
            before, now = now, self._clock()
            if now - before > _TAKEN:
                self._pause, self._backoff = self._backoff, min(2 * self._backoff, _MOST)
                return False
            if now > until:
                return False
        self._backoff = _FEWEST
        return True


class Watch:
    """Tells when a socket has something to read: to the thread that is about to read it, or to the idle receive loop.

    The loop is woken only while the watch is armed. To disarm it takes one call of the system and wakes nobody, so
    other threads may read in between without a change of threads. One event wakes once; then the watch is to be armed
    again.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.closed = False
        self._fd = sock.fileno()
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        self._poll = poll.poll
        self.ready: Callable[[], object] = functools.partial(poll.poll, 0)
        """Whether a read would not wait."""
        self._armed = select.epoll()
        self._armed.register(self._fd, _DISARMED)

    def poll(self, seconds: float) -> bool:
        """Whether a read would not wait, now or in that time."""
        return bool(self._poll(seconds * 1000))

    def arm(self) -> None:
        """Wake the loop as soon as there is something to read, or the end."""
        self._armed.modify(self._fd, _ARMED)

    def disarm(self) -> None:
        self._armed.modify(self._fd, _DISARMED)  # an end still wakes, once

    def sleep(self) -> None:
        """The loop's wait. It may have been for nothing."""
        self._armed.poll()

    def close(self) -> None:
        """Once the loop does not sleep, and before the socket is closed."""
        self.closed = True
        self._armed.close()
