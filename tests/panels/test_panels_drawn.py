"""All panels in a real browser: what stands in the page is what the view says."""

from __future__ import annotations

import re

import pytest
from pictures import gpipe, own, record, world
from shown import NASTY, PICTURES, TABLES, busy_world, settled

from rpcbench.panels import PANELS
from rpcbench.telemetry.views import diff_views, rref_view

pytestmark = pytest.mark.browser


HINTS = {"rrefs": "cluster.remote(", "autograd": "context()", "pipeline": ".step(", "messages": "rpc_sync("}
HINTS |= {"shards": "%panel shards model", "compare": "cluster.compare(", "progress": "cluster.map("}
HINTS |= dict.fromkeys(["resources", "traffic"], "when the members have answered")
HINTS |= {"logs": "%cluster start 2"}


@pytest.mark.parametrize(("name", "hint"), HINTS.items())
def test_an_empty_panel_says_what_to_do(show, name, hint):
    shown = show(name, world(2))
    assert hint in shown.page.locator(".rb-hint").inner_text()
    shown.move(busy_world())
    assert not shown.page.locator(".rb-hint").is_visible()


@pytest.mark.parametrize("width", [370, 900])
def test_a_head_names_the_cluster_once_there_are_several(show, page, width):
    page.set_viewport_size({"width": width, "height": 700})
    shown = show("progress", world(2))
    name = page.locator(".rb-cluster")
    assert not name.is_visible() and name.text_content() == ""
    page.evaluate("([i, name]) => { models[i].change('cluster', name); return drawn(); }", [shown.index, NASTY[1]])
    assert name.inner_text() == f"of {NASTY[1]}" and name.get_attribute("title").endswith(f" {NASTY[1]}.")
    head, box = page.locator(".rb-head").bounding_box(), name.bounding_box()
    assert box["width"] > 20 and box["x"] + box["width"] <= head["x"] + head["width"]
    assert page.locator(".rb-chip").is_visible()
    page.set_viewport_size({"width": 1000, "height": 700})


@pytest.mark.parametrize("name", PANELS)
def test_worker_supplied_strings_are_text(show, name):
    at = busy_world(NASTY)
    at[2]["tables"]["owned"]["1.7"]["type"] = NASTY[1]
    for worker in (1, 2, 3):
        contexts = at[worker]["tables"]["contexts"][str(1 << 48)]
        contexts["passes"] = [{**contexts["passes"][0], "pass": NASTY[2]}]
        graphs = at[worker]["tables"]["graphs"][str(1 << 48)]
        graphs["leaves"][0] = {"name": NASTY[1], "shape": NASTY[2], "bytes": 4}
        at[worker]["tables"]["steps"]["s5.w1"] = {**at[1]["tables"]["steps"]["s5.w1"], "plan": NASTY * 9}
    shown = show(name, at)
    shown.move(busy_world(NASTY))
    assert shown.count(".rb-panel img, .rb-panel script") == 0
    assert shown.page.evaluate("window.hurt") is None
    said = shown.page.locator(".rb-panel").inner_text() + "".join(shown.texts("title"))
    assert all(words in said for words in NASTY[1:3])


def without_curves(html: str) -> str:
    """The picture without the curves of the last minute, which move on with the clock."""
    return re.sub(r'<svg class="rb-curves".*?</svg>', "", html)


@pytest.mark.parametrize("name", PANELS)
def test_deltas_draw_the_same_picture_as_a_whole(show, name):
    shown = show(name, world(3))
    shown.move(busy_world())
    moved = settled(shown.page.locator(".rb-body"))
    assert without_curves(settled(show(name, busy_world()).page.locator(".rb-body"))) == without_curves(moved)


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_says_in_words_what_it_shows(show, name):
    shown = show(name, busy_world())
    picture = shown.page.locator(".rb-picture")
    assert picture.count() == 1
    assert picture.locator("> title").text_content() == {
        "rrefs": "RRefs", "autograd": "Autograd contexts", "pipeline": "Pipeline", "messages": "Messages",
    }[name]  # fmt: skip
    assert {
        "rrefs": "5 RRefs on 4 members",
        "autograd": "1 autograd context",
        "pipeline": "Step 4, complete",
        "messages": "4 messages, 1 in flight, 0 lost",
    }[name] in picture.locator("> desc").text_content()


def test_after_a_gap_the_picture_waits_for_the_next_whole(show):
    at = world(2)
    shown = show("rrefs", at)
    own(at, 1, "0.0")
    missed = diff_views(shown.view, rref_view(at))
    shown.hear({"kind": "delta", "version": 3, "delta": missed})
    assert shown.count(".rb-row") == 0
    shown.whole(3, rref_view(at))
    assert shown.count(".rb-row") == 1
    shown.whole(2, rref_view(world(2)))
    assert shown.count(".rb-row") == 1


