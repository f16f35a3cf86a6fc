"""The messages panel in a real browser: what stands in the page is what the view says."""

from __future__ import annotations

from datetime import datetime

import pytest
from pictures import arrive, meet, send, world
from shown import NASTY

from rpcbench.telemetry import message_views
from rpcbench.telemetry.summary import summarize_view

pytestmark = pytest.mark.browser


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
    assert shown.texts(".rb-stat") == ["3 messages", "1 in flight"]
    middle = {}
    for name in ("notebook", "worker1"):
        box = shown.page.locator(".rb-top text", has_text=name).bounding_box()
        middle[name] = box["x"] + box["width"] / 2
    x1, _, x2, _ = drawn_line(shown, keys[0])
    assert x2 - x1 == pytest.approx(middle["worker1"] - middle["notebook"], abs=3)


def test_times_stay_when_the_first_message_is_dropped_and_the_head_says_their_zero(show):
    at = world(2)
    keys = [send(at, 0, 1, "Call", 1.0), send(at, 0, 1, "Call", 3.5)]
    at[0]["zero"] = 1.0, datetime(2026, 5, 4, 19, 33, 1).timestamp()
    shown = show("messages", at)
    times = [*shown.texts(f"[data-message='{keys[1]}'] .rb-note"), *shown.texts(".rb-top .rb-note.rb-end")]
    assert times[0] == "2.50 s" and times[-2:] == ["after", "19:33:01"]
    for member in at.values():
        member["tables"].get("messages", {}).pop(keys[0], None)
    shown.move(at)
    assert arrows(shown) == [(keys[1], "received")]
    assert [*shown.texts(f"[data-message='{keys[1]}'] .rb-note"), *shown.texts(".rb-top .rb-note.rb-end")] == times
    del at[0]["zero"]  # as in a record
    shown.move(at)
    assert shown.texts(".rb-top .rb-note.rb-end") == ["after", "the first"]


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
    assert arrows(shown)[-1][0] == keys[-1], "a live panel begins at the end"
    shown.page.evaluate("document.querySelector('.rb-body').scrollTop = 0; drawn()")
    assert 10 < shown.count("[data-message]") < 60 and arrows(shown)[0][0] == keys[0]
    shown.page.evaluate("document.querySelector('.rb-body').scrollTop = 1e9; drawn()")
    send(at, 0, 1, "Call", 20_000.0, label="late")
    shown.move(at)
    assert shown.page.locator("[data-message]", has_text="call late").count() == 1  # who stands at the end stays there


def test_a_panel_whose_frame_gets_its_height_after_the_first_picture_begins_at_the_end(show):
    at = world(2)
    keys = [send(at, 1, 2, "Call", float(n)) for n in range(200)]
    lower = "height => { document.querySelector('.rb-body').style.maxHeight = height; return drawn(); }"
    shown = show("messages", {})
    shown.page.evaluate(lower, "none")  # as in a tab that has not measured its room
    shown.move(at)
    for height in ("400px", "300px"):
        shown.page.evaluate(lower, height)
        assert arrows(shown)[-1][0] == keys[-1]
    shown.page.evaluate("document.querySelector('.rb-body').scrollTop -= 2000; drawn()")
    keys.append(send(at, 1, 2, "Call", 500.0))
    shown.move(at)
    assert keys[-1] not in [key for key, _ in arrows(shown)], "who has scrolled up stays there"


