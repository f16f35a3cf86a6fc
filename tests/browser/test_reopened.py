"""A saved notebook, opened later with no kernel at all: records play, and each panel has left its last picture."""

from __future__ import annotations

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

CELLS = [
    "%load_ext rpcbench\n%cluster start 1",
    "%record lesson.json",
    "from rpcbench import rpc\nrref = rpc.remote('worker1', complex, (1, 2))\nrref.to_here()",
    "%record stop",
    "%cluster stop",
    "import rpcbench\nplayed = rpcbench.replay('lesson.json', 'rrefs')\nplayed",
]
PLAYS = "rpcbench.replay"
SAVE = "jupyterapp.commands.execute('docmanager:save')"
TRUST = "() => void jupyterapp.commands.execute('notebook:trust')"  # it asks before it ends


@pytest.fixture
def saved(lab, show):
    """Run by its user, whose Jupyter trusts it."""
    notebook = show(CELLS, "record.ipynb")
    notebook.run_to_end(*CELLS)
    notebook.cell(PLAYS).locator(".rb-rrefs .rb-stat").first.wait_for()
    assert notebook.errors() == []
    notebook.page.evaluate(SAVE)
    notebook.page.close()
    return notebook


def plays(notebook):
    """Whether the page in the cell's output opens with the record's one RRef, and goes from none to it and back."""
    alone = notebook.cell(PLAYS).frame_locator("iframe")
    rows, step = alone.locator("[data-rref]"), alone.get_by_role("button", name="Step", exact=True)
    rows.filter(has_text="complex").wait_for()
    alone.get_by_role("slider").fill("0")
    alone.get_by_text("Nothing is here at this moment of the record.").wait_for()
    while not rows.filter(has_text="complex").count():
        step.click()
    alone.get_by_role("slider").fill("0")
    rows.first.wait_for(state="detached")


@pytest.mark.long
def test_a_record_plays_in_a_notebook_that_is_reopened_without_a_kernel(lab, saved):
    again = lab.reopen(saved)
    again.cell(PLAYS).get_by_text("The record, played without a kernel").click()
    plays(again)
    again.page.close()

    file = lab.folder / saved.name
    foreign = nbformat.read(file, 4)
    foreign.metadata.title = "somebody else's"  # signed by nobody here
    nbformat.write(foreign, file)
    again = lab.reopen(saved)
    again.cell(PLAYS).get_by_text("The record, played without a kernel").click()
    again.cell(PLAYS).get_by_text("This notebook is not trusted here").filter(visible=True).wait_for()
    assert again.cell(PLAYS).locator("iframe").count() == 0
    again.page.evaluate(TRUST)
    again.page.get_by_role("button", name="Confirm Trusting this notebook").click()
    again.cell(PLAYS).get_by_text("The record, played without a kernel").click()
    plays(again)


MAKE = "from rpcbench import rpc\nrref = rpc.remote('worker1', complex, (1, 2))\nrref.to_here()"
SHOWN = ["%load_ext rpcbench\n%cluster start 1", "%panel rrefs", MAKE, "%%trace\nrpc.rpc_sync('worker1', abs, (-3,))"]
RESTART = "() => void jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
ERRORS = ("Error displaying widget", "Loading widget")


@pytest.mark.long
@pytest.mark.parametrize("lab", ["jupyterlab", "notebook"], indirect=True)
def test_where_a_panel_was_stands_its_last_picture(lab, show):
    notebook = show(SHOWN, "stills.ipynb")
    notebook.run_to_end(*SHOWN)
    panel, still = notebook.cell("%panel").locator(".rb-rrefs"), notebook.cell("%panel").locator(".rb-still")
    panel.locator("[data-rref]", has_text="complex").wait_for()
    assert not still.is_visible() and panel.locator(".rb-chip").inner_text() == "Live"
    assert notebook.cell("%%trace").locator(".rb-chip").inner_text() == "Record"

    panel.get_by_role("button", name="Leave a snapshot in the notebook").click()
    notebook.cell("%panel").locator("img:visible").wait_for()
    notebook.page.evaluate(RESTART)
    panel.locator(".rb-chip", has_text="Kernel restarted").wait_for()
    assert panel.locator("[data-rref]", has_text="complex").is_visible()
    assert panel.locator(".rb-camera").is_disabled()
    notebook.page.evaluate(SAVE)
    notebook.page.close()

    again = lab.reopen(notebook)
    pictures = again.cell("%panel").locator("img:visible")
    pictures.nth(1).wait_for()
    told = pictures.evaluate_all("all => all.map(one => one.alt)")
    assert ["1 RRef, 1 fork" in words for words in told] == [True, True]
    assert "call abs" in again.cell("%%trace").locator("img:visible").get_attribute("alt")
    for words in ERRORS:
        assert again.page.get_by_text(words).filter(visible=True).count() == 0
    again.page.close()