@pytest.mark.parametrize("name", PANELS)
def test_a_second_view_opened_later_shows_the_present(show, name):
    shown = show(name, world(3))
    shown.move(busy_world())
    shown.render()
    first, second = shown.page.locator(".rb-panel").all()
    drawn = ("table",) if name in TABLES else (".rb-lines",) if name == "logs" else (".rb-picture", ".rb-legend")
    for part in (".rb-stats", *drawn):
        # Curves begin when their view is opened.
        one, other = ([without_curves(settled(each)) for each in view.locator(part).all()] for view in (first, second))
        assert one == other != []


def test_the_kernel_hears_when_a_view_opens_and_closes(show):
    shown = show("rrefs", world(2))
    shown.page.evaluate("window.close_()")
    opened, closed = shown.sent("opened")[0], shown.page.evaluate("sent").pop()
    assert closed == {"kind": "closed", "eye": opened["eye"]}


def test_a_failure_is_said(show):
    shown = show("rrefs", world(2))
    shown.page.evaluate("models[0].change('problem', 'ValueError: <b>'); drawn()")
    assert shown.page.get_by_role("alert").inner_text() == "This panel stopped: ValueError: <b>. Run its cell again."


@pytest.mark.parametrize("name", PICTURES)
def test_a_panel_outlives_its_workers(show, name):
    shown = show(name, busy_world())
    shown.move(world(1))
    assert shown.count(".rb-row, .rb-card, .rb-op:visible:not(.rb-legend *)") == 0
    assert shown.page.locator(".rb-hint").is_visible()


def test_nothing_is_drawn_before_the_first_look(show):
    shown = show("rrefs", {}, version=0)
    assert shown.texts(".rb-hint") == [""]
    shown.move({})
    assert shown.texts(".rb-hint") != [""]


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("workers", [3, 30])
def test_all_columns_and_lanes_fit_at_any_size(show, name, workers):
    at = world(workers)
    for worker in range(1, workers + 1):
        own(at, worker, f"0.{worker}")
    record(at, 1 << 48, [(i, i, i + 1) for i in range(1, workers)], dict.fromkeys(range(workers + 1), 1))
    gpipe(at, 0, workers, 4, 0.0)
    shown = show(name, at)
    marks = ".rb-lane" if name in ("pipeline", "autograd") else ".rb-top > g:has(.rb-worker)"
    assert shown.count(marks) == workers + (name != "pipeline")
    wide, room = shown.page.eval_on_selector(".rb-body", "body => [body.scrollWidth, body.clientWidth]")
    assert wide <= room


# ---- the chip


CHIP = ".rb-chip"
STOPPED = {"name": "stopped", "at": 1_700_000_000.0}


def change(shown, trait, value):
    shown.page.evaluate("([t, v]) => { models[0].change(t, v); return drawn(); }", [trait, value])


def manager(shown, text):
    """Give the model a widget manager as JupyterLab has one, and wait until the panel has looked at it."""
    shown.page.evaluate(
        f"() => {{ models[0].widget_manager = {text}; models[0].say('change:phase'); return drawn(); }}"
    )


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_that_has_stopped_says_when_and_keeps_its_last_picture(show, name):
    shown = show(name, busy_world())
    assert shown.texts(CHIP) == ["Live"]
    before = settled(shown.page.locator(".rb-body")).replace(' disabled=""', "")
    change(shown, "phase", STOPPED)
    hour = shown.page.evaluate("new Date(1.7e12).toTimeString().slice(0, 5)")
    assert shown.texts(CHIP) == [f"Stopped {hour}"]
    if name != "progress":  # which no longer says that something runs: see test_progress_drawn
        assert settled(shown.page.locator(".rb-body")).replace(' disabled=""', "") == before
    assert float(shown.page.eval_on_selector(".rb-body", "body => getComputedStyle(body).opacity")) == 1
    for control in shown.page.locator(".rb-acts button, .rb-scale button, .rb-chip").all():
        assert control.is_disabled()
    assert shown.page.locator(".rb-camera").is_enabled(), "the kernel is there and can leave the picture"


def test_a_panel_whose_kernel_has_gone_or_restarted_says_so(show):
    shown = show("workers", busy_world())
    there = "{kernel: {id: 'a', status: 'idle', connectionStatus: 'connected'}}"
    manager(shown, there)
    assert shown.texts(CHIP) == ["Live"] and shown.page.locator(".rb-acts button").first.is_enabled()
    manager(shown, there.replace("connected", "connecting"))
    assert shown.texts(CHIP) == ["No connection"] and shown.page.locator(".rb-acts button").first.is_disabled()
    manager(shown, there)
    assert shown.texts(CHIP) == ["Live"] and shown.page.locator(".rb-acts button").first.is_enabled()
    shown.page.evaluate("() => { models[0].say('comm_live_update'); return drawn(); }")
    assert shown.texts(CHIP) == ["Kernel restarted"]
    assert shown.page.locator(".rb-camera").is_disabled()
    shown.page.evaluate("() => { models[0].widget_manager.kernel = null; }")
    shown.page.locator(CHIP, has_text="No kernel").wait_for()  # no event tells it
    assert shown.page.get_by_role("button", name="No kernel. This is the last picture").count() == 1


