"""What a user of JupyterLab does without a magic: starts workers, aims cells, restarts a worker, opens a panel."""

from __future__ import annotations

import os
import signal

import nbformat
import pytest
from worlds import until

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

WHERE = "import os\nprint('it runs in', os.getpid())"
OPTIONS = "%%remote worker2 -o y\ny = 6 * 7"
DROPPED = "print('dropped')"
WORKERS = "cluster.workers if 'cluster' in globals() else None"
PANELS = "[type(w).__name__ for w in __import__('ipywidgets').Widget.widgets.values() if 'Panel' in str(type(w))]"
RESTART = "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"

NARROW = """from rpcbench import rpc
made_here = 'a long line, which begins at the left and goes on to the right until the toolbar would lie upon it, and on'
rref = rpc.remote('worker1', complex, (1, 2))
_ = rref.to_here()"""
LAST = "at = 'the end'"
IN_SIGHT = """index => {
  const { content } = jupyterapp.shell.currentWidget;
  const { top, bottom } = content.widgets[index].node.getBoundingClientRect();
  return content.activeCellIndex === index && top < bottom && top >= 0 && bottom <= window.innerHeight;
}"""


@pytest.fixture
def notebook(show, tmp_path):
    waits = f"import pathlib, time\nprint('it', 'waits')\nwhile not pathlib.Path({str(tmp_path)!r}, 'go').exists():\n"
    cells = [WHERE, OPTIONS, DROPPED, f"{waits}    time.sleep(0.02)"]
    opened = show(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells]), "bench.ipynb")
    opened.page.evaluate("jupyterapp.commands.execute('rpcbench:sidebar')")
    return opened


@pytest.fixture
def side(notebook):
    return notebook.page.get_by_role("region", name="rpcbench: workers")


def reads(notebook, text, wanted):
    """Wait until the cell's source is this."""
    source = notebook.cell(text).locator(".cm-content")
    until(lambda: source.inner_text() == wanted, f"{wanted!r} in the cell {text!r}")


def pick(notebook, text, target):
    """Choose in the toolbar of a cell where it runs."""
    notebook.cell(text).locator(".cm-content").click()
    notebook.cell(text).get_by_label("Runs on").select_option(target)


def pid(notebook, worker):
    return notebook.value(f"cluster.pid({worker!r})")


def test_a_session_by_clicks(notebook, side, tmp_path):
    _start(notebook, side)
    _aim(notebook, side)
    _restart_while_a_cell_runs(notebook, side)
    _panel_while_a_cell_runs(notebook, side)
    (tmp_path / "go").touch()
    notebook.ended("'waits'")
    _change_the_number(side)
    _stop(notebook, side)
    _begin_anew(notebook, side)


def _start(notebook, side):
    side.get_by_text("Runs %load_ext rpcbench in this notebook's kernel first").wait_for()
    side.get_by_role("button", name="Start 2 workers").click()
    side.get_by_role("listitem").filter(has_text="worker2ready").wait_for()
    until(lambda: notebook.value(WORKERS) == ["worker1", "worker2"], "both workers")
    notebook.page.get_by_role("button", name="rpcbench: 2 workers").wait_for()


def _aim(notebook, side):
    pick(notebook, WHERE, "worker1")
    notebook.run(WHERE)
    notebook.output(WHERE).filter(has_text=f"it runs in {pid(notebook, 'worker1')}").wait_for()
    pick(notebook, WHERE, "")
    reads(notebook, WHERE, WHERE)

    assert notebook.cell(OPTIONS).get_by_label("Runs on").count() == 0  # of the active cell only
    pick(notebook, OPTIONS, "worker1")
    reads(notebook, OPTIONS, OPTIONS.replace("worker2", "worker1"))

    picker = notebook.cell(OPTIONS).get_by_label("Runs on")
    picker.press("a")  # all; to the notebook it would mean a new cell above
    reads(notebook, OPTIONS, OPTIONS.replace("worker2", "all"))
    assert notebook.page.locator(".jp-Notebook .jp-CodeCell").count() == 4

    _drag(notebook, side)


def _drag(notebook, side):
    """A page that is busy may take the mouse for a click; dragged twice, the line stands there once."""
    wanted, source = f"%%remote worker2\n{DROPPED}", notebook.cell(DROPPED).locator(".cm-content")

    def dropped():
        side.locator("[data-worker=worker2]").drag_to(notebook.cell(DROPPED))
        return source.inner_text() == wanted

    until(dropped, "worker2 dragged to a cell")


