"""Equal outputs are shown once, when all workers have finished; nothing else is changed or lost."""

from __future__ import annotations

import json

import pytest

from rpcbench.cells import display as collapse
from rpcbench.cells.display import abbreviate_names, collapsed_areas


class Recorder:
    """A screen that records its input, text by lines."""

    def __init__(self):
        self.shown = []

    def write_text(self, stream, text):
        self.shown += text.splitlines()

    def display_bundle(self, bundle, update=False):
        self.shown.append(bundle["data"])


def bundle(data, **transient):
    return json.dumps({"data": data, "metadata": {}, "transient": transient})


@pytest.fixture
def screen():
    return Recorder()


def areas(screen, count=3):
    return collapsed_areas(screen, [f"worker{i}" for i in range(1, count + 1)], True)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ("worker1 worker2 worker3", "worker1-3"),
        ("worker1 worker3 worker4", "worker1, worker3-4"),
        ("worker2 worker1", "worker2, worker1"),
        ("worker9 worker10 worker11", "worker9-11"),
        ("a1 b2", "a1, b2"),
        ("left right", "left, right"),
        ("worker1", "worker1"),
    ],
)
def test_names_with_consecutive_numbers_are_abbreviated_to_ranges(names, short):
    assert abbreviate_names(iter(names.split())) == short


def test_equal_outputs_are_shown_once_even_if_they_arrive_in_different_pieces(screen):
    one, two, three = areas(screen)
    one.show_item("stdout", "a\nb\n")
    two.show_item("stdout", "a\n")
    two.show_item("stdout", "b\n")
    three.show_item("stdout", "a\nb")
    three.show_item("stdout", "\n")
    for area in (one, two):
        area.show_item("result", bundle({"text/html": "<b>"}, display_id=f"of {id(area)}"))
        area.finish_output()
    three.show_item("result", bundle({"text/html": "<b>"}))
    assert screen.shown == [], "output is held back until all workers have finished"
    three.finish_output()
    assert screen.shown == ["[worker1-3] a", "[worker1-3] b", "[worker1-3] ", {"text/html": "<b>"}]


def test_different_outputs_are_shown_separately_in_the_order_of_the_workers(screen):
    one, two, three = areas(screen)
    for area, text in ((three, "same\n"), (two, "other\n"), (one, "same\n")):
        area.show_item("stdout", text)
        area.finish_output()
    assert screen.shown == ["[worker1, worker3] same", "[worker2] other"]


def test_equal_texts_on_different_streams_differ_and_a_silent_worker_shows_nothing(screen):
    one, two, three = areas(screen)
    one.show_item("stdout", "x\n")
    two.show_item("stderr", "x\n")
    for area in (one, two, three):
        area.finish_output()
    assert screen.shown == ["[worker1] x", "[worker2] x"]


def test_output_after_the_end_is_shown_with_the_name_of_its_worker(screen):
    made = areas(screen, 2)
    for area in made * 2:
        area.show_item("stdout", "x\n")
        area.finish_output()
    assert screen.shown == ["[worker1-2] x", "[worker1] x", "[worker2] x"]


def test_output_beyond_the_limit_is_shown_at_once(screen, monkeypatch):
    monkeypatch.setattr(collapse, "MOST", 10)
    one, two = areas(screen, 2)
    one.show_item("stdout", "123456\n")
    one.show_item("stdout", "789012\n")
    one.show_item("stdout", "live\n")
    assert screen.shown == ["[worker1] 123456", "[worker1] 789012", "[worker1] live"]
    two.show_item("stdout", "quiet\n")
    one.finish_output()
    two.finish_output()
    assert screen.shown[3:] == ["[worker2] quiet"]


def test_output_of_a_single_worker_is_shown_at_once(screen):
    (area,) = collapsed_areas(screen, ["worker1"], False)
    area.show_item("stdout", "now\n")
    assert screen.shown == ["now"]
