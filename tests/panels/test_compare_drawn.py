"""The comparison panel in a real browser: squares for values, what a click shows of one, folds, steps."""

from __future__ import annotations

import pytest
from pictures import compare, value, world

pytestmark = pytest.mark.browser

MAPS = [[[0, 1], [2, 3], [[0, 0, 0], [0, 0, 0]]], [[2], [2, 3], [[100, 0, 41], [0, 0, 0]]]]
WRONG = [
    value("initial", "up.weight", layout="on rank 0"), value("forward", "up", layout="tp Shard(1)"),
    value("forward", "down", "wrong", maps=MAPS, largest=0.75), value("forward", "", "not there", ranks=[], errors=[]),
    value("loss", "", "cannot tell"), value("gradient", "up.weight", "wrong"),
]  # fmt: skip


def compared(*values, **more):
    at = world(2)
    compare(at, *values, **more)
    return at


def squares(shown, module):
    """(column, class of the verdict) of each square of a row, from left to right."""
    found = shown.page.locator(f"[data-module='{module}'] .rb-square").evaluate_all(
        "all => all.map(one => [one.getAttribute('class'), one.getBoundingClientRect().x])"
    )
    assert [x for _, x in found] == sorted(x for _, x in found)
    return [next(name for name in kinds.split() if name.startswith("rb-is-")) for kinds, _ in found]


def says(shown, text):
    """Wait until the part below the picture shows the value; a click draws in the next frame."""
    shown.page.locator(".rb-words", has_text=text).wait_for()


def test_each_value_is_a_square_with_the_colour_of_its_verdict(show):
    shown = show("compare", compared(*WRONG, first="2"))
    assert shown.texts(".rb-sentence") == ["Wrong, first at forward up: no reduction."]
    assert shown.texts(".rb-stat") == ["4 ranks (dp=2, tp=2)", "2 wrong", "2 right", "1 cannot tell", "1 not there"]
    assert shown.texts(".rb-top text") == ["value", "shared as", "initial", "forward", "loss", "gradient"]
    assert shown.texts(".rb-row > .rb-name > text, .rb-fold text:last-child") == ["(model)", "up", "weight", "down"]
    assert squares(shown, "") == ["rb-is-not-there", "rb-is-cannot-tell"]
    assert squares(shown, "up.weight") == ["rb-is-right", "rb-is-wrong"]
    looks = """all => all.map(one => [one.parentNode.classList[1], getComputedStyle(one).fill !== 'none' &&
      getComputedStyle(one).fill !== getComputedStyle(one.closest('.rb-panel')).backgroundColor,
      one.nextElementSibling?.getAttribute('d') ?? ''])"""
    signs = {kind: (filled, sign) for kind, filled, sign in shown.page.locator(".rb-row .rb-fill").evaluate_all(looks)}
    assert len({*signs.values()}) == 4 and signs["rb-is-not-there"] == (False, ""), "tellable apart without colours"
    assert shown.page.locator(".rb-row .rb-first").evaluate_all("all => all.map(one => one.dataset.value)") == ["2"]
    assert "2 wrong, 2 right" in shown.page.locator(".rb-picture > desc").text_content()


def test_how_the_ranks_share_a_value_stands_beside_it(show):
    shown = show("compare", compared(*WRONG, first="2"))
    boxes = """all => all.map(one => [...one.children].map(
      part => part.getAttribute('class') + ' ' + part.getAttribute('width')))"""
    drawn = shown.page.locator("[data-module='up'] .rb-layout > g").evaluate_all(boxes)
    assert drawn == [["rb-held 8.0", "rb-outline 16"]] * 4
    drawn = shown.page.locator("[data-module='up.weight'] .rb-layout > g").evaluate_all(boxes)
    assert drawn == [["rb-held 16.0", "rb-outline 16"], *[["rb-outline rb-without 16"]] * 3]
    assert shown.texts(".rb-layout > title") == ["tp Shard(1)", "on rank 0"]


def test_a_click_shows_the_errors_by_rank_and_where_the_first_one_differs(show):
    shown = show("compare", compared(*WRONG, first="2"))
    words = shown.page.locator(".rb-words")
    assert words.inner_text() == (
        "forward down: wrong on ranks 2, 3, the first difference · float32 [4, 2], norm 4, error 2.5, allowed 1.0e-6 "
        "(2,500,000 times as much) · no way of sharing fits; the nearest is tp Replicate"
    )
    assert shown.texts(".rb-key-line text") == [
        "norm of a rank's error; the upright line is what round-off explains: 1.0e-6",
        "map of a rank's piece [2, 3]: the last dimension runs across, a cell is a number",
        "0", "0.75: difference of the number; grey: none",
    ]  # fmt: skip
    parts = shown.page.locator(".rb-part")
    assert parts.evaluate_all("all => all.map(one => one.dataset.ranks)") == ["0,1", "2", "3"]
    assert shown.texts(".rb-part > title") == [
        "ranks 0, 1, error 0, of a piece of [2, 3]", "rank 2, error 2.5, of a piece of [2, 3]", "rank 3, error 2.5",
    ]  # fmt: skip
    heat = shown.page.locator(".rb-map .rb-heat").evaluate_all(
        "all => all.map(one => [one.getAttribute('fill-opacity'), one.getAttribute('d')])"
    )
    assert heat == [["1", "M0 0h12v12h-12z"], ["0.5", "M24 0h12v12h-12z"]], "in levels of ten percent"
    shown.page.locator("[data-value='5']").click()
    says(shown, "gradient up.weight: wrong")
    assert shown.count(".rb-heat") == 0
    shown.page.keyboard.press("ArrowLeft")
    says(shown, "initial up.weight: right")
    lacking = {"error": None, "errors": [], "ranks": [0], "missing": [1, 2, 3]}
    shown.move(compared(value("step", "up.weight", "wrong", **lacking), first="0"))
    assert shown.texts(".rb-part > title") == ["rank 1, missing", "rank 2, missing", "rank 3, missing"]


