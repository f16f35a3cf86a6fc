"""The publisher's thread: shows changes at a bounded rate, sleeps otherwise, and ends with the last viewer."""

from __future__ import annotations

import math
import threading
import time
from unittest.mock import Mock

import pytest

from rpcbench.panels.base import PanelFeed
from rpcbench.telemetry.collector import Phase

PATIENCE = 20.0


class Counter:
    """A source whose world is a number."""

    def __init__(self):
        self.number = 0
        self.looks = 0
        self.wakes = []

    def subscribe(self, wake):
        self.wakes.append(wake)
        return lambda: self.wakes.remove(wake)

    def world(self):
        self.looks += 1
        return {self.number: {}}

    def change(self):
        self.number += 1
        for wake in list(self.wakes):
            wake()


class Watcher:
    """A viewer that notes what it is shown, and fails or blocks when told to."""

    is_behind = False
    rest_seconds = 0.0

    def __init__(self):
        self.seen = []
        self.wholes = 0
        self.beats = 0
        self.failed = None
        self.error = None
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.news = threading.Condition()

    def show_world(self, world):
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        if self.error:
            raise self.error
        with self.news:
            number = next(iter(world))
            changed = self.seen[-1:] != [number]
            self.seen.append(number)
            self.news.notify_all()
            return changed

    def name_cluster(self):
        """Tests of the panels look at it."""

    def send_whole_view(self):
        with self.news:
            self.wholes += 1
            self.news.notify_all()

    def send_beat(self):
        with self.news:
            self.beats += 1
            self.news.notify_all()

    def show_error(self, error):
        with self.news:
            self.failed = error
            self.news.notify_all()

    def until(self, true):
        with self.news:
            assert self.news.wait_for(true, PATIENCE)


@pytest.fixture
def publisher():
    made = PanelFeed(period=0.01, heal=1000.0)
    yield made
    for entry in list(made._entries.values()):
        made.close_viewer(entry.viewer)
    ended(made)


def ended(publisher):
    thread = publisher._thread
    if thread is not None:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_viewer_sees_the_present_at_once_and_then_each_change(publisher):
    source, viewer = Counter(), Watcher()
    publisher.open_viewer(viewer, source)
    viewer.until(lambda: viewer.seen == [0])
    source.change()
    viewer.until(lambda: viewer.seen == [0, 1])


def test_pictures_keep_their_pace_however_fast_the_world_changes():
    class Restless(Counter):
        def world(self):
            self.change()
            return super().world()

    publisher, source, viewer = PanelFeed(period=0.05), Restless(), Watcher()
    began = time.monotonic()
    publisher.open_viewer(viewer, source)
    viewer.until(lambda: len(viewer.seen) >= 5)
    publisher.close_viewer(viewer)
    assert time.monotonic() - began >= 4 * 0.05


def test_the_last_of_many_changes_is_shown(publisher):
    source, viewer = Counter(), Watcher()
    publisher.open_viewer(viewer, source)
    for _ in range(2000):
        source.change()
    viewer.until(lambda: viewer.seen[-1:] == [2000])
    assert len(viewer.seen) < 1000


def test_nobody_is_asked_while_nothing_changes(publisher):
    source, viewer = Counter(), Watcher()
    publisher.open_viewer(viewer, source)
    viewer.until(lambda: viewer.seen == [0])
    with viewer.news:
        assert not viewer.news.wait_for(lambda: len(viewer.seen) > 1, timeout=0.2)
    assert source.looks == 1


def test_while_nothing_changes_viewers_hear_that_their_picture_is_true(publisher):
    publisher = PanelFeed(period=0.01, heal=1000.0, beat=0.01)
    source, viewer = Counter(), Watcher()
    publisher.open_viewer(viewer, source)
    viewer.until(lambda: viewer.beats >= 3)
    assert (source.looks, viewer.seen) == (1, [0])
    source.phase = Phase("stopped", 1.0)
    source.change()
    viewer.until(lambda: viewer.seen == [0, 1])
    beats = viewer.beats
    with viewer.news:
        assert not viewer.news.wait_for(lambda: viewer.beats > beats + 1, timeout=0.2)  # one may be under way
    publisher.close_viewer(viewer)


