"""The receive loop of one connection, and the threads that receive their own replies.

Guarantees
- No message waits behind a running call for longer than twice `LONG`: the monitor passes the read lock on.
- A thread that waits for a reply and has no other work receives it itself if it gets the read lock; no loop is woken.
- No thread reads after the end of the connection, and `ended` is called once, whichever thread has met the end.
"""

# Theory of operation
#
# One thread at a time reads a connection: the thread that holds its read lock. A thread of the pool runs the receive
# loop. It also runs the short calls that messages bring, which saves a change of threads, and releases the read lock
# for as long as a call runs. So a connection is in one of four states:
#
#              nothing to read
# RECEIVING ────────────────────► IDLE      the loop sleeps until data arrive; the read lock is free
#   │   ▲  ◄────────────────────  │  ▲
#   │   │      data arrive        │  │ a thread that waits for a reply takes the lock, and releases it afterwards
#   │   │                         ▼  │
#   │   │ the call ends         BORROWED    that thread receives: its own reply and every other message
#   ▼   │                         ▲  │
#  SERVING ───────────────────────┘  │      the lock is free while the call runs
#   │                                ▼
#   │ the call has run for LONG,    a pool thread begins a new loop if the call has ended meanwhile
#   │ or waits for something
#   ▼
# a pool thread begins a new loop; the thread that runs the call returns to the pool after it
#
# Two flags tell BORROWED how it began. `_idle`: the loop's thread still exists and sleeps, so the borrower gives the
# lock back by arming the watch that wakes it. `_serving`: the loop's thread runs a call and tries to take the lock
# afterwards; if that fails, it leaves the loop, and the borrower starts a new one. Should both miss each other, the
# monitor finds the lock free and starts one.

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from rpcbench.base.errors import ProtocolError
from rpcbench.base.futures import Waits
from rpcbench.runtime.locked_node import uninterrupted
from rpcbench.runtime.pool import LONG, CountedCall, Job, Pool, PoolThread
from rpcbench.transport.sockets import AdaptiveSpin, SocketWaiter
from rpcbench.transport.stream import ConnectionEnd, StreamConnection
from rpcbench.wire.framing import Frame

_UNHANDLED = ConnectionEnd("a message from it could not be handled", False)
_LONGEST_SECONDS = 0.1
"""Seconds after which a thread that waits for a reply stops receiving, as Ctrl-C is deferred meanwhile."""


