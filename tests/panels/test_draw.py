"""The drawing code in a real browser: what stands in the page is what the view says, whatever names workers have."""

from __future__ import annotations

import json
import re
import time

import pytest
from pictures import arrive, ask, gpipe, launch, meet, own, record, run_backward, send, tell, use, world

from benchmarks.panel_frames import CHROMIUM, FLAGS, HOST
from rpcbench.panels import PANELS
from rpcbench.telemetry.views import diff, rref_view

pytestmark = pytest.mark.browser

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
PICTURES = [name for name in PANELS if name != "workers"]  # drawn as SVG
NASTY = ["notebook", "<img src=x onerror='window.hurt=1'>", "</text><script>window.hurt=1</script>", "&amp;\"'" * 20]


@pytest.fixture(scope="module")
def page():
    if CHROMIUM is None:
        pytest.skip("no Chromium: set CHROMIUM or put it on PATH")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running.new_page(viewport={"width": 1000, "height": 700})
        running.close()


class Shown:
    """One panel in a page, shown a world after another as the kernel would."""

    def __init__(self, page, name):
        self.page = page
        self.kind = PANELS[name]
        self.index = self.version = 0
        self.view = {}

    def open(self, at, version=1):
        self.version = version
        self.view = self.kind.look(at)
        state = {"version": version, "view": self.view}
        code = [str(self.kind._esm), str(self.kind._css)]
        self.index = self.page.evaluate("([...all]) => open_(...all)", [*code, state])
        self.render()

    def render(self):
        self.page.evaluate("view", self.index)

    def move(self, at):
        """Send the delta to this world; gives it, as JSON would carry it."""
        self.version += 1
        view = self.kind.look(at)
        delta = json.loads(json.dumps(diff(self.view, view)))
        self.view = view
        self.hear({"kind": "delta", "version": self.version, "delta": delta})

    def hear(self, message):
        self.page.evaluate("([i, m]) => { models[i].say('msg:custom', m); return drawn(); }", [self.index, message])

    def whole(self, version, view):
        state = {"version": version, "view": view}
        self.page.evaluate("([i, s]) => { models[i].change('state', s); return drawn(); }", [self.index, state])

    def count(self, selector):
        return self.page.locator(selector).count()

    def texts(self, selector):
        return self.page.locator(selector).all_text_contents()


@pytest.fixture
def show(page):
    """`show(name, world)` opens a panel; at the end the page must have had no error and asked nobody for anything."""
    page.goto("about:blank")
    page.set_content("<!doctype html><body></body>")
    page.evaluate(HOST)
    wrong = []
    hears = {
        "pageerror": lambda error: wrong.append(str(error)),
        "console": lambda line: wrong.append(line.text) if line.type in ("error", "warning") else None,
        "request": lambda request: None if request.url.startswith("blob:") else wrong.append(request.url),
    }
    for event, hear in hears.items():
        page.on(event, hear)

    def opened(name, at, **how):
        page.evaluate("document.body.replaceChildren()")
        shown = Shown(page, name)
        shown.open(at, **how)
        return shown

    yield opened
    for event, hear in hears.items():
        page.remove_listener(event, hear)
    assert wrong == []


def settled(locator):
    """Inner markup without the class that lets new nodes fade in."""
    return re.sub(r' class="(?:rb-new)?"| ?rb-new| (?=")', "", locator.inner_html())


def busy_world(names=None):
    """The notebook and three workers with RRefs in every state, one context in backward, and a running step."""
    at = world(3, names)
    for worker in (1, 2, 3):
        own(at, worker, f"0.{2 * worker}", "Linear")
        use(at, 0, f"0.{2 * worker + 1}", f"0.{2 * worker}", worker)
    own(at, 2, "1.7")
    use(at, 1, "1.8", "1.7", 2)
    use(at, 3, "1.9", "1.7", 2, "pending", parent=1)
    own(at, 3, "0.90", failed=True)
    use(at, 0, "0.91", "0.90", 3, "deleting")
    record(at, 1 << 48, [(m, 1, 2) for m in range(8)] + [(8 + m, 2, 3) for m in range(8)], {0: 0, 1: 4, 2: 4, 3: 2})
    for worker in (1, 2, 3):
        run_backward(at, 1 << 48, "1.0", worker, 8, 2 * worker)
    end = gpipe(at, 4, 3, 8, 100.0)
    gpipe(at, 5, 3, 8, end + 0.01, until=end + 0.05)
    send(at, 1, 2, "Call", 50.0, label=NASTY[1], call=1, rrefs=["1.7"], bytes=2_500)
    send(at, 2, 1, "Result", 50.001, took=0.003, call=1)
    send(at, 2, 3, "Gradients", 50.002, took=None, context=1 << 48, label=NASTY[2])
    send(at, 3, 3, "Create", 50.003, rrefs=["0.90"])
    meet(at, 1, {1: 50.0015, 2: 50.004}, None, NASTY[2], shape=NASTY[1])
    name = at[1]["name"]
    tell(at, 1, cells=2, waiting=3, busy=1, queued=4, cpu=1.5, peers={"0": [1500, 12], "2": [4_200_000, 0]})
    tell(at, 2, 3)
    launch(at, 1, name, log=f"first line\n{name} says <b>")
    launch(at, 3, at[3]["name"], "killed by SIGKILL")
    ask(at, "restart", name)
    ask(at, "interrupt", name, f"RpcError: {name}")
    return at


# ---- workers


def cells(shown, worker):
    """The words of one worker's row, by the head of their column."""
    heads = shown.texts("thead th")
    return dict(zip(heads, shown.texts(f"tr[data-worker='{worker}'] > *"), strict=True))


