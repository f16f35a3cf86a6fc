"""The fixtures of drawing tests: one Chromium page for a file, and panels in it, without a kernel."""

from __future__ import annotations

import pytest
from shown import Shown

from benchmarks.panel_frames import CHROMIUM, FLAGS, HOST


@pytest.fixture(scope="module")
def page():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium: set CHROMIUM or put it on PATH")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running.new_page(viewport={"width": 1000, "height": 700})
        running.close()


@pytest.fixture
def show(page):
    """`show(name, world)` opens a panel; at the end the page must have had no error and asked nobody for anything."""
    page.goto("about:blank")
    page.set_content("<!doctype html><body></body>")
    page.evaluate(HOST)
    wrong = []
    hears = {
        "pageerror": lambda error: wrong.append(str(error)),
        "console": lambda line: wrong.append(line.text) if line.type in ("error", "warning") else None,
        "request": lambda request: None if request.url.startswith("blob:") else wrong.append(request.url),
    }
    for event, hear in hears.items():
        page.on(event, hear)

    def opened(name, at, **how):
        page.evaluate("document.body.replaceChildren()")
        shown = Shown(page, name)
        shown.open(at, **how)
        return shown

    yield opened
    for event, hear in hears.items():
        page.remove_listener(event, hear)
    assert wrong == []
