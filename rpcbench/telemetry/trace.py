"""Traces of messages (`with trace() as seen:`), their export for Perfetto, and timelines of collectives.

A trace has every message that any member sends during the block, and for up to a second the messages that follow from
it (released RRefs, acknowledgements of forks). It has all messages of the world: the cause of a message is not known.

The export for Perfetto (ui.perfetto.dev) and chrome://tracing has all members on one clock, which begins at the first
event. A member is a process with these tracks: calls made and calls run, as far as their messages were traced (a cell
on a worker is such a call), its part of collectives, pipeline operations, and messages out and in, joined by arrows.

`CollectiveTimeline` draws a lane for each member. A bar, from entry to exit, has two parts: the member waits until the
last one has entered, and then all move data. The bar of the last one is marked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpcbench.base.charts import Bar, Chart, Mark, write_picture
from rpcbench.base.conditions import Event
from rpcbench.base.errors import count_noun
from rpcbench.base.ids import MESSAGES, Row, Table
from rpcbench.distributed.flight_dumps import FlightDump, collective_tables, describe_gaps, read_dumps
from rpcbench.pipeline.timeline import TRACK, TraceEvent, convert_to_microseconds, metadata_events, trace_slice
from rpcbench.telemetry import collector as collect
from rpcbench.telemetry.collector import Collector
from rpcbench.telemetry.message_views import (
    Straggler,
    clock_of,
    collectives_view,
    drop_earlier_collectives,
    find_stragglers,
    messages_view,
)
from rpcbench.telemetry.recording import make_rank_world, save_text
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.svg import Snapshot
from rpcbench.telemetry.views import View, World

OUT, IN = 1, 2  # ids of tracks in the file
TRACKS = {OUT: "messages out", IN: "messages in", TRACK: "pipeline"}
SHORTEST = 1e-6
"""Seconds that a message, which takes no time at either end, is drawn."""
_ASKS, _ANSWERS = ("Call", "Create", "Fetch"), ("Result", "Failure")


def save_trace(world: World, path: str | Path) -> Path:
    """Write the trace of a world to a file, and return its path."""
    return save_text(path, json.dumps(chrome_trace(world)))


def chrome_trace(
    world: World, more: Iterable[TraceEvent] = (), tracks: Mapping[int, Mapping[int, str]] | None = None
) -> dict[str, Any]:
    """Return the trace as data for JSON, in Chrome's trace event format.

    Args:
        world: The tables of all members.
        more: Other events of members, with times in seconds of our clock.
        tracks: The names of their tracks, by member and id of the track.
    """
    view = messages_view(world)
    messages = view["messages"]
    events = [
        *_operation_events(world),
        *_call_events(messages),
        *_message_events(messages),
        *_collective_events(view),
        *more,
    ]
    began = min((event["ts"] for event in events), default=0.0)
    for event in events:
        convert_to_microseconds(event, began)
    left_out = {member["name"]: member["left_out"] for member in world.values() if member["left_out"]}
    track_names = {id_: {**TRACKS, **(tracks or {}).get(id_, {})} for id_ in world}
    names = [head for id_, member in world.items() for head in metadata_events(id_, member["name"], track_names[id_])]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": {"left_out": left_out}}


def _operation_events(world: World) -> Iterator[TraceEvent]:
    """Yield the operations that have ended."""
    for id_, member in world.items():
        ahead = clock_of(member).ahead
        for row in member["tables"].get("ops", {}).values():
            if row["end"] is not None:
                yield trace_slice(row, id_, ahead)


def _call_events(messages: Table) -> Iterator[TraceEvent]:
    """Yield each answered call as recorded by its caller and by its callee."""
    # Asynchronous events ("b", "e"), as calls overlap: slices ("X") of one track must be nested.
    answers = {row["call"]: row for row in messages.values() if row["kind"] in _ANSWERS}
    for request in messages.values():
        answer = answers.get(request["call"])
        if request["kind"] in _ASKS and answer is not None:
            yield from _span_events(request, "calls made", request["from"], request["sent"], answer["received"])
            yield from _span_events(request, "calls run", request["to"], request["received"], answer["sent"])


def _span_events(request: Row, kind: str, member: int, begin: float | None, end: float | None) -> Iterator[TraceEvent]:
    if begin is None or end is None:
        return
    about = {
        "name": request["label"] or request["kind"],
        "cat": kind,
        "pid": member,
        "tid": 0,
        "id": f"{kind} {request['call']}",
    }
    yield {"ph": "b", **about, "ts": begin, "args": {"call": request["call"], "rrefs": request["rrefs"]}}
    yield {"ph": "e", **about, "ts": max(begin, end)}  # estimates of clocks can put the end before the beginning


def _collective_events(view: View) -> Iterator[TraceEvent]:
    """Yield each member's part of collectives, with its wait for the last one; they may overlap as calls do."""
    for key, entry in view["entries"].items():
        row, end = view["collectives"][entry["collective"]], entry["end"]
        if end is None:
            continue
        at = {"cat": "collectives", "pid": entry["worker"], "tid": 0, "id": f"collective {key}"}
        args = {field: row[field] for field in ("group", "number", "shape", "bytes", "members", "state", "site")}
        yield {"ph": "b", "name": row["op"], **at, "ts": entry["begin"], "args": args}
        if entry["waited"]:
            waits = {"name": f"waits for {view['workers'][str(row['last'])]['name']}", **at}
            yield {"ph": "b", **waits, "ts": entry["begin"]}
            yield {"ph": "e", **waits, "ts": min(end, entry["begin"] + entry["waited"])}
        yield {"ph": "e", "name": row["op"], **at, "ts": end}


