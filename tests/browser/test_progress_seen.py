"""Jobs and cells as a user of JupyterLab sees them: a map that runs, a cell that fails, that of a row, run again."""

from __future__ import annotations

import nbformat
import pytest
from lab import READY, settles

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

MAP = """import os, pathlib, time
def wait(path):
    while not os.path.exists(path):
        time.sleep(0.01)
waits = cluster.map(wait, [WAIT] * 5, progress=False)"""
TAKE = "len(list(waits))"
COUNT = "%%remote worker1\nimport __main__\n__main__.count = getattr(__main__, 'count', 0) + 1"
BAD = "%%remote worker2\n1 / 0"
CHANGED = "%%remote worker2\ny = 1"
STATES = "all => all.map(one => [one.querySelector('.rb-source').textContent, one.dataset.state]).slice(0, 3)"
CURRENT = "() => jupyterapp.shell.currentWidget.content.activeCellIndex"


def test_jobs_and_cells_are_seen_and_a_cell_runs_again(show, tmp_path):
    wait = f"WAIT = {str(tmp_path / 'go')!r}"
    cells = ["%load_ext rpcbench\n%cluster start 2", "%panel progress", f"{wait}\n{MAP}", TAKE, COUNT, BAD, CHANGED]
    notebook = show(cells, "progress.ipynb")
    page = notebook.page
    notebook.run_to_end("%cluster start", "%panel")
    live = notebook.output("%panel").locator(".rb-progress")
    notebook.run_to_end("cluster.map")
    job = live.locator("[data-job]")
    job.locator("text=0 of 5 items done, 2 running").wait_for()
    job.locator(".rb-time", has_text="2 s").wait_for()  # by the clock of the page
    (tmp_path / "go").touch()
    notebook.run_to_end("waits))")
    job.locator("text=5 of 5 items").wait_for()
    assert job.locator(".rb-state").inner_text().strip() == "done"

    notebook.run_to_end("count", "y = 1")
    notebook.run("1 / 0")
    rows = live.locator(".rb-cells tbody tr")
    wanted = [["1 / 0", "error"], ["y = 1", "ok"], ["import __main__", "ok"]]
    settles(page, lambda: rows.evaluate_all(STATES), wanted)
    assert "ZeroDivisionError" in rows.nth(0).locator(".rb-state").inner_text()
    rows.nth(2).locator(".rb-where").click()
    settles(page, lambda: page.evaluate(CURRENT), notebook.index("count"))

    rows.nth(2).get_by_role("button", name="run again").click()
    wanted = [["import __main__", "ok"], *wanted[:2]]
    settles(page, lambda: rows.evaluate_all(STATES), wanted)
    assert notebook.value("cluster.run('worker1', '__main__.count')") == 2
    again = live.locator(".rb-cells tbody tr", has_text="y = 1").get_by_role("button", name="run again")
    page.evaluate(
        "index => jupyterapp.shell.currentWidget.content.widgets[index].model.sharedModel.setSource('y = 2')",
        notebook.index("y = 1"),
    )
    again.click()
    live.get_by_text("The cell has changed, or is gone: run it in the notebook.").wait_for()


FRONT = "() => jupyterapp.shell.currentWidget.context?.path"
PROMPTS = """() => Object.fromEntries([...jupyterapp.shell.widgets('main')].filter(one => one.context).map(
  ({ context, content }) => [context.path, content.widgets.map(one => one.model.executionCount)]))"""


def test_a_panel_finds_and_runs_the_cells_of_its_own_notebook_not_those_of_a_copy(show, lab):
    notebook = show(["%load_ext rpcbench\n%cluster start 1", CHANGED.replace("2", "1")], "one.ipynb")
    page = notebook.page
    nbformat.write(nbformat.read(lab.folder / "one.ipynb", 4), lab.folder / "copy.ipynb")  # with the same ids
    page.evaluate("() => void jupyterapp.commands.execute('docmanager:open', {path: 'copy.ipynb'})")
    page.wait_for_function("() => jupyterapp.shell.currentWidget?.context?.path === 'copy.ipynb'")
    page.wait_for_function(READY, polling=100)
    page.evaluate("() => void jupyterapp.commands.execute('notebook:run-all-cells')")
    settles(page, lambda: page.evaluate(PROMPTS), {"one.ipynb": [None, None], "copy.ipynb": [1, 2]})
    page.evaluate("() => void jupyterapp.commands.execute('rpcbench:panel', {name: 'progress'})")
    row = page.locator(".rbx-tab .rb-cells tbody tr")
    row.locator(".rb-where").click()
    settles(page, lambda: page.evaluate(FRONT), "copy.ipynb")
    row.get_by_role("button", name="run again").click()
    settles(page, lambda: page.evaluate(PROMPTS), {"one.ipynb": [None, None], "copy.ipynb": [1, 3]})
