"""The workers panel in a real browser: what stands in the page is what the view says."""

from __future__ import annotations

import re
from datetime import datetime

import pytest
from pictures import ask, launch, tell, world
from shown import busy_world

from rpcbench.panels import PANELS
from rpcbench.telemetry import worker_columns
from rpcbench.telemetry.drawing import panel_script
from rpcbench.telemetry.svg import Snapshot
from rpcbench.telemetry.worker_columns import Column

pytestmark = pytest.mark.browser


def cells(shown, worker):
    """The words of one worker's row, by the head of their column."""
    heads = shown.texts("thead th")
    return dict(zip(heads, shown.texts(f"tr[data-worker='{worker}'] > *"), strict=True))


def test_a_row_for_each_worker_says_how_it_is(show):
    shown = show("workers", busy_world())
    first = cells(shown, 1)
    assert first.pop("buttons") == "stackinterruptrestart⋯", "the last one is there where these have no room"
    assert first == {
        "worker": "worker1process 101", "now": "starts again …", "CPU": "150 %", "memory": "20.0 MB",
        "threads": "2 busy, 1 waiting", "queue": "4", "bytes": "↑ 4.2 MB ↓ 12 B", "last output": "worker1 says <b>",
    }  # fmt: skip
    assert cells(shown, 2)["now"] == "no answer for 3 s"
    assert cells(shown, 0)["memory"] == "\N{EN DASH}" and cells(shown, 0)["buttons"] == ""
    assert (shown.count(".rb-squares .rb-full"), shown.count(".rb-squares .rb-hollow")) == (2, 1)
    assert shown.texts(".rb-failures li") == ["interrupt worker1: RpcError: worker1"]
    assert shown.texts(".rb-stat") == ["2 ready", "2 cells", "4 queued", "40.0 MB of 25 GB memory"]  # one starts again


def test_columns_for_gpus_stand_while_a_worker_has_one(show):
    at = busy_world()
    names = ["GPU", "GPU memory", "GPU use"]
    gpu = {"name": "0 H100 80GB HBM3", "memory": 20_000_000_000, "total": 80_000_000_000, "use": 0.5}
    health = at[1]["tables"]["health"]
    with_gpu = at | {1: {**at[1], "tables": {**at[1]["tables"], "health": {"1": {**health["1"], "gpu": gpu}}}}}
    shown = show("workers", at)
    shown.page.set_viewport_size({"width": 1600, "height": 700})
    assert not {*names} & {*shown.texts("thead th")}
    shown.move(with_gpu)
    first, second = cells(shown, 1), cells(shown, 2)
    assert list(first)[3:7] == ["memory", *names]
    assert [first[name] for name in names] == ["0 H100 80GB HBM3", "20.0 of 80 GB", "50 %"]
    assert [second[name] for name in names] == ["", "", ""]
    assert "GPU memory in the last minute, 0 to 80.0 GB" in shown.texts(".rb-legend")[0]
    shown.page.locator("tr[data-worker='1'] .rb-opener").click()
    inside = shown.texts("tr[data-worker='1'] + tr .rb-figures > span")
    assert {"GPU 0 H100 80GB HBM3", "GPU memory 20.0 of 80 GB", "GPU use 50 %"} <= {*inside}
    shown.page.set_viewport_size({"width": 560, "height": 700})
    shown.move(at | {2: {**at[2], "left_out": 1}} | {1: with_gpu[1]})
    assert " and GPU: a click on" in shown.texts(".rb-folded")[0]
    shown.page.set_viewport_size({"width": 1000, "height": 700})
    shown.move(at)
    assert not {*names} & {*shown.texts("thead th")} and not {*names} & {*cells(shown, 1)}


def test_what_was_lost_says_how(show):
    at = busy_world()
    at[3]["state"] = "lost"
    at[2]["left_out"] = 7
    shown = show("workers", at)
    assert cells(shown, 3)["now"] == "lost: killed by SIGKILL"
    stats = shown.texts(".rb-stat")
    assert [*stats[:4], stats[-1]] == ["1 ready", "1 lost", "2 cells", "4 queued", "7 left out"]