def test_a_browser_that_asks_gets_the_whole_state_at_once(publisher):
    source, viewer = Counter(), Watcher()
    publisher.open_viewer(viewer, source)
    viewer.until(lambda: viewer.seen == [0])
    publisher.request_whole_view(viewer)
    viewer.until(lambda: viewer.wholes == 1)
    publisher.close_viewer(viewer)
    publisher.request_whole_view(viewer)  # closed meanwhile


@pytest.mark.parametrize(("work", "rest"), [(0.001, 0.12), (0.01, 0.25), (0.2, 1.0), (60.0, 2.0)])
def test_the_thread_rests_for_multiples_of_its_work_within_bounds(publisher, work, rest):
    assert PanelFeed()._pause_seconds(work) == pytest.approx(max(0.15, rest))


def test_one_look_serves_all_viewers_of_a_source(publisher):
    source, first, second = Counter(), Watcher(), Watcher()
    publisher.open_viewer(first, source)
    publisher.open_viewer(second, source)
    first.until(lambda: first.seen)
    second.until(lambda: second.seen)
    first.gate.clear()
    first.entered.clear()
    source.change()
    assert first.entered.wait(PATIENCE)  # perhaps the thread saw this change before the second viewer was woken
    first.entered.clear()
    source.change()
    first.gate.set()
    assert first.entered.wait(PATIENCE)
    looks = source.looks
    for each in (first, second):
        each.until(lambda each=each: each.seen[-1] == 2)
    assert source.looks == looks


def test_a_change_while_viewers_are_shown_reaches_all_of_them(publisher):
    source, first, second = Counter(), Watcher(), Watcher()
    first.gate.clear()
    publisher.open_viewer(first, source)
    publisher.open_viewer(second, source)
    assert first.entered.wait(PATIENCE)
    source.change()
    first.gate.set()
    first.until(lambda: first.seen[-1:] == [1])
    second.until(lambda: second.seen[-1:] == [1])


def test_the_last_close_unsubscribes_and_ends_the_thread(publisher):
    source, viewer = Counter(), Watcher()
    publisher.open_viewer(viewer, source)
    viewer.until(lambda: viewer.seen)
    thread = publisher._thread
    publisher.close_viewer(viewer)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert source.wakes == []
    publisher.close_viewer(viewer)
    publisher.open_viewer(viewer, source)
    source.change()
    viewer.until(lambda: viewer.seen[-1] == 1)


def test_opening_twice_is_harmless(publisher):
    source, viewer = Counter(), Watcher()
    publisher.open_viewer(viewer, source)
    publisher.open_viewer(viewer, source)
    assert len(source.wakes) == 1
    publisher.close_viewer(viewer)
    assert source.wakes == []


def test_close_waits_for_the_picture_under_way_and_none_follows(publisher):
    source, viewer = Counter(), Watcher()
    viewer.gate.clear()
    publisher.open_viewer(viewer, source)
    assert viewer.entered.wait(PATIENCE)
    closing = threading.Thread(target=publisher.close_viewer, args=(viewer,))
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    viewer.gate.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    source.change()
    ended(publisher)
    assert viewer.seen == [0]


def test_a_viewer_that_fails_says_so_and_the_others_go_on(publisher, caplog):
    source, bad, good = Counter(), Watcher(), Watcher()
    bad.error = ValueError("cannot draw")
    publisher.open_viewer(bad, source)
    publisher.open_viewer(good, source)
    bad.until(lambda: bad.failed is bad.error)
    source.change()
    good.until(lambda: good.seen[-1:] == [1])
    assert len(source.wakes) == 1
    assert "a panel stopped" in caplog.text


