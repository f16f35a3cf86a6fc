"""A stream over a connected socket, the common part of unix sockets and TCP, and the wait for its data.

A stream has one reader and one writer at a time, which may be different threads. A wait ends by `shut_down`, by the
peer, or by the limit set while the connection is opened.

Spin-then-park: a wake-up takes longer than a short call, 20 to 50 us each way on many machines, and a core that has
slept runs slowly at first. So a waiting thread spins for `SPIN_SECONDS` before it sleeps, but only where that is likely
to pay:
- The last wait was short. After a long one, such as an idle hour, the thread sleeps at once.
- Another core is free. After a spin in which another thread or process took this core or the GIL, some waits do not
  spin (exponential backoff: twice as many each time that this happens again at once). A process that may use one core
  only never spins (a CPU quota is not considered).
- `RPCBENCH_EAGER` is not 0.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from rpcbench.transport.shared_memory import BufferStore
from rpcbench.wire.framing import Parts

T = TypeVar("T")
MOST_PARTS = 512  # of one `sendmsg`, which takes 1024 at most (IOV_MAX)
_ACKNOWLEDGED = 56 if sys.platform == "linux" else 0
"""Offset in `tcp_info` of the milliseconds since the last acknowledgement (tcpi_last_ack_recv, see linux/tcp.h)."""
_FLAGS = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)
SPIN_SECONDS = 0.0005
_TAKEN = 0.00005  # seconds between two polls that mean that another thread or process had the core or the GIL
_FEWEST, _MOST = 4, 256  # waits without a spin after that: at first, and at most
_DISARMED = getattr(select, "EPOLLONESHOT", 0)
_ARMED = getattr(select, "EPOLLIN", 0) | _DISARMED


def may_spin() -> bool:
    """Return whether threads of this process spin before they sleep."""
    return os.environ.get("RPCBENCH_EAGER", "1") not in ("", "0") and len(os.sched_getaffinity(0)) > 1


class AdaptiveSpin:
    """The waits of one thread at a time. `ready()` polls the event, and takes about a microsecond."""

    def __init__(self, ready: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._ready, self._clock = ready, clock
        self._short = self._wanted = may_spin()  # `_short`: the last wait was shorter than a spin
        self._pause, self._backoff = 0, _FEWEST  # waits left without a spin, and their number the next time

    def spin_then_sleep(self, sleep: Callable[[], T]) -> T | None:
        """Spin, if that is likely to pay, then call `wait_for_event` and return its result; None where the spin
        sufficed."""
        began = self._clock()
        if self._pause:
            self._pause -= 1
        elif self._short and self._spin_until_ready(began):
            return None
        slept = sleep()
        self._short = self._wanted and self._clock() - began < SPIN_SECONDS
        return slept

    def _spin_until_ready(self, now: float) -> bool:
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
    only while the waiter is armed, once for each `arm_wakeup`. To disarm takes one system call and wakes no thread, so
    other threads can read in between without a context switch."""

    def __init__(self, sock: socket.socket) -> None:
        self.broken = False  # a descriptor is closed: by `close`, or by a program whose own it is not
        self._fd = sock.fileno()
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        self._poll = poll.poll
        self.ready: Callable[[], object] = functools.partial(poll.poll, 0)
        """Return whether a read would not wait."""
        self._armed = select.epoll()  # its EPOLLONESHOT disarms after one event
        self._armed.register(self._fd, _DISARMED)

    def poll_readable(self, seconds: float) -> bool:
        """Wait at most `seconds` for data or the end of the stream; return whether a read would not wait."""
        return bool(self._poll(seconds * 1000))

    def arm_wakeup(self) -> None:
        """Let the next data, or the end of the stream, wake the loop."""
        self._set_events(_ARMED)

    def disarm_wakeup(self) -> None:
        """Let no data wake the loop; the end of the stream still does, once."""
        self._set_events(_DISARMED)

    def _set_events(self, events: int) -> None:
        try:
            self._armed.modify(self._fd, events)
        except (OSError, ValueError):
            self.broken = True

    def wait_for_event(self) -> None:
        """Wait until the armed waiter has an event, which another thread may have read already, or is broken."""
        try:
            self._armed.poll()
        except (OSError, ValueError):
            self.broken = True

    def close(self) -> None:
        """Close the descriptor: after the loop has woken, and before the socket is closed."""
        self._armed.close()


class SocketStream:
    """A stream over a connected socket, which it owns from now on."""

    pending = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send = sock.send
        self.store = BufferStore()
        self.read_into = sock.recv_into  # the bound method itself, as every received byte passes here
        self.watch = SocketWaiter(sock) if hasattr(select, "epoll") else None  # Linux has epoll

    def write(self, parts: Parts, may_wait: bool) -> None:
        while parts:
            first = parts[0]
            try:
                if len(parts) == 1:  # most messages: `send` is cheaper than `sendmsg`
                    sent = self._send(first, _FLAGS)
                    if sent == len(first):
                        parts.clear()
                        return
                else:
                    sent = self._sock.sendmsg(parts[:MOST_PARTS], [], _FLAGS)
            except BlockingIOError:
                if not may_wait:
                    raise
                self._await_room()
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = memoryview(parts[0])[sent:]

    def _await_room(self) -> None:
        limit = self._sock.gettimeout()
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        if not poller.poll(None if limit is None else limit * 1000):
            raise TimeoutError("timed out")

    def share_memory(self, deadline: float, last: bool) -> None:
        """Do nothing: two hosts have no memory in common."""

    def set_time_limit(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def silence_seconds(self) -> float | None:
        # The kernel acknowledges for a stopped or busy process too, so a long silence is a fault of the network.
        if not _ACKNOWLEDGED or self._sock.family == socket.AF_UNIX:
            return None
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED + 4)
        except OSError:
            return None  # it has just ended
        return int.from_bytes(info[_ACKNOWLEDGED:], sys.byteorder) / 1000

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close_descriptor(self) -> None:
        if self.watch is not None:
            self.watch.close()
        with contextlib.suppress(OSError):  # a program that closes all descriptors has closed it
            self._sock.close()