def test_a_row_for_each_worker_says_how_it_is(show):
    shown = show("workers", busy_world())
    first = cells(shown, 1)
    assert first.pop("buttons") == "interruptrestart"
    assert first == {
        "worker": "worker1process 101", "now": "starts again …", "cpu": "150 %", "memory": "20.0 MB",
        "threads": "1 busy, 1 waiting", "queue": "4", "bytes": "↑ 4.2 MB ↓ 12 B", "last output": "worker1 says <b>",
    }  # fmt: skip
    assert cells(shown, 2)["now"] == "silent for 3 s"
    assert cells(shown, 0)["memory"] == "\N{EN DASH}" and cells(shown, 0)["buttons"] == ""
    assert shown.count(".rb-squares .rb-full") == shown.count(".rb-squares .rb-hollow") == 1
    assert shown.texts(".rb-failures li") == ["interrupt worker1: RpcError: worker1"]
    assert shown.texts(".rb-stat") == ["3 up", "2 cells", "4 queued"]


def test_what_was_lost_says_how(show):
    at = busy_world()
    at[3]["state"] = "lost"
    at[2]["left_out"] = 7
    shown = show("workers", at)
    assert cells(shown, 3)["now"] == "lost: killed by SIGKILL"
    assert shown.texts(".rb-stat") == ["2 up", "1 lost", "2 cells", "4 queued", "7 left out"]


def test_the_dom_of_workers_holds_the_figures_of_the_view(show):
    shown = show("workers", busy_world())
    found = shown.page.eval_on_selector_all("tr[data-worker]", "all => all.map(one => ({...one.dataset}))")
    assert [int(one["worker"]) for one in found] == [0, 1, 2, 3]
    for one in found:
        worker = shown.view["workers"][one.pop("worker")]
        assert one == {key: "" if worker[key] is None else str(worker[key]) for key in one}
        assert len(one) == 13


def test_buttons_ask_the_kernel_and_ask_twice_before_something_is_lost(show):
    at = busy_world()
    del at[0]["tables"]["actions"]
    shown = show("workers", at)
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
    assert [one["kind"] for one in shown.page.evaluate("sent")] == ["opened"]
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
    assert more.locator("pre").inner_text() == "first line\nworker1 says <b>"
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


def test_workers_stand_in_order_whoever_comes_and_goes(show):
    at = world(12)
    shown = show("workers", {i: at[i] for i in (0, 2, 10)})
    order = "all => all.map(one => Number(one.dataset.worker))"
    shown.move({i: at[i] for i in (0, 1, 2, 9, 10, 11)})
    assert shown.page.eval_on_selector_all("tr[data-worker]", order) == [0, 1, 2, 9, 10, 11]
    shown.move({i: at[i] for i in (1, 9)})
    assert shown.page.eval_on_selector_all("tr[data-worker]", order) == [1, 9]
    assert shown.count("tbody tr") == 4


# ---- RRefs


def test_a_row_for_each_rref_and_a_mark_for_each_holder(show):
    shown = show("rrefs", busy_world())
    assert shown.count(".rb-row") == len(shown.view["rrefs"])
    assert shown.count(".rb-row .rb-owner") == len(shown.view["rrefs"])
    for state in ("confirmed", "pending", "deleting"):
        forks = [fork for fork in shown.view["forks"].values() if fork["state"] == state]
        assert shown.count(f".rb-row .rb-fork.rb-{state}") == len(forks) > 0
    assert shown.count(".rb-row .rb-way.rb-pending") == 1
    assert shown.count(".rb-row .rb-owner.rb-failed") == 1
    assert shown.texts(".rb-stat")[:4] == ["5 RRefs", "6 forks", "1 pending", "1 deleting"]


def test_the_owner_stands_in_its_workers_column(show):
    shown = show("rrefs", busy_world())
    for rref, row in shown.view["rrefs"].items():
        mark = shown.page.locator(f"[data-rref='{rref}'] .rb-owner").bounding_box()
        name = shown.page.locator(".rb-top text", has_text=shown.view["workers"][str(row["owner"])]["name"])
        box = name.bounding_box()
        assert mark["x"] + mark["width"] / 2 == pytest.approx(box["x"] + box["width"] / 2, abs=1.5)


@pytest.mark.parametrize(("workers", "words"), [(2, "LocalOptimizer"), (30, "LocalOptimiz…")])
def test_types_are_cut_only_where_marks_stand(show, workers, words):
    at = world(workers)
    own(at, 1, "0.0", "LocalOptimizer")
    use(at, 0, "0.1", "0.0", 1)
    shown = show("rrefs", at)
    assert shown.texts(".rb-row .rb-kind") == [words]
    text, mark = [shown.page.locator(part).bounding_box() for part in (".rb-row .rb-kind", ".rb-row .rb-fork")]
    assert text["x"] + text["width"] < mark["x"]


def test_forks_of_one_holder_are_counted_in_one_mark(show):
    at = world(2)
    own(at, 1, "0.0")
    for i in range(1, 4):
        use(at, 0, f"0.{i}", "0.0", 1)
    shown = show("rrefs", at)
    assert shown.count(".rb-row .rb-fork") == 1
    assert shown.texts(".rb-row .rb-count") == ["3"]


