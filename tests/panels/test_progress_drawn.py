"""The progress panel in a real browser: bars, times that pass, rows in sight, the cell behind a row, its buttons."""

from __future__ import annotations

import time

import pytest
from pictures import job, ran, world

from rpcbench.telemetry.drawing import panel_styles
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
    assert shown.texts(".rb-progress-of .rb-note") == ["12 of 20 items done, 1 failed, 2 running, 5 waiting"]
    shown.move(jobs(running=0, done=12, cancelled=2, state="failed", error="ValueError: <b>", end=70.0))
    assert shown.texts(".rb-progress-of .rb-note") == ["12 of 20 items done, 1 failed, 2 cancelled, 5 not begun"]
    assert shown.texts(".rb-state > span") == ["failed", "ValueError: <b>"]
    assert shown.texts(".rb-time > span")[0] == "20 s"
    shown.move(jobs(total=None, running=0))
    assert [kind for kind, _ in bar(shown)] == ["unknown"]
    assert shown.texts(".rb-progress-of .rb-note") == ["12 items done, 1 failed"]


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
    assert shown.page.locator(".rb-jobs tbody tr").evaluate_all(order) == ["9", "8", "7", "6", "5", "2"]
    assert shown.texts(".rb-stat") == ["1 job running", "0 cells running"]
    shown.page.get_by_role("button", name="3 more jobs").press("Enter")
    shown.page.locator("[data-job='1']").wait_for()
    assert shown.count(".rb-jobs tbody tr") == 9 and shown.page.get_by_role("button", name="fewer jobs").is_visible()


def test_an_empty_panel_has_one_line_also_beside_other_panels(show):
    shown = show("progress", world(2))
    shown.page.add_style_tag(content=panel_styles("workers"))  # the styles of a panel that is opened later
    assert shown.page.locator(".rb-panel").bounding_box()["height"] < 90
    assert not shown.page.locator(".rb-legend").is_visible()


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


def test_the_time_of_a_late_picture_is_its_own(show):
    began = time.time() - EPOCH - 90
    shown = show("progress", jobs(began=began, counted=began + 90))
    shown.move(jobs(began=began, counted=began + 91), at=time.time())
    shown.page.evaluate("() => { window.realNow = Date.now; rpcbenchClock.now = Date.now = () => realNow() + 20000; }")
    try:
        shown.move(jobs(began=began, counted=began + 100, done=13), at=time.time() + 15)
        assert shown.texts(".rb-chip")[0].startswith("Picture of ")
        assert shown.page.locator(".rb-time > span").first.inner_text().startswith("1:4")
    finally:
        shown.page.evaluate("() => { rpcbenchClock.now = Date.now = realNow; }")


