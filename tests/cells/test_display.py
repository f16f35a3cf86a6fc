"""The output of a single worker, and of one of several."""

from __future__ import annotations

import contextvars
import json
import threading
from types import SimpleNamespace

import pytest

from rpcbench.cells.display import OutputArea, OutputDisplay


class Recorder:
    """A screen that records its input."""

    def __init__(self):
        self.shown = []

    def write_text(self, stream, text):
        self.shown.append((stream, text))

    def display_bundle(self, bundle, update=False):
        self.shown.append(("update" if update else "display", bundle))

    def clear_output(self, wait):
        self.shown.append(("clear", wait))


@pytest.fixture
def screen():
    return Recorder()


def bundle(data, **transient):
    return json.dumps({"data": data, "metadata": {}, "transient": transient})


def test_output_of_a_single_worker_is_shown_at_once_and_unchanged(screen):
    area = OutputArea(screen, "worker1")
    area.show_item("stdout", "no newline")
    area.show_item("result", bundle({"text/plain": "42"}))
    area.show_item("clear", "true")
    assert screen.shown == [
        ("stdout", "no newline"),
        ("display", {"data": {"text/plain": "42"}, "metadata": {}, "transient": {}}),
        ("clear", True),
    ]


def test_output_of_one_of_several_workers_is_shown_in_whole_labelled_lines(screen):
    area = OutputArea(screen, "worker1", "worker1")
    area.show_item("stdout", "one\ntw")
    assert screen.shown == [("stdout", "[worker1] one\n")]
    area.show_item("stdout", "o\nrest")
    area.show_item("clear", "false")
    area.finish_output()
    assert [text for _, text in screen.shown[1:]] == ["[worker1] two\n", "[worker1] rest\n"]


def test_results_of_one_of_several_workers_are_shown_at_the_end_plain_ones_as_lines(screen):
    area = OutputArea(screen, "worker1", "worker1")
    area.show_item("result", bundle({"text/plain": "a\nb"}))
    area.show_item("result", bundle({"text/plain": "x", "text/html": "<b>x</b>"}))
    assert screen.shown == []
    area.finish_output()
    assert screen.shown[:2] == [("stdout", "[worker1] a\n[worker1] b\n"), ("stdout", "[worker1] \n")]
    assert screen.shown[2][1]["data"]["text/html"] == "<b>x</b>"
    area.show_item("result", bundle({"text/plain": "late"}))
    assert screen.shown[3] == ("stdout", "[worker1] late\n")


def test_an_update_of_a_display_that_was_shown_as_lines_is_shown_as_lines(screen):
    area = OutputArea(screen, "worker1", "worker1")
    for kind, text in (("display", "old"), ("update", "new")):
        area.show_item(kind, bundle({"text/plain": text}, display_id="d"))
    assert screen.shown == [("stdout", "[worker1] old\n"), ("stdout", "[worker1] new\n")]
    area.show_item("update", bundle({"text/plain": "table", "text/html": "<b>table</b>"}, display_id="d"))
    area.show_item("update", bundle({"text/plain": "later"}, display_id="d"))
    assert [kind for kind, _ in screen.shown[2:]] == ["stdout", "display", "update"]


def test_display_ids_are_prefixed_with_their_worker(screen):
    for worker in ("worker1", "worker2"):
        OutputArea(screen, worker).show_item("display", bundle({"text/plain": "x"}, display_id="q"))
        OutputArea(screen, worker).show_item("update", bundle({"text/plain": "y"}, display_id="q"))
    ids = [(kind, shown["transient"]["display_id"]) for kind, shown in screen.shown]
    assert ids == [(k, f"{w}/q") for w in ("worker1", "worker2") for k in ("display", "update")]


def test_a_display_publishes_in_the_context_in_which_it_was_made(capsys):
    cell = contextvars.ContextVar("cell")
    seen = []
    shell = SimpleNamespace(
        display_pub=SimpleNamespace(publish=lambda **message: seen.append((cell.get(), message["data"])))
    )
    cell.set("the asking cell")
    made = OutputDisplay(shell)
    cell.set("a later cell")
    thread = threading.Thread(target=lambda: made.display_bundle({"data": "x", "metadata": {}}))
    thread.start()
    thread.join()
    made.display_bundle({"data": "y", "metadata": {}})
    assert seen == [("the asking cell", "x"), ("the asking cell", "y")]
    made.write_text("stderr", "text")
    assert capsys.readouterr().err == "text"
