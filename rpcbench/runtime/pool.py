"""The thread pool: it runs users' functions, receive loops and the runtime's own jobs.

Guarantees
- A call that the receive loop has received runs on its thread, for as long as the call is short (see `receiver`). The
  read lock that the thread leaves free meanwhile goes to another thread after twice `LONG` at most: the monitor, a
  thread of its own, looks at those locks every `LONG` seconds while calls come.
- No user's function begins while `limit` of them run; one that waits for a reply does not count meanwhile, but for a
  moment in which it receives itself. So calls that call back nest as deep as they like.
- The runtime's own jobs (`spawn`) never queue behind users' functions.
- Idle threads are used again, the last one first, and end after a while.
- A function that is busy with Python keeps the others waiting for a tenth of a millisecond at a time.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

Job = Callable[[], object]
LONG = 0.002  # seconds
_QUIET_LOOKS = 10  # at nothing new before the monitor sleeps
_IDLE_SECONDS = 20.0
_SWITCH_SECONDS = 0.0001  # that a thread busy with Python may keep the interpreter from one that handles messages


class ReceiveLoop(Protocol):
    """Of one connection, see `receiver`."""

    calls: collections.deque[Job]
    """What it is to run next."""

    def release_to_pool(self) -> None:
        """Let another thread run it, if the one that ran it has left the read lock free for a call."""


class Worker(threading.Thread):
    """Runs one job after another; `waiting` and `step_aside` are how what blocks tells the pool."""

    def __init__(self, pool: Pool, number: int) -> None:
        super().__init__(name=f"{pool.name}-{number}", daemon=True)
        self._pool = pool
        self._given = threading.Lock()  # free when there is a job; a plain one, as Ctrl-C can leave a Semaphore locked
        self._given.acquire()
        self._job: Job | None = None
        self._counted = False
        self.receives: ReceiveLoop | None = None  # the loop that this thread runs
        self.lends: ReceiveLoop | None = None  # the one whose read lock it has left free, as it runs a call

    def give(self, job: Job | None) -> None:
        self._job = job
        self._given.release()

    def run(self) -> None:
        self._pool.enter()
        while True:
            if not self._given.acquire(timeout=_IDLE_SECONDS):
                if self._pool.retire(self):
                    return
                self._given.acquire()  # a job is on its way
            job, self._job = self._job, None
            if job is None:
                return
            _do(job)
            del job
            if not self._pool.rest(self):
                return

    def run_call(self, call: Job) -> None:
        """Run a user's function, which the pool has counted."""
        self._counted = True
        _do(call)
        self._counted = False

    def step_aside(self) -> None:
        """What this thread runs is about to take its time: others do what else it had to do."""
        if self.lends is not None:
            self.lends.release_to_pool()

    def may_wait(self) -> bool:
        """Whether it may wait for a moment as any other thread does: the monitor sees to what it lends, and it takes no
        room from what is called here meanwhile."""
        return self.receives is None and not (self._counted and self._pool.busy >= self._pool.limit)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self.step_aside()
        if not self._counted:
            yield
            return
        self._pool.blocked()
        self._counted = False
        try:
            yield
        finally:
            self._counted = True
            self._pool.unblocked()