def test_only_what_matches_is_shown(show):
    at = world(2)
    first = send(at, 0, 1, "Call", 1.0, call=5, label="train", rrefs=["0.4"])
    answer = send(at, 1, 0, "Result", 2.0, call=5)
    other = send(at, 1, 2, "Gradients", 3.0, context=7)
    notice = send(at, 1, 2, "Notice", 4.0, label="output")
    shown = show("messages", at)

    def seen(words, kind="all"):
        shown.page.locator(".rb-tools select").select_option(kind)
        shown.page.locator(".rb-tools input").fill(words)
        return [key for key, _ in arrows(shown)]

    assert seen("", "") == [first, answer, other]
    assert seen("") == [first, answer, other, notice]
    assert seen("call:0.5") == [first, answer] and seen("call:0.55") == []
    assert seen("rref:0.4") == [first] and seen("context:7") == [other]
    assert seen("from:worker1 to:worker2") == [other, notice] and seen("at:notebook") == [first, answer]
    assert seen("TRAIN") == [first, answer]
    assert seen("worker1", "autograd") == [other]
    assert seen("result of train") == [answer], "by its plain words"
    assert seen("nowhere") == [] and shown.texts(".rb-stat")[:2] == ["0 messages", "4 hidden"]
    assert shown.texts(".rb-hint") == ["All 4 messages are hidden: clear the search, or choose “all kinds”."]
    assert seen("") and not shown.page.locator(".rb-hint").is_visible()


def test_a_click_or_the_arrow_keys_tell_a_message_in_words(show):
    at = world(2)
    send(at, 0, 1, "Call", 1.0, call=5, label=NASTY[1], rrefs=["0.4"], bytes=1500)
    answer = send(at, 1, 0, "Result", 2.0, call=5)
    shown = show("messages", at)
    shown.page.locator("[data-message] .rb-band").first.click(position={"x": 100, "y": 11})
    detail = shown.page.locator(".rb-detail[role=status]")
    words = f"call {NASTY[1]}, notebook → worker1 at 0 µs, received 200 µs later, call 0.5, RRef 0.4, 1.5 kB of data, "
    words += "kind Call"
    assert detail.text_content() == words
    shown.page.locator(".rb-body").press("ArrowDown")
    assert detail.text_content().startswith("result of")
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
    assert shown.texts(".rb-stat") == ["2 messages", "1 collective", "0 in flight", "1 open"]
    assert dots(shown, key) == [(1, "rb-came"), (3, "rb-came"), (2, "rb-missing")]
    row = shown.page.locator(f"[data-message='{key}']")
    said = row.locator("title").text_content()
    assert said.endswith("open, entered: worker1 worker3, missing: worker2, worker2 is in no collective, 16 B of data")
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

    def seen(words, kind=""):
        shown.page.locator(".rb-tools select").select_option(kind)
        shown.page.locator(".rb-tools input").fill(words)
        return [key for key, _ in arrows(shown)]

    assert seen("") == [call, one, other] and seen("", "collective") == [one, other]
    assert seen("at:worker2") == [one] and seen("new_group") == [other] and seen("from:worker1") == []
    assert shown.texts(".rb-stat")[:2] == ["0 messages", "3 hidden"]


def test_what_was_kept_is_told_in_a_quiet_colour(show, monkeypatch):
    monkeypatch.setattr(message_views, "KEPT", 1000)
    at = world(2)
    for n in range(2500):
        send(at, 0, 1, "Call", float(n), took=None)
    at[0] |= {"counted": 2500, "trimmed": 1500}
    shown = show("messages", at)
    (kept,) = [one for one in shown.page.locator(".rb-stat").all() if "last" in one.text_content()]
    assert kept.text_content() == "last 1,000 of 2,500 messages" and "rb-warn" not in kept.get_attribute("class")


def test_after_a_clean_stop_nothing_is_lost_that_nobody_waits_for(show):
    at = world(2)
    send(at, 0, 1, "Call", 1.0)
    send(at, 1, 0, "UserDelete", 2.0, took=None, rrefs=["0.4"])
    for member in at.values():
        member["state"] = "left"
    shown = show("messages", at)
    assert [state for _, state in arrows(shown)] == ["received", "untold"]
    assert shown.count(".rb-stat.rb-warn") == 0 and shown.count(".rb-cross") == 0


