"""Panels in a page of Jupyter's own HTML manager, as `ipywidgets.embed` writes it: no JupyterLab, and no kernel.

The page loads the manager, and anywidget by its name as an AMD module; a panel's own code comes in the widget's state.
The manager is an npm package, which `.ci/extension` installs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from ipywidgets.embed import dependency_state, embed_snippet
from shown import busy_world

from rpcbench.panels import PANELS
from rpcbench.telemetry.recording import Still

NODE = Path(__file__).parents[2] / "extension" / "node_modules"
ANYWIDGET = Path(importlib.util.find_spec("anywidget").origin).parent / "nbextension" / "index.js"
SCRIPTS = {
    "/require.js": NODE / "requirejs" / "require.js",
    "/manager.js": NODE / "@jupyter-widgets" / "html-manager" / "dist" / "embed-amd.js",
    "/anywidget.js": ANYWIDGET,
}
TEXTS = {"compare": "(model)", "progress": "running"}  # of panels in which no worker's name stands
SITE = "http://widgets.test"
MISSING = [path.name for path in SCRIPTS.values() if not path.exists()]
# Only `.ci/extension` has these packages, so their lack is no lack of a browser.
pytestmark = pytest.mark.skip(reason=f"not installed: {MISSING}") if MISSING else pytest.mark.browser


@pytest.fixture
def embed(page):
    """`embed(widget)` opens a page with the widget; it may ask for the three scripts and nothing else."""
    wrong, pages = [], {}
    context = page.context.browser.new_context()
    fresh = context.new_page()
    fresh.on("pageerror", lambda error: wrong.append(str(error)))
    fresh.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)

    def answer(route):
        place = route.request.url.removeprefix(SITE)
        if place in SCRIPTS:
            route.fulfill(path=SCRIPTS[place], content_type="text/javascript")
        elif place in pages:
            route.fulfill(body=pages[place], content_type="text/html")
        elif place == "/favicon.ico":
            route.fulfill(status=204)
        else:
            wrong.append(f"request to {route.request.url}")
            route.abort_step()

    fresh.route("**/*", answer)

    def opened(widget):
        snippet = embed_snippet([widget], state=dependency_state([widget]), embed_url="/manager.js", requirejs=False)
        pages["/"] = f'<!doctype html><meta charset="utf-8"><body><script src="/require.js"></script>{snippet}'
        fresh.goto(f"{SITE}/")
        return fresh

    yield opened
    context.close()
    assert wrong == []


@pytest.mark.parametrize("name", PANELS)
def test_the_last_picture_of_a_panel_is_there(embed, name):
    panel = PANELS[name](Still(busy_world(["notebook", "ada", "grace", "edsger"])))
    try:
        panel.show_world(panel._source.world())
        drawn = embed(panel).locator(".rb-panel")
        drawn.wait_for()
        drawn.get_by_text(TEXTS.get(name, "ada")).first.wait_for(state="attached")
    finally:
        panel.close()
