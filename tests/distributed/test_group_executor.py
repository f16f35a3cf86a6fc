"""Executors that several threads use at once: one thread serves each, and no job is lost or runs twice."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from worlds import until

from rpcbench.distributed import executor, world
from rpcbench.distributed.executor import BlockingExecutor, Pending
from rpcbench.distributed.world import RankProcess, RendezvousResult

ROUNDS, THREADS = 300, 4


@pytest.fixture
def restless() -> Iterator[None]:
    """Python switches threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def crowded(number: int) -> tuple[Counter[int], set[int]]:
    """The jobs that a new executor has run, and on which threads, after all were put at once."""
    ran: list[tuple[int, int]] = []
    lane, together = BlockingExecutor(f"lane {number}", lambda: None), threading.Barrier(THREADS)

    def put(job: int) -> None:
        together.wait()
        lane.submit_job(lambda: ran.append((job, threading.get_ident())))

    threads = [threading.Thread(target=put, args=(job,)) for job in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(ran) == THREADS)
    lane.close()
    return Counter(job for job, _ in ran), {thread for _, thread in ran}


@pytest.mark.usefixtures("restless")
def test_each_job_runs_once_and_all_on_one_thread() -> None:
    for number in range(ROUNDS):
        jobs, threads = crowded(number)
        assert jobs == Counter(range(THREADS)) and len(threads) == 1, (number, jobs, threads)


def test_two_requests_for_a_new_executor_get_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world.World(RendezvousResult(c10d.HashStore(), 0, (RankProcess.of_this_process(),)), "gloo", 20)
    others: list[BlockingExecutor] = []

    class Slow(BlockingExecutor):
        """An executor that is requested again while it is being made."""

        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            monkeypatch.setattr(world, "BlockingExecutor", BlockingExecutor)
            others.append(here.executor_for("0"))

    monkeypatch.setattr(world, "BlockingExecutor", Slow)
    assert here.executor_for("0") is others[0] is here.executor_for("0")


def test_an_idle_thread_ends_and_the_next_job_starts_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "IDLE_SECONDS", 0.01)
    lane, ran, threads = BlockingExecutor("lane", lambda: None), [], []
    for job in range(3):
        pending = lane.submit_job(lambda: threads.append(threading.current_thread()))
        pending.call_when_done(lambda job=job: ran.append(job))  # type: ignore[misc]
        until(lambda: pending.done and not threads[-1].is_alive() and not lane.is_busy)  # noqa: B023
    assert ran == [0, 1, 2] and len(set(threads)) == 3


@pytest.mark.usefixtures("restless")
def test_no_job_is_lost_between_two_threads_of_an_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "IDLE_SECONDS", 0.0)
    lane, ran = BlockingExecutor("lane", lambda: None), []
    for job in range(ROUNDS):
        lane.submit_job(lambda job=job: ran.append(job))  # type: ignore[misc]
    until(lambda: len(ran) == ROUNDS)
    assert ran == [*range(ROUNDS)]


class Kept:
    """Stands for a tensor."""


def fails(kept: Kept) -> None:
    raise RuntimeError("as gloo would")


@pytest.mark.parametrize("job", [lambda kept: None, fails])
def test_a_job_that_has_run_keeps_nothing_alive(job: Any) -> None:
    lane, kept = BlockingExecutor("lane", lambda: None), Kept()
    gone = weakref.ref(kept)
    lane.submit_job(lambda kept=kept: job(kept))
    del kept

    def freed() -> bool:
        gc.collect()  # an error and the frames of its traceback are a cycle
        return gone() is None

    until(freed)
    assert lane._thread is not None, "it waits for the next job"
    lane.close()


def test_a_job_runs_in_the_autograd_modes_of_its_caller() -> None:
    lane = BlockingExecutor("lane", lambda: None)
    modes: list[tuple[bool, bool]] = []

    def look() -> None:
        modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    lane.submit_job(look)
    with torch.no_grad():
        lane.submit_job(look)
    with torch.inference_mode():
        last = lane.submit_job(look)
    until(lambda: last.done)
    assert modes == [(False, True), (False, False), (True, False)]
    lane.close()


def test_a_follower_is_called_once_before_or_after_the_job() -> None:
    told: list[str] = []
    pending = Pending(lambda: told.append("job"), lambda: None)
    pending.call_when_done(lambda: told.append("early"))
    pending.run_job()
    pending.call_when_done(lambda: told.append("late"))
    assert told == ["job", "early", "late"]
