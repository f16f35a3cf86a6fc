"""The RRefs panel in a real browser: what stands in the page is what the view says."""

from __future__ import annotations

import json
import math
import time
from itertools import combinations, pairwise

import pytest
from pictures import own, use, world
from shown import busy_world

from rpcbench.telemetry.views import diff_views, rref_view

pytestmark = pytest.mark.browser


def test_a_row_for_each_rref_and_a_mark_for_each_holder(show):
    shown = show("rrefs", busy_world())
    assert shown.count(".rb-row") == len(shown.view["rrefs"])
    assert shown.count(".rb-row .rb-owner") == len(shown.view["rrefs"])
    for state in ("confirmed", "pending", "deleting"):
        forks = [fork for fork in shown.view["forks"].values() if fork["state"] == state]
        assert shown.count(f".rb-row .rb-fork.rb-{state}") == len(forks) > 0
    assert shown.count(".rb-row .rb-way.rb-pending") == 1
    assert shown.count(".rb-row .rb-owner.rb-failed") == 1
    assert shown.texts(".rb-stat")[:4] == ["5 RRefs", "6 users", "1 waiting", "1 letting go"]


def test_the_owner_stands_in_its_workers_column(show):
    shown = show("rrefs", busy_world())
    for rref, row in shown.view["rrefs"].items():
        mark = shown.page.locator(f"[data-rref='{rref}'] .rb-owner").bounding_box()
        name = shown.page.locator(".rb-top text", has_text=shown.view["workers"][str(row["owner"])]["name"])
        box = name.bounding_box()
        assert mark["x"] + mark["width"] / 2 == pytest.approx(box["x"] + box["width"] / 2, abs=1.5)


@pytest.mark.parametrize(("workers", "words"), [(2, "LocalOptimizerOfAKind"), (30, "LocalOptimize…")])
def test_types_are_cut_only_where_marks_stand(show, workers, words):
    at = world(workers)
    own(at, 1, "0.0", "LocalOptimizerOfAKind")
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


@pytest.mark.parametrize("workers", [2, 8, 30])
@pytest.mark.parametrize("width", [1000, 1440])
def test_headings_never_overlap(show, page, workers, width):
    at = world(workers)
    for worker in range(1, workers + 1):
        for n in range(30):
            own(at, worker, f"{worker}.{n}")
            use(at, 0, f"0.{worker}{n}", f"{worker}.{n}", worker)
    page.set_viewport_size({"width": width, "height": 700})
    shown = show("rrefs", at)
    boxes = [one.bounding_box() for one in shown.page.locator(".rb-top text").all()]
    page.set_viewport_size({"width": 1000, "height": 700})
    assert len(boxes) >= workers + 1
    if "rotate" in (shown.page.locator(".rb-top text").first.get_attribute("transform") or ""):
        lefts = sorted(box["x"] for box in boxes)  # slanted: their distance across is what keeps them apart
        assert min(b - a for a, b in pairwise(lefts)) * math.sin(math.radians(48)) >= 13
        assert all(box["y"] >= shown.page.locator(".rb-body").bounding_box()["y"] for box in boxes)
        return
    for a, b in combinations(boxes, 2):
        apart = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
        assert apart or a["y"] + a["height"] <= b["y"] + 2 or b["y"] + b["height"] <= a["y"] + 2


def test_rows_stand_by_creation_so_what_comes_and_goes_stands_below(show):
    at = world(2)
    for i in range(4):
        own(at, 1, f"0.{i}", made=float(5 + i))
    shown = show("rrefs", at)
    tops = "all => Object.fromEntries(all.map(one => [one.dataset.rref, one.getAttribute('transform')]))"
    before = shown.page.eval_on_selector_all(".rb-row", tops)
    height = shown.page.locator(".rb-panel").bounding_box()["height"]
    del at[1]["tables"]["owned"]["0.3"]
    own(at, 2, "2.0", made=20.0)
    own(at, 1, "0.1", made=6.0, failed=True)
    shown.move(at)
    after = shown.page.eval_on_selector_all(".rb-row", tops)
    assert [*after] == ["0.0", "0.1", "0.2", "2.0"] and {
        k: before[k] for k in ("0.0", "0.1", "0.2")
    }.items() <= after.items()
    new = shown.page.eval_on_selector_all(".rb-row.rb-new", "all => all.map(one => one.dataset.rref)")
    assert sorted(new) == ["0.0", "0.2", "2.0"]  # one that changed does not fade in again
    assert shown.page.locator(".rb-panel").bounding_box()["height"] == height


