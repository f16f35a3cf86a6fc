"""Calls whose caller does nothing but wait: a future is made of one only where its reply takes time."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import nothing_left, until, world

from rpcbench.agent.core import Agent
from rpcbench.agent.interrupts import uninterrupted
from rpcbench.agent.requests import PendingCalls, SyncCall
from rpcbench.protocol import short
from rpcbench.rpc import remote, rpc_sync
from rpcbench.wire.messages import EMPTY, Result
from rpcbench.words.errors import RemoteError
from rpcbench.words.futures import Future


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 2) as made:
        yield made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the calls that futures have been made of."""
    numbers: list[int] = []
    make = PendingCalls._future

    def counting(self: PendingCalls, receive: Any, number: int) -> Future[Any]:
        numbers.append(number)
        return make(self, receive, number)

    monkeypatch.setattr(PendingCalls, "_future", counting)
    return numbers


def _without(made: list[int], call: Callable[[], object]) -> Callable[[], bool]:
    """Whether a call has made no future: not the first one does, nor each on a busy machine."""

    def called() -> bool:
        before = len(made)
        call()
        return len(made) == before

    return called


def fail(text: str) -> None:
    raise ValueError(text)


def interrupt() -> int:
    """Ctrl-C for the thread that waits for this."""
    os.kill(os.getpid(), signal.SIGINT)
    return 1


# -- one after the other
def test_a_call_that_is_answered_soon_makes_no_future(agents: list[Agent], made: list[int]) -> None:
    value = remote("worker1", abs, (-3,))
    until(_without(made, lambda: rpc_sync("worker1", abs, (-2,))), "a call without a future")
    until(_without(made, value.to_here), "a fetch without a future")
    assert rpc_sync("worker1", abs, (-2,)) == 2 and value.to_here() == 3
    del value
    nothing_left(agents)


def test_one_that_takes_its_time_makes_one(agents: list[Agent], made: list[int]) -> None:
    until(_without(made, lambda: rpc_sync("worker1", abs, (-2,))))
    assert not _without(made, lambda: rpc_sync("worker1", time.sleep, (0.1,)))()
    nothing_left(agents)


def test_an_error_is_raised_as_it_came(agents: list[Agent], made: list[int]) -> None:
    def failing() -> None:
        with pytest.raises(ValueError, match="no such thing") as caught:
            rpc_sync("worker1", fail, ("no such thing",))
        assert isinstance(caught.value.__cause__, RemoteError) and "in fail" in str(caught.value.__cause__)
        assert not any(frame.name == "reraise" for frame in traceback.extract_tb(caught.value.__traceback__))

    until(_without(made, failing))


def test_ctrl_c_while_the_answer_comes_is_not_lost(agents: list[Agent], made: list[int]) -> None:
    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            rpc_sync("worker1", interrupt)
            time.sleep(1)  # where it came after the answer
        nothing_left(agents)
        assert not agents[0].pending.due()

    for _ in range(20):
        interrupted()
    assert rpc_sync("worker1", abs, (-2,)) == 2


def test_an_agent_that_stops_as_a_call_begins_ends_it(
    agents: list[Agent], made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    until(_without(made, lambda: rpc_sync("worker1", abs, (-2,))))
    sync_call = PendingCalls.sync_call

    def late(self: PendingCalls, *call: Any) -> SyncCall:
        agents[0].stop()
        return sync_call(self, *call)

    monkeypatch.setattr(PendingCalls, "sync_call", late)
    raised: list[type[BaseException]] = []

    def calling() -> None:
        try:
            agents[0].ask("worker1", abs, (-2,), timeout=0)
        except Exception as error:
            raised.append(type(error))

    thread = threading.Thread(target=calling, daemon=True)
    thread.start()
    thread.join(20)
    assert raised == [RuntimeError]


def test_where_ctrl_c_could_come_between_two_steps_the_general_way_is_taken(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the main thread, which delivers what a debugger has held, and answers what a callback has waited for."""
    steps: list[str] = []
    for step in ("resolve", "answer"):
        monkeypatch.setattr(short, step, lambda *_, step=step: steps.append(step))
    assert agents[0]._arrivals._settle(1, 0, Result(1, (), None, EMPTY)) is False
    agents[0].reply(1, 1, Result(1, (), None, EMPTY))
    assert steps == []
    with uninterrupted:
        agents[0]._arrivals._settle(1, 0, Result(1, (), None, EMPTY))
        agents[0].reply(1, 1, Result(1, (), None, EMPTY))
    assert steps == ["resolve", "answer"]


def test_many_threads_call_at_once(agents: list[Agent]) -> None:
    wrong: list[int] = []

    def calls(number: int) -> None:
        wrong.extend(i for i in range(100) if rpc_sync("worker1", abs, (-number - i,)) != number + i)

    threads = [threading.Thread(target=calls, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    calls(9000)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads) and wrong == []
    nothing_left(agents)


# -- a reply and a future that have to find each other
def _call() -> tuple[SyncCall, Future[Any]]:
    future: Future[Any] = Future()
    return SyncCall(7, lambda waiting: None, lambda number: future, ()), future


def _later(job: Callable[[], None]) -> None:
    raise AssertionError("a thread waits for it")


@pytest.mark.parametrize("early", [False, True])
def test_the_future_has_the_reply_whichever_comes_first(early: bool) -> None:
    call, future = _call()
    assert call.waits()
    if early:
        call.deliver(lambda: 3, _later, True)
    assert call.future() is future and call.follows(future) and not call.follows(Future())
    if not early:
        call.deliver(lambda: 3, _later, True)
    assert not call.waits() and call.wait() == future.wait() == 3


def test_a_thread_that_waits_long_is_woken() -> None:
    call, future = _call()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call.wait()))
    thread.start()
    until(lambda: bool(future._waiters), "the thread to wait")
    call.deliver(lambda: 3, _later, True)
    thread.join(20)
    assert found == [3]


def test_a_reply_that_no_thread_waits_for_any_more_is_opened_where_it_must_be() -> None:
    """It may bring RRefs."""
    call, _ = _call()
    opened: list[int] = []
    call.deliver(lambda: opened.append(1), lambda job: job(), False)
    call.cancel()
    assert opened == [1]
