"""Lesson 31 in JupyterLab: while it trains, gathered parameters light up, and torch's own collectives come and go."""

from __future__ import annotations

import re
import shutil

import nbformat
import pytest
from lab import ROOT, settles

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(600), pytest.mark.long]

LESSON = ROOT / "notebooks" / "31_fsdp_times_tensor_parallel.ipynb"
MODULES = ("tiny_transformer.py", "recipes.py", "ring_attention.py")
CUT = ["%cluster start", "numbers to learn", "cluster.mesh(", "ColwiseParallel", "fully_shard(model"]
PANELS = ["%panel shards", "%panel messages"]
TRAIN, TRACE, TIMELINE = "train_step(number) for", "rpcbench.trace()", "# over time"
PARAMETERS = 29
STEPS = int(re.search(r"train_step\(number\) for number in range\((\d+)\)", LESSON.read_text())[1])

# Keeps, from now on: parameters that were seen whole, those that flashed as they had been whole between two pictures,
# and collectives that were seen in the other panel, while this cell ran.
WATCH = """index => {
  const cell = document.querySelectorAll('.jp-Notebook .jp-Cell')[index];
  const runs = () => cell.querySelector('.jp-InputPrompt').textContent === '[*]:';
  window.seen = {whole: {}, flashed: {}, collectives: {}};
  const parameters = kind => [...document.querySelectorAll(`.rb-shards td.${kind}`)].map(
    piece => piece.closest('[data-param]').dataset.param);
  const look = () => {
    if (!runs()) return;
    for (const name of parameters('rb-now')) window.seen.whole[name] = true;
    for (const name of parameters('rb-flash')) window.seen.flashed[name] = true;
    for (const row of document.querySelectorAll('.rb-messages [data-message]'))
      if (row.querySelector('.rb-dot')) window.seen.collectives[row.querySelector('title').textContent] = true;
  };
  new MutationObserver(look).observe(document.body, {subtree: true, childList: true, attributes: true});
}"""
LIT = "count => Object.keys({...seen.whole, ...seen.flashed}).length === count && Object.keys(seen.whole).length > 0"
OPS = "ops => ops.every(op => Object.keys(seen.collectives).some(words => words.startsWith(op)))"
STEPS_OF = "heads => heads.map(head => Number(head.dataset.steps))"


def test_gathered_parameters_light_up_and_collectives_come_while_a_cell_trains(show, lab):
    for name in MODULES:
        shutil.copy(ROOT / "notebooks" / name, lab.folder)
    lesson = nbformat.read(LESSON, 4)
    code = [cell for cell in lesson.cells if cell.cell_type == "code"]
    lesson.cells = [cell for cell in code if not any(":" in tag for tag in cell.metadata.get("tags", ()))]  # exercises
    notebook = show(lesson, LESSON.name, height=3200)
    page = notebook.page
    notebook.run_to_end(*CUT, *PANELS)
    shards = page.locator(".rb-panel.rb-shards")
    settles(page, shards.locator("[data-param]").count, PARAMETERS)
    assert shards.locator("thead th[data-worker]").count() == 4
    assert shards.locator(".rb-mesh [data-rank]").count() == 4

    page.evaluate(WATCH, notebook.index(TRAIN))
    notebook.run(TRAIN)
    page.wait_for_function(LIT, arg=PARAMETERS, polling=50)
    page.wait_for_function(OPS, arg=["all_gather", "reduce_scatter", "all_reduce"], polling=50)
    notebook.ended(TRAIN)
    settles(page, lambda: shards.locator("thead th[data-worker]").evaluate_all(STEPS_OF), [STEPS] * 4)

    notebook.run_to_end(TRACE, TIMELINE)
    still = notebook.output(TIMELINE).locator("img")
    still.wait_for()
    assert "kept the others waiting" in still.get_attribute("alt")
    assert notebook.errors() == []