def test_the_dom_of_workers_holds_the_figures_of_the_view(show):
    shown = show("workers", busy_world())
    found = shown.page.eval_on_selector_all("tr[data-worker]", "all => all.map(one => ({...one.dataset}))")
    assert [int(one["worker"]) for one in found] == [0, 1, 2, 3]
    for one in found:
        worker = shown.view["workers"][one.pop("worker")]
        assert one == {key: "" if worker[key] is None else str(worker[key]) for key in one}
        assert len(one) == 16


def test_buttons_ask_the_kernel_and_ask_twice_before_something_is_lost(show):
    at = busy_world()
    del at[0]["tables"]["actions"]
    shown = show("workers", at)
    shown.page.evaluate("() => { window.setTimeout = () => 0; }")  # a question stays until it is answered
    line = shown.page.locator("tr[data-worker='1']")
    line.get_by_role("button", name="interrupt").click()
    line.get_by_role("button", name="restart").click()
    asked = "sent.filter(one => one.kind === 'act').map(one => [one.action, one.target])"
    assert shown.page.evaluate(asked) == [["interrupt", "worker1"]]
    shown.move(at | {2: {**at[2], "left_out": 1}})  # a new view takes no answer away
    sure = line.get_by_role("button", name="press again")
    assert sure.inner_text() == "sure?"
    sure.press("Enter")
    shown.page.get_by_role("button", name="+ worker").click()
    shown.page.get_by_role("button", name="\N{MINUS SIGN} worker").click()
    shown.page.get_by_role("button", name="press again").click()
    asked_for = [["interrupt", "worker1"], ["restart", "worker1"], ["scale", "4"], ["scale", "2"]]
    assert shown.page.evaluate(asked) == asked_for


def test_a_button_pressed_once_forgets_it_when_left(show):
    at = busy_world()
    del at[0]["tables"]["actions"]
    shown = show("workers", at)
    restart = shown.page.locator("tr[data-worker='2']").get_by_role("button", name="restart")
    restart.click()
    shown.page.locator("tr[data-worker='1'] .rb-opener").focus()
    assert restart.inner_text() == "restart"


def test_nothing_is_asked_while_it_is_being_done_or_where_nobody_acts(show):
    at = busy_world()
    ask(at, "scale", "4")
    shown = show("workers", at)
    for name in ("interrupt", "restart"):
        shown.page.locator("tr[data-worker='1']").get_by_role("button", name=name).click(force=True)
    shown.page.get_by_role("button", name="+ worker").click(force=True)
    assert shown.sent("act") == []
    shown.page.evaluate("models[0].change('acts', false)")
    shown.render()
    assert shown.page.locator(".rb-panel").nth(1).get_by_role("button", name="restart").count() == 0


def test_what_lies_deeper_opens_below_its_row_and_stays_open(show):
    at = busy_world()
    shown = show("workers", at)
    opener = shown.page.locator("tr[data-worker='1'] .rb-opener")
    assert not shown.page.locator("pre").first.is_visible()
    opener.press("Enter")
    assert opener.get_attribute("aria-expanded") == "true"
    tell(at, 1, peers={"0": [2_000_000, 12]})
    shown.move(at)
    more = shown.page.locator("tr[data-worker='1'] + tr")
    assert more.locator(".rb-tail").inner_text() == "first line\nworker1 says <b>"
    assert more.locator("li").all_inner_texts() == ["notebook: 2.0 MB sent, 12 B received"]


@pytest.mark.parametrize("workers", [3, 30])
def test_all_workers_fit_in_the_width(show, workers):
    at = world(workers)
    for i in range(1, workers + 1):
        tell(at, i, peers={str(j): [3_000_000 * j, 9] for j in range(workers)}, busy=3, waiting=20)
        launch(at, i, log="a long last line " * 9)
    shown = show("workers", at)
    assert shown.count("tr[data-worker]") == workers + 1
    wide, room = shown.page.eval_on_selector(".rb-body", "body => [body.scrollWidth, body.clientWidth]")
    assert wide <= room


