"""The sharding panel in a real browser: what stands in the page is what the view says."""

from __future__ import annotations

import pytest
from pictures import shard, watch, world
from shown import busy_world

pytestmark = pytest.mark.browser

PIECES = """all => all.map(one => ({...one.dataset, box: [...one.querySelectorAll('.rb-held, .rb-lit')].map(part =>
  [part.getAttribute('class'), ...['x', 'y', 'width', 'height'].map(name => Number(part.getAttribute(name)))])}))"""


def pieces(shown, param):
    row = shown.page.locator(f"[data-param='{param}']")
    return row.locator(".rb-piece").evaluate_all(PIECES)


def test_a_box_is_filled_where_the_rank_holds_the_parameter(show):
    shown = show("shards", busy_world())
    found = pieces(shown, "up.weight")
    assert [one["worker"] for one in found] == ["1", "2", "3"]
    assert [one["bytes"] for one in found] == ["128"] * 3
    held = [next(part for kind, *part in one["box"] if kind == "rb-held") for one in found]
    assert held == [[0, round(26 * n / 3, 1), 44, 8.7] for n in range(3)]
    lit = [next(part for kind, *part in one["box"] if kind == "rb-lit") for one in found]
    assert lit == [[0, 0, 44, 26]] * 3
    assert [part[3:] for one in pieces(shown, "up.bias") for part in one["box"]] == [[14, 26]] * 3
    assert shown.texts("tbody .rb-param") == ["up.weight", "up.bias"]
    assert shown.texts("tbody th .rb-note") == ["[12, 8] dp: Shard(0)", "[12] dp: Replicate"]
    assert shown.texts("thead .rb-name") == ["worker1+ 384 B", "worker2+ 384 B", "worker3+ 384 B"]
    assert shown.texts("thead .rb-note")[:2] == ["rank 0 · dp 0", "176 B, 41 % of 432 B"]
    assert shown.texts("figcaption") == ["DeviceMesh dp=3"]
    assert shown.texts(".rb-seat text") == ["0 worker1", "1 worker2", "2 worker3"]
    stats = ["2 parameters", "432 B unsharded", "384 B gathered (at most 384 B)", "2 optimizer steps"]
    assert shown.texts(".rb-stat") == stats
    assert shown.page.get_by_role("status").inner_text() == (
        "model: 2 parameters on 3 ranks; they hold 41 %, 41 %, 41 % of the unsharded model."
    )


def test_what_is_gathered_is_lit_and_what_was_gathered_flashes(show):
    at = busy_world()
    shown = show("shards", at)
    opacity = "all => all.map(one => getComputedStyle(one).opacity)"
    assert shown.page.locator("tbody .rb-lit").evaluate_all(opacity) == ["1", "1", "0"]
    assert shown.count(".rb-flash") == 0
    watch(at, 1, 0, 3, groups=[[False, 4]])
    watch(at, 3, 2, 3, groups=[[False, 7]])
    before = shown.page.locator("[data-param='up.bias']").evaluate_handle("one => one")
    shown.move(at)
    assert [one["now"] for one in pieces(shown, "up.weight")] == ["false", "true", "false"]
    assert shown.page.locator(".rb-flash").evaluate_all("all => all.map(one => one.dataset.worker)") == ["3"]
    assert before.evaluate("one => one.isConnected"), "a row that has not changed is not drawn again"
    shown.move(at | {0: {**at[0], "left_out": 1}})
    assert shown.page.locator("tbody .rb-lit").evaluate_all(opacity)[:2] == ["0", "1"]


def test_several_models_parts_that_are_missing_and_remarks(show):
    at = world(2)
    watch(at, 1, 0, 2)
    watch(at, 1, 0, 2, "other", parameters=3)
    for worker in (1, 2):
        shard(at, worker, "other/scale", 2, [], [], [], [])
    watch(at, 2, 1, 2, "other", parameters=2)
    del at[2]["tables"]["shards"]["other/up.bias"]
    shown = show("shards", at)
    assert shown.texts("select option") == ["model", "other"]
    assert shown.texts(".rb-remarks li") == ["rank 1 does not watch model: call rpcbench.watch_model there, too."]
    shown.page.locator("select").select_option("other")
    shown.page.locator("[data-param='scale']").wait_for()
    assert shown.count(".rb-missing") == 1
    assert shown.texts(".rb-remarks li") == [
        "1 parameter of it is not sharded: each rank has a copy of its own, and nothing keeps the copies equal."
    ]
    shown.page.get_by_role("searchbox").fill("WEIGHT")
    shown.page.locator("[data-param='scale']").wait_for(state="detached")
    assert shown.texts("tbody .rb-param") == ["up.weight"]


def test_many_ranks_and_many_parameters_fit(show):
    at = world(24)
    for worker in range(1, 25):
        watch(at, worker, worker - 1, 24)
        for n in range(320 if worker == 1 else 20):
            shard(at, worker, f"model/p{n}", n + 2, [24], [worker - 1], [1], ["Shard(0)"])
    shown = show("shards", at)
    wide, room = shown.page.eval_on_selector(".rb-body", "body => [body.scrollWidth, body.clientWidth]")
    assert wide <= room and shown.count("tbody tr") == 300
    assert shown.texts(".rb-rest") == ["22 more parameters are not drawn: find them by their names."]


def test_it_says_when_no_model_is_watched_any_more(show):
    shown = show("shards", busy_world())
    shown.move(world(1))
    assert shown.page.locator(".rb-hint").is_visible() and shown.count("tbody tr, figure") == 0
    assert not shown.page.locator("table").is_visible()
    assert shown.page.get_by_role("status").inner_text() == "No model is watched."
