"""Panels in narrow frames: one line for the head, a menu for the controls, no sideways scrolling, one first screen."""

from __future__ import annotations

import pytest
from pictures import ask, gpipe, meet, record, send, tell, world
from shown import Shown, busy_world

from rpcbench.panels import PANELS

pytestmark = pytest.mark.browser

ROW = 40  # pixels: the most that a head of one line has
COLUMN = 284  # a panel of 268 pixels beside the sidebar, and the margins of the page
WIDE = ("autograd", "compare", "rrefs")  # their pictures scroll there
BOARD = ("workers", "pipeline", "progress", "autograd", "messages")  # as in `extension/src/panelTab.ts`
BOARD_STYLE = """
    body { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 8px; margin: 0;
           align-content: start; align-items: start; padding: 8px; }
    .rb-panel .rb-body { max-height: 270px; }"""


def training(workers):
    """Workers that train a pipeline, have a context, and meet."""
    at = world(workers)
    end = 100.0
    for step in range(1, 6):
        end = gpipe(at, step, workers, 8, end + 0.01)
        at[workers]["tables"]["steps"][f"s{step}.w{workers}"] |= {"loss": 1 / step, "samples": 128}
    record(at, 1 << 48, [(m, 1, 2) for m in range(4)], {0: 0, 1: 4, 2: 4})
    for n in range(40):
        send(at, n % 3, (n + 1) % 3, "Call", 50 + n / 10, label="train_step", bytes=2500 * n)
        meet(at, n + 1, {w: 50 + n / 5 + (0.29 if w == 2 else 0) for w in range(1, workers + 1)}, 50.4 + n / 5)
    for worker in range(workers + 1):
        tell(at, worker, busy=1, cells=int(worker == 1), memory=215_000_000)
    return at


@pytest.fixture
def at_width(page):
    """`at_width(pixels)` sets the width of the page, for this test."""
    yield lambda width: page.set_viewport_size({"width": width, "height": 700})
    page.set_viewport_size({"width": 1000, "height": 700})


def opener(shown, within=".rb-head"):
    return shown.page.locator(f"{within} .rb-menu-button")


def focused(shown):
    return shown.page.evaluate("document.activeElement.getAttribute('aria-label')")


@pytest.mark.parametrize("width", [COLUMN, 370])
@pytest.mark.parametrize("name", PANELS)
def test_the_head_of_a_narrow_panel_is_one_line_with_a_menu(show, at_width, name, width):
    at_width(width)
    shown = show(name, busy_world())
    head = shown.page.locator(".rb-head")
    assert head.evaluate("one => one.offsetHeight") <= ROW
    wide, room = head.evaluate("one => [one.scrollWidth, one.clientWidth]")
    assert wide <= room and not shown.page.locator(".rb-asker").is_visible()
    box = opener(shown).bounding_box()
    assert box["x"] + box["width"] < width
    opener(shown).click()
    assert all(text in shown.texts(".rb-menu")[0] for text in shown.texts(".rb-stat b"))
    for title in ("What does this panel show?", "Leave a snapshot in the notebook"):
        assert shown.page.locator(".rb-menu").get_by_role("button", name=title).is_visible()


@pytest.mark.parametrize("width", [COLUMN, 375])
def test_a_search_in_the_menu_is_told_in_the_head_and_cleared_there(show, at_width, width):
    at_width(width)
    shown, rows = show("messages", training(2)), ".rb-message"
    sought = shown.page.get_by_role("button", name="\N{MULTIPLICATION SIGN}").filter(has_text="nothing such")
    before = shown.page.locator(rows).count()
    opener(shown).click()
    shown.page.locator(".rb-menu").get_by_role("searchbox").fill("nothing such")
    shown.page.keyboard.press("Escape")
    shown.page.evaluate("drawn()")
    assert before > 0 and shown.page.locator(rows).count() == 0
    wide, room = shown.page.locator(".rb-head").evaluate("one => [one.scrollWidth, one.clientWidth]")
    assert wide <= room and sought.is_visible() and opener(shown).is_visible()
    sought.click()
    shown.page.evaluate("drawn()")
    assert shown.page.locator(rows).count() == before and not sought.is_visible()


