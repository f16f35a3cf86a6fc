"""Waits between members are explained, and waits in a circle are ended."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import PATIENCE, nothing_left, until, world

import rpcbench
from rpcbench.base import futures
from rpcbench.base.errors import DeadlockError
from rpcbench.base.futures import Future, wait_all
from rpcbench.rpc import RRef, remote, rpc_async, rpc_sync
from rpcbench.runtime import current, deadlocks
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.deadlocks import ASK, Watchdog

_shared: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_LONG", 0.2)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    _shared.clear()
    with world(tmp_path, 3, rpc_timeout=0) as made:
        yield made
        for value in _shared.values():
            if isinstance(value, threading.Event):
                value.set()
    _shared.clear()


def event(name: str) -> threading.Event:
    return _shared.setdefault(name, threading.Event())


def hold(name: str) -> None:
    event(f"{name} runs").set()
    event(name).wait(30)


# -- circles
def give(rref: RRef[Any]) -> None:
    """Each worker uses its own handle, as in separate processes."""
    name = current.current_agent().name
    _shared[f"{name}'s"] = rref
    event(name).set()


def wait_for_what_is_given() -> Any:
    name = current.current_agent().name
    assert event(name).wait(20)
    return _shared[f"{name}'s"].to_here()


@pytest.mark.parametrize("where", ["worker1", "notebook"])
def test_a_value_that_waits_for_itself_raises_deadlock_error(agents: list[Agent], where: str) -> None:
    """Row 20 of the fault table."""
    rref = remote(where, wait_for_what_is_given)
    rpc_sync(where, give, (rref,))
    circle = f"in a circle: wait_for_what_is_given on {where} → wait_for_what_is_given on {where}$"
    with pytest.raises(DeadlockError, match=circle):
        rref.to_here()
    assert rpc_sync("worker1", max, (1, 2)) == 2
    _shared.clear()
    del rref
    nothing_left(agents)


def test_two_values_that_wait_for_each_other_raise_deadlock_error(agents: list[Agent]) -> None:
    one, two = remote("worker1", wait_for_what_is_given), remote("worker2", wait_for_what_is_given)
    rpc_sync("worker1", give, (two,))
    rpc_sync("worker2", give, (one,))
    for rref in (one, two):
        with pytest.raises(
            DeadlockError, match=r"is_given on worker1 → to_here on worker2 → wait_for_what_is_given on"
        ):
            rref.to_here()
    _shared.clear()
    del one, two, rref
    nothing_left(agents)


def call_back_and_wait() -> Any:
    _shared["call"] = rpc_async("worker2", call_home)
    return _shared["call"].wait()


def call_home() -> Any:
    until(lambda: "call" in _shared)
    return rpc_sync("worker1", wait_for_shared_call)


def wait_for_shared_call() -> Any:
    """Wait for the shared call through a continuation, together with another call."""
    return wait_all([rpc_async("worker2", max, (1, 2)), _shared["call"].then(lambda done: done.value())])


def test_a_call_that_waits_for_a_call_further_up_its_chain_raises_deadlock_error(agents: list[Agent]) -> None:
    circle = r"call_home on worker2 → wait_for_shared_call on worker1 → call_home on worker2"
    with pytest.raises(DeadlockError, match=circle):
        rpc_sync("worker1", call_back_and_wait)
    _shared.clear()
    nothing_left(agents)


def test_a_broken_wait_ends_only_its_thread_and_the_future_stays_open(agents: list[Agent]) -> None:
    future: Future[int] = Future()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            future.wait()
        except DeadlockError as error:
            raised.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(future._waiters) == 2)
    assert future.break_wait(threads[0].ident or 0, DeadlockError("round"))
    threads[0].join(20)
    assert len(raised) == 1 and not future.done()
    assert not future.break_wait(threads[0].ident or 0, DeadlockError("again"))
    future.set_result(1)
    threads[1].join(20)
    assert len(raised) == 1


# -- no circles
def deep(levels: int, here: str, there: str) -> int:
    if levels == 0:
        hold("bottom")
        return 0
    return 1 + rpc_sync(there, deep, (levels - 1, there, here))


def test_a_long_chain_of_calls_is_not_taken_for_a_circle(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[bool] = []
    dog = agents[0].part(Watchdog)
    monkeypatch.setattr(dog, "_report_long_waits", lambda waits, inquiry: probed.append(bool(inquiry.facts)))
    call = rpc_async("worker1", deep, (6, "worker1", "worker2"))
    waiter = threading.Thread(target=call.wait)
    waiter.start()
    until(lambda: len(probed) >= 3)
    event("bottom").set()
    assert call.wait() == 6
    waiter.join(20)


def test_short_waits_cause_no_inquiries(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_LONG", 20.0)
    asked: list[Any] = []
    for agent in agents:
        agent.on_notice(ASK, lambda source, data: asked.append(data))
    for _ in range(50):
        rpc_sync("worker1", deep_at_once, (3, "worker1", "worker2"))
    assert asked == []


def deep_at_once(levels: int, here: str, there: str) -> int:
    return 0 if levels == 0 else 1 + rpc_sync(there, deep_at_once, (levels - 1, there, here))


# -- explaining
def outer() -> None:
    rpc_sync("worker2", hold, ("inner",))


@pytest.fixture
def patient(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks stand still, so that calls have run less than a second, and a member may answer late."""
    monkeypatch.setattr(deadlocks, "_ANSWER_SECONDS", PATIENCE)
    for agent in agents:
        now = agent.links.interceptors.clock()
        monkeypatch.setattr(agent.links.interceptors, "clock", lambda now=now: now)