def test_rows_stay_where_they_are_when_others_go(show):
    at = world(2)
    for i in range(8):
        own(at, 1, f"0.{i}")
    shown = show("rrefs", at)
    place = "r => document.querySelector(`[data-rref='${r}']`).getAttribute('transform')"
    before = shown.page.evaluate(place, "0.3")
    gone = shown.page.evaluate(place, "0.1")
    height = shown.page.locator(".rb-panel").bounding_box()["height"]
    for rref in ("0.1", "0.6", "0.7"):
        del at[1]["tables"]["owned"][rref]
    shown.move(at)
    assert shown.page.evaluate(place, "0.3") == before
    own(at, 2, "2.0")
    own(at, 1, "0.3", failed=True)
    shown.move(at)
    assert shown.page.evaluate(place, "2.0") == gone
    new = shown.page.eval_on_selector_all(".rb-row.rb-new", "all => all.map(one => one.dataset.rref)")
    assert sorted(new) == ["0.0", "0.2", "0.4", "0.5", "2.0"]  # one that changed does not fade in again
    assert shown.page.locator(".rb-panel").bounding_box()["height"] == height


def many_rrefs(count):
    """RRefs of three workers, each with a user; the later the bigger, the middle one the oldest."""
    at = world(3)
    for worker in (1, 2, 3):
        at[worker]["epoch"] = time.time() - 9000
    for i in range(count):
        kind = "Tensor" if i % 2 else "Linear"
        made = 1.0 if i == count // 2 else 2.0 + i
        own(at, 1 + i % 3, f"0.{2 * i}", kind, made=made, size=1000 * i, cell="c", number=1 + i % 5)
        use(at, (i + 1) % 4, f"0.{2 * i + 1}", f"0.{2 * i}", 1 + i % 3)
    return at


def drawn(shown):
    return shown.page.eval_on_selector_all(".rb-row", "all => all.map(one => one.dataset.rref)")


def select(shown, name, value):
    shown.page.get_by_label(name, exact=True).select_option(value)
    shown.page.evaluate("drawn()")


def test_of_a_thousand_rrefs_those_in_sight_are_drawn(show):
    shown = show("rrefs", many_rrefs(1000))
    assert shown.texts(".rb-stat")[0] == "1000 RRefs"
    assert 10 < len(drawn(shown)) < 40 and "0.0" in drawn(shown)
    shown.page.eval_on_selector(".rb-body", "body => { body.scrollTop = body.scrollHeight; return drawn(); }")
    assert len(drawn(shown)) < 40 and "0.1998" in drawn(shown) and "0.0" not in drawn(shown)
    last = shown.page.locator("[data-rref='0.1998']").bounding_box()
    body = shown.page.locator(".rb-body").bounding_box()
    assert body["y"] < last["y"] and last["y"] + last["height"] <= body["y"] + body["height"]
    assert shown.count(".rb-row.rb-new") == 0  # only what is new fades in


def test_leaks_are_looked_for_by_age_and_by_size(show):
    shown = show("rrefs", many_rrefs(90))
    select(shown, "order", "oldest first")
    assert drawn(shown)[:3] == ["0.90", "0.0", "0.2"]
    select(shown, "order", "biggest first")
    assert drawn(shown)[:3] == ["0.178", "0.176", "0.174"]
    select(shown, "order", "")
    assert drawn(shown)[:2] == ["0.0", "0.2"]


def test_filters_show_what_fits_all_of_them(show):
    at = many_rrefs(90)
    use(at, 1, "0.901", "0.2", 2, "pending")
    shown = show("rrefs", at)
    rrefs, forks = shown.view["rrefs"], shown.view["forks"].values()
    select(shown, "type", "Linear")
    select(shown, "worker", "2")
    mine = {row["rref"] for row in rrefs.values() if row["owner"] == 2} | {f["rref"] for f in forks if f["holder"] == 2}
    wanted = {key for key in mine if rrefs[key]["type"] == "Linear"}
    assert shown.texts(".rb-tools [role=status]") == [f"{len(wanted)} of 90"]
    assert drawn(shown) and set(drawn(shown)) <= wanted
    select(shown, "type", "")
    select(shown, "worker", "")
    select(shown, "state", "pending")
    assert drawn(shown) == ["0.2"]
    select(shown, "state", "")
    shown.page.get_by_role("searchbox").fill("0.178 (")
    shown.page.evaluate("drawn()")
    assert drawn(shown) == ["0.178"]
    del at[3]["tables"]["owned"]["0.178"]
    at[2]["tables"]["users"].pop("0.179", None)
    at[1]["tables"]["users"].pop("0.179", None)
    at[0]["tables"]["users"].pop("0.179", None)
    shown.move(at)
    assert drawn(shown) == []


def test_names_of_dimensions_are_shown_and_a_filter_looks_at_the_class(show):
    at = world(2)
    for number, kind in enumerate(["Tensor (N=32, C=3)", "Tensor", "Linear"]):
        own(at, 1, f"0.{number}", kind)
    shown = show("rrefs", at)
    assert shown.texts(".rb-row .rb-kind") == ["Tensor (N=32, C=3)", "Tensor", "Linear"]
    select(shown, "type", "Tensor")
    assert drawn(shown) == ["0.0", "0.1"]
    offered = shown.page.get_by_label("type", exact=True).locator("option")
    assert offered.all_inner_texts() == ["any", "Linear", "Tensor"]


def test_a_choice_stays_while_what_there_is_changes(show):
    at = many_rrefs(9)
    shown = show("rrefs", at)
    select(shown, "type", "Linear")
    for worker in (1, 2, 3):
        at[worker]["tables"]["owned"] = {k: {**v, "type": "Tensor"} for k, v in at[worker]["tables"]["owned"].items()}
    shown.move(at)
    assert drawn(shown) == []
    assert shown.page.get_by_label("type", exact=True).input_value() == "Linear"