@pytest.mark.parametrize("width", [COLUMN, 375])
@pytest.mark.parametrize("phase", ["live", "stopped"])
@pytest.mark.parametrize("name", ["traffic", "messages"])
def test_the_name_of_its_cluster_and_the_time_of_its_end_are_whole(show, at_width, name, phase, width):
    at_width(width)
    shown = show(name, busy_world())
    phase = {"name": phase, "at": 1_700_000_000.0}
    shown.page.evaluate(
        "([i, p]) => { models[i].change('cluster', 'other'); models[i].change('phase', p); return drawn(); }",
        [shown.index, phase],
    )
    for part in (".rb-cluster", ".rb-chip"):
        one = shown.page.locator(part)
        assert one.is_visible() and one.evaluate("one => one.scrollWidth - one.clientWidth") == 0, part
    assert shown.texts(".rb-cluster") == ["of other"]
    assert sideways(shown, ".rb-head") == 0
    box = opener(shown).bounding_box()
    assert box["x"] + box["width"] < width


def sideways(shown, part=".rb-body"):
    """How many pixels wider than its frame a part is."""
    return shown.page.eval_on_selector(part, "one => one.scrollWidth - one.clientWidth")


@pytest.mark.parametrize("width", [370, 400, 500])
@pytest.mark.parametrize("name", BOARD)
def test_a_narrow_panel_does_not_scroll_sideways(show, at_width, name, width):
    at_width(width)
    assert sideways(show(name, training(4))) == 0


@pytest.mark.parametrize("name", [name for name in PANELS if name not in WIDE])
def test_a_column_beside_the_sidebar_has_room_for_a_panel(show, at_width, name):
    at_width(COLUMN)
    assert sideways(show(name, busy_world())) == 0


@pytest.mark.parametrize("width", [COLUMN, 400, 700])
@pytest.mark.parametrize("members", [0, 2])
@pytest.mark.parametrize("name", [name for name in PANELS if name != "workers"])
def test_the_advice_of_an_empty_panel_is_in_sight_as_a_whole(show, at_width, name, members, width):
    at_width(width)
    shown = show(name, world(members) if members else {})
    hint, body = (shown.page.locator(part).bounding_box() for part in (".rb-hint", ".rb-body"))
    assert hint["height"] > 20 and hint["y"] + hint["height"] <= body["y"] + body["height"] + 1
    assert sideways(shown) == 0 or name == "rrefs"  # whose columns have their names already


@pytest.mark.parametrize("width", [COLUMN, 700])
def test_without_workers_their_panel_says_how_to_start_them(show, at_width, width):
    at_width(width)
    hint = show("workers", {}).page.locator(".rb-hint")
    assert hint.is_visible() and "%cluster start 2" in hint.inner_text() and hint.bounding_box()["height"] > 20


def test_the_menu_of_a_worker_is_in_sight_beside_the_sidebar(show, at_width):
    at_width(COLUMN)
    shown = show("workers", training(4))
    box = opener(shown, "tr[data-worker='4']").bounding_box()
    assert box["x"] + box["width"] <= COLUMN and "memory" in "".join(shown.texts(".rb-folded"))


@pytest.mark.parametrize("width", [275, 1000])
def test_a_comparison_has_its_first_difference_in_sight(show, at_width, width):
    at_width(width)
    shown = show("compare", busy_world())
    first, body = (shown.page.locator(part).bounding_box() for part in (".rb-row .rb-first", ".rb-body"))
    assert body["x"] <= first["x"] and first["x"] + first["width"] <= body["x"] + body["width"]
    at_width(275)
    shown.page.evaluate("drawn()")
    first = shown.page.locator(".rb-row .rb-first").bounding_box()
    assert first["x"] + first["width"] <= 275