@pytest.mark.parametrize("width", [370, 500, 700, 1100])
def test_nothing_is_cut_at_any_width(show, page, width):
    page.set_viewport_size({"width": width, "height": 700})
    at = jobs(2, name="a_function_with_a_long_name", note="epoch 2 of 50, loss 0.1234")
    ran(at, 1, [1, "worker1", "error", "ZeroDivisionError: division by zero", 51.0, 1, 0.2], code="model(x, y, z)" * 9)
    shown = show("progress", at)
    overflow = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).length"
    assert shown.page.locator(".rb-body, .rb-body td").evaluate_all(overflow) == 0
    boxes = [one.bounding_box() for one in shown.page.locator("[data-job='1'] > *").all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    page.set_viewport_size({"width": 1000, "height": 700})


RUNS = [1, "worker1", "runs", "", None, None, None]
ANSWERS = """gone => document.addEventListener('rpcbench:rerun', event => {
  const { isQuestion, ...detail } = event.detail;
  if (!isQuestion) (window.runs ??= []).push(detail);
  if (isQuestion ? detail.number !== gone : !window.isGone) event.preventDefault();
})"""


def cells(count=1):
    at = world(2)
    for order in range(1, count + 1):
        ran(at, order, [1 + order % 2, f"worker{1 + order % 2}", "ok", "", 51.5, order, 1.2])
    return at


def test_a_cell_is_a_row_and_its_age_ticks_while_it_runs(show):
    at = cells()
    began = time.time() - EPOCH - 5
    ran(at, 2, RUNS, began=began)
    ran(at, 3, RUNS, began=began + 1, code="<b>x</b>")
    ran(at, 4, [2, "worker2", "error", "KeyError: <b>", began + 9, 3, 0.0123], began=began + 1)
    shown = show("progress", at)
    assert shown.texts(".rb-source") == ["y = x.sum()", "<b>x</b>", "y = x.sum()", "y = x.sum()"]
    assert shown.texts(".rb-where") == ["worker2[3]", "worker1", "worker1", "worker2[1]"]
    assert shown.texts(".rb-cells .rb-state") == ["KeyError: <b>", "waiting", "running", "ok"]
    ended, _, age, _ = shown.texts(".rb-cells .rb-time")
    assert ended == "12 ms, waited 7 s" and age in ("5 s", "6 s")
    has_moved = "before => document.querySelectorAll('.rb-cells .rb-time')[2].textContent !== before"
    shown.page.wait_for_function(has_moved, arg=age)
    assert shown.texts(".rb-stat") == ["0 jobs running", "1 cell running"]
    shown.page.set_viewport_size({"width": 360, "height": 700})
    shown.move(at)
    assert shown.texts(".rb-stat") == ["1 cell running", "0 jobs running"], "a narrow head has room for one"
    shown.page.set_viewport_size({"width": 1000, "height": 700})


@pytest.mark.parametrize("phase", ["stopped", "live"])
def test_nothing_runs_any_more_under_a_panel_that_is_over(show, phase):
    began = time.time() - EPOCH - 20
    at = jobs(began=began, counted=began + 20, rate=3.0)
    ran(at, 1, RUNS, began=began)
    shown = show("progress", at)
    assert "about" in shown.texts(".rb-time > span")[0]
    shown.page.evaluate(f"models[0].change('phase', {{ name: '{phase}', at: 1 }}); drawn()")
    times = [*shown.texts(".rb-time > span"), *shown.texts(".rb-cells .rb-time")]
    said = [shown.texts(".rb-stat"), shown.texts(".rb-state > span")[0], shown.texts(".rb-cells .rb-state")]
    read = shown.page.locator("p.rb-hidden[role=status]").text_content()
    if phase == "live":
        assert all(times) and said == [["1 job running", "1 cell running"], "running", ["running"]]
        assert read == "1 job and 1 cell running."
    else:
        untold = "not known to have ended"
        assert times == ["", "", ""] and said == [[f"1 job and 1 cell {untold}"], untold, [untold]]
        assert read == f"1 job and 1 cell {untold}."


def test_a_cell_runs_again_where_a_front_end_answers(show):
    shown = show("progress", cells(2))
    assert shown.page.get_by_role("button", name="run again").count() == 0, "nobody answers"
    shown.page.evaluate(ANSWERS, 1)
    at = cells(3)
    ran(at, 1, code="other")
    ran(at, 4, RUNS)
    shown.move(at)
    again = shown.page.get_by_role("button", name="run again")
    assert again.count() == 1, "not of one that has changed, nor of one that runs"
    again.press("Enter")
    (asked,) = shown.page.evaluate("window.runs")
    assert asked == {"cell": "cell-3", "number": 3, "code": "y = x.sum()\ny", "where": "worker2[3]"}
    shown.page.evaluate("window.isGone = true")
    again.click()
    assert "has changed, or is gone" in shown.page.locator(".rb-said-once").inner_text()
    shown.page.evaluate("models[0].change('phase', { name: 'stopped', at: 1 }); drawn()")
    assert again.is_disabled()


def test_the_code_is_copied(show, page):
    at = cells()
    ran(at, 2, is_cut=True)
    shown = show("progress", at)
    shown.page.evaluate("document.execCommand = () => { window.copied = document.activeElement.value; return true; }")
    assert shown.page.get_by_role("button", name="copy").count() == 1, "of a long one only the beginning is known"
    shown.page.get_by_role("button", name="copy").click()
    shown.page.locator(".rb-said-once", has_text="The code is copied.").wait_for()
    assert page.evaluate("window.copied") in ("y = x.sum()\ny", None)


def test_a_click_shows_the_cell_and_a_choice_leaves_one_worker(show):
    shown = show("progress", cells(20))
    listen = "document.addEventListener('rpcbench:reveal', e => { window.asked = e.detail; e.preventDefault(); })"
    shown.page.evaluate(listen)
    shown.page.locator("[data-cell='19'] .rb-where").click()
    assert shown.page.evaluate("window.asked.cell") == "cell-19"
    assert shown.count(".rb-cells tbody tr") == 8
    shown.page.get_by_role("button", name="12 more cells").click()
    shown.page.evaluate("drawn()")
    assert shown.count(".rb-cells tbody tr") == 20
    shown.page.locator(".rb-title select").select_option("worker2")
    shown.page.evaluate("drawn()")
    assert {where.partition("[")[0] for where in shown.texts(".rb-cells .rb-where")} == {"worker2"}
    shown.move(cells(22))
    assert shown.page.locator(".rb-title select").input_value() == "worker2" and shown.count(".rb-cells tbody tr") == 11
