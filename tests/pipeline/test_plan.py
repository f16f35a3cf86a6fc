"""Schedules as values: made from a name, a function, a text or lists; to show, to check and to train with."""

from __future__ import annotations

import pytest

from rpcbench.pipeline import Costs, PipelineError, schedule
from rpcbench.pipeline.ops import parse_ops
from rpcbench.pipeline.schedules import gpipe, named, schedule_names

WRITTEN = """
0F0 0F1 0B0 0B1
1F0 1B0 1F1 1B1
"""


@pytest.mark.parametrize("name", schedule_names())
def test_a_plan_from_a_name_has_the_operations_of_that_schedule(name: str) -> None:
    plan = schedule(name, workers=4, microbatches=8)
    assert plan.ops == named(name)(4, 8)
    assert plan.microbatches == 8 and plan.stages in (4, 8)
    assert schedule(str(plan)) == plan and repr(plan) == str(plan)


def test_a_plan_can_be_made_from_a_function_a_text_or_lists() -> None:
    assert schedule(gpipe, 2, 3).ops == gpipe(2, 3)
    assert schedule(WRITTEN) == schedule("1f1b", 2, 2) == schedule(parse_ops(WRITTEN))
    assert schedule("interleaved", 2, 2, chunks=3).stages == 6


def test_a_plan_is_a_schedule_only_for_its_own_sizes() -> None:
    plan = schedule(WRITTEN)
    assert plan(2, 2) == plan(2, 2, 1) == plan.ops
    for numbers in ((3, 2), (2, 4), (2, 2, 2)):
        with pytest.raises(PipelineError, match="for 2 workers with 2 stages and 2 micro-batches, not for"):
            plan(*numbers)


def test_a_plan_can_be_simulated_and_drawn() -> None:
    plan = schedule(WRITTEN)
    assert plan.simulate().idle == pytest.approx(1 / 3)
    assert plan.simulate(Costs(forward=2), transfer=1).makespan == 20
    assert plan._repr_html_() == plan.simulate()._repr_html_()


def test_a_check_names_the_operation_that_exceeds_most_live() -> None:
    schedule("gpipe", 2, 3).check(most_live=3)
    with pytest.raises(PipelineError, match=r"ops\[0\]\[2\] = 0F2 cannot be: it would keep .* 3 micro-batches, and 2"):
        schedule("gpipe", 2, 3).check(most_live=2)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("0F0 0B0\n1B0 1F0", r"never ends: ops\[0\]\[1\] = 0B0 waits for 1B0 at ops\[1\]\[0\]"),
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1", "0B1 is missing"),
        ("0F0 0X0", "'0X0' is not an operation"),
        ("zigzag", "unknown schedule 'zigzag'"),
        ("gpipe", "give numbers of workers and micro-batches"),
        ("", "no operation"),
    ],
)
def test_an_invalid_schedule_is_refused_with_the_reason(written: str, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        schedule(written)


def test_a_plan_from_a_text_accepts_no_sizes() -> None:
    with pytest.raises(PipelineError, match="leave out workers, microbatches and chunks"):
        schedule(WRITTEN, workers=2)
