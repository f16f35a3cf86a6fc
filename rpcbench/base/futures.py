"""Futures for notebooks: interruptible, awaitable, and subclasses of `torch.futures.Future`.

Guarantees
- `wait()` returns at once on Ctrl-C (torch's own wait holds the signal back until the result arrives).
- A pool thread that waits notifies its pool, which may start another thread: calls may nest deeper than the pool.
- `then` returns such a future, too. An error keeps its type through it.
- Callbacks run on a thread that waits, or on a pool thread; never on a thread that reads a connection.
"""

# States of a future. An answer is a function that makes the value: it may have to unpickle it, which is user code.
#     pending ── deliver ──> answered ─ _open_answer, on one thread ─> resolved ─ _complete_torch ─> callbacks run
#        └────────────────── set_result, set_exception ───────────────────┘
# A waiting thread opens the answer; if none waits, a pool thread does (`later`). A lazy answer without callbacks stays
# unopened until the first reader, and torch's side of the future incomplete: most calls never need it.

from __future__ import annotations

import asyncio
import contextlib
import operator
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from rpcbench.base.conditions import acquire_lock
from rpcbench.base.rebuild import copy_error, set_field

T = TypeVar("T")
S = TypeVar("S")
_LONG, _LONGEST = 1.0, 10.0  # seconds until the first report of a long wait, and the longest between two reports

if TYPE_CHECKING:

    class _Base(torch.futures.Future[T], Generic[T]):
        pass
else:
    _Base = torch.futures.Future


@contextlib.contextmanager
def release_slot() -> Iterator[None]:
    """Release the slot in this thread's pool, if it has one, while the block waits."""
    with getattr(threading.current_thread(), "waiting", contextlib.nullcontext)():
        yield


def release_duties() -> None:
    """Release this thread's other duties, such as reading a connection, before an operation that may block for long."""
    getattr(threading.current_thread(), "release_duties", lambda: None)()


Answer = Callable[[], Any]
"""Makes the value of a future, or raises its error. It runs once, on a thread that may run user code."""
Waits = Callable[[], bool]
"""Returns whether a thread still waits."""
HelpAlong = Callable[[Waits], object]
"""Helps to receive an answer, such as by reading a connection, while its argument returns True."""
Later = Callable[[Callable[[], None]], object]
"""Runs a function soon, on another thread."""


def _copy_for_raise(error: BaseException) -> BaseException:
    """Return a copy of an error without the frames of its traceback."""
    # The frames may refer to the future. torch stores values out of the garbage collector's sight, so such a reference
    # cycle would never be freed.
    try:
        fresh = copy_error(error)
    except Exception:  # noqa: BLE001  (an error without a copy is raised itself)
        return error
    if type(fresh) is not type(error):
        return error
    set_field(fresh, "__cause__", error.__cause__)
    set_field(fresh, "__suppress_context__", error.__suppress_context__)
    return fresh


def _raise_copy(error: Exception) -> None:
    raise _copy_for_raise(error)


