"""The table of cells: states by member, rows in bounded number and size, the notebook's own cells once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rpcbench.base.errors import CallCancelled, RemoteError, WorkerLostError
from rpcbench.cells import cell_log
from rpcbench.cells.cell_log import LONGEST, MOST, CellLog
from rpcbench.runtime.events import EventLog
from rpcbench.wire.messages import Origin

PAIR = [(1, "worker1"), (2, "worker2")]


class Events(dict[str, Any]):
    def register(self, event: str, called: Any) -> None:
        self[event] = called

    def unregister(self, event: str, called: Any) -> None:
        assert self.pop(event) == called


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Any:
    shell = SimpleNamespace(events=Events(), history_manager=SimpleNamespace(input_hist_parsed=[""] * 5))
    monkeypatch.setattr(cell_log, "ipython_shell", lambda: shell)
    return shell


@pytest.fixture
def log(shell: Any) -> CellLog:
    bus = EventLog()
    bus.listening = True
    links = SimpleNamespace(bus=bus)
    health = SimpleNamespace(cells=[])
    hooks = SimpleNamespace(on_leave=[print], on_end=[])
    agent = SimpleNamespace(id=0, name="notebook", links=links, hooks=hooks, part=lambda kind: health)
    return CellLog(cast(Any, agent))


def begin(shell: Any, code: str, store: bool = True) -> Any:
    info = SimpleNamespace(raw_cell=code, store_history=store, cell_id="front-end's id")
    shell.events["pre_run_cell"](info)
    return info


def end(shell: Any, info: Any, error: BaseException | None = None) -> None:
    done = SimpleNamespace(info=info, error_before_exec=None, error_in_exec=error)
    shell.events["post_run_cell"](done)


def states(log: CellLog) -> list[list[tuple[str, str, str]]]:
    return [[(part[1], part[2], part[3]) for part in row["parts"]] for row in log.table().values()]


def raised_there(error: Exception) -> Exception:
    """As an error that the code on a worker has raised arrives."""
    error.__cause__ = RemoteError("worker1", "Traceback")
    return error


@pytest.mark.parametrize(
    ("error", "kind", "state", "words"),
    [
        (None, None, "ok", ""),
        (ValueError("no"), "ValueError", "error", "ValueError: no"),
        (ValueError(), None, "error", "ValueError"),
        (ValueError("x" * 999), None, "error", "ValueError: " + "x" * 287 + "…"),
        (WorkerLostError("worker1 is lost"), None, "lost", ""),
        (raised_there(WorkerLostError("rank 2 is gone")), None, "error", "WorkerLostError: rank 2 is gone"),
        (CallCancelled("ended by KeyboardInterrupt"), "KeyboardInterrupt", "interrupted", ""),
        (CallCancelled("the cell was interrupted before it was sent"), None, "interrupted", ""),
        (CallCancelled("ended by SystemExit"), "SystemExit", "error", "SystemExit"),
        (KeyboardInterrupt(), None, "interrupted", ""),
    ],
)
def test_how_a_cell_ended(log: CellLog, error: BaseException | None, kind: str | None, state: str, words: str) -> None:
    record = log.begin_cell("x", PAIR, Origin("id", 7))
    record.end_part(1, error, kind)
    assert states(log) == [[("worker1", state, words), ("worker2", "runs", "")]] and not record.has_ended
    record.end_part(2, None)
    record.tell_run(2, 9, 0.25)
    (row,) = log.table().values()
    assert record.has_ended and row["parts"][1][5:] == [9, 0.25] and (row["cell"], row["number"]) == ("id", 7)


def test_rows_are_bounded_and_those_that_run_stay(log: CellLog) -> None:
    running = log.begin_cell("run()", PAIR, None)
    for n in range(MOST + 5):
        log.begin_cell("x" * 9999 if n == MOST else "x", PAIR[:1], None).end_part(1, None)
    table = log.table()
    assert len(table) == MOST and next(iter(table)) == "1" and not running.has_ended
    long = next(row for row in table.values() if row["is_cut"])
    assert len(long["code"]) == LONGEST
    rows = log._bus.drain_changes(9999).rows["cells"]
    assert {key for key, row in rows.items() if row is not None} == {*table}, "watchers forget what is dropped"


def test_a_cell_of_the_notebook_is_a_row(log: CellLog, shell: Any) -> None:
    info = begin(shell, "train()\n")
    assert states(log) == [[("notebook", "runs", "")]]
    inner = begin(shell, "inner()")
    end(shell, inner)
    assert len(log.table()) == 1, "one that another cell runs has none"
    end(shell, info, ZeroDivisionError("division by zero"))
    end(shell, begin(shell, "print(1)", store=False))
    end(shell, begin(shell, "sleep()"), KeyboardInterrupt())
    end(shell, begin(shell, "pipe.step(x, y)"), WorkerLostError("worker2 is lost"))
    failed, stopped = ("error", "ZeroDivisionError: division by zero"), ("interrupted", "")
    asked = ("error", "WorkerLostError: worker2 is lost")  # the notebook itself is not lost
    assert states(log) == [[("notebook", *each)] for each in (failed, stopped, asked)]
    row = log.table()["1"]
    assert (row["code"], row["number"], row["cell"]) == ("train()", 5, "front-end's id")
    assert row["parts"][0][5] is None, "its number stands beside the code, and has no second place"


def test_a_cell_that_goes_on_on_a_thread_runs_until_its_code_has_ended(log: CellLog, shell: Any) -> None:
    info = begin(shell, "%%step\nwait()")
    record = log.keep_here()
    assert record is not None
    end(shell, info)
    end(shell, begin(shell, "x"))
    assert states(log) == [[("notebook", "runs", "")], [("notebook", "ok", "")]]
    record.end_part(0, ValueError("no"))
    assert states(log)[0] == [("notebook", "error", "ValueError: no")] and log.keep_here() is None


def test_what_runs_when_the_cluster_is_stopped_is_not_left_running(log: CellLog, shell: Any) -> None:
    log.begin_cell("sleep()", PAIR, None).end_part(1, None)
    begin(shell, "%cluster stop")
    stop, last = cast(Any, log._agent).hooks.on_leave
    assert last is print, "the last reports are waited for later"
    stop()
    assert states(log) == [[("worker1", "ok", ""), ("worker2", "stopped", "")], [("notebook", "stopped", "")]]
    assert all(part[4] is not None for row in log.table().values() for part in row["parts"]), "when it ended"


@pytest.mark.parametrize(
    ("raw", "code", "is_one"),
    [
        ("%%remote worker1\nx = 1\nx\n", "x = 1\nx\n", True),
        ("\n%%remote worker1 -o y\ny = 1", "y = 1", True),
        ("%remote worker1 x + 1", "x + 1", True),
        ("x = 1", "x = 1\n", True),
        ("y = 2\n%remote worker1 x", "x", False),
        ("%time\n%remote worker1 x", "x", False),
        ("result = cluster.run('all', 'x')", "x", False),
    ],
)
def test_a_cell_that_only_sends_code_is_one_row(log: CellLog, shell: Any, raw: str, code: str, is_one: bool) -> None:
    info = begin(shell, raw)
    log.begin_cell(code, PAIR[:1], Origin("front-end's id", 5)).end_part(1, None)
    end(shell, info)
    names = [parts[0][0] for parts in states(log)]
    assert names == (["worker1"] if is_one else ["notebook", "worker1"])
    end(shell, begin(shell, "x"))
    assert states(log)[-1] == [("notebook", "ok", "")], "the next one is recorded again"
