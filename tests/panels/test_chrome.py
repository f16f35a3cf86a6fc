"""A world as Chrome's trace events: every call, operation and message at its time, on one clock, joined by arrows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pictures import gpipe, send, world

from rpcbench.pipeline.timeline import TRACK
from rpcbench.telemetry.message_views import ClockOffset
from rpcbench.telemetry.trace import IN, OUT, chrome_trace, save_trace

Event = dict[str, Any]


def events(at: Any, phase: str, **wanted: Any) -> list[Event]:
    found = [event for event in chrome_trace(at)["traceEvents"] if event["ph"] == phase]
    return [event for event in found if all(event.get(name) == value for name, value in wanted.items())]


def called() -> Any:
    at = world(2)
    send(at, 0, 1, "Call", 10.0, took=0.001, call=3, label="train", bytes=9)
    send(at, 1, 0, "Result", 10.005, took=0.001, call=3)
    return at


def test_a_call_has_a_span_at_its_caller_and_one_at_its_callee() -> None:
    spans = {event["cat"]: event for event in events(called(), "b")}
    ends = {event["cat"]: event["ts"] for event in events(called(), "e")}
    made, run = spans["calls made"], spans["calls run"]
    assert (made["pid"], made["name"], made["ts"], ends["calls made"]) == (0, "train", 0.0, 6000.0)
    assert (run["pid"], run["name"], run["ts"], ends["calls run"]) == (1, "train", 1000.0, 5000.0)


def test_messages_are_joined_by_arrows_that_stand_on_slices() -> None:
    at = called()
    for phase, track in (("s", OUT), ("f", IN)):
        stands = {(e["pid"], e["tid"], e["ts"]) for e in events(at, "X", cat="message")}
        arrows = events(at, phase)
        assert len(arrows) == 2 and {(e["pid"], e["tid"], e["ts"]) for e in arrows} <= stands
        assert {e["tid"] for e in arrows} == {track}
    assert {e["id"] for e in events(at, "s")} == {e["id"] for e in events(at, "f")}


def test_a_message_that_has_not_come_has_no_arrow_and_its_call_no_span() -> None:
    at = world(2)
    send(at, 0, 1, "Call", 10.0, took=None, call=3)
    assert events(at, "s") == events(at, "b") == [] and len(events(at, "X")) == 1


def test_operations_of_a_pipeline_stand_at_their_worker() -> None:
    at = world(2)
    gpipe(at, 0, 2, 3, 100.0)
    rows = [row for member in at.values() for row in member["tables"]["ops"].values()]
    slices = events(at, "X", cat="pipeline", tid=TRACK)
    assert sorted((e["pid"], e["name"], e["dur"]) for e in slices) == sorted(
        (row["worker"], f"{row['op']}{row['microbatch']}", round((row["end"] - row["begin"]) * 1e6, 3)) for row in rows
    )


def test_all_members_are_on_one_clock() -> None:
    at = world(2)
    gpipe(at, 0, 2, 1, 100.0)
    before = {(e["pid"], e["name"]): e["ts"] for e in events(at, "X")}
    at[2]["clock"] = ClockOffset(5.0, 0.001)
    for row in at[2]["tables"]["ops"].values():
        row["begin"], row["end"] = row["begin"] + 5.0, row["end"] + 5.0
    assert {(e["pid"], e["name"]): e["ts"] for e in events(at, "X")} == before


def test_members_have_their_names_and_the_file_is_json(tmp_path: Path) -> None:
    at = called()
    at[1]["left_out"] = 4
    saved = json.loads(save_trace(at, tmp_path / "trace.json").read_text())
    assert saved == json.loads(json.dumps(chrome_trace(at))) and saved["otherData"] == {"left_out": {"worker1": 4}}
    names = {e["pid"]: e["args"]["name"] for e in saved["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "notebook", 1: "worker1", 2: "worker2"}


def test_a_world_where_nothing_happened_is_an_empty_trace() -> None:
    assert [e for e in chrome_trace(world(1))["traceEvents"] if e["ph"] != "M"] == []