def test_a_viewer_that_cannot_even_fail_does_not_stop_the_others(publisher, caplog):
    source, bad, good = Counter(), Watcher(), Watcher()
    bad.error = OSError("gone")
    bad.show_error = Mock(side_effect=OSError("gone too"))
    publisher.open_viewer(bad, source)
    publisher.open_viewer(good, source)
    good.until(lambda: good.seen)
    source.change()
    good.until(lambda: good.seen[-1] == 1)
    assert "could not be closed" in caplog.text


def test_after_changes_the_whole_is_sent_once_more(publisher):
    publisher = PanelFeed(period=0.005, heal=0.03)
    source, viewer = Counter(), Watcher()
    publisher.open_viewer(viewer, source)
    viewer.until(lambda: viewer.wholes == 1)
    source.change()
    viewer.until(lambda: viewer.wholes == 2)
    for wake in source.wakes:
        wake()  # nothing changed: shown, but no whole is due
    viewer.until(lambda: len(viewer.seen) == 3)
    publisher.close_viewer(viewer)
    assert viewer.wholes == 2


def test_a_source_that_refuses_is_the_openers_error(publisher):
    class Refuses(Counter):
        def subscribe(self, wake):
            raise RuntimeError("no cluster")

    with pytest.raises(RuntimeError, match="no cluster"):
        publisher.open_viewer(Watcher(), Refuses())
    assert publisher._thread is None


def test_a_viewer_that_is_behind_is_sent_all_changes_at_once_when_it_has_caught_up(publisher):
    source, viewer, other = Counter(), Watcher(), Watcher()
    publisher.open_viewer(viewer, source)
    publisher.open_viewer(other, source)
    viewer.until(lambda: viewer.seen == [0])
    viewer.is_behind = True
    for number in range(1, 6):
        source.change()
        other.until(lambda: other.seen[-1:] == [number])  # noqa: B023  (waited for here)
    entry = publisher._entries[id(viewer)]
    assert viewer.seen == [0] and entry.ready_at == math.inf and entry.stale
    viewer.is_behind = False
    publisher.release_viewer(viewer)
    viewer.until(lambda: viewer.seen == [0, 5])


def test_a_browser_that_opens_a_viewer_ends_its_wait(publisher):
    source, viewer = Counter(), Watcher()
    publisher.open_viewer(viewer, source)
    viewer.until(lambda: viewer.seen == [0])
    publisher._entries[id(viewer)].ready_at = math.inf
    source.change()
    publisher.request_whole_view(viewer)
    viewer.until(lambda: viewer.seen[-1] == 1 and viewer.wholes == 1)


def test_a_viewer_whose_pictures_take_long_to_draw_rests_between_two(publisher):
    source, viewer = Counter(), Watcher()
    viewer.rest_seconds = 1000.0
    publisher.open_viewer(viewer, source)
    viewer.until(lambda: viewer.seen == [0])
    source.change()
    other = Watcher()
    publisher.open_viewer(other, source)
    other.until(lambda: other.seen == [1])
    assert viewer.seen == [0]


def test_a_world_that_changes_nothing_in_the_view_is_no_reason_for_a_beat(publisher):
    source, viewer = Counter(), Watcher()
    publisher.open_viewer(viewer, source)
    viewer.until(lambda: viewer.seen == [0])
    for looks in range(2, 12):
        for wake in list(source.wakes):
            wake()
        viewer.until(lambda looks=looks: len(viewer.seen) >= looks)
    assert viewer.beats <= 1  # the first is due after a second


def test_a_viewer_that_comes_late_is_sent_no_beat_while_it_rests():
    publisher = PanelFeed(period=0.01, heal=1000.0, beat=0.01)
    source, viewer = Counter(), Watcher()
    viewer.rest_seconds = PATIENCE
    publisher.open_viewer(viewer, source)
    viewer.until(lambda: viewer.seen == [0])
    with viewer.news:
        assert not viewer.news.wait_for(lambda: viewer.beats, timeout=0.2)
    publisher.close_viewer(viewer)
    ended(publisher)
