"""`cluster.map`, `submit`, `executor`: the worker of each task, the bounds, the ends by errors, losses and Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sizes import long
from tqdm.std import tqdm

import rpcbench
import rpcbench.rpc as rpc
from rpcbench.base.errors import (
    CallCancelled,
    RemoteError,
    SerializationError,
    ShutdownError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpcbench.base.futures import Future
from rpcbench.launch import task_map
from rpcbench.launch.task_map import AHEAD, TaskMap
from rpcbench.launch.task_pool import PoolTask, TaskPool
from rpcbench.runtime import jobs
from rpcbench.runtime.events import EventLog
from rpcbench.runtime.interceptors import AgentHooks
from rpcbench.runtime.jobs import MOST, JobLog
from rpcbench.runtime.members import WorkerInfo


# -- without workers
class FakeCall(Future[Any]):
    """A call that the test answers."""

    def __init__(self, worker: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self._on_cancel = lambda: self.set_exception(CallCancelled("cancelled"))
        self.worker, self.function, self.args = worker, function, args

    def answer(self) -> None:
        try:
            value = self.function(*self.args)
        except Exception as error:
            self.set_exception(error)
        else:
            self.set_result(value)


class Calls(list[FakeCall]):
    values = SimpleNamespace(current_cell=lambda: None)


class FakeAgent:
    """An agent whose jobs run at once, on the thread of the test."""

    def __init__(self, *workers: str) -> None:
        self.links = SimpleNamespace(bus=EventLog())
        self.there = {"notebook": 0} | {name: number for number, name in enumerate(workers, 1)}
        self.running, self.silent, self.owner = True, "silent", None
        self.calls = Calls()
        self.released: SimpleQueue[Any] = SimpleQueue()
        self.hooks = AgentHooks()
        self.watchers: list[Callable[[str, Any, str], Any]] = []
        self.on_member = self.watchers.append
        self.in_flight: Counter[int] = Counter()  # of the process, as the test says
        self._parts: dict[Any, Any] = {}

    def part(self, kind: Any) -> Any:
        if kind not in self._parts:
            self._parts[kind] = kind(self)
        return self._parts[kind]

    def submit(self, job: Callable[[], Any]) -> None:
        job()

    def members(self) -> list[WorkerInfo]:
        return [WorkerInfo(name, number) for name, number in self.there.items()]

    def member(self, name: str) -> WorkerInfo:
        if name not in self.there:
            raise UnknownWorkerError.of(name, self.there)
        return WorkerInfo(name, self.there[name])

    def call(self, worker: str, function: Any, args: Any, kwargs: Any, timeout: float) -> FakeCall:
        assert timeout == 0 and not kwargs
        if args == ("unsendable",):
            raise SerializationError("it cannot be sent")
        self.calls.append(FakeCall(worker, function, args))
        return self.calls[-1]

    def open(self) -> dict[str, FakeCall]:
        """The call in flight by worker; no worker may have two."""
        calls = [call for call in self.calls if not call.done()]
        assert len({call.worker for call in calls}) == len(calls)
        return {call.worker: call for call in calls}

    def answers(self) -> bool:
        """Answer all calls, also those that follow; return whether there were any."""
        found = False
        while calls := self.open():
            found = True
            for call in calls.values():
                call.answer()
        return found

    def loses(self, name: str) -> None:
        del self.there[name]
        if (call := self.open().get(name)) is not None:
            call.set_exception(WorkerLostError(f"{name} is lost"))

    def joins(self, name: str) -> None:
        self.there[name] = 1 + max(self.there.values())
        for watcher in self.watchers:
            watcher("joined", self.member(name), "")

    def leaves(self) -> None:
        """End as an agent does that leaves its world."""
        for job in self.hooks.on_leave:
            job()
        for call in self.open().values():
            call.set_exception(ShutdownError("notebook has shut down"))
        self.stops()

    def stops(self) -> None:
        self.running = False
        for job in self.hooks.on_end:
            job()

    def pool(self, workers: str = "all") -> TaskPool:
        return TaskPool(cast(Any, self), workers, lambda: self.in_flight)

    def map(
        self, function: Any, items: Any, ordered: bool = True, retries: int = 0, shown: bool = False
    ) -> TaskMap[Any]:
        return TaskMap(self.pool(), function, items, ordered, retries, shown)


def same(item: Any) -> Any:
    return item


def fails_at(bad: int) -> Callable[[int], int]:
    def function(item: int) -> int:
        if item == bad:
            raise KeyError(item)
        return item

    return function


def test_a_worker_runs_one_task_at_a_time_and_the_next_goes_to_the_one_that_is_free_first() -> None:
    agent = FakeAgent("worker1", "worker2")
    pool = agent.pool()
    tasks = [pool.submit(same, item) for item in range(4)]
    assert [(call.worker, call.args) for call in agent.calls] == [("worker1", (0,)), ("worker2", (1,))]
    assert [task.running() for task in tasks] == [True, True, False, False]
    agent.open()["worker2"].answer()
    agent.open()["worker2"].answer()
    assert [(call.worker, call.args) for call in agent.calls[2:]] == [("worker2", (2,)), ("worker2", (3,))]
    agent.open()["worker1"].answer()
    agent.open()["worker2"].answer()
    assert [task.result(0) for task in tasks] == [0, 1, 2, 3]


def test_tasks_run_after_a_moment_in_which_no_thread_could_start() -> None:
    agent = FakeAgent("worker1", "worker2")
    pool, submit = agent.pool(), agent.submit

    def refuse(job: Any) -> None:
        raise RuntimeError("can't start new thread")

    agent.submit = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="new thread"):
        pool.submit(same, 0)
    agent.submit = submit  # type: ignore[method-assign]
    task = pool.submit(same, 1)
    agent.answers()
    assert task.result(0) == 1


def test_of_free_workers_the_one_with_the_fewest_calls_gets_the_task() -> None:
    agent = FakeAgent("worker1", "worker2", "worker3")
    agent.in_flight = Counter({1: 2, 2: 1, 3: 3})
    pool = agent.pool()
    for item in range(3):
        pool.submit(same, item)
    assert [call.worker for call in agent.calls] == ["worker2", "worker1", "worker3"]


def test_a_task_that_waits_can_be_cancelled_and_one_that_runs_cannot() -> None:
    agent = FakeAgent("worker1")
    pool = agent.pool()
    first, second, third = (pool.submit(same, item) for item in range(3))
    assert not first.cancel() and second.cancel()
    agent.calls[0].answer()
    assert agent.open()["worker1"].args == (2,)
    agent.calls[1].answer()
    assert not futures.wait([first, second, third], 0).not_done
    assert second.cancelled() and third.result(0) == 2


def test_shutdown_takes_no_more_tasks_and_ends_those_that_wait_if_asked() -> None:
    agent = FakeAgent("worker1")
    pool = agent.pool()
    runs, waits = pool.submit(same, 0), pool.submit(same, 1)
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(ShutdownError, match="this executor is shut down and takes no more tasks; "):
        pool.submit(same, 2)
    agent.calls[0].answer()
    assert (runs.result(0), waits.cancelled(), len(agent.calls)) == (0, True, 1)


def test_the_loss_of_a_worker_is_the_error_of_its_task_alone() -> None:
    agent = FakeAgent("worker1", "worker2")
    pool = agent.pool()
    tasks = [pool.submit(same, item) for item in range(3)]
    agent.loses("worker1")
    with pytest.raises(WorkerLostError, match="worker1 is lost"):
        tasks[0].result(0)
    for _ in range(2):
        agent.open()["worker2"].answer()
    assert [task.result(0) for task in tasks[1:]] == [1, 2]


def test_tasks_end_when_no_worker_is_left_and_later_workers_run_later_ones() -> None:
    agent = FakeAgent("worker1", "worker2")
    pool, only = agent.pool(), agent.pool("worker2")
    tasks = [pool.submit(same, item) for item in range(3)]
    agent.loses("worker2")
    gone = only.submit(same, 7)
    with pytest.raises(WorkerLostError, match=r"no worker of worker2 is left .*cluster.restart\(name\)"):
        gone.result(0)
    assert not tasks[2].done()  # the other worker may still take it
    agent.loses("worker1")
    with pytest.raises(WorkerLostError, match="no worker of all is left"):
        tasks[2].result(0)
    agent.joins("worker3")
    pool.submit(same, 4)
    later = pool.submit(same, 5)
    agent.joins("worker4")
    assert {name: call.args for name, call in agent.open().items()} == {"worker3": (4,), "worker4": (5,)}
    agent.open()["worker4"].answer()
    assert later.result(0) == 5


def test_a_slice_means_the_workers_of_the_moment_when_the_pool_is_made() -> None:
    agent = FakeAgent("worker1", "worker2", "worker3")
    first, last = agent.pool("[:2]"), agent.pool("[2]")
    agent.loses("worker2")
    tasks = [first.submit(same, item) for item in range(2)]
    assert {name: call.args for name, call in agent.open().items()} == {"worker1": (0,)}
    agent.answers()
    agent.loses("worker1")
    task = last.submit(same, 2)
    agent.answers()
    assert [one.result(0) for one in (*tasks, task)] == [0, 1, 2]


@pytest.mark.parametrize("end", [FakeAgent.leaves, FakeAgent.stops])
def test_the_end_of_the_cluster_ends_all_tasks(end: Callable[[FakeAgent], None]) -> None:
    agent = FakeAgent("worker1")
    pool = agent.pool()
    tasks = [pool.submit(same, item) for item in range(3)]
    end(agent)
    for call in agent.open().values():
        call.set_exception(ShutdownError("notebook has shut down"))
    for task in tasks:
        with pytest.raises(ShutdownError):
            task.result(0)
    assert len(agent.calls) == 1
    for refused in lambda: pool.submit(same, 2), agent.pool:
        with pytest.raises(ShutdownError, match="this cluster is shut down and runs no more tasks; make a new one"):
            refused()


def test_a_task_runs_again_only_for_the_loss_of_its_own_worker_and_a_limited_number_of_times() -> None:
    agent = FakeAgent("worker1", "worker2", "worker3")
    pool = agent.pool()
    task = pool.put_task(PoolTask(same, (0,), {}, 1))
    agent.loses("worker1")
    assert [call.worker for call in agent.calls] == ["worker1", "worker2"] and not task.cancel()
    agent.loses("worker2")
    with pytest.raises(WorkerLostError, match="worker2 is lost"):
        task.result(0)
    other = pool.put_task(PoolTask(same, (0,), {}, 1))
    error = WorkerLostError("a worker that the function has called")
    error.__cause__ = RemoteError("worker3", "traceback")
    agent.open()["worker3"].set_exception(error)
    with pytest.raises(WorkerLostError, match="that the function has called"):
        other.result(0)
    assert len(agent.calls) == 3


def test_a_map_draws_no_more_than_a_few_items_ahead() -> None:
    agent = FakeAgent("worker1", "worker2")
    drawn: list[int] = []

    def drawing(item: int) -> int:
        drawn.append(item)
        return item

    results = agent.map(same, map(drawing, itertools.count()))
    assert drawn == [0, 1]  # one for each worker, at once
    assert results._prepare_next() and drawn == [*range(2 * AHEAD)]  # no result can be taken, and no more may be drawn
    taken = []
    for number in range(20):
        agent.answers()
        taken.append(next(results))
        assert len(drawn) <= number + 1 + 2 * AHEAD
    assert taken == [*range(20)]
    results.close()
    assert [*results] == [] and not agent.open()


def test_a_map_without_taken_results_goes_on_as_far_as_it_has_drawn() -> None:
    agent = FakeAgent("worker1")
    results = agent.map(same, itertools.count(), ordered=False)
    agent.calls[0].answer()
    assert (next(results), results._drawn) == (0, 2)
    agent.calls[1].answer()
    assert (next(results), results._drawn) == (1, 3)
    assert repr(results) == "<map: 2 results taken of 3 items>"


def test_results_come_in_order_or_as_they_come() -> None:
    for ordered, expected in (True, [0, 1, 2]), (False, [1, 0, 2]):
        agent = FakeAgent("worker1", "worker2")
        results = agent.map(same, range(3), ordered)
        agent.open()["worker2"].answer()
        taken = [] if ordered else [next(results)]  # in order, the result of worker1 comes first
        agent.open()["worker1"].answer()
        while len(taken) < 2:
            taken.append(next(results))
        taken.append(next(results) if agent.answers() else -1)
        assert taken == expected and [*results] == []


def test_the_first_error_ends_a_map_and_names_its_item() -> None:
    agent = FakeAgent("worker1", "worker2")
    results = agent.map(fails_at(1), range(9), ordered=True)
    results._prepare_next()  # draws as far as it may: items 2 to 7 wait
    first, bad = agent.calls
    bad.answer()
    first.answer()
    assert len(agent.calls) == 2  # no other item has begun
    assert next(results) == 0
    with pytest.raises(KeyError) as caught:
        next(results)
    assert caught.value.__notes__ == ["while cluster.map ran item 1: 1"]
    assert results._drawn == 2 * AHEAD and [*results] == []


def test_without_an_order_an_error_is_raised_at_once_and_running_items_are_cancelled() -> None:
    agent = FakeAgent("worker1", "worker2")
    results = agent.map(fails_at(1), range(9), ordered=False)
    agent.open()["worker2"].answer()
    with pytest.raises(KeyError):
        next(results)
    with pytest.raises(CallCancelled):
        agent.calls[0].wait()
    assert len([call for call in agent.calls if call.done()]) == len(agent.calls)


def test_items_that_cannot_be_sent_and_long_ones_are_named_in_short() -> None:
    agent = FakeAgent("worker1")
    with pytest.raises(SerializationError) as caught:
        [*agent.map(same, ["unsendable"])]
    assert caught.value.__notes__ == ["while cluster.map ran item 0: 'unsendable'"]

    class Unspeakable:
        def __repr__(self) -> str:
            raise ValueError("no")

    for item in "x" * 10_000, [*range(10_000)], Unspeakable():
        results = agent.map(len, [item])
        agent.calls[-1].set_exception(KeyError(1))
        with pytest.raises(KeyError) as raised:
            next(results)
        assert len(raised.value.__notes__[0]) < 150


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
def test_the_end_of_an_iterator_in_the_function_is_an_error_of_the_map(kind: type[Exception]) -> None:
    takes: list[Callable[[TaskMap[Any]], Any]] = [list, lambda results: asyncio.run(results._collect_results())]
    for take in takes:
        agent = FakeAgent("worker1")
        results = agent.map(same, [7, 8])
        agent.calls[0].set_exception(kind())
        with pytest.raises(RuntimeError, match=rf"{kind.__name__}\(\) while cluster.map ran item 0: 7") as caught:
            take(results)
        assert isinstance(caught.value.__cause__, kind)


def test_an_error_of_the_items_comes_as_it_is_after_the_results_before_it() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise OSError("the disk")

    agent = FakeAgent("worker1", "worker2")
    results = agent.map(same, items())
    agent.calls[0].answer()
    assert next(results) == 0
    with pytest.raises(OSError, match="the disk") as caught:
        next(results)
    assert not hasattr(caught.value, "__notes__") and [*results] == []


def test_a_lost_workers_item_runs_elsewhere_if_that_is_allowed() -> None:
    agent = FakeAgent("worker1", "worker2")
    results = agent.map(same, range(3), retries=1)
    agent.loses("worker1")
    agent.answers()
    assert next(results) == 0
    agent = FakeAgent("worker1")
    strict = agent.map(same, range(3))
    agent.loses("worker1")
    with pytest.raises(WorkerLostError) as caught:
        next(strict)
    hint = "with retries=1 an item of a lost worker runs once more, on another worker"
    assert caught.value.__notes__ == [f"while cluster.map ran item 0: 0; {hint}"]


def test_a_map_ends_with_its_last_reference_on_the_maintenance_thread() -> None:
    agent = FakeAgent("worker1")
    results = agent.map(same, range(9))
    (call,) = agent.calls
    del results
    gc.collect()
    assert not call.done()  # a finalizer takes no lock
    agent.released.get_nowait()  # read, and freed, by the maintenance thread
    assert call.done() and agent.released.empty()


def test_a_bar_counts_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class FakeBar:
        def __init__(self, total: int | None, unit: str, delay: float) -> None:
            self.total, self.n, self.closed = total, 0, False
            bars.append(self)

        def update(self) -> None:
            self.n += 1

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("tqdm.auto.tqdm", FakeBar)
    for items, total in ([7, 8], 2), (iter([7, 8]), 2), ((item for item in [7, 8]), None):
        agent = FakeAgent("worker1", "worker2")
        results = agent.map(same, items, shown=True)
        for call in agent.calls:
            call.answer()
        assert [*results] == [7, 8]
        assert (bars[-1].total, bars[-1].n, bars[-1].closed) == (total, 2, True)
    assert len(bars) == 3


@pytest.mark.parametrize(
    ("make", "kind", "told"),
    [
        (lambda agent: agent.map(3, [1]), TypeError, "cluster.map runs a function, its first argument; 3 is not one"),
        (
            lambda agent: agent.pool().submit("f"),
            TypeError,
            "cluster.submit runs a function, its first argument; 'f'",
        ),
        (lambda agent: agent.map(abs, 3), TypeError, "cluster.map takes its items from an iterable; 3 is not one"),
        (lambda agent: agent.map(abs, [1], retries=-1), ValueError, "retries=-1: an item runs again a whole number of"),
        (lambda agent: agent.map(abs, [1], retries=0.5), ValueError, "retries=0.5: an item runs again a whole number"),
        (lambda agent: agent.pool("worker7"), UnknownWorkerError, "name worker7: did you mean worker1"),
        (lambda agent: agent.pool("[1:]"), RuntimeError, "means no worker: there are worker1"),
        (lambda agent: agent.pool("[one]"), ValueError, "is no slice of the workers"),
    ],
)
def test_wrong_arguments_are_refused_with_a_sentence(make: Any, kind: type[Exception], told: str) -> None:
    agent = FakeAgent("worker1")
    with pytest.raises(kind, match=told.replace("[", "\\[")):
        make(agent)
    assert agent.calls == []


# -- on workers
@pytest.fixture(scope="module", params=["process", *long("kernel")])
def two(request: pytest.FixtureRequest) -> Iterator[rpcbench.Cluster]:
    with rpcbench.Cluster(2, kind=request.param) as cluster:
        yield cluster


@pytest.mark.process
def test_all_workers_take_part_and_results_keep_their_order(two: rpcbench.Cluster) -> None:
    found = [*two.map(lambda item: (item * item, os.getpid()), range(100), progress=False)]
    assert [square for square, _ in found] == [item * item for item in range(100)]
    assert {pid for _, pid in found} <= {two.pid(name) for name in two.workers}
    assert sorted(two.map(abs, range(-9, 0), ordered=False, progress=False)) == [*range(1, 10)]
    with two.executor("worker2") as executor:
        tasks = [executor.submit(os.getpid) for _ in range(5)]
        assert {task.result() for task in futures.as_completed(tasks)} == {two.pid("worker2")}


@pytest.mark.process
def test_event_loops_can_wait(two: rpcbench.Cluster) -> None:
    async def program() -> list[Any]:
        loop = asyncio.get_running_loop()
        whole = await two.map(abs, range(-5, 0), progress=False)
        each = [result async for result in two.map(lambda item: -item, range(3), progress=False)]
        with two.executor() as executor:
            power = await loop.run_in_executor(executor, pow, 2, 10)
        return [whole, each, power]

    assert asyncio.run(program()) == [[5, 4, 3, 2, 1], [0, -1, -2], 1024]


@pytest.mark.process
def test_errors_keep_their_type_their_remote_traceback_and_name_the_item(two: rpcbench.Cluster) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        [*two.map(lambda item: 1 // (item - 3), range(10), progress=False)]
    assert caught.value.__notes__ == ["while cluster.map ran item 3: 3"]
    assert isinstance(caught.value.__cause__, RemoteError) and "1 // (item - 3)" in str(caught.value.__cause__)
    with pytest.raises(SerializationError) as unsent:
        [*two.map(str, [1, threading.Lock(), 3], progress=False)]
    assert "while cluster.map ran item 1: <unlocked _thread.lock" in unsent.value.__notes__[-1]
    assert two.submit(abs, -1).result() == 1


BEGUN, CANCELLED = threading.Event(), threading.Event()  # of a worker that runs the two functions below


def until_cancelled(item: int) -> None:
    BEGUN.set()
    while not rpc.cancelled():
        time.sleep(0.001)
    CANCELLED.set()


def was_set(name: str) -> bool:
    """Wait for one of these events; then clear it for the next test."""
    event: threading.Event = globals()[name]
    found = event.wait(60)
    event.clear()
    return found


def begun(cluster: rpcbench.Cluster) -> bool:
    return all(cluster.rpc_sync(name, was_set, ("BEGUN",)) for name in cluster.workers)


def cancelled(cluster: rpcbench.Cluster) -> bool:
    return all(cluster.rpc_sync(name, was_set, ("CANCELLED",)) for name in cluster.workers)


@pytest.mark.process
def test_ctrl_c_cancels_the_items_that_run(two: rpcbench.Cluster) -> None:
    def press() -> None:
        begun(two)
        os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        [*two.map(until_cancelled, range(99), progress=False)]
    finger.join()
    assert cancelled(two)
    assert [*two.map(abs, [-1], progress=False)] == [1]


@pytest.mark.process
def test_a_dropped_map_and_a_cancelled_wait_cancel_the_items_that_run(two: rpcbench.Cluster) -> None:
    results = two.map(until_cancelled, range(99), progress=False)
    assert begun(two)
    del results
    gc.collect()
    assert cancelled(two)

    async def program() -> None:
        waiting = asyncio.ensure_future(two.map(until_cancelled, range(99), progress=False)._collect_results())
        assert await asyncio.to_thread(begun, two)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(program())
    assert cancelled(two)


def ends_once(item: int, at: int, mark: str) -> int:
    """End the worker at one item, unless the file `mark` exists."""
    if item == at:
        try:
            Path(mark).touch(exist_ok=False)
        except FileExistsError:
            return item
        os._exit(3)
    return item


@pytest.mark.process
@pytest.mark.parametrize("kind", ["process", *long("kernel")])
def test_a_worker_that_ends_loses_its_item_or_another_worker_runs_it(kind: str, tmp_path: Path, no_leaks: None) -> None:
    mark = str(tmp_path / "mark")
    with rpcbench.Cluster(2, kind=kind) as cluster:
        assert cluster.submit(abs, -1).result() == 1
        results = cluster.map(lambda item: ends_once(item, 7, mark), range(30), retries=1, progress=False)
        assert [*results] == [*range(30)] and len(cluster.lost) == 1
        Path(mark).unlink()
        with pytest.raises(WorkerLostError) as caught:
            [*cluster.map(lambda item: ends_once(item, 7, mark), range(30), progress=False)]
        assert caught.value.__notes__[-1].startswith("while cluster.map ran item 7: 7; with retries=1 ")
        with pytest.raises(WorkerLostError, match="no worker of all is left to run this task"):
            cluster.submit(abs, -1).result()


@pytest.mark.process
def test_workers_that_come_back_take_tasks_and_the_end_of_the_cluster_ends_those_that_wait(no_leaks: None) -> None:
    with rpcbench.Cluster(2) as cluster:
        assert cluster.submit(abs, -1).result() == 1
        cluster.kill("worker1")
        cluster.restart("worker1")
        with cluster.executor("worker1") as executor:
            assert executor.submit(os.getpid).result() == cluster.pid("worker1")
        held = [cluster.submit(until_cancelled, item) for item in range(5)]
        assert begun(cluster)
    for task in held:
        with pytest.raises(ShutdownError):
            task.result(60)
    with pytest.raises(ShutdownError, match="this cluster is shut down and runs no more tasks"):
        cluster.map(abs, [1])


# -- jobs
def last_job(agent: Any) -> dict[str, Any]:
    """The state, the counts and the error of the map that began last."""
    row = [*agent.part(JobLog).table().values()][-1]
    return {key: row[key] for key in ("name", "total", "running", "done", "failed", "cancelled", "state", "error")}


def test_a_map_is_a_job_that_counts_its_items_as_they_begin_and_end() -> None:
    agent = FakeAgent("worker1", "worker2")
    results = agent.map(same, range(5), ordered=False)
    counts = {"running": 2, "done": 0, "failed": 0, "cancelled": 0}
    row = {"name": "same", "total": 5, **counts, "state": "runs", "error": ""}
    assert last_job(agent) == row
    agent.open()["worker1"].answer()
    assert last_job(agent) == {**row, "running": 1, "done": 1}
    agent.open()["worker2"].answer()
    assert (next(results), last_job(agent)["done"]) == (0, 2)
    while last_job(agent)["done"] < 5:
        agent.answers()
        next(results)
    assert [*results] == [4] and last_job(agent) == {**row, "running": 0, "done": 5, "state": "done"}


@pytest.mark.parametrize("ordered", [True, False])
def test_a_failing_item_ends_the_job_with_its_error(ordered: bool) -> None:
    agent = FakeAgent("worker1")
    results = agent.map(fails_at(1), range(9), ordered=ordered)
    with pytest.raises(KeyError):
        while agent.answers():
            next(results)
    job = last_job(agent)
    assert (job["state"], job["done"], job["failed"], job["running"]) == ("failed", 1, 1, 0)
    assert job["error"] == "KeyError: 1, while cluster.map ran item 1: 1"


def test_items_that_ran_when_another_failed_are_cancelled_and_not_told_as_not_begun() -> None:
    agent = FakeAgent("worker1", "worker2", "worker3")
    results = agent.map(fails_at(0), range(9))
    agent.open()["worker1"].answer()
    with pytest.raises(KeyError):
        next(results)
    assert {"failed": 1, "done": 0, "running": 0, "cancelled": 2}.items() <= last_job(agent).items()
    results = agent.map(same, range(9))
    results.close()
    assert {"running": 0, "cancelled": 3, "state": "stopped"}.items() <= last_job(agent).items()


def test_an_item_that_was_never_sent_counts_as_failed_and_not_as_running() -> None:
    agent = FakeAgent("worker1")
    with pytest.raises(WorkerLostError):
        results = agent.map(same, range(3))
        agent.loses("worker1")
        next(results)
    assert (last_job(agent)["state"], last_job(agent)["running"]) == ("failed", 0)


def test_a_job_ends_with_its_map_however_that_ends() -> None:
    agent = FakeAgent("worker1")
    results = agent.map(same, range(9))
    results.close()
    assert last_job(agent)["state"] == "stopped"
    results = agent.map(same, range(9))
    del results
    gc.collect()
    assert last_job(agent)["state"] == "runs", "a finalizer takes no lock"
    agent.released.get_nowait()
    assert last_job(agent)["state"] == "stopped"
    results = agent.map(same, [1])
    agent.answers()
    assert next(results) == 1
    del results
    gc.collect()
    agent.released.get_nowait()
    assert last_job(agent)["state"] == "done", "all its results were taken"


def test_a_map_that_is_left_draws_its_bar_with_all_results_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    # A bar in a notebook outlives its map, as it refers to itself.
    bar = tqdm(total=9, file=screen, mininterval=1e6, ascii=True)
    monkeypatch.setattr(task_map, "make_bar", lambda *about: bar)
    agent = FakeAgent("worker1")
    results = agent.map(same, range(9), shown=True)
    for item in range(5):
        agent.answers()
        assert next(results) == item
    assert "5/9" not in screen.getvalue()
    del results
    gc.collect()
    agent.released.get_nowait()
    assert "5/9" in screen.getvalue()


def test_the_rate_of_a_job_that_has_ended_is_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now)
    job = FakeAgent().part(JobLog).begin_job("map", "same", 99, "item")
    for seconds in (*[1.0] * 20, *[2.0] * 20):  # the later half is half as fast
        now += seconds
        job.end_item()
    assert job.make_row()["rate"] == pytest.approx(1 / 2), "of the last ones, while it runs"
    job.end("stopped")
    assert job.make_row()["rate"] == pytest.approx(40 / 60)
    fit = FakeAgent().part(JobLog).begin_job("fit", "same", 99, "step")
    for _ in range(4):
        now += 1.0
        fit.end_item()
        fit.end_item(failed=True)
    assert fit.make_row()["rate"] == 1.0, "while it runs: of failed items none"
    fit.end("failed")
    assert fit.make_row()["rate"] == 1.0, "and in the mean of all"
    failed = FakeAgent().part(JobLog).begin_job("fit", "same", 99, "step")
    now += 1.0
    failed.end_item(failed=True)
    failed.end("failed")
    assert failed.make_row()["rate"] is None, "nothing was done"


def test_a_job_keeps_no_item_and_old_ones_make_room() -> None:
    agent = FakeAgent("worker1")
    for _ in range(MOST + 3):
        results = agent.map(same, [[]])
        agent.answers()
        assert [*results] == [[]]
    table = agent.part(JobLog).table()
    assert len(table) == MOST and [row["order"] for row in table.values()] == [*range(4, MOST + 4)]


def test_a_bar_in_a_narrow_cell_keeps_a_width_and_its_texts_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, box = SimpleNamespace(), SimpleNamespace()
    container = SimpleNamespace(layout=box, children=[None, SimpleNamespace(layout=layout), None])
    monkeypatch.setattr("tqdm.auto.tqdm", lambda **_: SimpleNamespace(container=container))
    jobs.make_bar(9, "item")
    assert (box.flex_flow, layout.flex, layout.min_width) == ("row wrap", "1 1 60px", "60px")
