"""Several futures at once.

Guarantees
- Who waits for all of them is one thread with one bell: it opens each answer itself, as soon as that is there.
- torch's own `collect_all` and `wait_all` understand our futures.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch

from rpcbench.words.futures import Future, Waiter, raise_fresh

T = TypeVar("T")


def collect_all(futures: Iterable[torch.futures.Future[Any]]) -> Future[list[torch.futures.Future[Any]]]:
    """A future of all the given ones: done when all are, or failed as soon as one fails. As torch's, interruptible."""
    futures = list(futures)
    on_long = next((future._on_long for future in futures if isinstance(future, Future)), None)
    gathered: Future[list[torch.futures.Future[Any]]] = Future(on_long=on_long, sources=futures)
    left = len(futures)
    lock = threading.Lock()

    def ended(future: torch.futures.Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = not left
        try:
            future.value()
        except Exception as error:  # noqa: BLE001  (whatever a call raised becomes the result)
            failure = error
            gathered.deliver(lambda: raise_fresh(failure), _now)
        else:
            if last:
                gathered.deliver(lambda: futures, _now)

    if not futures:
        gathered.set_result(futures)
    for future in futures:
        future.add_done_callback(ended)
    return gathered


def wait_all(futures: Iterable[torch.futures.Future[T]]) -> list[T]:
    """Values of all the given futures, in order; the first error, as soon as there is one. Interruptible.

    >>> rpcbench.wait_all([rpc.rpc_async("worker1", abs, (x,)) for x in (-1, -2)])
    [1, 2]
    """
    futures = list(futures)
    left = [future for future in futures if not _is_done(future)]
    if len(left) == 1:
        left[0].wait()  # this thread may read the answer itself
    elif left:
        own = [future for future in left if isinstance(future, Future)]
        (_All(own) if len(own) == len(left) else collect_all(left)).wait()
    return [future.value() for future in futures]


class _All(Future[None]):
    """Done when all are, or failed as soon as one fails: as far as the thread that waits for it has seen."""

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        super().__init__(on_long=futures[0]._on_long, sources=futures)
        self._futures = futures

    def _listen(self, waiter: Waiter) -> None:
        left = self._futures
        try:
            while (left := [future for future in left if not self._is_over(future)]) and self._outcome is None:
                if all(future.attend(waiter) for future in left):
                    super()._listen(waiter)
                if waiter.error is not None:
                    return
            if self._outcome is None:
                self.set_result(None)
        finally:
            for future in left:
                future.leave(waiter)

    def _is_over(self, future: Future[Any]) -> bool:
        future.open_answer()
        try:
            return _is_done(future)
        except Exception as error:  # noqa: BLE001  (whatever a call raised becomes the result)
            if self._outcome is None:
                self.set_exception(error)
            return True


def _is_done(future: torch.futures.Future[Any]) -> bool:
    """Raises where it has failed."""
    done = future.done()
    if done:
        future.value()
    return done


def settle_all(futures: Iterable[torch.futures.Future[T]]) -> list[T]:
    """As `wait_all`, but an error is raised only when all are done: nothing that was asked for is still going on."""
    futures = list(futures)
    for future in futures:
        with contextlib.suppress(Exception):  # raised below, in order
            future.wait()
    return [future.value() for future in futures]


def _now(job: Callable[[], None]) -> None:
    job()


_collect_in_torch = torch._C._collect_all


def _collect(futures: list[Any]) -> Any:
    if any(isinstance(future, Future) for future in futures):
        return collect_all(futures)
    return _collect_in_torch(futures)


# torch.futures.collect_all and wait_all go through this function. torch's own looks at the C++ side of a future only,
# where an error set from Python is a value like any other: it would not end the wait before all others are done.
torch._C._collect_all = _collect

_wait_in_torch = torch._C.wait


def _wait(future: Any) -> Any:
    return future.wait() if isinstance(future, Future) else _wait_in_torch(future)


# For torch.jit.wait: torch's side of a future is completed only when somebody asks for it.
torch._C.wait = cast(Any, _wait)
