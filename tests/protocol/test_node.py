"""The machines of a node together: sequence numbers, late and early messages, unsent messages."""

from __future__ import annotations

import pytest

from rpcbench.base.errors import NotConnectedError, ProtocolError
from rpcbench.base.ids import Id, global_id
from rpcbench.protocol.delivery import LIFE_BITS, SEQUENCE_COUNT_BITS
from rpcbench.protocol.effects import (
    BodyLost,
    Complete,
    Enqueue,
    NoticeReceived,
    OwnerLost,
    PassEnded,
    Reject,
    Rejected,
    Resolve,
    Run,
    Send,
    ValueFailed,
)
from rpcbench.protocol.node import Node
from rpcbench.wire import messages as m

MEMBERS = tuple(m.Member(id_, f"worker{id_}", 0, "") for id_ in range(4))
NOTICE = m.Notice("test", b"")
TOO_LARGE = ProtocolError("too large")
NOT_CONNECTED = NotConnectedError("nobody answers")
RREF, FORK = Id(2, 0), Id(2, 1)


@pytest.fixture
def node() -> Node:
    """Worker 1 of four; number 0 from the leader has arrived."""
    node = Node(MEMBERS[1], None)
    node.handle_message(0, 0, m.View(4, MEMBERS, (), False, True), 0.0)
    return node


def lose(node: Node, worker: int, number: int = 1) -> list[object]:
    left = tuple(member for member in MEMBERS if member.id != worker)
    view = m.View(5, left, (m.Loss(worker, "killed"),), False, True, (m.Past(worker, 0),))
    return node.handle_message(0, number, view, 0.0)


def test_a_flush_at_the_end_does_not_wait_for_acknowledgements_of_a_departed_member(node: Node) -> None:
    told: list[int] = []
    node.send_message(2, NOTICE)
    node.member_lost(2, 0, "its connection closed")  # worker 2 learned sooner that all members are ready
    node.handle_message(0, 0, m.Seen(1, (), False), 0.0)  # the leader has the report
    node.request_flush(lambda: told.append(1))
    assert told == []
    node.handle_message(0, 1, m.View(5, MEMBERS, (), True, True), 0.0)
    assert told == [1] and not node.send_message(2, NOTICE)
    node.request_flush(lambda: told.append(2))
    assert told == [1, 2]


def test_sequence_numbers_count_up_for_each_receiver(node: Node) -> None:
    sent = [effect for to in (2, 3, 2) for effect in node.send_message(to, NOTICE)]
    assert [(send.to, send.seq) for send in sent] == [(2, 0), (3, 0), (2, 1)]


def test_a_message_that_arrives_twice_is_handled_once(node: Node) -> None:
    assert node.handle_message(2, 0, NOTICE, 0.0) == [NoticeReceived(2, NOTICE)]
    assert node.handle_message(2, 0, NOTICE, 0.0) == []
    assert node.handle_message(3, 0, NOTICE, 0.0) == [NoticeReceived(3, NOTICE)]


def test_a_node_rejects_membership_messages_from_a_member_that_is_not_the_leader(node: Node) -> None:
    view = m.View(9, (), (), True, True)
    messages = [view, m.Refused("no"), m.Join(MEMBERS[2], None), m.Ready(True), m.Report(3, 0, "")]
    for number, message in enumerate(messages):
        with pytest.raises(ProtocolError, match=f"worker 2 may not send a {type(message).__name__}"):
            node.handle_message(2, number, message, 0.0)
    assert len(node.members.members) == 4


def test_a_refused_node_emits_rejected_with_the_reason() -> None:
    node = Node(MEMBERS[1], 3)
    node.start_node()
    assert node.handle_message(0, 0, m.Refused("no"), 0.0)[0] == Rejected("no")


def test_a_view_keeps_the_connection_state_of_a_live_member_of_any_incarnation() -> None:
    node = Node(MEMBERS[1], None)
    node.handle_message(0, 0, m.View(4, MEMBERS, (), False, True), 0.0)
    lose(node, 2)
    late = MEMBERS[2]._replace(incarnation=(1 << LIFE_BITS) + 3)
    node.delivery.create_pair(2, late.incarnation)
    (call,) = node.send_message(2, NOTICE)
    node.handle_message(0, 2, m.View(6, (*MEMBERS[:2], late, MEMBERS[3]), (), False, True), 0.0)
    assert node.delivery.pairs[2].kept == {0: NOTICE} and node.delivery.pairs[2].is_own_number(call.seq)


