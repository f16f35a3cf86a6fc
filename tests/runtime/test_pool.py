"""The thread pool for functions of users: its limit, waits that make room, reuse of threads, and its end."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from worlds import PATIENCE, until

from rpcbench.base.futures import release_slot
from rpcbench.runtime import pool as module
from rpcbench.runtime.pool import Pool


@pytest.fixture
def pool(no_leaks: None) -> Iterator[Pool]:
    made = Pool("test", 2, lambda: None)
    yield made
    made.close(PATIENCE)


class Gate:
    """A job that sets `running` when it runs, and runs until `go` is set."""

    def __init__(self, pool: Pool | None = None, waits: bool = False) -> None:
        self.running, self.over = threading.Event(), threading.Event()
        self.go = threading.Event()
        self._waits = waits
        if pool is not None:
            pool.submit_call(self)

    def __call__(self) -> None:
        self.running.set()
        if self._waits:
            with release_slot():
                assert self.go.wait(PATIENCE)
        else:
            assert self.go.wait(PATIENCE)
        self.over.set()

    def runs(self) -> bool:
        return self.running.wait(PATIENCE)

    def ends(self) -> bool:
        self.go.set()
        return self.over.wait(PATIENCE)


def figures(pool: Pool) -> dict[str, int]:
    with pool._lock:
        return {
            "threads": len(pool._threads), "idle": len(pool._idle), "running": pool.busy, "queued": len(pool._queue)
        }  # fmt: skip


def test_a_pool_runs_no_more_functions_than_its_limit_and_the_others_in_order(pool: Pool) -> None:
    first, second, third, fourth = (Gate(pool) for _ in range(4))
    assert first.runs() and second.runs()
    assert figures(pool) == {"threads": 2, "idle": 0, "running": 2, "queued": 2}
    assert first.ends() and third.runs()
    assert not fourth.running.is_set()
    assert second.ends() and fourth.runs()
    assert third.ends() and fourth.ends()
    until(lambda: figures(pool) == {"threads": 2, "idle": 2, "running": 0, "queued": 0})


def test_jobs_of_the_runtime_do_not_queue_behind_functions(pool: Pool) -> None:
    gates = [Gate(pool) for _ in range(3)]
    done = threading.Event()
    pool.spawn_job(done.set)
    assert done.wait(PATIENCE)
    assert all(gate.ends() for gate in gates)


def test_a_waiting_function_makes_room_for_another(pool: Pool) -> None:
    waiting = [Gate(pool, waits=True) for _ in range(2)]
    more = [Gate(pool, waits=True) for _ in range(5)]
    assert all(gate.runs() for gate in waiting + more)
    until(lambda: figures(pool)["running"] == 0)
    busy = [Gate(pool), Gate(pool), Gate(pool)]
    assert busy[0].runs() and busy[1].runs()
    assert figures(pool)["queued"] == 1
    assert all(gate.ends() for gate in waiting + more)
    assert not busy[2].running.is_set(), "functions that have waited count again"
    assert all(gate.ends() for gate in busy)
    until(lambda: figures(pool)["running"] == 0)


def test_a_waiting_job_of_the_runtime_makes_no_room(pool: Pool) -> None:
    patient = Gate(waits=True)
    pool.spawn_job(patient)
    assert patient.runs()
    gates = [Gate(pool) for _ in range(3)]
    assert gates[0].runs() and gates[1].runs()
    assert figures(pool)["running"] == 2 and not gates[2].running.is_set()
    assert patient.ends() and all(gate.ends() for gate in gates)


def test_a_function_that_waits_again_makes_no_room_beyond_the_limit(pool: Pool) -> None:
    begun, first, again, second = (threading.Event() for _ in range(4))

    def waits_twice() -> None:
        with release_slot():
            begun.set()
            assert first.wait(PATIENCE)
        again.set()
        with release_slot():
            assert second.wait(PATIENCE)

    pool.submit_call(waits_twice)
    assert begun.wait(PATIENCE)
    gates = [Gate(pool) for _ in range(3)]
    assert gates[0].runs() and gates[1].runs()
    first.set()
    assert again.wait(PATIENCE)
    until(lambda: pool.waiting == 1, "the second wait")
    assert figures(pool) == {**figures(pool), "running": 2, "queued": 1}
    second.set()
    assert all(gate.ends() for gate in gates)


def test_a_function_in_a_reported_wait_takes_no_room_and_can_wait_in_place(pool: Pool) -> None:
    found: queue.Queue[bool] = queue.Queue()

    def asks() -> None:
        worker = pool.current_thread()
        with worker.waiting():
            gates = [Gate(pool) for _ in range(2)]
            assert all(gate.runs() for gate in gates)
            found.put(worker.may_wait())
            assert all(gate.ends() for gate in gates)

    pool.submit_call(asks)
    assert found.get(timeout=PATIENCE)


def test_a_function_can_wait_in_place_only_while_there_is_room_for_another(pool: Pool) -> None:
    found: queue.Queue[bool] = queue.Queue()

    def asks() -> None:
        found.put(pool.current_thread().may_wait())

    pool.submit_call(asks)
    assert found.get(timeout=PATIENCE)
    other = Gate(pool)
    assert other.running.wait(PATIENCE)
    pool.submit_call(asks)
    assert not found.get(timeout=PATIENCE), "two functions run, which is the limit"
    other.go.set()


def test_a_thread_that_receives_cannot_wait_in_place(pool: Pool) -> None:
    found: queue.Queue[bool] = queue.Queue()

    def asks() -> None:
        worker = pool.current_thread()
        worker.receives = deque()
        found.put(worker.may_wait())
        worker.receives = None

    pool.spawn_job(asks)
    assert not found.get(timeout=PATIENCE)


def test_a_pool_shortens_the_switch_interval_and_never_lengthens_it(pool: Pool) -> None:
    """The interval may be shorter already, and no pool makes it longer."""
    assert sys.getswitchinterval() <= 0.00011
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.00005)
        Pool("other", 1, lambda: None).close(0.0)
        assert sys.getswitchinterval() == pytest.approx(0.00005, rel=0.05)
    finally:
        sys.setswitchinterval(before)


def test_the_latest_idle_thread_is_used_first(pool: Pool) -> None:
    first, second = Gate(pool), Gate(pool)
    assert first.runs() and second.runs()
    for number, gate in enumerate((first, second), 1):
        assert gate.ends()
        until(lambda number=number: figures(pool)["idle"] == number)
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    for _ in range(3):
        pool.spawn_job(lambda: names.put(threading.current_thread().name))
        until(lambda: figures(pool)["idle"] == 2)
    assert [names.get() for _ in range(3)] == ["test-2"] * 3


def test_idle_threads_end_after_a_while(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.01)
    pool.spawn_job(lambda: None)
    until(lambda: figures(pool)["threads"] == 0)


def test_a_job_that_is_given_to_a_thread_at_its_timeout_runs(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that wants to end may be taken already: then it waits for its job, for as long as that takes."""
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.2)
    wants, taken = threading.Event(), threading.Event()
    retire, give = pool.retire_thread, module.PoolThread.give_job

    def retires(thread: module.PoolThread) -> bool:
        wants.set()
        assert taken.wait(PATIENCE)
        return retire(thread)

    def late(thread: module.PoolThread, job: Callable[[], object] | None) -> None:
        taken.set()
        give(thread, job)

    monkeypatch.setattr(pool, "retire_thread", retires)
    monkeypatch.setattr(module.PoolThread, "give_job", late)
    pool.spawn_job(lambda: None)
    assert wants.wait(PATIENCE)
    done = threading.Event()
    pool.spawn_job(done.set)
    assert done.wait(PATIENCE)


