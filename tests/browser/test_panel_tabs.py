"""The tabs of panels: what they are called, whose they are, and what they show before their first picture."""

from __future__ import annotations

import nbformat
import pytest
from lab import ACTIVATE, READY, settles
from lab import COMMAND as OF_CELL

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

START = "%load_ext rpcbench\n%cluster start 1"
SIX = ["workers", "messages", "rrefs", "autograd", "pipeline", "shards"]
COMMAND = "([id, args]) => void jupyterapp.commands.execute(id, args)"

# The first letters that each title shows: those that lie within its label.
LETTERS = """() => [...document.querySelectorAll('.rbx-tab-title .lm-TabBar-tabLabel')].map(label => {
  const text = label.firstChild, range = document.createRange();
  const right = label.getBoundingClientRect().right;
  const isSeen = end => {
    range.setStart(text, end - 1), range.setEnd(text, end);
    return range.getBoundingClientRect().right <= right + 1;
  };
  return [...text.data].filter((_, i) => isSeen(i + 1)).join('');
})"""
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
# The title in front: whether all of it is in sight, and whether its cross lies on its name.
CURRENT = """() => {
  const tab = document.querySelector('.rbx-tab-title.lm-mod-current');
  const [bar, title, name, cross] = [tab.parentElement, tab, ...['Label', 'CloseIcon'].map(
    part => tab.querySelector(`.lm-TabBar-tab${part}`))].map(one => one.getBoundingClientRect());
  const isWhole = title.left >= bar.left - 1 && title.right <= bar.right + 1 && cross.right <= title.right + 1;
  return { name: tab.textContent, isWhole, crossesName: cross.left < name.right };
}"""
TITLES = """() => Object.fromEntries([...document.querySelectorAll('.rbx-tab-title')].map(
  one => [one.textContent, [one.classList.contains('rbx-other'), one.title]]))"""
OWNERS = "() => [...document.querySelectorAll('.rbx-owner')].map(one => one.hidden ? '' : one.textContent).sort()"

