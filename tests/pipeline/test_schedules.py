"""Schedules as drawings: a row per worker, a column per unit of time; forward and backward take one unit each."""

from __future__ import annotations

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import STAGES

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.ops import Kind, Op, Ops, Schedule, find_placement, format_ops, parse_ops
from rpcbench.pipeline.schedules import chunks_for, gpipe, named, one_f_one_b
from rpcbench.pipeline.simulate import simulate

NAMES = list(STAGES)
SCHEDULES = st.sampled_from([named(name) for name in NAMES])
WORKERS = st.integers(1, 6)
MICROBATCHES = st.integers(1, 12)


def drawn(ops: Ops) -> str:
    played = simulate(ops, cost=lambda op: 1)
    rows = [["  "] * int(played.makespan) for _ in ops]
    for span in played.spans:
        rows[span.worker][int(span.begin)] = f"{span.op.kind}{span.op.microbatch}"
    return "\n".join(" ".join(row).rstrip() for row in rows)


def picture(written: str) -> str:
    return dedent(written).strip("\n")


def test_gpipe_matches_its_drawing() -> None:
    assert drawn(gpipe(3, 4)) == picture("""
        F0 F1 F2 F3             B0 B1 B2 B3
           F0 F1 F2 F3       B0 B1 B2 B3
              F0 F1 F2 F3 B0 B1 B2 B3
    """)


def test_1f1b_matches_its_drawing() -> None:
    assert drawn(one_f_one_b(3, 4)) == picture("""
        F0 F1 F2       B0 F3 B1    B2    B3
           F0 F1    B0 F2 B1 F3 B2    B3
              F0 B0 F1 B1 F2 B2 F3 B3
    """)


def test_1f1b_with_fewer_micro_batches_than_workers_matches_its_drawing() -> None:
    assert drawn(one_f_one_b(4, 2)) == picture("""
        F0 F1                B0    B1
           F0 F1          B0    B1
              F0 F1    B0    B1
                 F0 B0 F1 B1
    """)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_one_micro_batch_goes_forward_and_backward_through_all_stages(schedule: Schedule) -> None:
    assert format_ops(schedule(2, 1)) == "0F0 0B0\n1F0 1B0"


def test_one_worker_alternates_forwards_and_backwards_in_1f1b_but_not_in_gpipe() -> None:
    assert format_ops(one_f_one_b(1, 2)) == "0F0 0B0 0F1 0B1"
    assert format_ops(gpipe(1, 2)) == "0F0 0F1 0B0 0B1"


@given(SCHEDULES, WORKERS, MICROBATCHES)
def test_the_text_of_a_schedule_parses_to_the_same_operations(
    schedule: Schedule, workers: int, microbatches: int
) -> None:
    ops = schedule(workers, microbatches)
    assert parse_ops(format_ops(ops)) == ops


@given(SCHEDULES, WORKERS, MICROBATCHES)
def test_each_stage_adds_gradients_in_the_order_of_the_micro_batches(
    schedule: Schedule, workers: int, microbatches: int
) -> None:
    for own in schedule(workers, microbatches):
        for stage in {op.stage for op in own}:
            adding = [op for op in own if op.stage == stage and op.kind in (Kind.BACKWARD, Kind.WEIGHT)]
            assert [op.microbatch for op in adding] == list(range(microbatches))


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_v_schedules_accept_only_two_stages_per_worker(name: str) -> None:
    with pytest.raises(PipelineError, match=f"'{name}' gives each worker 2 stages: chunks must be 2, not 3"):
        named(name)(2, 4, 3)


def test_a_text_is_parsed_into_its_operations() -> None:
    assert parse_ops("\n  0F0 0B12\n  1F0\n") == [
        [Op(0, Kind.FORWARD, 0), Op(0, Kind.BACKWARD, 12)],
        [Op(1, Kind.FORWARD, 0)],
    ]


@pytest.mark.parametrize("word", ["F0", "0X0", "0F", "0f0", "-1F0", "0F0,"])
def test_an_invalid_operation_in_a_text_is_named(word: str) -> None:
    with pytest.raises(PipelineError, match=f"'{word}'.*0F3"):
        parse_ops(f"0F0 {word} 0B0")


def test_schedules_can_be_looked_up_by_name() -> None:
    assert named("gpipe") is gpipe
    assert named("1f1b") is one_f_one_b


def test_several_stages_per_worker_are_placed_in_turn_or_in_a_v() -> None:
    round_, vee = {0: 0, 1: 1, 2: 0, 3: 1}, {0: 0, 1: 1, 2: 1, 3: 0}
    assert [find_placement(named(name)(2, 3)) for name in NAMES[3:]] == [round_, round_, round_, vee, vee]
    assert find_placement(named("interleaved")(2, 3, 3)) == {stage: stage % 2 for stage in range(6)}


def test_sequential_matches_its_drawing() -> None:
    assert drawn(named("sequential")(2, 2)) == picture("""
        F0       B0 F1       B1
           F0 B0       F1 B1
    """)


def test_breadth_first_matches_its_text() -> None:
    assert format_ops(named("bfs")(2, 2)) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"


def test_interleaved_matches_its_text() -> None:
    assert format_ops(named("interleaved")(2, 2)) == (
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )


def test_zero_bubble_schedules_match_their_drawings() -> None:
    assert drawn(named("zb1p")(2, 3, 1)) == picture("""
        F0 F1    I0 W0 F2 I1 W1 I2 W2
           F0 I0 F1 I1 W0 F2 I2 W1 W2
    """)
    assert drawn(named("zbv")(2, 2)) == picture("""
        F0 F1    F0 I0 F1 I1 I0 W0 I1 W1 W0 W1
           F0 F0 F1 F1 I0 I0 I1 I1 W0 W0 W1 W1
    """)


def test_an_unknown_schedule_name_is_refused_with_the_known_names() -> None:
    with pytest.raises(PipelineError, match=r"'1f2b'; there are 'sequential', 'gpipe', '1f1b'"):
        named("1f2b")


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_invalid_sizes_of_a_schedule_are_refused(schedule: Schedule) -> None:
    with pytest.raises(PipelineError, match=r"workers must be .* not 0"):
        schedule(0, 4)
    with pytest.raises(PipelineError, match=r"microbatches must be .* not 0"):
        schedule(2, 0)
    with pytest.raises(PipelineError, match=r"microbatches must be .* not 8\.0"):
        schedule(2, 8.0)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="chunks must be 1, not 2"):
        schedule(2, 4, 2)


@pytest.mark.parametrize(
    ("name", "sizes", "chunks"),
    [("zb1p", [1, 2], 1), ("zb1p", [1] * 4, 2), ("bfs", [1] * 6, 3), ("zbv", [1, 2], None), ("zb1p", None, None)],
)
def test_chunks_follow_from_the_split_if_the_schedule_takes_any_number(
    name: str, sizes: list[int] | None, chunks: int | None
) -> None:
    assert chunks_for(name, sizes, workers=2) == chunks
