"""Pages that watch: each hears what has changed, once, and nobody looks when nobody watches."""

from __future__ import annotations

import queue
import threading

import pytest
from worlds import PATIENCE

from rpcbench.launch.status import WorkerStatus
from rpcbench.notebook.cluster_magic import summarize_worker
from rpcbench.notebook.sidebar import SidebarWatchers

LONG = 3600.0


class Page:
    def __init__(self, name="page"):
        self.comm_id = name
        self.heard = queue.Queue()

    def send(self, data):
        self.heard.put(data)

    def close(self, data):
        self.heard.put(("closed", data))

    def hears(self):
        return self.heard.get(timeout=PATIENCE)


class World:
    def __init__(self):
        self.state, self.looks = {"n": 1}, threading.Semaphore(0)

    def look(self):
        self.looks.release()
        state = self.state  # once: another thread sets it
        if isinstance(state, Exception):
            raise state
        return state

    def looked(self):
        assert self.looks.acquire(timeout=PATIENCE)


@pytest.fixture
def world(no_leaks):
    return World()


def closing(watchers):
    watchers.close()
    assert watchers._thread is None


def test_a_page_hears_what_changed_and_nothing_else(world):
    watchers, page = SidebarWatchers(world.look, period=LONG), Page()
    watchers.add_page(page)
    assert page.hears() == {"n": 1}
    for _ in range(2):
        world.looked()
        watchers.state_changed()
    world.state = {"n": 2}
    watchers.state_changed()
    assert page.hears() == {"n": 2}
    closing(watchers)
    assert page.hears() == ("closed", {})
    assert page.heard.empty()


def test_between_changes_nobody_looks(world):
    watchers, page = SidebarWatchers(world.look, period=LONG), Page()
    watchers.add_page(page)
    page.hears()
    looks = 0
    while world.looks.acquire(timeout=0.2):
        looks += 1
        assert looks < 5, "the thread does not rest"
    closing(watchers)


def test_what_changes_by_itself_is_seen_after_a_period(world):
    watchers, page = SidebarWatchers(world.look, period=0.01), Page()
    watchers.add_page(page)
    page.hears()
    world.state = {"n": 2}
    assert page.hears() == {"n": 2}
    closing(watchers)


def test_two_pages_hear_the_same_and_one_that_comes_later_all_there_is(world):
    watchers, first, later = SidebarWatchers(world.look, period=LONG), Page("a"), Page("b")
    watchers.add_page(first)
    first.hears()
    watchers.add_page(later)
    assert later.hears() == {"n": 1}
    world.state = {"n": 2}
    watchers.state_changed()
    assert first.hears() == later.hears() == {"n": 2}
    closing(watchers)


def test_nobody_looks_when_the_last_page_has_gone(world):
    watchers, page = SidebarWatchers(world.look, period=0.01), Page()
    watchers.add_page(page)
    page.hears()
    thread = watchers._thread
    watchers.remove_page(page.comm_id)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    watchers.add_page(page)  # and again
    assert page.hears() == {"n": 1}
    closing(watchers)


def test_a_page_that_is_not_heard_of_is_forgotten(world):
    watchers, page = SidebarWatchers(world.look, period=0.01, lease=0.05), Page()
    watchers.add_page(page)
    while page.hears() != ("closed", {}):  # before any look, where the machine is busy
        pass
    assert not watchers.renew_lease(page.comm_id)
    closing(watchers)


def test_a_page_that_is_heard_of_stays(world):
    watchers, page = SidebarWatchers(world.look, period=0.01, lease=LONG), Page()
    watchers.add_page(page)
    page.hears()
    watchers._watching[page.comm_id].renewed_at -= LONG - 20
    assert watchers.renew_lease(page.comm_id)
    watchers._watching[page.comm_id].renewed_at -= LONG - 20  # had it not been heard of, its lease would be over
    for _ in range(3):
        world.looked()
    assert page.heard.empty()
    closing(watchers)


def test_a_look_that_fails_is_told_and_looking_goes_on(world, caplog):
    world.state = OSError("no such process")
    watchers, page = SidebarWatchers(world.look, period=0.01), Page()
    watchers.add_page(page)
    assert page.hears() == {"problem": "OSError: no such process"}
    world.state = {"n": 1}
    assert page.hears() == {"n": 1}
    closing(watchers)
    assert "could not be read" in caplog.text


def test_a_page_that_cannot_be_told_is_dropped_and_others_are_told(world, caplog):
    broken, page = Page("a"), Page("b")
    broken.send = None
    watchers = SidebarWatchers(world.look, period=0.01)
    watchers.add_page(broken)
    watchers.add_page(page)
    assert page.hears() == {"n": 1}
    world.state = {"n": 2}
    assert page.hears() == {"n": 2}
    assert list(watchers._watching) == ["b"]
    closing(watchers)
    assert "could not be sent" in caplog.text


@pytest.mark.parametrize(
    ("state", "calls", "serves", "seen"),
    [
        ("ready", 0, True, ("ready", "")),
        ("ready", 2, True, ("busy", "")),
        ("ready", 0, False, ("starting", "")),
        ("stopped", 2, True, ("stopped", "")),
        ("killed by SIGKILL", 0, False, ("lost", "killed by SIGKILL")),
        ("has ended", 0, True, ("lost", "has ended")),
    ],
)
def test_a_worker_in_a_word(state, calls, serves, seen):
    row = summarize_worker(WorkerStatus("worker1", 7, state, 1, "here", 1.0, None, 0.126, calls), serves)
    assert (row["state"], row["note"]) == seen
    assert (row["name"], row["start"], row["cpu"], row["calls"]) == ("worker1", 2, 13, calls)


@pytest.mark.parametrize(("calls", "held", "seen"), [(2, 1, ("busy", 1)), (2, 2, ("ready", 2)), (0, 1, ("ready", 0))])
def test_a_call_that_a_stepper_holds_keeps_no_worker_busy(calls, held, seen):
    row = summarize_worker(WorkerStatus("worker1", 7, "ready", 0, "here", 1.0, None, 0.0, calls), True, held)
    assert (row["state"], row["held"]) == seen