def test_size_age_and_cell_are_said(show):
    at = many_rrefs(3)
    shown = show("rrefs", at)
    assert shown.texts("[data-rref='0.4'] .rb-note tspan") == ["2.0 kB", "2 h", "cell [3]"]
    assert shown.texts(".rb-stat")[-1] == "3.0 kB in tensors"
    own(at, 1, "0.0", size=None, made=0.0, number=None)
    shown.move(at)
    assert shown.texts("[data-rref='0.0'] .rb-note tspan") == []


def test_a_click_on_the_cell_finds_it_or_says_that_it_is_gone(show):
    shown = show("rrefs", many_rrefs(3))
    shown.page.evaluate("""() => {
      const cell = document.createElement('div');
      cell.className = 'jp-Cell';
      cell.innerHTML = '<div style="height: 3000px"></div><div class="jp-InputPrompt">[3]:</div>';
      document.body.append(cell);
      window.scrollTo(0, 0);
    }""")
    link = shown.page.get_by_role("link", name="show cell 3,")
    link.press("Enter")
    assert shown.page.evaluate("window.scrollY") > 1000
    shown.page.get_by_role("link", name="show cell 2,").click()
    assert "Cell [2] is no longer there" in shown.texts(".rb-tools [role=status]")[0]
    shown.page.evaluate("""() => addEventListener('rpcbench:reveal', event => {
      window.told = event.detail;
      event.preventDefault();
    })""")
    shown.page.get_by_role("link", name="show cell 2,").click()
    assert shown.page.evaluate("told") == {"cell": "c", "number": 2}


@pytest.mark.alone
def test_a_thousand_rrefs_that_change_stay_above_ten_frames_a_second(show):
    at = many_rrefs(1000)
    shown = show("rrefs", at)
    versions = []
    for i in range(20):
        own(at, 1 + i % 3, f"0.{6 * i + 2 * (i % 3)}", "Changed", made=5.0)
        view = rref_view(at)
        versions.append({"kind": "delta", "version": 2 + i, "delta": json.loads(json.dumps(diff(shown.view, view)))})
        shown.view = view
    took = shown.page.evaluate(
        """async ([index, versions]) => {
          const began = performance.now();
          for (const one of versions) { models[index].say('msg:custom', one); await drawn(); }
          return (performance.now() - began) / versions.length;
        }""",
        [shown.index, versions],
    )
    assert took < 500  # milliseconds for two frames each; five times what ten frames a second would allow


# ---- autograd


def test_a_card_for_each_context_with_its_links_and_bars(show):
    shown = show("autograd", busy_world())
    assert shown.count(".rb-card") == 1
    links = shown.page.eval_on_selector_all("[data-link]", "all => all.map(one => one.dataset.link)")
    assert sorted(links) == ["1>2", "2>3"]
    assert shown.texts(".rb-arc-count") == ["8", "8"]
    assert shown.texts(".rb-count-down") == ["6 to come", "4 to come", "2 to come"]
    assert shown.texts(".rb-gradients") == ["4", "4", "2"]
    assert shown.count("[data-member]") == 4
    assert shown.texts(".rb-card .rb-code") == [str(1 << 48)]


def test_counts_go_down_while_backward_runs(show):
    at = busy_world()
    shown = show("autograd", at)
    left = "[...document.querySelectorAll('[data-left]')].map(one => Number(one.dataset.left))"
    assert shown.page.evaluate(left) == [6, 4, 2]
    for row in (at[worker]["tables"]["contexts"][str(1 << 48)] for worker in (1, 2, 3)):
        row["passes"] = [{**row["passes"][0], "arrived": 8, "waiting": 0}]
    shown.move(at)
    assert shown.page.evaluate(left) == [0, 0, 0]
    assert shown.texts(".rb-count-down") == ["runs", "runs", "runs"]
    for row in (at[worker]["tables"]["graphs"][str(1 << 48)] for worker in (1, 2, 3)):
        row["passes"] = [{**row["passes"][0], "ran": row["passes"][0]["regions"]}]
    shown.move(at)
    assert shown.texts(".rb-count-down") == ["✓", "✓", "✓"]


def test_a_send_without_its_recv_looks_different(show):
    at = busy_world()
    at[3]["tables"]["contexts"][str(1 << 48)]["recvs"].pop()
    shown = show("autograd", at)
    assert shown.count("[data-link='2>3'] .rb-open") == 1
    assert shown.count("[data-link='1>2'] .rb-paired") == 1


def test_the_last_context_stays_pale_after_its_release(show):
    shown = show("autograd", busy_world())
    height = shown.page.locator(".rb-panel").bounding_box()["height"]
    shown.move(world(3))
    assert shown.count(".rb-card.rb-gone") == shown.count(".rb-card") == 1
    assert shown.texts(".rb-count-down") == ["", "", ""]  # nothing is to come any more
    assert shown.texts(".rb-stat")[0] == "0 contexts"
    assert shown.page.locator(".rb-panel").bounding_box()["height"] == height
    shown.move(busy_world())
    assert shown.count(".rb-card.rb-gone") == 0


@pytest.mark.parametrize("first", [(1,), (2, 3)])
def test_the_last_picture_of_a_context_is_whole_whoever_tells_of_its_end_first(show, first):
    at = busy_world()
    shown = show("autograd", at)
    for worker in first:
        at[worker]["tables"]["contexts"].clear()
    shown.move(at)
    shown.move(world(3))
    assert shown.count(".rb-card.rb-gone") == 1
    assert shown.texts(".rb-gradients") == ["4", "4", "2"]
    assert shown.count(".rb-card .rb-paired") == shown.count("[data-link]") == 2


