"""What only the whole of the machines can do: numbers, last words, messages that are not sent."""

from __future__ import annotations

import pytest

from rpcbench.protocol.effects import Heard, OwnerLost, Reject, Resolve, Run, Send, Unmade, WalkEnded
from rpcbench.protocol.node import Node
from rpcbench.wire import messages as m
from rpcbench.words.errors import NotConnectedError, ProtocolError
from rpcbench.words.ids import Id, global_id

MEMBERS = tuple(m.Member(id_, f"worker{id_}", 0, "") for id_ in range(4))
NOTICE = m.Notice("test", b"")
TOO_LARGE = ProtocolError("too large")
RREF, FORK = Id(2, 0), Id(2, 1)


@pytest.fixture
def node() -> Node:
    """Worker 1 of four; number 0 from the leader is used."""
    node = Node(MEMBERS[1], None)
    node.handle(0, 0, m.View(4, MEMBERS, (), False, True), 0.0)
    return node


def lose(node: Node, worker: int, number: int = 1) -> list[object]:
    left = tuple(member for member in MEMBERS if member.id != worker)
    return node.handle(0, number, m.View(5, left, ((worker, "killed"),), False, True), 0.0)


def test_numbers_count_up_for_each_receiver(node: Node) -> None:
    sent = [effect for to in (2, 3, 2) for effect in node.send(to, NOTICE)]
    assert [(send.to, send.seq) for send in sent] == [(2, 0), (3, 0), (2, 1)]


def test_a_message_that_comes_twice_is_handled_once(node: Node) -> None:
    assert node.handle(2, 0, NOTICE, 0.0) == [Heard(2, NOTICE)]
    assert node.handle(2, 0, NOTICE, 0.0) == []
    assert node.handle(3, 0, NOTICE, 0.0) == [Heard(3, NOTICE)]


def test_only_the_leader_leads(node: Node) -> None:
    view = m.View(9, (), (), True, True)
    messages = [view, m.Refused("no"), m.Join(MEMBERS[2], None), m.Ready(True), m.Report(3, 0, "")]
    for number, message in enumerate(messages):
        with pytest.raises(ProtocolError, match=f"worker 2 may not send a {type(message).__name__}"):
            node.handle(2, number, message, 0.0)
    assert len(node.members.members) == 4


def test_last_words_of_a_lost_member_are_not_heard(node: Node) -> None:
    lose(node, 2)
    assert node.handle(2, 0, m.ForkRequest(RREF, FORK), 0.0) == []
    assert not any(node.tables().values())


def test_to_a_successor_numbers_begin_again(node: Node) -> None:
    node.send(2, NOTICE)
    node.handle(2, 0, NOTICE, 0.0)
    lose(node, 2)
    successor = MEMBERS[2]._replace(incarnation=1)
    node.handle(0, 2, m.View(6, (*MEMBERS[:2], successor, MEMBERS[3]), (), False, True), 0.0)
    assert node.handle(2, 0, NOTICE, 0.0) == [Heard(2, NOTICE)]
    assert node.send(2, NOTICE) == [Send(2, 0, NOTICE)]


# -- what is not sent
def test_a_request_that_is_not_sent_is_taken_back(node: Node) -> None:
    rref, fork = node.rrefs.create_user(2, "")
    shared = node.rrefs.share(rref, fork, "", 3, 0.0)
    call = m.Call(7, "f", None, (shared,), None, m.EMPTY)
    (send,) = node.call(3, call, 0.0, None)
    assert node.unsent(3, call, TOO_LARGE, send.seq) == [Send(3, 0, m.Cancel(-1)), Reject(7, TOO_LARGE)]
    assert node.rrefs.children == {}


def test_an_answer_that_is_not_sent_becomes_a_failure(node: Node) -> None:
    filled = node.unsent(2, m.Result(7, (), None, m.EMPTY), TOO_LARGE, 5)
    assert filled == [Send(2, 5, m.Failure(7, "ProtocolError", "too large", m.EMPTY))]
    assert node.unsent(2, filled[0].message, TOO_LARGE, 5) == [Send(2, 5, m.Cancel(-1))]
    assert node.unsent(2, m.Cancel(-1), TOO_LARGE, 5) == []


def test_an_owner_that_does_not_hear_of_its_user_is_lost_to_it(node: Node) -> None:
    fork = m.Fork(RREF, 2, Id(3, 0), 3, "")
    call = m.Call(7, "f", None, (fork,), None, m.EMPTY)
    (request,) = node.handle(3, 0, call, 0.0)
    effects = node.unsent(2, request.message, NotConnectedError("gone"), request.seq)
    assert effects[1:3] == [OwnerLost(RREF), Run(3, call)]


def test_a_pass_whose_question_is_not_sent_fails(node: Node) -> None:
    context, walk = global_id(1, 0), Id(1, 0)
    node.contexts.record_recv(context, 5, 2, tensors=True)
    (ask,) = node.outcome(node.contexts.begin(context, walk, [5]))
    ended = node.unsent(2, ask.message, NotConnectedError("gone"), ask.seq)[-1]
    assert isinstance(ended, WalkEnded) and ended.source == 2 and ended.failure.text == "gone"


# -- calls with RRefs
def test_an_answer_nobody_waits_for_lets_its_rrefs_go(node: Node) -> None:
    fork = m.Fork(RREF, 2, Id(2, 2), 2, "")
    answer = m.Result(7, (fork,), None, m.EMPTY)
    assert node.handle(2, 0, answer, 0.0) == [Send(2, 0, m.UserDelete(RREF, Id(2, 2)))]
    node.call(2, m.Fetch(7, RREF, None, None), 0.0, None)
    assert node.handle(2, 1, answer, 0.0) == [Resolve(7, 2, answer)]


def test_a_creation_given_up_before_it_ran_is_an_error_for_all_that_ask(node: Node) -> None:
    argument = m.Fork(Id(3, 0), 3, Id(2, 2), 2, "")
    node.handle(2, 0, m.Create(7, RREF, FORK, "f", None, (argument,), None, m.EMPTY), 0.0)
    (unmade,) = [effect for effect in node.handle(2, 1, m.Cancel(7), 0.0) if isinstance(effect, Unmade)]
    assert unmade.rref == RREF and "gave it up" in str(unmade.error)
    assert not any(isinstance(effect, Run) for effect in node.handle(3, 0, m.ForkAccept(Id(3, 0), Id(2, 2)), 0.0))


def test_a_held_call_runs_when_the_owner_it_waits_for_is_lost(node: Node) -> None:
    call = m.Call(7, "f", None, (m.Fork(RREF, 2, Id(3, 0), 3, ""),), None, m.EMPTY)
    node.handle(3, 0, call, 0.0)
    assert Run(3, call) in lose(node, 2)
