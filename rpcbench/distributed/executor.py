"""Threads for the blocking work of torch's process groups, so that a thread that waits for it can be freed at any time.

Guarantees
- An executor runs its jobs one after the other, in the order in which any threads submitted them.
- A closed executor takes no more jobs and ends after the current one; only `join_thread` waits for that.
- A thread without a job ends after `IDLE_SECONDS`, and the next job starts another one: a program may use any number of
  tags, each of which has an executor.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch._C import DisableTorchFunctionSubclass

from rpcbench.distributed.events import OWN_CALLS

T = TypeVar("T")
IDLE_SECONDS = 5.0


class Pending(Generic[T]):
    """A submitted job. `tell` is called when it has run."""

    def __init__(self, job: Callable[[], T], tell: Callable[[], None]) -> None:
        self._job, self._notify_done = job, tell
        # Those of the calling thread, in which the job runs, too.
        self._inference, self._grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream() if with_cuda else None
        self._values: list[T] = []  # the result, once there is one: None may be a result
        self.error: BaseException | None = None
        self._followers: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def done(self) -> bool:
        return bool(self._values) or self.error is not None

    def run_job(self) -> None:
        try:
            # Dimension names were compared already: torch sees plain tensors.
            with (
                OWN_CALLS, DisableTorchFunctionSubclass(), torch.cuda.stream(self._stream),
                torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad),
            ):  # fmt: skip
                self._values.append(self._job())
        except BaseException as error:  # noqa: BLE001  (raised in the thread that waits for the job)
            self.error = error
        self._notify_done()
        self._run_followers()

    def call_when_done(self, follower: Callable[[], None]) -> None:
        """Call a function once, after the job: on its thread, or at once if the job has run."""
        self._followers.append(follower)
        if self.done:
            self._run_followers()

    def _run_followers(self) -> None:
        while True:  # two threads may be here, and each follower is taken by one of them
            try:
                follower = self._followers.popleft()
            except IndexError:
                return
            follower()

    def result(self) -> T:
        """Return the result of a job that is done, or raise its error."""
        if self.error is not None:
            raise self.error
        return self._values[0]


class BlockingExecutor:
    """One thread, which exists while there are jobs, until `close`. `tell` is called after each job."""

    def __init__(self, name: str, tell: Callable[[], None]) -> None:
        self._name, self._notify_done = name, tell
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Pending[object] | None] = queue.SimpleQueue()  # None: end
        self._thread: threading.Thread | None = None
        self._last: Pending[object] | None = None  # the job submitted last; all others end before it

    @property
    def is_busy(self) -> bool:
        last = self._last
        return last is not None and not last.done

    def submit_job(self, job: Callable[[], T]) -> Pending[T]:
        pending = Pending(job, self._notify_done)
        with self._lock:  # so that `_last` is the last in the queue, and only one thread is started
            self._last = pending  # type: ignore[assignment]
            self._jobs.put(pending)  # type: ignore[arg-type]
            if self._thread is None:
                # daemon: a job that hangs in torch must not keep Python alive; see `groups._join_threads_at_exit`.
                self._thread = threading.Thread(target=self._run_jobs, name=self._name, daemon=True)
                self._thread.start()
        return pending

    def close(self) -> None:
        self._jobs.put(None)

    def join_thread(self, seconds: float) -> None:
        """Wait for the thread's end, after `close`."""
        if (thread := self._thread) is not None:
            thread.join(seconds)

    def _run_jobs(self) -> None:
        while (pending := self._take_next_job()) is not None:
            pending.run_job()
            with self._lock:
                if self._last is pending:
                    self._last = None
            del pending  # a job keeps its tensors alive, and the next one may come much later, or never

    def _take_next_job(self) -> Pending[object] | None:
        """Return the next job; None if the thread must end."""
        try:
            return self._jobs.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            with self._lock:  # `submit_job` starts another thread, unless it has put a job meanwhile
                try:
                    return self._jobs.get_nowait()
                except queue.Empty:
                    self._thread = None
                    return None
