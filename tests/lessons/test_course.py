"""The course holds together: a map, heads and feet as lessons.json says, a question, readings and a picture in each."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
sys.path.insert(0, str(ROOT / "docs"))

import make_course  # noqa: E402

COURSE = make_course.lessons()
LINK = re.compile(r"\]\(([^)\s]+)\)")
SVG = "data:image/svg+xml;base64,"
LESSONS = [lesson for lesson in COURSE if lesson["track"] != "exam"]
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=[lesson["lesson"] for lesson in LESSONS])
each_notebook = pytest.mark.parametrize("lesson", COURSE, ids=[lesson["lesson"] for lesson in COURSE])


def cells_of(lesson):
    return nbformat.read(NOTEBOOKS / f"{lesson['lesson']}.ipynb", 4).cells


def prose(lesson) -> str:
    return "\n\n".join(cell.source for cell in cells_of(lesson) if cell.cell_type == "markdown")


def test_the_course_is_every_notebook_in_order():
    names = [lesson["lesson"] for lesson in COURSE]
    assert names == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    assert make_course.MAP.read_text() == make_course.page(COURSE), "run docs/make_course.py"
    assert [make_course.counted(lesson) for lesson in COURSE] == COURSE, "run docs/make_course.py"
    for place, lesson in enumerate(COURSE):
        assert lesson["track"] in make_course.TRACKS
        assert set(lesson["before"]) <= set(names[:place]), f"{lesson['lesson']} builds on a later lesson"


@each_notebook
def test_a_lesson_has_its_head_and_foot(lesson):
    notebook = nbformat.read(NOTEBOOKS / f"{lesson['lesson']}.ipynb", 4)
    before = [cell.source for cell in notebook.cells]
    make_course.made(notebook, COURSE, lesson)
    assert [cell.source for cell in notebook.cells] == before, "run docs/make_course.py"
    assert before[0].splitlines()[0] == f"# {make_course.number(lesson)} · {lesson['title']}"
    ElementTree.parse(NOTEBOOKS / "pictures" / f"{lesson['lesson']}.svg")


@each_lesson
def test_a_lesson_asks_first_and_sums_up(lesson):
    text = prose(lesson)
    for part in ("**Question.**", "**Predict.**", "\n## What you know now", "\n## Read on"):
        assert part in text, part
    assert text.index("**Predict.**") < text.index("\n## ") and text.index("know now") < text.index("Read on")


@each_lesson
def test_readings_are_a_paper_torchs_page_and_ours(lesson):
    links = LINK.findall(prose(lesson).partition("\n## Read on")[2])
    assert any(link.startswith("https://docs.pytorch.org/") for link in links), links
    assert any(link.startswith("../docs/") for link in links), links
    others = [link for link in links if link.startswith("https://") and "pytorch.org" not in link]
    assert others, "a paper or a textbook"


@each_notebook
def test_links_to_files_lead_somewhere(lesson):
    for link in LINK.findall(prose(lesson)):
        if not link.startswith(("http", "#", "attachment:")):
            assert (NOTEBOOKS / link.partition("#")[0]).exists(), link


@each_lesson
def test_a_lesson_shows_a_picture_without_a_kernel(lesson):
    outputs = [output for cell in cells_of(lesson) for output in cell.get("outputs", ())]
    html = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    assert any(SVG in text or "<svg" in text for text in html), "no stored SVG"
    sources = [cell.source for cell in cells_of(lesson) if cell.cell_type == "code"]
    assert not any("timeline.text(" in source for source in sources), "a timeline is drawn, not written"
