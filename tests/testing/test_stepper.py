"""Messages held and delivered one by one: nothing times out meanwhile, and only time is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import until, until_quiet, world

from rpcbench import autograd as dist_autograd
from rpcbench.base.errors import ConnectionLostError, RpcError, RpcTimeoutError
from rpcbench.base.futures import Future
from rpcbench.rpc import RRef, remote, rpc_async, rpc_sync
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.deadlocks import Watchdog
from rpcbench.testing import Stepper
from rpcbench.testing.stepper import Held, HeldMessages
from rpcbench.wire import messages as m


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made


@pytest.fixture
def stepper(agents: list[Agent]) -> Iterator[Stepper]:
    made = Stepper.on()
    yield made
    made.go()
    until_quiet(agents)


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here()


def kinds(stepper: Stepper) -> list[str]:
    return [row.kind for row in stepper.held]


def until_held(stepper: Stepper, kind: str) -> Held:
    """Deliver all that comes before a message of this kind; return that one, which is held."""
    while kind not in kinds(stepper):
        stepper.deliver()
        stepper.wait()
    return stepper.wait(kind=kind)[0]


def step(stepper: Stepper, future: Future[Any]) -> list[str]:
    """Deliver one by one until the future is done; return the kinds in order."""
    done: list[str] = []
    while not future.done():
        row = stepper.deliver()
        done += [row.kind] if row else []
        until(lambda: bool(stepper.held) or future.done(), "the next message")
    return done


def test_a_stepper_holds_each_message_and_stops_deadlines_until_it_delivers(
    agents: list[Agent], stepper: Stepper
) -> None:
    future = rpc_async("worker1", divmod, (17, 5), timeout=0.1)
    (call,) = stepper.wait()
    assert (call.sender, call.to, call.kind, call.label) == ("notebook", "worker1", "Call", "divmod")
    assert not threading.Event().wait(0.3) and not future.done()  # longer than the deadline, but the clocks are stopped
    assert stepper.deliver() == call
    (result,) = stepper.wait()
    assert (result.sender, result.kind, result.label) == ("worker1", "Result", "divmod")
    stepper.deliver(result.n)
    assert future.wait() == (3, 2) and stepper.delivered == 2


def test_a_stepper_lets_time_pass_on_request(stepper: Stepper) -> None:
    future = rpc_async("worker1", divmod, (17, 5), timeout=3)
    stepper.wait()
    stepper.pass_time(2)
    assert not future.done()
    stepper.pass_time(2)
    with pytest.raises(RpcTimeoutError, match="3000 ms"):
        future.wait()


def test_clocks_stop_under_a_stepper_and_go_on_from_there(agents: list[Agent], stepper: Stepper) -> None:
    before = [agent.links.clock() for agent in agents]
    assert not threading.Event().wait(0.2)
    assert [agent.links.clock() for agent in agents] == before
    future = rpc_async("worker1", divmod, (17, 5), timeout=5)
    stepper.pass_time(1)
    began = time.monotonic()
    stepper.go()
    assert future.wait() == (3, 2)
    passed = [agent.links.clock() - then for agent, then in zip(agents, before, strict=True)]
    assert all(1 <= seconds <= 1 + time.monotonic() - began for seconds in passed)


def test_rows_keep_the_time_of_day_while_and_after_clocks_stand_still(agents: list[Agent]) -> None:
    stepper = Stepper.on()
    assert not threading.Event().wait(0.3)
    now = time.monotonic()
    held = remote("worker1", dict)  # its creation is held
    stepper.wait()
    stepper.go()
    later, shared = remote("worker2", dict), RRef({})
    assert held.to_here() == {} == later.to_here() == rpc_sync("worker2", fetch, (shared,))
    made = [row["made"] for agent in agents for row in agent.tables()["owned"].values()]
    # The notebook's own one has a row until the fork at worker2 is released, which may have come already.
    assert len(made) in (2, 3) and all(now <= at <= time.monotonic() for at in made), made


def test_long_waits_are_not_reported_while_a_stepper_stops_the_clocks(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = agents[0].part(Watchdog)
    monkeypatch.setattr(watchdog, "patience", 0.5)
    stepper = Stepper.on()
    future = rpc_async("worker1", divmod, (17, 5))
    thread = threading.Thread(target=future.wait)
    thread.start()
    thread.join(1.5)
    assert thread.is_alive() and "has waited" not in caplog.text
    stepper.go()
    thread.join()
    assert watchdog.patience == 0.5


def test_an_rref_can_be_shared_step_by_step(agents: list[Agent], stepper: Stepper) -> None:
    rref = remote("worker1", divmod, (17, 5))
    future = rpc_async("worker2", fetch, (rref,))
    stepper.wait(2)
    told = step(stepper, future)
    first = told.index("ForkRequest")  # the messages after it may come in either order
    assert first < told.index("ChildAccept") and first < told.index("Fetch")
    assert future.wait() == (3, 2)


def test_a_value_lives_if_the_release_of_the_parent_comes_before_the_request_of_the_child(
    agents: list[Agent], stepper: Stepper
) -> None:
    """The race of an RRef: the request of worker2 is delayed behind all other messages."""
    rref = remote("worker1", divmod, (17, 5))
    step(stepper, stepper_done := rref._get_future())
    assert stepper_done.done()
    future = rpc_async("worker2", fetch, (rref,))
    del rref
    request = until_held(stepper, "ForkRequest")
    stepper.delay(request.n)
    assert stepper.held[-1] == request
    while stepper.held[0] != request:
        stepper.deliver()
    assert len(agents[1].tables()["owned"]) == 1 and not future.done()
    step(stepper, future)
    assert future.wait() == (3, 2)


def test_a_stepper_delivers_messages_in_the_chosen_order(stepper: Stepper) -> None:
    futures = [rpc_async("worker1", divmod, (number, 5)) for number in range(3)]
    rows = stepper.wait(3)
    stepper.deliver(rows[2].n)
    stepper.deliver(stepper.wait(kind="Result")[0].n)
    assert futures[2].wait() == (0, 2) and not futures[0].done() and not futures[1].done()
    with pytest.raises(ValueError, match=f"no message {rows[2].n} is held; there are: {rows[0].n}, {rows[1].n}"):
        stepper.deliver(rows[2].n)


def test_a_dropped_control_message_is_retransmitted_when_time_passes(stepper: Stepper) -> None:
    rref = remote("worker1", divmod, (17, 5))
    future = rpc_async("worker2", fetch, (rref,))
    request = until_held(stepper, "ForkRequest")
    assert stepper.drop(request.n) == request
    while stepper.deliver():
        pass

    def again() -> bool:
        stepper.pass_time(0.5)
        return "ForkRequest" in kinds(stepper)

    until(again, "the request, once more")
    step(stepper, future)
    assert future.wait() == (3, 2) and stepper.dropped == 1


def test_a_call_that_a_stepper_dropped_fails_even_after_the_stepper_has_ended(stepper: Stepper) -> None:
    future = rpc_async("worker1", divmod, (17, 5), timeout=0)
    stepper.wait()
    stepper.drop()
    stepper.go()
    with pytest.raises(ConnectionLostError, match=r"divmod .* worker1"):
        future.wait()


def test_a_backward_pass_can_run_step_by_step(agents: list[Agent], stepper: Stepper) -> None:
    x = torch.ones(2, requires_grad=True)
    answers: list[Any] = []

    def run() -> None:
        with dist_autograd.context() as context:
            loss = rpc_sync("worker1", torch.mul, (x, 3.0)).sum()
            dist_autograd.backward(context, [loss])
            answers.append(dist_autograd.get_gradients(context)[x])

    thread = threading.Thread(target=agents[0].submit, args=(run,))
    thread.start()
    told: list[str] = []
    while not answers:
        row = stepper.deliver()
        told += [row.kind] if row else []
        until(lambda: bool(stepper.held or answers), "the next message")
    thread.join()
    assert answers[0].tolist() == [3.0, 3.0]
    assert told.count("Gradients") == 2 and told.index("Call") < told.index("Gradients")


def test_a_held_message_has_the_bytes_of_its_send(stepper: Stepper) -> None:
    x = torch.zeros(100_000)
    future = rpc_async("worker1", torch.sum, (x,))
    stepper.wait()
    x += 1
    step(stepper, future)
    assert future.wait() == 0


def test_a_stepper_can_hold_only_some_kinds_and_members(agents: list[Agent]) -> None:
    stepper = Stepper.on(kinds=["Result"], members=["worker2"])
    assert rpc_sync("worker1", divmod, (17, 5)) == (3, 2)
    future = rpc_async("worker2", divmod, (17, 5))
    assert [row.kind for row in stepper.wait()] == ["Result"]
    stepper.go()
    assert future.wait() == (3, 2)
    with pytest.raises(ValueError, match=r"unknown kind of message: Results; use some of: Call, .*Result"):
        Stepper.on(kinds=["Results"])


def test_released_messages_count_as_delivered(stepper: Stepper) -> None:
    futures = [rpc_async("worker1", divmod, (number, 5)) for number in range(4)]
    calls = stepper.wait(4)
    stepper.deliver(calls[0].n)
    stepper.drop(calls[1].n)
    stepper.wait(3)  # two calls, and the result of the first one
    stepper.go()
    assert (stepper.delivered, stepper.dropped) == (4, 1)
    assert repr(stepper) == "<stepper: off, no message is held; 4 delivered, 1 dropped>"
    with pytest.raises(ConnectionLostError):
        futures[1].wait()
    assert [future.wait() for future in (futures[0], *futures[2:])] == [(0, 0), (0, 2), (0, 3)]


def test_a_second_stepper_releases_the_messages_of_the_first(agents: list[Agent]) -> None:
    first = Stepper.on()
    early = rpc_async("worker1", divmod, (17, 5))
    first.wait()
    second = Stepper.on()
    assert not first.is_on and first.held == [] and first.deliver() is None
    late = rpc_async("worker2", divmod, (17, 5))
    assert second.wait(kind="Call")[0].to == "worker2"
    first.go()
    assert second.is_on and not late.done()
    second.go()
    assert early.wait() == late.wait() == (3, 2)
    assert [len(agent.links.interceptors.all) for agent in agents] == [1, 1, 1]


def test_a_member_that_is_asked_twice_holds_once(agents: list[Agent], stepper: Stepper) -> None:
    links = len(agents[1].links.interceptors.all)
    stepper.member_joined(1)  # as for one that joins while the stepper begins
    agents[0].call("worker1", int, own=True).wait()  # behind a notice that would end the stepper
    assert stepper.is_on and len(agents[1].links.interceptors.all) == links


def test_a_member_that_joins_while_a_stepper_is_released_holds_nothing(agents: list[Agent]) -> None:
    links = len(agents[1].links.interceptors.all)
    stepper = Stepper.on(agent=agents[0])
    stepper.go()
    stepper.member_joined(1)
    assert len(agents[1].links.interceptors.all) == links
    assert agents[0].call("worker1", int).wait() == 0


def test_a_stepper_of_another_member_takes_over(agents: list[Agent]) -> None:
    first = Stepper.on()
    early = rpc_async("worker1", divmod, (17, 5))
    first.wait()
    second = Stepper.on(agent=agents[1])
    until(lambda: not first.is_on, "the end of the first")
    first.go()
    late = rpc_async("worker2", divmod, (17, 5))
    assert second.wait(kind="Call")[0].to == "worker2" and not late.done()
    second.go()
    assert early.wait() == late.wait() == (3, 2)
    assert [len(agent.links.interceptors.all) for agent in agents] == [1, 1, 1]


def test_a_stepper_ends_with_its_member(agents: list[Agent]) -> None:
    stepper = Stepper.on(agent=agents[2])
    future = rpc_async("worker1", divmod, (17, 5))
    stepper.wait()
    agents.pop().stop()
    assert future.wait() == (3, 2) and not stepper.is_on
    until(lambda: [len(agent.links.interceptors.all) for agent in agents] == [1, 1])


def test_a_stepper_never_holds_the_own_calls_of_rpcbench(agents: list[Agent], stepper: Stepper) -> None:
    assert agents[0].call(1, divmod, (17, 5), own=True).wait() == (3, 2)
    assert stepper.held == []


def test_a_wait_that_times_out_lists_the_held_messages(stepper: Stepper) -> None:
    future = rpc_async("worker1", divmod, (17, 5))
    stepper.wait()
    with pytest.raises(RpcError, match=r"2 Results to be held; there are:\nstepper: 1 message held.*\n.*Call divmod"):
        stepper.wait(2, timeout=0.01, kind="Result")
    step(stepper, future)


def test_the_member_of_a_stepper_can_shut_down_while_messages_are_held(agents: list[Agent]) -> None:
    stepper = Stepper.on()
    future = rpc_async("worker1", divmod, (17, 5))
    stepper.wait()
    began = time.monotonic()
    agents[0].shutdown(graceful=False)
    assert time.monotonic() - began < 15
    assert not stepper.is_on and stepper.held == []
    with pytest.raises(RpcError, match="has shut down"):
        future.wait()
    stepper.go()


def test_messages_held_for_a_stopped_member_are_dropped(agents: list[Agent], stepper: Stepper) -> None:
    lost = rpc_async("worker2", divmod, (17, 5))
    stepper.wait()
    stepper.deliver()
    stepper.wait(kind="Result")  # worker2 ends, so its result is dropped
    rpc_async("worker2", divmod, (17, 5))
    there = rpc_async("worker1", divmod, (17, 5))
    stepper.wait(3)
    agents[2].stop()
    until(lambda: [row.to for row in stepper.held] == ["worker1"], "the end of worker2")
    with pytest.raises(RpcError, match="worker2"):
        lost.wait()
    step(stepper, there)
    agents.pop()


def test_a_link_that_was_released_holds_nothing_after_the_loss_of_a_member() -> None:
    passed: list[int] = []
    link = HeldMessages(lambda source, message: True, lambda: None)
    link.attach_callbacks(lambda *sent: None, lambda source, seq, message: passed.append(seq))
    link.deliver_held()
    link.deliver_held(2)
    link.handle_incoming(1, 7, m.Ready(True))
    assert passed == [7] and link.messages_by_key == {}
