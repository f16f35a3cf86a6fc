"""Three workers: A begins a context, calls B, which calls C; each answer is used.

A ──1──> B ──2──> C ──3──> B ──4──> A        message numbers
"""

from __future__ import annotations

import pytest

from rpcbench.protocol.contexts import ROOT, Contexts
from rpcbench.protocol.effects import Accumulate, Explore, ForgetContext, ForgetWalk, Propagate, WalkEnded
from rpcbench.wire.messages import EMPTY, Discover, Discovered, Gradients, ReleaseContext, Settled, WalkFailed
from rpcbench.words.ids import Id, global_id

A, B, C = 0, 1, 2
X = global_id(A, 0)
WALK = Id(A, 0)
FAILURE = WalkFailed(X, WALK, ROOT, "ValueError", "no", EMPTY)


@pytest.fixture
def a() -> Contexts:
    contexts = Contexts(A)
    contexts.record_send(X, 1, B, tensors=True)
    contexts.record_recv(X, 4, B, tensors=True)
    return contexts


@pytest.fixture
def b() -> Contexts:
    contexts = Contexts(B)
    contexts.record_recv(X, 1, A, tensors=True)
    contexts.record_send(X, 2, C, tensors=True)
    contexts.record_recv(X, 3, C, tensors=True)
    contexts.record_send(X, 4, A, tensors=True)
    return contexts


def gradients(message: int) -> Gradients:
    return Gradients(X, WALK, message, False, EMPTY)


# -- recording
def test_messages_without_tensors_make_workers_known_but_take_no_part() -> None:
    contexts = Contexts(A)
    contexts.record_send(X, 1, B, tensors=False)
    contexts.record_recv(X, 2, C, tensors=False)
    contexts.gradients_held(X, 3)
    assert contexts.table() == {
        str(X): {"context": X, "known": [B, C], "sends": [], "recvs": [], "passes": [], "gradients": 3}
    }


# -- walking
def test_roots_that_lead_to_a_message_of_another_context_fail(a: Contexts) -> None:
    effects, outbox = a.begin(X, WALK, [4, 99])
    assert (effects[0], outbox) == (ForgetWalk(X, WALK), [])
    assert isinstance(effects[1], WalkEnded)
    assert "another autograd context" in str(effects[1].failure)
    assert a.table()[str(X)]["passes"] == []


def test_the_root_asks_and_runs_when_all_is_known(a: Contexts) -> None:
    assert a.begin(X, WALK, [4]) == ([], [(B, Discover(X, WALK, 4))])
    assert a.table()[str(X)]["passes"] == [
        {"pass": "0.0", "state": "discovering", "needed": 0, "arrived": 0, "waiting": 1}
    ]
    assert a.on_discovered(Discovered(X, WALK, 4)) == ([Propagate(X, WALK)], [])
    assert a.table()[str(X)]["passes"][0]["state"] == "running"


def test_roots_that_reach_no_message_run_at_once(a: Contexts) -> None:
    assert a.begin(X, WALK, []) == ([Propagate(X, WALK)], [])
    assert a.propagated(X, WALK, ROOT, []) == ([WalkEnded(X, WALK, None, A), ForgetWalk(X, WALK)], [])


def test_discovery_is_answered_after_its_own_questions(b: Contexts) -> None:
    assert b.on_discover(A, Discover(X, WALK, 4)) == ([Explore(X, WALK, 4)], [])
    assert b.explored(X, WALK, 4, [3]) == ([], [(C, Discover(X, WALK, 3))])
    assert b.on_discovered(Discovered(X, WALK, 3)) == ([], [(A, Discovered(X, WALK, 4))])


def test_a_message_reached_twice_is_asked_about_once(b: Contexts) -> None:
    b.on_discover(A, Discover(X, WALK, 4))
    b.explored(X, WALK, 4, [3])
    b.on_discover(C, Discover(X, WALK, 2))
    assert b.explored(X, WALK, 2, [3]) == ([], [(C, Discovered(X, WALK, 2))])


def test_gradients_are_answered_after_those_they_caused(b: Contexts) -> None:
    b.on_discover(A, Discover(X, WALK, 4))
    b.explored(X, WALK, 4, [3])
    b.on_discovered(Discovered(X, WALK, 3))
    assert b.on_gradients(A, gradients(4)) == ([Accumulate(A, gradients(4))], [])
    assert b.propagated(X, WALK, 4, [3]) == ([], [])
    assert b.on_settled(Settled(X, WALK, 3)) == ([ForgetWalk(X, WALK)], [(A, Settled(X, WALK, 4))])
    assert not b.contexts[X].walks


