"""The messages of a while: `with trace() as seen: ...`, and then `seen` has every message that any member sent in it.

Before the body begins all members listen; after it what follows from it (RRefs let go of, acknowledgements of forks) is
waited for, for a second at most, and then all that members have to tell. Which of several programs at work caused a
message nobody knows: all messages of the world are there.

A trace can be saved for Perfetto (ui.perfetto.dev) and chrome://tracing, all members on one clock. A member is a
process with these tracks: calls it has made and calls it has run, as far as their messages were traced (a cell on a
worker is such a call), its part of collectives, operations of pipelines, and messages out and in, each joined by an
arrow with its other end. Times begin with the first of all.

`CollectiveTimeline` draws what members did together, a lane for each. A bar goes from where the member entered a
collective to where it left, in two parts: it waits until the last one has come, and then all of them move data. The
part of the one that came last is marked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpcbench.base.charts import Bar, Chart, Mark, written
from rpcbench.base.conditions import Flag
from rpcbench.base.events import MESSAGES, Row, Table
from rpcbench.pipeline.timeline import TRACK, Event, in_microseconds, slice_of
from rpcbench.telemetry import collector as collect
from rpcbench.telemetry.collector import Collector
from rpcbench.telemetry.message_views import (
    SHARED,
    Clock,
    Straggler,
    began_since,
    collectives_view,
    messages_view,
    stragglers,
)
from rpcbench.telemetry.recording import save_text
from rpcbench.telemetry.summary import text
from rpcbench.telemetry.svg import Snapshot
from rpcbench.telemetry.views import View, World

OUT, IN = 1, 2
TRACKS = {OUT: "messages out", IN: "messages in", TRACK: "pipeline"}
SHORTEST = 1e-6
"""A message takes no time at either end; it is shown as long as this, in seconds."""
_ASKS, _ANSWERS = ("Call", "Create", "Fetch"), ("Result", "Failure")


def save(world: World, path: str | Path) -> Path:
    """Write the trace of a world into a file; its path."""
    return save_text(path, json.dumps(chrome(world)))


def chrome(world: World) -> dict[str, Any]:
    """The trace as what JSON can carry, in the format of Chrome's trace events."""
    view = messages_view(world)
    messages = view["messages"]
    events = [*_ops(world), *_calls(messages), *_messages(messages), *_collectives(view)]
    began = min((event["ts"] for event in events), default=0.0)
    for event in events:
        in_microseconds(event, began)
    left_out = {member["name"]: member["left_out"] for member in world.values() if member["left_out"]}
    return {"traceEvents": [*_names(world), *events], "displayTimeUnit": "ms", "otherData": {"left_out": left_out}}


def _names(world: World) -> Iterator[Event]:
    for id_, member in world.items():
        yield {"ph": "M", "name": "process_name", "pid": id_, "args": {"name": member["name"]}}
        for track, name in TRACKS.items():
            yield {"ph": "M", "name": "thread_name", "pid": id_, "tid": track, "args": {"name": name}}


def _ops(world: World) -> Iterator[Event]:
    """Operations that have ended."""
    for id_, member in world.items():
        ahead = Clock(*member.get("clock", SHARED)).ahead
        for row in member["tables"].get("ops", {}).values():
            if row["end"] is not None:
                yield slice_of(row, id_, ahead)


def _calls(messages: Table) -> Iterator[Event]:
    """Each call that was answered, as its caller and as its callee saw it; calls overlap, so they are no slices."""
    answers = {row["call"]: row for row in messages.values() if row["kind"] in _ANSWERS}
    for ask in messages.values():
        answer = answers.get(ask["call"])
        if ask["kind"] in _ASKS and answer is not None:
            yield from _span(ask, "calls made", ask["from"], ask["sent"], answer["received"])
            yield from _span(ask, "calls run", ask["to"], ask["received"], answer["sent"])


def _span(ask: Row, kind: str, member: int, begin: float | None, end: float | None) -> Iterator[Event]:
    if begin is None or end is None:
        return
    about = {"name": ask["label"] or ask["kind"], "cat": kind, "pid": member, "tid": 0, "id": f"{kind} {ask['call']}"}
    yield {"ph": "b", **about, "ts": begin, "args": {"call": ask["call"], "rrefs": ask["rrefs"]}}
    yield {"ph": "e", **about, "ts": max(begin, end)}


def _collectives(view: View) -> Iterator[Event]:
    """A member's part of each, and in it how long it waited for the last one; they may overlap as calls do."""
    for key, entry in view["entries"].items():
        row, end = view["collectives"][entry["collective"]], entry["end"]
        if end is None:
            continue
        at = {"cat": "collectives", "pid": entry["worker"], "tid": 0, "id": f"collective {key}"}
        args = {field: row[field] for field in ("group", "number", "shape", "bytes", "members", "state")}
        yield {"ph": "b", "name": row["op"], **at, "ts": entry["begin"], "args": args}
        if entry["waited"]:
            waits = {"name": f"waits for {view['workers'][str(row['last'])]['name']}", **at}
            yield {"ph": "b", **waits, "ts": entry["begin"]}
            yield {"ph": "e", **waits, "ts": min(end, entry["begin"] + entry["waited"])}
        yield {"ph": "e", "name": row["op"], **at, "ts": end}


