"""Tasks: calls that wait until a worker is free, behind the interface of `concurrent.futures`.

Guarantees
- A worker runs one task of a pool at a time. The next task goes to the worker that is free first; of several free ones,
  to the one with the fewest calls of this process in flight.
- Every task ends: with its result, with its error, or with WorkerLostError once no worker is left. No thread waits for
  that: the end of a task sends the next one.
- A task runs again only if its worker was lost, and at most `retries` times.
- Arguments are pickled on a pool thread, so `submit` does not block, and Ctrl-C cannot cut a message in half.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from functools import partial
from typing import Any, ParamSpec, TypeVar

from rpcbench.base.conditions import Condition
from rpcbench.base.errors import RpcError, ShutdownError, WorkerLostError, is_worker_loss
from rpcbench.base.futures import Answer, Future, release_slot
from rpcbench.cells.targets import ALL, Targets
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.locked_node import uninterrupted

P = ParamSpec("P")
T = TypeVar("T")

_SHUT_DOWN = "this cluster is shut down and runs no more tasks; make a new one"
_CLOSED = "this executor is shut down and takes no more tasks; cluster.executor() makes another"


class PoolTask(futures.Future[T]):
    """A call that waits for a worker, runs on one, or has ended. `cancel` succeeds only while it waits."""

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], retries: int) -> None:
        super().__init__()
        self.request: tuple[Callable[..., T], tuple[Any, ...], dict[str, Any]] | None = function, args, kwargs
        self.retries = retries  # how many times it may still run again
        self.stopped = False
        self.on_begin: Callable[[], object] | None = None  # called, and removed, as it is first sent to a worker
        self._call: Future[T] | None = None  # in flight

    def stop_task(self) -> None:
        """Cancel the task even if it runs: `rpc.cancelled()` is True in its function, and CallCancelled its error."""
        self.stopped = True
        if not self.cancel() and (call := self._call) is not None:
            call.cancel()

    def call_sent(self, call: Future[T]) -> None:
        self._call = call
        if self.stopped:  # tested after `_call` is set, and set before that is read: one of the two threads cancels it
            call.cancel()

    def begin(self) -> None:
        begun, self.on_begin = self.on_begin, None
        if begun is not None:
            begun()

    def is_to_run(self) -> bool:
        """Return whether the task is still to run: not if it was cancelled while it waited."""
        return self.running() or self.set_running_or_notify_cancel()  # it runs already if it is to run again

    def consume_retry(self, error: Exception | None) -> bool:
        """Return whether this error of its call lets the task run again, and count that."""
        if not is_worker_loss(error) or not self.retries:
            return False
        self.retries -= 1
        return True

    def resolve_task(self, value: Any, error: Exception | None) -> None:
        """Resolve the task. Its arguments are freed, also if the future is kept."""
        self.request = self._call = None
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)


class TaskPool(futures.Executor):
    """Runs tasks on the workers that the words select, see `rpcbench.cells.targets`; with "all", on later ones too.

    `calls` counts the calls of this process in flight by the id of the worker.
    """

    def __init__(self, agent: Agent, workers: str | Sequence[str], calls: Callable[[], Counter[int]]) -> None:
        self.agent = agent
        self._words = [workers] if isinstance(workers, str) else [*workers]
        self._calls = calls
        self._lock = threading.Lock()  # guards the fields down to `_has_stopped`; no other lock is taken under it
        self._queue: deque[PoolTask[Any]] = deque()
        self._busy: set[str] = set()  # workers that run a task of this pool
        self._left: set[futures.Future[Any]] = set()  # tasks that have not ended
        self._wakes = 0  # since the last time that no thread was sending tasks; 0: none is
        self._refused = ""  # why tasks are not taken; empty while they are
        self._has_stopped = False  # the agent has stopped: nothing can run any more
        self._ends = Condition()  # notified when a task has ended
        agent.part(OpenPools).add_pool(self)
        if not agent.running:  # tested after `add_pool`: an agent that stops from now on ends this pool, too
            raise ShutdownError(_SHUT_DOWN)
        found = Targets().select_workers(self._words, [*self._serving_workers()])
        for name in found:
            agent.member(name)
        if not any(ALL in word.split(",") for word in self._words):  # a slice means the workers of now
            self._words = found

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        """Run `fn(*args, **kwargs)` on a worker as soon as one is free, and return a `concurrent.futures.Future`."""
        return self.put_task(PoolTask(check_function("submit", fn), args, kwargs, 0))

    def put_task(self, task: PoolTask[T]) -> PoolTask[T]:
        """Queue a task. ShutdownError if the pool or the cluster is shut down."""
        with uninterrupted:
            with self._lock:
                if self._refused or not self.agent.running:  # not refused, and does not run: a fork of the process
                    raise ShutdownError(self._refused or self.agent.silent)
                self._queue.append(task)
                self._left.add(task)
            task.add_done_callback(self._task_ended)
            self.wake_sender()
        return task

    def workers(self) -> dict[str, int]:
        """Return the ids of the selected workers that serve now, by name."""
        there = self._serving_workers()
        try:
            names = Targets().select_workers(self._words, [*there])
        except RuntimeError:  # no worker is left that the words mean
            names = []
        return {name: there[name] for name in names if name in there}

    def cancel_waiting_tasks(self) -> None:
        """Cancel all tasks that have not begun."""
        with self._lock:
            waiting = [*self._queue]
        for task in waiting:
            task.cancel()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks.

        Args:
            wait: Return once all tasks have ended. Ctrl-C ends the wait, not the tasks.
            cancel_futures: Cancel the tasks that have not begun.
        """
        with self._lock:
            self._refused = self._refused or _CLOSED
        if cancel_futures:
            self.cancel_waiting_tasks()
        if wait:
            with release_slot():
                self._ends.wait_for(lambda: not self._left)

    def abandon_tasks(self) -> None:
        """End all tasks that wait: the agent has stopped."""
        with self._lock:
            self._refused, self._has_stopped = _SHUT_DOWN, True
            waiting, self._queue = self._queue, deque()
        _fail_tasks(waiting, ShutdownError, _SHUT_DOWN)

    def wake_sender(self) -> None:
        """Have a pool thread send the tasks that can be sent now."""
        with self._lock:
            self._wakes += 1
            if self._wakes > 1:  # a thread is sending, and looks again before it ends
                return
        try:
            self.agent.submit(self._send_all)
        except RuntimeError:  # no thread can start now: the next call of this method tries again
            with self._lock:
                self._wakes = 0
            raise

    # -- on pool threads
    def _send_all(self) -> None:
        while True:
            seen = self._wakes
            while (found := self._take_next_task()) is not None:
                self._send_task(*found)
            with self._lock:
                if self._wakes == seen:
                    self._wakes = 0
                    return

    def _take_next_task(self) -> tuple[PoolTask[Any], str] | None:
        """Take a task and a free worker for it; None if there are no two such."""
        if not self._queue:
            return None
        there, calls = self.workers(), self._calls()
        names = sorted(there, key=lambda name: calls[there[name]])
        with self._lock:
            free = next((name for name in names if name not in self._busy), None)
            if self._queue and free is not None:
                self._busy.add(free)
                return self._queue.popleft(), free
            if self._busy or names:  # the end of a task, or a worker that joins, wakes this pool again
                return None
            stranded, self._queue = self._queue, deque()
        _fail_tasks(stranded, WorkerLostError, self._no_worker_text())
        return None

    def _send_task(self, task: PoolTask[Any], worker: str) -> None:
        if not task.is_to_run() or task.request is None:
            self._free_worker(worker)
            return
        function, args, kwargs = task.request
        task.begin()
        try:
            call = self.agent.call(worker, function, args, kwargs, timeout=0.0)  # no limit, as for any executor
        except Exception as error:  # noqa: BLE001  (any error of the call is the task's)
            self._reply_received(task, worker, partial(_raise_error, error))
        else:
            task.call_sent(call)
            call.add_done_callback(lambda done: self._reply_received(task, worker, done.value))

    def _reply_received(self, task: PoolTask[Any], worker: str, answer: Answer) -> None:
        value, error = None, None
        try:
            value = answer()
        except Exception as failure:  # noqa: BLE001  (as above)
            error = failure.with_traceback(None)  # frames of the runtime, which would keep the task alive
        again = task.consume_retry(error)
        if again:
            with self._lock:
                again = not self._has_stopped
                if again:
                    self._queue.appendleft(task)
        if not again:
            task.resolve_task(value, error)  # first: its callbacks may cancel the tasks that wait
        self._free_worker(worker)

    def _free_worker(self, worker: str) -> None:
        with self._lock:
            self._busy.discard(worker)
        self.wake_sender()

    def _task_ended(self, task: futures.Future[Any]) -> None:
        with self._lock:
            self._left.discard(task)
        self._ends.notify_all()

    def _serving_workers(self) -> dict[str, int]:
        return {info.name: info.id for info in self.agent.members() if info.id != 0}

    def _no_worker_text(self) -> str:
        remedy = getattr(self.agent.owner, "inseparable", "") or "cluster.restart(name) starts a lost one again"
        return f"no worker of {' '.join(self._words)} is left to run this task: {remedy}"


