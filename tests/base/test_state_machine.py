from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcbench.base.errors import InvalidTransitionError, ProtocolError
from rpcbench.base.state_machine import KEPT_TRANSITIONS, StateMachine
from rpcbench.pipeline.exchange import StepLife
from rpcbench.protocol.rrefs import Owned, User

DoorState = StrEnum("DoorState", "SHUT OPEN GONE")
SHUT, OPEN, GONE = DoorState
DoorEvent = StrEnum("DoorEvent", "PUSHED PULLED REMOVED")
PUSHED, PULLED, REMOVED = DoorEvent


@dataclass(slots=True)
class Door(StateMachine[DoorState, DoorEvent]):
    transitions = {SHUT: {PUSHED: OPEN, REMOVED: GONE}, OPEN: {PULLED: SHUT, PUSHED: OPEN}}
    width: int = 1


def test_an_event_changes_the_state_as_the_table_says() -> None:
    door = Door(SHUT, 2)
    assert [door.apply_event(event, 7) for event in (PUSHED, PUSHED, PULLED, REMOVED)] == [OPEN, OPEN, SHUT, GONE]
    assert door.state is GONE and door.width == 2
    assert door.history == ((PUSHED, OPEN), (PUSHED, OPEN), (PULLED, SHUT), (REMOVED, GONE))


def test_an_impossible_event_raises_an_error_with_the_object_its_state_and_its_history() -> None:
    door = Door(SHUT)
    door.apply_event(PUSHED, 7)
    with pytest.raises(InvalidTransitionError) as caught:
        door.apply_event(REMOVED, 7)
    text = "Door 7 is open, and 'removed' is impossible then. Its last events: pushed → open"
    assert str(caught.value) == str(pickle.loads(pickle.dumps(caught.value))) == text
    assert isinstance(caught.value, ProtocolError) and caught.value.__suppress_context__
    assert door.state is OPEN and door.history == ((PUSHED, OPEN),)


@pytest.mark.parametrize("event", DoorEvent)
def test_nothing_is_possible_at_an_end(event: DoorEvent) -> None:
    with pytest.raises(InvalidTransitionError, match=f"Door 7 is gone, and '{event}' .* Its last events: none"):
        Door(GONE).apply_event(event, 7)


# -- the machines of the package
def _steps(kind: type[StateMachine[Any, Any]]) -> Iterator[tuple[Any, Any, Any]]:
    for state, row in kind.transitions.items():
        yield from ((state, event, after) for event, after in row.items())


@pytest.mark.parametrize("kind", [Door, Owned, User, StepLife])
@given(data=st.data())
def test_a_machine_follows_its_table_and_keeps_its_last_events(
    kind: type[StateMachine[Any, Any]], data: st.DataObject
) -> None:
    states, events = ({type(step[part]) for step in _steps(kind)}.pop() for part in (0, 1))
    state, expected = data.draw(st.sampled_from([*states])), []
    machine = object.__new__(kind)
    machine.state, machine.history = state, ()
    for event in data.draw(st.lists(st.sampled_from([*events]), max_size=30)):
        after = {(one, by): to for one, by, to in _steps(kind)}.get((state, event))
        if after is None:
            with pytest.raises(InvalidTransitionError, match=f"5 is {state}, and '{event}'"):
                machine.apply_event(event, 5)
        else:
            assert machine.apply_event(event, 5) is after
            state = after
            expected.append((event, after))
        assert machine.state is state and [*machine.history] == expected[-KEPT_TRANSITIONS:]


@pytest.mark.parametrize("kind", [Owned, User, StepLife])
def test_each_state_and_each_event_of_a_machine_is_in_its_table(kind: type[StateMachine[Any, Any]]) -> None:
    steps = [*_steps(kind)]
    assert {state for step in steps for state in (step[0], step[2])} == {*type(steps[0][0])}
    assert {step[1] for step in steps} == {*type(steps[0][1])}
