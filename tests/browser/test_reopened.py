"""A record that was played in a saved notebook plays there again, opened later in JupyterLab with no kernel at all."""

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
    notebook = show(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in CELLS]), "record.ipynb")
    for source in CELLS:
        notebook.run(source)
        notebook.ended(source)
    notebook.cell(PLAYS).locator(".rb-rrefs .rb-stat").first.wait_for()
    assert notebook.errors() == []
    notebook.page.evaluate(SAVE)
    notebook.page.close()
    return notebook


def plays(notebook):
    """Whether the page in the cell's output goes from no RRef to one, and back."""
    alone = notebook.cell(PLAYS).frame_locator("iframe")
    rows, step = alone.locator("[data-rref]"), alone.get_by_role("button", name="Step", exact=True)
    alone.get_by_text("No RRef yet").wait_for()
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
