"""Messages between two members: kept, acknowledged, retransmitted and cancelled, one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rpcbench.base.errors import ConnectionLostError
from rpcbench.base.ids import Id
from rpcbench.protocol import effects as fx
from rpcbench.protocol.node import Node
from rpcbench.wire import messages as m
from rpcbench.wire.messages import Body

MEMBERS = tuple(m.Member(id_, f"worker{id_}", 0, "") for id_ in range(3))
NOTICE = m.Notice("test", b"")
DATA = Body(b"data", b"", [])
RREF, FORK = Id(1, 0), Id(1, 1)


def member(id_: int, lossy: bool = False) -> Node:
    """Worker 1 or 2 of three; number 0 from the leader has arrived and is acknowledged."""
    node = Node(MEMBERS[id_], None, lossy)
    node.handle_message(0, 0, m.View(4, MEMBERS, (), False, True), 0.0)
    node.tick_delivery()
    return node


def sends(effects: fx.Effects, kind: type) -> list[fx.Send]:
    return [effect for effect in effects if isinstance(effect, fx.Send) and isinstance(effect.message, kind)]


def give(node: Node, source: int, *sent: fx.Send) -> fx.Effects:
    """Deliver these messages."""
    return [
        e for send in sent if type(send) is fx.Send for e in node.handle_message(source, send.seq, send.message, 0.0)
    ]


def call_with_rref(node: Node, number: int = 7) -> fx.Send:
    """A call to worker 2 with an RRef that worker 2 owns."""
    node.rrefs.users.setdefault(FORK, node.rrefs.users.pop(node.rrefs.create_user(2, "")[1]))
    forks = (node.rrefs.share_rref(RREF, FORK, "", 2, 0.0),)
    (send,) = sends(node.start_call(2, m.Call(number, "f", None, forks, None, DATA), 0.0, None), m.Call)
    return send


# -- acknowledgements
def test_messages_are_acknowledged_together_at_the_next_tick() -> None:
    one, two = member(1), member(2)
    sent = sends([effect for _ in range(5) for effect in one.send_message(2, NOTICE)], m.Notice)
    effects = give(two, 1, *sent)
    assert effects.count(fx.Wake()) == 1 and not sends(effects, m.Seen)
    (seen,) = two.tick_delivery()
    assert seen.message == m.Seen(5, ())
    assert (
        one.delivery.describe_unfinished()
        and give(one, 2, seen) == []
        and not one.delivery.describe_unfinished()
        and one.tick_delivery() == []
    )
    assert two.tick_delivery() == []


def test_the_256th_unacknowledged_message_is_acknowledged_at_once() -> None:
    one, two = member(1), member(2)
    effects = [effect for _ in range(300) for effect in give(two, 1, *one.send_message(2, NOTICE))]
    assert [send.message for send in sends(effects, m.Seen)] == [m.Seen(256, ())]


def test_messages_beyond_a_gap_are_acknowledged_too() -> None:
    one, two = member(1), member(2)
    sent = sends([effect for _ in range(5) for effect in one.send_message(2, NOTICE)], m.Notice)
    give(two, 1, sent[0], sent[2], sent[4])
    (seen,) = two.tick_delivery()
    assert seen.message == m.Seen(1, (2, 4))
    give(one, 2, seen)
    assert list(one.delivery.pairs[2].kept) == [1, 3]


def test_a_lost_acknowledgement_is_sent_again_when_the_message_is_retransmitted() -> None:
    two = member(2)
    (sent,) = sends(member(1).send_message(2, NOTICE), m.Notice)
    for _ in range(2):
        give(two, 1, sent)
        (seen,) = two.tick_delivery()
        assert seen.message == m.Seen(1, ())


def test_bodies_are_not_kept_for_retransmission() -> None:
    one = member(1)
    one.start_call(2, m.Call(7, "f", None, (), None, DATA), 0.0, None)
    one.send_message(2, m.Result(8, (), None, DATA))
    one.send_message(2, m.Failure(9, "ValueError", "story", DATA))
    assert "data" not in str(one.delivery.pairs[2].kept) and len(one.delivery.pairs[2].kept) == 3
    again = [effect.message for _ in range(3) for effect in one.tick_delivery() if isinstance(effect, fx.Send)]
    assert again == [m.Failure(9, "ValueError", "story", m.EMPTY)]


# -- a connection that breaks
def test_a_broken_connection_fails_calls_in_flight_and_retransmits_other_messages() -> None:
    one, two = member(1), member(2)
    call = call_with_rref(one)
    (notice,) = sends(one.send_message(2, NOTICE), m.Notice)
    effects = one.connection_broken(2, 0, "reset")
    (reject,) = [effect for effect in effects if isinstance(effect, fx.Reject)]
    assert (
        isinstance(reject.error, ConnectionLostError) and reject.error.maybe_executed and "reset" in str(reject.error)
    )
    (cancel,) = sends(effects, m.Cancel)
    again = one.connection_resumed(2, 0)
    assert notice in again and cancel in again and call not in again
    assert sends(again, m.CancelDelivery)[0].message == m.CancelDelivery((call.seq,))
    (fate,) = sends(give(two, 1, *again), m.DeliveryReport)
    assert fate.message == m.DeliveryReport((call.seq,), ())
    give(one, 2, fate)
    assert not one.rrefs.children and give(two, 1, call) == []


def test_a_call_that_arrived_before_the_connection_broke_keeps_its_rrefs() -> None:
    one, two = member(1), member(2)
    give(two, 1, call_with_rref(one))
    one.connection_broken(2, 0, "reset")
    (fate,) = sends(give(two, 1, *one.connection_resumed(2, 0)), m.DeliveryReport)
    assert fate.message == m.DeliveryReport((), (0,))
    give(one, 2, fate)
    assert len(one.rrefs.children) == 1


def test_a_call_made_after_the_connection_broke_stays_outgoing() -> None:
    one = member(1)
    one.connection_broken(2, 0, "reset")
    call_with_rref(one)
    assert one.connection_resumed(2, 0) == [] and 7 in one.calls.outgoing


def test_a_broken_connection_of_another_incarnation_is_ignored() -> None:
    one = member(1)
    call_with_rref(one)
    assert one.connection_broken(2, 5, "reset") == [] and one.connection_resumed(2, 5) == []


# -- a connection that loses messages
def test_control_messages_are_retransmitted_at_growing_intervals() -> None:
    one = member(1, lossy=True)
    (notice,) = sends(one.send_message(2, NOTICE), m.Notice)
    turns = [turn for turn in range(1, 50) if notice in one.tick_delivery()]
    assert turns[:4] == [3, 6, 10, 17] and all(b - a > 2 for a, b in pairwise(turns))


def lost(node: Node, send: fx.Send) -> fx.Effects:
    """Lose this message: the receiver answers that it has never arrived."""
    asked = [effect for _ in range(12) for effect in node.tick_delivery()]
    assert send not in asked
    return give(node, send.to, *sends(give(member(send.to), 1, *sends(asked, m.CancelDelivery)[:1]), m.DeliveryReport))


def test_a_lost_call_fails_with_an_error_that_it_was_not_executed() -> None:
    one = member(1, lossy=True)
    effects = lost(one, call_with_rref(one))
    (reject,) = [effect for effect in effects if isinstance(effect, fx.Reject)]
    assert isinstance(reject.error, ConnectionLostError) and not reject.error.maybe_executed
    assert not one.rrefs.children


def test_a_lost_result_is_replaced_by_a_failure() -> None:
    one = member(1, lossy=True)
    rref = one.rrefs.new_id()
    forks = (one.rrefs.share_rref(rref, None, "", 2, 0.0),)
    (answer,) = sends(one.send_message(2, m.Result(7, forks, None, DATA)), m.Result)
    effects = lost(one, answer)
    assert fx.Free(rref) in effects
    (failure,) = sends(effects, m.Failure)
    assert failure.message.type == "ConnectionLostError" and failure.seq > answer.seq


def test_a_lost_creation_is_replaced_by_a_creation_failure() -> None:
    one = member(1, lossy=True)
    rref, fork = one.rrefs.create_user(2, "")
    (create,) = sends(one.start_call(2, m.Create(7, rref, fork, "f", None, (), None, None, DATA), 0.0, None), m.Create)
    (instead,) = sends(lost(one, create), m.CreateFailed)
    assert instead.message[:2] == (rref, fork)


@pytest.mark.parametrize(("lossy", "broken"), [(True, False), (False, True), (False, False)])
def test_slow_data_counts_as_lost_only_on_a_lossy_or_broken_connection(lossy: bool, broken: bool) -> None:
    one = member(1, lossy)
    call_with_rref(one)
    if broken:
        one.connection_broken(2, 0, "reset")
    assert bool(sends([effect for _ in range(50) for effect in one.tick_delivery()], m.CancelDelivery)) is (
        lossy or broken
    )


# -- before the end
def test_a_flush_ends_when_all_messages_are_acknowledged() -> None:
    one, two = member(1), member(2)
    arrived: list[bool] = []
    sent = sends(one.send_message(2, NOTICE), m.Notice)
    (ask,) = one.request_flush(lambda: arrived.append(True))
    (early,) = give(two, 1, ask)
    assert early.message == m.Seen(0, ()) and give(one, 2, early) == [] and not arrived
    give(two, 1, *sent)
    (again,) = sends(one.tick_delivery(), m.Seen)  # one of them may be lost
    (answer,) = give(two, 1, again)
    give(one, 2, answer)
    assert arrived == [True]


def test_a_flush_of_selected_messages_does_not_wait_for_others() -> None:
    one, two = member(1), member(2)
    arrived: list[bool] = []
    news = m.Notice("news", b"")
    sent = [sends(one.send_message(2, notice), m.Notice)[0] for notice in (NOTICE, news, NOTICE)]
    (ask,) = one.request_flush(lambda: arrived.append(True), lambda message: message == news)
    assert give(one, 2, *give(two, 1, sent[2], ask)) == [] and not arrived
    give(two, 1, sent[1])
    (answer,) = give(two, 1, ask)
    give(one, 2, answer)
    assert arrived == [True] and list(one.delivery.pairs[2].kept) == [0]
    assert not sends(one.tick_delivery(), m.Seen), "the flush is over"
    give(two, 1, sent[0])
    give(one, 2, *two.tick_delivery())
    assert arrived == [True], "the flush ends once"


def test_a_flush_does_not_wait_for_a_lost_member() -> None:
    one = member(1)
    arrived: list[bool] = []
    one.send_message(2, NOTICE)
    one.request_flush(lambda: arrived.append(True))
    one.handle_message(0, 1, m.View(5, MEMBERS[:2], ((2, "killed"),), False, True), 0.0)
    assert arrived == [True]