def _restart_while_a_cell_runs(notebook, side):
    victim = pid(notebook, "worker2")
    notebook.run("'waits'")
    notebook.output("'waits'").filter(has_text="it waits").wait_for()
    os.kill(victim, signal.SIGKILL)
    side.get_by_role("listitem").filter(has_text="worker2lost: killed by SIGKILL").wait_for()
    notebook.page.get_by_role("button", name="rpcbench: 2 workers, 1 lost").wait_for()
    side.get_by_role("button", name="Start worker2 again").press("Enter")
    side.get_by_role("listitem").filter(has_text="worker2ready").filter(has_text="start 2").wait_for()
    side.get_by_role("status").filter(has_text="Started again: worker2.").wait_for()


def _panel_while_a_cell_runs(notebook, side):
    side.get_by_role("button", name="rrefs", exact=True).click()
    tab = notebook.page.locator(".rb-tab")
    tab.locator(".rb-panel").filter(has_text="worker2").wait_for()
    assert notebook.cell("'waits'").locator(".jp-InputPrompt").inner_text() == "[*]:"


def _change_the_number(side):
    side.get_by_role("button", name="One more worker for main").click()
    side.get_by_role("listitem").filter(has_text="worker3ready").wait_for()
    side.get_by_role("button", name="One fewer worker for main").click()
    side.page.get_by_role("button", name="End", exact=True).click()
    side.get_by_role("listitem").filter(has_text="worker3").wait_for(state="detached")
    side.get_by_role("status").filter(has_text="2 workers:").wait_for()  # its last word, which may come later
    side.get_by_role("button", name="Interrupt worker1").click()
    side.get_by_role("status").filter(has_text="Interrupted: worker1.").wait_for()


def _stop(notebook, side):
    notebook.page.get_by_role("tab", name="rrefs: bench.ipynb").locator(".lm-TabBar-tabCloseIcon").click()
    notebook.page.locator(".rb-tab").wait_for(state="detached")
    side.get_by_role("button", name="Stop main").click()
    notebook.page.get_by_role("button", name="Stop", exact=True).click()
    side.get_by_role("status").filter(has_text="The cluster is stopped.").wait_for()
    until(lambda: notebook.value(PANELS) == [], "the panel to be closed with its tab")
    assert notebook.errors() == []


def _begin_anew(notebook, side):
    """A kernel that was started again has nothing loaded, and the sidebar says so."""
    side.get_by_role("button", name="Start 2 workers").wait_for()
    notebook.page.evaluate(RESTART)
    side.get_by_text("Runs %load_ext rpcbench in this notebook's kernel first").wait_for()
    notebook.run(DROPPED)  # its line is no magic there
    notebook.output(DROPPED).filter(has_text="`%%remote` not found").wait_for()


@pytest.mark.long
def test_a_narrow_cell_has_its_picker_and_a_tab_finds_a_cell(show):
    """The notebook is narrow as a panel stands beside it."""
    filler = [f"'line'\n{'#' * i}" + "\n" * 30 for i in range(1, 20)]
    cells = [
        nbformat.v4.new_code_cell(each) for each in ("%load_ext rpcbench\n%cluster start 1", NARROW, *filler, LAST)
    ]
    notebook = show(nbformat.v4.new_notebook(cells=cells), "narrow.ipynb", width=1000, height=700)
    page = notebook.page
    for each in ("%cluster", NARROW):
        notebook.run(each)
        notebook.ended(each)
    page.evaluate("jupyterapp.commands.execute('rpcbench:sidebar')")
    side = page.get_by_role("region", name="rpcbench: workers")
    side.get_by_role("button", name="rrefs", exact=True).click()
    link = page.locator(".rb-tab").get_by_role("link", name="show cell 2, which made RRef 0.0 on notebook")
    link.wait_for()
    _aim_where_it_is_narrow(notebook)

    notebook.cell(LAST).locator(".cm-content").click()
    assert not page.evaluate(IN_SIGHT, notebook.index(NARROW))
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_function(IN_SIGHT, arg=notebook.index(NARROW), polling=50)
    assert notebook.errors() == []


def _aim_where_it_is_narrow(notebook):
    cell = notebook.cell(NARROW)
    cell.locator(".cm-content").click()
    picker, copy = cell.get_by_label("Runs on"), cell.locator("[data-command='notebook:duplicate-below']")
    picker.wait_for()
    copy.wait_for(state="hidden")  # JupyterLab's own buttons
    above, code = picker.bounding_box(), cell.locator(".cm-content").bounding_box()
    assert above["y"] + above["height"] <= code["y"] and above["x"] + above["width"] <= code["x"] + code["width"]
    picker.select_option("worker1")
    reads(notebook, NARROW, f"%%remote worker1\n{NARROW}")
    picker.select_option("")
    reads(notebook, NARROW, NARROW)
