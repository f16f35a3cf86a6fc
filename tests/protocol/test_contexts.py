"""Three workers: A begins a context and calls B, which calls C; each answer is used.

A ──1──> B ──2──> C ──3──> B ──4──> A        message numbers
"""

from __future__ import annotations

import pytest

from rpcbench.base.ids import Id, first_serial, global_id
from rpcbench.protocol.backward import MOST_BEHIND, ROOT, Contexts, Sent, union_of_sends
from rpcbench.protocol.effects import Accumulate, Explore, ForgetContext, ForgetPass, PassEnded, Propagate
from rpcbench.wire.messages import (
    EMPTY,
    Awaited,
    BackwardFailed,
    ContextParticipant,
    Discover,
    Discovered,
    Gradients,
    ReleaseContext,
    Scope,
    Settled,
)

A, B, C = 0, 1, 2
X = global_id(A, 0)
WALK = Id(A, 0)
FAILURE = BackwardFailed(X, WALK, C, "ValueError", "no", EMPTY)
ONE, TWO, THREE, FOUR = global_id(A, 1), global_id(B, 2), global_id(C, 3), global_id(B, 4)
PLAN = (ONE, TWO, THREE, FOUR)


def send(contexts: Contexts, message: int, to: int, recvs: list[int] | None) -> Scope | None:
    return contexts.record_send(X, message, Sent(to, "work"), recvs, tensors=True)


def recv(contexts: Contexts, message: int, source: int, behind: tuple[int, ...] | None) -> None:
    contexts.record_recv(Scope(X, message, behind), source, tensors=True)


def workers(told: bool) -> tuple[Contexts, Contexts]:
    """A and B, whose messages list the sends behind them (`told`) or do not."""
    a, b = Contexts(A), Contexts(B)
    send(a, ONE, B, [])
    recv(a, FOUR, B, PLAN if told else None)
    recv(b, ONE, A, (ONE,) if told else None)
    send(b, TWO, C, [ONE])
    recv(b, THREE, C, (ONE, TWO, THREE) if told else None)
    send(b, FOUR, A, [THREE])
    return a, b


@pytest.fixture
def a() -> Contexts:
    return workers(told=False)[0]


@pytest.fixture
def b() -> Contexts:
    return workers(told=False)[1]


@pytest.fixture
def told() -> Contexts:
    """B, where messages have listed the sends behind them."""
    return workers(told=True)[1]


def gradients(
    message: int, plan: tuple[int, ...] = (), settled: Settled | None = None, fast: bool = False
) -> Gradients:
    return Gradients(X, WALK, message, False, fast, plan, settled, EMPTY)


def settled(message: int, *fired: int, awaited: tuple[Awaited, ...] = ()) -> Settled:
    return Settled(X, WALK, message, fired, awaited)


# -- recording
def test_messages_without_tensors_add_participants_but_no_sends_and_recvs() -> None:
    contexts = Contexts(A)
    contexts.record_send(X, 1, Sent(B, "work"), [], tensors=False)
    contexts.record_recv(Scope(X, 2, ()), C, tensors=False)
    contexts.record_gradient_count(X, 3)
    assert contexts.contexts_table() == {
        str(X): {"context": X, "known": [B, C], "sends": [], "recvs": [], "passes": [], "gradients": 3}
    }


def test_a_message_lists_the_sends_behind_it_if_all_of_them_are_known(told: Contexts) -> None:
    assert send(told, 5, C, []) == Scope(X, 5, (5,))
    assert send(told, 6, C, [ONE, THREE]) == Scope(X, 6, (6, ONE, TWO, THREE))
    assert send(told, 7, C, None) == Scope(X, 7, None)
    recv(told, 8, C, None)
    assert send(told, 9, C, [ONE, 8]) == Scope(X, 9, None)


def test_the_list_of_sends_behind_a_message_is_bounded() -> None:
    assert union_of_sends([tuple(range(MOST_BEHIND))]) == tuple(range(MOST_BEHIND))
    assert union_of_sends([tuple(range(MOST_BEHIND))], MOST_BEHIND) is None