@pytest.mark.parametrize(
    ("width", "folded"),
    [
        (1600, []),
        (1000, ["last output"]),
        (640, ["last output", "bytes", "queue"]),
        (500, ["last output", "bytes", "threads"]),
    ],
)
def test_columns_that_do_not_fit_are_named_and_stand_in_the_open_row(show, page, width, folded):
    page.set_viewport_size({"width": width, "height": 700})
    at = busy_world()
    at[2]["incarnation"] = 1
    shown = show("workers", at)
    said = "".join(shown.texts(".rb-folded"))  # in the menu of the head, if it is narrow
    assert all(name in said for name in folded) and (folded != []) == (said != "")
    heads = [one.inner_text() for one in shown.page.locator("thead th").all() if one.is_visible()]
    assert not set(folded) & set(heads)
    shown.page.locator("tr[data-worker='1'] .rb-opener").click()
    more = shown.page.locator("tr[data-worker='1'] + tr")
    figures = "2 busy, 1 waiting", "calls in the queue", "bytes sent and received", "20.0 MB of 25 GB"
    assert all(text in more.inner_text() for text in figures) and more.locator(".rb-tail").is_visible()
    row, menu = shown.page.locator("tr[data-worker='1']"), shown.page.get_by_role("menu")
    if width < 900:
        row.get_by_role("button", name="What to do with worker1").click()
    for name in ("stack", "interrupt", "restart"):
        button = menu.get_by_role("menuitem", name=name) if width < 900 else row.get_by_role("button", name=name)
        assert button.is_visible()
    wide, room = shown.page.eval_on_selector(".rb-body", "body => [body.scrollWidth, body.clientWidth]")
    page.set_viewport_size({"width": 1000, "height": 700})
    assert wide <= room


def test_curves_show_the_figures_that_have_come(show):
    at = world(2)
    tell(at, 1, cpu=0.0, memory=10_000_000)
    shown = show("workers", at)
    tell(at, 1, cpu=2.0, memory=20_000_000)
    shown.move(at)
    line = shown.page.locator("tr[data-worker='1'] .rb-cpu .rb-line").get_attribute("d")
    heights = [float(part) for part in re.findall(r"(?:V|M[\d.]+ )([\d.]+)", line)]
    assert heights == [19.0, 1.0], "from nothing to the top of the scale, two cores"
    assert "at most 200 %" in shown.page.locator("tr[data-worker='1'] .rb-cpu").get_attribute("title")
    assert shown.page.locator("tr[data-worker='2'] .rb-line").first.get_attribute("d") is None


def test_the_legend_names_the_marks_and_the_scale_of_the_columns_that_are_shown(show, page):
    threads = ["a thread that runs a function", "a thread that waits"]
    at = world(2)
    shown = show("workers", at)
    assert shown.texts(".rb-legend > span") == threads, "nothing is known of CPU and memory"
    tell(at, 1, cpu=2.0)
    shown.move(at)
    curves = ["CPU in the last minute, 0 to 200 %; dashed: 100 %, one core", "memory in the last minute, 0 to 20.0 MB"]
    assert shown.texts(".rb-legend > span") == curves + threads
    level = shown.page.locator("tr[data-worker='1'] .rb-cpu .rb-level")
    assert level.get_attribute("d") == "M0 10.0H64", "half of the height: one of two cores"
    page.set_viewport_size({"width": 330, "height": 700})
    page.evaluate("drawn()")
    names = shown.texts(".rb-legend > span")
    page.set_viewport_size({"width": 1000, "height": 700})
    assert names == [], "these columns are folded"
    assert show("workers", {}).texts(".rb-legend > span") == []


