"""A read lock that a call leaves free for long goes to another thread, whatever else goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from worlds import PATIENCE, until

from rpcbench.runtime.pool import LONG, Monitor


class Lock:
    """Given away only where it is still free, as the receiver's is."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.given = 0
        self.free = False
        self.lock = threading.Lock()

    def release(self) -> None:
        with self.lock:
            self.free = True
            self.monitor.released(self.release_to_pool)

    def acquire(self) -> bool:
        with self.lock:  # until the monitor knows: the next release comes after that
            free, self.free = self.free, False
            if free:
                self.monitor.acquired(self.release_to_pool)
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


def test_a_lock_that_is_free_for_long_is_given_away_once(monitor: Monitor) -> None:
    lock = Lock(monitor)
    for turn in range(3):
        lock.release()
        until(lambda turn=turn: lock.given == turn + 1)  # type: ignore[misc]


def test_one_that_is_acquired_in_time_is_not(monitor: Monitor) -> None:
    quick, slow = Lock(monitor), Lock(monitor)
    quick.release()
    assert quick.acquire()
    slow.release()
    until(lambda: slow.given == 1)
    assert quick.given == 0


def test_its_thread_sleeps_once_no_calls_come_and_looks_again_at_the_next_one(monitor: Monitor) -> None:
    for turn in range(3):
        lock = Lock(monitor)
        lock.release()
        assert monitor._looks
        until(lambda lock=lock: lock.given == 1)  # type: ignore[misc]
        until(lambda: not monitor._looks, f"sleep after call {turn}")


def test_one_beside_others_that_come_and_go_is_given_away(monitor: Monitor) -> None:
    """Whether it is left free before them or after them."""
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


def test_from_many_threads_none_is_forgotten(monitor: Monitor) -> None:
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


def test_one_that_cannot_be_given_away_does_not_end_the_watch(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_where_no_thread_can_be_started_the_next_one_tries_again() -> None:
    jobs: list[Callable[[], object]] = []

    def none(job: Callable[[], object]) -> None:
        jobs.append(job)
        raise RuntimeError("can't start new thread")

    made = Monitor(none)
    for turn in range(2):
        with pytest.raises(RuntimeError):
            made.start()
        assert len(jobs) == turn + 1


def test_once_closed_it_begins_nothing() -> None:
    jobs: list[Callable[[], object]] = []
    made = Monitor(jobs.append)
    made.close()
    made.start()
    Lock(made).release()
    assert not jobs
