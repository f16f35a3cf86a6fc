"""What a user of JupyterLab does in cells of a worker: answer a prompt, move a slider, complete a name."""

from __future__ import annotations

import contextlib
import time

import pytest
from worlds import PATIENCE

TimeoutError = pytest.importorskip("playwright.sync_api", reason="needs playwright").TimeoutError

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

START = "%load_ext rpcbench\n%cluster start 1"
ASKS = "%%remote worker1\nname = input('Who? ')\nprint('hello', name)"
HANGS = "%%remote worker1\ninput('Nobody? ')"
SLIDER = "%%remote worker1\nfrom ipywidgets import IntSlider\nslider = IntSlider(5, description='speed')\nslider"
WAITS = """%%remote worker1
import time
print('it', 'waits')
while slider.value < 7:
    time.sleep(0.01)
print('it moved to', slider.value)
slider.description = 'moved'"""
BAR = "%%remote worker1\nfrom tqdm.notebook import tqdm\nfor i in tqdm(range(4), desc='bar'):\n    pass"
TYPED = "%%remote worker1\nslider.descr"
STOP = "%cluster stop"


@pytest.fixture
def notebook(show):
    notebook = show((START, ASKS, HANGS, SLIDER, WAITS, BAR, TYPED, STOP), "talk.ipynb")
    notebook.run_to_end(START)
    return notebook


@pytest.mark.long
def test_a_worker_asks_and_its_widgets_move_and_its_names_complete(notebook):
    _answer(notebook)
    _slide(notebook)
    _complete(notebook)
    notebook.run_to_end(STOP)


def _answer(notebook):
    notebook.run(ASKS)
    box = notebook.cell(ASKS).locator(".jp-Stdin")
    assert "[worker1] Who?" in box.inner_text()
    box.locator(".jp-Stdin-input").fill("Ada")
    box.locator(".jp-Stdin-input").press("Enter")
    notebook.output(ASKS).filter(has_text="hello Ada").wait_for()
    notebook.ended(ASKS)

    notebook.run(HANGS)
    notebook.cell(HANGS).locator(".jp-Stdin-input").wait_for()
    notebook.page.locator("[data-command='notebook:interrupt-kernel']").click()
    notebook.ended(HANGS)
    notebook.output(HANGS).filter(has_text="KeyboardInterrupt").wait_for()


def _slide(notebook):
    notebook.run_to_end(SLIDER)
    handle = notebook.cell(SLIDER).locator(".noUi-handle")
    notebook.run(WAITS)
    notebook.output(WAITS).filter(has_text="it waits").wait_for()
    handle.press("ArrowRight")  # while the notebook waits for a cell
    handle.press("ArrowRight")
    notebook.output(WAITS).filter(has_text="it moved to 7").wait_for()
    notebook.cell(SLIDER).locator(".widget-label").filter(has_text="moved").wait_for()
    notebook.ended(WAITS)
    notebook.run(BAR)
    notebook.cell(BAR).locator(".widget-hbox").filter(has_text="4/4").wait_for()
    notebook.ended(BAR)


def _complete(notebook):
    editor = notebook.cell(TYPED).locator(".cm-content")
    editor.click()
    editor.press("Control+End")
    item = notebook.page.locator(".jp-Completer-item").filter(has_text="description_tooltip")
    deadline = time.monotonic() + PATIENCE
    while not item.is_visible():  # a worker that is late with its names sends none
        assert time.monotonic() < deadline
        editor.press("Tab")
        with contextlib.suppress(TimeoutError):
            item.wait_for(timeout=3000)
