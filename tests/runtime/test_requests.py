"""Calls with a waiting caller: errors, Ctrl-C, an agent that stops meanwhile, many threads."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import nothing_left, until, world

from rpcbench.base.errors import RemoteError
from rpcbench.base.futures import Future
from rpcbench.protocol.node import Node
from rpcbench.rpc import remote, rpc_sync
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.locked_node import uninterrupted
from rpcbench.runtime.requests import PendingCalls
from rpcbench.wire.messages import EMPTY, Result


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 2) as made:
        yield made


def fail(text: str) -> None:
    raise ValueError(text)


def interrupt() -> int:
    """Send Ctrl-C to the thread that waits for this call."""
    os.kill(os.getpid(), signal.SIGINT)
    return 1


def test_calls_that_were_waited_for_leave_nothing(agents: list[Agent]) -> None:
    value = remote("worker1", abs, (-3,))
    assert rpc_sync("worker1", abs, (-2,)) == 2 and value.to_here() == 3
    del value
    nothing_left(agents)


def test_an_error_is_raised_with_its_cause_and_without_internal_frames(agents: list[Agent]) -> None:
    with pytest.raises(ValueError, match="no such thing") as caught:
        rpc_sync("worker1", fail, ("no such thing",))
    assert isinstance(caught.value.__cause__, RemoteError) and "in fail" in str(caught.value.__cause__)
    assert not any(frame.name == "raise_failure" for frame in traceback.extract_tb(caught.value.__traceback__))


def test_ctrl_c_during_the_arrival_of_a_result_is_not_lost(agents: list[Agent]) -> None:
    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            rpc_sync("worker1", interrupt)
            time.sleep(1)  # if it arrives after the result
        nothing_left(agents)
        until(lambda: not agents[0].calls.pending.has_pending())

    for _ in range(20):
        interrupted()
    assert rpc_sync("worker1", abs, (-2,)) == 2


def test_a_call_fails_if_its_agent_stops_as_it_begins(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    promise = PendingCalls.create_future

    def late(self: PendingCalls, *call: Any) -> Future[Any]:
        agents[0].stop()
        return promise(self, *call)

    monkeypatch.setattr(PendingCalls, "create_future", late)
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


def test_the_fast_path_is_not_taken_where_ctrl_c_could_interrupt_it(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This concerns the main thread, which delivers messages that a stepper held and sends late results."""
    steps: list[str] = []
    for step in ("fast_resolve", "fast_answer"):
        monkeypatch.setattr(Node, step, lambda *_, step=step: steps.append(step))
    assert agents[0].dispatcher._resolve_fast(1, 0, Result(1, (), None, EMPTY)) is False
    agents[0].reply(1, 1, Result(1, (), None, EMPTY))
    assert steps == []
    with uninterrupted:
        agents[0].dispatcher._resolve_fast(1, 0, Result(1, (), None, EMPTY))
        agents[0].reply(1, 1, Result(1, (), None, EMPTY))
    assert steps == ["fast_resolve", "fast_answer"]


def test_many_threads_can_call_at_once(agents: list[Agent]) -> None:
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