def test_an_empty_panel_says_what_to_do(show):
    shown = show("messages", world(2))
    assert shown.texts(".rb-hint code") == ['cluster.rpc_sync("worker1", max, (1, 2))']
    assert show("messages", {}).texts(".rb-hint code") == ["%cluster start 2"]


@pytest.mark.parametrize("workers", [2, 8])
def test_a_long_line_is_level_where_it_passes_other_members(show, workers):
    at = world(workers)
    slow = send(at, 0, workers, "Call", 1.0, took=9.0)
    for n in range(1, workers):
        send(at, n, n + 1, "Call", 1.0 + n, took=0.5)
    shown = show("messages", at)
    box = "one => { const { x, y } = one.getPointAtLength(one.getTotalLength() * 0.4); return [x, y]; }"
    line = shown.page.locator(f"[data-message='{slow}'] .rb-line")
    assert line.evaluate(box)[1] == pytest.approx(12), "this part of its way is in its own row"
    ends = [line.evaluate(f"one => one.getPointAtLength({at}).y") for at in (0, 1e9)]
    assert ends[0] < ends[1]


@pytest.mark.parametrize(("source", "to"), [(0, 3), (3, 0)])
def test_a_long_line_bends_between_lifelines_not_where_it_passes_a_member(show, source, to):
    at = world(3)
    slow = send(at, source, to, "Call", 1.0, took=9.0)
    send(at, 1, 2, "Call", 2.0)
    shown = show("messages", at)
    lanes = [float(one.get_attribute("x1")) for one in shown.page.locator(".rb-life").all()]
    way = shown.page.locator(f"[data-message='{slow}'] .rb-line").get_attribute("d")
    start, bend, end = (float(point.split()[0]) for point in way.removeprefix("M").split("L"))
    assert start == lanes[source] and end == pytest.approx(lanes[to], abs=2)
    assert min(abs(bend - lane) for lane in lanes) > 0.3 * (lanes[1] - lanes[0])
    low, high = sorted((lanes[to], lanes[to + (1 if source > to else -1)]))
    assert low < bend < high


@pytest.mark.parametrize("many", [5, 60])
def test_an_open_collective_is_in_sight_with_its_missing_member_once_collectives_are_chosen(show, many):
    at = world(4)
    for n in range(many):
        send(at, 0, 1 + n % 4, "Call", 1.0 + n)
        meet(at, n, {member: 1.5 + n + member / 100 for member in (1, 2, 3, 4)}, 1.6 + n)
    meet(at, many, {1: 100.0, 2: 100.0, 4: 100.0}, None, "barrier")
    shown = show("messages", at)
    shown.page.locator(".rb-tools select").select_option("collective")
    shown.page.evaluate("drawn()")
    missing = shown.page.locator("[data-state='open'] .rb-missing")
    box, body = missing.bounding_box(), shown.page.locator(".rb-body").bounding_box()
    assert shown.texts(".rb-legend span") == ["collectives", "came last", "missing"]
    assert body["y"] < box["y"] and box["y"] + box["height"] < body["y"] + body["height"]


def test_the_legend_names_what_is_drawn_and_nothing_else(show):
    at = world(2)
    send(at, 0, 1, "Call", 1.0)
    send(at, 2, 1, "Parcel", 2.0, label="B2 for stage 0", took=None)
    shown = show("messages", at)
    assert shown.texts(".rb-legend span") == ["calls", "gradients between stages", "in flight"]
    assert shown.texts(".rb-what") == ["call", "gradient of micro-batch 2 → stage 0"]


# ---- a list that stands still


def live(shown, at, *labels):
    """Calls come, one for each label; the keys."""
    first = 100 + len(at[0]["tables"].get("messages", {}))
    keys = [send(at, 0, 1, "Call", float(first + n), label=label) for n, label in enumerate(labels)]
    shown.move(at)
    return keys


