"""The plan panel in a real browser: points, the memory of the hardware, the layout that is chosen."""

from __future__ import annotations

import pytest
from plans import failed, layout, plan, usual_plan

from rpcbench.panels import PlanPanel

pytestmark = pytest.mark.browser


def opened(show, shown):
    return show("plan", PlanPanel.find_source(shown).world())


def points(shown):
    """(layout, class of its mark, x, y) of each point."""
    return shown.page.locator(".rb-point").evaluate_all(
        """all => all.map(one => { const box = one.querySelector('.rb-face').getBoundingClientRect();
          const mark = one.querySelector('.rb-fits, .rb-too-large').getAttribute('class');
          return [one.dataset.layout, mark, box.x + box.width / 2, box.y + box.height / 2]; })"""
    )


def says(shown, text):
    shown.page.locator(".rb-words", has_text=text).wait_for()


def test_a_layout_is_a_point_of_its_memory_and_time(show):
    shown = opened(show, usual_plan())
    assert shown.texts(".rb-sentence")[0].startswith("dp 8, tp 2 is the fastest layout that fits: ")
    assert shown.texts(".rb-stat") == ["16 ranks of a100", "2 fit", "1 does not fit", "1 fails"]
    best, slow, large = points(shown)
    assert [one[1] for one in (best, slow, large)] == ["rb-fits", "rb-fits", "rb-too-large"]
    limit = shown.page.locator(".rb-limit").bounding_box()["x"]
    assert best[2] < slow[2] < limit < large[2] and large[3] > best[3] > slow[3], "time upwards"
    assert (slow[2] - best[2]) / (large[2] - slow[2]) == pytest.approx(1, rel=0.01), "20, 60 and 100 GiB"
    assert shown.texts(".rb-fails button") == ["tp 16 fails"]


def test_a_click_or_a_key_shows_a_layout_and_its_step(show):
    shown = opened(show, usual_plan())
    says(shown, "dp 8, tp 2: ")
    bars = "all => all.map(one => one.getAttribute('class').split('-').at(-1))"
    assert shown.page.locator(".rb-timeline .rb-bar").evaluate_all(bars) == ["forward"] * 4 + ["backward"] * 4
    shown.page.locator("[data-layout='2']").click()
    says(shown, "100.0 GiB of 79.3 GiB, does not fit (parameters 100.0 GiB)")
    assert shown.count(".rb-chosen[data-layout='2']") == 1 and shown.count(".rb-timeline .rb-bar") == 2
    shown.page.locator(".rb-body").press("ArrowRight")
    says(shown, "tp 16: ValueError: <b>8 heads</b> do not go into 16 pieces")
    assert not shown.page.locator(".rb-timeline").is_visible()
    shown.page.locator(".rb-body").press("ArrowRight")
    for _ in range(3):
        shown.page.locator(".rb-body").press("ArrowLeft")
    says(shown, "dp 8, tp 2: ")
    shown.page.get_by_role("button", name="tp 16 fails").press("Enter")
    says(shown, "tp 16: ValueError")


def test_names_cover_each_other_and_the_edge_nowhere(show, page):
    meshes = [{"dp": 2**n, "tp": 2 ** (9 - n)} for n in range(10)]
    shown = opened(show, plan(*[layout(mesh, 10**14 + n * 10**12, 40 + n % 3) for n, mesh in enumerate(meshes)]))
    for width in (500, 1100):
        page.set_viewport_size({"width": width, "height": 700})
        page.evaluate("drawn()")
        edge = shown.page.locator(".rb-body").bounding_box()
        boxes = [one.bounding_box() for one in shown.page.locator(".rb-point .rb-name").all()]
        assert len(boxes) == 10 and all(box["x"] + box["width"] < edge["x"] + edge["width"] for box in boxes)
        for n, one in enumerate(boxes):
            for other in boxes[:n]:
                apart = one["x"] >= other["x"] + other["width"] or other["x"] >= one["x"] + one["width"]
                assert apart or abs(one["y"] - other["y"]) > 10, (one, other)
    page.set_viewport_size({"width": 1000, "height": 700})


def test_where_nothing_fits_or_nothing_runs_the_sentence_says_so(show):
    shown = opened(show, plan(layout({"dp": 4}, 10**14, 90), layout({"tp": 4}, 10**14, 81)))
    assert shown.texts(".rb-sentence") == ["No layout fits. The smallest is tp 4: 81.0 GiB of 79.3 GiB."]
    shown = opened(show, plan(failed({"dp": 4})))
    assert shown.texts(".rb-sentence") == ["The program raises an error on each layout."]
    assert not shown.page.locator(".rb-body").is_visible() and shown.texts(".rb-fails button") == ["dp 4 fails"]