class OpenPools:
    """The pools of one agent: they are told of workers that join, and of the agent's end."""

    def __init__(self, agent: Agent) -> None:
        self._lock = threading.Lock()
        self._pools: weakref.WeakSet[TaskPool] = weakref.WeakSet()
        agent.on_member(
            lambda kind, who, reason: self._notify_pools(TaskPool.wake_sender) if kind == "joined" else None
        )
        # Before the calls in flight fail, or no task would wait any more.
        for ending in agent.hooks.on_leave, agent.hooks.on_end:
            ending.append(lambda: self._notify_pools(TaskPool.abandon_tasks))

    def add_pool(self, pool: TaskPool) -> None:
        with self._lock:
            self._pools.add(pool)

    def _notify_pools(self, tell: Callable[[TaskPool], None]) -> None:
        with self._lock:
            pools = [*self._pools]
        for pool in pools:
            tell(pool)


def check_function(method: str, function: Callable[P, T]) -> Callable[P, T]:
    """Return the function. TypeError, in the name of a method of clusters, if it is none."""
    if not callable(function):
        raise TypeError(f"cluster.{method} runs a function, its first argument; {function!r} is not one")
    return function


def _fail_tasks(tasks: Iterable[PoolTask[Any]], kind: type[RpcError], text: str) -> None:
    for task in tasks:
        if task.is_to_run():
            task.resolve_task(None, kind(text))


def _raise_error(error: Exception) -> None:
    raise error
