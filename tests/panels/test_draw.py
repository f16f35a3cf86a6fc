"""The drawing code in a real browser: what stands in the page is what the view says, whatever names workers have."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
from pictures import gpipe, own, record, run_backward, use, world

from rpcbench.panels import PANELS
from rpcbench.telemetry.views import diff, rref_view

pytestmark = pytest.mark.browser

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
NASTY = ["notebook", "<img src=x onerror='window.hurt=1'>", "</text><script>window.hurt=1</script>", "&amp;\"'" * 20]

# A stand-in for the widget model that a notebook's front end gives to the module.
HOST = """
window.models = [];
window.sent = [];
window.open_ = async (esm, css, state) => {
  document.head.append(Object.assign(document.createElement('style'), {textContent: css}));
  const module = await import(URL.createObjectURL(new Blob([esm], {type: 'text/javascript'})));
  const ears = {}, data = {state, problem: ''};
  const model = {
    get: name => data[name], off() {}, send: message => window.sent.push(message),
    on: (name, ear) => (ears[name] ??= []).push(ear),
    say: (name, value) => (ears[name] ?? []).forEach(ear => ear(value)),
    change: (name, value) => { data[name] = value; model.say('change:' + name); },
  };
  model.widget = module.default();
  await model.widget.initialize({model});
  return window.models.push(model) - 1;
};
window.view = async index => {
  const el = document.createElement('div');
  document.body.replaceChildren(...document.body.children, el);
  window.close_ = await window.models[index].widget.render({model: window.models[index], el});
  await window.drawn();
};
window.drawn = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())));
"""


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
    return at


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


def test_a_thousand_rrefs_are_counted_even_if_not_all_are_drawn(show):
    at = world(3)
    for i in range(1000):
        own(at, 1 + i % 3, f"0.{i}")
    shown = show("rrefs", at)
    assert shown.count(".rb-row") == 400
    assert shown.texts(".rb-picture > text") == ["… and 600 more, not drawn"]
    assert shown.texts(".rb-stat")[0] == "1000 RRefs"


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
    assert first["y"] == second["y"] == back["y"] < other["y"]
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


# ---- all panels


HINTS = {"rrefs": "rpc.remote(", "autograd": "context()", "pipeline": ".step("}


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
    shown = show(name, at)
    shown.move(busy_world(NASTY))
    assert shown.count(".rb-panel img, .rb-panel script") == 0
    assert shown.page.evaluate("window.hurt") is None
    assert any(NASTY[1] in words for words in shown.texts("title"))


@pytest.mark.parametrize("name", PANELS)
def test_deltas_draw_the_same_picture_as_a_whole(show, name):
    shown = show(name, world(3))
    shown.move(busy_world())
    moved = settled(shown.page.locator(".rb-body"))
    assert settled(show(name, busy_world()).page.locator(".rb-body")) == moved


@pytest.mark.parametrize("name", PANELS)
def test_the_picture_says_in_words_what_it_shows(show, name):
    shown = show(name, busy_world())
    picture = shown.page.locator("svg[role=img]")
    assert picture.count() == 1
    assert picture.locator("> title").text_content() == {
        "rrefs": "RRefs", "autograd": "Autograd contexts", "pipeline": "Pipeline",
    }[name]  # fmt: skip
    assert {"rrefs": "5 RRefs on 4 workers", "autograd": "1 autograd context", "pipeline": "Step 5, running"}[
        name
    ] in picture.locator("> desc").text_content()


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
    for part in (".rb-stats", ".rb-picture", ".rb-legend"):
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


@pytest.mark.parametrize("name", PANELS)
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


@pytest.mark.parametrize("name", PANELS)
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