class Receiver:
    """The receiving side of one connection: `deliver` takes each message of `source`, `ended` the way it ended; `due`
    tells whether replies are to come."""

    def __init__(
        self,
        pool: Pool,
        source: StreamConnection,
        deliver: Callable[[Frame], None],
        ended: Callable[[ConnectionEnd], None],
        due: Callable[[], bool],
    ) -> None:
        self._pool, self._source = pool, source
        self._deliver, self._ended, self._due = deliver, ended, due
        self._watch = source.watch  # None: it cannot report data, so the loop blocks in read() and lends nothing
        self._start_loop: Job = self.release_to_pool  # bound once, which saves time in each call
        self._opened = False  # first read done? The watch may not report data that came with the handshake
        self._lock = threading.Lock()  # the read lock
        self._lock.acquire()
        # Only the holder of the read lock touches the fields below.
        self._idle = False  # the loop sleeps, and gets the lock back when it wakes
        self._serving = False  # the loop runs a call, and takes the lock again afterwards
        self._ending: ConnectionEnd | None = None  # met by a borrower, handled by the loop
        self._frames: collections.deque[Frame] = collections.deque()  # read, but not delivered yet
        self.calls: collections.deque[Job] = collections.deque()  # received by the loop, which runs them itself
        if (watch := self._watch) is not None:
            # If replies are due, the loop stops spinning: a thread that begins to wait is to find the lock free.
            self._loop_spin = AdaptiveSpin(lambda: watch.ready() or due())
            self._reply_spin = AdaptiveSpin(watch.ready)

    # -- the loop
    def start(self) -> None:
        self._pool.monitor.start()
        self._pool.spawn_job(self.receive_loop)

    def receive_loop(self) -> None:
        """Run the loop on a pool thread that holds the read lock, until it ends or another thread runs it."""
        thread = self._pool.current_thread()
        thread.receives = self.calls
        ending: ConnectionEnd | None = _UNHANDLED
        try:
            ending = self._run_loop(thread)
        except ProtocolError as error:
            ending = ConnectionEnd(f"it sent invalid data ({error})", False)
        finally:
            thread.receives = None  # before `_ended`: later calls must not queue in a loop that is over
            if ending is not None:
                for call in self.calls:  # left by a message whose handling failed half-way; counted ones hold a place
                    if type(call) is CountedCall:
                        self._pool.give_back_place()
                self._ended(ending)

    def _run_loop(self, thread: PoolThread) -> ConnectionEnd | None:
        """Return how the connection ended, or None if another thread runs the loop now."""
        calls, frames = self.calls, self._frames
        while True:
            if calls:
                if not self._serve_call(thread, calls.popleft()):
                    return None
            elif frames:
                self._deliver(frames.popleft())
            else:
                ending = self._await_some()
                got = ending or self._source.read_frames()
                if isinstance(got, ConnectionEnd):
                    return got
                frames.extend(got)

    def _await_some(self) -> ConnectionEnd | None:
        """Wait until there is something to read, or a borrower has met the end, which is returned."""
        if self._watch is None or not self._opened:
            self._opened = True
            return None
        if self._pool.busy or self._due():  # spinning would take the core, or the lock, from another thread
            return self._sleep_idle()
        ending = self._loop_spin.spin_then_sleep(self._sleep_idle)
        return self._sleep_idle() if ending is None and not self._watch.ready() else ending

    def _sleep_idle(self) -> ConnectionEnd | None:
        """IDLE: sleep with the read lock free, until data arrive that no other thread receives."""
        watch = self._lent_watch
        self._idle = True
        self._release_to_idle()
        while True:
            watch.wait_for_event()
            if not self._lock.acquire(blocking=False):
                continue  # its holder arms the watch again
            if self._ending is not None or watch.broken or watch.ready():
                break  # a broken watch cannot wake this thread again: it reads, and meets the end
            self._release_to_idle()  # another thread has received the data that woke this one
        self._idle = False
        return self._ending

    def _serve_call(self, thread: PoolThread, call: Job) -> bool:
        """SERVING: run a call, unless the pool is full. Return False if another thread runs the loop by now."""
        if not self._pool.take_place(call):
            return True  # the pool has queued it for another thread
        # From here calls that the function makes may borrow the lock: `lends` lets a wait pass it on at once.
        thread.receives, thread.lends, self._serving = None, self._start_loop, True
        self._release_lock()
        thread.run_call(call)
        kept = self._try_acquire_lock()
        thread.lends, self._serving = None, False
        if kept:
            thread.receives = self.calls
        self._pool.give_back_place()
        return kept

    # -- the read lock around a call
    def _release_lock(self) -> None:
        """Free the read lock for any thread. The monitor gives it to a pool thread if none takes it."""
        self._pool.monitor.lock_released(self._start_loop)  # first: a thread that takes the lock must find it
        self._lock.release()

    def _try_acquire_lock(self) -> bool:
        """Try to take the read lock and the loop with it; return whether this thread has both now."""
        if not self._lock.acquire(blocking=False):
            return False
        self._pool.monitor.lock_acquired(self._start_loop)
        if self._idle:  # another thread runs the loop already, and sleeps
            self._release_to_idle()
            return False
        return True

    def release_to_pool(self) -> None:
        """Have another pool thread run the loop if none does: the call that this thread runs takes long."""
        if self._try_acquire_lock():
            self._spawn_loop()

    def _spawn_loop(self) -> None:
        try:
            self._pool.spawn_job(self.receive_loop)
        except BaseException:  # no thread can be started: the next one that looks finds the lock free
            self._release_lock()
            raise

    def _release_to_idle(self) -> None:
        """Give the read lock back to the idle loop."""
        watch = self._lent_watch
        # Release first, then arm: the loop must find the lock free when it wakes. At the end of a connection the loop
        # can have the lock at once, so the watch may be closed before it is armed, which breaks it without harm.
        self._lock.release()
        watch.arm_wakeup()

    # -- threads that wait for a reply
    def receive_until(self, waiting: Waits, quiet: float = LONG) -> None:
        """Receive on a waiting thread while `waiting()`, if no other thread does, until `quiet` s bring nothing."""
        with uninterrupted:  # a read lock that is not given back would never be free again
            if self._lock.acquire(blocking=False):
                self._receive_borrowed(waiting, quiet)

    def _receive_borrowed(self, waiting: Waits, quiet: float) -> None:
        """BORROWED: receive, unless the loop has left work that a pool thread must do first."""
        left, ending = False, self._ending
        try:
            self._pool.monitor.lock_acquired(self._start_loop)
            left = bool(self.calls or self._frames)  # these come first, and calls must not run on a waiting thread
            if not left and ending is None:
                if self._idle:
                    self._lent_watch.disarm_wakeup()
                ending = self._receive_for_wait(waiting, quiet)
        finally:
            self._give_back(ending, left)

    def _receive_for_wait(self, waiting: Waits, quiet: float) -> ConnectionEnd | None:
        """Receive until the wait is over; return how the connection ended, if it did."""
        deadline = 0.0
        while waiting() and self._await_data(quiet):
            if (ending := self._receive_some()) is not None:
                return ending
            if waiting():  # another message has come: bound the time on this thread
                now = time.monotonic()
                deadline = deadline or now + _LONGEST_SECONDS
                if now > deadline:
                    break
        return None

    def _await_data(self, quiet: float) -> bool:
        """Return whether there is something to read within `quiet` seconds."""
        watch = self._lent_watch
        if self._pool.busy:  # another thread of this process may need the core
            return watch.poll_readable(quiet)
        found = self._reply_spin.spin_then_sleep(partial(watch.poll_readable, quiet))
        return found is None or found

    def _receive_some(self) -> ConnectionEnd | None:
        """Deliver one batch of messages; return how the connection ended, if it did."""
        try:
            got = self._source.read_frames()
            if isinstance(got, ConnectionEnd):
                return got
            for frame in got:
                self._deliver(frame)
        except ProtocolError as error:
            return ConnectionEnd(f"it sent invalid data ({error})", False)
        except Exception as error:  # noqa: BLE001  (not a fault of the call that waits here: raised on another thread)
            self._pool.spawn_job(partial(_raise_error, error))
            return _UNHANDLED
        return None

    def _give_back(self, ending: ConnectionEnd | None, left: bool) -> None:
        """Give the lock back in the way that the state found by `_receive_borrowed` needs, see above."""
        if self._idle:
            if ending is not None:
                self._ending = ending
                self._source.break_connection()  # wakes the loop, which handles the end
            self._release_to_idle()
        elif ending is not None:  # the lock stays taken for good, so no thread reads after the end
            self._pool.spawn_job(lambda: self._ended(ending))
        elif left or not self._serving or self._due():  # due: the serving thread may be busy for long
            self._spawn_loop()
        else:
            self._release_lock()

    @property
    def _lent_watch(self) -> SocketWaiter:
        assert self._watch is not None, "only connections with a watch are lent"
        return self._watch


def _raise_error(error: Exception) -> NoReturn:
    raise error
