"""Panels on a page that is kept from running while they open: they move afterwards."""

from __future__ import annotations

import pytest
from lab import settles

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(600)]

START = "%load_ext rpcbench\n%cluster start 2"
MAKE = "from rpcbench import rpc\nrref = rpc.remote('worker1', complex, (1, 2))\nrref.to_here()"
TRAIN = """from torch import nn, ones
from rpcbench.pipeline import Pipeline, split
stages = split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), ["worker1", "worker2"])
pipe = Pipeline(stages, microbatches=2, loss_fn=lambda output, target: output.sum())
pipe.step(ones(4, 4), ones(4))"""
MODEL = "%%remote all\nfrom torch import nn\nmodel = nn.Sequential(nn.Linear(4, 4))"
SHARD = "%%remote all\nmodel[0].weight.data.zero_()"
BACKWARD = """import torch
import rpcbench.autograd as dist_autograd
from rpcbench import rpc
with dist_autograd.context() as context_id:
    loss = rpc.rpc_sync("worker1", torch.add, (torch.ones(2, requires_grad=True), 1)).sum()
    dist_autograd.backward(context_id, [loss])"""
AFTER = {  # the cell that changes the picture, and a text that is there afterwards
    "workers": (MAKE, "worker1"),
    "rrefs": (MAKE, "complex"),
    "messages": (MAKE, "complex"),
    "pipeline": (TRAIN, "loss"),
    "autograd": (BACKWARD, "held until the release"),
    "shards": (SHARD, "0.weight"),
}
BLOCK = """milliseconds => {
  const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
  const hold = () => { const end = Date.now() + milliseconds; while (Date.now() < end); };
  const heard = (_, { msg }) => {
    if (msg.header.msg_type !== 'comm_open' || msg.content.target_name !== 'jupyter.widget') return;
    kernel.anyMessage.disconnect(heard);
    setTimeout(hold, 5);
  };
  kernel.anyMessage.connect(heard);
}"""  # so holds the page's thread while a widget's model is being made


@pytest.mark.long
@pytest.mark.parametrize("name", AFTER)
def test_a_panel_moves_on_a_page_that_stood_still_while_it_opened(show, name):
    change, text = AFTER[name]
    opened = f"%panel {name}{' model' if name == 'shards' else ''}"
    notebook = show([START, MODEL, opened, change], f"blocked-{name}.ipynb")
    notebook.run_to_end(START, MODEL)
    notebook.page.evaluate(BLOCK, 5000)
    notebook.run_to_end(opened)
    panel = notebook.cell(opened).locator(f".rb-{name}")
    cell = notebook.cell(opened)
    settles(notebook.page, lambda: panel.locator(".rb-chip").all_inner_texts() or cell.inner_text(), ["Live"])
    notebook.run_to_end(change)
    panel.get_by_text(text).filter(visible=True).first.wait_for()


@pytest.mark.long
def test_a_last_picture_has_its_time_and_a_way_back(show):
    notebook = show([START, "%panel workers", MAKE], "pictures.ipynb")
    notebook.run_to_end(START, "%panel workers")
    cell = notebook.cell("%panel workers")
    cell.locator(".rb-workers .rb-chip").wait_for()
    drop = "panel => panel.closest('.jp-OutputArea-child').replaceChildren()"
    cell.locator(".rb-panel").evaluate(drop)  # as where JupyterLab has given a widget up
    cell.get_by_text("This is the last picture, of ").filter(visible=True).wait_for()
    cell.get_by_role("button", name="Show live").click()
    settles(notebook.page, lambda: cell.locator(".rb-chip").all_inner_texts(), ["Live"])
    assert not cell.locator(".rb-still").is_visible()
    notebook.run_to_end(MAKE)  # the picture is renewed then
    settles(notebook.page, lambda: cell.locator(".rb-chip").all_inner_texts(), ["Live"])
    assert not cell.locator(".rb-still").is_visible()
