"""The receive loop of one connection, and the threads that receive their own replies.

Theory of operation. One thread at a time reads a connection: the one that holds its read lock. A thread of the pool
runs the receive loop. It also runs the short calls that messages bring, which saves a change of threads, and releases
the read lock for as long as a call runs. So a connection is in one of four states:

                 nothing to read
    RECEIVING ───────────────────► IDLE      the loop sleeps until something comes; the read lock is free
      │   ▲  ◄───────────────────  │  ▲
      │   │    something comes     │  │ a thread that waits for a reply takes the lock, and releases it after that
      │   │                        ▼  │
      │   │ the call ends        BORROWED    that thread receives, its own reply and all else that comes
      ▼   │                        ▲  │
     SERVING ──────────────────────┘  │      the lock is free while the call runs
      │                               ▼
      │ the call has run for LONG,   another thread of the pool begins a loop, if the call has ended meanwhile
      │ or waits for something
      ▼
    another thread of the pool begins a loop; the one that runs the call goes back to the pool after it

Guarantees
- No message waits behind a call for longer than twice `LONG`: the monitor sees to that.
- A thread that waits for a reply, and has nothing else to do, receives it itself where the read lock is free; the idle
  loop is not woken.
- No thread reads after the end of the connection, and `ended` hears of it once, whichever thread has met it.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from rpcbench.base.errors import ProtocolError
from rpcbench.base.futures import Waits
from rpcbench.runtime.interrupts import uninterrupted
from rpcbench.runtime.pool import LONG, CountedCall, Job, Pool, Worker
from rpcbench.transport.stream import Ending, StreamConnection
from rpcbench.transport.waiting import AdaptiveSpin, Watch
from rpcbench.wire.framing import Frame

_UNHANDLED = Ending("what it sent could not be handled", False)
_LONGEST_SECONDS = 0.1
"""Seconds after which a thread that waits for a reply receives no more: Ctrl-C is held back meanwhile."""


def receive(
    pool: Pool, source: StreamConnection, deliver: Callable[[Frame], None], ended: Callable[[Ending], None]
) -> Receiver:
    """Receive from a connection from now on to its end."""
    pool.monitor.start()
    receiver = Receiver(pool, source, deliver, ended)
    pool.spawn(receiver.receive_loop)
    return receiver


class Receiver:
    """`deliver` takes each message of `source`, `ended` hears how it has ended."""

    def __init__(
        self, pool: Pool, source: StreamConnection, deliver: Callable[[Frame], None], ended: Callable[[Ending], None]
    ) -> None:
        self._pool, self._source = pool, source
        self._deliver, self._ended = deliver, ended
        self._watch = source.watch
        self._opened = False  # the system may tell nothing of what came with the opening of a stream
        self._lock = threading.Lock()  # the read lock
        self._lock.acquire()
        # The holder of the read lock alone touches what follows.
        self._idle = False  # the loop sleeps: the lock is given back to it
        self._serving = False  # the loop runs a call, and takes the lock again after it
        self._ending: Ending | None = None  # met by a thread that waited for a reply, for the loop to see to
        self._frames: collections.deque[Frame] = collections.deque()
        self.calls: collections.deque[Job] = collections.deque()
        if (watch := self._watch) is not None:  # the loop leaves the lock to a thread that begins to wait
            self._loop_spin = AdaptiveSpin(lambda: watch.ready() or pool.due())
            self._reply_spin = AdaptiveSpin(watch.ready)

    # -- the loop
    def receive_loop(self) -> None:
        """On a thread of the pool that holds the read lock: until another one does, or the connection ends."""
        thread = self._pool.this_thread()
        thread.receives = self
        ending: Ending | None = _UNHANDLED
        try:
            ending = self._loop(thread)
        except ProtocolError as error:
            ending = Ending(f"it sent nonsense ({error})", False)
        finally:
            thread.receives = None  # before: calls that follow from the end are not left to a loop that is over
            if ending is not None:
                for call in self.calls:  # of a message that could not be handled to its end
                    if type(call) is CountedCall:
                        self._pool.end()
                self._ended(ending)

    def _loop(self, thread: Worker) -> Ending | None:
        """How the connection has ended; None if another thread runs the loop now."""
        calls, frames = self.calls, self._frames
        while True:
            if calls:
                if not self._serve(thread, calls.popleft()):
                    return None
            elif frames:
                self._deliver(frames.popleft())
            else:
                ending = self._await_some()
                got = ending or self._source.read()
                if isinstance(got, Ending):
                    return got
                frames.extend(got)

    def _await_some(self) -> Ending | None:
        """Until there is something to read, or a thread that waited for a reply has met the end."""
        if self._watch is None or not self._opened:
            self._opened = True
            return None
        if self._pool.busy or self._pool.due():  # another thread of this process may need the core, or the lock
            return self._sleep()
        ending = self._loop_spin.wait(self._sleep)
        return self._sleep() if ending is None and not self._watch.ready() else ending

    def _sleep(self) -> Ending | None:
        """IDLE: sleep, with the read lock free, until something comes that no other thread receives."""
        watch = self._lent_watch
        self._idle = True
        self._release_to_idle()
        while True:
            watch.sleep()
            if not self._lock.acquire(blocking=False):
                continue  # its holder arms the watch again
            if self._ending is not None or watch.ready():
                break
            self._release_to_idle()  # another thread has received what woke this one
        self._idle = False
        return self._ending

    def _serve(self, thread: Worker, call: Job) -> bool:
        """SERVING: run a call, unless too many run already; False if another thread runs the loop by now."""
        if not self._pool.begin(call):
            return True
        thread.receives, thread.lends, self._serving = None, self, True
        self._release()
        thread.run_call(call)
        kept = self._acquire()
        thread.lends, self._serving = None, False
        if kept:
            thread.receives = self
        self._pool.end()
        return kept

    # -- the read lock around a call
    def _release(self) -> None:
        """Let any thread have the read lock. The monitor gives it to one of the pool if none takes it."""
        self._pool.monitor.released(self)
        self._lock.release()

    def _acquire(self) -> bool:
        """Whether this thread has it now, and the loop with it."""
        if not self._lock.acquire(blocking=False):
            return False
        self._pool.monitor.acquired(self)
        if self._idle:  # on another thread
            self._release_to_idle()
            return False
        return True

    def release_to_pool(self) -> None:
        """Let another thread of the pool run the loop, if none does: the call that this one runs takes its time."""
        if self._acquire():
            self._spawn_loop()

    def _spawn_loop(self) -> None:
        try:
            self._pool.spawn(self.receive_loop)
        except BaseException:  # no thread can be started: the next one that looks finds the lock free
            self._release()
            raise

    def _release_to_idle(self) -> None:
        """Give the read lock back to the idle loop. In this order: the loop must find the lock free when it is woken.

        An end wakes it as soon as it can have the lock, so the watch may be closed before it is armed.
        """
        watch = self._lent_watch
        self._lock.release()
        try:
            watch.arm()
        except (OSError, ValueError):  # its descriptor, or the watch itself, is closed
            if not watch.closed:
                raise

    # -- threads that wait for a reply
    def receive_until(self, waiting: Waits, quiet: float = LONG) -> None:
        """On a thread that waits: receive until that ends, if no other thread does, or until nothing has come for
        `quiet` seconds."""
        with uninterrupted:  # a read lock that is not given back would never be free again
            if self._lock.acquire(blocking=False):
                self._borrow(waiting, quiet)

    def _borrow(self, waiting: Waits, quiet: float) -> None:
        """BORROWED: receive, unless something is left of the loop's that a thread of the pool is to do."""
        left, ending = False, self._ending
        try:
            self._pool.monitor.acquired(self)
            left = bool(self.calls or self._frames)  # by a thread that runs a call
            if not left and ending is None:
                if self._idle:
                    self._lent_watch.disarm()
                ending = self._follow(waiting, quiet)
        finally:
            self._give_back(ending, left)

    def _follow(self, waiting: Waits, quiet: float) -> Ending | None:
        """How the connection has ended, if it has."""
        deadline = 0.0
        while waiting() and self._comes(quiet):
            if (ending := self._receive_some()) is not None:
                return ending
            if waiting():  # something else has come
                now = time.monotonic()
                deadline = deadline or now + _LONGEST_SECONDS
                if now > deadline:
                    break
        return None

    def _comes(self, quiet: float) -> bool:
        """Whether there is something to read, within `quiet` seconds."""
        watch = self._lent_watch
        if self._pool.busy:  # another thread of this process may need the core
            return watch.poll(quiet)
        found = self._reply_spin.wait(partial(watch.poll, quiet))
        return found is None or found

    def _receive_some(self) -> Ending | None:
        """How the connection has ended, if it has."""
        try:
            got = self._source.read()
            if isinstance(got, Ending):
                return got
            for frame in got:
                self._deliver(frame)
        except ProtocolError as error:
            return Ending(f"it sent nonsense ({error})", False)
        except Exception as error:  # noqa: BLE001  (no fault of the call that waits here: told on another thread)
            self._pool.spawn(partial(_raise, error))
            return _UNHANDLED
        return None

    def _give_back(self, ending: Ending | None, left: bool) -> None:
        if self._idle:
            if ending is not None:
                self._ending = ending
                self._source.cut()  # wakes the loop, which sees to the rest
            self._release_to_idle()
        elif ending is not None:
            self._pool.spawn(lambda: self._ended(ending))
        elif left or not self._serving or self._pool.due():
            self._spawn_loop()
        else:
            self._release()

    @property
    def _lent_watch(self) -> Watch:
        assert self._watch is not None, "only connections with a watch are lent"
        return self._watch


def _raise(error: Exception) -> NoReturn:
    raise error
