"""Backpressure: a panel waits for browsers that have a queue of pictures before them, and for no others."""

from __future__ import annotations

import threading
import time

import pytest

from rpcbench.panels.backpressure import Backpressure


@pytest.fixture
def clock(monkeypatch):
    """The time that `Backpressure` sees, in a list."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def report(made, version):
    """Report a version as JupyterLab does: on a thread that runs while a cell does."""
    thread = threading.Thread(target=made.picture_reported, args=(version, 0.0))
    thread.start()
    thread.join()


def test_browsers_are_behind_while_they_report_nothing_of_what_was_sent_seconds_ago(clock):
    made = Backpressure(most_seconds=3.0)
    report(made, 0)
    made.picture_sent(1)
    clock[0] += 2
    made.picture_sent(2)
    assert not made.is_behind
    clock[0] += 2
    assert made.is_behind  # by version 1
    report(made, 1)
    assert not made.is_behind
    clock[0] += 2
    assert made.is_behind  # by version 2
    report(made, 2)
    clock[0] += 100
    assert not made.is_behind


def test_a_front_end_whose_reports_wait_for_the_cell_is_never_behind(clock):
    made = Backpressure()
    for version in range(1000):
        made.picture_sent(version)
        assert not made.is_behind
        clock[0] += 10
    made.picture_reported(0, 0.0)  # on the main thread
    made.picture_sent(1001)
    clock[0] += 10
    assert not made.is_behind


def test_a_browser_that_opens_the_panel_has_nothing_before_it(clock):
    made = Backpressure()
    report(made, 0)
    made.picture_sent(1)
    clock[0] += 10
    assert made.is_behind
    made.forget_sent()
    assert not made.is_behind


def test_a_picture_that_takes_long_to_draw_is_followed_by_a_rest():
    made = Backpressure()
    assert made.rest_seconds == 0
    made.picture_reported(1, 0.01)
    assert made.rest_seconds == pytest.approx(0.2)
    made.picture_reported(2, 3.0)
    assert made.rest_seconds == 1.0


def test_a_message_that_comes_late_is_followed_by_a_rest_of_as_long():
    made = Backpressure()
    made.picture_reported(1, 0.01, late_seconds=1.5)
    assert made.rest_seconds == 1.5
    made.picture_reported(2, 0.01, late_seconds=60.0)
    assert made.rest_seconds == 2.5  # a longer silence would make the browser ask for the whole state
    made.picture_reported(3, 0.01, late_seconds=0.0)
    assert made.rest_seconds == pytest.approx(0.2)