class Pool:
    """`enter` runs first on each new thread."""

    def __init__(self, name: str, limit: int, enter: Job) -> None:
        self.name, self.limit, self.enter = name, limit, enter
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._threads: set[Worker] = set()
        self._queue: collections.deque[Job] = collections.deque()
        self.busy = 0  # users' functions that run; those that wait are not counted
        self._blocked = self._made = 0
        self._closed = False
        self.monitor = Monitor(self.spawn)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
        self.due: Callable[[], bool] = lambda: True  # whether answers are to come

    @property
    def waiting(self) -> int:
        """How many users' functions have begun and wait for something of ours."""
        return self._blocked

    @property
    def queued(self) -> int:
        """How many users' functions wait for room."""
        return len(self._queue)

    def spawn(self, job: Job) -> None:
        """Run a job of the runtime now, on a thread of its own. Dropped once the pool is closed."""
        with self._lock:
            if self._closed:
                return
            thread = self._idle.pop() if self._idle else None
            if thread is None:
                self._made += 1
                thread = Worker(self, self._made)
                self._threads.add(thread)
        thread.give(job)
        if thread.ident is None:
            thread.start()

    def this_thread(self) -> Worker:
        """This thread, which is one of the pool's."""
        thread = threading.current_thread()
        assert isinstance(thread, Worker)
        return thread

    def submit(self, job: Job) -> None:
        """Run a user's function when there is room: on this thread, if it has just received the message that asks."""
        if (loop := _loop_of_this_thread()) is not None:
            loop.calls.append(job)
        elif self.begin(job):
            self.spawn(partial(self._run, job))

    def submit_own(self, job: Job) -> None:
        """Run a job of the runtime now: on this thread, if it has just received the message that asks."""
        if (loop := _loop_of_this_thread()) is None:
            self.spawn(job)
        else:
            with self._lock:
                self.busy += 1
            loop.calls.append(CountedCall(job))

    def let_in(self) -> ReceiveLoop | None:
        """The receive loop of this thread, where that has just received a call and there is room for it. The call is to
        be given to the loop as `CountedCall`."""
        loop = _loop_of_this_thread()
        if loop is not None:
            with self._lock:
                if self.busy >= self.limit:
                    return None
                self.busy += 1
        return loop

    def begin(self, job: Job) -> bool:
        """Whether there is room for a user's function now; else it is run later."""
        if type(job) is CountedCall:
            return True
        with self._lock:
            if self.busy >= self.limit:
                self._queue.append(job)
                return False
            self.busy += 1
            return True

    def end(self) -> None:
        """A user's function has returned."""
        if (job := self._next()) is not None:
            self.spawn(partial(self._run, job))

    def _run(self, job: Job | None) -> None:
        worker = self.this_thread()
        while job is not None:
            worker.run_call(job)
            job = self._next()

    def _next(self) -> Job | None:
        """The next queued job for a thread that has finished one."""
        with self._lock:
            if self._queue and self.busy <= self.limit:
                return self._queue.popleft()
            self.busy -= 1
            return None

    def blocked(self) -> None:
        """A counted thread begins to wait: another job may run."""
        with self._lock:
            self._blocked += 1
            job = self._queue.popleft() if self._queue and self.busy <= self.limit else None
            if job is None:
                self.busy -= 1
        if job is not None:
            self.spawn(partial(self._run, job))

    def unblocked(self) -> None:
        with self._lock:
            self.busy += 1
            self._blocked -= 1

    def rest(self, thread: Worker) -> bool:
        """Keep an idle thread; False if it should end."""
        with self._lock:
            if self._closed:
                self._threads.discard(thread)
                return False
            self._idle.append(thread)
            return True

    def retire(self, thread: Worker) -> bool:
        """An idle thread has waited long enough; False if a job was given to it at the last moment."""
        with self._lock:
            if thread not in self._idle:
                return False
            self._idle.remove(thread)
            self._threads.discard(thread)
            return True

    def close(self, patience: float) -> None:
        """No more jobs; idle threads end. Waits up to `patience` seconds for the busy ones."""
        self.monitor.close()
        with self._lock:
            self._closed = True
            self._queue.clear()
            idle, self._idle = self._idle, []
            threads = self._threads - {threading.current_thread()}
        for thread in idle:
            thread.give(None)
        deadline = time.monotonic() + patience
        for thread in threads:
            if thread.is_alive():  # else it has ended, or is about to begin and finds the pool closed
                thread.join(max(0.0, deadline - time.monotonic()))


class CountedCall(partial[object]):
    """A call that has been counted already."""


class Monitor:
    """Has other threads run receive loops whose read locks calls have left free for `LONG` seconds. `spawn` runs a job
    on another thread. It sleeps once nothing has come for a while, and only the first call after that wakes it."""

    def __init__(self, spawn: Callable[[Job], None]) -> None:
        self._spawn = spawn
        self._since: dict[ReceiveLoop, float] = {}  # those that are free, and since when
        self._lock = threading.Lock()
        self._bell = threading.Lock()  # free when the thread is to look again
        self._bell.acquire()
        self._begun = self._looks = self._closed = False  # under the lock
        self._busy = False  # one was left free since the last look

    def start(self) -> None:
        """Before the first lock is released. RuntimeError where no thread can be started."""
        with self._lock:
            if not self._begun and not self._closed:
                self._spawn(self._watch)
                self._begun = self._looks = True

    def released(self, loop: ReceiveLoop) -> None:
        """Its read lock is free from now on."""
        self._since[loop] = time.monotonic()
        self._busy = True
        if not self._looks:
            self._look()

    def acquired(self, loop: ReceiveLoop) -> None:
        """It is not any more."""
        self._since.pop(loop, None)

    def _look(self) -> None:
        """Let the thread go on."""
        with self._lock:
            if self._begun and not self._looks:
                self._looks = True
                self._bell.release()

    def _watch(self) -> None:
        quiet = 0
        while not self._closed:
            time.sleep(LONG)
            late = time.monotonic() - LONG
            for loop, since in self._since.copy().items():
                if since <= late:
                    _do(loop.release_to_pool)
            quiet = 0 if self._busy or self._since else quiet + 1
            self._busy = False
            if quiet >= _QUIET_LOOKS and self._rests():
                self._bell.acquire()
                quiet = 0

    def _rests(self) -> bool:
        """Whether the thread sleeps now until one is left free."""
        with self._lock:
            self._looks = self._closed
        if self._busy or self._since:  # just now, by one that has seen the thread look
            self._look()
        return not self._closed

    def close(self) -> None:
        """Nothing is given away any more."""
        with self._lock:
            self._closed = True
        self._look()


def _loop_of_this_thread() -> ReceiveLoop | None:
    """Where it has just received a message."""
    return getattr(threading.current_thread(), "receives", None)


def _do(job: Job) -> None:
    """A job that fails must not take its thread, or the jobs that wait for it, along; nor the monitor."""
    try:
        job()
    except BaseException:  # noqa: BLE001  (told like the end of a thread)
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
