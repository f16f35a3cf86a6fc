"""What members did together, over time: who waited for whom, and for how long; as text and picture.

A lane for each member. A bar from where it entered a collective to where it left, in two parts: it waits until the last
one has come, and then all of them move data. The part of the one that came last is marked. Times are on our clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rpcbench.base.charts import Bar, Chart, Mark, written
from rpcbench.base.events import Row, Table
from rpcbench.telemetry import collect
from rpcbench.telemetry.collectives import Straggler, collectives_view, stragglers
from rpcbench.telemetry.views import View, World

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

    `rows`: the collectives by key, as in `rpcbench.telemetry.collectives.collectives_view`.
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
    collector = collect.current()
    stop = collector.subscribe(lambda: None)
    try:
        collector.settle()
        return CollectiveTimeline.of(collector.world(), last, time.monotonic())
    finally:
        stop()
