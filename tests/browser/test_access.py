"""Who uses a keyboard or a screen reader reaches all controls of sidebar, picker and panels, and hears their names."""

from __future__ import annotations

import pytest
from worlds import until

pytest.importorskip("playwright", reason="needs playwright")

from access import CONTROLS, told

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

PANELS = ("workers", "resources", "traffic", "rrefs", "autograd", "pipeline", "messages")
SIDE = ".rbx-sidebar"
MAKE = """import torch
from rpcbench import rpc
from rpcbench.pipeline import Pipeline, split
kept = rpc.remote("worker1", torch.ones, (2,))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
pipe = Pipeline(split(model, ["worker1", "worker2"]), microbatches=2, loss_fn=torch.nn.functional.cross_entropy)
kept.to_here()
cluster.status()"""
TALK = """for _ in range(2):
    with pipe.batch(torch.rand(4, 4), torch.zeros(4, dtype=torch.long)):
        pass
print('it is', rpc.rpc_sync('worker1', abs, (-1,)))"""
STEP = "%%step\nrpc.rpc_sync('worker1', abs, (-2,))"

# What can be used in an element, and what the mouse is told can be clicked but the keyboard cannot reach.
FIND = """root => {
  const all = [...root.querySelectorAll('*')].filter(one => one.checkVisibility());
  window.controls = all.filter(one => one.tabIndex >= 0 && !one.disabled);
  const reached = 'button, a, select, input, label, summary, [role=link], [tabindex]';
  const lost = all.filter(one => getComputedStyle(one).cursor === 'pointer' && !one.closest(reached));
  window.controls[0]?.focus();
  return [window.controls.length, lost.map(one => one.outerHTML)];
}"""
AT = "() => window.controls.indexOf(document.activeElement)"
SHAPES = "all => all.map(one => one.querySelector(':scope > title')?.textContent ?? '')"


@pytest.fixture(scope="module")
def notebook(lab):
    """Workers started by keys, and all panels with something in them."""
    panels = [f"%panel {name}" for name in PANELS]
    opened = lab.open((MAKE, *panels, TALK, STEP), "access.ipynb", height=5000)
    page = opened.page
    page.evaluate("jupyterapp.commands.execute('rpcbench:sidebar')")
    size = page.locator(SIDE).get_by_label("Workers")
    size.focus()
    size.press("ArrowUp")
    size.press("ArrowDown")
    size.press("Enter")
    page.locator(SIDE).get_by_role("listitem").filter(has_text="worker2 ready").wait_for()
    opened.run_to_end(MAKE, *panels, TALK)
    page.locator(".rb-pipeline .rb-slider").wait_for()
    page.locator(".rb-messages [data-message]", has_text="result of abs").wait_for()
    opened.run(STEP)
    page.locator(".rb-step .rb-held").wait_for()
    assert opened.errors() == []
    return opened


@pytest.mark.parametrize("place", [SIDE, ".rbx-picker", *(f".rb-{name}" for name in (*PANELS, "step"))])
def test_all_controls_have_names_and_are_reached_by_tab(notebook, place):
    page, at = notebook.page, []
    # A cell that has just become the active one gets its toolbar, with controls in it, and the focus a moment later.
    until(lambda: page.locator(place).first.evaluate(FIND) and page.evaluate(AT) == 0, "the focus on the first")
    count, lost = page.locator(place).first.evaluate(FIND)
    assert lost == [], "only a mouse can click it"
    while (here := page.evaluate(AT)) >= 0 and here not in at:
        at.append(here)
        page.keyboard.press("Tab")
    assert at == [*range(count)]

    controls = [one for one in told(page, place) if one.role in CONTROLS]
    assert [one for one in controls if not one.name] == []
    names = [(one.role, one.name) for one in controls]
    assert len(names) == len({*names}) > 0, "two that are called the same"


@pytest.mark.parametrize("name", [*PANELS, "step"])
def test_a_panel_says_what_it_shows(notebook, name):
    region, *inside = told(notebook.page, f".rb-{name}")
    assert region.role == "region" and region.name
    for role in {"table", "list", "image", "group"} & {one.role for one in inside}:
        assert [one for one in inside if one.role == role and not one.name and one.focusable] == []
    if name == "workers":
        assert [one.name for one in inside if one.role == "table"] == ["Workers"]
        assert all(one.name for one in inside if one.role in ("columnheader", "rowheader"))
    elif name != "step":
        (picture,) = [one for one in inside if one.description and one.name == region.name]
        assert any(sign.isdigit() for sign in picture.description)
    shapes = {"rrefs": "[data-rref]", "pipeline": ".rb-picture .rb-op", "messages": "[data-message]"}
    if name in shapes:
        words = notebook.page.locator(f".rb-{name} {shapes[name]}").evaluate_all(SHAPES)
        assert words and all(words)
    if name == "rrefs":
        assert {one.name.split()[1] for one in inside if one.role == "listitem"} == {*_rrefs(notebook)}


def _rrefs(notebook):
    return notebook.page.locator("[data-rref]").evaluate_all("all => all.map(one => one.dataset.rref)")


def test_the_table_of_the_status_has_a_caption_and_clicks_are_announced(notebook):
    page = notebook.page
    assert told(page, ".jp-OutputArea table:not(.rb-panel table)")[0][:2] == ("table", "Workers")
    page.locator(SIDE).get_by_role("button", name="Interrupt worker1").press(" ")
    page.locator(f"{SIDE} [role=status]").filter(has_text="worker1 runs no cell of this notebook.").wait_for()


def test_keys_in_a_panel_are_its_own_and_not_the_notebooks(notebook):
    page, count = notebook.page, notebook.page.locator(".jp-Notebook .jp-Cell").count()
    opener = page.locator(".rb-workers").get_by_role("button", name="worker1", exact=False).first
    for key, state in (("Enter", "true"), (" ", "false")):
        opener.press(key)
        assert opener.get_attribute("aria-expanded") == state
    order = page.locator(".rb-rrefs").get_by_label("order")
    order.press("b")  # to a notebook: a new cell below
    assert order.input_value() == "size"
    slider = page.locator(".rb-pipeline").get_by_label("Step shown")
    slider.press("ArrowLeft")
    until(lambda: slider.get_attribute("aria-valuetext") == "step 1", "the step before")
    latest = page.locator(".rb-pipeline").get_by_role("button", name="Latest")
    latest.press("Enter")
    until(lambda: slider.get_attribute("aria-valuetext") == "step 2, latest", "the latest step")
    body = page.locator(".rb-messages .rb-body")
    body.press("ArrowDown")
    page.locator(".rb-messages [role=status]").filter(has_text="→").wait_for()
    page.locator(".rb-step").get_by_role("button", name="Release all").press("Enter")
    page.get_by_text("Messages are no longer held.").wait_for()
    assert page.locator(".jp-Notebook .jp-Cell").count() == count
    assert page.locator(".jp-Notebook.jp-mod-editMode").count() == 0
    assert notebook.errors() == []