def test_an_unsent_message_is_removed_from_the_sends_of_its_context(b: Contexts) -> None:
    b.withdraw_send(Scope(X, TWO, None))
    assert [row["message"] for row in b.contexts_table()[str(X)]["sends"]] == [FOUR]


# -- discovery
def test_a_pass_whose_roots_lead_to_a_message_of_another_context_fails(a: Contexts) -> None:
    effects, outbox = a.backward_passes.begin_pass(X, WALK, [FOUR, 99], retain=False, fast=False)
    assert isinstance(effects[0], PassEnded) and effects[1:] == [ForgetPass(X, WALK)] and outbox == []
    assert "another autograd context" in str(effects[0].failure)
    assert a.contexts_table()[str(X)]["passes"] == []


def test_the_root_discovers_and_then_runs(a: Contexts) -> None:
    assert a.backward_passes.begin_pass(X, WALK, [FOUR], retain=False, fast=False) == (
        [],
        [(B, Discover(X, WALK, FOUR))],
    )
    assert a.contexts_table()[str(X)]["passes"] == [
        {"pass": "0.0", "state": "discovering", "needed": 0, "arrived": 0, "waiting": 2}
    ]
    assert a.backward_passes.on_discovered(Discovered(X, WALK, FOUR)) == ([Propagate(X, WALK)], [])
    assert a.contexts_table()[str(X)]["passes"][0]["state"] == "running"


def test_a_worker_answers_a_discovery_after_its_own_questions_are_answered(b: Contexts) -> None:
    assert b.backward_passes.on_discover(A, Discover(X, WALK, FOUR)) == ([Explore(X, WALK, FOUR)], [])
    assert b.backward_passes.graph_explored(X, WALK, FOUR, [THREE]) == ([], [(C, Discover(X, WALK, THREE))])
    assert b.backward_passes.on_discovered(Discovered(X, WALK, THREE)) == ([], [(A, Discovered(X, WALK, FOUR))])


def test_a_worker_asks_once_about_a_message_that_is_reached_twice(b: Contexts) -> None:
    b.backward_passes.on_discover(A, Discover(X, WALK, FOUR))
    b.backward_passes.graph_explored(X, WALK, FOUR, [THREE])
    b.backward_passes.on_discover(C, Discover(X, WALK, TWO))
    assert b.backward_passes.graph_explored(X, WALK, TWO, [THREE]) == ([], [(C, Discovered(X, WALK, TWO))])


def test_a_discovery_of_an_unknown_send_fails_the_pass_of_the_asker(b: Contexts) -> None:
    for question in (Discover(X, WALK, 99), Discover(global_id(A, 5), WALK, FOUR)):
        ((to, answer),) = b.backward_passes.on_discover(A, question)[1]
        assert to == A and isinstance(answer, BackwardFailed)


# -- gradients
def test_a_pass_whose_roots_reach_no_message_runs_at_once(a: Contexts) -> None:
    assert a.backward_passes.begin_pass(X, WALK, [], retain=False, fast=False) == ([Propagate(X, WALK)], [])
    assert a.backward_passes.gradients_propagated(X, WALK, ROOT, {}) == (
        [PassEnded(X, WALK, None), ForgetPass(X, WALK)],
        [],
    )
    assert not a.contexts[X].backward_passes


def test_a_pass_whose_messages_list_all_sends_behind_them_skips_discovery() -> None:
    a, b = workers(told=True)
    assert a.backward_passes.begin_pass(X, WALK, [FOUR], retain=False, fast=False) == ([Propagate(X, WALK)], [])
    _, outbox = a.backward_passes.gradients_propagated(X, WALK, ROOT, {FOUR: EMPTY})
    assert outbox == [(B, gradients(FOUR, PLAN))]
    assert a.backward_passes.participating_sends(X, WALK) == ({ONE}, False)
    assert b.backward_passes.on_gradients(A, gradients(FOUR, PLAN)) == ([Accumulate(A, gradients(FOUR, PLAN))], [])
    assert b.backward_passes.participating_sends(X, WALK) == ({TWO, FOUR}, False)


