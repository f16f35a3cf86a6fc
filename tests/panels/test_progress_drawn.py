"""The progress panel in a real browser: bars, times that pass, how many jobs are in sight, the cell behind a row."""

from __future__ import annotations

import time

import pytest
from pictures import job, world

from rpcbench.telemetry.views import World

pytestmark = pytest.mark.browser

EPOCH = 1_700_000_000.0


def jobs(count: int = 1, **more) -> World:
    at = world(2)
    for number in range(1, count + 1):
        job(at, number, **more)
    return at


def bar(shown):
    """[kind, share of the bar] of each of its parts."""
    return shown.page.locator(".rb-bar rect").evaluate_all(
        "all => all.map(one => [one.getAttribute('class').split('rb-').at(-1), one.width.baseVal.value / 180])"
    )


def test_a_bar_has_the_shares_of_what_is_done_failed_and_running(show):
    shown = show("progress", jobs())
    parts = [["waiting", 1.0], ["done", 0.6], ["failed", 0.05], ["running", 0.1]]
    assert [kind for kind, _ in bar(shown)] == [kind for kind, _ in parts]
    assert [share for _, share in bar(shown)] == pytest.approx([share for _, share in parts], rel=1e-4)
    assert shown.texts(".rb-progress-of .rb-note") == ["13 of 20 items, 1 failed, 2 running, 5 waiting"]
    shown.move(jobs(running=0, done=19, state="failed", error="ValueError: <b>", end=70.0))
    assert shown.texts(".rb-state > span") == ["failed", "ValueError: <b>"]
    assert shown.texts(".rb-time > span")[0] == "20 s"
    shown.move(jobs(total=None, running=0))
    assert [kind for kind, _ in bar(shown)] == ["unknown"]
    assert shown.texts(".rb-progress-of .rb-note") == ["13 items, 1 failed"]


def test_the_time_passes_without_a_message_and_stands_still_in_a_paused_panel(show):
    began = time.time() - EPOCH - 90
    shown = show("progress", jobs(began=began, counted=began + 90, rate=0.1))
    passed = shown.page.locator(".rb-time > span").first
    assert passed.inner_text().startswith("1:3") and "min, about 1:" in passed.inner_text()
    before = passed.inner_text()
    has_moved = "before => document.querySelector('.rb-time > span').textContent !== before"
    shown.page.wait_for_function(has_moved, arg=before)
    shown.page.locator(".rb-chip").click()
    shown.page.evaluate("drawn()")
    before = passed.inner_text()
    shown.page.wait_for_timeout(2200)
    assert passed.inner_text() == before


def test_a_few_jobs_are_in_sight_and_all_that_run(show):
    at = jobs(9, state="done", running=0, end=70.0)
    job(at, 2)
    shown = show("progress", at)
    order = "all => all.map(one => one.dataset.job)"
    assert shown.page.locator("tbody tr").evaluate_all(order) == ["9", "8", "7", "6", "5", "2"]
    assert shown.texts(".rb-stat") == ["1 running", "8 done"]
    shown.page.get_by_role("button", name="3 more jobs").press("Enter")
    shown.page.locator("[data-job='1']").wait_for()
    assert shown.count("tbody tr") == 9 and shown.page.get_by_role("button", name="fewer jobs").is_visible()


@pytest.mark.parametrize("how", ["key", "click"])
def test_a_row_reveals_its_cell(show, how):
    shown = show("progress", jobs())
    listen = "document.addEventListener('rpcbench:reveal', e => { window.asked = e.detail; e.preventDefault(); })"
    shown.page.evaluate(listen)
    if how == "key":
        shown.page.get_by_role("button", name="score").press("Enter")
    else:
        shown.page.locator("[data-job='1'] .rb-state").click()
    assert shown.page.evaluate("[window.asked.cell, window.asked.number]") == ["cell-1", 1]


def test_a_cell_that_is_not_there_is_said(show):
    shown = show("progress", jobs())
    shown.page.get_by_role("button", name="score").click()
    assert shown.page.locator(".rb-said-once").inner_text().startswith("Cell [1] is no longer there")
    shown.move(jobs(number=None))
    shown.page.get_by_role("button", name="score").click()
    assert shown.page.locator(".rb-said-once").inner_text() == "It was begun outside cells."


@pytest.mark.parametrize("width", [370, 500, 700, 1100])
def test_nothing_is_cut_at_any_width(show, page, width):
    page.set_viewport_size({"width": width, "height": 700})
    shown = show("progress", jobs(2, name="a_function_with_a_long_name", note="epoch 2 of 50, loss 0.1234"))
    overflow = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).length"
    assert shown.page.locator(".rb-body, .rb-body td").evaluate_all(overflow) == 0
    boxes = [one.bounding_box() for one in shown.page.locator("[data-job='1'] > *").all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    page.set_viewport_size({"width": 1000, "height": 700})