def test_a_late_message_of_a_lost_member_is_ignored(node: Node) -> None:
    lose(node, 2)
    assert node.handle_message(2, 0, m.ForkRequest(RREF, FORK), 0.0) == []
    assert not any(node.all_tables().values())


@pytest.fixture
def newcomer() -> Node:
    """Worker 1, which has asked to join; messages of the leader and of worker 2 have arrived before the first View."""
    node = Node(MEMBERS[1], None)
    node.start_node()
    fork = m.Fork(Id(3, 0), 3, Id(0, 2), 0, "", 0)
    node.handle_message(0, 1, m.Create(6, Id(0, 0), Id(0, 1), "f", None, (fork,), None, None, m.EMPTY), 0.0)
    assert node.handle_message(2, 0, m.Create(7, RREF, FORK, "f", None, (), None, None, m.EMPTY), 0.0) == []
    assert [*node.all_tables()["owned"]] == ["0.0"]
    return node


def test_an_early_message_waits_for_the_view_that_names_its_sender(newcomer: Node) -> None:
    newcomer.handle_message(0, 0, m.View(4, MEMBERS, (), False, True), 0.0)
    assert [*newcomer.all_tables()["owned"]] == ["0.0", "2.0"]


@pytest.mark.parametrize("leader_first", [False, True])
def test_a_member_that_is_lost_before_the_first_view_leaves_no_state(newcomer: Node, leader_first: bool) -> None:
    for gone in (0, 2) if leader_first else (2, 0):
        newcomer.member_lost(gone, 0, "killed")
    assert (
        not any(newcomer.all_tables().values()) and not newcomer.delivery.describe_unfinished() and not newcomer._early
    )
    assert newcomer.handle_message(2, 1, m.ForkRequest(RREF, FORK), 0.0) == [] and not newcomer._early


def test_a_node_whose_leader_is_lost_before_the_first_view_ignores_all_messages(newcomer: Node) -> None:
    newcomer.member_lost(0, 0, "killed")
    assert not any(newcomer.all_tables().values()) and not newcomer.delivery.pairs and not newcomer._early
    assert newcomer.handle_message(2, 1, m.ForkRequest(RREF, FORK), 0.0) == []


def test_an_early_message_survives_the_loss_of_an_older_incarnation_of_its_sender(newcomer: Node) -> None:
    newcomer.handle_message(2, FROM_SUCCESSOR, NOTICE, 0.0)
    newcomer.member_lost(2, 0, "killed")
    successor = MEMBERS[2]._replace(incarnation=1)
    effects = newcomer.handle_message(0, 0, m.View(4, (*MEMBERS[:2], successor), (), False, True), 0.0)
    assert NoticeReceived(2, NOTICE) in effects and [*newcomer.all_tables()["owned"]] == ["0.0"]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(("owner", "sender"), [(2, 3), (3, 2)])
def test_an_owner_that_a_view_names_together_with_the_sender_of_an_early_call_is_asked_once(
    owner: int, sender: int, restarted: bool
) -> None:
    """In each order of the two in the View; a predecessor of the owner may have been lost."""
    node = Node(MEMBERS[1], None)
    if restarted:
        node.handle_message(0, 0, m.View(4, MEMBERS, (), False, True), 0.0)
        losses, past = (m.Loss(2, "killed"), m.Loss(3, "killed")), (m.Past(2, 0), m.Past(3, 0))
        node.handle_message(0, 1, m.View(5, MEMBERS[:2], losses, False, True, past), 0.0)
    else:
        node.handle_message(0, 0, m.View(4, MEMBERS[:2], (), False, True), 0.0)
        node.handle_message(0, 1, m.View(5, MEMBERS[:2], (), False, True), 0.0)
    fork = m.Fork(Id(owner, 7, restarted), owner, Id(sender, 8, restarted), sender, "", int(restarted))
    call = m.Call(1, "f", None, (fork,), None, m.EMPTY)
    assert node.handle_message(sender, FROM_SUCCESSOR if restarted else 0, call, 0.0) == []
    view = m.View(
        6, (*MEMBERS[:2], *(each._replace(incarnation=int(restarted)) for each in MEMBERS[2:])), (), False, True
    )
    effects = node.handle_message(0, 2, view, 0.0)
    assert not any(isinstance(effect, OwnerLost) for effect in effects)
    requests = [effect for effect in effects if isinstance(effect, Send) and type(effect.message) is m.ForkRequest]
    assert [request.to for request in requests] == [owner]


