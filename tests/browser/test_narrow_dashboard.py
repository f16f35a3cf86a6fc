"""The dashboard beside a notebook in a window of 1120 x 800: a first screen with pictures, and menus that work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lab import settles

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

START = "%load_ext rpcbench\n%cluster start 2"
TRAIN = """import torch
from torch import nn
from rpcbench.pipeline import Pipeline, split
stages = split(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), cluster.workers)
sgd = (torch.optim.SGD, {"lr": 0.1})
pipe = Pipeline(stages, microbatches=4, loss_fn=nn.functional.mse_loss, optimizer=sgd)
for _ in range(4):
    pipe.step(torch.ones(16, 8), torch.zeros(16, 2))"""
PLACES = """() => Object.fromEntries(['.rb-workers', '.rb-pipeline .rb-body', '.rb-progress .rb-head'].map(part => {
  const { top, bottom, height } = document.querySelector('.rbx-board ' + part).getBoundingClientRect();
  return [part, { top, bottom, height }];
}))"""
WIDER = """() => [...document.querySelectorAll('.rbx-board .rb-body, .rbx-board .rb-head')]
  .filter(one => one.scrollWidth > one.clientWidth).map(one => one.parentNode.className)"""
PICTURES = os.environ.get("RPCBENCH_PICTURES")  # a folder for pictures of this test, if someone wants to look


def keep(page, name):
    if PICTURES:
        Path(PICTURES, f"{name}.png").write_bytes(page.screenshot())


def test_the_first_screen_of_a_narrow_dashboard(show):
    notebook = show([START, TRAIN], "narrow.ipynb", width=1440, height=800)
    page, board = notebook.page, notebook.page.locator(".rbx-board")
    notebook.run_to_end(START)
    page.evaluate("jupyterapp.commands.execute('rpcbench:sidebar')")
    page.get_by_role("button", name="Dashboard", exact=True).click()
    board.locator("[data-panel=messages] .rb-panel").wait_for()
    board.locator("tr[data-worker='2']").wait_for()
    page.set_viewport_size({"width": 1120, "height": 800})  # in a narrow window it would be opened below the notebook
    board.locator(".rb-workers.rb-small").wait_for()
    bottom = board.bounding_box()["y"] + board.bounding_box()["height"]
    assert board.bounding_box()["width"] < 420
    keep(page, "empty")
    assert page.evaluate(PLACES)[".rb-progress .rb-head"]["bottom"] <= bottom
    assert board.locator(".rb-pipeline .rb-hint").is_visible()

    notebook.activate()
    notebook.run_to_end(TRAIN)
    assert notebook.errors() == []
    board.locator(".rb-pipeline .rb-op").first.wait_for()
    settles(page, lambda: page.evaluate(WIDER), [])
    places = page.evaluate(PLACES)
    keep(page, "trained")
    assert places[".rb-progress .rb-head"]["bottom"] <= bottom, places
    assert places[".rb-progress .rb-head"]["height"] < 40

    opener = board.locator("tr[data-worker='2'] .rb-menu-button")
    opener.press("Enter")
    menu = page.get_by_role("menu", name="What to do with worker2")
    page.wait_for_timeout(1500)  # in which the table is drawn anew several times
    keep(page, "menu")
    page.keyboard.press("ArrowDown")
    assert menu.get_by_role("menuitem", name="interrupt worker2").evaluate("one => one === document.activeElement")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert not menu.is_visible() and opener.evaluate("one => one === document.activeElement")
    board.locator("tr[data-worker='2'] + tr .rb-stacks").wait_for()
    board.locator(".rb-pipeline .rb-menu-button").click()
    board.locator(".rb-pipeline").get_by_role("button", name="Live cursor").click()
    keep(page, "pipeline")
    page.keyboard.press("Escape")
    assert notebook.errors() == []
