"""Calls that end early: by cancel, deadline, Ctrl-C or the loss of the caller; and the effect on the callee."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import config, nothing_left, until, world

from rpcbench.base.errors import CallCancelled, RpcTimeoutError
from rpcbench.rpc import RRef, cancelled, remote, rpc_sync
from rpcbench.rpc.init import start_agent
from rpcbench.runtime.agent import Agent

_gates: list[threading.Event] = []
_ran: list[str] = []
_seen: list[bool] = []


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    """Workers with one thread each, so a second call has to queue."""
    _gates.clear(), _ran.clear(), _seen.clear()
    with world(tmp_path, 3, threads=1) as made:
        yield made
        for gate in _gates:
            gate.set()


def gate() -> int:
    _gates.append(threading.Event())
    return len(_gates) - 1


def hold(number: int) -> None:
    _ran.append("hold")
    _gates[number].wait(20)


def run(name: str, *_: Any) -> str:
    _ran.append(name)
    return name


def type_of(value: object) -> str:
    return type(value).__name__


def until_cancelled() -> str:
    """Run until the call is cancelled."""
    _ran.append("asks")
    while not cancelled():
        _gates[0].wait(0.01)
    _seen.append(True)
    return "late"


def busy(agent: Agent) -> threading.Event:
    """Take the one thread of worker1; set the event to free it."""
    number = gate()
    agent.call("worker1", hold, (number,))
    until(lambda: "hold" in _ran)
    return _gates[number]


# -- in the queue
def test_a_call_that_is_cancelled_in_the_queue_never_runs_and_releases_its_arguments(agents: list[Agent]) -> None:
    free = busy(agents[0])
    rref = remote("worker2", list)
    queued = agents[0].call("worker1", run, ("queued", torch.ones(1 << 16), rref))
    until(lambda: len(agents[1].machine._node.calls.serving) == 2)
    assert queued.cancel()
    with pytest.raises(CallCancelled, match="run was cancelled by its caller"):
        queued.wait()
    until(lambda: len(agents[1].machine._node.calls.serving) == 1, "its arguments to be let go, while it is queued")
    free.set()
    assert rpc_sync("worker1", run, ("next",)) == "next"
    assert _ran == ["hold", "next"]
    del rref
    nothing_left(agents)


def test_a_call_whose_deadline_passes_in_the_queue_never_runs(agents: list[Agent]) -> None:
    free = busy(agents[0])
    with pytest.raises(RpcTimeoutError, match="run on worker1"):
        rpc_sync("worker1", run, ("queued",), timeout=0.1)
    rref = remote("worker1", run, ("made",), timeout=0.1)
    creation = rref._creation
    assert creation is not None
    until(creation.done)
    with pytest.raises(RpcTimeoutError, match=r"creation via rpc\.remote"):
        rref.to_here()
    until(lambda: not agents[0].machine._node.delivery.pairs[1].has_unacknowledged(), "worker1 to have both cancels")
    free.set()
    assert rpc_sync("worker1", run, ("next",)) == "next"
    assert _ran == ["hold", "next"]
    del rref, creation
    nothing_left(agents)


def test_a_call_that_expires_in_the_queue_never_runs_even_without_a_cancel(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Cancel message of the caller is late."""
    free = busy(agents[0])
    monkeypatch.setattr(agents[1].machine._node.calls, "cancel_requested", lambda source, call: None)
    with pytest.raises(RpcTimeoutError):
        rpc_sync("worker1", run, ("queued",), timeout=0.1)
    serving = agents[1].machine._node.calls.serving
    until(lambda: len(serving) == 2)
    deadline = min(call.until for call in serving.values() if call.until is not None)
    until(lambda: agents[1].links.interceptors.clock() > deadline)  # which counts from the arrival of the call
    free.set()
    assert rpc_sync("worker1", run, ("next",)) == "next"
    assert _ran == ["hold", "next"]
    nothing_left(agents)


def test_a_queued_call_of_a_lost_caller_never_runs(agents: list[Agent]) -> None:
    free = busy(agents[0])
    agents[2].call("worker1", run, ("of worker2",))
    until(lambda: len(agents[1].machine._node.calls.serving) == 2)
    agents[2].links.peers.close()
    until(lambda: len(agents[1].members()) == 2)
    free.set()
    assert rpc_sync("worker1", run, ("next",)) == "next"
    assert _ran == ["hold", "next"]


