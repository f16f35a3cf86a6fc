"""A handle on a cell that runs beside the notebook ends, whatever becomes of the cell and of what shows it."""

from __future__ import annotations

import asyncio
import re
import threading
from types import SimpleNamespace

import pytest
from worlds import PATIENCE

from rpcbench.base.errors import CallCancelled
from rpcbench.cells.client import _WorkerRun
from rpcbench.notebook.async_cells import CellHandle


class Sent:
    """A cell that is through when the test says so."""

    def __init__(self):
        self.go = threading.Event()

    def wait_for_result(self):
        assert self.go.wait(PATIENCE)
        return {"y": 7}

    def states_by_member(self):
        return {"worker1": "done" if self.go.is_set() else "runs"}

    def interrupt(self):
        self.go.set()


class Screen:
    def __init__(self):
        self.said = []

    def write_text(self, stream, text):
        self.said.append((stream, text))

    def display_bundle(self, bundle, update):
        raise AssertionError("it was never shown")


class Closed(Screen):
    def write_text(self, stream, text):
        raise ValueError("I/O operation on closed file")


def _fails(error):
    def settle(answer):
        raise error

    return settle


def test_values_are_there_once_it_is_through():
    sent = Sent()
    handle = CellHandle(Screen(), lambda changed: sent, lambda answer: answer)
    assert not handle.done
    begun = r"<cell on worker1: begun; at \d\d:\d\d:\d\d, see %panel progress>"
    assert re.fullmatch(begun, repr(handle)), "true for ever: nothing changes the output of a notebook opened again"
    with pytest.raises(TimeoutError, match="it still runs"):
        handle.wait(0.01)
    sent.go.set()

    async def wait():
        return await handle

    assert asyncio.run(wait()) == handle.wait() == {"y": 7}
    assert handle.done and re.search(r"; \d+\.\d s>$", repr(handle))


def test_the_end_on_a_worker_is_shown_before_it_counts():
    """So nothing is shown of a cell after a wait for it has returned."""
    prompts = SimpleNamespace(take_over_item=print, check_open_prompt=lambda: None)
    seen = []

    def on_settled(part):
        seen.append((part.run_state, part.replied.is_set()))

    part = _WorkerRun(SimpleNamespace(name="worker1"), None, prompts, on_settled, "")
    part.settle_outcome(lambda: {"y": 7})
    assert seen == [("done", False)] and part.replied.is_set()


def test_an_error_is_shown_and_raised_each_time():
    sent, screen = Sent(), Screen()
    handle = CellHandle(screen, lambda changed: sent, _fails(KeyError("lost")))
    sent.go.set()
    for _ in range(2):
        with pytest.raises(KeyError):
            handle.wait(PATIENCE)
    assert screen.said == [("stderr", "KeyError: 'lost'\n")]


def test_what_was_interrupted_is_cancelled():
    sent = Sent()
    handle = CellHandle(Screen(), lambda changed: sent, _fails(KeyboardInterrupt()))
    handle.cancel()
    with pytest.raises(CallCancelled):
        handle.wait(PATIENCE)


def test_it_ends_though_nothing_can_be_shown(caplog):
    sent = Sent()
    handle = CellHandle(Closed(), lambda changed: sent, _fails(KeyError("lost")))
    sent.go.set()
    with pytest.raises(KeyError):
        handle.wait(PATIENCE)
    assert "could not be shown" in caplog.text


def test_who_gives_up_an_await_leaves_no_thread_behind_and_the_cell_goes_on():
    """Such a thread would hold up the end of the process, and with it the cell that it waits for."""
    sent = Sent()
    handle = CellHandle(Screen(), lambda changed: sent, lambda answer: answer)
    before = {*threading.enumerate()}

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle, 0.01)

    asyncio.run(give_up())
    assert {*threading.enumerate()} <= before and not handle.done
    sent.go.set()
    assert handle.wait(PATIENCE) == {"y": 7}
