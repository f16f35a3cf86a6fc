"""The fast path leaves nodes in the state of the general path; the simulation checks this in any order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulation import Member, World

from rpcbench.base.ids import Id
from rpcbench.protocol import effects as fx
from rpcbench.protocol.delivery import OWED
from rpcbench.protocol.node import Node
from rpcbench.wire import messages as m


def two() -> tuple[Node, Node]:
    """A caller and a callee that have exchanged messages."""
    world = World(1, Member, 2)
    caller, callee = world.members[0].node, world.members[1].node
    for source, node, other in ((0, caller, callee), (1, callee, caller)):
        notice = m.Notice("any", b"")
        _carry(source, other, node.send_message(1 - source, notice))
    return caller, callee


def _carry(source: int, to: Node, effects: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for effect in effects:
        if isinstance(effect, fx.Send):
            found += to.handle_message(source, effect.seq, effect.message, 0.0)
    return found


def call(number: int) -> m.Call:
    return m.Call(number, "f", 60.0, (), None, m.EMPTY)


def result(number: int) -> m.Result:
    return m.Result(number, (), None, m.EMPTY)


def _state(node: Node) -> tuple[Any, ...]:
    pairs = {
        peer: (pair.sent, pair.kept, pair.late, pair.owed, pair.window.first_missing, len(pair.window))
        for peer, pair in node.delivery.pairs.items()
    }
    return pairs, node.calls.outgoing, node.calls.serving, node.delivery.ticking


def test_each_step_of_the_fast_path_leaves_the_state_of_the_general_path() -> None:
    ways = []
    for briefly in (True, False):
        caller, callee = two()
        seen = []
        for asked in (call(1), m.Fetch(2, Id(1, 5), None, None)):
            if briefly:
                send = caller.fast_call(1, asked, 3.0, 60.0)
                assert send is not None and callee.fast_take(0, send.seq, send.message, 4.0)
            else:
                (send,) = caller.start_call(1, asked, 3.0, 60.0)
                assert callee.handle_message(0, send.seq, send.message, 4.0) == [fx.Enqueue(0, asked.call)]
                assert callee.begin_serving(0, asked.call, 4.0) == [fx.Run(0, asked)]
            seen += [send, _state(caller), _state(callee)]
            if briefly:
                back = callee.fast_answer(0, result(asked.call))
                assert back is not None and caller.fast_resolve(1, back.seq, back.message)
            else:
                assert callee.calls.finish_serving(0, asked.call)
                (back,) = callee.send_message(0, result(asked.call))
                (resolved,) = caller.handle_message(1, back.seq, back.message, 5.0)
                assert resolved == fx.Resolve(asked.call, 1, back.message)
            seen += [back, _state(caller), _state(callee)]
        ways.append(repr(seen))
    assert ways[0] == ways[1]


def test_a_create_on_the_fast_path_leaves_the_state_of_the_general_path() -> None:
    ways = []
    for briefly in (True, False):
        caller, _ = two()
        made = m.Create(1, *caller.rrefs.create_user(1, "f"), "f", None, (), None, None, m.EMPTY)
        send = caller.fast_call(1, made, 3.0, 60.0) if briefly else caller.start_call(1, made, 3.0, 60.0)[0]
        ways.append(repr((send, _state(caller))))
    assert ways[0] == ways[1]


def test_the_fast_path_rejects_special_cases_and_changes_no_state() -> None:
    caller, callee = two()
    send = caller.fast_call(1, call(1), 0.0, None)
    assert send is not None
    before = repr((_state(caller), _state(callee)))
    assert not callee.fast_take(0, send.seq + 1, call(2), 0.0), "the message before it has not arrived"
    assert not callee.fast_take(0, send.seq - 1, call(2), 0.0), "it has arrived already"
    assert not callee.fast_take(0, send.seq ^ 1 << 41, call(2), 0.0), "it comes from another incarnation"
    assert not callee.fast_take(5, send.seq, call(2), 0.0), "its sender is unknown"
    assert caller.fast_call(5, call(2), 0.0, None) is None
    gone = m.Create(2, Id(0, 7), Id(0, 8), "f", None, (), None, None, m.EMPTY)
    assert caller.fast_call(1, gone, 0.0, None) is None, "its owner is lost, and its fork with it"
    assert callee.fast_answer(0, result(1)) is None, "no such call has arrived"
    assert not caller.fast_resolve(1, callee.delivery.pairs[0]._base | callee.delivery.pairs[0].sent, result(9))
    for node in (caller, callee):
        node.delivery.ticking = False
    assert caller.fast_call(1, call(2), 0.0, None) is None and not callee.fast_take(0, send.seq, call(1), 0.0)
    caller.delivery.ticking = callee.delivery.ticking = True
    assert repr((_state(caller), _state(callee))) == before


def test_messages_on_the_fast_path_are_acknowledged() -> None:
    caller, callee = two()
    for number in range(3 * OWED):
        send = caller.fast_call(1, call(number), 0.0, None)
        assert send is not None
        if not callee.fast_take(0, send.seq, send.message, 0.0):
            _carry(1, caller, callee.handle_message(0, send.seq, send.message, 0.0))
            callee.begin_serving(0, number, 0.0)
        back = callee.fast_answer(0, result(number))
        assert back is not None
        if not caller.fast_resolve(1, back.seq, back.message):
            _carry(0, callee, caller.handle_message(1, back.seq, back.message, 0.0))
        assert len(caller.delivery.pairs[1].kept) <= OWED + 2 and len(callee.delivery.pairs[0].kept) <= OWED + 2
    assert not caller.calls.outgoing and not callee.calls.serving
