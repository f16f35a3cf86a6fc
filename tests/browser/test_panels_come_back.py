"""The panels of a notebook stand beside it again when it is opened later, in the same page or in another browser."""

from __future__ import annotations

import json
import re

import pytest
from lab import READY, settles

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

START = "%load_ext rpcbench\n%cluster start 1"
COMMAND = "([id, args]) => void jupyterapp.commands.execute(id, args)"
MOVE = """([title, mode]) => {
  const { shell } = jupyterapp;
  const find = label => [...shell.widgets('main')].find(one => one.title.label === label);
  shell.add(find(title), 'main', { mode, ref: find('workers: kept').id });
}"""
# Where the tabs are, in whole percent of the main area: one that is hidden has no place.
PLACES = """() => {
  const { width, height, left, top } = document.querySelector('#jp-main-dock-panel').getBoundingClientRect();
  const place = one => {
    const box = one.node.getBoundingClientRect();
    const parts = [(box.left - left) / width, (box.top - top) / height, box.width / width, box.height / height];
    return one.isVisible ? parts.map(part => Math.round(100 * part)) : null;
  };
  return Object.fromEntries([...jupyterapp.shell.widgets('main')].map(one => [one.title.label, place(one)]));
}"""
IN_FRONT = "() => jupyterapp.shell.currentWidget?.title.label"
CLOSE = "() => [...jupyterapp.shell.widgets('main')].find(one => one.context?.path === 'kept.ipynb').close()"


def do(page, command, **args):
    page.evaluate(COMMAND, [command, args])


def remembered(lab):
    """The settings in which JupyterLab keeps the places; they outlast the server."""
    text = re.sub(r"(?m)^\s*//.*$", "", lab.remembered.read_text()) if lab.remembered.exists() else ""
    found = json.loads(text)["notebooks"] if text.endswith("}") else {}
    return [layout for notebook, layout in found.items() if notebook.endswith("kept.ipynb")]  # others have theirs


def tabs(*names, front=0):
    return {"type": "tab-area", "widgets": list(names), "currentIndex": front}


def split(orientation, *children):
    return {"type": "split-area", "orientation": orientation, "children": list(children)}


def test_panels_come_back_with_their_notebook(show, lab):
    notebook = show([START], "kept.ipynb", width=1400, height=900)
    page = notebook.page
    notebook.run_to_end(START)
    page.get_by_role("button", name="rpcbench: 1 worker").wait_for()
    for name in ("workers", "messages", "shards", "rrefs"):
        do(page, "rpcbench:panel", name=name)
        page.locator(f".rbx-tab .rb-{name}.rb-drawn").wait_for()
    page.evaluate(MOVE, ["shards: kept", "split-bottom"])
    page.get_by_role("tab", name="rrefs: kept").locator(".lm-TabBar-tabCloseIcon").click()
    page.get_by_role("tab", name="messages: kept").click()
    right = split("vertical", tabs("workers", "messages", front=1), tabs("shards"))
    wanted = split("horizontal", tabs(""), right)
    settles(page, lambda: remembered(lab), [wanted])
    notebook.activate()
    before = page.evaluate(PLACES)
    _close_and_open_again(notebook, lab, wanted, before)
    _open_in_another_browser(notebook, lab, before)
    _forget_what_the_user_closes(page, lab)


def _close_and_open_again(notebook, lab, wanted, before):
    page = notebook.page
    page.evaluate("() => jupyterapp.shell.currentWidget.context.save()")
    page.evaluate(CLOSE)
    page.locator(".rbx-tab").first.wait_for(state="detached")
    settles(page, lambda: page.locator(".rbx-tab").count(), 0)
    page.wait_for_timeout(1500)  # longer than changes are collected
    assert remembered(lab) == [wanted]
    do(page, "docmanager:open", path="kept.ipynb")
    page.locator(".rbx-tab .rb-messages.rb-drawn").wait_for()
    page.locator(".rbx-tab .rb-shards.rb-drawn").wait_for()
    settles(page, lambda: page.evaluate(IN_FRONT), "kept.ipynb")
    _stand_as(page, before)


def _stand_as(page, before):
    def places():
        return {name: place for name, place in page.evaluate(PLACES).items() if name != "Launcher"}  # while alone

    settles(page, places, before)


def _open_in_another_browser(notebook, lab, before):
    """It has a workspace of its own. The kernel that starts again has no workers: as many as before are offered."""
    other = lab.beside(notebook).page
    other.locator(".rbx-tab .rb-shards.rb-drawn").wait_for()
    _stand_as(other, before)
    other.evaluate("() => void jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    other.locator(".rbx-tab:visible").get_by_role("button", name="Start 1 worker").first.wait_for()
    other.close()


def _forget_what_the_user_closes(page, lab):
    page.get_by_role("tab", name="shards: kept").locator(".lm-TabBar-tabCloseIcon").click()
    settles(page, lambda: remembered(lab), [split("horizontal", tabs(""), tabs("workers", "messages", front=1))])
    for name in ("workers", "messages"):
        page.get_by_role("tab", name=f"{name}: kept").locator(".lm-TabBar-tabCloseIcon").click()
    settles(page, lambda: remembered(lab), [])
    do(page, "docmanager:save")
    page.reload(wait_until="domcontentloaded")
    page.wait_for_function(READY, polling=100)
    page.wait_for_timeout(1500)
    assert page.locator(".rbx-tab").count() == 0