def stages(count):
    """For each worker a stage and an optimizer, which the notebook holds."""
    at = world(count)
    for worker in range(1, count + 1):
        for n, kind in enumerate(("Stage", "SGD")):
            own(at, worker, f"0.{4 * worker + 2 * n}", kind, size=1000, number=3 + n, cell=f"c{n}", made=float(worker))
            use(at, 0, f"0.{4 * worker + 2 * n + 1}", f"0.{4 * worker + 2 * n}", worker)
    return at


def groups(shown):
    return shown.texts(".rb-group .rb-strong")


def test_many_are_grouped_by_type_and_unfold(show):
    shown = show("rrefs", stages(9))
    assert groups(shown) == ["9 Stage", "9 SGD"] and drawn(shown) == []
    first = shown.page.locator(".rb-group").first
    assert first.locator(".rb-owner .rb-count").all_text_contents() == ["1"] * 9
    assert first.locator(".rb-fork .rb-count").all_text_contents() == ["9"]
    assert first.locator(".rb-end").text_content() == "9 ready"
    fold = first.get_by_role("button", name="9 Stage: 9 ready")
    fold.focus()
    fold.press("Enter")
    shown.page.evaluate("drawn()")
    assert drawn(shown) == [f"0.{4 * worker}" for worker in range(1, 10)]
    assert shown.page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true", "the focus stays"
    shown.page.locator(".rb-group").first.click(position={"x": 20, "y": 20})
    shown.page.evaluate("drawn()")
    assert drawn(shown) == []


def test_the_user_decides_on_groups(show):
    shown = show("rrefs", stages(2))
    assert groups(shown) == [] and len(drawn(shown)) == 4
    select(shown, "group", "cell")
    assert groups(shown) == ["2 in cell [3]", "2 in cell [4]"]
    select(shown, "group", "type")
    assert groups(shown) == ["2 Stage", "2 SGD"]
    select(shown, "type", "SGD")
    assert groups(shown) == ["2 SGD"] and shown.texts(".rb-tools [role=status]") == ["2 of 4 shown"]


def test_a_failed_rref_shows_in_its_group(show):
    at = stages(9)
    own(at, 3, "0.12", "Stage", failed=True)
    row = show("rrefs", at).page.locator(".rb-group").first.locator(".rb-end")
    assert row.text_content() == "1 failed" and "rb-failed" in row.get_attribute("class")


def test_each_type_has_a_colour_which_the_legend_names(show):
    shown = show("rrefs", stages(2))
    fills = "all => all.map(one => getComputedStyle(one.querySelector('.rb-owner rect')).fill)"
    first, second, *others = shown.page.eval_on_selector_all(".rb-row", fills)
    assert first != second and others == [first, second]
    assert shown.texts(".rb-legend span")[-2:] == ["SGD", "Stage"]
    owner = shown.page.locator(".rb-legend .rb-owner rect").evaluate("mark => getComputedStyle(mark).fill")
    assert owner != "rgb(0, 0, 0)", "the marks of no type have a colour of the panel, not that of SVG"


def many_rrefs(count):
    """RRefs of three workers, each with a user; the later the bigger. The value of the middle one came last."""
    at = world(3)
    for worker in (1, 2, 3):
        at[worker]["epoch"] = time.time() - 9000
    for i in range(count):
        kind = "Tensor" if i % 2 else "Linear"
        made = 2.0 + count if i == count // 2 else 2.0 + i
        own(at, 1 + i % 3, f"0.{2 * i}", kind, made=made, size=1000 * i, cell="c", number=1 + i % 5)
        use(at, (i + 1) % 4, f"0.{2 * i + 1}", f"0.{2 * i}", 1 + i % 3)
    return at


