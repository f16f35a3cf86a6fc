"""The gallery of silent bugs: its pages are current, each program of the corpus is of one kind, and reports say so."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest

import rpcbench

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests" / "compare")]

import gallery_pages  # noqa: E402
import make_gallery  # noqa: E402
from silent_bugs import KINDS, Kind  # noqa: E402

from rpcbench.panels import ComparePanel  # noqa: E402
from rpcbench.panels.replay import playback_data  # noqa: E402
from rpcbench.telemetry.recording import load_record  # noqa: E402

NAMES = [kind.name for kind in KINDS]
RENEW = "run docs/make_gallery.py"


def test_pages_and_pictures_are_those_of_the_programs_and_records():
    made = gallery_pages.files()
    assert [path.name for path, text in made.items() if path.read_text() != text] == [], RENEW
    kept = {path for path in gallery_pages.FOLDER.rglob("*") if path.is_file() and path.suffix in (".md", ".svg")}
    assert kept == {*made}
    for folder, suffix in (("programs", ".py"), ("records", ".json")):
        files = (gallery_pages.FOLDER / folder).glob(f"*{suffix}")
        assert sorted(path.stem for path in files) == sorted(NAMES)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_a_record_is_of_the_program_as_it_stands(kind: Kind):
    path = gallery_pages.record_path(kind)
    assert path.stat().st_size <= make_gallery.LARGEST
    record = load_record(path)
    assert record.about["made_from"] == gallery_pages.digest(kind), RENEW
    assert [name for _, _, name in record.frames if name] == ["right", "wrong"]
    assert len(playback_data(record, ComparePanel)["frames"]) == len(record.frames)
    losses = record.about["losses"]
    assert all(values[-1] < values[0] for values in losses.values()), "a loss that does not fall is not silent"


def test_each_program_of_the_corpus_is_of_one_kind():
    files = (ROOT / "tests" / "compare").glob("corpus_*.py")
    corpus = [each.name for path in files for each in importlib.import_module(path.stem).PROGRAMS]
    told = Counter(name for kind in KINDS for name in kind.corpus)
    assert Counter(corpus) == told, "give each program a kind in docs/silent_bugs.py"


@pytest.fixture(scope="module")
def four():
    with rpcbench.Cluster(4) as cluster:
        yield cluster


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_the_right_program_is_right_and_the_report_names_the_mistake_of_the_wrong_one(four, kind: Kind):
    make_gallery.compare(four, kind, right=True).raise_if_wrong()
    first = make_gallery.compare(four, kind).first
    assert first is not None and (first.phase, first.name) == kind.first
    assert kind.cause in first.cause
    assert kind.cause in gallery_pages.about_of(kind)["report"].partition("\n")[0]


def test_a_page_of_the_site_marks_its_lines_and_plays_its_record():
    text = gallery_pages.with_player(gallery_pages.page(KINDS[0]), KINDS[0].name)
    program = text.partition(":emphasize-lines: ")[2]
    lines, shown = program.split("\n\n", 1)
    marked = [shown.splitlines()[int(n) - 1] for n in lines.split(",")]
    assert len(marked) == 2 and "# wrong: " in marked[0] and marked[1].lstrip().startswith("# right: ")
    assert text.count("<iframe") == 1 and gallery_pages.PLAYER not in text