def test_a_context_that_its_maker_does_not_hold_makes_room_for_others(show):
    at = world(2)
    first, second = str(1 << 48), str((1 << 48) + 1)
    record(at, int(first), [(1, 1, 2)], {2: 0})
    shown = show("autograd", at)
    codes = ".rb-card .rb-code"
    assert shown.texts(codes) == [first]
    height = shown.page.locator(".rb-panel").bounding_box()["height"]
    record(at, int(second), [(2, 1, 2)], {1: 0, 2: 0})
    shown.move(at)
    assert shown.texts(codes) == [second]
    assert shown.texts(".rb-stat")[0] == "2 contexts"
    assert shown.page.locator(".rb-panel").bounding_box()["height"] == height
    record(at, int(first), [(1, 1, 2)], {1: 0, 2: 0})
    shown.move(at)
    assert sorted(shown.texts(codes)) == [first, second]


def choose(shown, context):
    shown.page.get_by_label("Contexts shown").select_option(context)
    shown.page.evaluate("drawn()")


def test_one_context_is_chosen_and_stays_so_after_its_release(show):
    at = world(3)
    first, second = str(1 << 48), str((1 << 48) + 1)
    for context in (first, second):
        record(at, int(context), [(1, 1, 2)], {1: 1, 2: 0})
    shown = show("autograd", at)
    codes = ".rb-card .rb-code"
    height = shown.page.locator("[data-context]").first.bounding_box()["y"]
    choose(shown, second)
    assert shown.texts(codes) == [second]
    assert shown.page.locator("[data-context]").bounding_box()["y"] == height
    del at[1]["tables"]["contexts"][second], at[2]["tables"]["contexts"][second]
    shown.move(at)
    assert shown.texts(codes) == [second] and shown.count(".rb-card.rb-gone") == 1
    record(at, 7, [(1, 0, 2)], {0: 1, 2: 0})
    shown.move(at)
    assert shown.texts(codes) == [second]
    options = shown.texts(".rb-choose option")
    assert options[0] == "all contexts" and f"context {second}, released" in options
    choose(shown, "")
    assert sorted(shown.texts(codes)) == sorted(["7", first])


def test_regions_are_squares_that_fill_and_leaves_stand_with_their_holder(show):
    at = busy_world()
    shown = show("autograd", at)
    per_worker = {str(w): (4, w) for w in (1, 2, 3)}
    for worker, (count, ran) in per_worker.items():
        part = f".rb-part[data-worker='{worker}']"
        assert shown.count(f"{part} .rb-region") == count
        assert shown.count(f"{part} .rb-region.rb-ran") == ran
    assert shown.texts("[data-holder='3'] .rb-leaf") == ["0.weight [64, 64]", "1.weight [64, 64]"]
    row = at[3]["tables"]["graphs"][str(1 << 48)]
    at[3]["tables"]["contexts"][str(1 << 48)]["gradients"] = 9
    row["leaves"] = [{"name": "", "shape": f"[{n}]", "bytes": 4 * n} for n in range(1, 7)]
    row["passes"] = [{"pass": "1.0", "regions": 40, "ran": 12}]
    shown.move(at)
    assert shown.texts("[data-holder='3'] .rb-leaf") == ["[1]", "[2]", "[3]", "+ 6 more"]
    words = shown.page.locator("[data-holder='3'] title").text_content().splitlines()
    assert words == ["9 gradients held", *(f"[{n}]" for n in range(1, 7)), "… and 3 more"]
    assert shown.count(".rb-part[data-worker='3'] .rb-region") == 0
    assert "12/40" in shown.texts(".rb-part[data-worker='3'] text")


# ---- pipeline


def test_a_block_for_each_operation_of_the_running_step(show):
    shown = show("pipeline", busy_world())
    ops = [op for op in shown.view["ops"].values() if op["step"] == 5]
    for kind in "FB":
        blocks = shown.count(f".rb-op-{kind}:not(.rb-pale):not(.rb-legend *)")
        assert blocks == sum(op["op"] == kind for op in ops) > 0
    assert shown.count(".rb-runs") == sum(op["end"] is None for op in ops) > 0
    assert shown.count(".rb-lane") == 3
    assert shown.count(".rb-pale") > 0
    idle = shown.view["steps"]["4"]["idle"]
    assert shown.texts(".rb-stat")[:2] == ["step 5 ", f"{100 * idle:.1f} % idle in step 4"]


def test_blocks_stand_in_their_lane_at_their_time(show):
    at = world(2)
    gpipe(at, 0, 2, 4, 10.0)
    shown = show("pipeline", at)
    boxes = {}
    for block in shown.page.locator(".rb-op:not(.rb-legend *)").all():
        words = block.locator("title").text_content()
        boxes[words.split(",")[0] + words.split(",")[1]] = block.locator("rect").bounding_box()
    first, second = boxes["forward of micro-batch 0 stage 0"], boxes["forward of micro-batch 1 stage 0"]
    other = boxes["forward of micro-batch 0 stage 1"]
    back = boxes["backward of micro-batch 0 stage 0"]
    assert first["y"] == second["y"] < back["y"] < other["y"]
    assert first["y"] + first["height"] < back["y"] + back["height"] < other["y"]
    zero = shown.page.locator(".rb-axis line").first.bounding_box()["x"]
    assert first["x"] == pytest.approx(zero, abs=0.6)
    per_second = (second["x"] - first["x"]) / 0.003
    assert other["x"] - first["x"] == pytest.approx(0.0034 * per_second, abs=1)
    assert back["width"] - first["width"] == pytest.approx(0.002 * per_second, abs=1)


def test_the_time_axis_keeps_its_scale_while_a_step_fills(show):
    at = world(3)
    end = gpipe(at, 0, 3, 8, 0.0)
    shown = show("pipeline", at)
    ticks = shown.texts(".rb-axis text")
    for part in (0.01, 0.03, 0.06):
        gpipe(at, 1, 3, 8, end + 0.01, until=end + 0.01 + part)
        shown.move(at)
        assert shown.texts(".rb-axis text") == ticks
    assert shown.texts(".rb-stat")[0] == "step 1 "


