"""Futures that behave in a notebook: interruptible, awaitable, and still torch's.

Guarantees
- `wait()` returns at once on Ctrl-C (torch's own wait holds the signal back until the result is there).
- A pool thread that waits for more than a moment tells its pool, which may start another: nesting deeper than the pool
  works.
- What `then` returns is one of these, too.
- Continuations run on the thread that waits, or on a pool thread; never on a thread that reads a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import torch

from rpcbench.base.conditions import acquired
from rpcbench.base.rebuild import set_field, twin

T = TypeVar("T")
S = TypeVar("S")
_LONG, _LONGEST = 1.0, 10.0
"""Seconds after which a wait is told of for the first time, and between the last ones."""

if TYPE_CHECKING:

    class _Base(torch.futures.Future[T], Generic[T]):
        pass
else:
    _Base = torch.futures.Future


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Around anything that blocks: lets the pool of this thread, if it has one, make up for it."""
    waiting = getattr(threading.current_thread(), "waiting", None)
    if waiting is None:
        yield
        return
    with waiting():
        yield


def step_aside() -> None:
    """Before anything that may block for long: lets others do what this thread had to do besides, such as to read."""
    aside = getattr(threading.current_thread(), "step_aside", None)
    if aside is not None:
        aside()


Answer = Callable[[], Any]
"""Makes the value of a future, or raises its error: run once, by a thread that may run user code."""
Waits = Callable[[], bool]
"""Whether a thread still waits."""
HelpAlong = Callable[[Waits], object]
"""Takes part in what brings an answer, for as long as its caller waits for that."""
Later = Callable[[Callable[[], None]], object]
"""Runs a function soon, on another thread."""


def _fresh(error: BaseException) -> BaseException:
    """A twin of an error, without the frames that its raises have collected, which may refer back to the future.

    torch's side holds what it stores where the garbage collector cannot see it, so such a circle would never go.
    """
    try:
        fresh = twin(error)
    except Exception:  # noqa: BLE001  (it cannot be copied, so it is raised as it is)
        return error
    if type(fresh) is not type(error):
        return error
    set_field(fresh, "__cause__", error.__cause__)
    set_field(fresh, "__suppress_context__", error.__suppress_context__)
    return fresh


def _raise(error: Exception) -> None:
    raise _fresh(error)


class Kept(Protocol):
    """What a call needs until it is answered."""

    def let_go(self) -> object:
        """It does not any more."""


class _Waiter:
    """One thread that waits: its bell is held until it is to look again, or to raise `error`."""

    __slots__ = ("bell", "error", "thread")

    def __init__(self) -> None:
        self.bell = threading.Lock()  # a plain lock: Ctrl-C can leave a Condition locked for ever
        self.bell.acquire()
        self.thread = threading.get_ident()
        self.error: Exception | None = None


