"""What the site has stored: a picture of each diagram, and records of lessons as these stand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import lesson_pages  # noqa: E402
import make_diagrams  # noqa: E402
import make_records  # noqa: E402

from rpcbench.panels import PANELS  # noqa: E402
from rpcbench.panels.replay import playback_data  # noqa: E402
from rpcbench.telemetry.message_views import describe_message  # noqa: E402
from rpcbench.telemetry.recording import Player, load_record  # noqa: E402


def test_each_diagram_has_its_picture():
    wanted = {make_diagrams.name(text) for page in make_diagrams.documents() for text in make_diagrams.diagrams(page)}
    assert {path.name for path in make_diagrams.FOLDER.iterdir()} == wanted, "run docs/make_diagrams.py"


@pytest.mark.parametrize("name", make_records.SCENES)
def test_each_record_is_of_its_lesson_as_it_stands(name):
    scene, path = make_records.SCENES[name], make_records.FOLDER / f"{name}.json"
    assert path.stat().st_size <= make_records.LARGEST
    record = load_record(path)
    assert record.about["made_from"] == make_records.digests(scene), f"run docs/make_records.py {name}"
    assert [frame[2] for frame in record.frames if frame[2]] == ["begin", *scene.cells.values(), "end"]
    labels = {label for _, delta, _ in record.frames for label in _labels(delta) if label.startswith("pipeline ")}
    assert not {one for one in labels if one in describe_message("Call", one)}, "each label of today has words"
    frames = playback_data(record, PANELS[scene.panel])
    assert len(frames["frames"]) >= 8 and not frames["note"]


def _labels(delta):
    """The labels of the calls in a frame."""
    changes = [change for name, change in delta.items() if change and name.endswith(" calls")]
    return [row["label"] for change in changes for row in change["set"].values()]


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_record_can_be_made_anew(tmp_path):
    scene, stored = make_records.SCENES["rrefs"], load_record(make_records.FOLDER / "rrefs.json")
    make_records.make(scene, tmp_path / "rrefs.json")
    made = load_record(tmp_path / "rrefs.json")
    assert made.about["made_from"] == stored.about["made_from"]
    for record in (made, stored):
        player = Player(record)
        player.go_to_frame(len(record.frames) - 1)
        owned = PANELS["rrefs"].look(player.world())["rrefs"].values()
        assert sorted((one["type"], one["owner"]) for one in owned) == [("Meter", 2), *[("Tensor", 1)] * 3]


def test_there_is_a_scene_for_each_record():
    assert {path.stem for path in make_records.FOLDER.iterdir()} == {*make_records.SCENES}


@pytest.mark.parametrize(
    ("repository", "services"),
    [
        ("", []),
        ("https://git.example/someone/bench", []),
        ("https://gitlab.com/group/bench", ["https://mybinder.org/v2/gl/group%2Fbench/HEAD?"]),
        (
            "https://github.com/someone/bench",
            ["https://mybinder.org/v2/gh/someone/bench/HEAD?", "https://colab.research.google.com/github/someone/"],
        ),
    ],
)
def test_a_lesson_links_to_the_services_that_reach_its_repository(repository, services):
    told = lesson_pages.how_to_run("20_ring_all_reduce", repository)
    assert "`rpcbench lab`" in told and 'href="20_ring_all_reduce.ipynb" download' in told
    assert told.count("https://") == len(services)
    for address in services:
        assert f"]({address}" in told
    assert ("teachers.md" in told) == any("colab" in address for address in services)


def test_the_page_of_the_course_lists_all_records():
    listed = lesson_pages.list_of_records()
    for name, scene in make_records.SCENES.items():
        assert f"{scene.lesson}.ipynb" in listed and f"records/{name}.html" in listed and scene.shows in listed


def test_a_record_stands_below_the_last_cell_that_made_it():
    cells = [{"id": f"ring-{n}", "metadata": {}} for n in (24, 25, 26)]
    shown = [cell["id"] for cell in lesson_pages.add_to(cells, "20_ring_all_reduce", "")]
    assert shown == ["ring-24", "ring-25", "site-ring-25", "ring-26"]
