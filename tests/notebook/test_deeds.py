"""Deeds of pages, without a kernel: which wait for one another, which do not, and what pages see meanwhile."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import comm
import pytest
from worlds import PATIENCE

from rpcbench.notebook.sidebar import TARGET, Sidebar


class Page:
    """The comm of one page."""

    def __init__(self, name):
        self.comm_id = name
        self.closed, self.heard = queue.Queue(), queue.Queue()

    def send(self, data):
        self.heard.put(data)

    def close(self, data):
        self.closed.put(data)

    def on_close(self, callback):
        pass

    def hears(self, wanted):
        while not wanted(data := self.heard.get(timeout=PATIENCE)):
            pass
        return data


class Cluster(SimpleNamespace):
    """One that nothing is known of."""

    __hash__ = object.__hash__


class Commands:
    """A cluster whose restarts take until they may end; notes what was done, and to whom."""

    def __init__(self):
        self.begun, self.may_end = queue.Queue(), threading.Semaphore(0)
        self.by_name = {"restart": self._restart, "interrupt": lambda words: f"Interrupted: {' '.join(words)}."}

    def present(self):
        agent = SimpleNamespace(running=True, owner=None, on_member=lambda handler: None)
        return {"main": Cluster(agent=agent, kind="process", workers=[], watched=list)}

    def _restart(self, words):
        self.begun.put(words)
        assert self.may_end.acquire(timeout=PATIENCE)
        return f"Started again: {' '.join(words)}."

    def start(self, size, voice):
        voice.warn("few cores")
        voice.progress(size)(1, size)
        self._restart([str(size)])
        return f"{size} workers."


@pytest.fixture
def commands():
    return Commands()


@pytest.fixture
def ask(no_leaks, commands):
    sidebar = Sidebar(commands, lambda: "")
    heard = comm.get_comm_manager().targets[TARGET]

    def ask(**data):
        page = Page(f"page {len(pages)}")
        pages.append(page)
        heard(page, {"content": {"data": data}})
        return page

    pages = []
    yield ask
    sidebar.close()
    assert TARGET not in comm.get_comm_manager().targets


def restart(ask, worker):
    return ask(do="restart", of="main", words=[worker])


def test_changes_wait_for_one_another_and_an_interrupt_for_none(ask, commands):
    first, second = restart(ask, "worker1"), restart(ask, "worker2")
    begun = commands.begun.get(timeout=PATIENCE)
    answer = ask(do="interrupt", of="main", words=["worker1"]).closed.get(timeout=PATIENCE)
    assert answer == {"text": "Interrupted: worker1."}
    assert commands.begun.empty()
    commands.may_end.release()
    assert {*begun, *commands.begun.get(timeout=PATIENCE)} == {"worker1", "worker2"}
    commands.may_end.release()
    answers = {page.closed.get(timeout=PATIENCE)["text"] for page in (first, second)}
    assert answers == {"Started again: worker1.", "Started again: worker2."}


def test_pages_see_what_is_being_done_and_how_far_it_is(ask, commands):
    watch = ask(do="watch")
    assert watch.hears(lambda state: True)["doing"] == []
    start = ask(do="start", size=2)
    watch.hears(lambda state: state["doing"] == ["Starting 2 workers: 1 of 2 serve"])
    commands.may_end.release()
    assert start.closed.get(timeout=PATIENCE) == {"text": "few cores\n2 workers."}
    watch.hears(lambda state: state["doing"] == [])


def test_a_deed_that_fails_is_told_and_is_over(ask, commands):
    commands.by_name["restart"] = lambda words: 1 // 0
    watch = ask(do="watch")
    failed = restart(ask, "worker1").closed.get(timeout=PATIENCE)
    assert failed == {"error": "ZeroDivisionError: integer division or modulo by zero"}
    watch.hears(lambda state: state["doing"] == [])
    commands.by_name["restart"] = lambda words: "done"
    assert restart(ask, "worker1").closed.get(timeout=PATIENCE) == {"text": "done"}
