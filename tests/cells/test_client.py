"""A cell on its workers, as the notebook waits for it: with an agent that only notes what it is given."""

from __future__ import annotations

import math
from types import SimpleNamespace

from rpcbench.cells import client
from rpcbench.cells.client import RunningCell, _FailureReporter, _WorkerRun
from rpcbench.cells.runner import INTERRUPT, Cell


class Agent:
    """Its threads get no turn, as on a busy machine."""

    def __init__(self):
        self.submitted = []

    def submit(self, work):
        self.submitted.append(work)

    def notify(self, member, kind, notice):
        raise AssertionError("no thread has had a turn")


def test_a_cell_that_may_run_already_is_waited_for_and_named(monkeypatch):
    """The worker may run it before the thread that sent it here has another turn."""
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