class Future(_Base[T]):
    """A `torch.futures.Future` whose waits can be interrupted and which can be awaited.

    Made by `rpc_async` and friends, which resolve it through `deliver`. `cancel()` calls `on_cancel`; a thread that
    waits long calls `on_long` with the seconds it has waited, now and then. `sources` are futures that it follows from.
    `help_along` is for a thread that is about to wait, before and after its pool is told: it may bring the answer.
    """

    # What a future has until something else is known: one is made for each call, and few of them ever need another.
    keeps: Sequence[Kept] = ()
    site: Any = None  # the line of the user's program that made the call, where another thread may open the answer
    _answer: Answer | None = None
    _taken = False
    _helping = False  # a thread that waits may bring the answer, and opens it
    _followed = False  # something happens as soon as it is done
    _left = False  # the answer is left to the first one who asks
    _lazy = False  # so is torch's side of this future, which is
    _whole = False  # complete
    _outcome: tuple[Any, BaseException | None] | None = None
    _devices: list[Any] | None = None
    _sources: Sequence[weakref.ref[Future[Any]]] = ()

    def __init__(
        self,
        *,
        on_cancel: Callable[[], object] | None = None,
        on_long: Callable[[float], object] | None = None,
        sources: Iterable[torch.futures.Future[Any]] = (),
        devices: list[Any] | None = None,
        help_along: HelpAlong | None = None,
    ) -> None:
        torch._C.Future.__init__(self, [torch.device(device) for device in devices] if devices else [])
        self._help_along = help_along
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._on_cancel = on_cancel
        self._on_long = on_long
        if devices:
            self._devices = devices
        if sources:
            self._sources = [weakref.ref(source) for source in sources if isinstance(source, Future)]

    # -- resolving
    def deliver(self, answer: Answer, later: Later, lazy: bool = False) -> bool:
        """Runtime only: the answer has arrived. A waiting thread opens it; `later` sees to it where nobody waits, but
        where it is `lazy` and nothing follows from it, the first one who asks.

        False, and nothing else, if the future was resolved before.
        """
        with self._lock:
            if self._answer is not None or self._outcome is not None:
                return False
            self._answer = answer
            self._lazy = lazy
            awaited = (bool(self._waiters) and self._ring()) or self._helping
            self._left = lazy and not awaited and not self._followed
        if not awaited and not self._left:
            later(self._open)
        return True

    def _ring(self) -> bool:
        """Wake all who wait, under the lock; whether there was anyone."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.bell.release()
        return bool(waiters)

    def _open(self) -> None:
        """Open the answer that has arrived, unless another thread does."""
        if self._answer is None:
            return
        taken = False
        try:
            with self._lock:
                answer = self._answer
                if answer is None or self._taken:
                    return
                self._taken = taken = True
            outcome: tuple[Any, BaseException | None] = (answer(), None)
        except BaseException as error:  # whatever a call raised is its result
            if not taken:
                raise
            error.__context__ = None  # what the opening thread was handling is no part of it
            outcome = (None, error.with_traceback(None))
        self._finish(outcome)

    def _finish(self, outcome: tuple[Any, BaseException | None]) -> None:
        """Wake all waiters, then complete torch's side, which runs the continuations on this thread."""
        with self._lock:
            self._outcome = outcome
            self._answer = None
            if self._waiters:
                self._ring()
            complete = self._whole = self._followed or not self._lazy
        if complete:
            self._complete(*outcome)

    def _complete(self, value: Any, error: BaseException | None) -> None:
        """Torch's side of it."""
        if error is None:
            super().set_result(value)
            return
        self._set_unwrap_func(_raise)  # as torch's set_exception, which would call our set_result
        super().set_result(cast(Any, _fresh(error) if isinstance(error, Exception) else RuntimeError(repr(error))))

    def set_result(self, result: T) -> None:
        self._resolve((result, None))

    def set_exception(self, result: Any) -> None:
        if not isinstance(result, Exception):
            raise AssertionError(f"{result} is of type {type(result)}, not an Exception.")
        self._resolve((None, result))

    def _resolve(self, outcome: tuple[Any, BaseException | None]) -> None:
        with self._lock:
            if self._answer is not None or self._outcome is not None:
                raise RuntimeError(
                    "Attempting to mark a completed Future as complete again. Note that a Future can only be marked "
                    "completed once."
                )
            self._taken = True
            self._answer = lambda: None
        self._finish(outcome)

    # -- using
    def wait(self) -> T:
        """The value, or its error raised; blocks until it is there. Ctrl-C ends the wait, not the call."""
        try:
            if self._help_along is not None and self._unanswered():
                self._helping = True
                self._help_along(self._unanswered)
            while self._outcome is None:
                if self._answer is not None:
                    self._open()
                if self._outcome is None:
                    self._sleep()
        except BaseException:
            self._helping = False
            self._open()  # the answer may have been left to this thread
            raise
        return self._value()

    def _unanswered(self) -> bool:
        return self._answer is None and self._outcome is None

    def wait_or_cancel(self) -> T:
        """As `wait`, for a call that only this thread waits for: Ctrl-C gives the call up, too."""
        try:
            return self.wait()
        except KeyboardInterrupt:
            self.cancel()
            raise

    def _sleep(self) -> None:
        """Until there is something to do."""
        waiter = _Waiter()
        with self._lock:
            if self._outcome is not None or (self._answer is not None and not self._taken):
                return
            self._waiters.append(waiter)
            self._helping = False
        waiting = getattr(threading.current_thread(), "waiting", None)
        try:
            if waiting is None:
                self._listen(waiter)
            else:
                with waiting():
                    if self._help_along is not None:
                        self._help_along(waiter.bell.locked)
                    self._listen(waiter)
        except BaseException:
            with self._lock:
                self._waiters = [other for other in self._waiters if other is not waiter]
            raise
        if waiter.error is not None:
            raise waiter.error

    def _listen(self, waiter: _Waiter) -> None:
        """Until the bell rings."""
        waited, patience = 0.0, _LONG
        while not acquired(waiter.bell, patience):
            waited, patience = waited + patience, min(2 * patience, _LONGEST)
            if self._on_long is not None:
                self._on_long(waited)

    def break_wait(self, thread: int, error: Exception) -> bool:
        """Raise `error` in a thread that waits, and nowhere else. False if it does not wait any more."""
        with self._lock:
            broken = [waiter for waiter in self._waiters if waiter.thread == thread]
            self._waiters = [waiter for waiter in self._waiters if waiter.thread != thread]
            for waiter in broken:
                waiter.error = error
                waiter.bell.release()
        return bool(broken)

    def origins(self) -> list[Future[Any]]:
        """The futures that this one waits for in the end: itself, or those that it follows from and are not done."""
        if not self._sources:
            return [self]
        sources = [source for ref in self._sources if (source := ref()) is not None and not source.done()]
        return [origin for source in sources for origin in source.origins()]

    def _value(self) -> T:
        assert self._outcome is not None
        value, error = self._outcome
        if error is not None:
            raise _fresh(error)
        found: T = value
        return found

    def done(self) -> bool:
        self._take()
        return self._outcome is not None

    def value(self) -> T:
        """The value of a completed future; RuntimeError before."""
        self._take()
        if self._outcome is None:
            raise RuntimeError("value() may only be called on a completed Future; use wait()")
        return self._value()

    def outcome(self) -> tuple[Any, BaseException | None] | None:
        """Runtime only: value and error as far as they are known here. Runs nothing, waits for nobody."""
        return self._outcome

    def follow(self) -> None:
        """From now on it is opened as soon as the answer is there: for what waits for torch's side of it."""
        with self._lock:
            self._followed = True
            outcome = None if self._whole else self._outcome
            self._whole |= outcome is not None
        if outcome is not None:
            self._complete(*outcome)
        self._take()

    def _take(self) -> None:
        if self._left and self._outcome is None:
            self._open()

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        super().add_done_callback(callback)
        self.follow()

    def then(self, callback: Callable[[Any], S]) -> Future[S]:
        """A future of what `callback(this future, completed)` returns; cancelling it cancels this one.

        RuntimeError with torch's words where the callback raises, and the error itself as its cause. TypeError for a
        callback that is no function.
        """
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments: a callback is a function, not {callback!r}")
        parent = weakref.ref(self)
        chained: Future[S] = Future(
            on_cancel=lambda: (first := parent()) and first.cancel(),
            on_long=self._on_long,
            sources=[self],
            devices=self._devices,
        )

        def run(done: Any) -> None:
            try:
                result = callback(done)
            except Exception as error:  # noqa: BLE001  (whatever it raised is the result)
                words = f"Got the following error when running the callback: {type(error).__name__}: {error}"
                failure = RuntimeError(words)
                failure.__cause__ = error.with_traceback(None)
                chained.set_exception(failure)
            else:
                chained.set_result(result)

        self.add_done_callback(run)
        return chained

    def cancel(self) -> bool:
        """Give the call up: its waiters get CallCancelled, and the callee is told.

        There it does not run if it has not begun yet; if it has, `rpc.cancelled()` is True in it. False if it was done.
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
        return self._value()


def collect_all(futures: Iterable[torch.futures.Future[Any]]) -> Future[list[torch.futures.Future[Any]]]:
    """A future of all the given ones: done when all are, or failed as soon as one fails. As torch's, interruptible."""
    futures = list(futures)
    if not all(isinstance(future, torch._C.Future) for future in futures):
        raise TypeError(f"_collect_all(): incompatible function arguments: a list of Futures, not {futures!r}")
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
            gathered.deliver(lambda: _raise(failure), _now)
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
    if len(left) > 1:
        collect_all(futures).wait()
    for future in left if len(left) == 1 else ():
        future.wait()  # this thread may read the answer itself
    return [future.value() for future in futures]


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


def _collect(futures: Any) -> Any:
    if isinstance(futures, Iterable) and any(isinstance(future, Future) for future in futures):
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
