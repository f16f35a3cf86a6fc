"""The bounds of the notebook, in small runs: all of them are measured, shown and written."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import command, notebook_waits
from benchmarks.__main__ import main
from benchmarks.kernel_driver import kernel
from benchmarks.notebook_waits import QUICK, Bound, Plan, as_table
from benchmarks.pairs import BenchError


def test_the_table_marks_each_bound_as_kept_or_broken():
    kept, broken = Bound("kept", 0.5, 0.25), Bound("broken", 0, 2, counts=True)
    assert [list(column.cells) for column in as_table([kept, broken]).columns] == [
        ["kept", "broken"], ["500.0 ms", "0"], ["250.0 ms", "2"], ["✓", "✗"]
    ]  # fmt: skip


def test_the_table_is_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = []

    def measure(plan: Plan, seed: int, kind: str) -> list[Bound]:
        asked.append((plan, seed, kind))
        return [Bound("restart of a worker", 2.0, 3.0)]

    monkeypatch.setattr(command.notebook_waits, "measure", measure)
    file = tmp_path / "bounds.json"
    assert main(["--notebook", "--kind", "kernel", "--seed", "5", "--json", str(file)]) == 0
    assert asked == [(Plan(), 5, "kernel")]
    assert "3.00 s │  ✗" in capsys.readouterr().out
    assert json.loads(file.read_text())["bounds"]["restart of a worker"] == {"most": 2.0, "measured": 3.0, "ok": False}


@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_a_cell_with_an_unexpected_outcome_raises_an_error() -> None:
    with kernel({}) as made:
        assert made.run("print('here')\n6 * 7").result.content["data"]["text/plain"] == "42"
        with pytest.raises(BenchError, match=r"(?s)ended in ZeroDivisionError, not in none.*1 / 0"):
            made.run("1 / 0")
        assert made.run("1 / 0", error="ZeroDivisionError").text == ""
        with pytest.raises(BenchError, match="shows no result"):
            made.run("x = 1").result
        began = time.monotonic()
        assert began <= made.run("print('x')").messages[0].at <= time.monotonic()


@pytest.mark.process
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("kind", ["process", "kernel"])
def test_one_run_measures_every_bound(kind: str) -> None:
    bounds = list(notebook_waits.measure(QUICK, 7, kind))
    assert len({bound.title for bound in bounds}) == 12
    assert all(bound.measured > 0 for bound in bounds if not bound.counts)
    assert [(bound.title, bound.measured) for bound in bounds if bound.counts and bound.measured] == []
