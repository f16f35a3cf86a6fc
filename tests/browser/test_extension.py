"""What a user of JupyterLab does without a magic: starts workers, aims cells, opens panels and lessons."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import nbformat
import pytest
from lab import ROOT, settles
from worlds import until

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

WHERE = "import os\nprint('it runs in', os.getpid())"
OPTIONS = "%%remote worker2 -o y\ny = 6 * 7"
DROPPED = "print('dropped')"
WORKERS = "cluster.workers if 'cluster' in globals() else None"
PANELS = "[type(w).__name__ for w in __import__('ipywidgets').Widget.widgets.values() if 'Panel' in str(type(w))]"

NARROW = """from rpcbench import rpc
made_here = 'a long line, which begins at the left and goes on to the right until the toolbar would lie upon it, and on'
rref = rpc.remote('worker1', complex, (1, 2))
_ = rref.to_here()"""
LAST = "at = 'the end'"
KERNEL = "jupyterapp.shell.currentWidget.sessionContext.session.kernel"
DRAG_OVER = """index => {
  const dataTransfer = new DataTransfer();
  const how = { dataTransfer, bubbles: true, cancelable: true };
  const fire = (node, type) => node.dispatchEvent(new DragEvent(type, how));
  fire(document.querySelector('.rbx-sidebar [data-worker=worker2]'), 'dragstart');
  fire(document.querySelectorAll('.jp-Notebook .jp-Cell')[index].querySelector('.cm-content'), 'dragover');
}"""
CUT = """() => [...document.querySelectorAll('.rbx-sidebar .rbx-text, .rbx-sidebar .rbx-text *')]
  .filter(one => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== 'inline'
    || one.getBoundingClientRect().right > one.closest('.rbx-sidebar').getBoundingClientRect().right)
  .map(one => one.textContent)"""
IN_SIGHT = """index => {
  const { content } = jupyterapp.shell.currentWidget;
  const { top, bottom } = content.widgets[index].node.getBoundingClientRect();
  return content.activeCellIndex === index && top < bottom && top >= 0 && bottom <= window.innerHeight;
}"""


@pytest.fixture
def notebook(show, tmp_path):
    waits = f"import pathlib, time\nprint('it', 'waits')\nwhile not pathlib.Path({str(tmp_path)!r}, 'go').exists():\n"
    cells = [WHERE, OPTIONS, DROPPED, f"{waits}    time.sleep(0.02)"]
    opened = show(cells, "bench.ipynb")
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
    _panels_while_a_cell_runs(notebook, side)
    (tmp_path / "go").touch()
    notebook.ended("'waits'")
    _end_what_is_on(notebook, side)
    _change_the_number(side)
    _lose_the_connection(notebook, side)
    _stop(notebook, side)
    _begin_anew(notebook, side)


def _start(notebook, side):
    side.get_by_text("Runs %load_ext rpcbench in this notebook's kernel first").wait_for()
    side.get_by_role("button", name="Start 2 workers").click()
    side.get_by_role("status").filter(has_text="Starting 2 workers").locator("progress").wait_for()
    side.get_by_role("listitem").filter(has_text="worker2 ready").wait_for()
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
    over = notebook.page.locator(".rbx-over")
    assert over.count() == 0
    notebook.page.evaluate(DRAG_OVER, notebook.index(DROPPED))
    assert over.evaluate("e => getComputedStyle(e, '::after').content") == '"runs on worker2"'
    assert over.evaluate_all("all => all.map(e => e.classList.contains('jp-CodeCell'))") == [True]
    notebook.page.evaluate("document.querySelector('.jp-NotebookPanel').dispatchEvent(new DragEvent('dragleave'))")
    assert over.count() == 0


def _restart_while_a_cell_runs(notebook, side):
    victim = pid(notebook, "worker2")
    notebook.run("'waits'")
    notebook.output("'waits'").filter(has_text="it waits").wait_for()
    os.kill(victim, signal.SIGKILL)
    side.get_by_role("listitem").filter(has_text="worker2 lost: killed by SIGKILL").wait_for()
    notebook.page.get_by_role("button", name="rpcbench: 2 workers, 1 lost").wait_for()
    side.get_by_role("button", name="Start worker2 again").press("Enter")
    side.get_by_role("listitem").filter(has_text="worker2 ready").filter(has_text="started twice").wait_for()
    assert notebook.page.evaluate(CUT) == []
    side.get_by_role("status").filter(has_text="Started again: worker2.").wait_for()


def _panels_while_a_cell_runs(notebook, side):
    """The first panel stands right of the notebook, the next one is a tab beside the first."""
    page = notebook.page
    code = page.locator(".jp-NotebookPanel")
    whole = code.bounding_box()
    side.get_by_role("button", name="rrefs", exact=True).click()
    tab = page.locator(".rbx-tab")
    tab.locator(".rb-panel").filter(has_text="worker2").wait_for()
    half, first = code.bounding_box(), tab.bounding_box()
    assert first["x"] >= half["x"] + half["width"] and 0.4 < half["width"] / whole["width"] < 0.6
    for name in ("workers", "messages"):
        side.get_by_role("button", name=name, exact=True).click()
        page.locator(f".rbx-tab .rb-panel.rb-{name}").wait_for()
    side.get_by_role("button", name="rrefs", exact=True).click()  # shows the one that is open
    tab.first.wait_for()
    assert tab.count() == 3 and code.bounding_box() == half and tab.first.bounding_box() == first
    for name in ("workers", "messages"):
        close(page, f"{name}: bench")
    assert notebook.cell("'waits'").locator(".jp-InputPrompt").inner_text() == "[*]:"


def close(page, name):
    """Close a tab of the main area."""
    page.get_by_role("tab", name=name).locator(".lm-TabBar-tabCloseIcon").click()


def _end_what_is_on(notebook, side):
    """A chip says that messages are lost; a click ends that."""
    notebook.activate()
    notebook.value("1", after="%chaos drop=0.3 delay=50ms")
    chips = notebook.page.get_by_role("button", name="End: drop 30 %")
    chips.nth(1).wait_for()  # one in the sidebar, one in the status bar
    chips.first.click()
    side.get_by_role("status").filter(has_text="Faults are off").wait_for()
    chips.first.wait_for(state="detached")


def _lose_the_connection(notebook, side):
    """The workers go with the connection, and are there again with it."""
    page = notebook.page
    page.context.set_offline(True)
    page.evaluate(f"() => {{ {KERNEL}.reconnect().catch(() => 0); }}")
    side.get_by_text("The connection to the kernel is lost").wait_for()
    assert side.get_by_role("listitem").count() == 0
    page.context.set_offline(False)
    side.get_by_role("listitem").filter(has_text="worker2 ready").wait_for()


def _change_the_number(side):
    side.get_by_role("button", name="One more worker for main").click()
    side.get_by_role("listitem").filter(has_text="worker3 ready").wait_for()
    side.get_by_role("button", name="One fewer worker for main").click()
    side.page.get_by_role("button", name="End", exact=True).click()
    side.get_by_role("listitem").filter(has_text="worker3").wait_for(state="detached")
    side.get_by_role("status").filter(has_text="2 workers:").wait_for()  # its last word, which may come later
    side.get_by_role("button", name="Interrupt worker1").click()
    side.get_by_role("status").filter(has_text="worker1 runs no cell of this notebook.").wait_for()


def _stop(notebook, side):
    close(notebook.page, "rrefs: bench")
    notebook.page.locator(".rbx-tab").wait_for(state="detached")
    side.get_by_role("button", name="Stop main").click()
    notebook.page.get_by_role("button", name="Stop", exact=True).click()
    side.get_by_role("status").filter(has_text="The cluster is stopped.").wait_for()
    until(lambda: notebook.value(PANELS) == [], "the panel to be closed with its tab")
    assert notebook.errors() == []


def _begin_anew(notebook, side):
    """A kernel that was started again has nothing loaded, and the sidebar says so."""
    side.get_by_role("button", name="Start 2 workers").wait_for()
    notebook.page.evaluate(f"() => {KERNEL}.restart()")
    side.get_by_text("Runs %load_ext rpcbench in this notebook's kernel first").wait_for()
    assert side.get_by_role("status").inner_text() == "", "news of the kernel before"
    notebook.run(DROPPED)  # its line is no magic there
    notebook.output(DROPPED).filter(has_text="`%%remote` not found").wait_for()


AGAIN = "# at once\n%cluster stop\n%cluster start 2"
CELLS = ["%load_ext rpcbench\n%cluster start 2", AGAIN]
NAMES = ["workers", "pipeline", "progress", "autograd", "messages"]
LOOK = """from ipywidgets import Widget
from rpcbench.telemetry.collector import current_collector
shown_ = [one for one in Widget.widgets.values() if type(one).__name__.endswith('Panel')]"""
ALIVE = "sorted((type(w).__name__, w._source is current_collector()) for w in shown_)"
ON_PAGE = "() => [...document.querySelectorAll('.rbx-board .rb-panel')].map(e => e.getBoundingClientRect().width)"
SAVED = "async () => JSON.stringify(await jupyterapp.serviceManager.workspaces.fetch('default'))"


@pytest.mark.long
def test_the_dashboard_stays_through_reload_stop_and_restart(show):
    notebook = show(CELLS, "board.ipynb", width=1440, height=900)
    page, board = notebook.page, notebook.page.locator(".rbx-board")
    notebook.run_to_end("%load_ext")
    page.evaluate("jupyterapp.commands.execute('rpcbench:sidebar')")
    page.get_by_role("button", name="Dashboard", exact=True).click()
    _shows_all(notebook)
    code, first = page.locator(".jp-NotebookPanel").bounding_box(), board.bounding_box()
    assert first["x"] >= code["x"] + code["width"] and min(page.evaluate(ON_PAGE)) > 450

    until(lambda: "rpcbench-panels:dashboard:board.ipynb" in page.evaluate(SAVED), "the layout to be saved")
    notebook.reload()
    _shows_all(notebook)
    assert board.bounding_box() == first
    _stop_and_start_with_a_dashboard(notebook)
    _open_a_dashboard_where_it_is_narrow(notebook)

    page.evaluate(f"() => {KERNEL}.restart()")
    board.get_by_text("No workers run in board.ipynb.").or_(board.get_by_text("The workers are stopped.")).wait_for()
    assert board.locator(".rb-panel").count() == 5  # the last pictures
    board.get_by_role("button", name="Close this tab").click()
    board.wait_for(state="detached")
    assert notebook.errors() == []


def _shows_all(notebook):
    """The dashboard shows its five panels, and the kernel has no others."""
    board = notebook.page.locator(".rbx-board")
    for name in NAMES:
        board.locator(f"[data-panel={name}] .rb-panel").wait_for()
    board.locator("[data-panel=workers] tr[data-worker='2']").wait_for()
    board.locator(".rbx-note").wait_for(state="hidden")
    notebook.activate()
    # Those of this page only, and of the cluster that runs; two have a source of their own.
    wanted = sorted((f"{name.capitalize()}Panel", name not in ("messages", "workers")) for name in NAMES)
    settles(notebook.page, lambda: notebook.value(ALIVE, after=LOOK), wanted)


def _stop_and_start_with_a_dashboard(notebook):
    board = notebook.page.locator(".rbx-board")
    notebook.value("1", after="%cluster stop")
    board.get_by_text("The workers are stopped. This is the last picture.").wait_for()
    assert board.locator(".rb-panel").count() == 5
    board.get_by_role("button", name="Start 2 workers").click()
    _shows_all(notebook)
    notebook.run_to_end("# at once")
    _shows_all(notebook)


def _open_a_dashboard_where_it_is_narrow(notebook):
    page, board = notebook.page, notebook.page.locator(".rbx-board")
    close(page, "dashboard: board")
    board.wait_for(state="detached")
    page.set_viewport_size({"width": 1000, "height": 800})
    page.get_by_role("button", name="Dashboard", exact=True).click()
    _shows_all(notebook)
    code, here = page.locator(".jp-NotebookPanel").bounding_box(), board.bounding_box()
    assert here["y"] >= code["y"] + code["height"] and min(page.evaluate(ON_PAGE)) > 450


def test_the_start_page_opens_lessons_and_new_notebooks(show, lab):
    lessons = lab.folder / "mine" / "notebooks"  # as `rpcbench lessons mine` makes it
    shutil.copytree(ROOT / "notebooks" / "pictures", lessons / "pictures")
    for name in ("lessons.json", "01_hello_rpc.ipynb"):
        shutil.copy(ROOT / "notebooks" / name, lessons)
    (lessons / "progress.json").write_text('{"hello_rpc": ["gather"]}')
    page = lab.visit("lab/tree/mine/notebooks?reset&", option="rpcbenchStart")
    start = page.locator(".rbx-start-page")
    cards = start.get_by_role("list").get_by_role("button")
    cards.first.wait_for()
    course = json.loads((ROOT / "notebooks" / "lessons.json").read_text())
    assert cards.count() == len(course)
    assert start.get_by_role("heading", level=2).all_inner_texts() == [
        "Start", "RPC and autograd", "Training at scale", "Exam", "Appendix"
    ]  # fmt: skip
    first = cards.first.inner_text()
    assert "Start here" in first and f"{course[0]['minutes']} min" in first
    assert f"1 of {course[1]['exercises']} exercises solved" in cards.nth(1).inner_text()
    page.wait_for_function("() => [...document.querySelectorAll('.rbx-card img')].every(one => one.naturalWidth > 0)")

    cards.filter(has_text="Hello, RPC").press("Enter")
    page.get_by_role("heading", name="01 · Hello, RPC").wait_for()
    page.evaluate("jupyterapp.commands.execute('rpcbench:start-page')")
    assert start.count() == 1
    start.get_by_role("button", name="New rpcbench notebook").click()
    page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)").get_by_text("%cluster start 2").wait_for()
    page.evaluate("() => void jupyterapp.commands.execute('rpcbench:new-notebook', {})")
    made = [lab.folder / "Untitled.ipynb", lab.folder / "Untitled1.ipynb"]
    settles(page, lambda: all(path.exists() and "%cluster" in path.read_text() for path in made), True)
    assert len({cell.id for path in made for cell in nbformat.read(path, 4).cells}) == 4, "no id stands in both"
    # A notebook comes to the front when it is opened, a while after its file is there: the pages below come later.
    settles(page, lambda: page.evaluate("() => jupyterapp.shell.currentWidget?.title.label"), "Untitled1.ipynb")
    page.evaluate("() => { jupyterapp.commands.execute('launcher:create'); }")
    section = page.locator(".jp-Launcher-section").filter(has_text="rpcbench")
    settles(page, section.locator(".jp-LauncherCard").all_inner_texts, ["New rpcbench notebook", "Start Page"])
    preferred = lab.folder / "rpcbench-course" / "notebooks"  # as `rpcbench lessons` makes it; `mine` is newer
    preferred.mkdir(parents=True)
    (preferred / "lessons.json").write_text(json.dumps(course[:1]))
    os.utime(lab.folder / "mine", (time.time() + 60,) * 2)
    page.evaluate("jupyterapp.commands.execute('rpcbench:start-page')")
    settles(page, cards.count, 1)
    # A kernel that is just starting could not be ended.
    opened = {"mine/notebooks/01_hello_rpc.ipynb", "Untitled.ipynb", "Untitled1.ipynb"}
    settles(page, lambda: opened - lab.sessions().keys(), set())


@pytest.mark.long
def test_a_narrow_cell_has_its_picker_and_a_tab_finds_a_cell(show):
    """The notebook is narrow as a panel stands beside it."""
    filler = [f"'line'\n{'#' * i}" + "\n" * 30 for i in range(1, 20)]
    notebook = show(
        ("%load_ext rpcbench\n%cluster start 1", NARROW, *filler, LAST), "narrow.ipynb", width=1000, height=700
    )
    page = notebook.page
    notebook.run_to_end("%cluster", NARROW)
    page.evaluate("jupyterapp.commands.execute('rpcbench:sidebar')")
    side = page.get_by_role("region", name="rpcbench: workers")
    side.get_by_role("button", name="rrefs", exact=True).click()
    link = page.locator(".rbx-tab").get_by_role("link", name="show cell 2, which made RRef 0.0 on notebook")
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