def in_sight(shown):
    """The keys of the rows in the body's view, from top to bottom, each with its place."""
    body = shown.page.locator(".rb-body").bounding_box()
    found = [(row.get_attribute("data-message"), row.locator(".rb-band").bounding_box()["y"])
             for row in shown.page.locator("[data-message]").all()]  # fmt: skip
    return [(key, y) for key, y in found if body["y"] + 44 <= y <= body["y"] + body["height"] - 24]


@pytest.fixture
def busy(show):
    """A panel with more messages than it has room for, and its world."""
    at = world(2)
    for n in range(60):
        send(at, 0, 1 + n % 2, "Call", float(n), label=f"step {n}")
    shown = show("messages", at)
    shown.page.mouse.move(500, 690)
    yield shown, at
    shown.page.mouse.move(500, 690)


def over(shown, y=0.5):
    box = shown.page.locator(".rb-body").bounding_box()
    shown.page.mouse.move(box["x"] + 100, box["y"] + y * box["height"])
    shown.page.evaluate("drawn()")


def test_the_list_stands_still_under_the_pointer_and_goes_on_when_it_leaves(busy):
    shown, at = busy
    over(shown)
    before = in_sight(shown)
    waits = send(at, 1, 0, "Result", 90.0, took=None)
    live(shown, at, "a", "b")
    assert in_sight(shown) == before and shown.texts(".rb-news button") == ["3 new"]
    key = send(at, 0, 1, "Call", 95.0, took=None)
    shown.page.mouse.move(500, 690)
    shown.page.evaluate("drawn()")
    *_, last = live(shown, at, "c")
    assert in_sight(shown)[-1][0] == last and not shown.page.locator(".rb-news button").is_visible()
    over(shown)
    arrive(at, waits, 200.0)
    arrive(at, key, 201.0)
    live(shown, at, "d")
    assert shown.texts(".rb-news button") == ["1 new, 2 changed"]


def test_a_row_that_was_clicked_stays_while_its_sentence_is_shown(busy):
    shown, at = busy
    box = in_sight(shown)[3]
    shown.page.mouse.click(150, box[1] + 10)
    shown.page.mouse.move(500, 690)
    live(shown, at, *"abcdefghijklmnopqrstuvwxyz")
    assert box in in_sight(shown) and shown.page.locator(".rb-detail").inner_text().startswith("call step")
    assert shown.texts(".rb-news button") == ["26 new"]
    shown.page.get_by_role("button", name="Close, and go on with the list").click()
    assert box not in in_sight(shown) and shown.texts(".rb-detail") == [""]
    assert shown.texts(".rb-what")[-1] == "call z"


@pytest.mark.parametrize("end", ["Escape", "news", "again"])
def test_the_list_goes_on_as_the_user_wishes(busy, end):
    shown, at = busy
    shown.page.locator(".rb-body").press("ArrowDown")  # the first message
    assert shown.count(".rb-chosen") == 1
    live(shown, at, *"abcdef")
    if end == "Escape":
        shown.page.keyboard.press("Escape")
        shown.page.evaluate("document.activeElement.blur()")
    elif end == "news":
        shown.page.locator(".rb-news button").click()
    else:
        shown.page.locator(".rb-chosen").dispatch_event("click")
        shown.page.evaluate("document.activeElement.blur()")
    shown.page.mouse.move(500, 690)
    shown.page.evaluate("drawn()")
    assert shown.count(".rb-chosen") == 0 and not shown.page.locator(".rb-news button").is_visible()
    if end == "news":
        assert shown.texts(".rb-what")[-1] == "call f"


def test_the_list_stands_still_while_it_has_the_focus(busy):
    shown, at = busy
    shown.page.locator(".rb-tools select").focus()
    shown.page.keyboard.press("Tab")
    while not shown.page.evaluate("document.activeElement.matches('.rb-body')"):
        shown.page.keyboard.press("Tab")
    before = in_sight(shown)
    live(shown, at, *"abc")
    assert in_sight(shown) == before and shown.texts(".rb-news button") == ["3 new"]
    shown.page.keyboard.press("Shift+Tab")
    shown.page.evaluate("drawn()")
    assert shown.texts(".rb-what")[-1] == "call c"