def test_a_worker_reports_each_run_send_and_the_sends_that_it_fired_to_the_root(told: Contexts) -> None:
    told.backward_passes.on_gradients(A, gradients(FOUR, PLAN))
    assert told.backward_passes.gradients_propagated(X, WALK, FOUR, {THREE: EMPTY}) == (
        [],
        [(C, gradients(THREE, PLAN)), (A, settled(FOUR, THREE))],
    )
    told.backward_passes.on_gradients(C, gradients(TWO, PLAN))
    rides = gradients(ONE, PLAN, settled(TWO, ONE))
    assert told.backward_passes.gradients_propagated(X, WALK, TWO, {ONE: EMPTY}) == (
        [ForgetPass(X, WALK)],
        [(A, rides)],
    )
    assert not told.contexts[X].backward_passes


def test_the_root_ends_its_pass_when_all_fired_sends_are_settled_in_any_order() -> None:
    a, _ = workers(told=True)
    a.backward_passes.begin_pass(X, WALK, [FOUR], retain=False, fast=False)
    a.backward_passes.gradients_propagated(X, WALK, ROOT, {FOUR: EMPTY})
    assert a.backward_passes.on_settled(settled(THREE, TWO)) == ([], [])
    a.backward_passes.on_gradients(B, gradients(ONE, PLAN, settled(TWO, ONE)))
    assert a.backward_passes.gradients_propagated(X, WALK, ONE, {}) == ([], [])
    assert a.backward_passes.on_settled(settled(FOUR, THREE)) == ([PassEnded(X, WALK, None), ForgetPass(X, WALK)], [])


def test_two_passes_of_one_context_are_discovered_independently(a: Contexts) -> None:
    other = Id(A, 1)
    a.backward_passes.begin_pass(X, WALK, [FOUR], retain=False, fast=False)
    assert a.backward_passes.begin_pass(X, other, [FOUR], retain=False, fast=False) == (
        [],
        [(B, Discover(X, other, FOUR))],
    )
    assert a.backward_passes.on_discovered(Discovered(X, WALK, FOUR)) == ([Propagate(X, WALK)], [])
    assert a.backward_passes.on_discovered(Discovered(X, other, FOUR)) == ([Propagate(X, other)], [])


def test_unexpected_gradients_fail_the_pass_of_their_sender(told: Contexts) -> None:
    ((to, answer),) = told.backward_passes.on_gradients(A, gradients(FOUR))[1]
    assert to == A and isinstance(answer, BackwardFailed)
    told.backward_passes.on_gradients(A, gradients(FOUR, PLAN))
    ((to, answer),) = told.backward_passes.on_gradients(A, gradients(FOUR, PLAN))[1]
    assert to == A and isinstance(answer, BackwardFailed)


def test_each_stage_of_a_pass_is_reported() -> None:
    _, b = workers(told=False)
    kinds: list[str] = []
    b.note = lambda kind, table, key, row: kinds.append(kind)
    b.backward_passes.on_discover(A, Discover(X, WALK, FOUR))
    b.backward_passes.graph_explored(X, WALK, FOUR, [])
    b.backward_passes.on_gradients(A, gradients(FOUR))
    b.backward_passes.gradients_propagated(X, WALK, FOUR, {THREE: EMPTY})
    b.release_context(X)
    assert kinds == [
        *("SendDiscovered", "WalkMoved", "GradientsArrived", "GradientsSent", "WalkFinished", "ContextReleased")
    ]


