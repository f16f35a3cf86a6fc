"""Rings in shared memory between stages: the same values, records and errors as with a message for each value."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from torch import Tensor, nn
from worlds import entries, nothing_left, until, world

from rpcbench.autograd import recorder
from rpcbench.base.errors import PipelineError, ProtocolError, WorkerLostError
from rpcbench.pipeline import Pipeline, split, stage
from rpcbench.pipeline import stage_ring as lanes_
from rpcbench.pipeline.exchange import DECISION, FORWARD, VOTE, Slot, Slots
from rpcbench.pipeline.mailboxes import CREDITS, ENDS, Channel, Mailbox
from rpcbench.pipeline.placement import StagePlacement
from rpcbench.pipeline.stage_ring import StageRing
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.requests import RequestSender
from rpcbench.serialization import tensor_types
from rpcbench.testing import Faults
from rpcbench.transport import shared_ring
from rpcbench.transport.shared_ring import AWAY, POLLING, SLOT_BYTES, SLOTS

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(not shared_ring.SUPPORTED, reason="no lanes here")]
HOMES = StagePlacement({0: 1, 1: 2}, (1,), 0)


@pytest.fixture(autouse=True)
def on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RPCBENCH_TRANSPORT", "RPCBENCH_SHARED_MEMORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def went(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """The number of values that went through a ring (True), and of those that did not (False)."""
    found: Counter[bool] = Counter()
    give = StageRing.give

    def told(self: StageRing, *args: Any, **how: Any) -> bool:
        by_lane = give(self, *args, **how)
        found[by_lane] += 1
        return by_lane

    monkeypatch.setattr(StageRing, "give", told)
    return found


# -- two mailboxes, by hand
class Pair:
    """The mailboxes of two workers of a pipeline without stages: `first` sends, `second` takes, in step 1."""

    def __init__(self, agents: list[Agent]) -> None:
        self.agents = agents[1:]
        self.first, self.second = (Mailbox(agent, "pipe", HOMES) for agent in self.agents)
        for agent, mail in zip(self.agents, (self.first, self.second), strict=True):
            agent.parcels.listen("pipe", mail)
            mail.begin(1, 0)
        agents[2].on_notice(lanes_.RING_OPENED, self._opened)
        agents[1].on_notice(CREDITS, lambda source, told: self.first.acknowledged(told[1], told[2], Channel(*told[3:])))
        agents[2].on_notice(lanes_.VALUE_IN_RING, lambda source, key: self.second.slots.wake_waiters())
        self.opened = 0
        for number in (-2, -1):  # the first makes the connection, the next opens the ring, which has no receiver yet
            self.send(number, torch.ones(1))
            assert self.take(number).item() == 1
        until(lambda: self.opened == 1)
        self.send(-3, torch.ones(1))
        assert self.take(-3).item() == 1 and self.ring.at == POLLING

    def _opened(self, source: int, told: tuple[str, int, int]) -> None:
        connection = self.agents[1].connection(source)
        assert connection is not None
        found = connection.store.ring_from_peer(*told[1:])
        if found is not None:  # otherwise it was opened on another connection, and the next one will be too
            self.second.lanes.offer(source, found)
        self.opened += found is not None

    def send(self, number: int, *values: Any, step: int = 1) -> None:
        self.first.send(Slot(step, FORWARD, 1, number, 0), values)

    def take(self, number: int, step: int = 1) -> Any:
        (value,) = self.second.take(Slot(step, FORWARD, 1, number, 0))
        return value

    @property
    def ring(self) -> shared_ring.Consumer:
        return self.second.lanes._consumers[1][-1].ring


@pytest.fixture
def pair(agents: list[Agent]) -> Iterator[Pair]:
    made = Pair(agents)
    yield made
    for agent, mail in zip(made.agents, (made.first, made.second), strict=True):
        agent.parcels.stop_listening("pipe", mail)


VALUES: dict[str, Callable[[], Tensor]] = {
    **{str(dtype): lambda dtype=dtype: torch.arange(12).to(dtype).view(3, 4) for dtype in lanes_._DTYPES},  # type: ignore[misc]
    "of a number": lambda: torch.tensor(7.0),
    "six dimensions": lambda: torch.rand(1, 2, 3, 1, 2, 3),
    "a view": lambda: torch.rand(8, 5)[2:4],
    "requires grad": lambda: torch.rand(3, requires_grad=True),
    "part of a graph": lambda: torch.rand(3, requires_grad=True) * 2,
    "all that has room": lambda: torch.rand(SLOT_BYTES // 4),
}


@pytest.mark.parametrize("what", VALUES)
def test_a_tensor_that_goes_through_a_ring_is_unchanged(pair: Pair, went: Counter[bool], what: str) -> None:
    given = VALUES[what]()
    for number in range(2):  # the second time the view exists already
        for other in range(SLOTS):  # through all slots
            pair.send(100 * number + other, given)
            found = pair.take(100 * number + other)
            assert torch.equal(found, given) and (found.dtype, found.shape) == (given.dtype, given.shape)
            assert found.requires_grad == given.requires_grad and found.is_leaf and type(found) is Tensor
    assert went == {True: 2 * SLOTS}


def test_commit_messages_use_existing_rings_and_open_none(pair: Pair, went: Counter[bool]) -> None:
    """A ring has room for sixteen large values: commit messages alone do not need one."""
    first, second = (agent.id for agent in pair.agents)
    for mail, slot in (
        (pair.first, Slot(1, DECISION, 0, second, first)),
        (pair.second, Slot(1, VOTE, 0, first, second)),
    ):
        mail.send(slot, (torch.zeros(1, dtype=torch.uint8),))
    assert went == {True: 1, False: 1} and not pair.second.lanes._producers
    assert pair.second.take(Slot(1, DECISION, 0, second, first))[0].item() == 0
    assert pair.first.take(Slot(1, VOTE, 0, first, second))[0].item() == 0


class Own(Tensor):
    """A tensor class of the user."""


OTHERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "more than there is room for": lambda: (torch.rand(SLOT_BYTES // 4 + 1),),
    "nothing": lambda: (torch.rand(0, 3),),
    "seven dimensions": lambda: (torch.rand(1, 1, 1, 1, 1, 1, 1),),
    "not contiguous": lambda: (torch.rand(3, 4).t(),),
    "complex": lambda: (torch.rand(3, dtype=torch.complex64).conj(),),
    "sparse": lambda: (torch.eye(3).to_sparse(),),
    "sparse by rows": lambda: (torch.eye(3).to_sparse_csr(),),
    "another class": lambda: (torch.rand(3).as_subclass(Own),),
    "no tensor": lambda: ("word",),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("what", OTHERS)
def test_other_values_are_sent_as_messages(pair: Pair, went: Counter[bool], what: str) -> None:
    (given,) = OTHERS[what]()
    pair.send(1, given)
    found = pair.take(1)
    assert type(found) is type(given) and went == {False: 1}
    if isinstance(given, Tensor):
        assert found.shape == given.shape and torch.equal(found.to_dense(), given.to_dense())


def test_several_values_at_once_are_sent_as_one_message(pair: Pair, went: Counter[bool]) -> None:
    pair.send(1, torch.ones(2), torch.zeros(2))
    one, other = pair.second.take(Slot(1, FORWARD, 1, 1, 0))
    assert one.tolist() == [1, 1] and other.tolist() == [0, 0] and went == {False: 1}


def test_a_taken_value_does_not_change_when_the_ring_is_used_again(pair: Pair) -> None:
    given = torch.ones(3)
    pair.send(1, given)
    given.zero_()
    found = pair.take(1)
    for number in range(2, 2 + 2 * SLOTS):
        pair.send(number, torch.full((3,), float(number)))
        pair.take(number)
    assert found.tolist() == [1, 1, 1]


def test_values_can_be_taken_in_any_order_and_values_without_room_become_messages(
    pair: Pair, went: Counter[bool]
) -> None:
    count = SLOTS + 5
    for number in range(count):
        pair.send(number, torch.tensor(float(number)))
    assert went == {True: SLOTS, False: 5}
    order = [*range(count)][::-1]
    assert [pair.take(number).item() for number in order] == order
    assert len(pair.second.slots) == 0 and not pair.second.lanes._from_ring


def test_a_ring_keeps_no_autograd_graph(pair: Pair) -> None:
    leaf = torch.rand(3, requires_grad=True)
    pair.send(1, leaf * 2)
    assert pair.take(1).is_leaf
    gone = weakref.ref(leaf)
    del leaf
    gc.collect()
    assert gone() is None


def test_the_next_value_of_a_ring_is_taken_without_a_slot(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[int] = []
    fill = Slots.put

    def told(self: Slots, slot: Any, values: Any) -> None:
        put.append(slot[3])
        fill(self, slot, values)

    monkeypatch.setattr(Slots, "put", told)
    for number in range(6):
        pair.send(number, torch.tensor(float(number)))
    order = [0, 1, 4, 2, 3, 5]
    assert [pair.take(number).item() for number in order] == order
    assert put == [2, 3, 4], "the values before a wanted one, and the wanted one after a search, go through slots"


def test_a_take_in_an_aborted_step_fails_although_the_value_is_in_the_ring(pair: Pair) -> None:
    for number in range(2):
        pair.send(number, torch.ones(1))
    pair.take(0)
    pair.second.slots.abort(1, "enough")
    with pytest.raises(PipelineError, match="enough"):
        pair.take(1)


def test_values_become_messages_when_an_observer_starts_within_a_step(pair: Pair, went: Counter[bool]) -> None:
    for number in range(3):
        pair.send(number, torch.tensor(float(number)))
    pair.agents[1].bus.telling = True
    assert pair.take(0).item() == 0 and pair.ring.at == AWAY
    pair.agents[1].bus.telling = False
    pair.send(3, torch.tensor(3.0))
    assert [pair.take(number).item() for number in (1, 2, 3)] == [1, 2, 3] and went == {True: 3, False: 1}


def waiting(pair: Pair, number: int) -> tuple[threading.Thread, list[Any]]:
    """Start a thread that takes a value; return the thread and the list of its results."""
    found: list[Any] = []

    def take() -> None:
        try:
            found.append(pair.take(number).item())
        except (PipelineError, ProtocolError, WorkerLostError) as error:
            found.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread, found


Listening = Callable[[], tuple[int, threading.Thread, list[Any]]]


@pytest.fixture
def listening(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Listening:
    """Like `waiting`, with a long wait on the ring; the result begins with the number of the value."""
    monkeypatch.setattr(lanes_, "_MAX_WAIT", 60.0)

    def begun() -> tuple[int, threading.Thread, list[Any]]:
        thread, found = waiting(pair, 100)
        until(lambda: pair.second.lanes._event_receiver is not None and pair.second.lanes._event_receiver.turn.locked())
        return 100, thread, found

    return begun


ENDS_OF_WAITS: dict[str, Callable[[Pair], Any]] = {
    "a value": lambda pair: pair.send(1, torch.tensor(5.0)),
    "a message": lambda pair: pair.second.came(Slot(1, FORWARD, 1, 1, 0), lambda: torch.tensor(5.0)),
    "the step's end": lambda pair: pair.second.slots.abort(1, "enough"),
    "a worker's end": lambda pair: pair.second.slots.close("worker1 has gone"),
}


@pytest.mark.parametrize("what", ENDS_OF_WAITS)
def test_a_short_wait_on_a_ring_receives_no_messages_and_is_ended_by_an_event(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The thread waits for an event, and everything that ends the wait sends that event."""
    monkeypatch.setattr(lanes_, "_MAX_WAIT", 60.0)
    monkeypatch.setattr(RequestSender, "receive_until", pytest.fail)
    thread, found = waiting(pair, 1)
    until(lambda: pair.second.lanes._event_receiver is not None and pair.second.lanes._event_receiver.turn.locked())
    ENDS_OF_WAITS[what](pair)
    thread.join(20)
    assert len(found) == 1 and pair.ring.at == POLLING and pair.second.lanes._event_receiver is None
    assert found == [5.0] if what in ("a value", "a message") else isinstance(found[0], PipelineError | WorkerLostError)


