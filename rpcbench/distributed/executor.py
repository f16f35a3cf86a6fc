"""Blocking work of torch's process groups, on threads of its own: who waits for it can be freed at any moment.

Guarantees
- Jobs of one lane run one after the other, in the order in which they came, from any thread.
- A lane that is closed takes no more jobs and ends after the one it is at; only who asks for it waits for its end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from torch._C import DisableTorchFunctionSubclass

T = TypeVar("T")


class Pending(Generic[T]):
    """A job on its way. `tell` is called when it has run."""

    def __init__(self, job: Callable[[], T], tell: Callable[[], None]) -> None:
        self._job, self._tell = job, tell
        self._values: list[T] = []
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return bool(self._values) or self.error is not None

    def run(self) -> None:
        try:
            with DisableTorchFunctionSubclass():  # names of dimensions were compared: now it is about memory
                self._values.append(self._job())
        except BaseException as error:  # noqa: BLE001  (raised where somebody waits for the job)
            self.error = error
        self._tell()

    def result(self) -> T:
        """What the job returned, or its error. Only once it is done."""
        if self.error is not None:
            raise self.error
        return self._values[0]


class BlockingExecutor:
    """One thread, from its first job until `close`. `tell` is called after each job."""

    def __init__(self, name: str, tell: Callable[[], None]) -> None:
        self._name, self._tell = name, tell
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Pending[object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Pending[object] | None = None

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits for its turn."""
        return self._last is not None and not self._last.done

    def put(self, job: Callable[[], T]) -> Pending[T]:
        """Run a job after those before it."""
        pending = Pending(job, self._tell)
        with self._lock:  # the last one is the last in the queue; one thread serves it
            self._last = pending  # type: ignore[assignment]
            self._jobs.put(pending)  # type: ignore[arg-type]
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        return pending

    def close(self) -> None:
        self._jobs.put(None)

    def ended(self, seconds: float) -> None:
        """Wait for the end of one that is closed."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _serve(self) -> None:
        while (pending := self._jobs.get()) is not None:
            pending.run()