# -- fast
def test_a_worker_in_a_fast_pass_waits_for_all_its_sends_and_lists_them_to_the_root(b: Contexts) -> None:
    b.backward_passes.on_gradients(A, gradients(FOUR, fast=True))
    assert b.backward_passes.participating_sends(X, WALK) == ({TWO, FOUR}, False)
    _, ((_, _), (to, report)) = b.backward_passes.gradients_propagated(X, WALK, FOUR, {THREE: EMPTY})
    assert to == A and set(report.awaited) == {Awaited(TWO, C, "work"), Awaited(FOUR, A, "work")}
    b.backward_passes.on_gradients(C, gradients(TWO, fast=True))
    assert b.backward_passes.gradients_propagated(X, WALK, TWO, {})[1] == [(A, settled(TWO))]


def test_a_fast_pass_that_comes_to_rest_fails_and_names_the_sends_without_gradients(a: Contexts) -> None:
    a.backward_passes.begin_pass(X, WALK, [FOUR], retain=False, fast=True)
    a.backward_passes.gradients_propagated(X, WALK, ROOT, {FOUR: EMPTY})
    awaited = (Awaited(FOUR, A, "work"), Awaited(TWO, C, "torch.add"))
    effects, outbox = a.backward_passes.on_settled(settled(FOUR, awaited=awaited))
    text = effects[0].failure.text
    assert "worker 1 to worker 2 (torch.add)" in text and "worker 0 to worker 1 (work)" in text
    assert outbox == [(B, effects[0].failure)]


# -- failures
def test_a_failure_is_sent_to_the_root_and_the_neighbours_once(b: Contexts) -> None:
    b.backward_passes.on_discover(A, Discover(X, WALK, FOUR))
    b.backward_passes.graph_explored(X, WALK, FOUR, [THREE])
    assert b.backward_passes.pass_failed(FAILURE) == ([ForgetPass(X, WALK)], [(A, FAILURE), (C, FAILURE)])
    assert b.backward_passes.pass_failed(FAILURE) == ([], [])
    assert b.backward_passes.graph_explored(X, WALK, FOUR, [THREE]) == ([], [])


def test_a_worker_whose_part_is_over_forwards_a_failure_to_the_root(told: Contexts) -> None:
    plan = (THREE, FOUR)
    told.backward_passes.on_gradients(A, gradients(FOUR, plan))
    told.backward_passes.gradients_propagated(X, WALK, FOUR, {THREE: EMPTY})
    assert not told.contexts[X].backward_passes
    assert told.backward_passes.pass_failed(FAILURE, C) == ([ForgetPass(X, WALK)], [(A, FAILURE)])


def test_a_failed_pass_does_not_begin_again(b: Contexts) -> None:
    b.backward_passes.on_discover(A, Discover(X, WALK, FOUR))
    b.backward_passes.pass_failed(FAILURE)
    effects, ((to, answer),) = b.backward_passes.on_discover(C, Discover(X, WALK, TWO))
    assert effects == [] and to == C and isinstance(answer, BackwardFailed)
    assert not b.contexts[X].backward_passes


def test_the_root_ends_its_pass_with_the_failure_that_it_receives(a: Contexts) -> None:
    a.backward_passes.begin_pass(X, WALK, [FOUR], retain=False, fast=False)
    assert a.backward_passes.pass_failed(FAILURE, B) == ([PassEnded(X, WALK, FAILURE), ForgetPass(X, WALK)], [])
    assert a.backward_passes.pass_failed(FAILURE, B) == ([], [])


def test_a_lost_worker_fails_the_passes_that_wait_for_it(a: Contexts) -> None:
    a.backward_passes.begin_pass(X, WALK, [FOUR], retain=False, fast=False)
    effects, _ = a.worker_lost(B, 0, "worker1: it was killed")
    failure = effects[0].failure
    assert (
        failure.type == "WorkerLostError"
        and f"context {X}" in failure.text
        and "worker1: it was killed" in failure.text
    )


def test_a_lost_worker_fails_the_passes_that_it_asked_about(b: Contexts) -> None:
    b.backward_passes.on_discover(C, Discover(X, WALK, TWO))
    effects, outbox = b.worker_lost(C, 0, "worker2: gone")
    ((to, failure),) = [(to, told) for to, told in outbox if isinstance(told, BackwardFailed)]
    assert effects == [ForgetPass(X, WALK)] and to == A and failure.worker == B


