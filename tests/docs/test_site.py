"""The site: it builds without a warning, every link on it leads somewhere, and a real browser shows and searches it.

A page asks no other host for anything, and cuts no code off, on a laptop or a telephone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from benchmarks.panel_frames import CHROMIUM, FLAGS
from rpcbench import __version__

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


class Page(HTMLParser):
    """The addresses that a page refers to, the anchors that it has, and what it says of itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {""}
        self.descriptions: list[str] = []
        self.icons = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.icons += tag == "link" and "icon" in named.get("rel", "")
        if tag == "meta" and named.get("name") == "description":
            self.descriptions.append(named["content"])
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            if name in ("id", "name") and value is not None:
                self.anchors.add(value)


def build(folder: Path, *pages: str, repository: str = "") -> Path:
    environment = {**os.environ, "RPCBENCH_REPOSITORY": repository}
    made = subprocess.run(
        [sys.executable, "docs/make_site.py", str(folder), *pages], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=500,
    )  # fmt: skip
    assert (made.returncode, made.stderr) == (0, "")
    return folder / "html"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("site"))


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


def test_each_page_says_what_it_is_of_and_which_version(site):
    pages = [path for path in site.rglob("*.html") if path.parent.name != "records"]
    for path in pages:
        text = path.read_text()
        page = Page(text)
        assert len(page.descriptions) == 1 and 20 < len(page.descriptions[0]) <= 200, path
        assert page.icons == 1, path
        assert f">rpcbench {__version__}</" in text, path
    assert "github" not in "".join(Page((site / "index.html").read_text()).descriptions)


def test_links_to_the_source_and_to_services_need_its_address(site, tmp_path):
    lesson = "notebooks/24_pipeline_gpipe_vs_1f1b"
    known = build(tmp_path, lesson, repository="https://github.com/someone/bench/")
    address = "https://github.com/someone/bench/blob/HEAD/"
    links = Page((known / f"{lesson}.html").read_text()).links
    assert f"{address}{lesson}.ipynb" in links
    assert f"https://mybinder.org/v2/gh/someone/bench/HEAD?urlpath=lab/tree/{lesson}.ipynb" in links
    assert f"https://colab.research.google.com/github/someone/bench/blob/HEAD/{lesson}.ipynb" in links
    assert f"{address}README.md" in Page((known / "index.html").read_text()).links

    links = Page((site / f"{lesson}.html").read_text()).links
    assert [link for link in links if "someone" in link or "mybinder" in link or "colab.research" in link] == []
    assert "24_pipeline_gpipe_vs_1f1b.ipynb" in links
    given = (site / f"{lesson}.ipynb").read_bytes()
    assert given == (ROOT / f"{lesson}.ipynb").read_bytes()


@pytest.fixture
def reader():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium: set CHROMIUM or put it on PATH")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = running.new_page(color_scheme="light")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.route("https://**/*", lambda route: route.abort_step())
        yield page
        running.close()
    assert [address for address in asked if not address.startswith(("file:", "data:", "blob:"))] == []


def test_no_formula_has_a_command_that_was_not_understood(site):
    formulas = [each for path in site.rglob("*.html") for each in re.findall(r"<math.*?</math>", path.read_text())]
    assert len(formulas) > 60
    assert [each for each in formulas if "\\" in each] == []


@pytest.mark.browser
def test_formulas_and_diagrams_are_drawn_without_another_host(site, reader):
    failed: list[str] = []
    reader.on("requestfailed", lambda request: failed.append(request.url))
    reader.goto((site / "notebooks" / "24_pipeline_gpipe_vs_1f1b.html").as_uri())
    formulas = reader.locator("math")
    assert formulas.count() >= 14
    assert formulas.locator("mfrac").first.evaluate("one => one.getBoundingClientRect().height") > 25
    reader.goto((site / "docs" / "internals" / "journey-of-a-rref.html").as_uri())
    drawn = reader.locator(".diagram img")
    assert drawn.count() == 3
    for diagram in drawn.all():
        diagram.scroll_into_view_if_needed()
        assert diagram.evaluate("image => image.naturalWidth") > 300
    assert failed == []


@pytest.mark.browser
@pytest.mark.parametrize("name", ["ring", "shards", "pipeline", "rrefs", "autograd", "compare"])
def test_a_record_plays_in_its_lesson(site, reader, name):
    frames = f'<iframe src="records/{name}.html"'
    lessons = [path for path in (site / "notebooks").glob("*.html") if frames in path.read_text()]
    assert len(lessons) == 1
    reader.goto(lessons[0].as_uri())
    frame = reader.locator("figure.record iframe")
    frame.scroll_into_view_if_needed()
    player = frame.content_frame
    player.get_by_text(", end").wait_for()
    assert player.get_by_text("Nothing is here").count() == 0
    assert player.locator(".rb-body *").count() > 30
    player.get_by_role("slider", name="frame").fill("1")
    player.get_by_role("button", name="Step", exact=True).click()
    assert player.get_by_role("slider", name="frame").input_value() == "2"
    player.get_by_role("button", name="Play", exact=True).click()
    player.get_by_text(", end").wait_for()


@pytest.mark.browser
def test_the_gallery_leads_to_a_page_that_marks_its_lines_and_plays_its_record(site, reader):
    reader.goto((site / "docs" / "silent-bugs" / "README.html").as_uri())
    pictures = reader.locator(".gallery img")
    assert pictures.count() == 20
    assert pictures.last.evaluate("image => image.naturalWidth") == 220
    reader.locator(".gallery a", has_text="A mean of means").click()
    assert reader.locator(".is-wrong").inner_text().strip().startswith("loss = F.cross_entropy(scores, y)  # wrong")
    assert reader.locator(".is-right").count() == 3
    frame = reader.locator("figure.record iframe")
    frame.scroll_into_view_if_needed()
    player = frame.content_frame
    player.get_by_text(", wrong").wait_for()
    player.get_by_role("slider", name="frame").fill("0")
    player.locator(".rb-sentence", has_text="Right: the ranks").wait_for()
    player.get_by_role("button", name="Play", exact=True).click()
    player.locator(".rb-sentence", has_text="Wrong, first at loss").wait_for()


CUT = """() => [...document.querySelectorAll('article pre')]
  .filter(pre => pre.scrollWidth > pre.clientWidth + 1 && !pre.closest('.columns'))
  .map(pre => pre.textContent)"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("page", ["docs/past-one-machine", "notebooks/11_distributed_autograd_by_hand", "docs/api/rpc"])
def test_no_line_of_code_is_cut_off(site, reader, width, page):
    reader.set_viewport_size({"width": width, "height": 900})
    reader.goto((site / f"{page}.html").as_uri())
    assert reader.locator("article pre").count() > 5
    assert reader.evaluate(CUT) == []
    assert reader.evaluate("document.documentElement.scrollWidth") == width
    if width == 1400:
        assert reader.locator(".content").evaluate("one => one.clientWidth") > 900


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
