"""Comparison with notebooks of other libraries: ours is really measured, and what cannot be measured is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.__main__ import main
from benchmarks.kernel_driver import NotInTime
from benchmarks.peer_notebook import OURS, PEERS, Peer, Plan

ROWS = (*peers.CALLS, *peers.TASKS.values(), *peers.STOPPED, *peers.KILLED)
START = ROWS[0]


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("no_leaks")
def test_all_rows_are_measured_for_our_notebook() -> None:
    seen = peers.measure(OURS, Plan(calls=2, lines=3))
    assert tuple(seen) == ROWS
    told = [re.sub(r"^[\d.]+ m?s\b", "TIME", text) for text in seen.values()]
    assert told == [
        *("TIME", "TIME", "TIME; 3 of 3", "yes; fails"),
        *("TIME",) * len(peers.TASKS),
        *("TIME, KeyboardInterrupt", "TIME"),
        *("TIME", "TIME, WorkerLostError; yes", "TIME", "TIME"),
    ]


def test_times_are_shown_with_two_digits() -> None:
    assert [peers.about(seconds) for seconds in (0.00123, 0.0456, 0.996, 1.04, 12.6)] == [
        "1.2 ms", "46 ms", "1 s", "1 s", "13 s"
    ]  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that were measured; only ours and Dask are installed."""
    done: list[str] = []

    def measure(peer, plan: Plan) -> dict[str, str]:
        done.append(peer.name)
        return {START: f"{len(done)} s", ROWS[1]: peers.NO_WAY}

    monkeypatch.setattr(peers, "measure", measure)
    # Of `Peer` only: modules that are loaded meanwhile look for their own versions.
    monkeypatch.setattr(Peer, "is_installed", property(lambda self: self.name in ("rpcbench", "Dask")))
    monkeypatch.setattr(Peer, "version", property(lambda self: "1.2"))
    return done


def test_the_table_is_printed_and_written(measured, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    readme, file = tmp_path / "README.md", tmp_path / "found.json"
    readme.write_text("before\n<!-- peers -->\nold\n<!-- end of peers -->\nafter\n")
    assert main(["--peers", "--markdown", str(readme), "--json", str(file)]) == 0
    assert measured == ["rpcbench", "Dask"]
    out = capsys.readouterr().out
    assert "Ray is not installed here: pip install ray" in out
    assert START in out
    assert json.loads(file.read_text())["Dask"] == {START: "2 s", ROWS[1]: "—"}
    text = readme.read_text()
    assert f"|  | rpcbench 1.2 | Dask 1.2 |\n| --- | --- | --- |\n| {START} | 1 s | 2 s |\n" in text
    assert text.startswith("before\n<!-- peers -->\n") and text.endswith("|\n<!-- end of peers -->\nafter\n")
    assert "old" not in text


def test_a_library_that_is_not_installed_or_not_known_is_refused(measured, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peers", "Dask", "Monarch"]) == 1
    assert "Monarch is not installed here: pip install torchmonarch" in capsys.readouterr().err
    assert main(["--peers", "Spark"]) == 1
    assert "no library 'Spark' is known here; there are rpcbench, ipyparallel, Dask" in capsys.readouterr().err
    assert measured == []


def test_a_library_that_does_not_start_is_reported_and_the_others_are_measured(
    measured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fine = peers.measure

    def measure(peer, plan: Plan) -> dict[str, str]:
        if peer is PEERS["Dask"]:
            raise NotInTime("waited 60 s in vain")
        return fine(peer, plan)

    monkeypatch.setattr(peers, "measure", measure)
    assert main(["--peers", "dask"]) == 0
    out = capsys.readouterr().out
    assert "Dask could not be measured: waited 60 s in vain" in out
    assert "1 s" in out
