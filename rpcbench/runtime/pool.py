"""The thread pool: it runs users' functions, receive loops and the runtime's own jobs.

Guarantees
- A call that the receive loop has received runs on the loop's thread while it is short (see `receiver`). The read lock
  that the thread releases meanwhile passes to another thread after at most twice `LONG`: the monitor, a thread of its
  own, checks those locks every `LONG` seconds while calls arrive.
- No user's function begins while `limit` of them run; one that waits for a reply is not counted meanwhile, except for
  the moments in which it receives. So calls that call back nest as deeply as they like.
- The runtime's own jobs (`spawn_job`) never queue behind users' functions.
- Idle threads are reused, the last one first, and end after `_IDLE_SECONDS`.
- A function that runs Python code delays other threads by a tenth of a millisecond at a time.
"""

from __future__ import annotations

import collections
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

Job = Callable[[], object]
LONG = 0.002  # seconds
_QUIET_LOOKS = 10  # without anything new, then the monitor sleeps
_IDLE_SECONDS = 20.0
_SWITCH_SECONDS = 0.0001  # for which Python code may keep the GIL from a thread that handles messages


class PoolThread(threading.Thread):
    """A thread that runs one job after another. Blocking code reports to the pool by `waiting` and `release_duties`."""

    def __init__(self, pool: Pool, number: int) -> None:
        super().__init__(name=f"{pool.name}-{number}", daemon=True)
        self._pool = pool
        # free when there is a job; a plain one, as Ctrl-C can leave a Semaphore locked
        self._job_ready = threading.Lock()
        self._job_ready.acquire()
        self._job: Job | None = None
        self._counted = False  # runs a user's function, and takes one of the places
        self.receives: collections.deque[Job] | None = None  # the next calls of the receive loop that this thread runs
        self.lends: Job | None = None  # has another thread run the loop that this one has left, to run a call

    def give_job(self, job: Job | None) -> None:
        self._job = job
        self._job_ready.release()

    def run(self) -> None:
        self._pool.enter()
        while True:
            if not self._job_ready.acquire(timeout=_IDLE_SECONDS):
                if self._pool.retire_thread(self):
                    return
                self._job_ready.acquire()  # a job is on its way
            job, self._job = self._job, None
            if job is None:
                return
            _run_job(job)
            del job  # a job must not keep its values alive until the next one
            if not self._pool.keep_idle_thread(self):
                return

    def run_call(self, call: Job) -> None:
        self._counted = True
        _run_job(call)
        self._counted = False

    def release_duties(self) -> None:
        """Hand the receive loop over: the job of this thread is about to block or takes long."""
        if self.lends is not None:
            self.lends()

    def may_wait(self) -> bool:
        """Return whether a short wait here delays nothing: it runs no receive loop, and does not fill the pool."""
        return self.receives is None and not (self._counted and self._pool.busy >= self._pool.limit)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Give the thread's place to another function while it waits."""
        self.release_duties()
        if not self._counted:
            yield
            return
        self._pool.thread_blocked()
        self._counted = False
        try:
            yield
        finally:
            self._counted = True
            self._pool.thread_unblocked()


