"""The view of a comparison: rows nested by their names, in the order of the forward, folded where a model is large."""

from __future__ import annotations

import json

import pytest
from pictures import compare, value, world

from rpcbench.compare.capture import INPUT
from rpcbench.compare.capture import PHASES as KEPT_PHASES
from rpcbench.compare.verdicts import ABSENT, RIGHT, UNKNOWN, WRONG
from rpcbench.telemetry.compare_view import PHASES, VERDICT_MARKS, compare_view
from rpcbench.telemetry.record_schema import check_delta
from rpcbench.telemetry.recording import flatten_world
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.views import diff_views


def view_of(*values, **more):
    at = world(2)
    compare(at, *values, **more)
    return compare_view(at)


def test_its_words_are_those_of_the_comparison():
    assert {*VERDICT_MARKS} == {WRONG, RIGHT, UNKNOWN, ABSENT}
    assert [*PHASES] == [phase for phase in KEPT_PHASES if phase != INPUT]


def test_rows_stand_nested_in_the_order_of_the_forward():
    view = view_of(
        *[value("initial", name) for name in ("b.weight", "a.1.bias", "b.bias", "scale")],
        value("forward", "a.1"), value("forward", "a"), value("forward", "act"), value("forward", "b"),
        value("forward", ""), value("loss", ""), value("gradient", "unused.weight"),
    )  # fmt: skip
    rows = view["modules"]
    assert [*rows] == ["", "scale", "a", "a.1", "a.1.bias", "act", "b", "b.weight", "b.bias", "unused", "unused.weight"]
    assert [rows[name]["depth"] for name in ("", "a", "a.1.bias", "unused.weight")] == [0, 1, 3, 2]
    assert [rows[name]["parent"] for name in ("", "a", "a.1.bias")] == [None, "", "a.1"]
    assert [rows[name]["label"] for name in ("a", "a.1.bias")] == ["a", "bias"]


def test_the_layout_of_a_row_is_the_learnt_one_of_its_output_or_gradient():
    view = view_of(
        value("initial", "up.weight", layout="on rank 0"), value("forward", "up", layout="tp Shard(1)"),
        value("backward", "up"), value("gradient", "up.weight", "wrong"), value("forward", "down", "wrong"),
        value("backward", "down"), value("forward", "up", step=1), value("gradient", "up.weight", step=1),
    )  # fmt: skip
    rows = view["modules"].items()
    assert {name: row["layouts"] for name, row in rows if row["layouts"]} == {
        "up": {"0": "tp Shard(1)", "1": "tp Replicate"}, "up.weight": {"0": "on rank 0", "1": "tp Replicate"},
    }  # fmt: skip
    assert {name: row["nearest"] for name, row in rows if row["nearest"]} == {"down": {"0": "tp Replicate"}}
    assert view["comparisons"]["0"]["steps"] == 2


def test_a_large_model_is_folded_but_for_the_way_to_the_first_difference():
    names = [f"blocks.{n}.{part}.{half}" for n in range(20) for part in ("attention", "feed") for half in ("in", "out")]
    values = [value("forward", name, "wrong" if n in (34, 77) else "right") for n, name in enumerate(names)]
    rows = view_of(*values, first="34")["modules"]
    assert not any(row["folded"] for row in view_of(*values[:8])["modules"].values()), "a small one is not"
    holders = {row["parent"] for row in rows.values()}
    opened = [name for name, row in rows.items() if name in holders and not row["folded"]]
    assert opened == ["", "blocks", "blocks.8", "blocks.8.feed"]
    values.append(value("initial", f"{names[34]}.weight"))
    assert not view_of(*values, first="34")["modules"][names[34]]["folded"], "its parameters are in sight"


def test_it_begins_with_the_step_that_differs_first():
    view = view_of(value("forward", "up"), value("forward", "up", "wrong", step=3), first="1")
    assert (view["comparisons"]["0"]["step"], view["comparisons"]["0"]["steps"]) == (3, 4)


def test_as_text():
    view = view_of(
        value("forward", "up", layout="tp Shard(1)"), value("gradient", "up.weight", "wrong", step=1, error=None),
        value("backward", "up", "not there"), first="1",
    )  # fmt: skip
    assert summarize_view(view).splitlines() == [
        "comparison of 3 values on (dp=2, tp=2): 1 wrong, 1 right, 1 not there",
        "  Wrong, first at forward up: no reduction.",
        "  step 1: gradient up.weight: error infinite, allowed 1e-06",
        "  up: tp Shard(1)",
    ]
    assert summarize_view(compare_view(world(2))) == "3 members, nothing was compared"


def test_a_record_takes_it():
    at = world(1)
    compare(at, value("forward", "up", "wrong", maps=[[[0, 1], [8, 4], [[0, 100], [3, 4]]]]), first="0")
    delta = json.loads(json.dumps(diff_views({}, flatten_world(at))))
    check_delta(delta, "here")
    delta["0 verdicts"]["set"]["0"]["errors"] = [["x", 1.0]]
    with pytest.raises(ValueError, match="errors"):
        check_delta(delta, "here")