def _message_events(messages: Table) -> Iterator[TraceEvent]:
    for key, row in messages.items():
        name = f"{row['kind']} {row['label']}".rstrip()
        args = {field: row[field] for field in ("call", "rrefs", "context", "bytes", "state", "tries")}
        ends = ((row["sent"], row["from"], OUT), (row["received"], row["to"], IN))
        for when, member, track in ends:
            if when is not None:
                at = {"pid": member, "tid": track, "ts": when, "dur": SHORTEST}
                yield {"ph": "X", "name": name, "cat": "message", **at, "args": args}
        if row["sent"] is not None and row["received"] is not None:
            for phase, (when, member, track) in zip(("s", "f"), ends, strict=True):
                at = {"pid": member, "tid": track, "ts": when}
                yield {"ph": phase, "bp": "e", "name": "message", "cat": "message", "id": key, **at}


WAITS = Mark("·", "amber", "on-amber", "waits for the last one")
MOVES = Mark("▓", "blue", "on-blue", "all have come")
LAST = Mark("█", "red", "paper", "came last")
FAILED = Mark("!", "dim", "paper", "failed")
_MARKS = (WAITS, MOVES, LAST, FAILED)
_LEGEND = ", ".join(f"{mark.fill} {mark.name}" for mark in _MARKS)
_NAMED = 3
"""Stragglers, and running collectives, that a summary names at most."""


