"""The metrics panel in a real browser: the page has what the view says; red ranks, the table, the file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pictures import logged, restarted, world

pytestmark = pytest.mark.browser


def wave(middle, n=30):
    return [middle + 0.1 * math.sin(i) for i in range(n)]


def training(count=3, last=3.0):
    at = world(count)
    for worker in range(1, count + 1):
        logged(at, worker, "loss", wave(last if worker == count else 1.0))
        logged(at, worker, "lr", [0.1] * 30, order=1)
    return at


def rows(shown):
    return [row.locator("th, td").all_text_contents() for row in shown.page.locator(".rb-below tbody tr").all()]


def test_each_name_has_a_chart_and_each_rank_a_line(show):
    shown = show("metrics", training(last=1.0))
    assert shown.texts(".rb-chart .rb-name") == ["loss", "lr"]
    assert shown.count('.rb-chart[data-chart="loss"] .rb-member') == 3 and shown.count(".rb-far") == 0
    assert shown.texts(".rb-stat") == ["2 metrics", "3 ranks"]
    assert rows(shown)[0] == ["worker1", "0.934", "0.100"]


def test_a_rank_that_diverges_is_red_and_named(show):
    shown = show("metrics", training())
    assert shown.texts(".rb-stat")[0] == "1 diverges"
    red = shown.page.locator('.rb-chart[data-chart="loss"] .rb-member.rb-far')
    assert red.count() == 1 and red.get_attribute("data-member") == "3"
    assert shown.texts(".rb-remarks li")[0].startswith("loss of worker3 is about 2.993 where all others")
    assert rows(shown)[2][0] == "worker3 · loss"
    assert "0.934 without worker3" in shown.texts('.rb-chart[data-chart="loss"] .rb-note'), "whose it is not"
    assert shown.count('.rb-chart[data-chart="lr"] .rb-far') == 0
    shown.move(training(last=1.0))
    assert shown.count(".rb-chart .rb-far") == 0 and shown.texts(".rb-remarks li") == []


def test_a_value_that_is_not_finite_has_a_cross(show):
    at = training(2, 1.0)
    logged(at, 1, "loss", [1.0, "nan", "nan"])
    shown = show("metrics", at)
    assert shown.texts(".rb-chart .rb-odd title") == ["worker1: nan at step 1, and 1 more values that are not finite"]
    assert rows(shown)[0][:2] == ["worker1 · loss", "nan"]
    assert "rb-shade-1" in shown.page.locator(".rb-chart .rb-odd").get_attribute("class"), "in the rank's own colour"
    assert shown.texts(".rb-chart .rb-whose") == ["worker1"]
    shown.page.locator(".rb-body").press("Home")
    shown.page.locator(".rb-body").press("ArrowRight")
    shown.page.evaluate("drawn()")
    assert [row[1] for row in rows(shown)] == ["nan", "1.08"], "not its value of the step before"


def test_a_lost_rank_keeps_its_line_and_all_keep_their_colours(show):
    at = training(3, 1.0)
    shown = show("metrics", at)

    def shades():
        lines = shown.page.locator('.rb-chart[data-chart="loss"] .rb-member').all()
        return {line.get_attribute("data-member"): line.get_attribute("class") for line in lines}

    before = shades()
    at[2]["state"] = "lost"
    shown.move(at)
    assert shades() == before and shown.texts(".rb-stat")[-1] == "1 lost"
    assert shown.texts(".rb-remarks li") == ["worker2 was lost after step 29 of loss."]
    assert rows(shown)[1][0] == "worker2 · lost"
    bar = shown.page.locator('.rb-chart[data-chart="loss"] .rb-stop')
    assert bar.count() == 1 and bar.get_attribute("class").split()[1] == before["2"].split()[1]
    del at[1]["tables"]["metrics"]
    shown.move(at)
    assert shades() == {key: before[key] for key in "23"}


def test_the_line_of_a_former_process_stays_beside_the_new_one(show):
    at = training(3, 1.0)
    restarted(at, 2)
    for worker in (1, 2, 3):
        logged(at, worker, "b", [2.09], order=2, since=60.0)
    logged(at, 2, "loss", wave(1.0, 5), since=60.0)
    shown = show("metrics", at)
    lines = shown.page.locator('.rb-chart[data-chart="loss"] .rb-member').all()
    assert [line.get_attribute("data-member") for line in lines] == ["1", "2", "2.1", "3"]
    assert shown.texts('.rb-chart[data-chart="loss"] .rb-stop title') == ["worker2 before its restart ends at step 29"]
    assert shown.texts(".rb-remarks li") == ["worker2 was started again after step 29 of loss."]
    assert [row[0] for row in rows(shown)] == ["worker1", "worker2 · before its restart", "worker2", "worker3"]
    assert [row[3] for row in rows(shown)] == ["2.09", "\N{EN DASH}", "2.09", "2.09"], "of the new process alone"
    shown.page.locator(".rb-body").press("End")
    shown.page.evaluate("drawn()")
    assert [row[1] for row in rows(shown)] == ["0.934", "0.934", "\N{EN DASH}", "0.934"], "it has no step 29"


def test_keys_and_the_pointer_move_through_steps(show):
    shown = show("metrics", training(last=1.0))
    body = shown.page.locator(".rb-body")
    body.focus()
    body.press("Home")
    shown.page.evaluate("drawn()")
    assert shown.texts("thead th")[0] == "step 0" and rows(shown)[0][1] == "1.00"
    body.press("ArrowRight")
    shown.page.evaluate("drawn()")
    assert shown.texts("thead th")[0] == "step 1" and shown.count(".rb-cursor line") == 2
    assert shown.page.locator("[role=status]").last.text_content().startswith("step 1: loss 1.08")
    body.press("Escape")
    shown.page.evaluate("drawn()")
    assert shown.texts("thead th")[0] == "latest" and shown.count(".rb-cursor line") == 0


def test_many_ranks_are_a_spread_until_the_user_chooses(show):
    shown = show("metrics", training(9, 3.0))
    assert shown.page.locator("select").first.input_value() == "spread"
    assert shown.count('.rb-chart[data-chart="loss"] .rb-member') == 1, "the one that diverges"
    assert shown.count(".rb-chart .rb-median") == 2
    shown.page.locator("select").first.select_option("ranks")
    shown.page.evaluate("drawn()")
    assert shown.count('.rb-chart[data-chart="loss"] .rb-member') == 9


def test_a_log_scale_leaves_out_what_is_not_positive(show):
    at = world(1)
    logged(at, 1, "loss", [100.0, 0.0, 1.0])
    shown = show("metrics", at)
    shown.page.locator("select").nth(1).select_option("log")
    shown.page.evaluate("drawn()")
    assert shown.page.locator(".rb-chart .rb-member").get_attribute("d").count("M") == 2
    assert "1.00" in shown.texts(".rb-chart .rb-note")


def test_the_button_asks_for_all_points_and_saves_them(show):
    shown = show("metrics", training(1, 1.0))
    shown.page.get_by_role("button", name="CSV").click()
    asked = shown.page.evaluate("window.sent.filter(({ kind }) => kind === 'csv')")
    assert len(asked) == 1
    with shown.page.expect_download() as saved:
        shown.hear({"kind": "csv", "eye": asked[0]["eye"], "text": "name\nloss\n"})
    assert saved.value.suggested_filename == "metrics.csv"
    assert Path(saved.value.path()).read_text() == "name\nloss\n"


@pytest.mark.parametrize("width", [370, 500, 1100])
def test_nothing_is_wider_than_the_panel(show, page, width):
    page.set_viewport_size({"width": width, "height": 700})
    shown = show("metrics", training(4))
    wide, room = shown.page.eval_on_selector(".rb-body", "body => [body.scrollWidth, body.clientWidth]")
    page.set_viewport_size({"width": 1000, "height": 700})
    assert wide <= room
