"""The site: it builds without a warning, every link on it leads somewhere, and a real browser shows and searches it."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from benchmarks.panel_frames import CHROMIUM, FLAGS

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


class Page(HTMLParser):
    """The addresses that a page refers to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            if name in ("id", "name") and value is not None:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    made = subprocess.run(
        [sys.executable, "docs/make_site.py", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert (made.returncode, made.stderr) == (0, "")
    return folder / "html"


def test_every_link_leads_to_a_page_and_an_anchor(site):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 50
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            if ":" in link.partition("#")[0].partition("/")[0]:  # another site, or data
                continue
            place, _, anchor = link.partition("#")
            target = (path.parent / unquote(place.partition("?")[0])).resolve() if place else path
            if not target.exists() or (target in pages and unquote(anchor) not in pages[target].anchors):
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert wrong == []


@pytest.fixture
def reader():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium: set CHROMIUM or put it on PATH")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = running.new_page(color_scheme="light")
        page.route("https://**/*", lambda route: route.abort())  # formulas and charts of the internals come from there
        yield page
        running.close()


@pytest.mark.browser
def test_a_reader_finds_a_lesson_plays_a_record_and_turns_the_light_off(site, reader):
    reader.goto((site / "index.html").as_uri())
    reader.get_by_label("Search").first.fill("bubble")
    reader.get_by_label("Search").first.press("Enter")
    found = reader.locator("#search-results a", has_text="GPipe")
    found.first.click()
    reader.get_by_role("heading", level=1).wait_for()
    assert "24_pipeline" in reader.url
    picture = reader.locator(".cell_output img[src^='data:image/svg+xml']").first
    picture.scroll_into_view_if_needed()
    assert picture.evaluate("image => image.naturalWidth") > 300

    reader.goto((site / "notebooks" / "17_fault_drills.html").as_uri())
    player = reader.frame_locator("iframe").first
    player.get_by_role("slider").first.wait_for()

    body = reader.locator("body")
    before = body.evaluate("body => getComputedStyle(body).backgroundColor")
    reader.locator(".theme-toggle:visible").first.click()
    reader.wait_for_function(f"getComputedStyle(document.body).backgroundColor !== '{before}'")
