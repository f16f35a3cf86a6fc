"""The simulator against the formulas of the literature, and the validator against schedules that cannot run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import STAGES

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.ops import Kind, Op, find_placement, parse_ops, validate_ops
from rpcbench.pipeline.schedules import gpipe, named, one_f_one_b
from rpcbench.pipeline.simulate import Costs, Span, equal_stages, idle_share, simulate

SCHEDULES = st.sampled_from([gpipe, one_f_one_b])
NAMES = list(STAGES)
WORKERS = st.integers(1, 6)
MICROBATCHES = st.integers(1, 12)
COSTS = st.sampled_from([equal_stages, lambda op: 1.0])
INTERLEAVED = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"


@given(st.sampled_from(NAMES), WORKERS, MICROBATCHES)
def test_every_schedule_is_valid(name: str, workers: int, microbatches: int) -> None:
    ops = named(name)(workers, microbatches)
    validate_ops(ops, 1 + max(op.stage for own in ops for op in own), microbatches)


@pytest.mark.parametrize("name", ["interleaved", "bfs", "zb1p"])
@given(WORKERS, MICROBATCHES, st.integers(1, 3))
def test_flexible_schedules_are_valid_for_any_number_of_stages_per_worker(
    name: str, workers: int, microbatches: int, chunks: int
) -> None:
    validate_ops(named(name)(workers, microbatches, chunks), workers * chunks, microbatches)


@given(SCHEDULES, WORKERS, MICROBATCHES, COSTS)
def test_idle_share_is_the_bubble_of_the_literature(schedule, p, m, cost) -> None:
    assert simulate(schedule(p, m), cost).idle == pytest.approx((p - 1) / (m + p - 1))


@given(WORKERS, MICROBATCHES)
def test_peak_live_micro_batches_equal_the_formulas_for_gpipe_and_1f1b(p: int, m: int) -> None:
    assert simulate(gpipe(p, m)).peak_live == (m,) * p
    assert simulate(one_f_one_b(p, m)).peak_live == tuple(min(m, p - w) for w in range(p))


def test_gpipe_and_1f1b_have_the_published_figures() -> None:
    for schedule, live in ((gpipe, (8, 8, 8, 8)), (one_f_one_b, (4, 3, 2, 1))):
        played = simulate(schedule(4, 8))
        assert (played.makespan, played.peak_live) == (33, live)
        assert f"{played.idle:.1%}" == "27.3%"
        assert f"{simulate(schedule(4, 16)).idle:.1%}" == "15.8%"


@pytest.mark.parametrize(
    ("name", "idle", "live"),
    [
        ("interleaved", "15.8% 8.6%", (11, 9, 7, 5)),
        ("bfs", "15.8% 8.6%", None),
        ("zb1p", "5.9% 3.0%", (8, 8, 8, 8)),
        ("zbv", "5.9% 3.0%", (8, 8, 8, 8)),
        ("dualpipev", "5.9% 3.0%", (9, 9, 9, 9)),
    ],
)
def test_other_schedules_have_the_expected_idle_shares_and_live_activations(
    name: str, idle: str, live: tuple[int, ...] | None
) -> None:
    """Four workers, 8 and 16 micro-batches; live activations do not grow with them, unless a schedule keeps all."""
    eight, sixteen = (simulate(named(name)(4, number)) for number in (8, 16))
    assert f"{eight.idle:.1%} {sixteen.idle:.1%}" == idle
    assert (eight.peak_live, sixteen.peak_live) == ((live, live) if live else ((16,) * 4, (32,) * 4))


@given(WORKERS, MICROBATCHES, st.integers(1, 3))
def test_zb1p_stays_within_its_bounds_of_activations_and_time(p: int, m: int, v: int) -> None:
    played = simulate(named("zb1p")(p, m, v))
    assert max(played.peak_live) <= p * v
    if m % p == 0 or (m > p and v == 1):
        assert played.makespan == 3 * v * m + p - 1


@given(WORKERS, MICROBATCHES)
def test_zbv_stays_within_its_bounds_of_activations_and_time(p: int, m: int) -> None:
    played = simulate(named("zbv")(p, m))
    assert max(played.peak_live) <= 2 * p
    if m >= p:
        assert 0 <= played.makespan - (6 * m + p - 1) <= max(0, p - 4), (
            "one unit more for each worker beyond the fourth"
        )


@given(SCHEDULES, WORKERS, MICROBATCHES, st.randoms(use_true_random=False))
def test_operations_wait_only_for_their_inputs_and_their_worker(schedule, p, m, random) -> None:
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


def test_a_slow_stage_determines_the_makespan() -> None:
    played = simulate(one_f_one_b(2, 10), lambda op: 5.0 if op.stage else 1.0)
    assert played.makespan == 1 + 20 * 5 + 1
    assert played.idle == pytest.approx(1 - (20 + 100) / (2 * 102))


def test_several_stages_on_a_worker_are_valid_and_simulated() -> None:
    ops = parse_ops(INTERLEAVED)
    validate_ops(ops, 4, 2)
    assert find_placement(ops) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert simulate(ops).makespan == 15
    assert simulate(ops).peak_live == (4, 4)


def test_idle_share_counts_from_the_first_begin_to_the_last_end() -> None:
    first, second = Op(0, Kind.FORWARD, 0), Op(1, Kind.FORWARD, 0)
    spans = [Span(1, first, 100.0, 101.0), Span(2, second, 102.0, 104.0)]
    assert idle_share(spans, 2) == pytest.approx(1 - 3 / 8)
    assert idle_share(spans, 3) == pytest.approx(1 - 3 / 12)


def test_an_empty_schedule_has_no_idle_time() -> None:
    assert idle_share([], 2) == 0
    assert simulate([[], []]).makespan == simulate([]).idle == 0


@pytest.mark.parametrize(
    ("ops", "told"),
    [
        ("0F0 0B0\n1F0", "1B0 is missing"),
        ("0F0 0B0 0F0\n1F0 1B0", r"ops\[0\]\[2\] = 0F0 .*ops\[0\]\[0\] is the same"),
        ("0F0 0B0\n1F0 1B0 1F1", r"ops\[1\]\[2\] = 1F1 .*1 micro-batch,"),
        ("0F0 0B0\n1F0 2F0 1B0", r"ops\[1\]\[1\] = 2F0 .*2 stages"),
        ("0F0 0B0\n1F0 1I0", "1W0 is missing"),
        ("0F0 0B0\n1F0 1W0", "1I0 is missing"),
        ("0F0 0B0\n1F0 1B0 1W0", r"ops\[1\]\[2\] = 1W0 is a part of 1B0 at ops\[1\]\[1\]: run either"),
        ("0F0 0B0\n1F0 1W0 1I0", r"ops\[1\]\[1\] = 1W0 waits for 1I0 at ops\[1\]\[2\]"),
        ("0F0 0B0 1F0\n1B0", r"ops\[1\]\[0\] = 1B0 .*stage 1 runs on worker number 0"),
    ],
)
def test_a_schedule_with_missing_repeated_or_misplaced_operations_is_refused(ops: str, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        validate_ops(parse_ops(ops), stages=2, microbatches=1)


def test_a_schedule_that_exceeds_most_live_is_refused() -> None:
    validate_ops(gpipe(2, 3), 2, 3, most_live=3)
    told = r"ops\[0\]\[2\] = 0F2 cannot be: it would keep the activations of 3 micro-batches, and 2 are allowed"
    with pytest.raises(PipelineError, match=told):
        validate_ops(gpipe(2, 3), 2, 3, most_live=2)


def test_the_input_half_of_a_backward_is_enough_for_the_stage_before() -> None:
    ops = parse_ops("0F0 0B0\n1F0 1I0 1W0")
    validate_ops(ops, 2, 1)
    played = simulate(ops)
    assert {str(span.op): (span.begin, span.end) for span in played.spans} == {
        "0F0": (0, 1), "1F0": (1, 2), "1I0": (2, 3), "0B0": (3, 5), "1W0": (3, 4)
    }  # fmt: skip


def test_a_deadlock_error_names_the_waiting_operations() -> None:
    crossed = parse_ops("0F0 0B0\n1B0 1F0")
    told = r"ops\[0\]\[1\] = 0B0 waits for 1B0 at ops\[1\]\[0\]; ops\[1\]\[0\] = 1B0 waits for 1F0 at ops\[1\]\[1\]"
    with pytest.raises(PipelineError, match=told):
        validate_ops(crossed, stages=2, microbatches=1)
    with pytest.raises(PipelineError, match=told):
        simulate(crossed)


def test_a_deadlock_between_two_micro_batches_is_found() -> None:
    with pytest.raises(PipelineError, match=r"ops\[0\]\[1\] = 0B0 waits for 1B0.*ops\[1\]\[0\] = 1F1 waits for 0F1"):
        validate_ops(parse_ops("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1"), stages=2, microbatches=2)


def test_an_operation_with_an_input_that_is_never_made_is_refused() -> None:
    with pytest.raises(PipelineError, match="1F0 waits for 0F0 at no place"):
        simulate([[], [Op(1, Kind.FORWARD, 0)]])


def test_transfer_times_delay_only_values_for_another_worker() -> None:
    played = simulate(parse_ops("0F0 2F0 2B0 0B0\n1F0 1B0"), Costs(), transfer=0.25)
    begins = {str(span.op): span.begin for span in played.spans}
    assert begins == {"0F0": 0, "1F0": 1.25, "2F0": 2.5, "2B0": 3.5, "1B0": 5.75, "0B0": 8}
    assert simulate(parse_ops("0F0 1F0 1B0 0B0"), Costs(), transfer=0.25).makespan == 6


def test_costs_depend_on_the_kind_and_the_stage() -> None:
    costs = Costs(forward=[1, 3], weight=0.5)
    told = {word: costs(Op.parse_op(word)) for word in ("0F0", "1F0", "0B0", "1B0", "1I0", "1W0", "1R0")}
    assert told == {"0F0": 1, "1F0": 3, "0B0": 2, "1B0": 6, "1I0": 3, "1W0": 0.5, "1R0": 3}
    assert Costs(backward=5)(Op.parse_op("0I0")) == 2.5 and Costs(recompute=[4])(Op.parse_op("0R1")) == 4


def test_peak_memory_weighs_activations_by_their_stage() -> None:
    played = simulate(parse_ops(INTERLEAVED), activation=[10, 1, 2, 1])
    assert (played.peak_live, played.peak_memory) == ((4, 4), (24, 4))


def test_a_simulation_can_be_drawn_as_text_and_svg() -> None:
    played = simulate(parse_ops("0F0 0B0\n1F0 1I0 1W0"))
    assert repr(played) == played.text()
    assert played.text(50).splitlines() == [
        "5 long, idle 40.0%, kept at most 1, 1",
        "worker 0 │F0░░░░░░                B0▓▓▓▓▓▓▓▓▓▓▓▓▓▓",
        "worker 1 │        F0░░░░░░I0▒▒▒▒▒▒W0▚▚▚▚▚▚",
        "          0───────────────2───────────────4───────",
        "F0░ forward, B0▓ backward, I0▒ input gradient, W0▚ weight gradients of micro-batch 0; blank: idle",
    ]
    assert played.chart.svg().count('class="f-') == 5 + 4 and "<img" in played._repr_html_()
