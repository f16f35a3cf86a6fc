"""The cost of panels: each load changes its panel, worlds have the stated size, measurements are compared to bounds."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from worlds import nothing_left, until, world

from benchmarks import panel_frames, panel_pace, panels
from benchmarks.__main__ import main
from benchmarks.panels import Bound
from rpcbench.panels import PANELS
from rpcbench.telemetry.collector import Collector
from rpcbench.telemetry.views import diff_views


@pytest.mark.parametrize("name", panel_pace.CHANGES)
def test_each_load_changes_the_view_of_its_panel(name: str, tmp_path: Path, no_leaks: None) -> None:
    with world(tmp_path, 3) as agents:
        collector = agents[0].part(Collector)
        seen: list[object] = []
        look = PANELS[name].look
        stop = collector.subscribe(lambda: seen.append(look(collector.world())))
        with panel_pace.CHANGES[name]() as change:
            until(lambda: all("owned" in m["tables"] for m in collector.world().values()), "the tables of all")
            for _ in range(3):
                before = look(collector.world())
                change()
                until(lambda before=before: bool(seen) and seen[-1] != before)  # type: ignore[misc]
        stop()
        del change
        nothing_left(agents)


SECTIONS = {"rrefs": "rrefs", "autograd": "links", "pipeline": "ops"}


@pytest.mark.parametrize("name", panel_frames.SHOWN)
def test_worlds_have_a_thousand_rows_and_some_of_them_change(name: str) -> None:
    views = [PANELS[name].look(world) for world in panel_frames.worlds(name, 3)]
    shown = views[0][SECTIONS[name]].values()
    counts = sum(row["sent"] for row in shown) if name == "autograd" else len(shown)
    assert counts == panel_frames.ROWS
    for before, after in pairwise(views):
        changed = diff_views(before, after)
        assert 0 < len(json.dumps(changed)) < len(json.dumps(after)) / 4


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.parametrize("name", panel_frames.SHOWN)
def test_a_browser_draws_a_thousand_rows(name: str) -> None:
    if problem := panel_frames.obstacle():
        pytest.skip(problem)
    assert panel_frames.frames(name, 20, panel_pace.UPDATES) > 2  # the bound is 10, on an idle machine


def test_the_table_shows_bounds_with_the_measured_values() -> None:
    bounds = [
        Bound("costs", 0.03, 0.02, 0.1), Bound("costs much", 0.03, 0.2, 0.1),
        Bound("draws", 10, 36.6), Bound("draws slowly", 10, 9.0),
    ]  # fmt: skip
    assert [bound.ok for bound in bounds] == [True, False, True, False]
    console = Console(width=150, record=True)
    console.print(panels.as_table(bounds))
    lines = [line for line in console.export_text().splitlines() if "│" in line]
    assert "at most 3.0%" in lines[0] and "2.0%" in lines[0] and "10.0%" in lines[0] and "✓" in lines[0]
    assert "at least 10/s" in lines[3] and "9/s" in lines[3] and "✗" in lines[3]
    assert [one["ok"] for one in panels.as_values(bounds)["bounds"]] == [True, False, True, False]


@pytest.mark.long
@pytest.mark.process
def test_the_command_measures_all_panels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--panels", "--quick", "--json", str(tmp_path / "panels.json")])
    found = json.loads((tmp_path / "panels.json").read_text())["bounds"]
    assert [one["title"].split(":")[0] for one in found[: len(panel_pace.CHANGES)]] == list(panel_pace.CHANGES)
    assert all(one["without"] > 0 for one in found[: len(panel_pace.CHANGES)])
    assert ("Not measured in a browser" in capsys.readouterr().out) == bool(panel_frames.obstacle())