class CollectiveTimeline:
    """A timeline of collectives, from `rpcbench.collectives()` or `trace().collectives`: a picture, or text if printed.

    `rows`: the collectives by key, as in `rpcbench.telemetry.message_views.collectives_view`. `names`: of the members,
    by id. `world`: the tables that they come from, which `rpcbench.panel("messages", timeline)` shows; None where they
    were read from a view.
    """

    def __init__(self, view: View, now: float | None = None, world: World | None = None) -> None:
        self.rows: Table = view["collectives"]
        self.world = world
        self._entries = list(view["entries"].values())
        stamps = [stamp for row in self._entries for stamp in (row["begin"], row["end"]) if stamp is not None]
        self._now = max(stamps, default=0.0) if now is None else now  # where bars of running collectives end
        self.names = {int(worker["id"]): str(worker["name"]) for worker in view["workers"].values()}

    @staticmethod
    def from_world(world: World, last: int | None = None, now: float | None = None) -> CollectiveTimeline:
        """Return the timeline of a collector's or a player's world.

        Args:
            world: The tables of all workers.
            last: Number of the latest collectives; by default all.
            now: End of running collectives in seconds of our clock; by default the latest time stamp.
        """
        view = collectives_view(world)
        keys = list(view["collectives"])[-last if last else 0 :]
        rows = {key: view["collectives"][key] for key in keys}
        entries = {key: row for key, row in view["entries"].items() if row["collective"] in rows}
        return CollectiveTimeline({**view, "collectives": rows, "entries": entries}, now, world)

    @property
    def stragglers(self) -> list[Straggler]:
        """The members that came last, with counts and the sums of the waits that they caused, largest first."""
        return find_stragglers(self.rows.values())

    @property
    def seconds(self) -> float:
        """Seconds from the first entry to the last known exit."""
        times = [entry["begin"] for entry in self._entries]
        times += [self._now if entry["end"] is None else entry["end"] for entry in self._entries]
        return max(times) - min(times) if times else 0.0

    def text(self, width: int = 100) -> str:
        """Return a drawing in text, a line for each member, at most `width` columns wide (at least 20 for the time)."""
        return self.chart.text(width) if self.rows else self.summary

    def svg(self) -> str:
        """Return the picture as SVG."""
        return self.chart.svg()

    def html(self) -> str:
        """Return the picture as HTML, with the summary as its alternative text."""
        return self.chart.html()

    def save(self, path: str | Path) -> Path:
        """Write it to a file that ends in .svg, .html or .txt, and return its path. Raises ValueError for others."""
        return write_picture(path, {".svg": self.svg, ".html": self.html, ".txt": self.text}, "a timeline")

    @property
    def summary(self) -> str:
        """Text: the number of collectives, those under way with the members missing, those that kept others waiting."""
        count = count_noun(len(self.rows), "collective")
        lines = [f"{count} in {self.seconds * 1e3:.1f} ms" if self.rows else "no collective was recorded"]
        lines += self.describe_unfinished()
        whole = sum(row["last"] is not None for row in self.rows.values())
        hangs = any(row["state"] == "open" and row["missing"] for row in self.rows.values())
        when = "before that, " if hangs else ""  # perhaps in an earlier job: it says nothing of the one that is missing
        for one in self.stragglers[:_NAMED]:
            waited = f"{one.seconds:.1f} s" if one.seconds >= 1 else f"{one.seconds * 1e3:.1f} ms"
            lines.append(
                f"{when}{self.names[one.worker]} kept the others waiting {waited} in {one.collectives} of {whole}"
            )
        if unknown := sum(not row["end_known"] for row in self.rows.values()):
            lines.append(f"{unknown} of {len(self.rows)} have no known end: nobody watched, or the recorder keeps none")
        return "\n".join(lines)

    def describe_unfinished(self) -> Iterator[str]:
        for row in [row for row in self.rows.values() if row["state"] == "open"][-_NAMED:]:
            gone = f"; {', '.join(row['missing'])} not there yet" if row["missing"] else ""
            site = f" ({row['site']})" if row["site"] else ""
            yield f"{collective_name(row)}{site} is under way{gone}"
            yield from (f"    {sentence}" for sentence in row["elsewhere"])

    @property
    def chart(self) -> Chart:
        entered_workers = {row["worker"] for row in self._entries}
        meant = {name for row in self.rows.values() for name in row["members"]}
        names = {id_: name for id_, name in self.names.items() if id_ in entered_workers or name in meant}
        # Bars of the last member are drawn last, so that no other bar hides them.
        bars = tuple(sorted(self._make_bars(), key=lambda bar: (bar.mark is LAST, bar.begin)))
        marks = tuple(mark for mark in _MARKS if any(bar.mark is mark for bar in bars))
        return Chart(bars, names, "Collectives", self.summary, marks, _LEGEND, " ms", 1e3)

    def _make_bars(self) -> Iterator[Bar]:
        for entry in self._entries:
            row, worker, end = self.rows[entry["collective"]], entry["worker"], entry["end"]
            runs, until = end is None, max(self._now, entry["begin"]) if end is None else end
            last_entry = entry["begin"] + (entry["waited"] or 0.0)
            if entry["waited"]:
                last = f"waits for {self.names[row['last']]}"
                yield Bar(worker, entry["begin"], min(last_entry, until), WAITS, (last, "waits"))
            labels = (f"{row['op']} #{row['number']}", row["op"].partition("(")[0])
            yield Bar(worker, min(last_entry, until), until, _mark_of_part(row, entry), labels, runs)

    def _repr_html_(self) -> str:
        return self.html()

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def _mark_of_part(row: Row, entry: Row) -> Mark:
    """Return the mark of the part after all have entered, or of the whole bar where that time is unknown."""
    if entry["failed"]:
        return FAILED
    if row["last"] == entry["worker"]:
        return LAST
    return WAITS if entry["waited"] is None and entry["end"] is None else MOVES


def collective_name(row: Row) -> str:
    """Return a collective's name: `all_reduce(SUM) #3 of world`."""
    return f"{row['op']} #{row['number']} of {row['group']}"


def collectives(last: int = 50) -> CollectiveTimeline:
    """Return a timeline of the latest collectives of the current world, including running ones.

    Each worker keeps its latest thousand, observed or not. Raises RuntimeError where RPC is not initialized.
    """
    collector = collect.current_collector()
    stop = collector.subscribe(lambda: None)
    try:
        collector.settle()
        return CollectiveTimeline.from_world(collector.world(), last, time.monotonic())
    finally:
        stop()


def dumped_world(dumps: Sequence[FlightDump], size: int) -> World:
    """Return the ranks of a job as members with the collectives in their flight recorders, and remarks on gaps."""
    tables = collective_tables(dumps)
    ranks = {rank: {"collectives": tables.get(rank, {})} for rank in range(size)}
    return make_rank_world(ranks, describe_gaps(dumps))


