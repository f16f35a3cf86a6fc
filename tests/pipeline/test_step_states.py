"""Each event of a step on one worker in each state, by the methods of `Slots`; the table says what is possible."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from rpcbench.base.errors import InvalidTransitionError, PipelineError, WorkerLostError
from rpcbench.pipeline.exchange import (
    ABORTED,
    APPLYING,
    COMMITTED,
    DECIDED,
    DECIDER_LOSS,
    ENDED,
    FORWARD,
    LOSS,
    LOST,
    OVER,
    RUNNING,
    STOPPED,
    VOTED,
    VOTES,
    Slot,
    Slots,
    StepEvent,
    StepLife,
    StepState,
)

STEP = 5
SLOT = Slot(STEP, FORWARD, 1, 0, 0)
INPUTS: dict[StepEvent, Callable[[Slots], object]] = {
    VOTES: lambda slots: slots.advance_step(STEP, VOTES),
    DECIDED: lambda slots: slots.advance_step(STEP, DECIDED),
    STOPPED: lambda slots: slots.abort_step(STEP, "enough"),
    LOSS: lambda slots: slots.close("worker4 has gone", in_doubt=False),
    DECIDER_LOSS: lambda slots: slots.close("worker1 has gone"),
    ENDED: lambda slots: slots.finish_step(STEP),
}
ROUTES: dict[StepState, list[StepEvent]] = {
    RUNNING: [],
    VOTED: [VOTES],
    COMMITTED: [VOTES, DECIDED],
    APPLYING: [DECIDED, ENDED],
    ABORTED: [STOPPED],
    LOST: [LOSS],
}


def step_in(state: StepState) -> tuple[Slots, StepLife]:
    slots = Slots()
    if state is OVER:  # a call that a later step has overtaken
        slots.finish_step(STEP)
    slots.begin_step(STEP)
    life = slots._steps[STEP]
    for event in ROUTES.get(state, ()):
        INPUTS[event](slots)
    assert life.state is state
    return slots, life


@pytest.mark.parametrize(("state", "event"), [*product(StepState, StepEvent)])
def test_a_step_follows_its_table(state: StepState, event: StepEvent) -> None:
    slots, life = step_in(state)
    after = StepLife.transitions[state].get(event)
    if after is not None:
        INPUTS[event](slots)
        assert life.state is after and life.history[-1] == (event, after)
    elif state in (ABORTED, LOST, OVER) or (state is APPLYING and event is not ENDED):  # the user's error, no bug
        with pytest.raises((PipelineError, WorkerLostError), match=f"step {STEP} was aborted: "):
            INPUTS[event](slots)
        assert life.state is state
    else:
        with pytest.raises(InvalidTransitionError, match=f"StepLife {STEP} is {state}, and '{event}' is impossible"):
            INPUTS[event](slots)
        assert life.state is state


def test_a_second_decision_is_an_error_with_the_history_of_the_step() -> None:
    slots, _ = step_in(COMMITTED)
    with pytest.raises(InvalidTransitionError, match=r"Its last events: votes → voted, decided → committed$"):
        slots.advance_step(STEP, DECIDED)


@pytest.mark.parametrize("state", StepState)
def test_a_step_keeps_values_while_it_goes_on_and_drops_them_later(state: StepState) -> None:
    slots, _ = step_in(state)
    slots.put(SLOT, lambda: "value")
    goes_on = state in (RUNNING, VOTED, COMMITTED)
    assert len(slots) == (not slots.is_aborted(STEP)) == goes_on
    slots.put(SLOT._replace(step=STEP + 1), lambda: "of the next step")
    if goes_on:
        assert slots.take_values(SLOT) == ("value",)
        slots.put(SLOT, lambda: "nobody takes it")
        slots.finish_step(STEP)
    assert len(slots) == (state is not LOST)  # that of the next step
    slots.put(SLOT, lambda: "late")
    assert len(slots) == (state is not LOST)


@pytest.mark.parametrize("state", StepState)
def test_the_driver_hears_whether_a_step_was_committed_until_the_next_one_ends(state: StepState) -> None:
    slots, _ = step_in(state)
    assert slots.abort_step(STEP, "enough") == (state not in (COMMITTED, APPLYING))
    slots.begin_step(STEP + 1)
    slots.finish_step(STEP + 1)
    assert not slots._steps


def test_only_the_latest_committed_step_is_kept() -> None:
    slots = Slots()
    for step in range(20):
        slots.begin_step(step)
        slots.advance_step(step, DECIDED)
        slots.finish_step(step)
        assert [*slots._steps] == [step] and not slots.abort_step(step, "too late")