def test_a_lost_worker_fails_a_pass_when_a_later_report_shows_that_it_takes_part() -> None:
    a, _ = workers(told=True)
    a.backward_passes.begin_pass(X, WALK, [FOUR], retain=False, fast=False)
    a.backward_passes.gradients_propagated(X, WALK, ROOT, {FOUR: EMPTY})
    a.worker_lost(C, 0, "worker2: gone")  # no report has shown yet that it takes part
    effects, outbox = a.backward_passes.on_settled(settled(FOUR, THREE))
    assert isinstance(effects[0], PassEnded) and effects[0].failure.type == "WorkerLostError"
    assert [to for to, _ in outbox] == [B]


# -- ends
def test_a_release_drops_the_context_and_is_sent_to_all_its_participants(b: Contexts) -> None:
    assert b.release_context(X) == ([ForgetContext(X)], [(A, ReleaseContext(X)), (C, ReleaseContext(X))])
    assert b.release_context(X) == ([], [])
    assert b.contexts_table() == {}


def test_a_release_is_not_sent_back_to_the_worker_that_it_came_from(b: Contexts) -> None:
    assert b.release_context(X, (A,)) == ([ForgetContext(X)], [(C, ReleaseContext(X))])


def test_late_messages_do_not_reopen_a_released_context(b: Contexts) -> None:
    b.release_context(X)
    assert not b.record_recv(Scope(X, 5, ()), A, tensors=True)
    assert send(b, 6, C, []) is None
    assert b.open_context(X) is None and b.contexts_table() == {}


def test_a_release_fails_the_passes_that_this_worker_began(a: Contexts) -> None:
    a.backward_passes.begin_pass(X, WALK, [FOUR], retain=False, fast=False)
    ended, forgotten = a.release_context(X)[0]
    assert ended.pass_id == WALK and "released" in ended.failure.text
    assert forgotten == ForgetContext(X)


def test_contexts_of_a_lost_worker_are_released_and_stay_closed(b: Contexts) -> None:
    effects, outbox = b.worker_lost(A, 0, "worker gone")
    assert ForgetContext(X) in effects and outbox == [(C, ReleaseContext(X))]
    assert b.open_context(global_id(A, 9)) is None


def test_a_new_incarnation_can_open_contexts_and_its_predecessor_cannot(b: Contexts) -> None:
    b.worker_lost(A, 0, "worker gone")
    b.process_joined(A, 1)
    assert b.open_context(global_id(A, 9)) is None
    assert b.open_context(global_id(A, first_serial(1))) is not None


def test_a_participant_through_a_lost_worker_reports_to_the_owner_and_gets_the_release(
    a: Contexts, b: Contexts
) -> None:
    outbox = b.worker_lost(C, 0, "worker gone")[1]  # A's context may have reached B through C alone
    assert outbox == [(A, ContextParticipant(X))]
    a.contexts[X].known.clear()
    assert a.on_context_participant(B, X) == ([], []) and a.release_context(X)[1] == [(B, ReleaseContext(X))]
    assert a.on_context_participant(B, X) == ([], [(B, ReleaseContext(X))])


def test_a_late_message_of_a_lost_worker_opens_no_context(b: Contexts) -> None:
    b.worker_lost(C, 0, "worker gone")
    assert not b.record_recv(Scope(global_id(A, 7), 5, ()), C, tensors=True) and global_id(A, 7) not in b.contexts
    assert b.record_recv(Scope(X, 5, ()), C, tensors=True)  # this context is known from another worker


def test_gradients_for_a_send_outside_their_plan_begin_no_pass() -> None:
    _, b = workers(told=True)
    before = b.contexts_table()
    effects, outbox = b.backward_passes.on_gradients(A, Gradients(X, WALK, FOUR, False, False, (ONE, TWO), None, EMPTY))
    assert effects == [] and [(to, type(message)) for to, message in outbox] == [(A, BackwardFailed)]
    assert b.contexts_table() == before
