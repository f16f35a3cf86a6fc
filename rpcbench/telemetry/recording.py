"""Records of a world: recorded while it runs, stored in a file, and played back without any worker.

`with record("lesson.json"):` records every change and every message, as panels show them, at most ten times a second
and at each `mark`. Rules:
- Values of tensors are in no table, so in no record. Unless the user requests everything, a record has only tables of
  the protocol, and its strings contain no home directory and no secret of the environment.
- The size is bounded: a full record takes no more rows, and reports that.
- The file is written as a whole, or the previous file stays.
"""
# Format: JSON. A frame changes the sections of the frame before it; the first one starts from nothing.
#
#     {"format": "rpcbench record", "version": 1,
#      "holds": {"members": 3, "frames": 12, "rows of owned": 40, ...},     counts
#      "leaves_out": ["values of tensors", "environment", ...],
#      "frames": [[seconds since the beginning, delta of views.diff, name or ""], ...]}
#
#     sections of a delta:   "members"   fields of all members       "1 owned"   rows of table "owned" of member 1

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rpcbench.base.conditions import Event, Listeners
from rpcbench.base.errors import count_noun
from rpcbench.base.files import replace_file
from rpcbench.base.ids import MESSAGES, Table
from rpcbench.telemetry import collector as collect
from rpcbench.telemetry.collector import RECORD, Collector, Phase
from rpcbench.telemetry.message_views import drop_earlier_collectives
from rpcbench.telemetry.record_schema import check_delta, check_type, make_type
from rpcbench.telemetry.views import Delta, View, World, diff_views, patch_view


