"""The cells of a worker can be replayed on its successor of the same name."""

from __future__ import annotations

import gc
import os
import signal
import weakref

import pytest
import torch

from rpcbench import Cluster, WorkerLostError
from rpcbench.cells import history
from rpcbench.cells.history import CellHistories, WorkerHistory, replay
from rpcbench.cells.runner import Cell


def ran(past, fails=lambda code: None):
    """Replay a history; return the codes and variables that ran, and the results."""
    seen = []

    def run(code, push):
        seen.append((code, push))
        return fails(code)

    return seen, replay(past, run)


def test_cells_are_replayed_in_the_order_in_which_they_were_sent():
    kept = CellHistories()
    for number in (2, 1, 3):
        kept.record_cell("worker1", Cell(number, f"cell {number}", {"x": number}, ("y",), leave=("z",)))
    kept.record_cell("worker2", Cell(4, "elsewhere"))
    seen, reruns = ran(kept.pop_history("worker1"))
    assert seen == [(f"cell {number}", {"x": number}) for number in (1, 2, 3)]
    assert [(rerun.code, rerun.error) for rerun in reruns] == [(f"cell {number}", None) for number in (1, 2, 3)]
    assert ran(kept.pop_history("worker1")) == ([], [])


def test_a_replay_goes_on_after_a_failed_cell_and_ends_when_the_worker_is_lost():
    past = WorkerHistory()
    for number, code in enumerate(["a", "b", "c", "d"]):
        past.record_cell(Cell(number, code))
    errors = {"a": KeyError("a"), "c": WorkerLostError("worker1")}
    seen, reruns = ran(past, errors.get)
    assert [code for code, _ in seen] == ["a", "b", "c"]
    assert [rerun.error for rerun in reruns] == [errors["a"], None, errors["c"]]


def test_cells_beyond_the_limit_are_dropped_and_reported(monkeypatch):
    monkeypatch.setattr(history, "CELLS", 2)
    past = WorkerHistory()
    for number in range(5):
        past.record_cell(Cell(number, str(number)))
    seen, reruns = ran(past)
    assert [code for code, _ in seen] == ["3", "4"]
    assert (reruns[0].code, str(reruns[0].error)) == ("(3 earlier ones)", "only the last 2 are kept")


def test_cells_with_large_variables_are_not_replayed_and_are_reported(monkeypatch):
    monkeypatch.setattr(history, "BYTES", 5000)
    large = {"nested": [torch.zeros(2000)]}
    model = torch.nn.Linear(100, 100)
    gone = weakref.ref(model)
    past = WorkerHistory()
    past.record_cell(Cell(1, "needs both", {"small": 1, "large": large}))
    past.record_cell(Cell(2, "needs a model", {"model": model}))
    past.record_cell(Cell(3, "needs little", {"small": 1}))
    del model
    gc.collect()
    assert gone() is None
    seen, reruns = ran(past)
    assert seen == [("needs little", {"small": 1})]
    assert "run it again with -i large" in str(reruns[0].error)
    assert [rerun.error is None for rerun in reruns] == [False, False, True]


def test_a_variable_that_contains_itself_is_replayed():
    circle = [1]
    circle.append({"again": circle})
    past = WorkerHistory()
    past.record_cell(Cell(1, "code", {"circle": circle}))
    assert ran(past)[0] == [("code", {"circle": circle})]


def test_a_sparse_tensor_is_replayed():
    sparse, past = torch.eye(3).to_sparse(), WorkerHistory()
    past.record_cell(Cell(1, "code", {"x": sparse}))
    ((_, push),), _ = ran(past)
    assert push["x"] is sparse


def test_a_dropped_cell_frees_its_share_of_the_size_limit(monkeypatch):
    monkeypatch.setattr(history, "BYTES", 5000)
    monkeypatch.setattr(history, "CELLS", 1)
    past = WorkerHistory()
    for number in range(4):
        past.record_cell(Cell(number, str(number), {"x": torch.zeros(500)}))
    past.record_cell(Cell(5, "5", {"x": torch.zeros(500)}))
    assert [rerun.error for rerun in ran(past)[1]][1:] == [None]


@pytest.mark.process
def test_a_restarted_worker_replays_the_cells_of_its_predecessor():
    with Cluster(2) as cluster:
        held = cluster.remote("worker1", torch.ones, (1,))
        cluster.run("worker1", "import os\nx = start", push={"start": 1})
        cluster.run("all", "here = 'both'")
        with pytest.raises(ZeroDivisionError):
            cluster.run("worker1", "x = 99\n1 / 0")
        cluster.run("worker1", "held", push={"held": [held]})
        cluster.run("worker1", "x += 1")
        cluster.run("worker1", "first = os.environ.setdefault('FIRST', str(os.getpid()))")
        os.kill(cluster.pid("worker1"), signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            cluster.run("worker1", "import time\ntime.sleep(60)")
        reruns = cluster.restart("worker1", replay=True)
        assert [(rerun.code.splitlines()[0], type(rerun.error)) for rerun in reruns] == [
            ("import os", type(None)), ("here = 'both'", type(None)), ("held", RuntimeError), ("x += 1", type(None)),
            ("first = os.environ.setdefault('FIRST', str(os.getpid()))", type(None)),
        ]  # fmt: skip
        assert cluster.run("worker1", "x, here, first == str(os.getpid())") == (2, "both", True)
        cluster.run("worker1", "again = True")
        again = cluster.restart("worker1", replay=True)
        assert [rerun.error for rerun in again] == [None] * 6, "the replayed cells, and the later one"
        assert cluster.restart("worker1") == []
        assert cluster.restart("worker1", replay=True) == [], "a restart without replay clears the history"
        del held


@pytest.mark.process
def test_a_replay_shows_no_output(capsys):
    with Cluster(1) as cluster:
        cluster.run("worker1", "print('once')\n7")
        capsys.readouterr()
        assert [rerun.error for rerun in cluster.restart("worker1", replay=True)] == [None]
        assert capsys.readouterr().out == ""
