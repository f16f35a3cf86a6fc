"""`cluster.map`: the results of a function for many items, each from the worker that was free first.

Guarantees
- Items are drawn on the thread that takes the results, so their iterator may be infinite and need not be thread-safe.
  At most `AHEAD` items for each worker are drawn and not yet taken as results.
- The first error ends the map, with the number and the text of its item as a note: items that have not begun are
  dropped, and those that run are cancelled. Ctrl-C, `close`, and the end of the last reference do the same.
- With `ordered`, that error is raised after the results of all items before it; otherwise at once.
- An error of the items' own iterator is raised as it is, after the results of the items before it.
- A map is a job (`runtime.jobs`), with a bar or without: items count there as they begin and end, in the bar as their
  results are taken.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from concurrent import futures
from functools import partial
from typing import Any, Generic, TypeVar, cast

from rpcbench.base.conditions import Condition, Listeners
from rpcbench.base.errors import is_worker_loss
from rpcbench.base.futures import release_slot
from rpcbench.base.rebuild import add_note, format_value
from rpcbench.launch.task_pool import PoolTask, TaskPool, check_function
from rpcbench.runtime.jobs import STOPPED, JobCounts, JobLog, count_items, end_state, make_bar
from rpcbench.runtime.requests import function_label

S = TypeVar("S")
T = TypeVar("T")

AHEAD = 4
"""The most items for each worker that are drawn before their results are taken: one runs, the others hide delays."""
_QUIET_SECONDS = 1.0  # a map that takes less time shows no bar
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80  # characters of an item in a note


class _Ends:
    """The numbers of the items that have ended, in this order. A thread, or an event loop, waits for the next."""

    def __init__(self, pool: TaskPool, job: JobCounts) -> None:
        self._pool, self._job = pool, job
        self.numbers: deque[int] = deque()
        self.failed = False
        self.changes = Condition()
        self.listeners = Listeners()

    def record_end(self, number: int, task: futures.Future[Any]) -> None:
        """Called by the task, on any thread."""
        failed = not task.cancelled() and task.exception() is not None
        if not task.cancelled():
            self._job.end_item(failed, begun=cast(PoolTask[Any], task).on_begin is None)
        self.numbers.append(number)
        if failed and not self.failed:
            self.failed = True
            # after the number: the tasks that this cancels come behind the one that failed
            self._pool.cancel_waiting_tasks()
        self.changes.notify_all()
        self.listeners.notify_listeners()


class _Dropped:
    """Ends a map without references, when the maintenance thread frees this note: a finalizer must take no lock."""

    def __init__(self, pool: TaskPool, tasks: Iterable[PoolTask[Any]], job: JobCounts, bar: Any) -> None:
        self._pool, self._tasks, self._job, self._bar = pool, tasks, job, bar

    def __del__(self) -> None:
        self._job.end(STOPPED)
        _stop_tasks(self._pool, self._tasks)
        if self._bar is not None:
            self._bar.close()  # it shows the last results, which tqdm may not have drawn


class TaskMap(Iterator[T], AsyncIterator[T], Awaitable[list[T]], Generic[T]):
    """The results of `cluster.map`, for `for`, `async for`, or `await`, which gives the list of all. For one thread."""

    def __init__(
        self, pool: TaskPool, function: Callable[[S], T], items: Iterable[S], ordered: bool, retries: int, shown: bool
    ) -> None:
        self._tasks: dict[int, tuple[PoolTask[T], Any]] = {}  # with their items, by number: drawn and not taken
        self._pool, self._function = pool, check_function("map", function)
        if not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries={retries!r}: an item runs again a whole number of times, 0 for never")
        self._retries, self._ordered = retries, ordered
        try:
            self._items: Iterator[Any] | None = iter(items)
        except TypeError as error:
            text = f"cluster.map takes its items from an iterable; {format_value(items, _SHORT.repr)} is not one"
            raise TypeError(text) from error
        self._failure: Exception | None = None  # of the items' iterator
        self._drawn = self._taken = 0
        total = count_items(items)
        self._job = pool.agent.part(JobLog).begin_job("map", function_label(function), total, "item")
        self._ends = _Ends(pool, self._job)
        self._done: dict[int, None] = {}  # numbers of results to take, in the order of their ends
        self._bar = make_bar(total, "item", _QUIET_SECONDS) if shown else None
        try:
            self._draw_items(len(pool.workers()))
        except BaseException as error:
            self._close_after(error)
            raise

    # -- use
    def __next__(self) -> T:
        try:
            if not self._prepare_next():
                raise StopIteration
            with release_slot():
                self._ends.changes.wait_for(self._is_result_ready)
            return self._take_result()
        except BaseException as error:
            self._close_after(error)
            raise

    def __aiter__(self) -> TaskMap[T]:
        return self

    async def __anext__(self) -> T:
        try:
            if not self._prepare_next():
                raise StopAsyncIteration
            await self._await_result()
            return self._take_result()
        except BaseException as error:
            self._close_after(error)
            raise

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._collect_results().__await__()

    async def _collect_results(self) -> list[T]:
        return [result async for result in self]

    def close(self) -> None:
        """End the map: drop the items that have not begun, and cancel those that run. Idempotent."""
        self._job.end(STOPPED)
        self._items = self._failure = None
        tasks, self._tasks = self._tasks, {}
        self._done.clear()
        _stop_tasks(self._pool, [task for task, _ in tasks.values()])
        if self._bar is not None:
            self._bar.close()

    def _close_after(self, error: BaseException) -> None:
        self._job.end(*end_state(error))
        self.close()

    def __del__(self) -> None:
        if (job := getattr(self, "_job", None)) is not None and not job.has_ended:
            tasks = [task for task, _ in self._tasks.values()]
            self._pool.agent.released.put(_Dropped(self._pool, tasks, job, self._bar))

    def __repr__(self) -> str:
        state = "" if self._items is not None else ", all drawn"
        return f"<map: {self._taken} results taken of {self._drawn} items{state}>"

    # -- steps
    def _prepare_next(self) -> bool:
        """Draw items, and return whether a result is to come. Raises the error of their iterator when it is due."""
        most = AHEAD * max(1, len(self._pool.workers()))
        self._draw_items(min(most, len(self._tasks) + 1))  # one for the result that is taken, so that workers stay busy
        while (
            self._items is not None
            and not self._is_result_ready()
            and len(self._tasks) < most
            and not self._ends.failed
        ):
            self._draw_items(len(self._tasks) + 1)
        if not self._tasks and self._failure is not None:
            raise self._failure
        return bool(self._tasks)

    def _draw_items(self, most: int) -> None:
        """Send items while fewer than `most` are drawn and not taken."""
        while self._items is not None and len(self._tasks) < most and not self._ends.failed:
            try:
                item = next(self._items)
            except StopIteration:
                self._items = None
            except Exception as error:  # noqa: BLE001  (raised when the results before it are taken)
                self._items, self._failure = None, error
            else:
                self._submit_item(item)

    def _submit_item(self, item: Any) -> None:
        task, number = PoolTask(self._function, (item,), {}, self._retries), self._drawn
        self._drawn += 1
        self._tasks[number] = task, item
        task.on_begin = self._job.begin_item
        task.add_done_callback(partial(self._ends.record_end, number))
        self._pool.put_task(task)

    def _is_result_ready(self) -> bool:
        """Return whether the next result can be taken."""
        while self._ends.numbers:
            self._done[self._ends.numbers.popleft()] = None
        return self._taken in self._done if self._ordered else bool(self._done)

    async def _await_result(self) -> None:
        """Wait until the next result can be taken, without blocking the event loop."""
        loop, end_event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(end_event.set)

        stop = self._ends.listeners.add_callback(wake)
        try:
            while not self._is_result_ready():
                await end_event.wait()
                end_event.clear()
        finally:
            stop()

    def _take_result(self) -> T:
        """Return the next result, which is there, or raise its error."""
        number = self._taken if self._ordered else next(iter(self._done))
        del self._done[number]
        task, item = self._tasks.pop(number)
        self._taken += 1
        if (error := task.exception()) is not None:
            place = self._describe_item(number, item, error)
            if isinstance(error, StopIteration | StopAsyncIteration):  # as it is, it would count as the map's own end
                raise RuntimeError(f"{error!r} {place}") from error
            add_note(error, place)
            raise error
        if self._bar is not None:
            self._bar.update()
        return task.result()

    def _describe_item(self, number: int, item: Any, error: BaseException) -> str:
        place = f"while cluster.map ran item {number}: {format_value(item, _SHORT.repr)}"
        if is_worker_loss(error) and not self._retries:
            return f"{place}; with retries=1 an item of a lost worker runs once more, on another worker"
        return place


def _stop_tasks(pool: TaskPool, tasks: Iterable[PoolTask[Any]]) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    for task in tasks:
        task.stop_task()
