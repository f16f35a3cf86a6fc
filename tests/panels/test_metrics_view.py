"""The view of the metrics panel: curves by rank, those that diverge, the text, the CSV, records."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from pictures import logged, restarted, world

from rpcbench.telemetry.metric_views import (
    ALL_SHOWN,
    BUCKET,
    FACTOR,
    LEAST,
    RECENT,
    find_divergence,
    metrics_csv,
    metrics_view,
)
from rpcbench.telemetry.record_schema import check_delta
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.svg import Snapshot


def ranks(*curves, name="loss"):
    at = world(len(curves))
    for worker, values in enumerate(curves, 1):
        logged(at, worker, name, values)
    return at


def states(at, name="loss"):
    return [row["state"] for row in metrics_view(at)["curves"].values() if row["name"] == name]


def wave(middle, n=30):
    return [middle + 0.1 * math.sin(i) for i in range(n)]


def test_a_curve_has_its_last_value_and_all_its_points():
    view = metrics_view(ranks([0.5, 0.25], [1.0]))
    assert json.loads(json.dumps(view)) == view
    assert [(row["count"], row["step"], row["value"]) for row in view["curves"].values()] == [(2, 1, 0.25), (1, 0, 1.0)]
    assert view["metrics"] == {"loss": {"name": "loss", "order": 0, "step": 1, "diverge": 0}}
    assert [(row["curve"], row["steps"], row["values"]) for row in view["points"].values()] == [
        ("1/loss", [0, 1], [0.5, 0.25]), ("2/loss", [0], [1.0]),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_a_rank_whose_last_value_is_not_finite_diverges(text):
    at = ranks([0.5, text], [0.5, 0.4])
    assert states(at) == ["nan", ""]
    row = metrics_view(at)["curves"]["1/loss"]
    assert (row["value"], row["words"]) == (text, f"is {text}")
    assert metrics_view(at)["points"]["1/0.0"]["odd"] == [1, text, 1]
    (row, _) = metrics_view(ranks([0.5, text, text, 0.4, text], [0.5]))["points"].values()
    assert row["odds"] == [[1, 2, text], [4, 4, text]], "where each stands"
    assert states(ranks([0.5, text, 0.4], [0.5, 0.4])) == ["", ""], "it has recovered"


def test_a_rank_far_from_the_others_diverges_and_the_others_do_not():
    at = ranks(wave(1), wave(1), wave(3))
    assert states(at) == ["", "", "far"]
    assert "where all others are between 0.9" in metrics_view(at)["curves"]["3/loss"]["words"]


@pytest.mark.parametrize(("away", "found"), [(FACTOR - 0.01, ""), (FACTOR + 0.01, "far")])
def test_far_is_three_widths_outside_the_others_range(away, found):
    others = [[1.0] * 10 + [2.0] * 10, [1.5] * 20]
    assert find_divergence(2.0, [2.0 + away] * 20, others)[0] == found
    assert find_divergence(2.0, [1.0 - away] * 20, others)[0] == found


def test_ranks_that_agree_may_differ_by_rounding():
    assert states(ranks([0.1] * 9, [0.1] * 9, [0.1 + 1e-9] * 9)) == ["", "", ""]
    assert states(ranks([0.1] * 9, [0.1] * 9, [0.11] * 9)) == ["", "", "far"]


def test_two_ranks_or_few_points_are_not_judged():
    assert states(ranks(wave(1), wave(9))) == ["", ""]
    few = LEAST - 1
    assert states(ranks(wave(1), wave(1), wave(9, few))) == ["", "", ""]
    assert states(ranks(wave(1), wave(1, few), wave(9))) == ["", "", ""], "one other is left"


def test_a_rank_that_is_behind_is_compared_at_its_own_step():
    falling = [10.0 - 0.01 * i for i in range(900)]
    at = ranks(falling, falling, falling[:100])
    assert states(at) == ["", "", ""]
    at[3]["state"] = "lost"
    assert states(at) == ["", "", ""], "a lost rank keeps its last place"
    at = ranks(falling[:100] + [1e6] * 800, falling, falling, falling[:100])
    assert states(at)[0] == ""
    at[4]["state"] = "lost"
    assert states(at)[0] == "far", "a rank that was lost holds nobody back"


def test_the_last_points_decide():
    assert states(ranks(wave(1, 90), wave(1, 90), wave(9, 90 - RECENT) + wave(1, RECENT))) == ["", "", ""]


def test_of_many_points_no_peak_is_lost():
    values = [1.0 + 0.001 * (i % 7) for i in range(ALL_SHOWN + 1)]
    values[777], values[333] = 9.0, -9.0
    shown = [*metrics_view(ranks(values))["points"].values()]
    points = {step: value for row in shown for step, value in zip(row["steps"], row["values"], strict=True)}
    assert points[777] == 9.0 and points[333] == -9.0
    assert len(points) <= 2 * (len(values) // BUCKET + len(shown))
    assert all(values[step] == value for step, value in points.items()), "points are real ones"
    assert sum(len(row["steps"]) for row in metrics_view(ranks(values[:-1]))["points"].values()) == ALL_SHOWN


def test_a_smaller_step_begins_the_curve_anew_and_the_csv_has_both():
    at = world(1)
    logged(at, 1, "loss", [3.0, 2.0])
    row = at[1]["tables"]["metrics"]["0.0"]
    at[1]["tables"]["metrics"]["0.1"] = {**row, "block": 1, "run": 1, "steps": [0], "values": [5.0]}
    assert [row["values"] for row in metrics_view(at)["points"].values()] == [[5.0]]
    assert [*csv.reader(io.StringIO(metrics_csv(at)))] == [
        ["name", "worker", "run", "step", "value"], ["loss", "worker1", "0", "0", "3.0"],
        ["loss", "worker1", "0", "1", "2.0"], ["loss", "worker1", "1", "0", "5.0"],
    ]  # fmt: skip


def test_the_csv_has_odd_values_in_their_places():
    name, texts = 'a "b",c', ["1.0", "nan", "2.0", "inf"]
    rows = [*csv.reader(io.StringIO(metrics_csv(ranks([float(text) for text in texts], name=name))))]
    assert rows[1:] == [[name, "worker1", "0", str(i), value] for i, value in enumerate(texts)]


def test_its_text_has_the_ranks_that_diverge_first():
    at = ranks([0.5, "nan"], [0.5, 0.4], [0.5, 0.3])
    logged(at, 2, "lr", [0.1], order=1)
    assert summarize_view(metrics_view(at)).splitlines() == [
        "4 members, 2 metrics, 4 curves, 1 diverged", "  loss of worker1 is nan",
        "  loss at step 1: median 0.35, from 0.3 to 0.4 on 2 of 3 ranks, without worker1", "  lr at step 0: 0.1",
    ]  # fmt: skip
    assert summarize_view(metrics_view(world(1))) == "2 members, 0 metrics, 0 curves"
    assert "loss at step 0: no finite value" in summarize_view(metrics_view(ranks(["inf"])))


def test_records_may_have_it_and_a_wrong_row_is_refused():
    row = ranks([0.5, "nan", 1e30])[1]["tables"]["metrics"]["0.0"]
    assert row["odd"] == [[1, 1, "nan"], [1, 2, "1e+30"]]
    check_delta({"1 metrics": {"set": {"0.0": row}, "drop": []}}, "frame 1")
    with pytest.raises(ValueError, match=r"row '0.0': .*steps"):
        check_delta({"1 metrics": {"set": {"0.0": {**row, "steps": ["x"]}}, "drop": []}}, "frame 1")


def test_its_still_has_curves_and_the_ranks_that_diverge():
    pytest.importorskip("quickjs", reason="needs quickjs-ng, which the extra `lab` installs")
    drawn = Snapshot(metrics_view(ranks(wave(1), wave(1), wave(3), name="<b>loss"))).svg
    assert "&lt;b&gt;loss" in drawn and drawn.count("rb-member") > 3 and "rb-member rb-far" in drawn
    assert "1</b> diverges" in drawn and "where all others are between" in drawn


# -- ranks that were lost or started again


def curve_of(view, process="2", name="loss"):
    key = f"{process}/{name}"
    steps = [step for row in sorted(view["points"].values(), key=lambda row: row["order"])
             if row["curve"] == key for step in row["steps"]]  # fmt: skip
    return steps, view["curves"][key]["ended"]


def lines(at):
    return [line.strip() for line in summarize_view(metrics_view(at)).splitlines()[1:]]


def test_a_rank_that_was_lost_or_started_again_keeps_its_curve():
    at = ranks(wave(1), wave(1))
    assert curve_of(metrics_view(at)) == ([*range(30)], "")
    at[2]["state"] = "lost"
    assert curve_of(metrics_view(at)) == ([*range(30)], "lost")
    assert "worker2 was lost after step 29 of loss" in lines(at)
    restarted(at, 2)
    view = metrics_view(at)
    assert curve_of(view) == ([*range(30)], "restarted")
    assert "worker2 was started again after step 29 of loss" in lines(at)
    restarted(at, 2)
    assert curve_of(metrics_view(at)) == ([*range(30)], "restarted")


@pytest.mark.parametrize("first", [30, 0, 29])
def test_a_successor_has_a_curve_of_its_own_beside_the_former_one(first):
    at = ranks(wave(1), wave(1))
    restarted(at, 2)
    logged(at, 2, "loss", wave(1), first=first, since=40.0)
    view = metrics_view(at)
    assert curve_of(view) == ([*range(30)], "restarted"), "worker1 is still in the run of both"
    assert curve_of(view, "2.1") == ([*range(first, first + 30)], "")
    rows = [row for row in csv.DictReader(io.StringIO(metrics_csv(at))) if row["worker"] == "worker2"]
    assert [row["run"] for row in rows] == ["0"] * 30 + [str(int(first < 30))] * 30


@pytest.mark.parametrize(("first", "shown"), [(30, ["2/loss", "2.1/loss"]), (0, ["2.1/loss"])])
def test_a_former_curve_goes_once_the_others_begin_a_new_run_unless_its_successor_goes_on(first, shown):
    at = ranks(wave(1), wave(1))
    restarted(at, 2)
    logged(at, 2, "loss", wave(1), first=first, since=40.0)
    row = at[1]["tables"]["metrics"]["0.0"]
    at[1]["tables"]["metrics"]["0.1"] = {**row, "block": 1, "run": 1, "times": [40.0, 69.0]}
    assert [*metrics_view(at)["curves"]] == ["1/loss", *shown]


def test_what_a_new_process_logs_is_not_said_to_be_of_before():
    at = ranks(wave(1), wave(1))
    restarted(at, 2)
    for worker in (1, 2):
        logged(at, worker, "b", [2.09], order=1, since=40.0)
    view = metrics_view(at)
    assert {key: row["ended"] for key, row in view["curves"].items()} == {
        "1/loss": "", "1/b": "", "2/loss": "restarted", "2.1/b": "",
    }  # fmt: skip
    at[2]["incarnation"] = 0  # before the first report of the new process
    assert curve_of(metrics_view(at))[1] == "restarted"


def test_a_rank_was_lost_after_what_it_logged_last():
    at = ranks(wave(1, 609), wave(1, 609))
    for worker in (1, 2):
        logged(at, worker, "floss", wave(1, 141), order=1, since=1000.0)
    at[2]["state"] = "lost"
    assert "worker2 was lost after step 140 of floss" in lines(at)
    restarted(at, 2)
    for worker in (1, 2):
        logged(at, worker, "floss", wave(1, 10), order=1, since=2000.0)
    view = metrics_view(at)
    assert "2/floss" not in view["curves"] and view["curves"]["2/loss"]["ended"] == "restarted"
    assert view["ends"] == {"2": {"worker": 2, "ended": "restarted", "name": "floss", "step": 140}}


def test_old_values_of_a_rank_that_is_nan_do_not_widen_the_range_of_the_others():
    falling = [1.0 / (step + 1) for step in range(60)]
    far = [*falling[:26], *(value + 50 for value in falling[26:])]
    gone = [*falling[:20], *["nan"] * 40]
    assert states(ranks(falling, gone, far)) == ["", "nan", ""], "one rank is left to compare with"
    at = ranks(falling, gone, far, falling)
    assert states(at) == ["", "nan", "far", ""]
    words = metrics_view(at)["curves"]["3/loss"]["words"]
    assert words == "is about 50.02 where 2 others are between 0.01667 and 0.02439"


def test_a_line_says_which_ranks_it_leaves_out():
    at = ranks([0.5] * 60, [0.5] * 20 + ["nan"] * 40, [0.5] * 59 + [0.7])
    assert lines(at) == [
        "loss of worker2 is nan",
        "loss at step 59: median 0.6, from 0.5 to 0.7 on 2 of 3 ranks, without worker2",
    ]
    at = ranks([0.04], ["nan"])
    assert lines(at)[1] == "loss at step 0: 0.04 on 1 of 2 ranks, without worker2"
    at = ranks([0.04], *[["nan"]] * 6)
    assert lines(at)[-1].endswith("on 1 of 7 ranks, without worker2, worker3, worker4, worker5 and 2 more")


def test_values_at_a_step_are_of_that_step():
    at = ranks([19.9] * 317, [19.5] * 168)
    assert lines(at) == ["loss at step 316: 19.9 on 1 of 2 ranks, without worker2 at step 167"]
    restarted(at, 2)
    logged(at, 2, "loss", [19.8] * 16, since=200.0)
    assert curve_of(metrics_view(at)) == ([*range(168)], "restarted")
    assert lines(at)[-1] == "loss at step 316: 19.9 on 1 of 2 ranks, without worker2 at step 15"


def test_a_former_curve_is_judged_as_what_was():
    at = ranks(wave(1), [*wave(1), "nan"], wave(1), wave(1))
    restarted(at, 2)
    logged(at, 2, "loss", wave(1), since=60.0)
    view = metrics_view(at)
    assert [(row["state"], row["words"]) for row in view["curves"].values()] == [
        ("", ""), ("nan", "was nan"), ("", ""), ("", ""), ("", ""),
    ]  # fmt: skip
    assert lines(at)[0] == "loss of worker2 before its restart was nan"


def test_a_rank_that_has_logged_nothing_since_its_restart_holds_nobody_back():
    at = ranks(wave(1, 10), wave(1, 60), wave(1, 40) + wave(3, 20), wave(1, 60))
    assert states(at) == [""] * 4, "the first rank may come"
    restarted(at, 1)
    assert states(at) == ["", "", "far", ""]
