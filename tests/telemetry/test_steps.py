"""Pipeline steps as a view: over when all workers have said so, idle as measured, waiting for what is planned next."""

from __future__ import annotations

import pytest

from rpcbench.telemetry.views import STEPS_DRAWN, STEPS_LISTED, pipeline_view


def world(ops=(), parts=(), states=("up",) * 4):
    """A world of these rows, each at its worker."""
    at = {
        i: {"name": f"w{i}", "id": i, "incarnation": 0, "state": states[i], "left_out": 0}
        | {"tables": {"ops": {}, "steps": {}}}
        for i in range(4)
    }
    for number, row in enumerate(ops):
        at[row["worker"]]["tables"]["ops"][str(number)] = row
    for row in parts:
        at[row["worker"]]["tables"]["steps"][f"s{row['step']}"] = row
    return at


def op(worker, word, begin, end, step=1, held=0):
    stage, kind, batch = word
    return {
        "step": step, "worker": worker, "stage": int(stage), "op": kind, "microbatch": int(batch),
        "begin": begin, "end": end, "bytes": 0, "held": held, "failed": False,
    }  # fmt: skip


def part(worker, state="running", plan="0F0 0B0", workers=(1, 2), step=1, ideal=0.2, **more):
    return {
        "step": step, "worker": worker, "workers": list(workers), "plan": plan.split(), "ideal": ideal, "state": state,
        **more,
    }  # fmt: skip


DONE = [part(1, "done"), part(2, "done", "1F0 1B0")]
OPS = [op(1, "0F0", 10.0, 11.0), op(2, "1F0", 11.0, 12.0), op(2, "1B0", 12.0, 13.0), op(1, "0B0", 13.0, 14.0)]


def step(*args, **more):
    return pipeline_view(world(*args, **more))["steps"]["1"]


def test_the_bubble_is_the_share_of_time_in_no_op():
    view = pipeline_view(world(OPS, DONE))
    assert view["steps"]["1"] == {
        "step": 1, "state": "complete", "trains": True, "begin": 10.0, "end": 14.0, "ops": 4,
        "bubble": pytest.approx(0.5), "minimum": 0.2, "loss": None, "samples": None, "run": "",
    }  # fmt: skip
    assert {key: lane["busy"] for key, lane in view["lanes"].items()} == {"1/1": 0.5, "1/2": 0.5}
    assert view["lanes"]["1/2"]["stages"] == [1]
    assert len(view["ops"]) == 4


@pytest.mark.parametrize(
    ("ops", "parts", "state"),
    [
        (OPS, DONE, "complete"),
        (OPS, [DONE[0], part(2)], "running"),
        (OPS, [DONE[0]], "running"),
        (OPS, [], "running"),
        (OPS[:1], [part(1, "done", "0F0", [1])], "complete"),
        (OPS[:2], [part(1), part(2, "failed")], "failed"),
        (OPS[:2], [part(1), part(2, "interrupted")], "interrupted"),
        (OPS[:2], [part(1, "failed"), part(2, "interrupted")], "failed"),
    ],
    ids=[
        "all done",
        "one at work",
        "one not heard of",
        "nobody heard of",
        "forwards alone",
        "one failed",
        "interrupted",
        "failed before it was interrupted",
    ],
)
def test_a_step_is_complete_once_all_who_take_part_have_said_so(ops, parts, state):
    found = step(ops, parts)
    assert found["state"] == state
    assert (found["bubble"] is not None) == (state == "complete")


def test_a_step_fails_with_a_worker_that_was_lost_before_the_others_had_ended_it():
    gone = ("up", "up", "lost", "up")
    assert step(OPS, [part(1), part(2)], states=gone)["state"] == "failed"
    assert step(OPS, [part(1), DONE[1]], states=gone)["state"] == "failed"
    assert step(OPS, DONE, states=gone)["state"] == "complete"


@pytest.mark.parametrize("parts", [[DONE[0], part(2)], [DONE[0]]], ids=["it began", "nothing of it is known"])
def test_a_step_that_all_others_have_ended_has_not_failed_with_a_worker_that_was_lost_later(parts):
    """Its last report was lost with it, so nobody can tell; the step before is then the last one listed."""
    earlier = [op(1, "0F0", 1.0, 2.0, step=0), op(2, "1F0", 2.0, 3.0, step=0)]
    known = [part(1, "done", "0F0", step=0), part(2, "done", "1F0", step=0), *parts]
    view = pipeline_view(world([*earlier, *OPS], known, states=("up", "up", "lost", "up")))
    assert [(row["step"], row["state"]) for row in view["steps"].values()] == [(0, "complete")]


