"""Several futures at once: one thread waits for all of them, and opens each answer itself."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from rpcbench.agent.stacks import threads
from rpcbench.words import futures as futures_
from rpcbench.words.futures import Future, Waiter
from rpcbench.words.several import collect_all, settle_all, wait_all

pytestmark = pytest.mark.timeout(60)
Later = list[Callable[[], None]]


def fail(error: Exception) -> Callable[[], Any]:
    def answer() -> None:
        raise error

    return answer


def here(job: Callable[[], None]) -> None:
    job()


def waiting(job: Callable[[], Any], *futures: Future[Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that waits for these now, and what comes of it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(job())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not all(future._waiters for future in futures):
        pass
    return thread, found


def test_who_waits_for_all_opens_every_answer_itself() -> None:
    made: list[Future[threading.Thread]] = [Future() for _ in range(3)]
    later: Later = []
    thread, found = waiting(lambda: wait_all(made), *made)
    for future in reversed(made):
        assert future.deliver(threading.current_thread, later.append)
    thread.join(10)
    assert found == [[thread] * 3] and later == [] and not any(future._waiters for future in made)


def give(made: list[Future[int]], numbers: list[int]) -> None:
    for number in numbers:
        made[number].deliver(partial(int, number), here)


def test_answers_that_come_together_are_all_seen() -> None:
    """A bell that has rung is rung again, by two at once; and answers come while none is waited for."""
    for seed in range(200):
        made: list[Future[int]] = [Future() for _ in range(4)]
        order = random.Random(seed).sample(range(4), 4)
        givers = [threading.Thread(target=give, args=(made, own)) for own in (order[:2], order[2:])]
        for giver in givers:
            giver.start()
        assert wait_all(made) == [0, 1, 2, 3]
        for giver in givers:
            giver.join(10)


def test_the_first_error_ends_the_wait_and_nobody_is_waited_for_any_more() -> None:
    made: list[Future[int]] = [Future() for _ in range(3)]
    thread, found = waiting(lambda: wait_all(made), *made)
    made[1].deliver(fail(KeyError("gone")), here)
    thread.join(10)
    assert isinstance(found[0], KeyError) and not made[0]._waiters and not made[2]._waiters
    later: Later = []
    assert made[0].deliver(lambda: 3, later.append) and len(later) == 1, "somebody else opens it"


def test_one_that_has_failed_before_is_raised_at_once() -> None:
    left: Future[int] = Future()
    gone: Future[int] = Future()
    gone.set_exception(KeyError("gone"))
    with pytest.raises(KeyError, match="gone"):
        wait_all([left, gone])


def test_an_error_is_raised_while_another_thread_opens_the_last_answer() -> None:
    opens, goes_on = threading.Event(), threading.Event()

    def slow() -> int:
        opens.set()
        goes_on.wait(10)
        return 1

    made: list[Future[int]] = [Future() for _ in range(2)]
    other = threading.Thread(target=lambda: made[0].deliver(slow, here))
    other.start()
    assert opens.wait(10)
    thread, found = waiting(lambda: wait_all(made), *made)
    made[1].deliver(fail(KeyError("gone")), here)
    thread.join(10)
    assert isinstance(found[0], KeyError)
    goes_on.set()
    other.join(10)
    assert made[0].value() == 1


def test_who_is_interrupted_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was woken to open one, so nobody else will."""
    made: list[Future[int]] = [Future() for _ in range(2)]
    later: Later = []

    def acquired(bell: threading.Lock, timeout: float | None = None) -> bool:
        made[0].deliver(lambda: 3, later.append)
        raise KeyboardInterrupt

    monkeypatch.setattr(futures_, "acquired", acquired)
    with pytest.raises(KeyboardInterrupt):
        wait_all(made)
    assert later == [] and made[0].outcome() == (3, None) and not made[1]._waiters


def test_an_answer_that_nobody_was_told_of_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after a look, and before the wait; who delivers it leaves it to the first one who asks."""
    attend = Future.attend

    def late(self: Future[Any], waiter: Waiter) -> bool:
        if type(self) is Future:
            self.deliver(lambda: 3, lambda job: None, lazy=True)
        return attend(self, waiter)

    monkeypatch.setattr(Future, "attend", late)
    made: list[Future[int]] = [Future() for _ in range(3)]
    assert wait_all(made[:2]) == [3, 3] and made[2].wait() == 3


def test_the_wait_can_be_broken_and_is_seen_to_be_for_all() -> None:
    made: list[Future[int]] = [Future() for _ in range(2)]
    thread, found = waiting(lambda: wait_all(made), *made)
    (doing,) = [doing for doing in threads() if doing.thread == thread.ident]
    assert doing.future is not None and doing.future.origins() == made
    assert doing.future.break_wait(doing.thread, KeyError("a circle"))
    thread.join(10)
    assert isinstance(found[0], KeyError) and not any(future._waiters for future in made)


def test_a_long_wait_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures_, "_LONG", 0.01)
    told: list[float] = []
    made: list[Future[int]] = [Future(on_long=told.append) for _ in range(2)]
    thread, found = waiting(lambda: wait_all(made), *made)
    while not told:
        pass
    for future in made:
        future.deliver(lambda: 1, here)
    thread.join(10)
    assert found == [[1, 1]]


def test_a_pool_thread_says_once_that_it_waits() -> None:
    said: list[str] = []

    class Waits:
        def __enter__(self) -> None:
            said.append("waits")

        def __exit__(self, *_: object) -> None:
            said.append("goes on")

    made: list[Future[int]] = [Future() for _ in range(2)]

    def run() -> list[int]:
        threading.current_thread().waiting = Waits  # type: ignore[attr-defined]
        return wait_all(made)

    thread, found = waiting(run, *made)
    for number, future in enumerate(made):
        future.deliver(lambda number=number: number, here)
    thread.join(10)
    assert found == [[0, 1]] and said == ["waits", "goes on"]


def test_torchs_own_are_waited_for_with_ours() -> None:
    theirs: torch.futures.Future[int] = torch.futures.Future()
    ours: Future[int] = Future()
    timer = threading.Timer(0.05, lambda: (theirs.set_result(2), ours.deliver(lambda: 1, here)))
    timer.start()
    assert wait_all([ours, theirs]) == [1, 2]
    timer.join()


def test_settling_waits_for_those_after_an_error() -> None:
    made: list[Future[int]] = [Future() for _ in range(2)]
    made[0].set_exception(KeyError("gone"))
    thread, found = waiting(lambda: settle_all(made), made[1])
    assert not found
    made[1].deliver(lambda: 1, here)
    thread.join(10)
    assert isinstance(found[0], KeyError)


def test_collecting_nothing_is_done_at_once() -> None:
    assert collect_all([]).wait() == [] and wait_all([]) == []
