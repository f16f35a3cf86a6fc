"""The panels of workers and RRefs in JupyterLab: buttons work while a cell runs, and what stands there is so."""

from __future__ import annotations

import pytest
from lab import settles, unlike

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

START = "%load_ext rpcbench\n%cluster start 2"
PANEL = "%panel workers"
WAITS = """import time
before = cluster.pid("worker2")
print('it', 'waits')
while cluster.pid("worker2") == before:
    time.sleep(0.01)
print('another', 'process')"""
RREFS = "%panel rrefs"
MAKES = """import torch
import rpcbench.rpc as rpc
kept = [rpc.remote(worker, torch.ones, (1000,)) for worker in cluster.workers]
for rref in kept:
    rref.to_here()"""
LOOPS = "%%remote worker1\nprint('it', 'loops')\nwhile True:\n    pass"

OWNED = "{key: [str(i), str(row['size'])] for i, (_, all) in everywhere().items() for key, row in all['owned'].items()}"
OWNERS = "all => Object.fromEntries(all.map(one => [one.dataset.rref, [one.dataset.owner, one.dataset.size]]))"
IN_SIGHT = """index => {
  const { top, bottom } = document.querySelectorAll('.jp-Notebook .jp-Cell')[index].getBoundingClientRect();
  return top >= 0 && bottom <= window.innerHeight;
}"""
ACTIVE = "index => jupyterapp.shell.currentWidget.content.activeCellIndex === index"
ROWS = "all => Object.fromEntries(all.map(one => [one.dataset.worker, {...one.dataset}]))"
TABLES = "{i: {**tables['health'][str(i)], 'incarnation': life} for i, (life, tables) in everywhere().items()}"
ASK = """from rpcbench.runtime.current import current_agent
def own():
    return current_agent().incarnation, current_agent().tables()
def everywhere():
    return {0: own(), **{i: cluster.rpc_sync(f"worker{i}", own) for i in (1, 2)}}
"""


def rows(page):
    return page.locator("tr[data-worker]").evaluate_all(ROWS)


def both(page):
    """What the two panels show."""
    return rows(page), page.locator("[data-rref]").evaluate_all(OWNERS)


def words(tables):
    """The attributes that the rows must have, made from what all members say of themselves."""
    found = {}
    for i, row in tables.items():
        sums = [sum(count[way] for count in row["peers"].values()) for way in (0, 1)]
        figures = {name: row[name] for name in ("incarnation", "pid", "cpu", "memory", "busy", "queued", "cells")}
        values = {"worker": i, **figures, "sent": sums[0], "received": sums[1]}
        found[str(i)] = {name: "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
                         for name, value in values.items()}  # fmt: skip
    return found


def agrees(page, notebook, compared):
    """Wait until, with all quiet, the two views that `compared()` gives are the same. Figures move seldom meanwhile: on
    a busy machine half a second is not enough to ask all and to look."""
    quiet = "STILLS._displayed.clear()"  # a still picture asks all members at the end of each cell, so of each question
    imports = "import rpcbench.telemetry.collector as pulse\nfrom rpcbench.panels.base import STILLS\n"
    notebook.value("0", after=f"{imports}{quiet}\npulse.PERIOD = 2.0")
    settles(page, lambda: unlike(*compared()), None)
    notebook.value("0", after="pulse.PERIOD = 0.5")


def shown_and_told(page, notebook):
    before, tables = rows(page), words(notebook.value(TABLES, after=ASK))
    return {i: {name: row[name] for name in tables.get(i, {})} for i, row in before.items()}, tables


def button(page, worker, name):
    return page.locator(f"tr[data-worker='{worker}']").get_by_role("button", name=name)


def restart(page, worker):
    """The button asks once more, and not for long."""
    button(page, worker, "restart").click()
    page.locator(f"tr[data-worker='{worker}'] button[data-sure]").click()


@pytest.mark.long
def test_workers_are_as_shown_and_buttons_work_while_a_cell_runs(lab, show):
    notebook = show((START, PANEL, MAKES, WAITS, LOOPS, RREFS), "workers.ipynb")
    page = notebook.page
    notebook.run_to_end(START, PANEL, MAKES, RREFS)
    page.locator("tr[data-worker='2'][data-doing='idle']").wait_for()
    agrees(page, notebook, lambda: shown_and_told(page, notebook))

    owned = notebook.value(OWNED, after=ASK)
    assert sorted(owned.values()) == [["1", "4000"], ["2", "4000"]]
    settles(page, lambda: page.locator("[data-rref]").evaluate_all(OWNERS), owned)
    page.set_viewport_size({"width": 1400, "height": 600})
    page.get_by_role("link", name="show cell 3,").first.click()
    page.wait_for_function(IN_SIGHT, arg=notebook.index(MAKES))
    page.wait_for_function(ACTIVE, arg=notebook.index(MAKES))  # the extension's doing: a panel alone only scrolls
    page.set_viewport_size({"width": 1400, "height": 2400})

    notebook.run(WAITS)
    notebook.output(WAITS).filter(has_text="it waits").wait_for()
    restart(page, 2)
    notebook.output(WAITS).filter(has_text="another process").wait_for()
    page.locator("tr[data-worker='2'][data-incarnation='1'][data-doing='idle']").wait_for()

    notebook.run(LOOPS)
    notebook.output(LOOPS).filter(has_text="it loops").wait_for()
    page.locator("tr[data-worker='1'][data-doing='cell']").wait_for()
    page.locator("tr[data-worker='0'] .rb-now").filter(has_text="waits for worker1").wait_for()
    button(page, 1, "stack").click()
    said = page.locator("tr[data-worker='1'] + tr .rb-stacks")
    said.filter(has_text="MainThread runs\n      Cell worker1[").wait_for()
    button(page, 1, "interrupt").click()
    notebook.ended(LOOPS)
    notebook.output(LOOPS).filter(has_text="KeyboardInterrupt").wait_for()
    page.locator("tr[data-worker='1'][data-doing='idle']").wait_for()

    other = lab.beside(notebook)
    other.page.locator("tr[data-worker='2'][data-incarnation='1']").wait_for()
    agrees(page, notebook, lambda: (both(page), both(other.page)))
    restart(other.page, 1)
    page.locator("tr[data-worker='1'][data-incarnation='1'][data-doing='idle']").wait_for()
    agrees(page, notebook, lambda: shown_and_told(page, notebook))

    asked = "[thread.name for thread in __import__('threading').enumerate() if thread.name == 'rpcbench-health']"
    other.page.close()
    assert notebook.value(asked) == ["rpcbench-health"]
    page.evaluate("window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    settles(page, lambda: notebook.value(asked), [])