def test_explain_shows_the_calls_and_waits_of_all_members(agents: list[Agent], patient: None) -> None:
    call = rpc_async("worker1", outer)
    assert event("inner runs").wait(20)
    waiter = threading.Thread(target=call.wait, name="waiter")
    waiter.start()
    texts: list[Any] = []

    def complete() -> bool:
        texts[:] = [rpcbench.explain()]
        sites, waits = texts[0].count("in outer: rpc_sync("), texts[0].count("less than 1 s and waits")
        return bool(call._waiters) and (sites, waits) == (2, 2)

    until(complete)
    (text,) = texts
    event("inner").set()
    waiter.join(20)
    lines = [line.split(", at ")[0] for line in str(text).splitlines()]
    assert lines[:4] == [
        "notebook:",
        "  waiter waits",
        "    for outer on worker1, which has run less than 1 s and waits",
        "      for hold on worker2, which has run less than 1 s",
    ]
    assert "  outer, a call of notebook, which has run less than 1 s and waits" in lines
    assert text.count("in outer: rpc_sync(") == 2, "with the source line"
    assert repr(text) == str(text)
    assert str(rpcbench.explain()).splitlines() == [
        f"{agent.name}: nothing to do, and no thread waits" for agent in agents
    ]


def test_explain_shows_why_a_call_has_not_begun(agents: list[Agent], patient: None) -> None:
    agents[1].calls.pool.limit = 1
    first = rpc_async("worker1", hold, ("first",))
    assert event("first runs").wait(20)
    second = rpc_async("worker1", max, (1, 2))
    made: RRef[None] = remote("worker2", hold, ("made",))
    fetch = made.to_here_async()
    until(lambda: len(agents[1].machine._node.calls.serving) == 2 and len(agents[2].machine._node.calls.serving) == 2)
    text = rpcbench.explain()
    assert "max, a call of notebook, which waits less than 1 s for a thread: all are busy" in text
    assert "to_here, a call of notebook, which waits less than 1 s for a value that is not made yet" in text
    for name in ("first", "made"):
        event(name).set()
    assert (first.wait(), second.wait(), fetch.wait()) == (None, 2, None)


def test_explain_names_a_member_that_does_not_respond(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    agents[2].on_notice(ASK, lambda source, data: None)
    assert "worker2 does not respond: it is stopped" in rpcbench.explain()


def test_a_long_wait_is_logged_once(
    agents: list[Agent], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlocks, "_ANSWER_SECONDS", PATIENCE)
    agents[0].part(Watchdog).patience = 0.2
    call = rpc_async("worker1", hold, ("long",))
    assert event("long runs").wait(20)
    with caplog.at_level(logging.WARNING, "rpcbench"):
        waiter = threading.Thread(target=call.wait)
        waiter.start()
        until(lambda: len(caplog.records) == 1)
        probed = threading.Event()
        tell = agents[0].part(Watchdog)._report_long_waits
        agents[0].part(Watchdog)._report_long_waits = lambda *told: (tell(*told), probed.set())  # type: ignore[method-assign]
        assert probed.wait(20)
        event("long").set()
        waiter.join(20)
    (record,) = caplog.records
    assert "notebook has waited" in record.getMessage()
    assert "for hold on worker1, which has run" in record.getMessage()


def test_explain_fails_without_a_world() -> None:
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpcbench.explain()
    assert current.find_current() is None


_COLLECTING = """
import gc, sys, threading, time
from rpcbench.runtime import deadlocks

def let_others_run(*_):
    if sys._getframe(1).f_code.co_filename == deadlocks.__file__:
        time.sleep(0.001)

gc.callbacks.append(let_others_run)
gc.set_threshold(1)
looking = [threading.Thread(target=lambda: [deadlocks.thread_states() for _ in range(60)]) for _ in range(4)]
for each in looking:
    each.start()
while any(each.is_alive() for each in looking):
    begun = threading.Thread(target=len, args=("",))
    begun.start()
    begun.join()
assert gc.isenabled()
"""


def test_a_look_at_the_stacks_of_threads_is_not_blocked_by_a_garbage_collection() -> None:
    """Python lists threads under a lock; a collection under it lets other threads run, which may need that lock."""
    subprocess.run([sys.executable, "-c", _COLLECTING], timeout=60, check=True)


@pytest.mark.parametrize(("folder", "is_shown"), [("site-packages/bars", False), ("project", True)])
def test_a_waiting_thread_of_a_library_is_no_work(tmp_path, folder, is_shown):
    """As the monitor of tqdm's bars; the same thread of a user's module is shown."""
    file = tmp_path / folder / "monitor.py"
    file.parent.mkdir(parents=True)
    file.write_text("def run(event):\n    event.wait()\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    end = threading.Event()
    thread = threading.Thread(target=names["run"], args=(end,), name="monitor")
    thread.start()
    try:
        until(lambda: _frames_of(thread)[0].f_code.co_name == "wait" and bool(end._cond._waiters))
        (state,) = [each for each in deadlocks.thread_states() if each.name == "monitor"]
        assert bool(state.places) == is_shown
    finally:
        end.set()
        thread.join()


def _frames_of(thread):
    return deadlocks._frames_by_thread().get(thread.ident) or [sys._getframe()]