def open_dumps(files: str | Path | Sequence[str | Path], last: int | None = None) -> CollectiveTimeline:
    """Return the timeline of collectives in dumps of torch's flight recorder: `rpcbench.collectives.open`.

    Args:
        files: A pattern, as `nccl_trace_rank_*`, a folder, one file, or several: one for each rank, pickle or JSON.
        last: Number of the latest collectives; by default all.

    Returns:
        The timeline, with the ranks that came last, and those that are missing in collectives that have not ended.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file is no dump, is cut off, holds more than data, or two are of one rank.
    """
    dumps = read_dumps(files)
    return CollectiveTimeline.from_world(dumped_world(dumps, 1 + max(dump.rank for dump in dumps)), last)


collectives.open = open_dumps  # type: ignore[attr-defined]


QUIET_SECONDS = 0.06
"""Seconds without a message after which a trace ends: messages that are not urgent are sent within a third of that."""
AFTERMATH_SECONDS = 1.0  # that a trace lasts at most after its block


class Trace:
    """The messages of a block: `print(seen)` lists them, `seen.save("trace.json")` writes them for Perfetto.

    `world`: the tables of the block, as panels read them; empty until it has ended. `complete`: whether all members
    have reported all of it; a stopped one, for example, does not. `collectives`: a picture of collectives.
    """

    def __init__(self) -> None:
        self.world: World = {}
        self.complete = False

    @property
    def view(self) -> View:
        return messages_view(self.world)

    @property
    def collectives(self) -> CollectiveTimeline:
        """The timeline of the collectives of the block."""
        return CollectiveTimeline.from_world(self.world)

    def snapshot(self) -> Snapshot:
        """Return a picture of the messages, with text."""
        return Snapshot(self.view)

    def save(self, path: str | Path) -> Path:
        """Write it as a trace for Perfetto and chrome://tracing, and return its path."""
        return save_trace(self.world, path)

    def __str__(self) -> str:
        return summarize_view(self.view)


@contextmanager
def trace(collector: Collector | None = None) -> Iterator[Trace]:
    """Trace the messages of the current world in a block. Raises RuntimeError where RPC is not initialized."""
    collector = collector or collect.current_collector()
    seen = Trace()
    stop = collector.subscribe(lambda: None, MESSAGES)
    try:
        listens = collector.settle()  # all members record messages before the block begins
        before, began = collector.world(), time.monotonic()
        try:
            yield seen
        finally:
            seen.complete = _await_quiet(collector) and listens
            seen.world = _world_since(collector.world(), before, began)
    finally:
        stop()


def _await_quiet(collector: Collector) -> bool:
    """Wait until no more messages follow, or `AFTERMATH_SECONDS` have passed; False if a member does not report."""
    deadline, report_count, nothing = time.monotonic() + AFTERMATH_SECONDS, -1, Event()
    while collector.settle():
        report_count, before = _count_reports(collector.world()), report_count
        if report_count == before or time.monotonic() > deadline:
            return True
        nothing.wait(QUIET_SECONDS)
    return False


def _count_reports(world: World) -> int:
    """Return a number that grows with each report of a message."""
    rows = [row for member in world.values() for row in member["tables"].get("messages", {}).values()]
    # A trimmed row takes its two reports with it: without them the sum could stay the same while messages arrive.
    gone = sum(int(member["missed"]) + 2 * int(member["trimmed"]) for member in world.values())
    return gone + sum(int(row["tries"]) + (row["received"] is not None) for row in rows)


def _world_since(world: World, before: World, began: float) -> World:
    """Return the world with the messages since `began`, and counts of those left out since `before`."""
    return {id_: _member_since(member, before.get(id_, {}), began) for id_, member in world.items()}


def _member_since(member: dict[str, Any], before: dict[str, Any], began: float) -> dict[str, Any]:
    member = drop_earlier_collectives(member, began)
    began += clock_of(member).ahead
    tables: dict[str, Table] = dict(member["tables"])
    rows = tables.get("messages", {})
    tables["messages"] = {key: row for key, row in rows.items() if _first_time(row) >= began}
    names = ("left_out", "missed", "trimmed", "counted")
    counts = {name: max(0, member.get(name, 0) - before.get(name, 0)) for name in names}
    if len(tables["messages"]) < len(rows):  # older rows are still there, so no row of the block was trimmed
        counts["trimmed"] = 0
    return {**member, **counts, "tables": tables}


def _first_time(row: dict[str, Any]) -> float:
    return min(float(row[name]) for name in ("sent", "received", "lost") if row[name] is not None)
