"""The logs panel in a real browser: tabs, levels, search, and a list that follows its end until it is scrolled up."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import say, world

from rpcbench.panels import LogsPanel
from rpcbench.telemetry.collector import Phase
from rpcbench.telemetry.svg import Snapshot

pytestmark = pytest.mark.browser

AT_END = "(b => b.scrollHeight - b.scrollTop - b.clientHeight < 2)(document.querySelector('.rb-body'))"


def talk():
    at = world(3)
    del at[0]
    say(at, 1, "first", "WARNING:train:loss is high")
    say(at, 2, "second of worker2", "Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: First")
    say(at, 1, "third")
    say(at, 3, missing="")
    return at


@pytest.fixture(autouse=True)
def usual_page(page):
    yield
    page.set_viewport_size({"width": 1000, "height": 700})
    page.emulate_media(color_scheme="light")


def lines(shown):
    return shown.texts(".rb-line")


def choose(shown, level):
    shown.page.locator(".rb-tools select").select_option(level)


def tab(shown, name):
    shown.page.locator(".rb-tab").get_by_text(name, exact=True).click()


def test_lines_of_all_are_in_the_order_in_which_they_were_seen_each_with_its_worker(show):
    shown = show("logs", talk())
    assert lines(shown) == [
        "worker1first", "worker1WARNING:train:loss is high", "worker2second of worker2",
        "worker2Traceback (most recent call last):", 'worker2  File "x.py", line 1', "worker2ValueError: First",
        "worker1third",
    ]  # fmt: skip
    assert shown.texts(".rb-stat") == ["1 error", "1 warning", "3 workers", "7 lines"]
    assert shown.count(".rb-level-w") == 1 and shown.count(".rb-line.rb-level-e") == 3


def test_a_tab_has_one_worker_and_its_mark_for_errors(show):
    shown = show("logs", talk())
    assert shown.texts(".rb-tab") == ["all", "worker1", "worker2", "worker3"]
    assert shown.texts(".rb-has-errors") == ["worker2"]
    assert shown.page.locator(".rb-has-errors").get_attribute("aria-label") == "worker2, 1 error"
    tab(shown, "worker1")
    assert lines(shown) == ["first", "WARNING:train:loss is high", "third"]
    shown.page.keyboard.press("ArrowRight")
    assert lines(shown)[0] == "second of worker2"
    assert shown.page.evaluate("document.activeElement.textContent") == "worker2"
    shown.page.keyboard.press("ArrowRight")
    assert lines(shown) == [] and shown.texts(".rb-none") == ["worker3 has written nothing outside cells."]
    shown.page.keyboard.press("ArrowRight")
    assert len(lines(shown)) == 7


def test_levels_hide_other_lines_and_keep_events(show):
    at = talk()
    say(at, 2, "worker2 was restarted at 14:03", kind="event")
    shown = show("logs", at)
    choose(shown, "warnings")
    assert len(lines(shown)) == 4
    choose(shown, "errors")
    assert len(lines(shown)) == 3 and shown.texts(".rb-event") == ["worker2 was restarted at 14:03"]
    tab(shown, "worker1")
    assert lines(shown) == [] and shown.texts(".rb-none") == ["No line is an error."]
    choose(shown, "warnings")
    assert lines(shown) == ["WARNING:train:loss is high"] and shown.texts(".rb-none") == [""]


def test_where_nobody_has_written_but_a_restart_is_told_no_worker_is_named(show):
    at = world(2)
    del at[0]
    say(at, 1, "worker1 was restarted at 14:03", kind="event")
    say(at, 2, missing="")
    assert show("logs", at).texts(".rb-none") == ["No worker has written anything outside cells."]


def test_matches_are_marked_counted_and_enter_goes_on(show):
    shown = show("logs", talk())
    field = shown.page.locator(".rb-tools input")
    field.fill("FIRST")
    assert shown.texts("mark") == ["first", "First"] and shown.texts(".rb-found") == ["2 matches"]
    seen = []
    for key in ("Enter", "Enter", "Enter", "Shift+Enter"):
        field.press(key)
        seen.append((shown.texts(".rb-found")[0], shown.texts("mark.rb-lit")[0]))
    assert seen == [("1 of 2", "first"), ("2 of 2", "First"), ("1 of 2", "first"), ("2 of 2", "First")]
    field.fill("i")
    shown.page.keyboard.press("Enter")
    assert shown.texts(".rb-found")[0].startswith("1 of ")
    field.fill("nowhere")
    assert shown.texts(".rb-found") == ["no match"]
    field.fill("<b>.*")
    assert shown.count("mark") == 0, "the search is for plain text"
    field.fill("")
    assert shown.texts(".rb-found") == [""] and len(lines(shown)) == 7


def test_a_letter_whose_lower_case_is_longer_is_found_too(show):
    at = world(1)
    say(at, 1, "İstanbul")
    shown = show("logs", at)
    shown.page.locator(".rb-tools input").fill("stan")
    assert shown.texts("mark") == ["İstanbul"]


def test_the_list_follows_its_end_until_the_user_scrolls_up(show):
    at = world(2)
    say(at, 1, *(f"line {n}" for n in range(100)))
    shown = show("logs", at)
    assert shown.page.evaluate(AT_END) and not shown.page.locator(".rb-fresh").is_visible()
    say(at, 2, "new")
    shown.move(at)
    assert shown.page.evaluate(AT_END)
    shown.page.locator(".rb-body").evaluate("b => new Promise(r => { b.onscroll = r; b.scrollTop = 50; })")
    top = shown.page.locator(".rb-body").evaluate("b => b.scrollTop")
    say(at, 2, *(f"fresh {n}" for n in range(12)))
    shown.move(at)
    fresh = shown.page.locator(".rb-fresh")
    assert fresh.inner_text() == "↓ 12 new lines" and shown.page.locator(".rb-body").evaluate("b => b.scrollTop") == top
    say(at, 1, "one more")
    shown.move(at)
    assert fresh.inner_text() == "↓ 13 new lines"
    fresh.press("Enter")
    assert shown.page.evaluate(AT_END) and not fresh.is_visible()


def test_the_list_stays_at_its_end_in_a_frame_of_another_width(show):
    at = world(1)
    say(at, 1, *("word " * 30 for _ in range(60)))
    shown = show("logs", at)
    for width in (400, 1100, 370, 1000):
        shown.page.set_viewport_size({"width": width, "height": 700})
        shown.page.wait_for_function(AT_END)
        assert not shown.page.locator(".rb-fresh").is_visible()


def test_levels_and_save_are_in_the_menu_of_a_narrow_frame(show):
    shown = show("logs", talk())
    shown.page.set_viewport_size({"width": 400, "height": 700})
    shown.page.locator(".rb-head .rb-menu-button").click()
    shown.page.locator(".rb-menu select").select_option("errors")
    assert len(lines(shown)) == 3 and shown.page.locator(".rb-menu .rb-save").is_visible()
    assert shown.page.locator(".rb-bar input").is_visible()


def test_a_flood_leaves_the_last_lines_in_the_page(show):
    at = world(2)
    for begin in range(0, 3000, 100):
        for worker in (1, 2):
            say(at, worker, *(f"line {n}" for n in range(begin, begin + 100)), skipped=5_000)
    shown = show("logs", at)
    assert len(lines(shown)) == 2000 and lines(shown)[-1] == "worker2line 2999"
    assert shown.texts(".rb-remarks li") == [
        f"Earlier lines of worker{n} are not shown. Its log has them: /logs/{n}.0.log" for n in (1, 2)
    ]
    tab(shown, "worker1")
    assert len(lines(shown)) == 2000 and lines(shown)[0] == "line 1000"


def test_the_shown_lines_are_saved(show, tmp_path):
    at = talk()
    say(at, 2, "worker2 was lost: killed by SIGKILL", kind="event")
    shown = show("logs", at)
    choose(shown, "errors")
    saved = []
    for name in ("all", "worker2"):
        tab(shown, name)
        with shown.page.expect_download() as download:
            shown.page.locator(".rb-save").click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        saved.append((path.name, Path(path).read_text().splitlines()))
    trace = ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: First"]
    event = "-- worker2 was lost: killed by SIGKILL --"
    assert saved == [
        ("workers.log", [*(f"worker2: {line}" for line in trace), event]), ("worker2.log", [*trace, event]),
    ]  # fmt: skip


def test_a_worker_without_a_log_here_and_a_record_say_so(show):
    at = world(1)
    say(at, 1, missing="torchrun has started worker1: its output goes to torchrun's output")
    shown = show("logs", at)
    assert shown.texts(".rb-remarks li") == ["Torchrun has started worker1: its output goes to torchrun's output."]
    assert shown.texts(".rb-hint") == ["No worker has written anything outside cells."]
    shown.page.evaluate("models[0].change('phase', {name: 'record', at: 0}); drawn()")
    assert shown.texts(".rb-hint") == ["Records hold no output of workers: look at it while they run."]


def test_a_still_has_the_last_twenty_lines():
    at = talk()
    say(at, 1, *(f"line {n}" for n in range(17)))
    say(at, 2, "worker2 was restarted at 14:03", kind="event")
    made = Snapshot(LogsPanel.look(at))
    assert all(text in made.svg for text in ("line 16", "worker2 was restarted at 14:03", "ValueError: First"))
    assert "second of worker2" not in made.svg.replace(made.text, "") and made.panel == "logs"


@pytest.mark.parametrize("width", [370, 500, 700, 1100])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_at_any_width(show, width, dark):
    at = talk()
    say(at, 1, "long " * 100, "x" * 500)
    shown = show("logs", at)
    shown.page.emulate_media(color_scheme="dark" if dark else "light")
    shown.page.set_viewport_size({"width": width, "height": 700})
    parts = "[...document.querySelectorAll('.rb-panel, .rb-body, .rb-bar')]"
    assert shown.page.evaluate(f"{parts}.every(e => e.scrollWidth <= e.clientWidth + 1)")


def test_the_end_of_the_cluster_leaves_the_lines(show):
    shown = show("logs", talk())
    shown.page.evaluate(f"models[0].change('phase', {dict(Phase('stopped', 1.0)._asdict())}); drawn()")
    assert len(lines(shown)) == 7 and shown.page.locator(".rb-save").is_enabled()