def test_a_folded_module_shows_the_worst_of_all_that_it_holds(show):
    shown = show("compare", compared(*WRONG, first="2"))
    shown.page.locator("[data-fold='up']").click()
    shown.page.locator("[data-module='up.weight']").wait_for(state="detached")
    assert squares(shown, "up") == ["rb-is-right", "rb-is-right", "rb-is-wrong"]
    shown.page.locator("[data-fold='up']").press("Enter")
    shown.page.locator("[data-module='up.weight']").wait_for()
    many = [value("forward", "up", "wrong" if n == 3 else "right", call=n) for n in range(5)]
    shown.move(compared(*many, first="3"))
    assert squares(shown, "up") == ["rb-is-wrong"] and shown.texts(".rb-row .rb-square text") == ["\xd75"]
    assert any("values in one square: wrong if one of them is" in text for text in shown.texts(".rb-legend span"))
    assert shown.texts(".rb-others button") == [f"call {n}" for n in range(5)]
    shown.page.get_by_role("button", name="call 1", exact=True).click()
    says(shown, "forward up call 1: right")


def test_one_step_of_several_is_shown(show):
    shown = show("compare", compared(value("forward", "up"), value("forward", "up", "wrong", step=1), first="1"))
    assert squares(shown, "up") == ["rb-is-wrong"]
    assert shown.texts(".rb-step") == ["step 0: right", "step 1: has the first difference"]
    assert shown.texts(".rb-step[aria-pressed=true]") == ["step 1: has the first difference"]
    shown.page.get_by_role("button", name="step 0").click()
    shown.page.locator(".rb-is-right[data-value='0']").wait_for()
    assert shown.page.locator(".rb-below").is_hidden()
    shown.page.get_by_role("button", name="step 1").click()
    says(shown, "forward up: wrong on ranks 2, 3, the first difference")
    shown.move(compared(value("forward", "up")))
    assert shown.page.locator(".rb-steps").is_hidden(), "one step alone needs no choice"


def test_what_is_wrong_after_the_first_difference_is_drawn_as_its_consequence(show):
    shown = show("compare", compared(*WRONG, first="2"))
    follows = shown.page.locator(".rb-row .rb-follows").evaluate_all("all => all.map(one => one.dataset.value)")
    assert follows == ["5"] and shown.texts(".rb-legend span")[:2] == [
        "the first difference: look here first", "wrong after the first: may only follow from it",
    ]  # fmt: skip
    shown.page.locator("[data-value='5']").click()
    says(shown, "wrong on ranks 2, 3, after the first difference; it may only follow from it")
    shown.move(compared(*WRONG[:3], value("gradient", "up.weight", "wrong"), first="1"))
    assert squares(shown, "up") == ["rb-is-wrong"], "summands that nobody adds up are right, and the fault all the same"
    says(shown, "forward up: right, within round-off, and yet the fault is here")


def test_what_no_way_of_sharing_fits_is_said_and_the_nearest_one(show, page):
    page.set_viewport_size({"width": 1200, "height": 700})
    shown = show("compare", compared(*WRONG, value("forward", "odd", "wrong", words="", errors=[]), first="2"))
    said = shown.page.locator("[data-module='down'] > text").all_text_contents()
    assert said == ["none fits", "nearest: tp Replicate"]
    assert shown.page.locator("[data-module='odd'] > text").all_text_contents() == ["none fits"]
    page.set_viewport_size({"width": 1000, "height": 700})


def test_the_first_difference_is_in_sight(show):
    values = [value("forward", f"blocks.{n}", "wrong" if n > 92 else "right") for n in range(120)]
    shown = show("compare", compared(*values, first="93"))
    inside = """(one, body) => { const [a, b] = [one, document.querySelector(body)].map(e => e.getBoundingClientRect());
      return a.top > b.top && a.bottom < b.bottom; }"""
    assert shown.page.locator(".rb-row .rb-first").evaluate(inside, ".rb-body")


@pytest.mark.parametrize("width", [700, 1400])
def test_it_fits(show, page, width):
    page.set_viewport_size({"width": width, "height": 700})
    deep = "encoder.layers.11.attention.self.query.projection.weight"
    values = [value(phase, deep) for phase in ("initial", "forward", "backward", "gradient", "step")]
    shown = show("compare", compared(*values))
    wide, room = page.eval_on_selector(".rb-body", "body => [body.scrollWidth, body.clientWidth]")
    assert wide <= room and shown.count(".rb-row .rb-square") == 5
    page.set_viewport_size({"width": 1000, "height": 700})


def test_a_panel_without_a_comparison_has_no_empty_parts(show):
    shown = show("compare", world(1))
    for part in (".rb-sentence", ".rb-steps", ".rb-below"):
        assert not shown.page.locator(part).is_visible(), part
