"""What JupyterLab says of the kernel and of workers while a cell runs, or while messages are held."""

from __future__ import annotations

import pytest
from lab import settles

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

START = "%load_ext rpcbench\n%cluster start 1"
STEP = "%%step\nfrom rpcbench import rpc\nprint('it is', rpc.rpc_sync('worker1', divmod, (17, 5)))"
COMMAND = "([id, args]) => void jupyterapp.commands.execute(id, args)"
FOLLOW = """() => {
  const { context } = [...jupyterapp.shell.widgets('main')].find(one => one.context?.path === 'runs.ipynb');
  window.kernel_ = context.sessionContext.session.kernel;
  window.idle_ = 0;
  window.kernel_.iopubMessage.connect((_, { header, content, parent_header }) => {
    const isIdle = header.msg_type === 'status' && content.execution_state === 'idle';
    if (isIdle && parent_header.msg_type.startsWith('comm_')) window.idle_ += 1;
  });
}"""


def test_the_kernel_is_busy_while_a_cell_runs_and_panels_open(show, tmp_path):
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path)!r}, 'go').exists():\n    time.sleep(0.02)"
    notebook = show([START, waits, STEP], "runs.ipynb", width=1400, height=900)
    page = notebook.page
    notebook.run_to_end(START)
    page.evaluate(FOLLOW)
    page.evaluate(COMMAND, ["rpcbench:sidebar", {}])
    notebook.run(waits)
    page.wait_for_function("() => window.kernel_.status === 'busy'")
    for name in ("rrefs", "messages"):
        page.evaluate(COMMAND, ["rpcbench:panel", {"name": name}])
        page.locator(f".rbx-tab .rb-{name}.rb-drawn").wait_for()
    page.wait_for_function("() => window.idle_ > 3")  # the kernel has said so of messages of the panels
    settles(page, lambda: page.evaluate("window.kernel_.status"), "busy")
    notebook.activate()
    page.locator("#jp-main-statusbar").get_by_text("| Busy").wait_for()
    (tmp_path / "go").touch()
    notebook.ended("pathlib")
    settles(page, lambda: page.evaluate("window.kernel_.status"), "idle")
    page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()
    _hold_a_call(notebook)


def _hold_a_call(notebook):
    """A worker whose call is held does nothing."""
    page = notebook.page
    side = page.get_by_role("region", name="rpcbench: workers")
    row = side.get_by_role("listitem").filter(has_text="worker1")
    notebook.run_to_end("%%step")
    row.filter(has_text="ready · 1 call held").wait_for()
    step = page.locator(".rb-step")
    step.get_by_role("button", name="Deliver next").click()  # the worker replies, and that is held
    row.filter(has_text="ready · 1 call held").wait_for()
    step.get_by_role("button", name="Release all").click()
    notebook.output("%%step").filter(has_text="it is (3, 2)").first.wait_for()
    row.filter(has_text="held").wait_for(state="detached")
    _say_what_would_be_lost(notebook, side)


def _say_what_would_be_lost(notebook, side):
    page = notebook.page
    notebook.activate()
    notebook.value("1", after="kept_ = [rpc.remote('worker1', complex, (1, i)) for i in range(3)]")
    dialog = page.get_by_role("dialog")

    def told():
        """The sidebar hears of it within a second."""
        side.get_by_role("button", name="Stop main").click()
        text = dialog.locator(".jp-Dialog-body").inner_text()
        page.keyboard.press("Escape")
        dialog.wait_for(state="detached")
        return text

    settles(page, told, "Everything its workers hold will be lost, also the values of 3 RRefs here.")


def test_workers_are_in_sight_while_later_cells_of_a_run_of_all_wait(show, tmp_path):
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path)!r}, 'go').exists():\n    time.sleep(0.02)"
    notebook = show(["import rpcbench", START, waits, "print('the last one')"], "all.ipynb", width=1400, height=900)
    page = notebook.page
    page.evaluate(COMMAND, ["rpcbench:sidebar", {}])
    notebook.activate()
    page.evaluate(COMMAND, ["notebook:run-all-cells", {}])
    side = page.get_by_role("region", name="rpcbench: workers")
    side.get_by_role("listitem").filter(has_text="worker1").wait_for()
    page.get_by_role("button", name="rpcbench: 1 worker", exact=True).wait_for()
    (tmp_path / "go").touch()
    notebook.ended("the last one")
