"""Collectives as pictures and words, made of the tables alone: who waited for whom, who is missing, who came last."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pictures import meet, send, world

from rpcbench.telemetry import message_views
from rpcbench.telemetry.message_views import (
    ClockOffset,
    Straggler,
    collectives_view,
    drop_earlier_collectives,
    messages_view,
)
from rpcbench.telemetry.recording import Cleaner, Player, Record, flatten_world
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.trace import FAILED, LAST, MOVES, WAITS, CollectiveTimeline, _world_since, chrome_trace
from rpcbench.telemetry.views import World, diff_views


def three() -> World:
    """Three collectives of three workers: worker2 is last in two of them, worker1 in one."""
    at = world(3)
    meet(at, 1, {1: 10.0, 2: 10.5, 3: 10.1}, 10.6)
    meet(at, 2, {1: 11.0, 2: 12.0, 3: 11.9}, 12.1, "barrier", shape="", bytes=0)
    meet(at, 3, {1: 13.2, 2: 13.0, 3: 13.1}, 13.4)
    return at


def the(at: World) -> dict[str, Any]:
    (row,) = collectives_view(at)["collectives"].values()
    return row


def test_who_came_last_and_how_long_each_waited() -> None:
    view = collectives_view(three())
    assert [row["last"] for row in view["collectives"].values()] == [2, 2, 1]
    assert [round(row["waited"], 6) for row in view["collectives"].values()] == [0.5, 1.0, 0.2]
    waited = {key: round(row["waited"], 6) for key, row in view["entries"].items() if key.startswith("w.0.1/")}
    assert waited == {"w.0.1/1": 0.5, "w.0.1/2": 0.0, "w.0.1/3": 0.4}


def test_a_hang_tells_where_each_missing_member_is_and_who_calls_something_else() -> None:
    at = world(4)
    meet(at, 1, {1: 10.0, 2: 10.1}, None, site="train.py:12")
    pair = {"group": "tp", "members": ["worker3", "worker4"], "site": "FSDP layers.0"}
    at[3]["tables"]["collectives"] = {
        "w.1.5": {**at[1]["tables"]["collectives"]["w.0.1"], **pair, "op": "all_gather", "number": 5, "begin": 10.2}
    }
    at[2]["tables"]["collectives"]["w.0.1"].update(op="barrier", site="")
    view = collectives_view(at)["collectives"]
    assert view["w.0.1"]["elsewhere"] == [
        "worker2 calls barrier there", "worker4 is in no collective",
        "worker3 is in all_gather #5 of tp (FSDP layers.0)",
    ]  # fmt: skip
    assert view["w.1.5"]["elsewhere"] == ["worker4 is in no collective"]
    lines = CollectiveTimeline.from_world(at).summary.splitlines()
    assert "all_reduce(SUM) #1 of world (train.py:12) is under way; worker3, worker4 not there yet" in lines
    assert "    worker3 is in all_gather #5 of tp (FSDP layers.0)" in lines


def test_a_collective_whose_end_is_not_known_ends_no_earlier_than_its_last_member_begins() -> None:
    at = world(2)
    key = meet(at, 1, {1: 10.0, 2: 10.5}, 10.0, end_known=False)
    at[2]["tables"]["collectives"][key]["end"] = 10.5
    view = collectives_view(at)
    assert (the(at)["state"], the(at)["end_known"]) == ("done", False)
    assert [view["entries"][f"{key}/{id_}"]["end"] for id_ in (1, 2)] == [10.5, 10.5]
    assert "1 of 1 have no known end" in CollectiveTimeline.from_world(at).summary


def test_who_cost_most_is_named_first() -> None:
    timeline = CollectiveTimeline.from_world(three())
    found = [Straggler(one.worker, round(one.seconds, 6), one.collectives) for one in timeline.stragglers]
    assert found == [Straggler(2, 1.5, 2), Straggler(1, 0.2, 1)]
    assert timeline.summary.splitlines() == [
        "3 collectives in 3400.0 ms",
        "worker2 kept the others waiting 1.5 s in 2 of 3",
        "worker1 kept the others waiting 200.0 ms in 1 of 3",
    ]


def test_the_one_that_is_missing_now_is_named_before_those_that_came_late_before() -> None:
    at = three()
    meet(at, 4, {1: 20.0, 2: 20.1}, None)
    count, runs, where, *late = CollectiveTimeline.from_world(at).summary.splitlines()
    assert count.startswith("4 collectives in") and where == "    worker3 is in no collective"
    assert runs == "all_reduce(SUM) #4 of world is under way; worker3 not there yet"
    assert late == [
        "before that, worker2 kept the others waiting 1.5 s in 2 of 3",
        "before that, worker1 kept the others waiting 200.0 ms in 1 of 3",
    ]


def test_clocks_of_other_hosts_are_put_right_before_anybody_is_blamed() -> None:
    at = world(2)
    meet(at, 1, {1: 10.0, 2: 10.5}, 10.6)
    rows = at[1]["tables"]["collectives"]
    rows["w.0.1"] = {**rows["w.0.1"], "begin": 110.0, "end": 110.6}
    at[1]["clock"] = ClockOffset(100.0, 0.01)
    assert (the(at)["last"], round(the(at)["waited"], 6), round(the(at)["end"], 6)) == (2, 0.5, 10.6)
    assert messages_view(at)["clocks"] == collectives_view(at)["clocks"] == {"1": {"error": 0.01}}


@pytest.mark.parametrize(
    ("begins", "end", "more", "state", "missing", "last"),
    [
        ({1: 1.0, 3: 2.0}, None, {}, "open", ["worker2"], None),
        ({1: 1.0, 2: 3.0, 3: 2.0}, None, {}, "open", [], 2),
        ({1: 1.0, 3: 2.0}, 9.0, {"failed": True}, "failed", ["worker2"], None),
        ({1: 1.0, 3: 2.0}, 9.0, {}, "done", [], None),  # worker2 has not told yet; but nobody gets through without it
        ({1: 1.0}, 9.0, {"members": ["worker1"]}, "done", [], None),  # alone there is nobody to wait for
    ],
)
def test_who_is_missing_is_said_as_long_as_nobody_is_through(
    begins: dict[int, float], end: float | None, more: dict[str, Any], state: str, missing: list[str], last: int | None
) -> None:
    at = world(3)
    meet(at, 1, begins, end, **more)
    assert (the(at)["state"], the(at)["missing"], the(at)["last"]) == (state, missing, last)


def test_what_a_lost_member_had_under_way_has_failed_with_it() -> None:
    at = world(2)
    meet(at, 1, {1: 1.0, 2: 1.5}, None)
    at[2]["state"] = "lost"
    assert the(at)["state"] == "open", "worker1 is in it still"
    at[1]["state"] = "left"
    assert (the(at)["state"], the(at)["end"]) == ("failed", None)
    rows = at[1]["tables"]["collectives"]
    rows["w.0.1"] = {**rows["w.0.1"], "end": 5.0, "failed": True}
    assert (the(at)["state"], the(at)["end"]) == ("failed", 5.0)


def test_the_total_of_collectives_has_those_of_groups_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_views, "PARTS_KEPT", 3)
    at = three()
    for number in range(5, 9):
        meet(at, number, {1: 20.0 + number, 2: 20.1 + number, 3: 20.2 + number}, 20.5 + number)
    alone = messages_view(at)["counts"]["collectives"]["all"]
    at[1]["met"], at[2]["met"] = {"old": 2, "w.0": 3}, {"old": 1}
    assert messages_view(at)["counts"]["collectives"]["all"] == alone + 2


def test_a_trace_has_the_collectives_of_its_body_and_those_under_way() -> None:
    at = three()
    meet(at, 4, {1: 9.0}, None)
    at[3]["clock"] = ClockOffset(0.0, 0.0)
    for member in at.values():
        member |= {"clock": ClockOffset(0.0, 0.0), "missed": 0, "trimmed": 0}
    numbers = [row["number"] for row in collectives_view(_world_since(at, {}, 12.05))["collectives"].values()]
    assert numbers == [4, 2, 3]
    assert drop_earlier_collectives(at[0], 99.0) is at[0]


# ---- as a timeline


def bars(at: World) -> list[tuple[int, str, float, float]]:
    found = CollectiveTimeline.from_world(at).chart.bars
    return sorted((bar.lane, bar.mark.name, round(bar.begin, 6), round(bar.end, 6)) for bar in found)


def test_waiting_is_told_apart_from_moving_data_and_the_last_one_is_marked() -> None:
    at = world(2)
    meet(at, 1, {1: 10.0, 2: 10.5}, 10.6)
    assert bars(at) == sorted([
        (1, WAITS.name, 10.0, 10.5), (1, MOVES.name, 10.5, 10.6), (2, LAST.name, 10.5, 10.6),
    ])  # fmt: skip


def test_what_is_under_way_waits_until_now_and_what_failed_is_marked_so() -> None:
    at = world(2)
    meet(at, 1, {1: 10.0}, 12.0, failed=True)
    meet(at, 2, {1: 13.0}, None)
    timeline = CollectiveTimeline.from_world(at, now=20.0)
    assert [(bar.mark, bar.begin, bar.end, bar.running) for bar in timeline.chart.bars] == [
        (FAILED, 10.0, 12.0, False), (WAITS, 13.0, 20.0, True),
    ]  # fmt: skip
    assert timeline.summary.splitlines()[-2:] == [
        "all_reduce(SUM) #2 of world is under way; worker2 not there yet", "    worker2 is in no collective",
    ]  # fmt: skip
    assert timeline.text().splitlines()[-3].startswith("worker2 │"), "who is missing has a lane, too"


def test_the_text_has_a_lane_for_each_worker() -> None:
    said = CollectiveTimeline.from_world(three()).text(70).splitlines()
    lanes = {line.partition("│")[0].strip(): line.partition("│")[2] for line in said if "│" in line}
    assert set(lanes) == {"worker1", "worker2", "worker3"}
    assert LAST.fill in lanes["worker2"] and LAST.fill not in lanes["worker3"] and LAST.fill in lanes["worker1"]
    assert "waits for" in lanes["worker1"] and WAITS.fill in lanes["worker3"]
    assert said[-1].startswith("· waits for the last one") and said[-2].endswith("ms")


def test_the_picture_is_one_that_pages_can_show(tmp_path: Path) -> None:
    timeline = CollectiveTimeline.from_world(three())
    shapes = ElementTree.fromstring(timeline.svg()).iter("{http://www.w3.org/2000/svg}rect")
    kinds = [shape.get("class") for shape in shapes]
    counts = {mark: kinds.count(f"f-{mark.colour}") for mark in (WAITS, MOVES, LAST, FAILED)}
    assert counts == {WAITS: 6, MOVES: 6, LAST: 3, FAILED: 0}
    assert "worker2 kept the others waiting" in timeline._repr_html_() and timeline._repr_html_().startswith("<img")
    for name in ("a.svg", "a.html", "a.txt"):
        assert "worker2 kept" in timeline.save(tmp_path / name).read_text()
    with pytest.raises(ValueError, match=r"a\.pdf: a timeline is saved as \.svg, \.html, \.txt"):
        timeline.save(tmp_path / "a.pdf")


def test_of_many_the_latest_are_drawn() -> None:
    timeline = CollectiveTimeline.from_world(three(), last=1)
    assert [row["number"] for row in timeline.rows.values()] == [3] and timeline.seconds == pytest.approx(0.4)
    assert str(CollectiveTimeline.from_world(world(2))) == "no collective was recorded"
    assert CollectiveTimeline.from_world({}).svg().startswith("<svg")


# ---- among messages


def test_they_stand_among_messages_in_words() -> None:
    at = three()
    send(at, 0, 1, "Call", 9.9, label="train")
    send(at, 1, 0, "Result", 12.5, label="train")
    meet(at, 4, {1: 14.0}, None, "barrier", shape="", bytes=0)
    lines = summarize_view(messages_view(at)).splitlines()
    assert lines[0] == "4 members, 2 messages, 4 collectives"
    assert [line.split("ms  ")[1] for line in lines[1:]] == [
        "notebook → worker1: call train",
        "worker1, worker2, worker3: all_reduce(SUM) of float32[4] in world #1, 600.0 ms, worker2 last, by 500.0 ms",
        "worker1, worker2, worker3: barrier in world #2, 1100.0 ms, worker2 last, by 1000.0 ms",
        "worker1 → notebook: result of train",
        "worker1, worker2, worker3: all_reduce(SUM) of float32[4] in world #3, 400.0 ms, worker1 last, by 200.0 ms",
        "worker1, worker2, worker3: barrier in world #4, open, without worker2, worker3",
    ]


def test_a_trace_for_perfetto_has_each_part_and_in_it_the_wait() -> None:
    events = [event for event in chrome_trace(three())["traceEvents"] if event.get("cat") == "collectives"]
    for phase in ("b", "e"):
        assert sorted((e["pid"], e["name"]) for e in events if e["ph"] == phase and "wait" in e["name"]) == [
            (1, "waits for worker2"), (1, "waits for worker2"), (2, "waits for worker1"), (3, "waits for worker1"),
            (3, "waits for worker2"), (3, "waits for worker2"),
        ]  # fmt: skip
    own = {event["ph"] + event["name"]: event["ts"] for event in events if event["id"] == "collective w.0.1/1"}
    assert own == {
        "ball_reduce(SUM)": 0.0, "bwaits for worker2": 0.0, "ewaits for worker2": 500000.0,
        "eall_reduce(SUM)": 600000.0,
    }  # fmt: skip


def test_a_record_plays_them() -> None:
    at = three()
    record = Record(
        {"holds": {}, "leaves_out": []}, ((0.0, Cleaner().clean_value(diff_views({}, flatten_world(at))), ""),)
    )
    assert collectives_view(Player(record).world())["collectives"] == collectives_view(at)["collectives"]
