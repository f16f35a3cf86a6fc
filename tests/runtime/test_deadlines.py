"""Deadlines: never found early, found within a twentieth of a second, and removed completely when cleared."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcbench.runtime.timers import Deadlines

TICK = 0.05


def test_due_deadlines_are_found_once_and_the_time_of_the_next_look_is_returned() -> None:
    deadlines = Deadlines()
    for call, at in [(1, 10.0), (2, 10.0), (3, 20.0)]:
        deadlines.set_deadline(call, at)
    due, pause = deadlines.pop_due_calls(9.99)
    assert due == [] and pause == pytest.approx(0.01 + TICK, abs=TICK)
    due, pause = deadlines.pop_due_calls(10.0 + TICK)
    assert sorted(due) == [1, 2] and pause == pytest.approx(10.0, abs=TICK)
    assert deadlines.pop_due_calls(30.0) == ([3], None)
    assert deadlines.pop_due_calls(40.0) == ([], None)


def test_a_new_deadline_asks_for_a_wake_up_only_if_it_is_earlier() -> None:
    deadlines = Deadlines()
    assert deadlines.set_deadline(1, 10.0)
    assert not deadlines.set_deadline(2, 10.001), "the same look finds it"
    assert not deadlines.set_deadline(3, 11.0)
    assert deadlines.set_deadline(4, 9.0)
    deadlines.pop_due_calls(9.5)
    assert not deadlines.set_deadline(5, 10.5) and deadlines.set_deadline(6, 9.9), "this also holds after a look"


def test_a_cleared_deadline_is_never_due() -> None:
    deadlines = Deadlines()
    deadlines.set_deadline(1, 10.0)
    deadlines.set_deadline(2, 11.0)
    deadlines.clear_deadline(1)
    deadlines.clear_deadline(1)
    deadlines.clear_deadline(99)
    assert deadlines.pop_due_calls(5.0) == ([], pytest.approx(6.0 + TICK, abs=TICK)), (
        "a slot without deadlines is no reason to wake"
    )
    assert deadlines.set_deadline(1, 10.0), "the number can be used again"
    assert sorted(deadlines.pop_due_calls(12.0)[0]) == [1, 2]


def test_cleared_deadlines_leave_nothing() -> None:
    deadlines = Deadlines()
    for call in range(1000):
        deadlines.set_deadline(call, 60 + call * 0.01)
        deadlines.clear_deadline(call)
    assert len(deadlines) == 0 and deadlines.pop_due_calls(0.0) == ([], None)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.booleans()), max_size=30))
def test_each_deadline_is_found_exactly_once_and_in_time(plan: list[tuple[float, float, bool]]) -> None:
    """Looks happen at the returned times, and when a new deadline asks for one."""
    deadlines, found, now = Deadlines(), {}, 0.0
    wanted: dict[int, float] = {}
    look = float("inf")
    for call, (gap, seconds, cleared) in enumerate([*plan, (20.0, 0.0, True)]):
        until, now_set = now + gap, now + gap
        while look <= until:
            now = look
            due, pause = deadlines.pop_due_calls(now)
            found |= dict.fromkeys(due, now)
            look = float("inf") if pause is None else now + pause + 1e-9
        now = now_set
        if deadlines.set_deadline(call, now + seconds):
            look = now
        if cleared:
            deadlines.clear_deadline(call)
        else:
            wanted[call] = now + seconds
    assert found.keys() == wanted.keys()
    assert all(wanted[call] <= at <= wanted[call] + 1.01 * TICK for call, at in found.items())


def test_a_garbage_collection_during_a_look_can_set_deadlines() -> None:
    """Such as a finalizer that ends or makes a call; another thread may run, too."""
    deadlines = Deadlines()
    for call in range(100):
        deadlines.set_deadline(call, 1.0)
    more = iter(range(100, 100_000))
    collect = lambda *_: deadlines.set_deadline(next(more), 5.0)  # noqa: E731
    gc.callbacks.append(collect)
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(1)
        due, _ = deadlines.pop_due_calls(2.0)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collect)
    assert set(range(100)) <= {*due}