def slider(shown):
    return shown.page.get_by_label("Step shown")


def steps(shown):
    """The step in the head line, and what the slider says of itself."""
    return shown.texts(".rb-stat")[0].split()[1], slider(shown).get_attribute("aria-valuetext")


def train(at, *numbers, start=0.0):
    """Complete steps, one after the other; only the last four are kept, as by a view."""
    for number in numbers:
        start = gpipe(at, number, 2, 4, start) + 0.001
        for worker in (1, 2):
            for table in ("ops", "steps"):
                rows = at[worker]["tables"][table]
                for key in [key for key, row in rows.items() if row["step"] <= number - 4]:
                    del rows[key]
    return start


def test_the_slider_goes_back_by_keys_and_stays_there_until_it_follows_again(show):
    at = world(2)
    end = train(at, 1, 2)
    shown = show("pipeline", at)
    for number in range(3, 9):
        end = train(at, number, start=end)
        shown.move(at)
    assert steps(shown) == ("8", "step 8, live")
    slider(shown).press("ArrowLeft")
    slider(shown).press("ArrowLeft")
    shown.page.evaluate("drawn()")
    assert steps(shown) == ("6", "step 6")
    blocks = "[data-op^='s6.']"
    assert shown.count(blocks) == shown.count(".rb-picture .rb-op") == 16
    for number in range(9, 14):
        end = train(at, number, start=end)
        shown.move(at)
    assert steps(shown) == ("6", "step 6")
    assert shown.count(blocks) == 16, "a step that is looked at stays, though the runtime has dropped it"
    assert shown.texts(".rb-stat")[1:3] == [f"{100 * idle_of(6):.1f} % idle", "20.0 % ideal"]
    slider(shown).press("End")
    shown.page.evaluate("drawn()")
    assert steps(shown) == ("13", "step 13, live")
    slider(shown).press("Home")
    shown.page.evaluate("drawn()")
    assert steps(shown) == ("1", "step 1")
    shown.page.get_by_role("button", name="newest").press("Enter")
    shown.page.evaluate("drawn()")
    train(at, 14, start=end)
    shown.move(at)
    assert steps(shown) == ("14", "step 14, live")


def idle_of(step):
    at = world(2)
    train(at, step)
    return PANELS["pipeline"].look(at)["steps"][str(step)]["idle"]


def test_one_step_alone_has_no_slider(show):
    at = world(2)
    train(at, 1)
    shown = show("pipeline", at)
    assert not slider(shown).is_visible()
    shown.move(world(2))
    assert shown.page.locator(".rb-hint").is_visible()


def test_a_step_whose_end_was_not_seen_is_not_kept(show):
    at = world(2)
    gpipe(at, 1, 2, 4, 0.0, until=0.02)
    shown = show("pipeline", at)
    late = world(2)
    train(late, 7, 8, start=1.0)
    shown.move(late)
    slider(shown).press("Home")
    shown.page.evaluate("drawn()")
    assert steps(shown) == ("7", "step 7")


def test_idle_stands_next_to_ideal_and_does_not_flicker_while_the_next_step_runs(show):
    at = world(2)
    end = train(at, 1)
    shown = show("pipeline", at)
    figures = [f"{100 * idle_of(1):.1f} % idle", "20.0 % ideal"]
    assert shown.texts(".rb-stat")[1:3] == figures
    for part in (0.004, 0.012, 0.02, 0.03, 0.04):
        gpipe(at, 2, 2, 4, end, until=end + part)
        shown.move(at)
        assert shown.texts(".rb-stat")[1:3] == [f"{figures[0]} in step 1", figures[1]]


def test_a_lane_says_what_it_waits_for_and_what_it_holds(show):
    at = world(2)
    gpipe(at, 1, 2, 4, 0.0, until=0.0145)  # the first stage has run all its forwards
    shown = show("pipeline", at)
    lane = shown.page.locator(".rb-lane[data-worker='1']")
    assert lane.get_attribute("data-next") == "0B0"
    assert lane.locator("text").all_text_contents()[1:3] == ["stage 0, waits for B0", "peak 1.2 MB"]
    assert "holds 1.2 MB, 1.2 MB at most" in lane.locator("title").text_content()
    assert shown.count(".rb-picture .rb-memory") == shown.count(".rb-picture .rb-waits") == 2


def test_a_failed_operation_and_those_of_other_schedules_are_told_apart(show):
    at = world(2)
    gpipe(at, 1, 2, 8, 0.0)
    rows = at[1]["tables"]["ops"]
    for key, (_, row) in zip("IWR?", list(rows.items()), strict=False):
        row["op"] = key
    rows["s1.w1.9"]["failed"] = True
    at[1]["tables"]["steps"]["s1.w1"]["state"] = "failed"
    shown = show("pipeline", at)
    for kind in ("I", "W", "R", "other"):
        assert shown.count(f".rb-picture .rb-op-{kind}") == 1
    assert shown.texts(".rb-legend > span")[2:6] == ["Iinput gradient", "Wweight gradient", "Rrecompute", "?other"]
    assert shown.texts("[data-op='s1.w1.9'] .rb-number") == ["!B1"]
    assert "failed after" in shown.page.locator("[data-op='s1.w1.9'] title").text_content()
    assert shown.texts(".rb-stat")[3].endswith("until it failed")


# ---- messages


