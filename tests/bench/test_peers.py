"""Comparison with notebooks of other libraries: ours is really measured, and faults of others are reported."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.__main__ import main
from benchmarks.kernel_driver import Message, NotInTime, Ran
from benchmarks.peer_notebook import OURS, PEERS, Notebook, Peer, Plan

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


class Acted:
    """A stand-in for a faulty kernel: `ends` maps a part of a cell to the error that ends it; None: it never ends."""

    def __init__(self, ends: dict[str, str | None], shown: tuple[str, ...] = ()) -> None:
        self.messages: list[Message] = []
        self.ends, self.shown, self.cells, self.answers = ends, shown, [], []

    def send(self, code: str) -> str:
        self.cells.append(code)
        return str(len(self.cells))

    def end(self, cell: str, began: float, patience: float) -> Ran:
        error = next((error for part, error in self.ends.items() if part in self.cells[int(cell) - 1]), "")
        if error is None:
            raise NotInTime("it goes on")
        messages = [Message(began, cell, "error", {"ename": error, "evalue": "", "traceback": []})] if error else []
        return Ran(cell, began, began + 0.25, messages)

    def wait(self, wanted, what: str, patience: float) -> Message:
        for text in self.shown:
            said = Message(1e12, "another", "stream", {"text": text})
            self.messages.append(said)
            if wanted(said):
                return said
        raise NotInTime(what)

    def interrupt(self) -> None:
        pass


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch):
    """Measures the rows of a group with a stand-in for a kernel; its second worker is process 0."""

    def seen(titles, deeds, kernel: Acted, name: str = "Monarch") -> list[str]:
        user = Notebook(PEERS[name], Plan(calls=1, lines=2), kernel, Path(), 1.5)
        monkeypatch.setattr(Notebook, "busy", lambda self: (kernel.send("busy"), 0))
        monkeypatch.setattr(peers.os, "kill", lambda pid, number: None)
        monkeypatch.setattr(peers, "notebook", lambda peer, plan: contextlib.nullcontext(user))
        return [text for _, text in peers._group(user.peer, user.plan, titles, deeds)]

    return seen


def test_lost_lines_stray_lines_and_lost_error_types_are_reported(acted) -> None:
    kernel = Acted({"1 / 0": "ActorError"}, ("<line 0 1.0>\n",))
    told = acted(peers.CALLS, peers._calls, kernel)
    assert told[:2] == ["1.5 s", "250 ms"]
    assert told[2].endswith("; 0 of 2")
    assert told[3] == "no, ActorError; fails"
    assert acted(peers.CALLS, peers._calls, Acted({}))[2:] == ["never; 0 of 2", "no; goes on"]


def test_tasks_are_timed_only_where_their_answer_is_right(acted) -> None:
    titles = tuple(peers.TASKS.values())
    assert acted(titles, peers._tasks, Acted({"map_sync": "TypeError"}), "ipyparallel") == [
        "TypeError", "not so", peers.NO_WAY, peers.NO_WAY, peers.NO_WAY, "not so", "not so"
    ]  # fmt: skip
    assert acted(titles, peers._tasks, Acted({}))[0] == peers.NO_WAY


def test_a_cell_that_never_ends_is_reported_and_the_rest_is_not_tried(acted) -> None:
    assert acted(peers.STOPPED, peers._stopped, Acted({"busy": None})) == ["not within 20 s", "not tried"]
    told = acted(peers.KILLED, peers._killed, Acted({"busy": None}, ("gpus: 1 is dead",)))
    assert told[1:] == ["not within 20 s; yes", "not tried", "not tried"]


def test_a_death_without_a_worker_name_and_a_missing_restart_are_reported(acted) -> None:
    told = acted(peers.KILLED, peers._killed, Acted({"busy": "SomeError", "gpus=0": "OtherError"}, ("a worker died",)))
    assert told[1:] == ["250 ms, SomeError; no", "250 ms, OtherError", peers.NO_WAY]
    told = acted(peers.KILLED, peers._killed, Acted({"restart": "NotImplementedError"}, ("Engine 1",)), "ipyparallel")
    assert told[1:] == ["250 ms, no error; yes", "250 ms", "NotImplementedError"]


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