def test_a_step_that_a_worker_has_forgotten_is_not_listed():
    """A worker keeps the last few steps; rows of one that was lost stay."""
    later = [op(2, "1F0", 20.0, 21.0, step=9)]
    for state in ("lost", "up"):
        view = pipeline_view(world([*OPS, *later], [DONE[0], part(2, step=9)], states=("up", state, "up", "up")))
        assert "1" not in view["steps"], state
    assert (
        "1"
        not in pipeline_view(
            world(
                [*OPS, *later, op(1, "0F0", 20.0, 21.0, step=9)],
                [
                    part(1, step=9),
                    part(2, step=9),
                ],
            )
        )["steps"]
    )


def test_a_step_of_before_a_restart_does_not_run_for_ever():
    found = world(OPS, [DONE[0]])
    found[2]["since"] = 20.0
    assert pipeline_view(found)["steps"] == {}
    found[2]["since"] = 9.0
    assert pipeline_view(found)["steps"]["1"]["state"] == "running"


def test_who_has_not_been_heard_for_a_while_may_still_end_a_step():
    assert step(OPS, [DONE[0], part(2)], states=("up", "up", "suspect", "up"))["state"] == "running"


def test_a_step_is_not_listed_whose_end_a_worker_has_not_told_before_it_left():
    left = ("left",) * 4
    assert pipeline_view(world(OPS, [DONE[0], part(2)], states=left)) == {
        **pipeline_view(world(states=left)), "steps": {}, "lanes": {}, "ops": {},
    }  # fmt: skip
    assert step(OPS, DONE, states=left)["state"] == "complete"
    assert step(OPS, [DONE[0], part(2, "failed")], states=left)["state"] == "failed"


def test_a_lane_says_what_it_waits_for():
    parts = [part(1, plan="0F0 0F1 0B0"), part(2, plan="1F0 1B0")]
    lanes = pipeline_view(world([op(1, "0F0", 0.0, 1.0), op(1, "0F1", 1.0, None)], parts))["lanes"]
    assert [(lane["next"], lane["done"], lane["planned"]) for lane in lanes.values()] == [("", 1, 3), ("1F0", 0, 2)]
    lanes = pipeline_view(world([op(1, "0F0", 0.0, 1.0), op(1, "0F1", 1.0, 2.0)], parts))["lanes"]
    assert lanes["1/1"]["next"] == "0B0"
    done = pipeline_view(world([op(1, "0F0", 0.0, 1.0)], [part(1, "failed"), parts[1]]))["lanes"]
    assert [lane["next"] for lane in done.values()] == ["", ""]


def test_a_worker_holds_what_its_stages_hold_after_their_last_operation():
    ops = [
        op(1, "0F0", 0.0, 1.0, held=10), op(1, "2F0", 1.0, 2.0, held=7), op(1, "0F1", 2.0, 3.0, held=20),
        op(1, "0B0", 3.0, 4.0, held=10), op(1, "2B0", 4.0, None, held=None),
    ]  # fmt: skip
    lane = pipeline_view(world(ops, [part(1)]))["lanes"]["1/1"]
    assert (lane["held"], lane["peak"]) == (17, 27)


def test_nothing_is_measured_before_an_op_ended():
    view = pipeline_view(world([op(1, "0F0", 3.0, None)], [part(1)]))
    assert view["steps"]["1"]["bubble"] is None
    assert view["lanes"]["1/1"]["busy"] is None


def test_the_latest_steps_count_by_time_not_by_number():
    numbers = [7, 8, 9, 10, 11, 12, 13, 0, 1]
    view = pipeline_view(world([op(1, "0B0", float(at), at + 0.5, step=n) for at, n in enumerate(numbers)]))
    assert list(view["steps"]) == [str(n) for n in numbers[-STEPS_LISTED:]]
    assert [row["step"] for row in view["ops"].values()] == numbers[-STEPS_DRAWN:]


def test_evaluation_does_not_displace_steps_that_train():
    trained = [op(1, "0B0", float(n), n + 0.5, step=n) for n in range(6)]
    view = pipeline_view(world([*trained, *(op(1, "0F0", float(n), n + 0.5, step=n) for n in range(10, 40))]))
    assert [row["step"] for row in view["ops"].values()] == [2, 3, 4, 5, 38, 39]
    assert [row["step"] for row in view["steps"].values()] == [2, 3, 4, 5, *range(32, 40)]
    assert [row["trains"] for row in view["steps"].values()] == [True] * 4 + [False] * 8


def test_the_loss_is_the_sum_over_the_replicas_and_unknown_where_one_has_none():
    def losses(*each):
        parts = [part(n + 1, "done", samples=64, **loss) for n, loss in enumerate(each)]
        found = step(OPS, parts)
        return found["loss"], found["samples"]

    assert losses({}, {"loss": 0.5}) == (0.5, 64)
    assert losses({"loss": 0.25}, {"loss": 0.5}) == (0.75, 64)
    assert losses({"loss": 0.25}, {"loss": None}) == losses({}, {}) == (None, 64)
    assert step(OPS, [part(1), part(2, "done", loss=0.5)])["loss"] is None