def test_control_messages_are_handled_while_all_threads_are_blocked(agents: list[Agent], tmp_path: Path) -> None:
    """Releases of RRefs, confirmations of forks, cancels, joins and departures of members."""
    kept = remote("worker1", list)
    kept.to_here()
    free = busy(agents[0])
    queued = agents[0].call("worker1", run, ("queued",))
    assert rpc_sync("worker2", type_of, (kept,)) == "RRef", "its owner has confirmed the fork"
    assert queued.cancel()
    del kept
    until(lambda: not agents[1].tables()["owned"], "the goodbye to be heard")
    third = start_agent(config(tmp_path, 3))
    until(lambda: len(agents[1].members()) == 4)
    third.shutdown()
    until(lambda: len(agents[1].members()) == 3)
    assert not free.is_set()
    nothing_left([agents[2]])


# -- running
@pytest.mark.parametrize("how", ["cancel", "deadline", "loss"])
def test_a_running_call_can_see_that_its_caller_no_longer_waits(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate()
    caller = agents[2] if how == "loss" else agents[0]
    call = caller.call("worker1", until_cancelled, timeout=60)
    until(lambda: "asks" in _ran)
    assert not _seen, "the caller still waits"
    if how == "deadline":
        monkeypatch.setattr(caller.links.interceptors, "clock", lambda: time.monotonic() + 100)
        caller.released.put(None)  # wakes the thread that looks at deadlines
    if how == "cancel":
        assert call.cancel()
    elif how == "loss":
        caller.links.peers.close()
    until(lambda: bool(_seen))
    assert rpc_sync("worker1", run, ("next",)) == "next"
    nothing_left(agents[:2])


def test_cancelled_is_false_outside_of_a_cancelled_call(agents: list[Agent]) -> None:
    assert cancelled() is False
    assert rpc_sync("worker1", cancelled) is False


# -- callers that cancel
def interrupt(when: Callable[[], bool]) -> None:
    """Send Ctrl-C to the main thread once `when` holds."""

    def send() -> None:
        until(when)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=send).start()


@pytest.fixture
def handler() -> Iterator[None]:
    """Python's default handler: a background job starts without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_rpc_sync_cancels_the_call(agents: list[Agent], handler: None) -> None:
    gate()
    with pytest.raises(KeyboardInterrupt):
        interrupt(lambda: "asks" in _ran)
        rpc_sync("worker1", until_cancelled)
    until(lambda: bool(_seen), "the callee to learn of it")
    nothing_left(agents)


def test_ctrl_c_in_to_here_cancels_the_fetch_and_keeps_the_value(agents: list[Agent], handler: None) -> None:
    number = gate()
    rref: RRef[None] = remote("worker1", hold, (number,))
    with pytest.raises(KeyboardInterrupt):
        interrupt(lambda: len(agents[1].machine._node.calls.serving) == 2)
        rref.to_here()
    until(lambda: len(agents[1].machine._node.calls.serving) == 1, "only the creation to be left")
    _gates[number].set()
    assert rref.to_here() is None
    del rref
    nothing_left(agents)


def test_a_cancelled_asyncio_task_cancels_its_call(agents: list[Agent]) -> None:
    async def give_up() -> None:
        call = agents[0].call("worker1", until_cancelled)
        until(lambda: "asks" in _ran)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_as_coroutine(call), 0.2)

    gate()
    asyncio.run(give_up())
    until(lambda: bool(_seen))


async def _as_coroutine(call: Any) -> Any:
    return await call


def test_calls_can_be_gathered_in_asyncio(agents: list[Agent]) -> None:
    async def gather() -> list[str]:
        calls = [agents[0].call(f"worker{1 + i % 2}", run, (f"call {i}",)) for i in range(20)]
        return await asyncio.gather(*(_as_coroutine(call) for call in calls))

    assert asyncio.run(gather()) == [f"call {i}" for i in range(20)]


# -- incarnations
def test_a_function_that_outlives_its_caller_does_not_answer_the_next_incarnation(
    agents: list[Agent], tmp_path: Path
) -> None:
    """Both incarnations number their calls from the first one on."""
    number = gate()
    agents[2].call("worker1", hold, (number,))
    until(lambda: "hold" in _ran)
    agents[2].stop()
    until(lambda: len(agents[1].members()) == 2)
    agents[1].calls.pool.limit = 2
    again = start_agent(config(tmp_path, 2, incarnation=1, threads=1))
    try:
        until(lambda: len(agents[1].members()) == 3)
        second = gate()
        call = again.call("worker1", _hold_and_say, (second,))
        until(lambda: "says" in _ran)
        _gates[number].set()
        until(lambda: agents[1].calls.pool.busy == 1, "the old function to return")
        assert not call.done()
        _gates[second].set()
        assert call.wait() == "mine"
    finally:
        again.stop()


def _hold_and_say(number: int) -> str:
    _ran.append("says")
    _gates[number].wait(20)
    return "mine"