def test_an_unrelated_event_does_not_end_a_wait_on_a_ring(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_, "_MAX_WAIT", 60.0)
    thread, found = waiting(pair, 1)
    until(lambda: pair.second.lanes._event_receiver is not None)
    pair.second.lanes.wake()
    pair.second.came(Slot(1, FORWARD, 1, 2, 0), lambda: torch.tensor(6.0))
    pair.send(1, torch.tensor(5.0))
    thread.join(20)
    assert found == [5.0] and pair.take(2).item() == 6


def test_a_thread_waits_for_messages_while_another_pipeline_waits_on_the_ring(pair: Pair, went: Counter[bool]) -> None:
    with pair.ring._event_receiver.turn:
        thread, found = waiting(pair, 1)
        until(lambda: pair.ring.at == AWAY)
        pair.send(1, torch.tensor(5.0))
        thread.join(20)
    assert found == [5.0] and went == {False: 1}


def test_a_long_wait_on_a_ring_becomes_a_wait_for_messages(pair: Pair, went: Counter[bool]) -> None:
    thread, found = waiting(pair, 1)
    until(lambda: pair.ring.at == AWAY)
    pair.send(1, torch.tensor(5.0))
    thread.join(20)
    assert found == [5.0] and went == {False: 1} and pair.ring.at == POLLING


