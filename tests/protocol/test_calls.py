from __future__ import annotations

import pytest

from rpcbench.base.errors import CallCancelled, RpcTimeoutError, WorkerLostError
from rpcbench.base.ids import Id
from rpcbench.protocol.calls import Calls
from rpcbench.protocol.effects import Effects, Enqueue, Reject, Resolve
from rpcbench.wire import messages as m

ANSWER = m.Result(7, (), None, m.EMPTY)
CALL = m.Call(7, "f", None, (), None, m.EMPTY)
FORKS = {Id(2, 0), Id(2, 1)}


@pytest.fixture
def caller() -> Calls:
    calls = Calls()
    calls.start_call(7, to=1, label="f", now=5.0, timeout=0.25)
    return calls


def test_a_call_is_in_the_table_until_it_is_answered(caller: Calls) -> None:
    assert caller.calls_table() == {"7": {"call": 7, "to": 1, "label": "f", "since": 5.0}}
    assert caller.reply_received(1, ANSWER) == [Resolve(7, 1, ANSWER)]
    assert caller.calls_table() == {}


@pytest.mark.parametrize("first", ["answered", "expired", "cancelled", "lost", "failed"])
def test_a_call_ends_once_by_its_first_answer_or_failure(caller: Calls, first: str) -> None:
    ends = {
        "answered": lambda: caller.reply_received(1, ANSWER),
        "expired": lambda: caller.call_expired(7, "worker{}".format)[0],
        "cancelled": lambda: caller.cancel_call(7)[0],
        "lost": lambda: caller.worker_lost(1, "worker1", "killed")[0],
        "failed": lambda: caller.fail_call(7, ValueError()),
    }
    assert [effect.call for effect in ends.pop(first)()] == [7]
    assert [end() for end in ends.values()] == [[]] * 4


def test_an_expired_or_cancelled_call_fails_with_its_error_and_sends_a_cancel(caller: Calls) -> None:
    (rejected,), outbox = caller.call_expired(7, "worker{}".format)
    assert outbox == [(1, m.Cancel(7))]
    assert isinstance(rejected.error, RpcTimeoutError)
    text = str(rejected.error)
    assert "250 ms" in text and "f on worker1" in text
    caller.start_call(8, 1, "g", 5.0, None)
    (rejected,), outbox = caller.cancel_call(8)
    assert isinstance(rejected.error, CallCancelled) and outbox == [(1, m.Cancel(8))]


def test_a_lost_worker_fails_only_the_calls_to_it(caller: Calls) -> None:
    caller.start_call(8, to=2, label="g", now=5.0, timeout=None)
    effects, _ = caller.worker_lost(1, "worker1", "killed")
    assert [type(effect) for effect in effects] == [Reject]
    assert isinstance(effects[0].error, WorkerLostError) and "worker1" in str(effects[0].error)
    assert list(caller.outgoing) == [8]


# -- callee
@pytest.fixture
def callee() -> Calls:
    return Calls()


def test_a_call_is_queued_when_the_last_of_its_forks_is_confirmed(callee: Calls) -> None:
    assert callee.request_arrived(1, CALL, set(FORKS), 0.0) == []
    queued: list[Effects] = [callee.fork_confirmed(fork) for fork in FORKS]
    assert queued == [[], [Enqueue(1, 7)]]
    assert callee.fork_confirmed(Id(2, 0)) == []


def test_a_call_without_unconfirmed_forks_is_queued_at_once_and_served_once(callee: Calls) -> None:
    assert callee.request_arrived(1, CALL, set(), 0.0) == [Enqueue(1, 7)]
    assert callee.begin_call(1, 7, 0.0) == (CALL, True)
    assert callee.is_wanted(1, 7) and callee.finish_serving(1, 7) and not callee.finish_serving(1, 7)
    assert not callee.is_wanted(1, 7)


@pytest.mark.parametrize("held", [True, False])
def test_a_call_that_is_cancelled_before_it_begins_never_runs(callee: Calls, held: bool) -> None:
    callee.request_arrived(1, CALL, set(FORKS) if held else set(), 0.0)
    assert callee.cancel_requested(1, 7) == CALL
    assert [callee.fork_confirmed(fork) for fork in FORKS] == [[], []]
    assert callee.begin_call(1, 7, 0.0) == (None, False)
    assert not callee.finish_serving(1, 7)


def test_a_running_call_can_see_that_it_was_cancelled_and_is_still_answered(callee: Calls) -> None:
    callee.request_arrived(1, CALL, set(), 0.0)
    callee.begin_call(1, 7, 0.0)
    assert callee.cancel_requested(1, 7) is None
    assert not callee.is_wanted(1, 7)
    assert callee.finish_serving(1, 7)


def test_a_call_that_was_queued_for_longer_than_its_timeout_is_dropped(callee: Calls) -> None:
    late, soon = CALL._replace(budget=0.5), CALL._replace(call=8, budget=0.5)
    for call in (late, soon):
        callee.request_arrived(1, call, set(), 10.0)
    assert callee.begin_call(1, 8, 10.5) == (soon, True)
    assert callee.begin_call(1, 7, 10.6) == (late, False)
    assert list(callee.serving) == [(1, 8)]


def test_calls_of_a_lost_caller_are_dropped_and_not_answered(callee: Calls) -> None:
    held, queued = CALL._replace(call=8), CALL._replace(call=9)
    callee.request_arrived(1, CALL, set(), 0.0)
    callee.begin_call(1, 7, 0.0)
    callee.request_arrived(1, held, set(FORKS), 0.0)
    callee.request_arrived(1, queued, set(), 0.0)
    assert callee.worker_lost(1, "worker1", "killed") == ([], [held, queued])
    assert not callee.is_wanted(1, 7) and not callee.finish_serving(1, 7)
    assert callee.begin_call(1, 9, 0.0) == (None, False)
    assert [callee.fork_confirmed(fork) for fork in FORKS] == [[], []]
