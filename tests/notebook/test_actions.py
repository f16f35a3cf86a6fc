"""Deeds of pages, without a kernel: which wait for one another, which do not, and what pages see meanwhile."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import comm
import pytest
from worlds import PATIENCE, until

from rpcbench.launch.actions import Actions
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.notebook.sidebar import TARGET, Sidebar
from rpcbench.runtime.events import EventLog


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


class Counted(Actions):
    asked = 0
    stepper = None  # of the part that holds messages, as this fake agent has one part for all

    def begin_action(self, action, target):
        future = super().begin_action(action, target)
        self.asked += 1
        return future


class Workers(BaseCluster):
    """A cluster whose restarts take until they may end; notes what was begun."""

    kind, workers, watched = "process", ["worker1", "worker2"], list

    def __init__(self):
        self.begun, self.may_end, self.interrupted = queue.Queue(), threading.Semaphore(0), []
        self.fails = None
        links = SimpleNamespace(bus=EventLog())
        machine = SimpleNamespace(read_node=lambda read: set())  # no RRefs
        self.agent = SimpleNamespace(
            running=True, owner=self, links=links, machine=machine, on_member=lambda handler: None
        )
        self.actions = Counted(self.agent)
        self.agent.part = lambda kind: self.actions

    def interrupt(self, name):
        self.interrupted.append(name)
        return True

    def restart(self, name):
        self.begun.put(name)
        assert self.may_end.acquire(timeout=PATIENCE)
        if self.fails is not None:
            raise self.fails

    def scale(self, n):
        raise AssertionError("nobody has asked for that")

    shutdown = lost = log = find_log = kill = _interrupt_worker = scale


class Commands:
    """`%cluster`, with one cluster."""

    def __init__(self):
        self.cluster = Workers()

    def running_clusters(self):
        return {"main": self.cluster}

    def start_cluster(self, size, name, voice):
        voice.warn("few cores")
        voice.progress(size)(1, size)
        assert self.cluster.may_end.acquire(timeout=PATIENCE)
        return f"{size} workers."


@pytest.fixture
def commands():
    return Commands()


@pytest.fixture
def ask(no_leaks, commands):
    sidebar = Sidebar(commands, SimpleNamespace(auto=SimpleNamespace(targets=""), active_modes=lambda clusters: []))
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


def test_it_ends_where_it_began_though_the_manager_of_comms_is_another_one_now(monkeypatch):
    """As in IPython without a kernel, once something has loaded ipykernel."""
    before, after = comm.base_comm.CommManager(), comm.base_comm.CommManager()
    monkeypatch.setattr(comm, "get_comm_manager", lambda: before)
    sidebar = Sidebar(Commands(), SimpleNamespace(auto=SimpleNamespace(targets=""), active_modes=lambda clusters: []))
    assert list(before.targets) == [TARGET]
    monkeypatch.setattr(comm, "get_comm_manager", lambda: after)
    sidebar.close()
    assert before.targets == after.targets == {}


AGAIN = {"text": "Started again: worker1. Its variables are lost."}


def act(ask, action, worker):
    return ask(do="act", of="main", action=action, target=worker)


def test_an_interrupt_waits_for_no_restart_and_two_of_the_same_are_one(ask, commands):
    first, second = act(ask, "restart", "worker1"), act(ask, "restart", "worker1")
    assert commands.cluster.begun.get(timeout=PATIENCE) == "worker1"
    answer = act(ask, "interrupt", "worker2").closed.get(timeout=PATIENCE)
    assert answer == {"text": "Interrupted: worker2."} and commands.cluster.interrupted == ["worker2"]
    until(lambda: commands.cluster.actions.asked == 3)
    commands.cluster.may_end.release()
    answers = [page.closed.get(timeout=PATIENCE) for page in (first, second)]
    assert answers == [AGAIN] * 2
    assert commands.cluster.begun.empty()


def test_pages_see_what_is_being_done_and_how_far_it_is(ask, commands):
    watch = ask(do="watch")
    assert watch.hears(lambda state: True)["doing"] == []
    start = ask(do="start", size=2)
    watch.hears(lambda state: state["doing"] == ["Starting 2 workers: 1 of 2 ready"])
    commands.cluster.may_end.release()
    assert start.closed.get(timeout=PATIENCE) == {"text": "few cores\n2 workers."}
    watch.hears(lambda state: state["doing"] == [])
    act(ask, "restart", "worker1")
    watch.hears(lambda state: state["doing"] == ["%cluster restart worker1 …"])
    commands.cluster.may_end.release()
    watch.hears(lambda state: state["doing"] == [])


def test_a_deed_that_fails_is_told_and_is_over(ask, commands):
    commands.cluster.fails = ZeroDivisionError("nothing to divide")
    commands.cluster.may_end.release(2)
    watch = ask(do="watch")
    failed = act(ask, "restart", "worker1").closed.get(timeout=PATIENCE)
    assert failed == {"error": "ZeroDivisionError: nothing to divide"}
    watch.hears(lambda state: state["doing"] == [])
    commands.cluster.fails = None
    assert act(ask, "restart", "worker1").closed.get(timeout=PATIENCE) == AGAIN


def test_what_a_page_of_another_version_asks_for_is_refused(ask):
    answer = ask(do="restart", of="main", words=["worker1"]).closed.get(timeout=PATIENCE)
    assert answer == {"error": "this kernel's rpcbench has no 'restart': the page has another version of rpcbench"}