@pytest.mark.parametrize("width", [COLUMN, 500])
def test_what_the_marks_of_a_comparison_mean_is_written_within_its_frame(show, at_width, width):
    at_width(width)
    lines = show("compare", busy_world()).page.locator(".rb-key-line text")
    ends = [box["x"] + box["width"] for box in (line.bounding_box() for line in lines.all())]
    assert len(ends) > 3 and max(ends) <= width


def test_heads_of_ranks_are_whole_in_a_narrow_frame(show, at_width):
    at_width(355)
    shown = show("shards", busy_world())
    cut = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.textContent)"
    assert shown.page.eval_on_selector_all("thead :is(.rb-name, .rb-note)", cut) == []
    assert shown.page.locator("thead .rb-percent").first.is_visible()


@pytest.mark.parametrize("world_of", [training, world])
def test_the_first_screen_of_a_narrow_dashboard_has_a_picture_and_the_next_head(show, page, at_width, world_of):
    at_width(370)
    show("workers", {})
    page.evaluate("document.body.replaceChildren()")
    page.add_style_tag(content=BOARD_STYLE)
    for name in BOARD:
        Shown(page, name).open(world_of(4))
    bottom = "one => one.getBoundingClientRect().bottom"
    for part in (".rb-workers", ".rb-pipeline .rb-body", ".rb-progress .rb-head"):
        assert page.eval_on_selector(part, bottom) <= 700, [part, page.eval_on_selector(part, bottom)]
    assert page.locator(".rb-pipeline .rb-op").count() > 0 or page.locator(".rb-pipeline .rb-hint").is_visible()


def test_controls_go_into_the_menu_and_come_back_as_they_were(show, page, at_width):
    shown = show("messages", training(2))
    search = shown.page.locator("input[type=search]")
    search.fill("train")
    controls = "[...document.querySelectorAll('.rb-head :is(button, input, select)')]"
    order = f"{controls}.map(one => one.className || one.type)"
    before = page.evaluate(order)
    at_width(370)
    page.evaluate("drawn()")
    assert not search.is_visible()
    opener(shown).click()
    assert search.is_visible() and search.input_value() == "train"
    at_width(1000)
    page.evaluate("drawn()")
    assert page.evaluate(order) == before and search.is_visible() and not opener(shown).is_visible()


def test_a_menu_by_keys(show, at_width):
    at_width(370)
    at = busy_world()
    del at[0]["tables"]["actions"]
    shown = show("workers", at)
    button = opener(shown, "tr[data-worker='2']")
    keys = shown.page.keyboard
    for key in ("Enter", " ", "ArrowDown"):
        button.press(key)
        assert button.get_attribute("aria-expanded") == "true" and focused(shown) == "stack worker2"
        keys.press("Escape")
        assert button.get_attribute("aria-expanded") == "false" and focused(shown) == "What to do with worker2"
    button.press("Enter")
    walk = []
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "Home", "End"):
        keys.press(key)
        walk.append(focused(shown).split()[0])
    assert walk == ["interrupt", "restart", "stack", "restart", "stack", "restart"]
    keys.press("Enter")
    assert shown.page.locator(".rb-menu [data-sure]").inner_text() == "sure?", "it stays open for the second press"
    keys.press("Enter")
    assert shown.sent("act") == [{"kind": "act", "action": "restart", "target": "worker2"}]
    assert not shown.page.get_by_role("menu").is_visible() and focused(shown) == "What to do with worker2"


def test_a_menu_stays_while_its_table_is_drawn_anew_and_ends_with_its_row(show, at_width):
    at_width(370)
    at = training(3)
    shown = show("workers", at)
    opener(shown, "tr[data-worker='3']").click()
    menu = shown.page.get_by_role("menu", name="What to do with worker3")
    shown.page.keyboard.press("ArrowDown")
    for n in range(5):
        tell(at, 1, cpu=n / 10)
        shown.move(at)
        shown.whole(shown.version + 1, shown.view)
        shown.version += 1
        assert menu.is_visible() and focused(shown) == "interrupt worker3"
    ask(at, "restart", "worker3")
    shown.move(at)
    assert menu.get_by_role("menuitem", name="restart").get_attribute("aria-disabled") == "true"
    shown.move({id_: member for id_, member in at.items() if id_ != 3})
    assert not menu.is_visible() and shown.count(".rb-menu[role=menu]") == 0