def test_the_stack_button_asks_and_shows_what_comes_below_the_row(show):
    at = busy_world()
    del at[0]["tables"]["actions"]
    shown = show("workers", at)
    line, more = shown.page.locator("tr[data-worker='1']"), shown.page.locator("tr[data-worker='1'] + tr")
    line.get_by_role("button", name="stack").click()
    asked = "sent.filter(one => one.kind === 'act').map(one => [one.action, one.target])"
    assert shown.page.evaluate(asked) == [["stacks", "worker1"]]
    assert more.is_visible() and not more.locator(".rb-stacks").is_visible()
    ask(at, "stacks", "worker1")
    shown.move(at)
    assert cells(shown, 1)["now"] == "runs a cell, 1 more waits", "to look is no change of what it does"
    line.get_by_role("button", name="stack").click(force=True)
    said = "At 16:20:03, worker1:\n  MainThread runs\n      Cell In[3], line 2: while True: <b>"
    assert len(shown.page.evaluate(asked)) == 1, "it is not asked twice at once"
    at[0]["tables"]["actions"] = {
        "stacks worker1": {"action": "stacks", "target": "worker1", "state": "done", "text": said}
    }
    shown.move(at)
    assert more.locator(".rb-stacks").inner_text() == said
    at[0]["tables"]["actions"] = {}
    shown.move(at)
    assert more.locator(".rb-stacks").inner_text() == said, "until others are asked for"


def test_the_outcome_of_an_action_has_its_time(show):
    at = world(2)
    told = {"target": "worker1", "ended": datetime(2026, 5, 4, 19, 37, 3).timestamp()}
    at[0]["tables"]["actions"] = {
        "interrupt worker1": {**told, "action": "interrupt", "state": "done", "text": "Interrupted: worker1."},
        "restart worker1": {**told, "action": "restart", "state": "failed", "error": "E: x"},
    }
    shown = show("workers", at)
    assert shown.texts(".rb-failures li") == ["19:37:03 Interrupted: worker1.", "19:37:03 restart worker1: E: x"]


def test_the_notebook_says_for_whom_it_waits(show):
    at = world(3)
    tell(at, 0, awaits=[3])
    at[0]["tables"]["calls"] = {"1": {"call": 1, "to": 3, "label": "this cell", "since": 1.0}}
    shown = show("workers", at)
    assert cells(shown, 0)["now"] == "waits for worker3"
    tell(at, 0, awaits=[])
    shown.move(at)
    assert cells(shown, 0)["now"] == "1 call under way"


def test_memory_of_the_machine_stands_in_each_row_only_where_there_are_several(show, page):
    page.set_viewport_size({"width": 1600, "height": 700})
    at = world(2)
    tell(at, 1)
    tell(at, 2, host="another", ram=50_000_000_000)
    shown = show("workers", at)
    assert [cells(shown, i)["memory"] for i in (1, 2)] == ["20.0 MB of 25 GB", "20.0 MB of 50 GB"]
    tell(at, 2)
    shown.move(at)
    assert [cells(shown, i)["memory"] for i in (1, 2)] == ["20.0 MB"] * 2
    assert "40.0 MB of 25 GB memory" in shown.texts(".rb-stat")
    assert "20.0 MB of 25 GB" in shown.page.locator("tr[data-worker='1'] td.rb-memory").get_attribute("title")
    page.set_viewport_size({"width": 1000, "height": 700})


@pytest.mark.parametrize("width", [284, 376, 516])
def test_a_state_is_whole_and_its_reason_stands_in_the_tooltip_and_the_open_row(show, page, width):
    at = world(3)
    for worker in range(4):
        tell(at, worker, cells=1, memory=215_000_000)
    reason = "killed by SIGKILL, as the kernel of its machine does where memory ends"
    at[1]["state"], at[2]["state"] = "lost", "stopped"
    launch(at, 1, state=reason)
    ask(at, "restart", "worker3")
    page.set_viewport_size({"width": width, "height": 700})
    shown = show("workers", at)
    states = shown.page.locator(".rb-words")
    assert states.evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth).length") == 0
    cut = states.evaluate_all("all => all.map(one => one.scrollHeight > one.clientHeight)")
    assert cut == [False, True, False, False]
    shown.page.locator("tr[data-worker='1'] .rb-opener").click()
    whole = f"lost: {reason}"
    assert whole in shown.page.locator("tr[data-worker='1'] + tr").inner_text()
    assert shown.page.locator("tr[data-worker='1'] .rb-now").get_attribute("title") == whole
    wide, room = shown.page.eval_on_selector(".rb-body", "body => [body.scrollWidth, body.clientWidth]")
    page.set_viewport_size({"width": 1000, "height": 700})
    assert wide <= room