def test_walks_of_one_context_are_apart(a: Contexts) -> None:
    other = Id(A, 1)
    a.begin(X, WALK, [4])
    assert a.begin(X, other, [4]) == ([], [(B, Discover(X, other, 4))])
    assert a.on_discovered(Discovered(X, WALK, 4)) == ([Propagate(X, WALK)], [])
    assert a.on_discovered(Discovered(X, other, 4)) == ([Propagate(X, other)], [])


def test_gradients_nobody_waits_for_fail_the_walk_of_the_sender(b: Contexts) -> None:
    ((to, answer),) = b.on_gradients(A, gradients(4))[1]
    assert to == A and isinstance(answer, WalkFailed) and answer.message == 4
    b.on_discover(A, Discover(X, WALK, 4))
    b.on_gradients(A, gradients(4))
    ((to, answer),) = b.on_gradients(A, gradients(4))[1]
    assert to == A and isinstance(answer, WalkFailed)


def test_unknown_sends_fail_the_walk_of_the_asker(b: Contexts) -> None:
    for question in (Discover(X, WALK, 99), Discover(global_id(A, 5), WALK, 4)):
        ((to, answer),) = b.on_discover(A, question)[1]
        assert to == A and isinstance(answer, WalkFailed)


# -- failures
def test_a_failure_is_told_to_the_asker_once(b: Contexts) -> None:
    b.on_discover(A, Discover(X, WALK, 4))
    assert b.failed(X, WALK, 4, FAILURE, B) == ([ForgetWalk(X, WALK)], [(A, FAILURE._replace(message=4))])
    assert b.failed(X, WALK, 4, FAILURE, B) == ([], [])
    assert b.explored(X, WALK, 4, [3]) == ([], [])


def test_a_failed_walk_does_not_begin_again(b: Contexts) -> None:
    b.on_discover(A, Discover(X, WALK, 4))
    b.failed(X, WALK, 4, FAILURE, B)
    effects, ((to, answer),) = b.on_discover(C, Discover(X, WALK, 2))
    assert effects == [] and to == C and isinstance(answer, WalkFailed)
    assert not b.contexts[X].walks


def test_the_root_ends_with_the_failure_and_who_is_to_blame(a: Contexts) -> None:
    a.begin(X, WALK, [4])
    told = FAILURE._replace(message=4)
    assert a.on_failed(B, told) == ([ForgetWalk(X, WALK), WalkEnded(X, WALK, told, B)], [])
    assert a.on_failed(B, told) == ([], [])


def test_a_lost_worker_fails_walks_that_wait_for_it(a: Contexts) -> None:
    a.begin(X, WALK, [4])
    effects, _ = a.lost(B, FAILURE._replace(type="WorkerLostError"), [A, C])
    assert effects[-1] == WalkEnded(X, WALK, FAILURE._replace(type="WorkerLostError"), B)


def test_a_lost_worker_fails_walks_that_it_asked_for(b: Contexts) -> None:
    b.on_discover(C, Discover(X, WALK, 2))
    assert b.lost(C, FAILURE, [A, B]) == ([ForgetWalk(X, WALK)], [(C, FAILURE._replace(message=2))])


# -- ends
def test_release_forgets_and_tells_all_that_are_known(b: Contexts) -> None:
    assert b.release(X) == ([ForgetContext(X)], [(A, ReleaseContext(X)), (C, ReleaseContext(X))])
    assert b.release(X) == ([], [])
    assert b.table() == {}


def test_late_messages_do_not_revive_a_context(b: Contexts) -> None:
    b.release(X)
    assert not b.record_recv(X, 5, A, tensors=True)
    assert not b.record_send(X, 6, C, tensors=True)
    assert b.open(X) is None and b.table() == {}


def test_release_ends_the_walks_that_began_here(a: Contexts) -> None:
    a.begin(X, WALK, [4])
    ended, forgotten = a.release(X)[0]
    assert ended.walk == WALK and "released" in ended.failure.text
    assert forgotten == ForgetContext(X)


def test_contexts_of_a_lost_worker_are_over(b: Contexts) -> None:
    effects, outbox = b.lost(A, FAILURE, [B, C])
    assert ForgetContext(X) in effects and outbox == [(C, ReleaseContext(X))]
    assert b.open(global_id(A, 9)) is None


def test_after_a_loss_everybody_hears_of_the_release(a: Contexts) -> None:
    a.lost(B, FAILURE, [A, C])  # through B alone, A's context may have come to C
    assert a.release(X)[1] == [(C, ReleaseContext(X))]
