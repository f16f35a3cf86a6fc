"""Cost against size: exponents are those of the curve, and every series runs."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import command, scaling
from benchmarks.__main__ import main
from benchmarks.scaling import FLAT, LINEAR, Curve

SIZES = (1.0, 10.0, 100.0, 1e3, 1e4)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_the_exponent_is_that_of_the_upper_half(exponent: float) -> None:
    """A fixed cost hides the exponent in the lower half."""
    fixed = 5.0 if exponent else 0.0
    curve = Curve("things", "cost", [(size, fixed + 2 * size**exponent) for size in SIZES], LINEAR)
    assert curve.exponent == pytest.approx(exponent, abs=0.02)
    assert curve.is_fair == (exponent <= 1)


def test_a_curve_that_grows_too_fast_is_marked() -> None:
    flat = Curve("things", "flat", [(size, 1.0) for size in SIZES], FLAT)
    growing = Curve("things", "growing", [(size, size) for size in SIZES], FLAT)
    table = scaling.as_table([flat, growing])
    cells = [list(column.cells) for column in table.columns]
    assert cells[1] == ["flat", "growing"]
    assert cells[4:] == [["0.00", "1.00"], ["✓ 0", "✗ 0"]]
    drawn = ElementTree.fromstring(scaling.as_plot([flat, growing]))
    lines = [element.get("points", "").split() for element in drawn.iter() if element.tag.endswith("polyline")]
    assert [len(line) for line in lines] == [len(SIZES)] * 2
    heights = [[float(point.split(",")[1]) for point in line] for line in lines]
    assert len(set(heights[0])) == 1
    assert heights[1] == sorted(heights[1], reverse=True)


@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_every_series_runs_and_is_written_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_SECONDS", 0.0)
    small = [series._replace(sizes=series.sizes[:2]) for series in scaling.all_series(quick=True)]
    monkeypatch.setattr(command.scaling, "all_series", lambda quick: small)
    arguments = ["--json", str(tmp_path / "cost.json"), "--svg", str(tmp_path / "cost.svg")]
    assert main(["--scaling", "--quick", *arguments]) == 0
    values = json.loads((tmp_path / "cost.json").read_text())
    assert [(curve["series"], curve["name"]) for curve in values] == [
        (series.name, name) for series in small for name in series.fair
    ]
    assert all(seconds > 0 for curve in values for _, seconds in curve["points"])
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == [
        "cost-RRefs.svg", "cost-bytes.svg", "cost-calls-in-flight.svg", "cost-workers.svg"
    ]  # fmt: skip
