"""Executors that several threads use at once: one thread serves each, and no job is lost or runs twice."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch.distributed as c10d
from worlds import until

from rpcbench.distributed import world
from rpcbench.distributed.executor import BlockingExecutor
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
        lane.put(lambda: ran.append((job, threading.get_ident())))

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
    here = world.World(RendezvousResult(c10d.HashStore(), 0, (RankProcess.here(),)), "gloo", 20)
    others: list[BlockingExecutor] = []

    class Slow(BlockingExecutor):
        """An executor that is requested again while it is being made."""

        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            monkeypatch.setattr(world, "BlockingExecutor", BlockingExecutor)
            others.append(here.executor("0"))

    monkeypatch.setattr(world, "BlockingExecutor", Slow)
    assert here.executor("0") is others[0] is here.executor("0")