def test_a_receiver_that_stops_listening_during_a_send_is_notified_of_the_value(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender finds room, then the receiver stops listening; the value is in the ring, and a notice announces it."""
    give = shared_ring.Producer.give

    def late(self: shared_ring.Producer, *args: Any) -> None:
        thread.start()
        until(lambda: pair.ring.at == AWAY)
        give(self, *args)

    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(pair.take(1).item()), daemon=True)
    monkeypatch.setattr(shared_ring.Producer, "give", late)
    pair.send(1, torch.tensor(5.0))
    thread.join(20)
    assert found == [5.0]


def test_a_wait_on_a_ring_ends_when_its_step_is_aborted(pair: Pair) -> None:
    thread, found = waiting(pair, 1)
    until(lambda: pair.ring.at != POLLING)
    pair.second.slots.abort(1, "enough")
    thread.join(20)
    assert len(found) == 1 and "enough" in str(found[0])


def test_values_that_a_step_has_left_do_not_block_the_next_step(pair: Pair) -> None:
    for number in range(SLOTS):
        pair.send(number, torch.tensor(float(number)))
    pair.second.slots.finish(1)
    pair.second.begin(2, 0)
    pair.first.begin(2, 0)
    pair.send(3, torch.tensor(99.0), step=2)  # as a message: the ring is full
    assert pair.take(3, step=2).item() == 99
    pair.send(4, torch.tensor(98.0), step=2)
    assert pair.take(4, step=2).item() == 98 and len(pair.second.slots) == 0 and not pair.second.lanes._from_ring


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_does_not_affect_later_values_of_a_ring(pair: Pair, went: Counter[bool], first: bool) -> None:
    """The ring reuses its tensors; the first ones are created in inference mode, or outside of it."""
    for number in range(4 * SLOTS):
        with torch.inference_mode(first == (number // SLOTS % 2 == 0)):
            pair.send(number, torch.full((3,), float(number)))
            assert pair.take(number).tolist() == [number] * 3
    pair.send(99, torch.ones(3, requires_grad=True))
    assert pair.take(99).requires_grad and went == {True: 4 * SLOTS + 1}


def test_flow_control_counts_only_messages(pair: Pair, went: Counter[bool]) -> None:
    pair.first.begin(1, 8)
    pair.second.begin(1, 8)
    for number in range(20):
        pair.send(number, torch.ones(1))
        pair.take(number)
    given, taken = pair.first._credits, pair.second._credits
    assert given is not None and taken is not None and went == {True: 20} and not given._given and not taken._taken
    for number in range(20, 24):
        pair.send(number, torch.ones(1), torch.ones(1))
        pair.second.take(Slot(1, FORWARD, 1, number, 0))
    assert given._given == taken._taken == {Channel(FORWARD, 1, 0): 4}
    until(lambda: given._gone == given._given)


@pytest.mark.parametrize("wrong", [{8: 99}, {9: 1, 10: SLOT_BYTES}, {9: 1, 10: -5}, {8: -1}])
def test_an_impossible_head_in_a_ring_raises_protocol_error(pair: Pair, wrong: dict[int, int]) -> None:
    """Numbers 8 to 10 of a head are the dtype, the number of dimensions, and the first dimension."""
    ring = pair.first.lanes._producers[2].ring
    head = [1, FORWARD, 1, 7, 0, -1, -1, 0, 0, 0, *[0] * 6]
    for place, number in wrong.items():
        head[place] = number
    with ring.lock:
        assert ring.room() is not None
        ring.give(head, 4)
    with pytest.raises(ProtocolError, match="impossible value"):
        pair.take(7)


def test_an_impossible_head_fails_a_waiting_take_and_keeps_the_connection(pair: Pair, listening: Listening) -> None:
    number, thread, found = listening()
    giving = pair.first.lanes._producers[2]
    with giving.ring.lock:
        assert giving.ring.room() is not None
        giving.ring.give([1, FORWARD, 1, number, 0, -1, -1, 0, 99, 0, *[0] * 6], 4)
    giving.ring.tell(pytest.fail)
    thread.join(20)
    assert len(found) == 1 and isinstance(found[0], ProtocolError) and not giving.connection.ended


def test_a_new_ring_is_opened_if_its_connection_no_longer_carries_messages(pair: Pair) -> None:
    """The receiver listens to the connection of messages; a second connection may exist at the same time."""
    pair.first.lanes._producers[2].connection = entries(*pair.agents[::-1])[0]
    pair.send(1, torch.ones(1))
    assert pair.take(1).item() == 1
    until(lambda: pair.opened == 2)


@pytest.mark.parametrize("when", ["before it is taken", "while its taker waits"])
def test_values_in_a_ring_are_found_after_its_connection_has_ended(pair: Pair, went: Counter[bool], when: str) -> None:
    old = pair.ring
    if when == "before it is taken":
        pair.send(1, torch.tensor(5.0))
        cut(pair)
        assert pair.take(1).item() == 5 and went == {True: 1}
    else:
        thread, found = waiting(pair, 1)
        until(lambda: pair.ring.at == AWAY)
        cut(pair)
        pair.send(1, torch.tensor(5.0))
        thread.join(20)
        assert found == [5.0]
    went.clear()
    numbers = itertools.count(1000)

    def another() -> bool:
        """Send a value over a new connection; return whether it went through a new ring."""
        number = next(numbers)
        pair.send(number, torch.tensor(float(number)))
        assert pair.take(number).item() == number
        return went[True] > 0

    until(another)
    assert pair.ring is not old and len(pair.second.lanes._consumers[1]) == 1, "the old ring is gone"


def cut(pair: Pair) -> None:
    """End the connections of the two members; the next message makes a new one."""
    for connection in entries(*pair.agents):
        connection.cut()
    until(lambda: pair.first.lanes._producers[2].ring.over and pair.ring._event_receiver.closed)


# -- pipelines
def trained(agents: list[Agent]) -> tuple[dict[str, Tensor], list[float]]:
    pipe = small.pipeline(optimizer=small.SGD, schedule="1f1b", microbatches=6)
    losses = [pipe.step(*small.data(12)).loss for _ in range(3)]
    return pipe.state_dict(), losses


def test_training_is_equal_with_and_without_rings(
    agents: list[Agent], went: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, losses = trained(agents)
    assert went[True], "some values go through rings"
    monkeypatch.setattr(StageRing, "give", lambda *_, **__: False)
    others, same = trained(agents)
    assert losses == same and all(torch.equal(state[name], others[name]) for name in state)


def test_values_that_go_through_a_ring_are_recorded_like_messages(
    agents: list[Agent], went: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a send and a recv for each value that requires a gradient, with the same labels as for messages."""

    pipe = small.pipeline(microbatches=4, schedule="gpipe")

    def recorded() -> list[Any]:
        with pipe.batch(*small.data(8)) as batch:
            batch.add(*small.data(8))
            found = []
            for agent in agents[1:]:
                known = agent.machine.ask(lambda node: node.contexts.contexts[batch.context])
                sends = sorted((sent.to, sent.label) for sent in known.sends.values())
                recvs = sorted((came.source, came.behind == (message,)) for message, came in known.recvs.items())
                found.append((sends, recvs))
        return found

    by_lanes: list[Any] = []

    def go_by_lanes() -> bool:  # a consumer that waits for long gets messages until its next take
        went.clear()
        by_lanes[:] = recorded()
        return went[True] > 0

    until(go_by_lanes)
    assert [(len(sends), len(recvs)) for sends, recvs in by_lanes] == [(8, 0), (0, 8)], "gradients require no gradients"
    monkeypatch.setattr(StageRing, "give", lambda *_, **__: False)
    assert recorded() == by_lanes


def known(agent: Agent, context: int) -> tuple[list[str], int, set[int]] | None:
    """Return the labels of a context's sends, the number of its recvs and its known members; None: no such context."""
    found = agent.machine.ask(lambda node: node.contexts.contexts.get(context))
    return None if found is None else ([sent.label for sent in found.sends.values()], len(found.recvs), found.known)


def test_values_in_a_ring_are_recorded_before_a_wait_or_on_settle(pair: Pair) -> None:
    """The record is made before the sender or the receiver waits, or when `settle` is called."""
    given, (one, other) = torch.ones(1, requires_grad=True), pair.agents
    with (here := recorder(one)).inside(context := here.new_context()):
        for number in range(4):
            pair.send(number, given)
    pair.take(0)
    assert known(one, context) == ([], 0, set()) and known(other, context) is None
    pair.first.lanes.settle()
    assert known(one, context) == ([f"F{number} for stage 1" for number in range(4)], 0, {other.id})
    pair.second.lanes.settle()
    assert known(other, context) == ([], 1, {one.id})
    pair.take(2)  # not the next value of the ring, so this take might wait: earlier values are recorded first
    assert known(other, context) == ([], 2, {one.id})
    pair.second.begin(2, 0)
    pair.second.lanes.settle()
    assert known(other, context) == ([], 2, {one.id}), "the next step drops pending records"
    here.release(context)


def test_values_in_a_ring_are_recorded_at_once_while_tables_are_watched(pair: Pair) -> None:
    one, other = pair.agents
    one.bus.listening = other.bus.listening = True
    with (here := recorder(one)).inside(context := here.new_context()):
        pair.send(0, torch.ones(1, requires_grad=True))
        assert known(one, context) == (["F0 for stage 1"], 0, {other.id})
    pair.take(0)
    assert known(other, context) == ([], 1, {one.id})
    one.bus.listening = other.bus.listening = False
    here.release(context)


def test_commit_messages_and_values_of_a_released_context_are_not_recorded(pair: Pair) -> None:
    one, other = pair.agents
    word = Slot(1, DECISION, 0, other.id, one.id)
    with (here := recorder(one)).inside(context := here.new_context()):
        pair.first.send(word, (torch.zeros(1, dtype=torch.uint8),))
        assert pair.second.take(word)[0].item() == 0
        pair.first.lanes.settle()
        assert known(one, context) == ([], 0, set())
        here.release(context)
        pair.send(0, torch.ones(1, requires_grad=True))
    pair.take(0)
    for mail in (pair.first, pair.second):
        mail.lanes.settle()
    assert known(one, context) is known(other, context) is None


def test_a_receiver_with_an_interceptor_gets_each_value_as_a_message(pair: Pair, went: Counter[bool]) -> None:
    told = Faults()
    pair.agents[1].links.use(told)
    pair.second.begin(1, 0)
    for number in range(3):
        pair.send(number, torch.ones(1))
        pair.take(number)
    assert went == {False: 3}
    pair.agents[1].links.remove(told)
    pair.second.begin(1, 0)
    pair.send(4, torch.ones(1))
    assert pair.take(4).item() == 1 and went[True] == 1


def test_a_value_of_a_later_step_stays_in_the_ring_until_that_step(pair: Pair, went: Counter[bool]) -> None:
    pair.second.begin(1, 8)
    pair.send(1, torch.ones(1))
    pair.send(7, torch.full((1,), 2.0), step=2)
    pair.send(2, torch.full((1,), 3.0))
    assert pair.take(1).item() == 1 and went == {True: 3}
    with pytest.raises(PipelineError):
        pair.second.slots.abort(1, "enough")
        pair.take(2)
    assert len(pair.second.slots) == 0, "it is still in the ring"
    pair.second.slots.finish(1)
    pair.second.begin(2, 8)
    assert pair.take(7, step=2).item() == 2
    counted = pair.second._credits
    assert counted is not None and not counted._taken


def test_a_value_with_a_device_map_is_sent_as_a_message(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = StageRing(pair.agents[0], "pipe")
    route = tensor_types.Route({tensor_types.CPU: torch.device("cuda:0")}, "")
    monkeypatch.setattr(pair.agents[0].values.routes, "to", lambda to, answer: route)
    before = len(entries(*pair.agents)[0].store._rings)
    assert not lanes.give(2, Slot(1, FORWARD, 1, 0, 0), (torch.ones(1),))
    assert len(entries(*pair.agents)[0].store._rings) == before and lanes._refused == {2}


def test_each_value_is_a_message_while_messages_are_watched(agents: list[Agent], went: Counter[bool]) -> None:
    pipe = small.pipeline(microbatches=4, schedule="gpipe", optimizer=small.SGD)
    pipe.step(*small.data(8))
    went.clear()
    agents[1].listen(True, messages=True)
    told = Faults()
    agents[2].links.use(told)
    pipe.step(*small.data(8))
    assert went == {False: 8 + 2}, "eight values and the two messages of the commit"
    agents[1].listen(False)
    agents[2].links.remove(told)

    def go_by_lanes() -> bool:
        pipe.step(*small.data(8))
        return went[True] > 0

    until(go_by_lanes)


def test_a_deleted_pipeline_leaves_no_rings(agents: list[Agent]) -> None:
    pipe = small.pipeline(microbatches=4, schedule="gpipe", optimizer=small.SGD)
    for _ in range(2):
        pipe.step(*small.data(8))
    stores = [connection.store for agent in agents[1:] for other in agents[1:] for connection in entries(agent, other)]
    assert sum(len(store._rings) for store in stores) == 2, "one in each direction"
    del pipe
    gc.collect()

    def none_left() -> bool:
        for agent in agents:
            agent._peers.tidy()
        return not any(store._rings for store in stores)

    until(none_left)
    assert not any(store._ours._taken for store in stores if store._ours is not None)


def test_a_ring_for_a_deleted_pipeline_is_returned(agents: list[Agent]) -> None:
    agents[2].part(stage._Directory)
    given, slot = StageRing(agents[1], "gone"), Slot(1, FORWARD, 1, 0, 0)
    assert not given.give(2, slot, (torch.ones(1),))
    agents[1].notify(2, ENDS, ("gone", 1, "nothing"), may_wait=True)  # makes the connection
    assert not given.give(2, slot, (torch.ones(1),)), "the ring has no receiver"
    connection = agents[1].connection(2)
    assert connection is not None and len(connection.store._rings) == 1

    def gone() -> bool:
        agents[2]._peers.tidy()
        return not connection.store._rings

    until(gone)


def test_workers_without_shared_memory_send_messages(
    tmp_path: Path, went: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPCBENCH_SHARED_MEMORY", "0")
    with world(tmp_path, 3) as agents:
        state, losses = trained(agents)
        assert went.keys() == {False}
        del state
        nothing_left(agents)
    assert len(losses) == 3


def test_three_stages_train_with_a_ring_between_each_two(tmp_path: Path, went: Counter[bool]) -> None:
    with world(tmp_path, 4) as agents:
        net = small.model(nn.Tanh(), nn.Linear(16, 16), nn.Tanh()).double()
        stages = split(net, ["worker1", "worker2", "worker3"])
        loss = nn.functional.cross_entropy
        pipe = Pipeline(stages, "1f1b", 6, loss, small.SGD)
        x, y = small.data(12)
        pipe.step(x, y)  # workers connect, and open their rings
        net.load_state_dict(pipe.state_dict())
        went.clear()
        small.step_alike(pipe, net, loss(net(x), y), x, y)
        for _ in range(2):
            pipe.step(x, y)
        assert went[True]
        del pipe, stages
        nothing_left(agents)