def test_a_click_on_the_chip_pauses_the_picture(show):
    shown = show("rrefs", world(2))
    chip = shown.page.locator(CHIP)
    chip.click()
    own(at := world(2), 1, "0.0")
    shown.move(at)
    assert (chip.inner_text(), chip.get_attribute("aria-pressed"), shown.count(".rb-row")) == ("Paused", "true", 0)
    chip.click()
    shown.page.evaluate("drawn()")
    assert (chip.inner_text(), chip.get_attribute("aria-pressed"), shown.count(".rb-row")) == ("Live", "false", 1)
    chip.click()
    shown.move(world(2))
    change(shown, "phase", STOPPED)
    assert shown.count(".rb-row") == 0, "the last picture, not the paused one"


@pytest.mark.parametrize(("phase", "says"), [("stopped", "Nothing was here at the end."), ("record", "at this moment")])
def test_what_is_over_advises_nothing(show, phase, says):
    shown = show("rrefs", world(2))
    assert "cluster.remote(" in shown.page.locator(".rb-hint").inner_text()
    change(shown, "phase", {"name": phase, "at": 0})
    assert says in shown.page.locator(".rb-hint").inner_text() and shown.count(".rb-hint code") == 0


# ---- help, snapshots, type


@pytest.mark.parametrize("name", PANELS)
def test_each_panel_explains_itself_in_place(show, name):
    shown = show(name, busy_world())
    ask = shown.page.get_by_role("button", name="What does this panel show?")
    text = shown.page.locator(".rb-help")
    assert not text.is_visible()
    ask.press("Enter")
    assert ask.get_attribute("aria-expanded") == "true" and len(text.inner_text()) > 200
    ask.press("Enter")
    assert ask.get_attribute("aria-expanded") == "false" and not text.is_visible()
    names = shown.page.eval_on_selector_all(
        ".rb-head :is(button, select, input)", "all => all.map(one => one.className)"
    )
    assert "rb-asker" in names[-2] and "rb-camera" in names[-1], "the focus reaches them after the panel's own controls"


def test_a_snapshot_is_left_by_the_kernel_where_the_page_has_no_notebook(show):
    shown = show("rrefs", world(2))
    shown.page.get_by_role("button", name="Leave a snapshot in the notebook").click()
    (asked,) = shown.sent("snapshot")
    assert asked["page"] is False
    assert shown.page.locator(".rb-said-once").inner_text() == "A snapshot stands below the output of the cell."


def test_a_snapshot_is_added_to_the_notebook_of_the_page(show):
    shown = show("rrefs", world(2))
    outputs = "{length: 1, get: () => ({data: {}}), add: one => (window.added = one)}"
    manager(shown, f"{{context: {{model: {{cells: [{{outputs: {outputs}}}]}}}}}}")
    shown.page.get_by_role("button", name="Leave a snapshot in the notebook").click()
    (asked,) = shown.sent("snapshot")
    assert asked["page"]
    answer = {"kind": "snapshot", "model": "me", "data": {"text/plain": "it"}}
    shown.hear({**answer, "eye": "another view"})
    assert shown.page.evaluate("window.added") is None
    shown.hear({**answer, "eye": asked["eye"]})
    assert shown.page.evaluate("added") == {"output_type": "display_data", "data": {"text/plain": "it"}, "metadata": {}}


SIZES = """() => [...document.querySelectorAll('.rb-panel *')]
  .filter(one => [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim()))
  .filter(one => !['title', 'desc', 'style'].includes(one.localName))
  .map(one => [parseFloat(getComputedStyle(one).fontSize), one.outerHTML.slice(0, 120)])
  .filter(([size]) => size < 13)"""


@pytest.mark.parametrize("name", PANELS)
def test_no_type_is_smaller_than_13_pixels(show, name):
    shown = show(name, busy_world())
    assert shown.page.evaluate(SIZES) == []


STILL = """() => {
  const child = (innerHTML) =>
    Object.assign(document.createElement('div'), {className: 'jp-OutputArea-child', innerHTML});
  const live = child('');
  live.append(document.querySelector('.rb-panel'));
  document.body.append(live, child('<div class="rb-still">still</div>'));
}"""


def test_a_live_panel_hides_its_still_picture(show):
    shown = show("rrefs", world(2))
    shown.page.evaluate(STILL)
    still = shown.page.locator(".rb-still")
    assert not still.is_visible()
    shown.page.evaluate("document.querySelector('.rb-panel').remove()")
    assert still.is_visible()