def _failure_of_callback(error: Exception) -> Exception:
    """Return the error with which a future fails whose callback has raised `error`, without frames (see
    `_copy_for_raise`)."""
    _, *frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]  # of the callback
    waited = bool(frames) and frames[-1].f_globals is globals()  # the error is that of a future
    frames.clear()
    error.__context__ = None
    error.__traceback__ = None
    if waited or not isinstance(error, TypeError):
        return error
    failure = RuntimeError(f"Got the following error when running the callback: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class _Waiter:
    """One thread that waits for a future. Releasing its lock wakes it, to look again or to raise `error`."""

    __slots__ = ("error", "thread", "wakeup")

    def __init__(self) -> None:
        self.wakeup = threading.Lock()  # a plain lock: Ctrl-C can leave a Condition locked (see `conditions`)
        self.wakeup.acquire()
        self.thread = threading.get_ident()
        self.error: Exception | None = None


class Future(_Base[T]):
    """A `torch.futures.Future` with interruptible waits, which can be awaited. `rpc_async` returns one."""

    # Defaults are class attributes: one future is made for each call, and few of them ever need another value.
    keeps: Sequence[Any] = ()  # handles that a call needs until it is answered, see `runtime.requests`
    site: Any = None  # the place in the user's program that made the call, or the id of the thread that waits for it
    _answer: Answer | None = None
    _is_claimed = False  # a thread opens the answer
    _helping = False  # a waiting thread may receive the answer, and opens it then
    _followed = False  # there are callbacks, so torch's side must be completed at once
    _left = False  # the answer stays unopened until the first reader
    _lazy = False  # torch's side stays incomplete until it is followed
    _whole = False  # torch's side is complete
    _outcome: tuple[Any, BaseException | None] | None = None
    _devices: list[Any] | None = None
    _sources: Sequence[weakref.ref[Future[Any]]] = ()  # weak, as they refer to this one by their callbacks
    _on_cancel: Callable[[], object] | None = None
    _on_long: Callable[[float], object] | None = None
    _help_along: HelpAlong | None = None

    def __init__(self, *, devices: list[Any] | None = None) -> None:
        torch._C.Future.__init__(self, [torch.device(device) for device in devices] if devices else [])
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        if devices:
            self._devices = devices

    # -- resolving
    def deliver_answer(self, answer: Answer, later: Later, lazy: bool = False) -> bool:
        """Runtime only: take an answer that has arrived. False, without effect, if the future was resolved before."""
        with self._lock:
            if self._answer is not None or self._outcome is not None:
                return False
            self._answer = answer
            self._lazy = lazy
            awaited = (bool(self._waiters) and self._wake_waiters()) or self._helping
            self._left = lazy and not awaited and not self._followed
        if not awaited and not self._left:
            later(self._open_answer)
        return True

    def _wake_waiters(self) -> bool:
        """Wake all waiting threads, under the lock; return whether there were any."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wakeup.release()
        return bool(waiters)

    def _open_answer(self) -> None:
        """Open an answer that has arrived, unless another thread does."""
        if self._answer is None:
            return
        taken = False
        try:
            with self._lock:
                answer = self._answer
                if answer is None or self._is_claimed:
                    return
                self._is_claimed = taken = True
            outcome: tuple[Any, BaseException | None] = (answer(), None)
        except BaseException as error:  # any error of a call is its result
            if not taken:
                raise
            error.__context__ = None  # the opening thread may be handling another error, which is no part of this one
            outcome = (None, error.with_traceback(None))
        self._set_outcome(outcome)

    def _set_outcome(self, outcome: tuple[Any, BaseException | None]) -> None:
        """Wake all waiting threads, then complete torch's side, which runs the callbacks on this thread."""
        with self._lock:
            self._outcome = outcome
            self._answer = None
            if self._waiters:
                self._wake_waiters()
            complete = self._whole = self._followed or not self._lazy
        if complete:
            self._complete_torch(*outcome)

    def _complete_torch(self, value: Any, error: BaseException | None) -> None:
        if error is None:
            super().set_result(value)
            return
        self._set_unwrap_func(_raise_copy)  # as torch's set_exception, which would call our set_result
        super().set_result(
            cast(Any, _copy_for_raise(error) if isinstance(error, Exception) else RuntimeError(repr(error)))
        )

    def set_result(self, result: T) -> None:
        self._resolve_with((result, None))

    def set_exception(self, result: Any) -> None:
        if not isinstance(result, Exception):
            raise AssertionError(f"{result} is of type {type(result)}, not an Exception.")
        self._resolve_with((None, result))

    def _resolve_with(self, outcome: tuple[Any, BaseException | None]) -> None:
        with self._lock:
            if self._answer is not None or self._outcome is not None:
                raise RuntimeError(
                    "Attempting to mark a completed Future as complete again. Note that a Future can only be marked "
                    "completed once."
                )
            self._is_claimed = True
            self._answer = lambda: None
        self._set_outcome(outcome)

    # -- using
    def wait(self) -> T:
        """Block until resolved; return the value, or raise the error. Ctrl-C ends the wait, not the call."""
        try:
            if self._help_along is not None and self._is_unanswered():
                self._helping = True
                self._help_along(self._is_unanswered)
            while self._outcome is None:
                if self._answer is not None:
                    self._open_answer()
                if self._outcome is None:
                    self._sleep_until_answer()
        except BaseException:
            self._helping = False
            self._open_answer()  # `deliver_answer` may have left the answer to this thread
            raise
        return self._value_or_raise()

    def _is_unanswered(self) -> bool:
        return self._answer is None and self._outcome is None

    def wait_or_cancel(self) -> T:
        """Do as `wait`, for a call that only this thread waits for: Ctrl-C cancels the call, too."""
        try:
            return self.wait()
        except KeyboardInterrupt:
            self.cancel()
            raise

    def _sleep_until_answer(self) -> None:
        """Sleep until there is an answer to open, or an outcome."""
        waiter = _Waiter()
        with self._lock:
            # Tested under the lock, so that no answer arrives between the test and the registration.
            if self._outcome is not None or (self._answer is not None and not self._is_claimed):
                return
            self._waiters.append(waiter)
            self._helping = False
        waiting = getattr(threading.current_thread(), "waiting", None)
        try:
            if waiting is None:
                self._wait_for_wakeup(waiter)
            else:
                with waiting():
                    if self._help_along is not None:
                        self._help_along(waiter.wakeup.locked)
                    self._wait_for_wakeup(waiter)
        except BaseException:
            with self._lock:
                self._waiters = [other for other in self._waiters if other is not waiter]
            raise
        if waiter.error is not None:
            raise waiter.error

    def _wait_for_wakeup(self, waiter: _Waiter) -> None:
        """Wait for the wake-up, and report a long wait at growing intervals."""
        waited, patience = 0.0, _LONG
        while not acquire_lock(waiter.wakeup, patience):
            waited, patience = waited + patience, min(2 * patience, _LONGEST)
            if self._on_long is not None:
                self._on_long(waited)

    def break_wait(self, thread: int, error: Exception) -> bool:
        """Runtime only: raise `error` in one waiting thread. False if it does not wait any more."""
        with self._lock:
            broken = [waiter for waiter in self._waiters if waiter.thread == thread]
            self._waiters = [waiter for waiter in self._waiters if waiter.thread != thread]
            for waiter in broken:
                waiter.error = error
                waiter.wakeup.release()
        return bool(broken)

    def unfinished_origins(self) -> list[Future[Any]]:
        """Runtime only: return the unfinished futures at the start of this one's chain that it waits for, or itself."""
        if not self._sources:
            return [self]
        sources = [source for ref in self._sources if (source := ref()) is not None and not source.done()]
        return [origin for source in sources for origin in source.unfinished_origins()]

    def _value_or_raise(self) -> T:
        assert self._outcome is not None
        value, error = self._outcome
        if error is not None:
            raise _copy_for_raise(error)
        found: T = value
        return found

    def done(self) -> bool:
        self._open_if_deferred()
        return self._outcome is not None

    def value(self) -> T:
        """Return the value of a completed future; RuntimeError before."""
        self._open_if_deferred()
        if self._outcome is None:
            raise RuntimeError("value() may only be called on a completed Future; use wait()")
        return self._value_or_raise()

    def known_outcome(self) -> tuple[Any, BaseException | None] | None:
        """Runtime only: return value and error if they are known here, without running or waiting for anything."""
        return self._outcome

    def complete_eagerly(self) -> None:
        """Runtime only: complete torch's side as soon as the answer arrives, for callbacks and waits in torch's C++."""
        with self._lock:
            self._followed = True
            outcome = None if self._whole else self._outcome
            self._whole |= outcome is not None
        if outcome is not None:
            self._complete_torch(*outcome)
        self._open_if_deferred()

    def _open_if_deferred(self) -> None:
        if self._left and self._outcome is None:
            self._open_answer()

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        super().add_done_callback(callback)
        self.complete_eagerly()

    def then(self, callback: Callable[[Any], S]) -> Future[S]:
        """Return a future of the result of `callback(self)`, which runs when this one is done. `cancel` cancels both.

        If the callback raises, the new future raises the same error. Only a TypeError that the callback itself raises,
        mostly because it takes no future, becomes a RuntimeError with torch's words, with the error as its cause.
        TypeError for a callback that is no function.
        """
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments: a callback is a function, not {callback!r}")
        parent = weakref.ref(self)  # this future refers to the chained one by its callback
        chained: Future[S] = make_future(
            on_cancel=lambda: (first := parent()) and first.cancel(),
            on_long=self._on_long,
            sources=[self],
            devices=self._devices,
        )

        def run_callback(done: Any) -> None:
            try:
                result = callback(done)
            except Exception as error:  # noqa: BLE001  (any error of the callback is the result)
                chained.set_exception(_failure_of_callback(error))
            else:
                chained.set_result(result)

        self.add_done_callback(run_callback)
        return chained

    def cancel(self) -> bool:
        """Cancel the call: its waiters get CallCancelled, and the callee is notified. False if it was done.

        At the callee it does not run if it has not begun yet; if it has, `rpc.cancelled()` is True in it.
        """
        if self._outcome is not None or self._on_cancel is None:
            return False
        self._on_cancel()
        return True

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        bridge: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not bridge.done():
                bridge.set_result(None)

        def done(_: torch.futures.Future[T]) -> None:
            loop.call_soon_threadsafe(wake)

        self.add_done_callback(done)
        try:
            yield from bridge
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._value_or_raise()


def make_future(
    *,
    on_cancel: Callable[[], object] | None = None,
    on_long: Callable[[float], object] | None = None,
    sources: Iterable[torch.futures.Future[Any]] = (),
    devices: list[Any] | None = None,
    help_along: HelpAlong | None = None,
) -> Future[Any]:
    """Return a future with hooks of the runtime.

    Args:
        on_cancel: Cancels the call; without it, the future cannot be cancelled.
        on_long: Called now and then by a thread that waits long, with the seconds it has waited.
        sources: The futures that this one follows from.
        devices: As of `Future`.
        help_along: Called by a waiting thread, before and after it releases its pool slot.
    """
    future: Future[Any] = Future(devices=devices)
    future._on_cancel, future._on_long, future._help_along = on_cancel, on_long, help_along
    if sources:
        future._sources = [weakref.ref(source) for source in sources if isinstance(source, Future)]
    return future


def collect_all(futures: Iterable[torch.futures.Future[Any]]) -> Future[list[torch.futures.Future[Any]]]:
    """Return a future of all given ones, as torch's does: done when all are done, or failed as soon as one fails."""
    futures = list(futures)
    if not all(isinstance(future, torch._C.Future) for future in futures):
        raise TypeError(f"_collect_all(): incompatible function arguments: a list of Futures, not {futures!r}")
    on_long = next((future._on_long for future in futures if isinstance(future, Future)), None)
    gathered: Future[list[torch.futures.Future[Any]]] = make_future(on_long=on_long, sources=futures)
    left = len(futures)
    lock = threading.Lock()

    def future_done(future: torch.futures.Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = not left
        try:
            future.value()
        except Exception as error:  # noqa: BLE001  (any error of a call becomes the result)
            failure = error
            gathered.deliver_answer(lambda: _raise_copy(failure), operator.call)
        else:
            if last:
                gathered.deliver_answer(lambda: futures, operator.call)

    if not futures:
        gathered.set_result(futures)
    for future in futures:
        future.add_done_callback(future_done)
    return gathered


def wait_all(futures: Iterable[torch.futures.Future[T]]) -> list[T]:
    """Return the values of all futures, in order; raise the first error as soon as there is one. Interruptible.

    >>> rpcbench.wait_all([rpc.rpc_async("worker1", abs, (x,)) for x in (-1, -2)])
    [1, 2]
    """
    futures = list(futures)
    left = [future for future in futures if not _is_done(future)]
    if len(left) > 1:
        collect_all(futures).wait()
    elif left:
        left[0].wait()  # for a single future, this thread may receive the answer itself
    return [future.value() for future in futures]


def _is_done(future: torch.futures.Future[Any]) -> bool:
    """Return whether a future is done; raise its error if it has failed."""
    done = future.done()
    if done:
        future.value()
    return done


def settle_all(futures: Iterable[torch.futures.Future[T]]) -> list[T]:
    """Do as `wait_all`, but raise an error only after all are done, so that no call is still running."""
    futures = list(futures)
    for future in futures:
        with contextlib.suppress(Exception):  # raised below, in order
            future.wait()
    return [future.value() for future in futures]


_collect_in_torch = torch._C._collect_all


def _collect_futures(futures: Any) -> Any:
    if isinstance(futures, Iterable) and any(isinstance(future, Future) for future in futures):
        return collect_all(futures)
    return _collect_in_torch(futures)


# torch.futures.collect_all and wait_all call this function. torch's own sees only the C++ side of a future, where an
# error that was set from Python is a value like any other: it would not end the wait before all others are done.
torch._C._collect_all = _collect_futures

_wait_in_torch = torch._C.wait


def _wait_for_future(future: Any) -> Any:
    return future.wait() if isinstance(future, Future) else _wait_in_torch(future)


# For torch.jit.wait: torch's side of a lazy future is completed only on request.
torch._C.wait = cast(Any, _wait_for_future)
