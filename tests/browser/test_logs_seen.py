"""The logs panel in JupyterLab: what workers write, seen while a cell runs here, and last words of a lost one."""

from __future__ import annotations

import pytest
from lab import settles

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

START = "%load_ext rpcbench\n%cluster start 2"
PANEL = "%panel logs"
WRITES = """%%remote worker1
import os, threading
def write():
    for n in range(10_000):
        os.write(1, f"{n}th line\\n".encode())
    os.write(2, b"RuntimeError: of a thread\\n")
threading.Timer(0.5, write).start()"""
WAITS = """import time
from pathlib import Path
while not Path("over").exists():
    time.sleep(0.05)"""
ENDS = """%%remote worker2
import os, threading
def end():
    os.write(2, b"last words")
    os.abort()
threading.Timer(0.2, end).start()"""
RESTARTS = "%cluster restart worker2"
THREADS = "[thread.name for thread in __import__('threading').enumerate() if thread.name == 'rpcbench-logs']"
AT_END = "(b => b.scrollHeight - b.scrollTop - b.clientHeight < 2)(document.querySelector('.rb-logs .rb-body'))"


@pytest.mark.long
def test_what_workers_write_is_seen_while_a_cell_runs(lab, show):
    notebook = show((START, PANEL, WRITES, WAITS, ENDS, RESTARTS), "logs.ipynb")
    page = notebook.page
    notebook.run_to_end(START, PANEL, WRITES)
    notebook.run(WAITS)
    lines = page.locator(".rb-logs .rb-line")
    lines.filter(has_text="RuntimeError: of a thread").wait_for()
    assert lines.nth(-2).inner_text().split() == ["worker1", "9999th", "line"] and 1000 < lines.count() <= 2100
    page.wait_for_function(AT_END)
    page.get_by_role("tab", name="worker1, 1 error").click()
    search = page.locator(".rb-logs input[type=search]")
    search.fill("9998TH")
    search.press("Enter")
    page.locator(".rb-found", has_text="1 of 1").wait_for()
    search.fill("")
    (lab.folder / "over").touch()
    notebook.ended(WAITS)

    page.get_by_role("tab", name="all").click()
    notebook.run_to_end(ENDS)
    lost = page.locator(".rb-event", has_text="worker2 was lost: killed by SIGABRT")
    lost.wait_for()
    lines.filter(has_text="last words").wait_for()
    notebook.run_to_end(RESTARTS)
    page.locator(".rb-event", has_text="worker2 was restarted at ").wait_for()

    assert notebook.value(THREADS) == ["rpcbench-logs"]
    page.evaluate("window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    settles(page, lambda: notebook.value(THREADS), [])