@pytest.mark.parametrize("error", [ValueError("oops"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_in_a_job_is_reported_and_the_next_jobs_run(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    told: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))

    def fail() -> None:
        raise error

    held = Gate(pool)
    for _ in range(5):
        pool.submit_call(fail)
    gates = [Gate(pool), Gate(pool)]
    assert gates[0].runs() and held.ends() and gates[1].runs() and all(gate.ends() for gate in gates)
    pool.spawn_job(fail)
    until(lambda: told == [error] * 6 and figures(pool)["running"] == 0)


def test_each_thread_is_prepared_once() -> None:
    prepared: list[str] = []
    pool = Pool("test", 2, lambda: prepared.append(threading.current_thread().name))
    for _ in range(5):
        pool.spawn_job(lambda: None)
        until(lambda: figures(pool)["idle"] == figures(pool)["threads"])
    pool.close(PATIENCE)
    assert prepared == ["test-1"]


def test_a_closed_pool_ends_its_idle_threads_and_drops_later_jobs(pool: Pool) -> None:
    gate = Gate(pool)
    assert gate.runs() and gate.ends()
    pool.close(PATIENCE)
    pool.spawn_job(lambda: pytest.fail("nothing runs any more"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-")]


def test_a_closing_pool_waits_for_all_busy_threads_together_up_to_its_patience(pool: Pool) -> None:
    gates = [Gate() for _ in range(20)]
    for gate in gates:
        pool.spawn_job(gate)
    assert all(gate.runs() for gate in gates)
    begin = time.monotonic()
    pool.close(patience=0.3)
    assert 0.3 <= time.monotonic() - begin < 4, "20 threads one after the other would take 6 s"
    assert all(gate.ends() for gate in gates)


def test_a_pool_can_close_while_jobs_arrive() -> None:
    for _ in range(50):
        pool = Pool("test", 2, lambda: None)
        begun = threading.Event()

        def pour(pool: Pool = pool, begun: threading.Event = begun) -> None:
            for _ in range(20):
                pool.spawn_job(lambda: None)
                begun.set()

        thread = threading.Thread(target=pour)
        thread.start()
        begun.wait(PATIENCE)
        pool.close(PATIENCE)
        thread.join()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("test-")])


def test_a_function_runs_on_the_next_free_thread_if_no_thread_can_start(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    begun, go = threading.Event(), threading.Event()
    pool.spawn_job(lambda: (begun.set(), go.wait(PATIENCE)))
    assert begun.wait(PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(RuntimeError):
            pool.spawn_job(lambda: None)
        submitted, queued = Gate(pool), Gate()
        assert pool.take_place(queued) and pool.take_place(queued) and not pool.take_place(queued)
        pool.give_back_place()  # the place of a function that ran on a receive loop
        assert figures(pool) == {"threads": 1, "idle": 0, "running": 1, "queued": 2}
        pool.give_back_place()
    assert figures(pool)["running"] == 0
    go.set()
    submitted.go.set()
    queued.go.set()
    assert submitted.runs() and queued.runs()
    until(lambda: figures(pool) == {"threads": 1, "idle": 1, "running": 0, "queued": 0})
