"""State machines whose transitions are one table: state → event → next state.

Guarantees
- A state changes by an event only, as the table of its class says. Any other event changes nothing, and raises
  InvalidTransitionError with the name of the object, its state, the event and the last transitions of the object.
- The documents draw the same tables: `docs/make_states.py` writes the drawings, and a test compares them.

Theory of operation
    class Door(StateMachine[DoorState, DoorEvent]):
        transitions = {SHUT: {PUSHED: OPEN}, OPEN: {PULLED: SHUT}}

    door.apply_event(PUSHED, 7)     OPEN
    door.apply_event(PUSHED, 7)     InvalidTransitionError: Door 7 is open, and 'pushed' is impossible then. Its last
                                    events: pushed → open

- States and events are StrEnums. Their members are names of the module, so that a table reads as a grid.
- A state without a row is an end. An event that leads to the same state is ignored there: it may come, and again.
- A transition costs two look-ups in dicts and a short tuple, as a program has many thousands of such objects.
- An object has only one state. A count or a set beside it, as the forks of an RRef, stays a plain field; the code that
  changes it applies an event when the last one has gone.
- The table says which events may come, not why: the code that applies one still has the conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from rpcbench.base.errors import InvalidTransitionError

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
KEPT_TRANSITIONS = 8  # of one object


@dataclass(slots=True)
class StateMachine(Generic[S, E]):
    """An object with a state; its first field is the state to begin with."""

    transitions: ClassVar[Mapping[Any, Mapping[Any, Any]]]  # Any: a ClassVar cannot be generic
    state: S
    history: tuple[tuple[E, S], ...] = field(default=(), init=False)  # events, each with the state that it led to

    def apply_event(self, event: E, name: object) -> S:
        """Change the state, and return the new one. `name` is that of the object, for an error."""
        try:
            state: S = self.transitions[self.state][event]
        except KeyError:
            raise self._make_error(event, name) from None
        self.state = state
        self.history = self.history[1 - KEPT_TRANSITIONS :] + ((event, state),)  # noqa: RUF005  (faster than unpacking)
        return state

    def _make_error(self, event: E, name: object) -> InvalidTransitionError:
        last = ", ".join(f"{before} → {state}" for before, state in self.history) or "none"
        what = f"{type(self).__name__} {name} is {self.state}, and '{event}' is impossible then"
        return InvalidTransitionError(f"{what}. Its last events: {last}")