def arrows(shown):
    """(key, state) of the messages that are drawn, from top to bottom."""
    rows = shown.page.locator("[data-message]").all()
    tops = {row.get_attribute("data-message"): row for row in rows}
    order = sorted(tops, key=lambda key: float(tops[key].get_attribute("transform").split()[1].rstrip(")")))
    return [(key, tops[key].get_attribute("data-state")) for key in order]


def drawn_line(shown, key):
    line = shown.page.locator(f"[data-message='{key}'] .rb-line")
    return [float(line.get_attribute(name)) for name in ("x1", "y1", "x2", "y2")]


def test_an_arrow_for_each_message_in_the_order_of_sending(show):
    at = world(2)
    keys = [send(at, 0, 1, "Call", 1.0), send(at, 1, 2, "Call", 2.0), send(at, 1, 0, "Result", 3.0, took=None)]
    shown = show("messages", at)
    assert arrows(shown) == [(keys[0], "received"), (keys[1], "received"), (keys[2], "under way")]
    assert shown.texts(".rb-stat")[:3] == ["3 messages", "0 filtered out", "1 under way"]
    middle = {}
    for name in ("notebook", "worker1"):
        box = shown.page.locator(".rb-top text", has_text=name).bounding_box()
        middle[name] = box["x"] + box["width"] / 2
    x1, _, x2, _ = drawn_line(shown, keys[0])
    assert x2 - x1 == pytest.approx(middle["worker1"] - middle["notebook"], abs=3)


def test_a_message_that_is_overtaken_slopes(show):
    at = world(2)
    slow, quick = send(at, 0, 1, "Call", 1.0, took=0.5), send(at, 0, 1, "Call", 1.1, took=0.1)
    shown = show("messages", at)
    _, y1, _, y2 = drawn_line(shown, quick)
    assert y1 == y2
    _, y1, _, y2 = drawn_line(shown, slow)
    assert y2 > y1


def test_a_message_that_was_under_way_arrives(show):
    at = world(2)
    key = send(at, 0, 1, "Call", 1.0, took=None)
    shown = show("messages", at)
    assert arrows(shown) == [(key, "under way")]
    arrive(at, key, 1.5)
    shown.move(at)
    assert arrows(shown) == [(key, "received")]


def test_what_is_told_late_is_read_where_it_belongs(show):
    """A reader of the screen goes by the document, whatever it was drawn after."""
    at = world(2)
    keys = [send(at, 0, 1, "Call", float(n)) for n in (2.0, 4.0)]
    shown = show("messages", at)
    keys = [send(at, 1, 0, "Result", 1.0), keys[0], send(at, 1, 0, "Result", 3.0), keys[1]]
    shown.move(at)
    rows = shown.page.locator("[data-message]").all()
    assert [row.get_attribute("data-message") for row in rows] == keys == [key for key, _ in arrows(shown)]


def test_of_ten_thousand_messages_only_those_in_sight_are_drawn(show):
    at = world(3)
    keys = [send(at, n % 3, 1 + n % 3, "Call", float(n)) for n in range(10_000)]
    shown = show("messages", at)
    assert shown.texts(".rb-stat")[0] == "10000 messages"
    assert 10 < shown.count("[data-message]") < 60 and arrows(shown)[0][0] == keys[0]
    shown.page.evaluate("document.querySelector('.rb-body').scrollTop = 1e9; drawn()")
    assert 10 < shown.count("[data-message]") < 60 and arrows(shown)[-1][0] == keys[-1]
    send(at, 0, 1, "Call", 20_000.0, label="late")
    shown.move(at)
    assert shown.page.locator("[data-message]", has_text="Call late").count() == 1  # who stands at the end stays there


def test_only_what_matches_is_shown(show):
    at = world(2)
    first = send(at, 0, 1, "Call", 1.0, call=5, label="train", rrefs=["0.4"])
    answer = send(at, 1, 0, "Result", 2.0, call=5)
    other = send(at, 1, 2, "Gradients", 3.0, context=7)
    notice = send(at, 1, 2, "Notice", 4.0, label="output")
    shown = show("messages", at)

    def seen(words, kind="all kinds"):
        shown.page.locator(".rb-tools select").select_option(kind)
        shown.page.locator(".rb-tools input").fill(words)
        return [key for key, _ in arrows(shown)]

    assert seen("", "all but notices") == [first, answer, other]
    assert seen("") == [first, answer, other, notice]
    assert seen("call:0.5") == [first, answer] and seen("call:0.55") == []
    assert seen("rref:0.4") == [first] and seen("context:7") == [other]
    assert seen("from:worker1 to:worker2") == [other, notice] and seen("at:notebook") == [first, answer]
    assert seen("TRAIN") == [first, answer]
    assert seen("worker1", "Gradients") == [other]


def test_a_click_or_the_arrow_keys_tell_a_message_in_words(show):
    at = world(2)
    send(at, 0, 1, "Call", 1.0, call=5, label=NASTY[1], rrefs=["0.4"], bytes=1500)
    answer = send(at, 1, 0, "Result", 2.0, call=5)
    shown = show("messages", at)
    shown.page.locator("[data-message] .rb-band").first.click(position={"x": 100, "y": 11})
    detail = shown.page.locator(".rb-detail[role=status]")
    words = f"Call {NASTY[1]}, notebook → worker1 at 0 µs, received 200 µs later, call 0.5, RRef 0.4, 1.5 kB of data"
    assert detail.text_content() == words
    shown.page.locator(".rb-body").press("ArrowDown")
    assert detail.text_content().startswith("Result")
    shown.page.locator(".rb-only button", has_text="call:0.5").click()
    assert len(arrows(shown)) == 2 and arrows(shown)[1][0] == answer
    assert shown.page.evaluate("window.hurt") is None