def test_curves_that_a_wide_figure_has_folded_come_back_a_while_later(show, page):
    def workers(cpu):
        at = world(3)
        for i in range(4):
            tell(at, i, cpu=cpu, memory=215_000_000, cells=0, busy=0)
        return at

    def has_curves():
        return shown.page.locator("tr[data-worker='1'] .rb-curves").first.is_visible()

    page.set_viewport_size({"width": 532, "height": 700})
    shown = show("workers", workers(0.01))
    assert has_curves()
    shown.move(workers(12.5))
    assert not has_curves()
    shown.move(workers(0.02))
    assert not has_curves(), "not at each figure that comes"
    shown.page.evaluate("() => { window.realNow = Date.now; rpcbenchClock.now = Date.now = () => realNow() + 6000; }")
    try:
        shown.move(workers(0.03))
        assert has_curves()
    finally:
        shown.page.evaluate("() => { rpcbenchClock.now = Date.now = realNow; }")
        page.set_viewport_size({"width": 1000, "height": 700})


def test_columns_stand_at_the_width_of_the_docs_and_rows_have_a_line_or_two_at_that_of_the_dashboard(show, page):
    at = world(8)
    for i in range(9):
        tell(at, i, cpu=0.01, memory=215_000_000, cells=int(i == 1), busy=3 * (i == 2), peers={"0": [3_000_000, 4900]})
    tell(at, 0, awaits=[1, 2])
    page.set_viewport_size({"width": 1120, "height": 700})
    shown = show("workers", at)
    assert shown.texts(".rb-folded") == [""]
    at[3]["incarnation"] = 1
    page.set_viewport_size({"width": 535, "height": 700})
    shown.move(at)
    heights = shown.page.eval_on_selector_all("tr[data-worker]", "all => all.map(one => one.offsetHeight)")
    wide, room = shown.page.eval_on_selector(".rb-body", "body => [body.scrollWidth, body.clientWidth]")
    shown.page.locator("tr[data-worker='3'] .rb-opener").click()
    assert "process 103 · started twice" in shown.page.locator("tr[data-worker='3'] + tr").inner_text()
    page.set_viewport_size({"width": 1000, "height": 700})
    assert max(heights[1:]) <= 36 and heights[0] <= 44 and wide <= room, heights


def test_a_new_figure_needs_one_row_of_the_list(show, monkeypatch):
    new = Column("sockets", "sockets", "count", "“sockets” counts open sockets.", curve="teal")
    columns = worker_columns.WORKER_COLUMNS
    monkeypatch.setattr(worker_columns, "WORKER_COLUMNS", (*columns[:9], new, *columns[9:]))
    monkeypatch.setattr(PANELS["workers"], "_esm", panel_script("workers"))
    at = world(2)
    tell(at, 1, sockets=1234)
    shown = show("workers", at)
    shown.page.locator("tr[data-worker='1'] .rb-opener").click()
    assert (cells(shown, 1)["sockets"], cells(shown, 2)["sockets"]) == ("1234", "\N{EN DASH}")
    assert "sockets 1234" in shown.texts("tr[data-worker='1'] + tr .rb-figures > span")
    assert "sockets in the last minute, 0 to 1500" in shown.texts(".rb-legend > span")
    assert shown.page.locator("th.rb-sockets").get_attribute("title") == new.help in shown.texts(".rb-help")[0]
    still = Snapshot(shown.view)
    assert "0 queued, sockets 1234" in still.text
    assert re.search(r'rb-sockets"><span class="rb-value">1234<', still.svg)
    assert worker_columns.figure_shapes()["sockets?"] == (None, int)


def test_workers_stand_in_order_whoever_comes_and_goes(show):
    at = world(12)
    shown = show("workers", {i: at[i] for i in (0, 2, 10)})
    order = "all => all.map(one => Number(one.dataset.worker))"
    shown.move({i: at[i] for i in (0, 1, 2, 9, 10, 11)})
    assert shown.page.eval_on_selector_all("tr[data-worker]", order) == [0, 1, 2, 9, 10, 11]
    shown.move({i: at[i] for i in (1, 9)})
    assert shown.page.eval_on_selector_all("tr[data-worker]", order) == [1, 9]
    assert shown.count("tbody tr") == 4
