"""Threads that run users' functions, receive from connections, and do the runtime's own odd jobs.

Guarantees
- A call that the receive loop has received runs on its thread, for as long as the call is short (see `receiver`).
- At most `limit` users' functions run at once; one that waits for a reply does not count meanwhile, but for a moment in
  which it receives itself. So calls that call back nest as deep as they like.
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

from rpcbench.agent.monitor import Monitor
from rpcbench.agent.receiver import Receiver, Source
from rpcbench.transport.stream import Ending
from rpcbench.wire.frames import Frame

Job = Callable[[], object]
_IDLE_SECONDS = 20.0
_SWITCH_SECONDS = 0.0001
"""How long a thread that is busy with Python may keep the interpreter from one that has a message to handle."""


class Worker(threading.Thread):
    """Runs one job after another; `waiting` and `step_aside` are how what blocks tells the pool."""

    def __init__(self, pool: Pool, number: int) -> None:
        super().__init__(name=f"{pool.name}-{number}", daemon=True)
        self._pool = pool
        self._given = threading.Lock()  # free when there is a job; a plain one, as Ctrl-C can leave a Semaphore locked
        self._given.acquire()
        self._job: Job | None = None
        self._counted = False
        self.receives: Receiver | None = None
        self.lends: Receiver | None = None

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
        """Whether it may wait for a moment as any other thread does: the monitor sees to what it lends, and there is
        room for what somebody may call here meanwhile."""
        return self.receives is None and self._pool.busy < self._pool.limit

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self.step_aside()
        if not self._counted:
            yield
            return
        self._pool.blocked()
        try:
            yield
        finally:
            self._pool.unblocked()


class Pool:
    """`enter` runs first on each new thread."""

    def __init__(self, name: str, limit: int, enter: Job) -> None:
        self.name = name
        self.enter = enter
        self.limit = limit
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._threads: set[Worker] = set()
        self._queue: collections.deque[Job] = collections.deque()
        self.busy = 0  # users' functions that run; those that wait are not counted
        self._blocked = 0
        self._made = 0
        self._closed = False
        self.monitor = Monitor(self.spawn)
        self.receivers: set[Receiver] = set()
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

    def receive(
        self,
        source: Source,
        deliver: Callable[[Frame], None],
        over: Callable[[Ending], None],
    ) -> Receiver:
        """Receive from a connection from now on to its end; see `Receiver`."""

        def ended(ending: Ending) -> None:
            self.receivers.discard(receiver)
            over(ending)

        self.monitor.start()
        receiver = Receiver(self, source, deliver, ended)
        self.receivers.add(receiver)
        self.spawn(receiver.receive_loop)
        return receiver

    def this_thread(self) -> Worker:
        """This thread, which is one of the pool's."""
        thread = threading.current_thread()
        assert isinstance(thread, Worker)
        return thread

    def submit(self, job: Job) -> None:
        """Run a user's function when there is room: on this thread, if it has just received the message that asks."""
        receiver = getattr(threading.current_thread(), "receives", None)
        if receiver is not None:
            receiver.calls.append(job)
        elif self.begin(job):
            self.spawn(lambda: self._run(job))

    def submit_own(self, job: Job) -> None:
        """Run a job of the runtime now: on this thread, if it has just received the message that asks."""
        receiver = getattr(threading.current_thread(), "receives", None)
        if receiver is not None:
            receiver.calls.append(_Own(job))
        else:
            self.spawn(job)

    def let_in(self) -> Receiver | None:
        """Where this thread has just received a message that asks for a user's function, and there is room for that:
        the receiver. The function is to be given to it as `Begun`."""
        receiver: Receiver | None = getattr(threading.current_thread(), "receives", None)
        if receiver is not None:
            with self._lock:
                if self.busy >= self.limit:
                    return None
                self.busy += 1
        return receiver

    def begin(self, job: Job) -> bool:
        """Whether there is room for a user's function now; else it is run later."""
        if type(job) is Begun:
            return True
        with self._lock:
            if self.busy >= self.limit and type(job) is not _Own:
                self._queue.append(job)
                return False
            self.busy += 1
            return True

    def end(self) -> None:
        """A user's function has returned."""
        job = self._next()
        if job is not None:
            self.spawn(lambda: self._run(job))

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
            job = self._queue.popleft() if self._queue else None
            if job is None:
                self.busy -= 1
        if job is not None:
            waiting = job
            self.spawn(lambda: self._run(waiting))

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


class _Own:
    """A job of the runtime that may take long: it runs as a user's function does, but waits for none."""

    __slots__ = ("_job",)

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self) -> None:
        self._job()


class Begun(partial[object]):
    """A user's function that has been counted already."""


def _do(job: Job) -> None:
    """A job that fails must not take its thread, or the jobs that wait for it, along."""
    try:
        job()
    except BaseException:  # noqa: BLE001  (told like the end of a thread)
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