def test_a_menu_lies_above_its_panel_within_the_page_and_closes_on_a_click_outside(show, at_width):
    at_width(370)
    shown = show("workers", training(4))
    opener(shown, "tr[data-worker='4']").click()
    menu = shown.page.get_by_role("menu", name="What to do with worker4")
    box, panel = menu.bounding_box(), shown.page.locator(".rb-panel").bounding_box()
    assert box["y"] + box["height"] > panel["y"] + panel["height"], "it is not cut by the panel"
    assert box["x"] >= 0 and box["x"] + box["width"] <= 370
    restart = menu.get_by_role("menuitem", name="restart").bounding_box()
    at_point = f"document.elementFromPoint({restart['x'] + 9}, {restart['y'] + 9}).textContent"
    assert shown.page.evaluate(at_point) == "restart"
    shown.page.mouse.click(60, 20)
    assert not menu.is_visible()
    opener(shown, "tr[data-worker='4']").click()
    opener(shown).click()
    assert not menu.is_visible() and shown.page.get_by_role("dialog").is_visible()
    shown.page.keyboard.press("Escape")
    opener(shown, "tr[data-worker='4']").click()
    at_width(1000)
    shown.page.evaluate("drawn()")
    assert not menu.is_visible(), "its button has gone: the row has room for those in it"


@pytest.mark.parametrize("width", [370, 600, 700])
def test_the_picture_of_a_pipeline_stands_still_whatever_the_text_above_it_says(show, page, at_width, width):
    at_width(width)
    at = training(3)
    shown = show("pipeline", at)
    top = "document.querySelector('.rb-body').getBoundingClientRect().top"
    places = []
    for step, late in ((6, 0.0), (7, 0.012), (8, 0.0), (9, 0.012)):
        gpipe(at, step, 3, 8, 101.0 + step)
        for key, op in list(at[2]["tables"]["ops"].items()):
            if op["step"] == step and late and op["op"] == "F":  # longer, so another sentence
                at[2]["tables"]["ops"][key] = {**op, "end": op["end"] + late * (op["microbatch"] == 7)}
        at[3]["tables"]["steps"][f"s{step}.w3"] |= {"samples": 128} | ({"loss": 1e-9} if late else {})
        shown.move(at)
        places.append(page.evaluate(top))
    assert places[1:] == places[1:2] * 3 and places[0] <= places[1]


@pytest.mark.parametrize("width", [270, 355, 500])
def test_a_narrow_frame_has_room_for_the_whole_sentence_on_the_bubble(show, at_width, width):
    at_width(width)
    shown = show("pipeline", training(4))
    sentence = shown.page.locator(".rb-sentence")
    words = "Bubble 91 %, minimum 11 %: 39 points overhead between operations, 38 transfer, 2 waiting for worker2, "
    words += "1 other"
    tall = sentence.evaluate("one => one.clientHeight")
    sentence.evaluate("(one, words) => one.textContent = words", words)
    assert sentence.evaluate("one => one.scrollHeight <= one.clientHeight && one.clientHeight") == tall


@pytest.mark.parametrize("width", [290, 375])
def test_in_a_narrow_panel_stage_and_micro_batch_can_be_read(show, at_width, width):
    at_width(width)
    at = world(2)
    send(at, 1, 2, "Parcel", 1.0, label="F3 for stage 1")
    send(at, 2, 1, "Parcel", 2.0, label="B12 for stage 0")
    shown = show("messages", at)
    for text, form in zip(shown.texts(".rb-message .rb-what"), ("1F3", "0B12"), strict=True):
        assert text.endswith(form)
    tips = shown.texts(".rb-message title")
    assert "micro-batch 3 → stage 1" in tips[0] and "micro-batch 12 → stage 0" in tips[1]
