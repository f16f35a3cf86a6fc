"""Two clusters in one notebook: each panel says whose it is, and its tab stays with it, also after a reload."""

from __future__ import annotations

import pytest
from lab import settles

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

ONE = "%load_ext rpcbench\n%cluster start 1 --name a\n%panel progress"
TWO = "%cluster start 2 --name b"
COMMAND = "([id, args]) => void jupyterapp.commands.execute(id, args)"
# The title of each tab of panels, with the clusters that its panels name and the number of their workers.
TABS = """() => {
  const tabs = [...jupyterapp.shell.widgets('main')].filter(one => one.hasClass('rbx-tab'));
  const texts = (tab, selector) => [...tab.node.querySelectorAll(selector)].map(one => one.textContent);
  const workers = tab => texts(tab, '.rb-opener').filter(text => text.startsWith('worker')).length;
  return Object.fromEntries(tabs.map(tab => [tab.title.label, [texts(tab, '.rb-cluster'), workers(tab)]]));
}"""
IN_FRONT = "() => jupyterapp.shell.currentWidget?.title.label"


def do(page, command, **args):
    page.evaluate(COMMAND, [command, args])


def test_panels_of_two_clusters_are_told_apart_and_stay_with_theirs(show):
    notebook = show([ONE, TWO, "%cluster use a", "%cluster stop"], "two.ipynb", width=1500, height=900)
    page = notebook.page
    notebook.run_to_end(ONE)
    page.get_by_role("button", name="rpcbench: 1 worker").wait_for()
    do(page, "rpcbench:sidebar")
    side = page.get_by_role("region", name="rpcbench: workers")
    open_workers = side.get_by_role("button", name="workers", exact=True)
    open_workers.click()
    page.locator(".rbx-tab .rb-workers.rb-drawn").wait_for()
    settles(page, lambda: page.evaluate(TABS), {"workers: two": [[""], 1]})
    notebook.activate()
    notebook.run_to_end(TWO)
    page.locator(".jp-Notebook .rb-progress .rb-cluster", has_text="of a").wait_for()
    side.get_by_role("heading", name="Panels of b").wait_for()
    open_workers.click()
    of_both = {"workers of a: two": [["of a"], 1], "workers of b: two": [["of b"], 2]}
    settles(page, lambda: page.evaluate(TABS), of_both)
    assert page.evaluate(IN_FRONT) == "workers of b: two"
    notebook.activate()
    notebook.run_to_end("%cluster use a")
    side.get_by_role("heading", name="Panels of a").wait_for()
    open_workers.click()
    settles(page, lambda: page.evaluate(IN_FRONT), "workers of a: two")
    _come_back_to_their_own(notebook, of_both)
    _say_that_their_cluster_has_ended(notebook)


def _reload(notebook):
    page = notebook.page
    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    with page.expect_response(lambda response: "/api/workspaces/" in response.url and response.request.method == "PUT"):
        notebook.activate()  # JupyterLab saves its layout, with which a reload begins
    notebook.reload()


def _come_back_to_their_own(notebook, of_both):
    page = notebook.page
    _reload(notebook)
    for name in ("a", "b"):
        page.get_by_role("tab", name=f"workers of {name}: two").click()
        page.locator(".rbx-tab:not(.lm-mod-hidden) .rb-cluster", has_text=f"of {name}").wait_for()
    settles(page, lambda: page.evaluate(TABS), of_both)


def _say_that_their_cluster_has_ended(notebook):
    page = notebook.page
    notebook.activate()
    notebook.run_to_end("%cluster stop")
    page.get_by_role("tab", name="workers of a: two").click()
    note = page.locator(".rbx-tab:not(.lm-mod-hidden) .rbx-note")
    note.get_by_text("The cluster a has ended. This is its last picture.").wait_for()
    notebook.activate()
    _reload(notebook)
    page.get_by_role("tab", name="workers of a: two").click()
    note.get_by_text("The cluster a has ended.").wait_for()
    assert "picture" not in note.inner_text()
    assert page.locator(".rbx-tab:not(.lm-mod-hidden) .rb-panel").count() == 0
    note.get_by_role("button", name="Show b").click()
    page.locator(".rbx-tab:not(.lm-mod-hidden) .rb-opener", has_text="worker2").wait_for()
    note.wait_for(state="hidden")


def test_a_tab_starts_the_cluster_again_under_its_name(show):
    start = "%load_ext rpcbench\n%cluster start 1 --name beta"
    notebook = show([start, "%cluster stop"], "named.ipynb", width=1500, height=900)
    page = notebook.page
    notebook.run_to_end(start)
    page.get_by_role("button", name="rpcbench: 1 worker").wait_for()
    do(page, "rpcbench:sidebar")
    page.get_by_role("region", name="rpcbench: workers").get_by_role("button", name="workers", exact=True).click()
    tab = page.locator(".rbx-tab")
    tab.locator(".rb-workers.rb-drawn").wait_for()
    notebook.activate()
    notebook.run_to_end("%cluster stop")
    tab.get_by_role("button", name="Start 1 worker").click()
    tab.locator(".rbx-note").wait_for(state="hidden")
    notebook.activate()
    found = notebook.value("[*running()]", after="from rpcbench.launch.base_cluster import running_clusters as running")
    assert found == ["beta"]
