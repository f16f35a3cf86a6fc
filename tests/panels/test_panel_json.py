"""What `panel.text()` and `panel.json()` say of each panel, and the schema of the latter."""

from __future__ import annotations

import json
import threading

import pytest
from pictures import meet, own, restarted, world
from plans import usual_plan
from shown import busy_world
from test_step_panel import Steps, message

import rpcbench
from rpcbench.panels import ALL_PANELS, PANELS
from rpcbench.panels.base import PanelFeed
from rpcbench.panels.step import StepPanel
from rpcbench.telemetry.collector import LIVE, RECORD
from rpcbench.telemetry.panel_json import PANEL_SHAPES, check_document, describe_fields, panel_document
from rpcbench.telemetry.plan_view import plan_tables
from rpcbench.telemetry.recording import Record, Still, diff_views, flatten_world, make_lone_world
from rpcbench.telemetry.summary import summarize_view


def look_at(name):
    """The view of a panel of everything that can happen."""
    if name == "step":
        return StepPanel(Steps(message(3, call=7)), publisher=PanelFeed()).json()["sections"]
    if name == "plan":
        return ALL_PANELS[name].look(make_lone_world(plan_tables(usual_plan())))
    at = busy_world()
    if name == "metrics":
        restarted(at, 3)
    at[0]["tables"]["remarks"] = {"0": {"words": "The end of it is missing."}}
    at[1].update(trimmed=5, counted=20, clock=[0.1, 0.01], zero=(50.0, 1.7e9))
    for number in range(2, 9):
        meet(at, number, {1: 60.0 + number, 2: 60.1 + number, 3: 60.1 + number}, 60.2 + number, "all_reduce(SUM)")
    return ALL_PANELS[name].look(at)


@pytest.mark.parametrize("name", PANEL_SHAPES)
def test_the_document_of_each_panel_has_the_fields_of_the_schema_and_no_others(name):
    document = json.loads(json.dumps(panel_document(look_at(name), LIVE, {}), allow_nan=False))
    check_document(document)
    assert document["panel"] == name
    for section, rows in document["sections"].items():
        known = {field for field, _ in describe_fields(PANEL_SHAPES[name][section])}
        assert {field for row in rows.values() for field in row} <= known


def test_each_section_is_tried_with_a_row():
    empty = {f"{name}.{key}" for name in PANEL_SHAPES for key, rows in look_at(name).items() if not rows}
    assert empty == set()


def test_the_schema_has_all_panels():
    assert {*PANEL_SHAPES} == {*ALL_PANELS, "step"}


@pytest.mark.parametrize("spoil", [
    lambda document: document.update(version=2),
    lambda document: document.update(panel="rref"),
    lambda document: document.pop("phase"),
    lambda document: document["sections"].pop("forks"),
    lambda document: document["sections"]["rrefs"]["1.7"].update(owner="2"),
    lambda document: document["sections"]["rrefs"]["1.7"].pop("size"),
])  # fmt: skip
def test_a_document_with_a_fault_is_refused(spoil):
    document = panel_document(look_at("rrefs"), LIVE, {})
    document = json.loads(json.dumps(document))
    check_document(document)
    spoil(document)
    with pytest.raises(ValueError, match=r"document|section rrefs, row '1.7'"):
        check_document(document)


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_says_what_it_shows(name):
    at = busy_world()
    panel = PANELS[name](Still(at), PanelFeed())
    document = panel.json()
    assert (document["phase"], document["at"]) == ("record", None)
    assert document["sections"] == PANELS[name].look(at)
    assert panel.text() == str(panel) == summarize_view(PANELS[name].look(at))


def test_the_number_of_lines_is_the_readers():
    at = world(1)
    for number in range(40):
        own(at, 1, f"0.{number}")
    panel = PANELS["rrefs"](Still(at), PanelFeed())
    assert len(panel.text().splitlines()) == 1 + 12 + 1
    assert panel.text(2).splitlines()[1:] == [*panel.text().splitlines()[1:3], "  … and 38 more"]
    assert len(panel.text(None).splitlines()) == 1 + 40


def test_of_a_log_the_last_lines_are_shown():
    panel = PANELS["logs"](Still(busy_world()), PanelFeed())
    every = panel.text(None).splitlines()
    assert panel.text(1).splitlines()[1:] == every[-1:]


class Changing:
    """A source that a browser has long closed: it has a world only while somebody subscribes."""

    phase = LIVE

    def __init__(self):
        self.at = world(1)
        self.readers = 0

    def subscribe(self, wake):
        self.readers += 1
        return self.leave

    def leave(self):
        self.readers -= 1

    def world(self):
        return self.at if self.readers else {}


def test_a_panel_that_no_browser_shows_any_more_still_says_the_present():
    source = Changing()
    panel = PANELS["rrefs"](source, PanelFeed())
    panel._publisher.close_viewer(panel)
    own(source.at, 1, "0.7")
    assert source.readers == 0
    assert "0.7" in panel.text()
    assert [*panel.json()["sections"]["rrefs"]] == ["0.7"]
    assert source.readers == 0


def test_the_clock_of_the_rows_is_told():
    at = busy_world()
    for state in at.values():
        state.pop("epoch", None)
    assert panel_document({}, RECORD, at)["epoch"] is None
    for member, epoch, clock in ((0, 1000.0, [0.0, 0.0]), (1, 2000.0, [7.0, 0.1])):
        at[member].update(epoch=epoch, clock=clock)
    assert panel_document({}, RECORD, at)["epoch"] == 1000.0


def test_a_record_says_its_frame(tmp_path):
    first, second = world(1), world(1)
    own(second, 1, "0.7")
    sections = [flatten_world(first), flatten_world(second)]
    frames = ((0.0, diff_views({}, sections[0]), ""), (1.0, diff_views(*sections), ""))
    about = {"format": "rpcbench record", "version": 1, "holds": {}, "leaves_out": []}
    path = Record(about, frames).save(tmp_path / "lesson.json")
    played = rpcbench.replay(path)
    assert [*played.json()["sections"]["rrefs"]] == ["0.7"]
    assert (played.json()["phase"], played.text()) == ("record", str(played))
    played.go(0)
    assert played.json()["sections"]["rrefs"] == {}
    check_document(played.json())


def test_it_is_read_on_another_thread():
    panel = PANELS["workers"](Still(busy_world()), PanelFeed())
    found = []
    thread = threading.Thread(target=lambda: found.append(panel.json()))
    thread.start()
    thread.join()
    check_document(found[0])
