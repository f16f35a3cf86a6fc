"""The simulator against the formulas of the literature, and the validator against schedules that cannot run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcbench.pipeline.schedules import Kind, Op, Schedule, gpipe, one_f_one_b, parse
from rpcbench.pipeline.simulate import Span, equal_stages, idle_share, placement, simulate, validate
from rpcbench.words.errors import PipelineError

SCHEDULES = st.sampled_from([gpipe, one_f_one_b])
WORKERS = st.integers(1, 6)
MICROBATCHES = st.integers(1, 12)
COSTS = st.sampled_from([equal_stages, lambda op: 1.0])
INTERLEAVED = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"


@given(SCHEDULES, WORKERS, MICROBATCHES)
def test_every_schedule_is_valid(schedule: Schedule, workers: int, microbatches: int) -> None:
    validate(schedule(workers, microbatches), workers, microbatches)


@given(SCHEDULES, WORKERS, MICROBATCHES, COSTS)
def test_idle_share_is_the_bubble_of_the_literature(schedule, p, m, cost) -> None:
    assert simulate(schedule(p, m), cost).idle == pytest.approx((p - 1) / (m + p - 1))


@given(WORKERS, MICROBATCHES)
def test_peak_live_microbatches(p: int, m: int) -> None:
    assert simulate(gpipe(p, m)).peak_live == (m,) * p
    assert simulate(one_f_one_b(p, m)).peak_live == tuple(min(m, p - w) for w in range(p))


def test_published_figures_for_four_workers() -> None:
    for schedule, live in ((gpipe, (8, 8, 8, 8)), (one_f_one_b, (4, 3, 2, 1))):
        played = simulate(schedule(4, 8))
        assert (played.makespan, played.peak_live) == (33, live)
        assert f"{played.idle:.1%}" == "27.3%"
        assert f"{simulate(schedule(4, 16)).idle:.1%}" == "15.8%"


@given(SCHEDULES, WORKERS, MICROBATCHES, st.randoms(use_true_random=False))
def test_ops_wait_for_their_data_and_their_worker_and_for_nothing_else(schedule, p, m, random) -> None:
    durations = {}
    played = simulate(schedule(p, m), lambda op: durations.setdefault(op, random.randint(1, 9)))
    ended = {span.op: span.end for span in played.spans}
    free = dict.fromkeys(range(p), 0.0)
    for span in played.spans:
        stage, kind, microbatch = span.op.stage, span.op.kind, span.op.microbatch
        before = [Op(stage - 1, kind, microbatch)] if kind is Kind.FORWARD else [Op(stage + 1, kind, microbatch)]
        if kind is Kind.BACKWARD:
            before.append(Op(stage, Kind.FORWARD, microbatch))
        assert span.begin == max(free[span.worker], *(ended.get(op, 0.0) for op in before), 0.0)
        assert span.end - span.begin == durations[span.op]
        free[span.worker] = span.end
    assert played.makespan == max(ended.values())


def test_a_slow_stage_sets_the_pace() -> None:
    played = simulate(one_f_one_b(2, 10), lambda op: 5.0 if op.stage else 1.0)
    assert played.makespan == 1 + 20 * 5 + 1
    assert played.idle == pytest.approx(1 - (20 + 100) / (2 * 102))


def test_several_stages_on_a_worker() -> None:
    ops = parse(INTERLEAVED)
    validate(ops, 4, 2)
    assert placement(ops) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert simulate(ops).makespan == 15
    assert simulate(ops).peak_live == (4, 4)


def test_idle_share_counts_from_the_first_begin_to_the_last_end() -> None:
    first, second = Op(0, Kind.FORWARD, 0), Op(1, Kind.FORWARD, 0)
    spans = [Span(1, first, 100.0, 101.0), Span(2, second, 102.0, 104.0)]
    assert idle_share(spans, 2) == pytest.approx(1 - 3 / 8)
    assert idle_share(spans, 3) == pytest.approx(1 - 3 / 12)


def test_nothing_is_not_idle() -> None:
    assert idle_share([], 2) == 0
    assert simulate([[], []]).makespan == simulate([]).idle == 0


@pytest.mark.parametrize(
    ("ops", "told"),
    [
        ("0F0 0B0\n1F0", "1B0 is missing"),
        ("0F0 0B0 0F0\n1F0 1B0", r"ops\[0\]\[2\] = 0F0 .*ops\[0\]\[0\] is the same"),
        ("0F0 0B0\n1F0 1B0 1F1", r"ops\[1\]\[2\] = 1F1 .*1 micro-batches"),
        ("0F0 0B0\n1F0 2F0 1B0", r"ops\[1\]\[1\] = 2F0 .*2 stages"),
        ("0F0 0B0 1F0\n1B0", r"ops\[1\]\[0\] = 1B0 .*stage 1 runs on worker number 0"),
    ],
)
def test_a_list_that_is_not_the_work_to_do(ops: str, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        validate(parse(ops), stages=2, microbatches=1)


def test_a_deadlock_says_who_waits_for_what() -> None:
    crossed = parse("0F0 0B0\n1B0 1F0")
    told = r"ops\[0\]\[1\] = 0B0 waits for 1B0 at ops\[1\]\[0\]; ops\[1\]\[0\] = 1B0 waits for 1F0 at ops\[1\]\[1\]"
    with pytest.raises(PipelineError, match=told):
        validate(crossed, stages=2, microbatches=1)
    with pytest.raises(PipelineError, match=told):
        simulate(crossed)


def test_a_deadlock_of_two_microbatches() -> None:
    with pytest.raises(PipelineError, match=r"ops\[0\]\[1\] = 0B0 waits for 1B0.*ops\[1\]\[0\] = 1F1 waits for 0F1"):
        validate(parse("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1"), stages=2, microbatches=2)


def test_an_op_that_nobody_will_send_for() -> None:
    with pytest.raises(PipelineError, match="1F0 waits for 0F0 at no place"):
        simulate([[], [Op(1, Kind.FORWARD, 0)]])
