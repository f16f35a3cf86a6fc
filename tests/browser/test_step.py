"""Stepping in JupyterLab: clicks and keys let messages go, another panel follows, and the cell comes to its end."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

SOURCES = [
    "%load_ext rpcbench\n%cluster start 2",
    "%panel rrefs",
    "%%step\nimport rpcbench.rpc as rpc\nrref = rpc.remote('worker1', divmod, (17, 5))\nprint('it is', rref.to_here())",
    "%cluster stop",
]


@pytest.mark.long
def test_messages_go_by_clicks_and_keys(show):
    notebook = show(SOURCES, "step.ipynb", height=1100)
    page = notebook.page
    notebook.run_to_end("%cluster start", "%panel", "%%step")
    step, rrefs = page.locator(".rb-step"), page.locator(".rb-rrefs")
    held = step.locator(".rb-held")
    held.filter(has_text="Create").wait_for()
    assert rrefs.locator("[data-rref] .rb-owner.rb-ready").count() == 0
    step.get_by_role("button", name="Deliver next").click()
    rrefs.locator("[data-rref] .rb-owner.rb-ready").wait_for()  # worker1 has made it; the notebook does not know
    rrefs.locator("[data-rref] .rb-fork.rb-pending").wait_for()
    row = held.filter(has_text="ForkAccept")
    row.focus()
    page.keyboard.press("Enter")
    rrefs.locator("[data-rref] .rb-fork.rb-confirmed").wait_for()
    output = notebook.cell("%%step").locator(".jp-OutputArea").first
    while output.get_by_text("it is (3, 2)").count() == 0:
        step.get_by_role("button", name="Deliver next").evaluate("b => b.disabled || b.click()")
        page.wait_for_timeout(50)
    step.get_by_role("button", name="Release all").click()
    step.get_by_text("Messages are no longer held.").wait_for()
    assert notebook.errors() == []
    notebook.run_to_end("%cluster stop")
