"""The view of a plan: layouts as rows of plain data, timelines of a bounded size, and their words."""

from __future__ import annotations

import json

import pytest
from plans import GIB, failed, layout, plan, usual_plan

import rpcbench
from rpcbench.panels import PlanPanel
from rpcbench.telemetry.plan_view import FAILS, FITS, MOST_BARS, TOO_LARGE
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.svg import Snapshot


def view_of(shown):
    return PlanPanel.look(PlanPanel.find_source(shown).world())


def test_each_layout_is_a_row_best_first():
    view = view_of(usual_plan())
    assert json.loads(json.dumps(view)) == view
    rows = list(view["planned"].values())
    assert [(row["name"], row["state"]) for row in rows] == [
        ("dp 8, tp 2", FITS), ("dp 16", FITS), ("dp 4, tp 4", TOO_LARGE), ("tp 16", FAILS),
    ]  # fmt: skip
    assert [row["bytes"] for row in rows[:3]] == [20 * GIB, 60 * GIB, 100 * GIB]
    assert rows[0]["parts"] == [["parameters", 20 * GIB]] and "seconds" not in rows[3]
    world = usual_plan().layouts[0].world
    assert rows[0]["seconds"] == pytest.approx(sum(seconds for _, seconds in rows[0]["causes"]))
    assert rows[0]["seconds"] == pytest.approx(world.step_seconds) and rows[0]["tokens"] == world.tokens_per_second
    assert view["plans"]["0"]["ranks"] == 16 and view["timelines"].keys() == {"0", "1", "2"}


def test_a_timeline_has_the_blocks_of_the_slowest_role():
    timeline = view_of(usual_plan())["timelines"]["0"]
    assert (timeline["lanes"], timeline["role"]) == (["compute"], "all")
    assert [bar[3:] for bar in timeline["bars"]] == [
        [phase, f"layers.{n}"] for phase in ("forward", "backward") for n in range(4)
    ]  # fmt: skip
    begins, ends = zip(*(bar[1:3] for bar in timeline["bars"]), strict=True)
    assert all(begin < end for begin, end in zip(begins, ends, strict=True)) and list(begins) == sorted(begins)


def test_a_long_timeline_is_joined_and_names_both_ends():
    long = layout({"dp": 2}, 10**14, 1, blocks=3 * MOST_BARS)
    bars = view_of(plan(long))["timelines"]["0"]["bars"]
    assert MOST_BARS / 4 < len(bars) <= MOST_BARS and {bar[3] for bar in bars} == {"forward", "backward"}
    first, last = (bar[4].split(" … ") for bar in (bars[0], bars[-1]))
    assert first[0] == "layers.0" and last[-1] == f"layers.{3 * MOST_BARS - 1}" and len(first) == len(last) == 2
    assert bars[-1][2] == pytest.approx(long.world.step_seconds, rel=0.05), "nothing is cut off"


def test_its_text_has_a_line_for_each_layout():
    lines = summarize_view(view_of(usual_plan())).splitlines()
    assert lines[0] == "plan of 16 ranks of a100, 79.3 GiB each: 2 fit, 1 does not fit, 1 fails"
    assert lines[3].startswith("  dp 4, tp 4  ") and lines[3].endswith(" 100.00 GiB; does not fit")
    assert lines[4] == "  tp 16       ValueError: <b>8 heads</b> do not go into 16 pieces"
    made = rpcbench.panel("plan", usual_plan())
    assert str(made).splitlines() == lines and repr(made) == str(usual_plan())
    assert made.phase["name"] == "simulated"
    made.close()


def test_its_still_has_the_points_and_the_best_ones_timeline():
    pytest.importorskip("quickjs", reason="needs quickjs-ng, which the extra `lab` installs")
    drawn = Snapshot(view_of(usual_plan())).svg
    assert drawn.count('class="rb-fits"') == 2 + 1 and drawn.count('class="rb-too-large"') == 1 + 1  # with the legend
    assert "dp 8, tp 2 is the fastest layout that fits" in drawn and "tp 16 fails" in drawn
    assert drawn.count("rb-phase-forward") >= 4 and "layers.3" in drawn
    assert "The program raises an error on each layout." in Snapshot(view_of(plan(failed({"tp": 2})))).svg
