"""The pictures of panels in the docs, taken in JupyterLab.

    PYTHONPATH=tests python tests/browser/shots.py docs/pictures

Each panel once in the light theme and once in the dark one, of a cluster that is at work.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from lab import running

START = "%load_ext rpcbench\n%cluster start 4"
MAKE = """import time, torch
import rpcbench.rpc as rpc
rows = [rpc.remote(f"worker{1 + i % 3}", torch.ones, (250_000 * (1 + i),)) for i in range(5)]
model = rpc.remote("worker2", torch.nn.Linear, (512, 512))
shared = [rpc.rpc_sync("worker4", list, ([row],)) for row in rows[:2]]
keeper = rpc.remote("worker4", list, ([*rows[2:4], model],))
for each in (*rows, model, keeper):
    each.to_here()
busy = [rpc.rpc_async("worker2", time.sleep, (60,)) for _ in range(3)]"""
CELL = "%%remote worker1 --async\nimport time\ntime.sleep(60)"
LOG = "_ = cluster.rpc_sync('worker3', print, ('loader: shard 7 of 12 is read',))"
LOSE = "import os, signal\nos.kill(cluster.pid('worker4'), signal.SIGKILL)"
PANELS = ("workers", "rrefs")
TALK = [
    "%load_ext rpcbench\n%cluster start 3",
    """import torch, rpcbench.rpc as rpc, rpcbench.autograd as dist_autograd

def there_and_on(x, to):
    return rpc.rpc_sync(to, torch.mul, (x, 2.0)) * x""",
    "%panel messages",
    """x = torch.ones(1000, requires_grad=True)
rref = rpc.remote("worker1", torch.ones, (1000,))
with dist_autograd.context() as context_id:
    y = rpc.rpc_sync("worker2", there_and_on, (x, "worker3"))
    dist_autograd.backward(context_id, [(y * rpc.rpc_sync("worker1", torch.neg, (x,))).sum()])
rpc.rpc_sync("worker3", rpc.RRef.to_here, (rref,)).sum()
del rref""",
]

TOGETHER = [
    "%load_ext rpcbench\n%cluster start 4",
    """%%remote all
import torch, rpcbench.distributed as dist
dist.init_process_group("gloo")
weights, slow = torch.ones(512, 512), dist.get_rank() == 1""",
    "%panel messages",
    """%%remote all
for step in range(4):
    for _ in range(40 if slow else 4 + dist.get_rank()):
        torch.mm(weights, weights)
    dist.all_reduce(weights)
    dist.broadcast(weights, 0)""",
    "import rpcbench\nrpcbench.collectives()",
    "%%remote worker1 worker2 worker4 --async\ndist.barrier()",
]


def shoot(folder: Path, dark: bool) -> None:
    """One picture for each panel."""
    panels = {name: f"%panel {name}" for name in PANELS}
    sources = [START, MAKE, CELL, LOG, panels["rrefs"], panels["workers"], LOSE]
    with tempfile.TemporaryDirectory() as home, running(Path(home), dark) as lab:
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        notebook = lab.open(nbformat.v4.new_notebook(cells=cells), "panels.ipynb", width=1300, height=2000)
        page = notebook.page
        page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
        for source in sources:
            if source == LOSE:
                page.locator("[data-rref]").nth(6).wait_for()
                _take(page, folder, "rrefs", dark)
            notebook.run(source)
            notebook.ended(source)
        page.locator("tr[data-worker='4'][data-state='lost']").wait_for()
        page.locator("tr[data-worker='1'][data-doing='cell']").wait_for()
        page.locator("tr[data-worker='2'][data-busy='3']").wait_for()
        page.locator("tr[data-worker='3'] .rb-opener").click()
        _take(page, folder, "workers", dark)


def shoot_messages(folder: Path, dark: bool) -> None:
    """What two lines of a program say, between all workers."""
    with tempfile.TemporaryDirectory() as home, running(Path(home), dark) as lab:
        cells = [nbformat.v4.new_code_cell(source) for source in TALK]
        notebook = lab.open(nbformat.v4.new_notebook(cells=cells), "messages.ipynb", width=1300, height=1400)
        page = notebook.page
        page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
        for source in TALK:
            notebook.run(source)
            notebook.ended(source)
        page.locator("[data-message]", has_text="release context").first.wait_for()
        page.locator(".rb-messages .rb-body").evaluate("body => { body.scrollTop = 0; }")
        page.locator("[data-message]", has_text="call there_and_on").first.dispatch_event("click")
        page.locator(".rb-chosen").wait_for()
        _take(page, folder, "messages", dark)


def shoot_collectives(folder: Path, dark: bool) -> None:
    """What four workers do together, one of them slow, and one missing at the end; as messages and over time."""
    with tempfile.TemporaryDirectory() as home, running(Path(home), dark) as lab:
        cells = [nbformat.v4.new_code_cell(source) for source in TOGETHER]
        notebook = lab.open(nbformat.v4.new_notebook(cells=cells), "collectives.ipynb", width=1300, height=1800)
        page = notebook.page
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
        for source in TOGETHER:
            notebook.run(source)
            notebook.ended(source)
        page.locator("select[aria-label='Kinds of messages']").select_option("collective")
        page.locator("[data-state='open'] .rb-missing").wait_for()
        page.locator("[data-message]", has_text="all_reduce(SUM) #3").first.dispatch_event("click")
        page.locator(".rb-chosen").wait_for()
        _take(page, folder, "collectives", dark, ".rb-messages")
        _take(page, folder, "stragglers", dark, "img[alt*='kept the others waiting']")


def _take(page, folder: Path, name: str, dark: bool, what: str = "") -> None:
    page.evaluate("document.activeElement?.blur()")
    path = folder / f"{name}-{'dark' if dark else 'light'}.png"
    page.locator(what or f".rb-{name}").screenshot(path=path, animations="disabled")


if __name__ == "__main__":
    for dark in (False, True):
        shoot(Path(sys.argv[1]), dark)
        shoot_messages(Path(sys.argv[1]), dark)
        shoot_collectives(Path(sys.argv[1]), dark)
