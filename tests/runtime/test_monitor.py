"""The monitor gives a read lock that is free for long to another thread, under any load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from worlds import PATIENCE, until

from rpcbench.runtime import pool
from rpcbench.runtime.pool import LONG, Monitor


class Lock:
    """A read lock as in the receiver: it is given away only if it is still free."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.given = 0
        self.free = False
        self.lock = threading.Lock()

    def release(self) -> None:
        with self.lock:
            self.free = True
            self.monitor.lock_released(self.release_to_pool)

    def acquire(self) -> bool:
        with self.lock:  # held until the monitor knows, before the next release
            free, self.free = self.free, False
            if free:
                self.monitor.lock_acquired(self.release_to_pool)
        return free

    def release_to_pool(self) -> None:
        self.given += self.acquire()


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    threads: list[threading.Thread] = []

    def spawn(job: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=job))
        threads[-1].start()

    made = Monitor(spawn)
    made.start()
    yield made
    made.close()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert len(threads) == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the monitor sees, which stands still."""
    now = [time.monotonic()]
    monkeypatch.setattr(pool, "time", SimpleNamespace(sleep=time.sleep, monotonic=lambda: now[0]))
    return now


def test_a_read_lock_that_is_free_for_long_is_given_to_the_pool_once(monitor: Monitor) -> None:
    lock = Lock(monitor)
    for turn in range(3):
        lock.release()
        until(lambda turn=turn: lock.given == turn + 1)  # type: ignore[misc]


def test_a_read_lock_that_is_acquired_in_time_is_not_given_to_the_pool(clock: list[float], monitor: Monitor) -> None:
    quick, slow = Lock(monitor), Lock(monitor)
    quick.release()
    assert quick.acquire()
    slow.release()
    clock[0] += 1.0
    until(lambda: slow.given == 1)
    assert quick.given == 0


def test_the_monitor_sleeps_without_free_locks_and_looks_again_at_the_next_release(
    clock: list[float], monitor: Monitor
) -> None:
    for turn in range(3):
        lock = Lock(monitor)
        lock.release()
        until(lambda: monitor._looks)
        clock[0] += 1.0
        until(lambda lock=lock: lock.given == 1)  # type: ignore[misc]
        until(lambda: not monitor._looks, f"sleep after call {turn}")


def test_a_free_read_lock_is_given_to_the_pool_while_others_are_acquired_and_released(monitor: Monitor) -> None:
    """It may be released before them or after them."""
    busy, waits = Lock(monitor), Lock(monitor)
    for first, second in ((busy, waits), (waits, busy)):
        before, deadline = waits.given, time.monotonic() + PATIENCE
        first.release()
        second.release()
        while waits.given == before and time.monotonic() < deadline:
            busy.acquire()
            busy.release()
        assert waits.given == before + 1
        busy.acquire()


def test_no_free_read_lock_of_many_threads_is_forgotten(monitor: Monitor) -> None:
    locks = [Lock(monitor) for _ in range(8)]
    wrong: list[str] = []

    def work(lock: Lock) -> None:
        for turn in range(200):
            lock.release()
            if turn % 3:
                lock.acquire()
                continue
            deadline = time.monotonic() + PATIENCE
            while lock.free:
                if time.monotonic() > deadline:
                    wrong.append("forgotten")
                    return
                time.sleep(LONG * (turn % 17))  # now and then long enough for the monitor to sleep

    threads = [threading.Thread(target=work, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_monitor_goes_on_after_an_error_of_a_read_lock(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    class Fails(Lock):
        def release_to_pool(self) -> None:
            self.acquire()
            raise RuntimeError("can't start new thread")

    fails, lock = Fails(monitor), Lock(monitor)
    fails.release()
    until(lambda: len(told) == 1, "a word about what happened")
    lock.release()
    until(lambda: lock.given == 1)


def test_a_monitor_whose_thread_could_not_start_can_be_started_again() -> None:
    jobs: list[Callable[[], object]] = []

    def none(job: Callable[[], object]) -> None:
        jobs.append(job)
        raise RuntimeError("can't start new thread")

    made = Monitor(none)
    for turn in range(2):
        with pytest.raises(RuntimeError):
            made.start()
        assert len(jobs) == turn + 1


def test_a_closed_monitor_starts_no_thread() -> None:
    jobs: list[Callable[[], object]] = []
    made = Monitor(jobs.append)
    made.close()
    made.start()
    Lock(made).release()
    assert not jobs