def drawn(shown):
    return shown.page.eval_on_selector_all("[data-rref]", "all => all.map(one => one.dataset.rref)")


def select(shown, name, value):
    shown.page.get_by_label(name, exact=True).select_option(value)
    shown.page.evaluate("drawn()")


def test_of_a_thousand_rrefs_those_in_sight_are_drawn(show):
    shown = show("rrefs", many_rrefs(1000))
    select(shown, "group", "off")
    assert shown.texts(".rb-stat")[0] == "1000 RRefs"
    assert 10 < len(drawn(shown)) < 40 and "0.0" in drawn(shown)
    shown.page.eval_on_selector(".rb-body", "body => { body.scrollTop = body.scrollHeight; return drawn(); }")
    assert len(drawn(shown)) < 40 and "0.1998" in drawn(shown) and "0.0" not in drawn(shown)
    last = shown.page.locator("[data-rref='0.1998']").bounding_box()
    body = shown.page.locator(".rb-body").bounding_box()
    assert body["y"] < last["y"] and last["y"] + last["height"] <= body["y"] + body["height"]
    assert shown.count(".rb-row.rb-new") == 0  # only what is new fades in


def test_leaks_are_looked_for_by_age_and_by_size(show):
    shown = show("rrefs", many_rrefs(50))
    assert drawn(shown)[:3] == ["0.0", "0.2", "0.4"]
    select(shown, "order", "size")
    assert drawn(shown)[:3] == ["0.98", "0.96", "0.94"]
    select(shown, "order", "newest")
    assert drawn(shown)[:2] == ["0.98", "0.96"]
    select(shown, "order", "")
    assert drawn(shown)[:2] == ["0.0", "0.2"]


def test_filters_show_what_fits_all_of_them(show):
    at = many_rrefs(90)
    use(at, 1, "0.901", "0.2", 2, "pending")
    shown = show("rrefs", at)
    select(shown, "group", "off")
    rrefs, forks = shown.view["rrefs"], shown.view["forks"].values()
    select(shown, "type", "Linear")
    select(shown, "worker", "2")
    mine = {row["rref"] for row in rrefs.values() if row["owner"] == 2} | {f["rref"] for f in forks if f["holder"] == 2}
    wanted = {key for key in mine if rrefs[key]["type"] == "Linear"}
    assert shown.texts(".rb-tools [role=status]") == [f"{len(wanted)} of 90 shown"]
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
    assert "Cell [2] is no longer there" in shown.texts(".rb-said-once")[0]
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
    select(shown, "group", "off")
    versions = []
    for i in range(20):
        own(at, 1 + i % 3, f"0.{6 * i + 2 * (i % 3)}", "Changed", made=5.0)
        view = rref_view(at)
        versions.append(
            {"kind": "delta", "version": 2 + i, "delta": json.loads(json.dumps(diff_views(shown.view, view)))}
        )
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


def test_the_ages_of_a_picture_that_stands_still_are_its_own(show):
    at = world(1)
    at[1]["epoch"] = 0.0
    own(at, 1, "1.2", made=time.time() - 5000)
    shown = show("rrefs", at)
    assert shown.texts(".rb-age") == ["1 h"]
    shown.page.evaluate("models[0].change('phase', {name: 'stopped', at: 0}), drawn()")
    shown.page.evaluate("() => { window.realNow = Date.now; Date.now = () => realNow() + 7200000; }")
    try:
        own(at, 1, "1.3", made=time.time() - 4900)  # which draws a row
        shown.move(at)
        assert shown.texts(".rb-age") == ["1 h"] * 2
    finally:
        shown.page.evaluate("() => { Date.now = realNow; }")