def test_a_node_of_a_later_incarnation_can_send_to_itself_before_it_is_admitted() -> None:
    node = Node(MEMBERS[1]._replace(incarnation=1), None)
    (send,) = [effect for effect in node.send_message(1, NOTICE) if isinstance(effect, Send)]
    assert node.handle_message(1, send.seq, NOTICE, 0.0)[0] == NoticeReceived(1, NOTICE)


def test_a_member_lost_before_the_first_view_can_be_in_it_and_leave_in_the_next_one(newcomer: Node) -> None:
    newcomer.member_lost(2, 0, "killed")
    newcomer.handle_message(0, 0, m.View(4, MEMBERS, (), False, True), 0.0)
    assert [*newcomer.all_tables()["owned"]] == ["0.0"], "its early message is dropped"
    assert [send.to for send in newcomer.send_message(2, NOTICE) if isinstance(send, Send)] == [2]
    lose(newcomer, 2, 2)
    assert not newcomer.delivery.find_pair(2, 0)


def test_the_leader_ignores_joins_of_incarnations_that_are_already_lost() -> None:
    leader = Node(MEMBERS[0], None)
    leader.start_node()
    second, third = (MEMBERS[2]._replace(incarnation=life) for life in (1, 2))
    leader.member_lost(2, 1, "killed")
    leader.member_lost(2, 0, "killed before, and told late")
    for seq, join in (0, m.Join(MEMBERS[2], None)), (FROM_SUCCESSOR, m.Join(second, None)):
        assert leader.handle_message(2, seq, join, 0.0) == []
    assert 2 not in leader.members.members and not leader.delivery.describe_unfinished()
    assert leader.members.next_incarnation(2) == 2
    assert leader.handle_message(2, 2 * FROM_SUCCESSOR, m.Join(third, None), 0.0)
    assert leader.members.members[2] == third


def succeed(node: Node, number: int) -> None:
    """Publish a view with the next incarnation of worker 2."""
    successor = MEMBERS[2]._replace(incarnation=1)
    node.handle_message(0, number, m.View(6, (*MEMBERS[:2], successor, MEMBERS[3]), (), False, True), 0.0)


FROM_SUCCESSOR, TO_SUCCESSOR = 1 << SEQUENCE_COUNT_BITS + LIFE_BITS, 1 << SEQUENCE_COUNT_BITS


def test_sequence_numbers_restart_for_a_new_incarnation(node: Node) -> None:
    node.send_message(2, NOTICE)
    node.handle_message(2, 0, NOTICE, 0.0)
    lose(node, 2)
    succeed(node, 2)
    assert node.handle_message(2, FROM_SUCCESSOR, NOTICE, 0.0) == [NoticeReceived(2, NOTICE)]
    assert node.send_message(2, NOTICE) == [Send(2, TO_SUCCESSOR, NOTICE)]


def test_messages_and_the_loss_of_an_old_incarnation_do_not_affect_the_new_one(node: Node) -> None:
    lose(node, 2)
    succeed(node, 2)
    assert node.handle_message(2, 0, NOTICE, 0.0) == []
    assert node.member_lost(2, 0, "late news") == []
    assert node.handle_message(2, FROM_SUCCESSOR, NOTICE, 0.0) == [NoticeReceived(2, NOTICE)]


def test_a_message_to_another_incarnation_of_the_receiver_is_ignored(node: Node) -> None:
    assert node.handle_message(3, TO_SUCCESSOR, NOTICE, 0.0) == []


