"""The messages of a while: `with trace() as seen: ...`, and then `seen` has every message that any member sent in it.

Before the body begins all members listen; after it what follows from it (RRefs let go of, acknowledgements of forks) is
waited for, for a second at most, and then all that members have to tell. Which of several programs at work caused a
message nobody knows: all messages of the world are there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpcbench.base.conditions import Flag
from rpcbench.base.events import MESSAGES, Table
from rpcbench.telemetry import chrome, collect
from rpcbench.telemetry.clocks import Clock
from rpcbench.telemetry.collect import Collector
from rpcbench.telemetry.collective_timeline import CollectiveTimeline
from rpcbench.telemetry.collectives import began_since
from rpcbench.telemetry.messages import messages_view
from rpcbench.telemetry.stills import Snapshot
from rpcbench.telemetry.summary import text
from rpcbench.telemetry.views import View, World

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
        return chrome.save(self.world, path)

    def __str__(self) -> str:
        return text(self.view)


@contextmanager
def trace(collector: Collector | None = None) -> Iterator[Trace]:
    """Trace the messages of the current world while the body runs. RuntimeError where RPC is not initialized."""
    collector = collector or collect.current()
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