# What stands in panels' places while nothing is drawn, at each frame of the page.
FOLLOW = """() => {
  window.said_ = new Set(), window.empty_ = 0;
  const look = () => {
    for (const part of document.querySelectorAll('.rbx-part')) {
      const [line, panel] = [part.querySelector('.rbx-loads[role=status]'), part.querySelector('.rb-panel')];
      if (line.textContent) window.said_.add(line.textContent);
      const drawn = panel && panel.matches('.rb-drawn');
      if (panel && !drawn && getComputedStyle(panel).visibility !== 'hidden') window.empty_ += 1;
      if (!line.textContent && !drawn) window.empty_ += 1;
    }
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


def do(page, command, **args):
    """Begin a command of JupyterLab."""
    page.evaluate(COMMAND, [command, args])


def open_panel(page, name):
    do(page, "rpcbench:panel", name=name)
    page.locator(f".rbx-tab:not(.lm-mod-hidden) .rb-{name}.rb-drawn").wait_for()


def start(show, name):
    notebook = show([START], name, width=1400, height=900)
    notebook.run_to_end(START)
    notebook.page.get_by_role("button", name="rpcbench: 1 worker").wait_for()
    return notebook


def test_a_tab_has_its_panels_name_and_says_that_it_loads(show):
    page = start(show, "model.ipynb").page
    page.evaluate(FOLLOW)
    do(page, "rpcbench:dashboard")
    page.locator(".rbx-dashboard .rb-messages.rb-drawn").wait_for()
    for name in SIX:
        open_panel(page, name)
    assert page.evaluate("[...window.said_].sort()") == sorted(
        f"Loading {name}…" for name in [*SIX, "progress"]  # the last one is in the dashboard alone
    )
    assert page.evaluate("window.empty_") == 0
    assert page.locator(".rbx-loads:visible").count() == 0
    wanted = {
        f"{name}: model": [False, f"The panel {name} of model.ipynb, cluster main"] for name in ["dashboard", *SIX]
    }
    assert page.evaluate(TITLES) == wanted
    assert all(len(seen) >= 5 for seen in page.evaluate(LETTERS)), page.evaluate(LETTERS)
    assert page.locator(".rbx-owner:visible").count() == 0  # there is no other notebook
    for name in ("logs", "progress", "resources", "traffic", "metrics"):
        open_panel(page, name)
    page.set_viewport_size({"width": 1120, "height": 900})
    page.evaluate(DRAWN)
    assert all(len(seen) >= 3 for seen in page.evaluate(LETTERS)), page.evaluate(LETTERS)
    do(page, "rpcbench:panel", name="workers")
    settles(page, lambda: page.evaluate(CURRENT), {"name": "workers: model", "isWhole": True, "crossesName": False})
    do(page, "rpcbench:panel", name="metrics")
    settles(page, lambda: page.evaluate(CURRENT), {"name": "metrics: model", "isWhole": True, "crossesName": False})
    page.locator(".rbx-tab-title.lm-mod-current").hover()
    page.mouse.wheel(0, -2000)
    page.wait_for_function("document.querySelector('.lm-TabBar-content:has(> .rbx-tab-title)').scrollLeft === 0")


def test_tabs_of_another_notebook_have_a_mark_and_its_name(show, lab):
    train = start(show, "train.ipynb")
    page = train.page
    open_panel(page, "rrefs")
    cells = [nbformat.v4.new_code_cell(START)]
    kernelspec = {"name": "python3", "display_name": "Python 3"}
    (lab.folder / "deep").mkdir(exist_ok=True)
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), lab.folder / "deep/kill.ipynb"
    )
    do(page, "docmanager:open", path="deep/kill.ipynb")
    page.wait_for_function("() => jupyterapp.shell.currentWidget?.context?.path === 'deep/kill.ipynb'")
    page.wait_for_function(READY, polling=100)
    ours, theirs = "The panel rrefs of train.ipynb, cluster main", "of another notebook: train.ipynb"
    assert page.evaluate(TITLES) == {"rrefs: train": [True, f"{ours}\n{theirs}"]}
    train.activate()
    settles(page, lambda: page.evaluate(TITLES), {"rrefs: train": [False, ours]})
    assert page.evaluate(OWNERS) == [""]  # the other one has no workers and no panels

    page.evaluate(ACTIVATE, "deep/kill.ipynb")
    do(page, "notebook:run-all-cells")
    page.get_by_role("button", name="rpcbench: 1 worker").wait_for()
    open_panel(page, "workers")
    other = "The panel workers of deep/kill.ipynb, cluster main"
    wanted = {"rrefs: train": [True, f"{ours}\n{theirs}"], "workers: kill": [False, other]}
    settles(page, lambda: page.evaluate(TITLES), wanted)
    settles(page, lambda: page.evaluate(OWNERS), ["kill.ipynb", "train.ipynb"])
    page.get_by_role("tab", name="rrefs: train").click()
    page.get_by_role("button", name="train.ipynb", exact=True).click()  # shows it
    wanted = {"rrefs: train": [False, ours], "workers: kill": [True, f"{other}\nof another notebook: kill.ipynb"]}
    settles(page, lambda: page.evaluate(TITLES), wanted)


ROOM = """name => {
  const body = document.querySelector(`.rbx-tab:not(.lm-mod-hidden) .rb-${name} .rb-body`);
  const [panel, tab] = [body.closest('.rb-panel'), body.closest('.rbx-board')];
  const below = tab.getBoundingClientRect().bottom - panel.getBoundingClientRect().bottom;
  const [scrolls, isTall] = [body.scrollHeight > body.clientHeight, body.clientHeight > 460];
  return { scrolls, below, isTall, tab: tab.scrollHeight > tab.clientHeight };
}"""


def test_a_panel_of_its_own_scrolls_only_where_its_tab_ends(show):
    calls = "from rpcbench import rpc\nfor i in range(60): rpc.rpc_sync('worker1', divmod, (i, 5))"
    notebook = show([START, calls], "tall.ipynb", width=1400, height=900)
    page = notebook.page
    do(page, "rpcbench:sidebar")
    side = page.get_by_role("region", name="rpcbench: workers")
    side.get_by_role("button", name="Start 2 workers").wait_for()
    notebook.run(START)
    side.get_by_text("A cell runs. Workers that it starts are shown here when it has ended.").wait_for()
    assert side.get_by_role("button", name="Start 2 workers").is_disabled()
    notebook.ended(START)
    side.get_by_role("listitem").filter(has_text="worker1").wait_for()
    for name in ("compare", "logs", "messages"):
        open_panel(page, name)
    notebook.activate()
    notebook.run("import rpc")
    page.wait_for_function("() => document.querySelectorAll('.rb-messages .rb-message').length > 20")
    settles(page, lambda: page.evaluate(ROOM, "messages"), {"scrolls": True, "below": 8, "isTall": True, "tab": False})
    open_panel(page, "compare")
    found = page.evaluate(ROOM, "compare")
    assert not found["scrolls"] and found["below"] > 8


# All that the sidebar, the tabs and the status bar say from the beginning of a page on.
LISTEN = """() => {
  window.heard_ = new Set();
  const look = () => {
    for (const one of document.querySelectorAll('#rpcbench-sidebar .rbx-hint, .rbx-note, .rbx-status-button')) {
      window.heard_.add(one.textContent);
    }
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


def saves_layout(*words):
    """Whether a response is that to a saved layout with these words: one of before may come late."""

    def is_it(response):
        data = response.request.post_data or "" if response.request.method == "PUT" else ""
        return "/api/workspaces/" in response.url and all(word in data for word in words)

    return is_it


def test_after_a_reload_in_a_running_cell_the_page_says_so(show, tmp_path):
    begin = f"import pathlib, time\nhere = pathlib.Path({str(tmp_path)!r})\n(here / 'begun').touch()"
    waits = f"{begin}\nwhile not (here / 'go').exists():\n    time.sleep(0.02)"
    notebook = show([START, waits], "waits.ipynb", width=1400, height=900)
    page = notebook.page
    notebook.run_to_end(START)
    do(page, "rpcbench:sidebar")
    open_panel(page, "workers")
    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    with page.expect_response(saves_layout("rpcbench-panels:workers:waits.ipynb", '"current":"notebook:waits.ipynb"')):
        notebook.activate()  # JupyterLab saves its layout, with which a reload begins
    notebook.run("pathlib")
    while not (tmp_path / "begun").exists():  # else the reload may come before the kernel has the cell
        page.wait_for_timeout(20)
    page.add_init_script(f"({LISTEN})()")
    page.reload(wait_until="domcontentloaded")
    text = "Waiting for the kernel. If it runs a cell, it answers when that has ended."
    page.get_by_role("region", name="rpcbench: workers").get_by_text(text).wait_for()
    page.locator(".rbx-note").get_by_text(text).wait_for()
    (tmp_path / "go").touch()
    page.locator(".rb-workers.rb-drawn").wait_for()
    page.get_by_text(text).first.wait_for(state="hidden")
    page.get_by_role("button", name="rpcbench: 1 worker").wait_for()
    heard = page.evaluate("[...window.heard_]")
    assert not [one for one in heard if "no Python kernel" in one or "no workers" in one.lower()], heard


def test_the_owner_of_a_dashboard_stands_above_its_panels_and_as_many_workers_are_offered_again(show, lab):
    source, text = "%load_ext rpcbench\n%cluster start 3", "a text"
    notebook = show([source, "%cluster stop", text], "three.ipynb", width=1200, height=560)
    page = notebook.page
    notebook.run_to_end(source)
    page.get_by_role("button", name="rpcbench: 3 workers").wait_for()
    page.evaluate(OF_CELL, [notebook.index(text), "notebook:change-cell-to-markdown"])
    page.locator(".jp-MarkdownCell.jp-mod-active .jp-cell-toolbar").wait_for()
    assert page.locator(".jp-MarkdownCell .rbx-picker:visible").count() == 0
    do(page, "rpcbench:sidebar")
    do(page, "rpcbench:target")
    page.get_by_role("alert").filter(has_text="Choose a code cell first").wait_for()
    do(page, "rpcbench:dashboard")
    board = page.locator(".rbx-dashboard")
    board.locator(".rb-messages.rb-drawn").wait_for()
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(START)]), lab.folder / "two.ipynb")
    do(page, "docmanager:open", path="two.ipynb", kernel={"name": "python3"})
    page.wait_for_function("() => jupyterapp.shell.currentWidget?.context?.path === 'two.ipynb'")
    page.wait_for_function(READY, polling=100)
    do(page, "notebook:run-all-cells")
    page.get_by_role("tab", name="dashboard: three").click()
    owner = board.get_by_role("button", name="three.ipynb", exact=True)
    owner.wait_for()
    name, first = owner.bounding_box(), board.locator(".rb-panel").first.bounding_box()
    assert name["height"] > 14 and name["y"] + name["height"] <= first["y"]
    notebook.activate()
    notebook.run_to_end("%cluster stop")
    board.get_by_role("button", name="Start 3 workers").wait_for()
    page.get_by_role("region", name="rpcbench: workers").get_by_role("button", name="Start 3 workers").wait_for()