@pytest.mark.parametrize("known_loss", [True, False])
def test_an_early_message_of_a_new_incarnation_waits_for_the_view_that_names_it(node: Node, known_loss: bool) -> None:
    node.handle_message(2, 0, NOTICE, 0.0)
    if known_loss:
        lose(node, 2)
    assert node.handle_message(2, FROM_SUCCESSOR, NOTICE, 0.0) == []
    successor = MEMBERS[2]._replace(incarnation=1)
    view = m.View(6, (*MEMBERS[:2], successor, MEMBERS[3]), (), False, True)
    assert NoticeReceived(2, NOTICE) in node.handle_message(0, 2, view, 0.0)
    assert node.handle_message(2, FROM_SUCCESSOR, NOTICE, 0.0) == []


# -- unsent messages
def test_an_unsent_call_fails_and_takes_its_forks_back(node: Node) -> None:
    rref, fork = node.rrefs.create_user(2, "")
    shared = node.rrefs.share_rref(rref, fork, "", 3, 0.0)
    call = m.Call(7, "f", None, (shared,), None, m.EMPTY)
    (send,) = node.start_call(3, call, 0.0, None)
    assert node.send_failed(send, TOO_LARGE) == [Send(3, 0, m.Cancel(-1)), Reject(7, TOO_LARGE), BodyLost(3)]
    assert node.rrefs.children == {}


def test_an_unsent_result_is_replaced_by_a_failure_and_then_by_a_cancel(node: Node) -> None:
    (answer,) = node.send_message(2, m.Result(7, (), None, m.EMPTY))
    filled = node.send_failed(answer, TOO_LARGE)
    assert filled == [Send(2, 0, m.Failure(7, "ProtocolError", "too large", m.EMPTY)), BodyLost(2)]
    filled = node.send_failed(filled[0], TOO_LARGE)
    assert filled == [Send(2, 0, m.Cancel(-1)), BodyLost(2)]
    assert node.send_failed(filled[0], TOO_LARGE) == []


def test_an_unsent_creation_fails_and_its_owner_gets_an_error_as_the_value(node: Node) -> None:
    rref, fork = node.rrefs.create_user(2, "")
    (create,) = node.start_call(2, m.Create(7, rref, fork, "f", None, (), None, None, m.EMPTY), 0.0, None)
    instead, rejected, lost = node.send_failed(create, TOO_LARGE)
    assert instead == Send(2, 0, m.CreateFailed(rref, fork, "f", "too large"))
    assert (rejected, lost) == (Reject(7, TOO_LARGE), BodyLost(2))
    owner = Node(MEMBERS[2], None)
    owner.handle_message(0, 0, m.View(4, MEMBERS, (), False, True), 0.0)
    owner.handle_message(3, 0, m.ForkRequest(rref, Id(3, 0)), 0.0)  # the user has shared it meanwhile
    unmade, accept = owner.handle_message(1, 0, instead.message, 0.0)
    assert unmade.rref == rref and "too large" in str(unmade.error)
    assert accept.message == m.ForkAccept(rref, fork, first=True)


def test_an_unsent_control_message_is_retransmitted(node: Node) -> None:
    fork = m.Fork(RREF, 2, Id(3, 0), 3, "")
    (request,) = node.handle_message(3, 0, m.Call(7, "f", None, (fork,), None, m.EMPTY), 0.0)
    assert node.send_failed(request, NOT_CONNECTED) == []
    assert request in [effect for _ in range(3) for effect in node.tick_delivery()]


def test_a_node_sends_nothing_to_a_lost_member(node: Node) -> None:
    lose(node, 2)
    fork = m.Fork(RREF, 2, Id(3, 0), 3, "")
    call = m.Call(7, "f", None, (fork,), None, m.EMPTY)
    effects = node.handle_message(3, 0, call, 0.0)
    assert OwnerLost(RREF) in effects and Enqueue(3, 7) in effects
    assert not any(isinstance(effect, Send) and effect.to == 2 for effect in effects)
    rref, first = node.rrefs.create_user(2, "")
    effects = node.start_call(2, m.Create(8, rref, first, "f", None, (), None, None, m.EMPTY), 0.0, None)
    assert [type(effect) for effect in effects] == [OwnerLost, Reject] and first not in node.rrefs.users