def dots(shown, key):
    """(worker, kind) of the dots of a collective."""
    found = shown.page.locator(f"[data-message='{key}'] .rb-dot").all()
    return [(int(dot.get_attribute("data-worker")), dot.get_attribute("class").split()[-1]) for dot in found]


def test_a_collective_is_a_row_of_dots_that_fills_and_then_tells_who_came_last(show):
    at = world(3)
    call = send(at, 0, 1, "Call", 1.0)
    key = meet(at, 7, {1: 2.0, 3: 2.1}, None)
    answer = send(at, 1, 0, "Result", 3.0)
    shown = show("messages", at)
    assert arrows(shown) == [(call, "received"), (key, "open"), (answer, "received")]
    assert shown.texts(".rb-stat") == ["2 messages", "1 collective", "0 filtered out", "0 under way", "1 open"]
    assert dots(shown, key) == [(1, "rb-came"), (3, "rb-came"), (2, "rb-missing")]
    row = shown.page.locator(f"[data-message='{key}']")
    said = row.locator("title").text_content()
    assert said.endswith("open, entered: worker1 worker3, missing: worker2, 16 B of data")
    x1, _, x2, _ = drawn_line(shown, key)
    names = [shown.page.locator(".rb-top text", has_text=name).bounding_box() for name in ("worker1", "worker3")]
    assert x2 - x1 == pytest.approx(names[1]["x"] - names[0]["x"], abs=3)
    meet(at, 7, {1: 2.0, 3: 2.1, 2: 2.5}, 2.6)
    shown.move(at)
    assert arrows(shown)[1] == (key, "done") and "1 open" not in shown.texts(".rb-stat")
    assert sorted(dots(shown, key)) == [(1, "rb-came"), (2, "rb-last"), (3, "rb-came")]
    row.locator(".rb-band").click(position={"x": 100, "y": 11})
    words = "all_reduce(SUM) of float32[4] in world #7 at 1.00 s, took 600.0 ms, worker2 came last, worker1 waited"
    assert shown.page.locator(".rb-detail[role=status]").text_content().startswith(f"{words} 500.0 ms, ")
    looks = "one => [getComputedStyle(one).fill, getComputedStyle(one).strokeWidth]"
    came, last = (row.locator(f".rb-{kind}").first.evaluate(looks) for kind in ("came", "last"))
    assert came[0] != last[0] and came[1] != last[1], "not by its colour alone"


def test_collectives_are_filtered_as_messages_are(show):
    at = world(2)
    call = send(at, 0, 1, "Call", 1.0)
    one, other = meet(at, 1, {1: 2.0, 2: 2.5}, 2.6), meet(at, 2, {1: 3.0}, 3.5, "new_group([0])", members=["worker1"])
    shown = show("messages", at)

    def seen(words, kind="all but notices"):
        shown.page.locator(".rb-tools select").select_option(kind)
        shown.page.locator(".rb-tools input").fill(words)
        return [key for key, _ in arrows(shown)]

    assert seen("") == [call, one, other] and seen("", "Collective") == [one, other]
    assert seen("at:worker2") == [one] and seen("new_group") == [other] and seen("from:worker1") == []
    assert shown.texts(".rb-stat")[:2] == ["0 messages", "3 filtered out"]


# ---- all panels


HINTS = {"rrefs": "rpc.remote(", "autograd": "context()", "pipeline": ".step(", "messages": "rpc_sync("}


@pytest.mark.parametrize(("name", "hint"), HINTS.items())
def test_an_empty_panel_says_what_to_do(show, name, hint):
    shown = show(name, world(2))
    assert hint in shown.page.locator(".rb-hint").inner_text()
    shown.move(busy_world())
    assert not shown.page.locator(".rb-hint").is_visible()


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


@pytest.mark.parametrize("name", PANELS)
def test_deltas_draw_the_same_picture_as_a_whole(show, name):
    shown = show(name, world(3))
    shown.move(busy_world())
    moved = settled(shown.page.locator(".rb-body"))
    assert settled(show(name, busy_world()).page.locator(".rb-body")) == moved


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_says_in_words_what_it_shows(show, name):
    shown = show(name, busy_world())
    picture = shown.page.locator(".rb-picture")
    assert picture.count() == 1
    assert picture.locator("> title").text_content() == {
        "rrefs": "RRefs", "autograd": "Autograd contexts", "pipeline": "Pipeline", "messages": "Messages",
    }[name]  # fmt: skip
    assert {
        "rrefs": "5 RRefs on 4 workers",
        "autograd": "1 autograd context",
        "pipeline": "Step 5, running",
        "messages": "4 messages, 1 under way, 0 lost",
    }[name] in picture.locator("> desc").text_content()


def test_after_a_gap_the_picture_waits_for_the_next_whole(show):
    at = world(2)
    shown = show("rrefs", at)
    own(at, 1, "0.0")
    missed = diff(shown.view, rref_view(at))
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
    for part in (".rb-stats", "table") if name == "workers" else (".rb-stats", ".rb-picture", ".rb-legend"):
        assert settled(first.locator(part)) == settled(second.locator(part))


def test_the_kernel_hears_when_a_view_opens_and_closes(show):
    shown = show("rrefs", world(2))
    shown.page.evaluate("window.close_()")
    opened, closed = shown.page.evaluate("sent")
    assert (opened["kind"], closed["kind"]) == ("opened", "closed")
    assert opened["eye"] == closed["eye"]


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
    assert shown.count(".rb-lane" if name == "pipeline" else ".rb-top > g") == workers + (name != "pipeline")
    wide, room = shown.page.eval_on_selector(".rb-body", "body => [body.scrollWidth, body.clientWidth]")
    assert wide <= room
