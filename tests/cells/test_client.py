"""The notebook's side of a cell on workers, with an agent that only records its jobs."""

from __future__ import annotations

import math
from types import SimpleNamespace

from rpcbench.cells import client
from rpcbench.cells.client import RunningCell, _FailureReporter, _WorkerRun
from rpcbench.cells.runner import INTERRUPT, Cell


class Agent:
    """An agent whose threads do not run, as on a busy machine."""

    def __init__(self):
        self.submitted = []

    def submit(self, work):
        self.submitted.append(work)

    def notify(self, member, kind, notice):
        raise AssertionError("no thread has had a turn")


def test_stop_names_a_worker_that_may_run_the_cell_already(monkeypatch):
    """The worker may begin the cell before the sending thread in the notebook runs again."""
    monkeypatch.setattr(client, "_handling_seconds", lambda: 0.01)
    agent, area = Agent(), SimpleNamespace(finish=lambda: None)
    prompts = SimpleNamespace(take_over=print, look=lambda: None, close=lambda: None)
    part = _WorkerRun(SimpleNamespace(name="worker1", id=1), area, prompts, lambda part: None, "")
    sent = RunningCell(
        agent, Cell(7, "while True: pass"), [part], prompts, math.inf, _FailureReporter(SimpleNamespace())
    )
    sent.begin(SimpleNamespace())
    assert sent.stop() == ([], ["worker1"])
    assert agent.submitted[-1].args[1:] == (INTERRUPT, {"cell": 7})