def test_a_pass_that_needs_a_lost_worker_fails(node: Node) -> None:
    context, walk = global_id(1, 0), Id(1, 0)
    node.contexts.record_recv(m.Scope(context, 5, None), 2, tensors=True)
    lose(node, 2)
    ended = node.process_outcome(node.contexts.backward_passes.begin_pass(context, walk, [5], retain=False, fast=False))
    (failure,) = [effect.failure for effect in ended if isinstance(effect, PassEnded)]
    assert failure.type == "WorkerLostError" and "killed" in failure.text


# -- calls with RRefs
def test_an_unexpected_result_releases_its_rrefs(node: Node) -> None:
    fork = m.Fork(RREF, 2, Id(2, 2), 2, "")
    answer = m.Result(7, (fork,), None, m.EMPTY)
    assert node.handle_message(2, 0, answer, 0.0) == [Send(2, 0, m.UserDelete(RREF, Id(2, 2)))]
    node.start_call(2, m.Fetch(7, RREF, None, None), 0.0, None)
    assert node.handle_message(2, 1, answer, 0.0) == [Resolve(7, 2, answer)]


def test_a_creation_that_is_cancelled_before_it_runs_has_an_error_as_value(node: Node) -> None:
    argument = m.Fork(Id(3, 0), 3, Id(2, 2), 2, "")
    node.handle_message(2, 0, m.Create(7, RREF, FORK, "f", None, (argument,), None, None, m.EMPTY), 0.0)
    (unmade,) = [effect for effect in node.handle_message(2, 1, m.Cancel(7), 0.0) if isinstance(effect, ValueFailed)]
    assert unmade.rref == RREF and "cancelled it" in str(unmade.error)
    assert not any(
        isinstance(effect, Enqueue) for effect in node.handle_message(3, 0, m.ForkAccept(Id(3, 0), Id(2, 2)), 0.0)
    )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("how", ["expired", "cancelled", "lost"])
def test_a_creation_dropped_from_the_queue_releases_its_rrefs_and_has_an_error_as_value(
    node: Node, how: str, known: bool
) -> None:
    """The value is an error for its users; for the owner, too, if it has no users."""
    argument = m.Fork(Id(3, 0), 3, Id(3, 2), 3, "")
    create = m.Create(7, RREF, FORK, "f", 1.0, (argument,), None, None, m.EMPTY)
    assert Enqueue(2, 7) in node.handle_message(2, 0, create, 0.0)
    if known:
        node.handle_message(3, 0, m.ForkRequest(RREF, Id(3, 9)), 0.0)
    elif how != "lost":
        node.handle_message(2, 2, m.UserDelete(RREF, FORK), 0.0)
    ends = {
        "expired": lambda: node.begin_serving(2, 7, 1.5),
        "cancelled": lambda: node.handle_message(2, 1, m.Cancel(7), 0.5),
        "lost": lambda: lose(node, 2),
    }
    effects = ends[how]()
    (unmade,) = [effect for effect in effects if isinstance(effect, ValueFailed)]
    assert unmade.rref == RREF and not unmade.error.maybe_executed
    assert m.UserDelete(Id(3, 0), Id(3, 2)) in [effect.message for effect in effects if isinstance(effect, Send)]
    assert node.begin_serving(2, 7, 0.0) == []


def test_a_call_is_queued_when_the_owner_that_would_confirm_its_fork_is_lost(node: Node) -> None:
    call = m.Call(7, "f", None, (m.Fork(RREF, 2, Id(3, 0), 3, ""),), None, m.EMPTY)
    node.handle_message(3, 0, call, 0.0)
    assert Enqueue(3, 7) in lose(node, 2)
    assert node.begin_serving(3, 7, 0.0) == [Run(3, call)]


def test_the_complete_effect_follows_the_sends_that_announce_the_complete_world() -> None:
    """A thread that waits for it may end the process at once, and the other members would never get the view."""
    leader = Node(MEMBERS[0], 2)
    leader.start_node()
    effects = leader.process_outcome(leader.members.on_join(1, m.Join(MEMBERS[1], 2)))
    assert effects[-1] == Complete(False) and [e.to for e in effects if isinstance(e, Send)] == [1]