def _messages(messages: Table) -> Iterator[Event]:
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
"""So many who came last, and so many collectives that are under way, are put into words."""


class CollectiveTimeline:
    """Made by `rpcbench.collectives()`, and `trace().collectives`. In a notebook: its picture; printed: text.

    `rows`: the collectives by key, as in `rpcbench.telemetry.message_views.collectives_view`.
    """

    def __init__(self, view: View, now: float | None = None) -> None:
        self.rows: Table = view["collectives"]
        self._entries = list(view["entries"].values())
        stamps = [stamp for row in self._entries for stamp in (row["begin"], row["end"]) if stamp is not None]
        self._now = max(stamps, default=0.0) if now is None else now
        self._names = {int(worker["id"]): str(worker["name"]) for worker in view["workers"].values()}

    @staticmethod
    def of(world: World, last: int | None = None, now: float | None = None) -> CollectiveTimeline:
        """Of a collector's world, or a player's: of the latest so many.

        `now`, in seconds of our clock, is where ends what is under way: by default the latest stamp there is.
        """
        view = collectives_view(world)
        keys = list(view["collectives"])[-last if last else 0 :]
        rows = {key: view["collectives"][key] for key in keys}
        entries = {key: row for key, row in view["entries"].items() if row["collective"] in rows}
        return CollectiveTimeline({**view, "collectives": rows, "entries": entries}, now)

    @property
    def stragglers(self) -> list[Straggler]:
        """Who came last in how many, and how long the first had waited by then, all in all; who cost most first."""
        return stragglers(self.rows.values())

    @property
    def seconds(self) -> float:
        """From where the first one entered to where the last one left, as far as that is known."""
        times = list(self._times())
        return max(times) - min(times) if times else 0.0

    def text(self, width: int = 100) -> str:
        """Drawn at most `width` columns wide (20 columns of time at least), a line for each member."""
        return self.chart.text(width) if self.rows else self.summary

    def svg(self) -> str:
        """A picture of its own."""
        return self.chart.svg()

    def html(self) -> str:
        """The picture inside a page, with its words for who sees none."""
        return self.chart.html()

    def save(self, path: str | Path) -> Path:
        """Write it into a file, as its ending says: .svg, .html or .txt; its path. ValueError for others."""
        return written(path, {".svg": self.svg, ".html": self.html, ".txt": self.text}, "a timeline")

    @property
    def summary(self) -> str:
        """In words: how many, who kept the others waiting, and who is missing where one is under way."""
        count = f"{len(self.rows)} collective{'' if len(self.rows) == 1 else 's'}"
        lines = [f"{count} in {self.seconds * 1e3:.1f} ms" if self.rows else "no collective was seen"]
        whole = sum(row["last"] is not None for row in self.rows.values())
        for one in self.stragglers[:_NAMED]:
            waited = f"{one.seconds:.1f} s" if one.seconds >= 1 else f"{one.seconds * 1e3:.1f} ms"
            lines.append(f"{self._names[one.worker]} kept the others waiting {waited} in {one.collectives} of {whole}")
        return "\n".join([*lines, *self._unfinished()])

    def _unfinished(self) -> Iterator[str]:
        for row in [row for row in self.rows.values() if row["state"] == "open"][-_NAMED:]:
            gone = f"; {', '.join(row['missing'])} not there yet" if row["missing"] else ""
            yield f"{named(row)} is under way{gone}"

    @property
    def chart(self) -> Chart:
        came = {row["worker"] for row in self._entries}
        meant = {name for row in self.rows.values() for name in row["members"]}
        names = {id_: name for id_, name in self._names.items() if id_ in came or name in meant}
        bars = tuple(sorted(self._bars(), key=lambda bar: (bar.mark is LAST, bar.begin)))
        marks = tuple(mark for mark in _MARKS if any(bar.mark is mark for bar in bars))
        return Chart(bars, names, "Collectives", self.summary, marks, _LEGEND, " ms", 1e3)

    def _bars(self) -> Iterator[Bar]:
        for entry in self._entries:
            row, lane, end = self.rows[entry["collective"]], entry["worker"], entry["end"]
            runs, until = end is None, max(self._now, entry["begin"]) if end is None else end
            came = entry["begin"] + (entry["waited"] or 0.0)
            if entry["waited"]:
                last = f"waits for {self._names[row['last']]}"
                yield Bar(lane, entry["begin"], min(came, until), WAITS, (last, "waits"))
            labels = (f"{row['op']} #{row['number']}", row["op"].partition("(")[0])
            yield Bar(lane, min(came, until), until, _mark(row, entry), labels, runs)

    def _times(self) -> Iterator[float]:
        for entry in self._entries:
            yield entry["begin"]
            yield self._now if entry["end"] is None else entry["end"]

    def _repr_html_(self) -> str:
        return self.html()

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def _mark(row: Row, entry: Row) -> Mark:
    """Of the part after all have come, or of all of it where that is not known."""
    if entry["failed"]:
        return FAILED
    if row["last"] == entry["worker"]:
        return LAST
    return WAITS if entry["waited"] is None and entry["end"] is None else MOVES


