"""Collectives as a user of JupyterLab sees them: who has come while one is open, who came last, and the timeline."""

from __future__ import annotations

import pytest
from lab import settles

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

CELLS = [
    "%load_ext rpcbench\n%cluster start 2",
    "%%remote all\nimport torch, rpcbench.distributed as dist\ndist.init_process_group('gloo')",
    "%panel messages",
    "%%remote worker1 --async\nx = torch.ones(4)\ndist.all_reduce(x)",
    "%%remote worker2\nx = torch.ones(4)\ndist.all_reduce(x)\nprint(x.sum().item())",
    "import rpcbench\nseen = rpcbench.collectives()\nseen",
]
DOTS = """root => [...root.querySelectorAll('[data-message]')].filter(row => row.querySelector('.rb-dot')).map(row =>
  [row.dataset.state, ...[...row.querySelectorAll('.rb-dot')].map(
    dot => `${dot.dataset.worker} ${dot.getAttribute('class').split(' ').at(-1)}`).sort()])"""


@pytest.mark.long
def test_who_is_missing_is_seen_and_then_who_came_last(show):
    notebook = show(CELLS, "collectives.ipynb")
    notebook.run_to_end("%cluster start", "init_process_group", "%panel", "--async")
    live = notebook.output("%panel").locator(".rb-messages")
    settles(notebook.page, lambda: live.evaluate(DOTS), [["open", "1 rb-came", "2 rb-missing"]])
    notebook.run_to_end("%%remote worker2")
    settles(notebook.page, lambda: live.evaluate(DOTS), [["done", "1 rb-came", "2 rb-last"]])
    row = live.locator("[data-message]", has_text="all_reduce(SUM) #1").first
    assert ", worker2 came last, worker1 waited " in row.locator("title").text_content()

    notebook.run_to_end("rpcbench.collectives()")
    still = notebook.output("rpcbench.collectives()").locator("img")
    still.wait_for()
    assert still.evaluate("one => one.decode().then(() => one.naturalWidth)") >= 700
    assert "worker2 kept the others waiting" in still.get_attribute("alt")
    assert notebook.errors() == []