def test_news_are_those_that_the_filter_keeps(busy):
    shown, at = busy
    shown.page.locator(".rb-tools input").fill("yes")
    over(shown)
    live(shown, at, "yes", "no", "yes")
    assert shown.texts(".rb-news button") == ["2 new"]


def test_rows_in_sight_stay_where_they_are_as_others_come_and_go(busy):
    shown, at = busy
    shown.page.evaluate("document.querySelector('.rb-body').scrollTop = 24 * 30; drawn()")
    before = in_sight(shown)
    for key in list(at[0]["tables"]["messages"])[:20]:
        for member in at.values():
            member["tables"].get("messages", {}).pop(key, None)
    live(shown, at, *"abc")
    assert in_sight(shown) == before, "old messages were dropped above them, and new ones came below"


def test_a_record_is_not_held(busy):
    shown, at = busy
    shown.page.evaluate("models[0].get_ ??= models[0].get")
    shown.page.evaluate(
        "() => { models[0].get = name => name === 'phase' ? {name: 'record', at: 0} : models[0].get_(name); }"
    )
    shown.page.evaluate("() => { models[0].say('change:phase'); return drawn(); }")
    over(shown)
    live(shown, at, "a")
    assert shown.texts(".rb-stat")[0] == "61 messages" and not shown.page.locator(".rb-news button").is_visible()


# ---- sums of collectives


def meetings(at, first, many, late):
    """Collectives of two workers, of which the one `late(n)` comes 0.3 seconds after the other one."""
    for n in range(first, first + many):
        meet(at, n, {w: 10.0 + n + (0.3 if w == late(n) else 0) for w in (1, 2)}, 10.5 + n)


def test_a_sum_says_who_came_last(show):
    at = world(2)
    meetings(at, 1, 4, lambda n: 2)
    shown = show("messages", at)
    assert not shown.page.locator(".rb-late").is_visible(), "each row says it"
    meetings(at, 5, 6, lambda n: 1 if n > 8 else 2)
    shown.move(at)
    words = "worker2 came last in 80 % of 10 collectives: the others waited 300.0 ms each time, 2.4 s in all"
    assert shown.texts(".rb-late") == [words]
    assert f"  {words}\n" in summarize_view(shown.view)


def test_of_many_collectives_the_head_says_how_many_there_were(show, monkeypatch):
    monkeypatch.setattr(message_views, "PARTS_KEPT", 8)
    at = world(2)
    meetings(at, 93, 7, lambda n: 1)
    shown = show("messages", at)
    assert "7 collectives" in shown.texts(".rb-stat"), "they began before somebody watched, and none was dropped"
    meetings(at, 100, 1, lambda n: 1)
    meet(at, 101, {1: 300.0}, None)
    shown.move(at)
    assert "last 9 of 101 collectives of these groups" in shown.texts(".rb-stat")
    assert ", last 9 of 101 collectives" in summarize_view(shown.view)


@pytest.mark.parametrize("state", ["lost", "left"])
def test_a_slanted_name_and_its_state_are_not_cut(show, page, state):
    at = world(8)
    at[4]["state"] = at[8]["state"] = state
    at[6]["name"] = "a-worker-with-a-long-name"
    at[6]["state"] = state
    send(at, 0, 1, "Call", 1.0)
    shown = show("messages", at)
    top = shown.page.locator(".rb-body").bounding_box()["y"]
    for name in shown.page.locator(".rb-top text").all():
        box = name.bounding_box()
        assert box["y"] >= top, name.text_content()
    assert {"lost": "worker4 · lost", "left": "worker4 · stopped"}[state] in shown.texts(".rb-top text")
