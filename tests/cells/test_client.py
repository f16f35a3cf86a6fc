"""The notebook's side of a cell on workers, with an agent that only records its jobs."""

from __future__ import annotations

import math
from types import SimpleNamespace

from rpcbench.cells import client
from rpcbench.cells.client import RunningCell, SendOrder, _FailureReporter, _WorkerRun
from rpcbench.cells.runner import INTERRUPT, QUEUED, Cell


class Agent:
    """An agent whose threads do not run, as on a busy machine."""

    running = True

    def __init__(self):
        self.submitted = []
        self.notices = {}

    def on_notice(self, channel, listener):
        self.notices[channel] = listener

    def turn(self):
        """Have a thread of the pool run all jobs."""
        jobs, self.submitted = self.submitted, []
        for job in jobs:
            job()

    def submit(self, work):
        self.submitted.append(work)

    def notify(self, member, kind, notice):
        raise AssertionError("no thread has had a turn")


def test_stop_names_a_worker_that_may_run_the_cell_already(monkeypatch):
    """The worker may begin the cell before the sending thread in the notebook runs again."""
    monkeypatch.setattr(client, "_handling_seconds", lambda: 0.01)
    agent, area = Agent(), SimpleNamespace(finish_output=lambda: None)
    prompts = SimpleNamespace(take_over_item=print, check_open_prompt=lambda: None, close=lambda: None)
    part = _WorkerRun(SimpleNamespace(name="worker1", id=1), area, prompts, lambda part: None, "")
    sent = RunningCell(
        agent, Cell(7, "while True: pass"), [part], prompts, math.inf, _FailureReporter(SimpleNamespace())
    )
    sent.send_to_workers(SimpleNamespace(open_buffer=lambda *of: None), SendOrder(agent))
    assert sent.interrupt_and_wait() == ([], ["worker1"])
    assert agent.submitted[-1].args[1:] == (INTERRUPT, {"cell": 7})


def test_a_cell_is_sent_once_that_before_it_is_queued_or_answered():
    agent, sent = Agent(), []
    order = SendOrder(agent)
    for cell in (1, 2, 3):
        order.queue_send(7, cell, lambda cell=cell: sent.append(cell))
    order.queue_send(8, 4, lambda: sent.append(4))  # to another worker
    agent.turn()
    assert sent == [1, 4]
    agent.notices[QUEUED](7, {"cell": 1})
    agent.turn()
    assert sent == [1, 4, 2]
    order.release_next_cell(7, 1)  # its answer
    agent.turn()
    assert sent == [1, 4, 2]
    order.release_next_cell(7, 2)  # it could not be sent
    agent.turn()
    assert sent == [1, 4, 2, 3]


def test_a_cell_that_ctrl_c_left_without_a_turn_is_sent_before_the_next_one():
    agent, sent = Agent(), []
    order = SendOrder(agent)
    order.queue_send(7, 1, lambda: sent.append(1))
    agent.submitted.clear()  # Ctrl-C came before it was handed to the pool
    order.queue_send(7, 2, lambda: sent.append(2))
    agent.turn()
    order.release_next_cell(7, 1)
    agent.turn()
    assert sent == [1, 2]


def test_when_the_agent_has_ended_a_waiting_cell_is_sent_at_once_and_fails():
    agent, sent = Agent(), []
    order = SendOrder(agent)
    for cell in (1, 2, 3):
        order.queue_send(
            7, cell, lambda cell=cell: (sent.append(cell), order.release_next_cell(7, cell)) if cell > 1 else None
        )
    agent.turn()
    agent.running = False
    order.release_next_cell(7, 1)
    assert sent == [2, 3] and agent.submitted == []


def test_an_interrupted_cell_is_not_sent_any_more(monkeypatch):
    monkeypatch.setattr(client, "_handling_seconds", lambda: 0.01)
    agent, closed = Agent(), []
    agent.notify = lambda *of: None
    prompts = SimpleNamespace(take_over_item=print, check_open_prompt=lambda: None, close=lambda: None)
    relay = SimpleNamespace(open_buffer=lambda *of: None, drop_buffer=lambda *of: closed.append(of))
    settled = []
    part = _WorkerRun(SimpleNamespace(name="worker1", id=1), None, prompts, settled.append, "")
    sent = RunningCell(agent, Cell(7, "1"), [part], prompts, math.inf, _FailureReporter(SimpleNamespace()))
    sent.send_to_workers(relay, SendOrder(agent))
    sent.interrupt()
    agent.turn()
    assert settled == [part] and str(part.error) == "the cell was interrupted before it was sent"
    assert closed == [(1, 7)]