def save_text(path: str | Path, text: str) -> Path:
    """Write a file and return its path. Raises an OSError that names the path."""
    target = Path(path).resolve()
    if target.exists() and not target.is_file():  # a pipe or a device cannot be replaced
        target.write_text(text, encoding="utf-8")
        return Path(path)
    try:
        with replace_file(target) as file:
            file.write(text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return Path(path)


class Still:
    """A source of worlds, for panels, that never changes. `words`: of a panel that shows it; else its view's."""

    def __init__(self, world: World, phase: Phase = RECORD, words: str = "") -> None:
        self._world = world
        self.phase = phase
        self.words = words

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Do nothing, as no change will come."""
        return lambda: None

    def world(self) -> World:
        """Return the same world each time."""
        return self._world


def make_lone_world(tables: dict[str, Table]) -> World:
    """Return a world of the notebook alone, with these tables."""
    return {0: {"name": "notebook", "id": 0, "incarnation": 0, "state": "up", "left_out": 0, "tables": tables}}


def make_rank_world(tables: Mapping[int, dict[str, Table]], remarks: Iterable[str], name: str = "rank {}") -> World:
    """Return a world of ranks with these tables; the first one has the remarks, too. `name`: of a rank's number."""
    members: World = {}
    for rank, own in tables.items():
        about = {"name": name.format(rank), "id": rank, "incarnation": 0, "state": "up", "left_out": 0}
        members[rank] = {**about, "tables": dict(own)}
    first = next(iter(members.values()))
    first["tables"]["remarks"] = {str(n): {"words": words} for n, words in enumerate(remarks)}
    return members


FORMAT, VERSION = "rpcbench record", 1
# Tables of the protocol; others, with logs, paths and pids, are recorded on request only.
TABLES = (
    "owned", "users", "contexts", "graphs", "calls", "ops", "steps", "messages", "collectives", "models", "shards",
    "comparisons", "verdicts", "layouts", "jobs", "cells", "metrics", "samples", "traffic",
)  # fmt: skip
_PARTS = {
    "cells": "cells", "jobs": "jobs", "calls": "calls", "messages": "messages", "collectives": "collectives",
    "owned": "RRefs", "contexts": "autograd contexts", "steps": "pipeline steps", "models": "sharded models",
    "comparisons": "comparisons", "metrics": "metrics", "samples": "resources", "traffic": "traffic",
}  # fmt: skip
"""Tables in the words of panels, for those that a user has heard of."""
_SECRET = re.compile(r"SECRET|TOKEN|PASSW|KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 6  # shorter values, as "1" or "true", would be removed from all texts
_HOMES = re.compile(r"/(?:home|Users)/[^/\s'\"]+")  # of users on other hosts too
_FIELDS = make_type({"holds": dict, "leaves_out": [str], "frames": [list]})
_FRAME = make_type([float, dict, str])

Frame = tuple[float, Delta, str]


@dataclass(frozen=True, slots=True)
class Record:
    """The contents of a file."""

    about: dict[str, Any]  # all fields except the frames
    frames: tuple[Frame, ...]

    @property
    def seconds(self) -> float:
        return self.frames[-1][0] if self.frames else 0.0

    def save(self, path: str | Path) -> Path:
        """Write it to a file, and return its path."""
        return save_text(path, json.dumps({**self.about, "frames": self.frames}))

    def __str__(self) -> str:
        holds = self.about["holds"]
        parts = [name for table, name in _PARTS.items() if f"rows of {table}" in holds]
        left_out = [name for name in self.about["leaves_out"] if not name.startswith("table ")]
        if len(left_out) < len(self.about["leaves_out"]):
            left_out.append("processes and logs")
        members = count_noun(holds.get("members", 0), "member")
        held = ", ".join(parts) or "nothing ran"
        before = ", and what was known as it began" if parts else ""
        return f"record of {self.seconds:.1f} s, {members}: {held}{before}; without {', '.join(left_out)}"


def load_record(path: str | Path) -> Record:
    """Read a record. Raises ValueError, with the place, for other files, damaged ones and those of other versions."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested lists
        raise ValueError(f"{path} is not a record of rpcbench: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is not a record of rpcbench: make one with %record {Path(path).name}")
    if found.get("version") != VERSION:
        raise ValueError(f"{path} is a record of version {found.get('version')}; this rpcbench reads version {VERSION}")
    try:
        check_type(found, _FIELDS, "the record")
        return Record(found, tuple(_check_frame(at, frame) for at, frame in enumerate(found.pop("frames"))))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _check_frame(at: int, frame: Any) -> Frame:
    check_type(frame, _FRAME, f"frame {at}")
    seconds, delta, name = frame
    check_delta(delta, f"frame {at}")
    return float(seconds), delta, name


def flatten_world(world: World, tables: tuple[str, ...] | None = TABLES) -> View:
    """Return a world as flat sections of rows, for `diff_views` and `patch_view`. `tables` None: all."""
    sections: View = {"members": {}}
    for id_, member in world.items():
        fields = {name: value for name, value in member.items() if name != "tables"}
        sections["members"][str(id_)] = {**fields, "clock": list(fields.get("clock", ()))}
        for table, rows in member["tables"].items():
            if tables is None or table in tables:
                sections[f"{id_} {table}"] = rows
    return sections


def world_from_sections(sections: View) -> World:
    """Return the world of flat sections."""
    world: World = {}
    for key, fields in sections.get("members", {}).items():
        world[int(key)] = {**fields, "clock": fields["clock"] or (0.0, 0.0), "tables": {}}
    for name, rows in sections.items():
        member, _, table = name.partition(" ")
        if table and int(member) in world:  # a damaged file may lack the member
            world[int(member)]["tables"][table] = rows
    return world


class Cleaner:
    """A filter that removes home directories and secrets of this process's environment from strings."""

    def __init__(self, environment: Mapping[str, str] = os.environ, home: Path | None = None) -> None:
        secrets = [value for name, value in environment.items() if _SECRET.search(name)]
        # Longest first: one may begin with another.
        self._secrets = sorted((each for each in secrets if len(each) >= _SHORTEST_SECRET), key=len, reverse=True)
        self._home = str(home or os.path.expanduser("~"))  # noqa: PTH111  (pathlib raises where there is no home)

    def clean_value(self, value: Any) -> Any:
        """Return the value with all strings in it cleaned, including keys of dicts."""
        if isinstance(value, str):
            return self._clean_text(value)
        if isinstance(value, dict):
            return {self.clean_value(key): self.clean_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean_value(item) for item in value]
        return value

    def _clean_text(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        if self._home != "/":  # the home of some containers' root: it would change every path
            text = text.replace(self._home, "~")
        return _HOMES.sub("~", text) if "/" in text else text


class Player:
    """A record as a source of worlds, positioned at one of its frames."""

    phase = RECORD

    def __init__(self, record: Record) -> None:
        self.record = record
        self.at = -1  # the current frame; -1: before the first
        self._sections: View = {}
        self._listeners = Listeners()
        self.go_to_frame(0)

    def go_to_frame(self, frame: int) -> None:
        """Move to a frame, or to the nearest one that exists."""
        frame = max(-1, min(frame, len(self.record.frames) - 1))
        if frame < self.at:  # deltas lead forward only, so a step back begins at the start
            self.at, self._sections = -1, {}
        for _, delta, _ in self.record.frames[self.at + 1 : frame + 1]:
            self._sections = patch_view(self._sections, delta)
        self.at = frame
        self._listeners.notify_listeners()

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after each move; call the result to stop, as with a collector."""
        return self._listeners.add_callback(wake)

    def world(self) -> World:
        """Return the world of the current frame."""
        return world_from_sections(self._sections)


PERIOD = 0.1  # seconds between two frames, at least
MOST_ROWS = 500_000  # of a record


class Recording:
    """A record in progress, from its creation until `stop`, which writes the file."""

    def __init__(self, path: str | Path, collector: Collector, everything: bool = False) -> None:
        self.path = Path(path)
        self.path.touch()  # an error of the path is raised now, not after the lesson
        self._collector = collector
        self._everything = everything
        self._cleaner = Cleaner()
        self._lock = threading.Lock()  # for the fields below: `mark` and the thread both add frames
        self._sections: View = {}  # the world of the latest frame
        self._frames: list[Frame] = []
        self._rows: Counter[str] = Counter()  # by table
        self._skipped: set[str] = set()  # tables that were left out
        self._full = False
        self._began = time.monotonic()
        self._stale, self._stop_event = Event(), Event()  # the world has changed; the recording has ended
        self._unsubscribe = collector.subscribe(self._stale.set, MESSAGES)
        collector.settle()  # the first frame has the whole world
        self.mark("begin")
        self._thread = threading.Thread(target=self._record_loop, name="rpcbench-record", daemon=True)
        self._thread.start()

    def mark(self, name: str) -> None:
        """Add a frame now, with a name."""
        with self._lock:
            if self._stop_event.is_set() or self._full:
                return
            world = {
                id_: drop_earlier_collectives(member, self._began) for id_, member in self._collector.world().items()
            }
            self._skipped |= {t for member in world.values() for t in member["tables"]} - {*TABLES}
            sections = flatten_world(world, None if self._everything else TABLES)
            delta = diff_views(self._sections, sections)
            if delta or name:  # an unchanged world needs a frame only for a name
                for section, change in delta.items():
                    if change is not None and " " in section:
                        self._rows[section.partition(" ")[2]] += len(change["set"])
                self._full = self._rows.total() > MOST_ROWS
                cleaned = delta if self._everything else self._cleaner.clean_value(delta)
                self._frames.append((time.monotonic() - self._began, cleaned, name))
                self._sections = sections

    def stop(self) -> Record:
        """Wait for the reports of all members, add a last frame, write the file and return the record."""
        if not self._stop_event.is_set():
            self._collector.settle()
            self.mark("end")
            self._stop_event.set()
            self._stale.set()  # so that the thread wakes up and ends
            self._unsubscribe()
            self._thread.join()
            self.record().save(self.path)
        return self.record()

    def record(self) -> Record:
        """Return the record so far."""
        with self._lock:
            holds = {
                "members": len(self._sections.get("members", {})),
                "frames": len(self._frames),
                **{f"rows of {t}": n for t, n in self._rows.items() if n},
            }
            left_out = ["values of tensors"]
            if not self._everything:
                left_out += [
                    "environment", "home paths", "secrets", *(f"table {name}" for name in sorted(self._skipped)),
                ]  # fmt: skip
            if self._full:
                left_out.append(f"everything after its first {MOST_ROWS} rows")
            about = {"format": FORMAT, "version": VERSION, "holds": holds, "leaves_out": left_out}
            return Record(about, tuple(self._frames))

    def _record_loop(self) -> None:
        while not self._stop_event.is_set():
            self._stale.wait()
            self._stale.clear()
            self.mark("")
            self._stop_event.wait(PERIOD)

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def record(path: str | Path, everything: bool = False) -> Recording:
    """Record the current world, until `stop()` or the end of a `with` block.

    Args:
        path: The file, which is written at the end.
        everything: Record all tables, and strings without any change: with paths, logs and secrets.

    Returns:
        The recording, whose `mark(name)` names a moment.

    Raises:
        RuntimeError: RPC is not initialized.
        OSError: The file cannot be written.
    """
    return Recording(path, collect.current_collector(), everything)
