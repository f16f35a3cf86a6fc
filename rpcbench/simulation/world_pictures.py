"""Pictures of a simulated step: its timeline by cause, its memory by category, and a file for Perfetto.

Guarantees
- The timeline has a lane for each stream, and one for each group's collectives, of one role. Neighbouring operators of
  one block of the model are one bar, coloured by phase, so that a step of thousands of operators can be read.
- The memory picture has the peak of each of its columns, so no peak is left out.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rpcbench.base.charts import Bar, Chart, Mark, Picture, write_picture
from rpcbench.pipeline.timeline import TraceEvent, convert_to_microseconds, metadata_events
from rpcbench.simulation.rank_log import BACKWARD, CATEGORIES, FORWARD, OPTIMIZER, RECOMPUTE, RankLog
from rpcbench.simulation.step_timing import RankTimeline, TimedSpan, is_exposed

_PHASES = {
    FORWARD: Mark("░", "blue", "on-blue", "forward"),
    BACKWARD: Mark("▓", "amber", "on-amber", "backward"),
    RECOMPUTE: Mark("▞", "green", "paper", "recomputed forward"),
    OPTIMIZER: Mark("▚", "purple", "paper", "optimizer"),
}
_COLLECTIVE = Mark("◇", "orange", "paper", "collective")
TIMELINE_MARKS = (*_PHASES.values(), _COLLECTIVE)
"""The kinds of bars of a timeline."""
_COLOURS = dict(zip(CATEGORIES, ("blue", "purple", "indigo", "amber", "green", "dim"), strict=True))
_LETTERS = 92  # of a line below a timeline
_GAP = 0.001  # share of the step: shorter idle times do not divide a bar
_COLUMNS, _WIDE, _TALL, _LEFT, _TOP = 220, 660, 150, 120, 30  # of the memory picture; pixels but for the columns
_GIB = 2**30


def timeline_chart(timeline: RankTimeline, head: str) -> Chart:
    """Return the chart of one rank's step; times in milliseconds."""
    names = sorted({span.lane for span in timeline.spans}, key=lambda name: (name != "compute", name))
    bars = [bar for lane, name in enumerate(names) for bar in _merge_spans(timeline, lane, name)]
    marks = tuple(mark for mark in TIMELINE_MARKS if any(bar.mark is mark for bar in bars))
    legend = ", ".join(f"{mark.fill} {mark.name}" for mark in marks) + "; blank: idle"
    causes = sorted(timeline.causes.items(), key=lambda each: -each[1])
    shown = [each for each in causes if each[1] >= timeline.seconds * _GAP]
    title = ", ".join(f"{cause} {seconds / timeline.seconds:.1%}" for cause, seconds in shown)
    lines = textwrap.fill(title, _LETTERS)
    return Chart(tuple(bars), dict(enumerate(names)), head, lines, marks, legend, " ms", 1e3)


def _merge_spans(timeline: RankTimeline, lane: int, name: str) -> Iterator[Bar]:
    """Yield the bars of a lane: spans of one block that follow each other are one bar."""
    gap = timeline.seconds * _GAP
    spans = sorted((span for span in timeline.spans if span.lane == name), key=lambda span: span.begin)
    group: list[TimedSpan] = []
    for span in spans:
        if group and (_block_of(span) != _block_of(group[0]) or span.begin - group[-1].end > gap):
            yield _make_bar(lane, group)
            group = []
        group.append(span)
    if group:
        yield _make_bar(lane, group)


def _block_of(span: TimedSpan) -> tuple[str, str, bool]:
    """Return the key that the spans of a bar share: `layers.3`, the phase, and whether it is a collective."""
    path = span.part.module.split(".")
    numbered = [n for n, each in enumerate(path) if each.isdigit()]
    block = ".".join(path[: numbered[0] + 1] if numbered else path[:1])
    return block, span.part.phase, is_exposed(span.cause)


def _make_bar(lane: int, spans: Sequence[TimedSpan]) -> Bar:
    block, phase, is_collective = _block_of(spans[0])
    words = f"{spans[0].name} {block}".strip() if is_collective else block
    short = block.rpartition(".")[2]
    return Bar(
        lane, spans[0].begin, spans[-1].end, _COLLECTIVE if is_collective else _PHASES[phase], (words, block, short)
    )  # fmt: skip


# -- memory
def memory_picture(log: RankLog, limit: float) -> str:
    """Return an SVG: the memory of one rank's step by category, over its actions; `limit`: bytes of the hardware."""
    columns = memory_columns(log, _COLUMNS)
    peak = log.peak_memory()
    at = f"{peak.part.phase} of {peak.part.module or 'the model'}"
    words = f"Memory of rank {log.rank}: {peak.bytes / _GIB:.2f} GiB at most, in {at}"
    picture = Picture(_LEFT + _WIDE + 20, words, words)
    picture.draw_text(12, 18, words, "strong")
    top = max(peak.bytes, 1)
    for n, amounts in enumerate(columns):
        y = float(_TOP + _TALL)
        for category in CATEGORIES:
            height = amounts[category] / top * _TALL
            y -= height
            x = _LEFT + n * _WIDE / len(columns)
            picture.draw_rect(x, y, _WIDE / len(columns) + 0.3, height, f"f-{_COLOURS[category]}", 0)
    picture.draw_text(_LEFT - 8, _TOP + 10, f"{top / _GIB:.2f} GiB", "note end")
    picture.draw_text(_LEFT - 8, _TOP + _TALL, "0", "note end")
    share = f"{peak.bytes / limit:.0%} of the hardware's {limit / _GIB:.1f} GiB; left to right: the order of the step"
    picture.draw_text(_LEFT, _TOP + _TALL + 18, share, "note")
    for n, category in enumerate(CATEGORIES):
        x, y = _LEFT + n % 3 * 220, _TOP + _TALL + 38 + n // 3 * 18
        picture.draw_circle(x + 5, y - 4, 5, f"f-{_COLOURS[category]}")
        picture.draw_text(x + 15, y, f"{category}, {peak.by_category[category] / _GIB:.2f} GiB then", "note")
    return picture.svg()


def memory_columns(log: RankLog, count: int) -> list[dict[str, int]]:
    """Return the bytes by category at the peak of each of `count` equal parts of the changes."""
    now = dict.fromkeys(CATEGORIES, 0) | log.before
    columns = [dict(now)]
    size = max(1, -(-len(log.memory) // count))
    for n, change in enumerate(log.memory):
        if n % size == 0:
            columns.append(dict(now))
        now[change.category] += change.bytes
        if sum(now.values()) > sum(columns[-1].values()):
            columns[-1] = dict(now)
    return columns


# -- files
def save_timelines(timelines: Iterable[tuple[str, RankTimeline]], path: str | Path) -> Path:
    """Write all roles' spans as a trace for ui.perfetto.dev, a `.json` file; return its path."""
    events: list[TraceEvent] = []
    for process, (role, timeline) in enumerate(timelines):
        lanes = {name: track for track, name in enumerate(dict.fromkeys(span.lane for span in timeline.spans))}
        events += metadata_events(process, role, {track: name for name, track in lanes.items()})
        for span in timeline.spans:
            args = {"module": span.part.module, "phase": span.part.phase, "cause": span.cause}
            at = {"pid": process, "tid": lanes[span.lane], "ts": span.begin, "dur": span.end - span.begin}
            event: TraceEvent = {"ph": "X", "name": span.name, "cat": span.cause, **at, "args": args}
            convert_to_microseconds(event)
            events.append(event)
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    return write_picture(path, {".json": lambda: json.dumps(trace)}, "a timeline")
