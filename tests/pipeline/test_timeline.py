"""The picture of a step, drawn from rows as the workers report them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcbench.base.ids import Row
from rpcbench.pipeline.ops import Ops, parse_ops
from rpcbench.pipeline.schedules import gpipe, one_f_one_b
from rpcbench.pipeline.simulate import simulate
from rpcbench.pipeline.timeline import Timeline, idle_share

START = 5000.0
MS = 1e-3


def row(worker: int, op: str, begin: float, end: float | None, step: int = 3) -> Row:
    """A row of an operation; times are in milliseconds after START."""
    stage, kind, microbatch = re.fullmatch(r"(\d+)([FBIW])(\d+)", op).groups()
    return {
        "step": step,
        "worker": worker,
        "stage": int(stage),
        "op": kind,
        "microbatch": int(microbatch),
        "begin": START + begin * MS,
        "end": None if end is None else START + end * MS,
        "bytes": 64,
    }


def rows(ops: Ops) -> list[Row]:
    """Rows of a step that ran as simulated, with forwards of one millisecond; the last worker comes first."""
    spans = reversed(simulate(ops).spans)
    return [row(span.worker + 1, str(span.op), span.begin, span.end) for span in spans]


def picture(written: str) -> str:
    return dedent(written).strip("\n")


def test_a_step_matches_its_drawing() -> None:
    assert Timeline.of(rows(one_f_one_b(2, 3))).text(width=60) == picture("""
        step 3: 12.0 ms, bubble 25.0% (minimum 25.0%)
        worker1 │F0░░F1░░        B0▓▓▓▓▓▓F2░░B1▓▓▓▓▓▓    B2▓▓▓▓▓▓
        worker2 │    F0░░B0▓▓▓▓▓▓F1░░B1▓▓▓▓▓▓F2░░B2▓▓▓▓▓▓
                 0───────────────────5───────────────────10────── ms
        F0░ forward, B0▓ backward of micro-batch 0; blank: idle
    """)


def test_running_operations_are_drawn_up_to_now() -> None:
    running = [row(1, "0F0", 0, 4), row(1, "0F1", 4, None), row(2, "1F0", 6, None)]
    drawn = Timeline.of(running, now=START + 10 * MS, names={1: "alice"})
    assert drawn.text(width=52) == picture("""
        step 3: 10.0 ms, bubble 30.0% (minimum 25.0%)
          alice │F0░░░░░░░░░░░░░░F1░░░░░░░░░░░░░░░░░░░░░…
        worker2 │                        F0░░░░░░░░░░░░░…
                 0───────────────────5─────────────────── ms
        F0░ forward of micro-batch 0; blank: idle; … still running
    """)


def test_now_defaults_to_the_latest_time_in_the_rows() -> None:
    running = [row(1, "0F0", 0, 4), row(1, "0F1", 4, None), row(2, "1F0", 4, 5)]
    assert Timeline.of(running).seconds == pytest.approx(5 * MS)
    assert Timeline.of([row(1, "0F0", 7, None)], now=START).seconds == 0


def test_an_operation_that_has_just_begun_is_drawn() -> None:
    lines = Timeline.of([row(1, "0F0", 0, None)]).text(60).splitlines()
    assert lines[0] == "step 3: 0.0 ms, bubble 0.0% (minimum 0.0%)"
    assert lines[1] == "worker1 │…"


def test_operations_show_their_stage_if_a_worker_has_several() -> None:
    ops = parse_ops("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1")
    lanes = Timeline.of(rows(ops)).text(width=87).splitlines()[1:3]
    assert lanes == [
        "worker1 │0F0░░0F1░░2F0░░2F1░░               2B0▓▓▓▓▓▓▓2B1▓▓▓▓▓▓▓0B0▓▓▓▓▓▓▓0B1▓▓▓▓▓▓▓",
        "worker2 │     1F0░░1F1░░3F0░░3F1░░3B0▓▓▓▓▓▓▓3B1▓▓▓▓▓▓▓1B0▓▓▓▓▓▓▓1B1▓▓▓▓▓▓▓",
    ]


def test_operations_without_room_for_a_name_are_drawn_by_their_shade() -> None:
    lane = Timeline.of(rows(gpipe(1, 20))).text(width=72).splitlines()[1]
    assert lane == "worker1 │" + "░" * 20 + "".join(f"B{n}" if n < 10 else "▓▓" for n in range(20))


def test_an_operation_shorter_than_a_column_is_drawn() -> None:
    short = [row(1, "0F0", 0, 1), row(1, "0F1", 500, 501), row(1, "0B0", 999, 1000)]
    assert Timeline.of(short).text(60).splitlines()[1] == "worker1 │░" + " " * 23 + "░" + " " * 22 + "▓"


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("width", [40, 80, 100])
def test_the_drawing_keeps_its_width_and_shows_every_operation(width: int, workers: int) -> None:
    _, *lanes, axis, _ = Timeline.of(rows(one_f_one_b(workers, 8))).text(width).splitlines()
    assert len(lanes) == workers and len(axis) == width
    assert max(map(len, lanes)) <= width
    if width == 100:
        assert all(f"{kind}{n}" in lane for lane in lanes for kind in "FB" for n in range(8))


@pytest.mark.parametrize(("seconds", "second_tick"), [(1e-5, "0.002"), (0.05, "10"), (3.0, "500"), (700.0, "200000")])
def test_ticks_are_round_numbers_of_milliseconds(seconds: float, second_tick: str) -> None:
    axis = Timeline.of([row(1, "0F0", 0, seconds * 1e3)]).text(80).splitlines()[-2]
    assert axis.split("─")[0].strip() == "0"
    assert [part for part in axis.removesuffix(" ms").split("─") if part][1] == second_tick


@given(st.sampled_from([gpipe, one_f_one_b]), st.integers(1, 6), st.integers(1, 12))
def test_a_step_that_ran_as_simulated_has_the_ideal_idle_share(schedule, p: int, m: int) -> None:
    timeline = Timeline.of(rows(schedule(p, m)))
    assert timeline.idle == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.idle_ideal == pytest.approx((p - 1) / (m + p - 1))
    assert idle_share(rows(schedule(p, m))) == pytest.approx(timeline.idle)


def test_the_idle_share_is_measured_and_the_ideal_is_computed() -> None:
    slow = [row(1, "0F0", 0, 1), row(2, "1F0", 3, 4), row(2, "1B0", 4, 6), row(1, "0B0", 8, 10)]
    timeline = Timeline.of(slow)
    assert timeline.idle == pytest.approx(1 - 6 / 20)
    assert timeline.idle_ideal == pytest.approx(1 - 6 / 12)


def test_the_ideal_idle_share_is_none_while_rows_are_missing() -> None:
    early = [row(2, "1F0", 1, 2), row(2, "1B0", 2, 4)]
    assert Timeline.of(early).idle_ideal is None
    assert str(Timeline.of(early)).splitlines()[0] == "step 3: 3.0 ms, bubble 0.0%"
    assert repr(Timeline.of(early)) == str(Timeline.of(early))  # where a notebook cannot show the picture


def test_idle_share_ignores_running_operations() -> None:
    assert idle_share([row(1, "0F0", 0, 4), row(1, "0F1", 6, 8), row(2, "1F0", 4, None)]) == pytest.approx(1 - 6 / 8)
    assert idle_share([]) == 0


def test_the_timeline_shows_the_latest_step_by_default() -> None:
    both = [row(1, "0F0", 9, 10, step=0), row(1, "0F0", 0, 4, step=7)]
    assert Timeline.of(both).step == 0
    assert Timeline.of(both, step=7).seconds == pytest.approx(4 * MS)


def test_a_step_that_was_not_recorded_is_refused() -> None:
    with pytest.raises(LookupError, match="step 4 was not recorded"):
        Timeline.of([row(1, "0F0", 0, 1)], step=4)
    with pytest.raises(LookupError, match="no pipeline step was recorded"):
        Timeline.of([])


def blocks(svg: str) -> list[ElementTree.Element]:
    """Return the rectangles of operations."""
    found = [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("rect")]
    return [element for element in found if element.get("class") in ("f-blue", "f-amber", "f-purple", "f-green")]


def test_the_svg_has_a_block_for_each_operation_at_its_time() -> None:
    timeline = Timeline.of(rows(parse_ops("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1I1 1W0 1W1")), names={1: "<alice>"})
    found = blocks(timeline.svg())
    assert [element.get("class") for element in found] == [
        "f-blue", "f-blue", "f-amber", "f-amber", "f-blue", "f-amber", "f-blue", "f-amber", "f-purple", "f-purple"
    ]  # fmt: skip
    assert len({element.get("y") for element in found}) == 2
    per_ms = 660 / 7  # the last op, 0B1, ends 7 ms after the first begins
    at = [(float(element.get("x", "")) - 120) / per_ms for element in found[:4]]
    assert at == pytest.approx([0, 1, 3, 5], abs=0.01)
    words = [element.text for element in ElementTree.fromstring(timeline.svg()).iter() if element.tag.endswith("text")]
    assert {"<alice>", "worker2", "F0", "B1", "W1", timeline.text().splitlines()[0]} <= set(words)
    assert "F0" in timeline._repr_html_() and "<alice>" not in timeline._repr_html_()


def test_a_trace_has_the_times_and_bytes_of_each_operation(tmp_path: Path) -> None:
    made = rows(gpipe(2, 1))
    events = Timeline.of(made, names={1: "alice"}).trace()["traceEvents"]
    slices = {event["name"] + f"/{event['pid']}": event for event in events if event["ph"] == "X"}
    assert {name: (event["ts"], event["dur"]) for name, event in slices.items()} == {
        "F0/1": (0, 1000), "F0/2": (1000, 1000), "B0/2": (2000, 2000), "B0/1": (4000, 2000)
    }  # fmt: skip
    assert {event["args"]["bytes"] for event in slices.values()} == {64}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "alice", 2: "worker2"}
    saved = Timeline.of(made, names={1: "alice"}).save(tmp_path / "step.json")
    assert json.loads(saved.read_text())["traceEvents"] == events


def test_a_timeline_is_saved_in_the_format_of_the_file_suffix(tmp_path: Path) -> None:
    timeline = Timeline.of(rows(gpipe(2, 2)))
    assert timeline.save(tmp_path / "step.txt").read_text() == timeline.text()
    assert len(blocks(timeline.save(tmp_path / "step.svg").read_text())) == 8
    assert "<img" in timeline.save(tmp_path / "step.html").read_text()
    with pytest.raises(ValueError, match=r"step.png: .*\.svg, \.html, \.txt, \.json"):
        timeline.save(tmp_path / "step.png")