class Pool:
    """The pool of one agent. `enter` runs first on each new thread."""

    def __init__(self, name: str, limit: int, enter: Job) -> None:
        self.name, self.limit, self.enter = name, limit, enter
        self._lock = threading.Lock()  # guards the fields down to `_closed`
        self._idle: list[PoolThread] = []
        self._threads: set[PoolThread] = set()
        self._queue: collections.deque[Job] = collections.deque()  # users' functions without a place
        self.busy = 0  # users' functions that run; waiting ones are not counted
        self.waiting = self._thread_count = (
            0  # users' functions that have begun and wait; threads made, for their names
        )
        self._closed = False
        self.monitor = Monitor(self.spawn_job)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))  # a user's may be shorter

    def spawn_job(self, job: Job) -> None:
        """Run a job of the runtime now, on a thread of its own. It is dropped once the pool is closed."""
        with self._lock:
            if self._closed:
                return
            thread = self._idle.pop() if self._idle else None
            if thread is None:
                self._thread_count += 1
                thread = PoolThread(self, self._thread_count)
                self._threads.add(thread)
        thread.give_job(job)  # before the start: a new thread finds it at once
        if thread.ident is None:
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads
                with self._lock:
                    self._threads.discard(thread)
                raise

    def current_thread(self) -> PoolThread:
        thread = threading.current_thread()
        assert isinstance(thread, PoolThread)
        return thread

    def submit_call(self, job: Job) -> None:
        """Run a user's function when there is a place: on this thread, if it has just received the call."""
        if (calls := _calls_of_this_loop()) is not None:
            calls.append(job)
        elif self.take_place(job):
            self._start_job(job)

    def submit_internal(self, job: Job) -> None:
        """Run a job of the runtime now: on this thread, if it has just received the message that causes it."""
        if (calls := _calls_of_this_loop()) is None:
            self.spawn_job(job)
        else:
            with self._lock:
                self.busy += 1
            calls.append(CountedCall(job))

    def admit_call(self) -> collections.deque[Job] | None:
        """Take a place for a call that this thread's loop has just received; return the loop's calls, or None."""
        calls = _calls_of_this_loop()
        if calls is not None:
            with self._lock:
                if self.busy >= self.limit:
                    return None
                self.busy += 1
        return calls

    def take_place(self, job: Job) -> bool:
        """Take a place for a user's function, and return True; else queue it and return False."""
        if type(job) is CountedCall:
            return True
        with self._lock:
            if self.busy >= self.limit:
                self._queue.append(job)
                return False
            self.busy += 1
            return True

    def give_back_place(self) -> None:
        """Give back the place of a user's function that has returned; a queued one takes it."""
        if (job := self._take_next_job()) is not None:
            self._start_job(job)

    def _start_job(self, job: Job) -> None:
        """Run a user's function, which has a place, on another thread."""
        try:
            self.spawn_job(partial(self._run_jobs, job))
        except RuntimeError:  # no thread can be started: the next one that becomes free runs it, see `keep_idle_thread`
            with self._lock:
                self.busy -= 1
                self._queue.appendleft(job)

    def _run_jobs(self, job: Job | None) -> None:
        worker = self.current_thread()
        while job is not None:
            worker.run_call(job)
            job = self._take_next_job()

    def _take_next_job(self) -> Job | None:
        """Return the next queued function for a thread that has finished one, else give its place back."""
        with self._lock:
            if self._queue and self.busy <= self.limit:  # above: some waits have ended, see `thread_unblocked`
                return self._queue.popleft()
            self.busy -= 1
            return None

    def thread_blocked(self) -> None:
        """Give a place back for a thread that begins to wait; a queued function takes it."""
        with self._lock:
            self.waiting += 1
            job = self._queue.popleft() if self._queue and self.busy <= self.limit else None
            if job is None:
                self.busy -= 1
        if job is not None:
            self._start_job(job)

    def thread_unblocked(self) -> None:
        """Take a place again, beyond the limit if need be: a function that has begun must go on."""
        with self._lock:
            self.busy += 1
            self.waiting -= 1

    def keep_idle_thread(self, thread: PoolThread) -> bool:
        """Keep an idle thread; return False if it should end."""
        with self._lock:
            if self._closed:
                self._threads.discard(thread)
                return False
            if self._queue and self.busy < self.limit:
                self.busy += 1
                thread.give_job(partial(self._run_jobs, self._queue.popleft()))
            else:
                self._idle.append(thread)
            return True

    def retire_thread(self, thread: PoolThread) -> bool:
        """Drop a thread that was idle for long; return False if it was given a job at the last moment."""
        with self._lock:
            if thread not in self._idle:
                return False
            self._idle.remove(thread)
            self._threads.discard(thread)
            return True

    def close(self, patience: float) -> None:
        """Take no more jobs, and end idle threads. Wait up to `patience` seconds for busy ones."""
        self.monitor.close()
        with self._lock:
            self._closed = True
            self._queue.clear()
            idle, self._idle = self._idle, []
            threads = self._threads - {threading.current_thread()}
        for thread in idle:
            thread.give_job(None)
        deadline = time.monotonic() + patience
        for thread in threads:
            if thread.is_alive():  # else it has ended, or is about to begin and finds the pool closed
                thread.join(max(0.0, deadline - time.monotonic()))


class CountedCall(partial[object]):
    """A call that has a place already."""


class Monitor:
    """Starts receive loops again if their read locks are free for `LONG` seconds, as their threads run calls.
    `spawn_job` runs a job on another thread. The monitor sleeps once nothing arrives, and only the next call wakes
    it."""

    def __init__(self, spawn: Callable[[Job], None]) -> None:
        self._spawn = spawn
        # When read locks became free, by the function that starts their loop again; no lock: each step is atomic.
        self._since: dict[Job, float] = {}
        self._lock = threading.Lock()
        self._wakeup = threading.Lock()  # free: wake up
        self._wakeup.acquire()
        self._begun = self._looks = self._closed = False  # guarded by `_lock`
        self._busy = False  # a lock was left free since the last look

    def start(self) -> None:
        """Start the thread, before the first read lock is released. RuntimeError if no thread can be started."""
        with self._lock:
            if not self._begun and not self._closed:
                self._spawn(self._watch_loop)
                self._begun = self._looks = True

    def lock_released(self, start_loop: Job) -> None:
        """Watch a read lock, which is free from now on."""
        self._since[start_loop] = time.monotonic()
        self._busy = True
        if not self._looks:
            self._wake_up()

    def lock_acquired(self, start_loop: Job) -> None:
        self._since.pop(start_loop, None)

    def _wake_up(self) -> None:
        with self._lock:
            if self._begun and not self._looks:
                self._looks = True
                self._wakeup.release()

    def _watch_loop(self) -> None:
        quiet = 0
        while not self._closed:
            time.sleep(LONG)
            late = time.monotonic() - LONG
            for start_loop in [*self._since]:
                if self._since.get(start_loop, math.inf) <= late:  # a list of keys is atomic, a copy is not
                    _run_job(start_loop)  # an error must not end the monitor
            quiet = 0 if self._busy or self._since else quiet + 1
            self._busy = False
            if quiet >= _QUIET_LOOKS and self._prepare_sleep():
                self._wakeup.acquire()
                quiet = 0

    def _prepare_sleep(self) -> bool:
        """Decide to sleep until a read lock is left free; return False if the monitor is closed."""
        with self._lock:
            self._looks = self._closed
        if self._busy or self._since:  # just now, by a thread that saw the monitor awake and did not wake it
            self._wake_up()
        return not self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._wake_up()


def _calls_of_this_loop() -> collections.deque[Job] | None:
    """Return the calls of the receive loop that this thread runs, if it has just received a message."""
    return getattr(threading.current_thread(), "receives", None)


def _run_job(job: Job) -> None:
    """Run a job. Its error must not end the thread, nor affect the jobs behind it; it is reported like a thread's."""
    try:
        job()
    except BaseException:  # noqa: BLE001  (reported as the uncaught error of a thread)
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