def named(row: Row) -> str:
    """A collective in words: `all_reduce(SUM) #3 of world`."""
    return f"{row['op']} #{row['number']} of {row['group']}"


def collectives(last: int = 50) -> CollectiveTimeline:
    """The latest collectives of the current world, those under way among them: who waited for whom.

    Each worker keeps its latest thousand, whether anybody looks or not. RuntimeError where RPC is not initialized.
    """
    collector = collect.current_collector()
    stop = collector.subscribe(lambda: None)
    try:
        collector.settle()
        return CollectiveTimeline.of(collector.world(), last, time.monotonic())
    finally:
        stop()


QUIET_SECONDS = 0.06
"""Without a message for so long all is quiet: words that nobody waits for go out after a third of that."""
AFTERMATH_SECONDS = 1.0


class Trace:
    """What was seen: `world` as panels take it, with the messages of that while alone; empty until it is over.

    `complete`: all members have told all they had to tell; one that is stopped, say, does not.
    `print(seen)` lists them, `seen.collectives` is a picture of collectives; `seen.save("trace.json")` is for Perfetto.
    """

    def __init__(self) -> None:
        self.world: World = {}
        self.complete = False

    @property
    def view(self) -> View:
        return messages_view(self.world)

    @property
    def collectives(self) -> CollectiveTimeline:
        """What members did together meanwhile, and who came last."""
        return CollectiveTimeline.of(self.world)

    def snapshot(self) -> Snapshot:
        """A picture of the messages, and text."""
        return Snapshot(self.view)

    def save(self, path: str | Path) -> Path:
        """Write it as a trace for Perfetto and chrome://tracing."""
        return save(self.world, path)

    def __str__(self) -> str:
        return text(self.view)


@contextmanager
def trace(collector: Collector | None = None) -> Iterator[Trace]:
    """Trace the messages of the current world while the body runs. RuntimeError where RPC is not initialized."""
    collector = collector or collect.current_collector()
    seen = Trace()
    stop = collector.subscribe(lambda: None, MESSAGES)
    try:
        listens = collector.settle()
        before, began = collector.world(), time.monotonic()
        try:
            yield seen
        finally:
            seen.complete = _await_quiet(collector) and listens
            seen.world = _since(collector.world(), before, began)
    finally:
        stop()


def _await_quiet(collector: Collector) -> bool:
    """Until nothing follows any more, or the time for that is over; False where not all members tell."""
    deadline, told, nothing = time.monotonic() + AFTERMATH_SECONDS, -1, Flag()
    while collector.settle():
        told, before = _told(collector.world()), told
        if told == before or time.monotonic() > deadline:
            return True
        nothing.wait(QUIET_SECONDS)
    return False


def _told(world: World) -> int:
    """How much has been told of messages: it grows with each."""
    rows = [row for member in world.values() for row in member["tables"].get("messages", {}).values()]
    gone = sum(int(member["missed"]) + 2 * int(member["trimmed"]) for member in world.values())
    return gone + sum(int(row["tries"]) + (row["received"] is not None) for row in rows)


def _since(world: World, before: World, began: float) -> World:
    """The world with the messages from then on, and only what was left out since."""
    return {id_: _later(member, before.get(id_, {}), began) for id_, member in world.items()}


def _later(member: dict[str, Any], before: dict[str, Any], began: float) -> dict[str, Any]:
    member = began_since(member, began)
    began += Clock(*member["clock"]).ahead
    tables: dict[str, Table] = dict(member["tables"])
    rows = tables.get("messages", {})
    tables["messages"] = {key: row for key, row in rows.items() if _first(row) >= began}
    counts = {name: max(0, member[name] - before.get(name, 0)) for name in ("left_out", "missed", "trimmed")}
    if len(tables["messages"]) < len(rows):  # what is older is there still, so nothing of the body was trimmed
        counts["trimmed"] = 0
    return {**member, **counts, "tables": tables}


def _first(row: dict[str, Any]) -> float:
    return min(float(row[name]) for name in ("sent", "received", "lost") if row[name] is not None)
