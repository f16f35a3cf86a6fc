"""Records of a world: made while it goes on, kept in a file, and played without any worker.

The file is JSON: `format`, `version`, `holds` (what is in it, counted), `leaves_out` (what is not), and `frames`, each
[seconds since the begin, delta, name or ""]; a delta is that of `views.diff`, over the world as flat sections:
"members", and one for each member and table, "1 owned". Values of tensors are in no table, so in no record. Unless
everything was asked for, only tables of the protocol are in it, and no string in it has a home directory or a secret of
the environment.

`with record("lesson.json"):` records every change and every message, as panels see them. A thread of its own looks at
most ten times a second, and after `mark`. What a record may hold is bounded: when that is full nothing more is added,
and the record says so. The file is written whole, or the file of before stays.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rpcbench.base.conditions import Flag, Listeners
from rpcbench.base.events import MESSAGES
from rpcbench.telemetry import collector as collect
from rpcbench.telemetry.collector import Collector
from rpcbench.telemetry.message_views import began_since
from rpcbench.telemetry.record_schema import fault, frame_fault
from rpcbench.telemetry.views import Delta, View, World, diff, patch


def save_text(path: str | Path, text: str) -> Path:
    """Write it; the path. OSError that names the path. A pipe or a device is written to directly."""
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return Path(path)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)
    return Path(path)


class Still:
    """A source whose world never changes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Nothing will come."""
        return lambda: None

    def world(self) -> World:
        """Always the same."""
        return self._world


FORMAT, VERSION = "rpcbench record", 1
TABLES = ("owned", "users", "contexts", "graphs", "calls", "ops", "steps", "messages", "collectives")
_SECRET = re.compile(r"SECRET|TOKEN|PASSW|KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 6
_HOMES = re.compile(r"/(?:home|Users)/[^/\s'\"]+")

_FIELDS = {"holds": dict, "leaves_out": [str], "frames": [list]}

Frame = tuple[float, Delta, str]


@dataclass(frozen=True, slots=True)
class Record:
    """What a file holds. `about` has all but the frames."""

    about: dict[str, Any]
    frames: tuple[Frame, ...]

    @property
    def seconds(self) -> float:
        return self.frames[-1][0] if self.frames else 0.0

    def save(self, path: str | Path) -> Path:
        """Write it; the path."""
        return save_text(path, json.dumps({**self.about, "frames": self.frames}))

    def __str__(self) -> str:
        holds = ", ".join(f"{count} {what}" for what, count in self.about["holds"].items())
        return f"record of {self.seconds:.1f} s: {holds}; without {', '.join(self.about['leaves_out'])}"


def load(path: str | Path) -> Record:
    """The record in a file. ValueError for a file that is none, is damaged, or from a later version; it says where."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no record of rpcbench: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no record of rpcbench: make one with %record {Path(path).name}")
    if found.get("version") != VERSION:
        raise ValueError(f"{path} is a record of version {found.get('version')}; this rpcbench reads version {VERSION}")
    if place := fault(found, _FIELDS, "the record"):
        raise ValueError(f"{path} is damaged: {place} is missing, or not what a record has there")
    return Record(found, tuple(_frame(path, at, frame) for at, frame in enumerate(found.pop("frames"))))


def _frame(path: str | Path, at: int, frame: list[Any]) -> Frame:
    """ValueError where a frame of the file is not one."""
    place: str | None = "its time, delta or name"
    if len(frame) == 3 and fault(frame[0], float, "time") is None and isinstance(frame[2], str):
        place = frame_fault(frame[1])
    if place:
        raise ValueError(f"{path} is damaged: frame {at}, {place} is missing, or not what a record has there")
    return (float(frame[0]), frame[1], frame[2])


def flat(world: World, tables: tuple[str, ...] | None = TABLES) -> View:
    """A world as sections of rows, which can be told apart and put together by deltas. `tables` None: all."""
    sections: View = {"members": {}}
    for id_, member in world.items():
        fields = {name: value for name, value in member.items() if name != "tables"}
        sections["members"][str(id_)] = {**fields, "clock": list(fields.get("clock", ()))}
        for table, rows in member["tables"].items():
            if tables is None or table in tables:
                sections[f"{id_} {table}"] = rows
    return sections


def world_of(sections: View) -> World:
    """The world again."""
    world: World = {}
    for key, fields in sections.get("members", {}).items():
        world[int(key)] = {**fields, "clock": fields["clock"] or (0.0, 0.0), "tables": {}}
    for name, rows in sections.items():
        member, _, table = name.partition(" ")
        if table and int(member) in world:
            world[int(member)]["tables"][table] = rows
    return world


class Cleaner:
    """Takes home directories and secrets of this process's environment out of strings."""

    def __init__(self, environment: Mapping[str, str] = os.environ, home: Path | None = None) -> None:
        secrets = [value for name, value in environment.items() if _SECRET.search(name)]
        self._secrets = [value for value in secrets if len(value) >= _SHORTEST_SECRET]
        self._home = str(home or Path.home())

    def clean(self, value: Any) -> Any:
        """The same with cleaned strings, in whatever it holds."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self.clean(key): self.clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        if self._home != "/":
            text = text.replace(self._home, "~")
        return _HOMES.sub("~", text) if "/" in text else text


class Player:
    """A record as a source of worlds: it stands at one of its frames, and goes to any other."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.at = -1
        self._sections: View = {}
        self._listeners = Listeners()
        self.go(0)

    def go(self, frame: int) -> None:
        """Stand at that frame, or at the nearest one there is."""
        frame = max(-1, min(frame, len(self.record.frames) - 1))
        if frame < self.at:
            self.at, self._sections = -1, {}
        for _, delta, _ in self.record.frames[self.at + 1 : frame + 1]:
            self._sections = patch(self._sections, delta)
        self.at = frame
        self._listeners.tell()

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """As a collector's: `wake` is called whenever the record stands elsewhere."""
        return self._listeners.add(wake)

    def world(self) -> World:
        """The world of the frame it stands at."""
        return world_of(self._sections)


PERIOD = 0.1
MOST_ROWS = 500_000


class Recording:
    """A record that grows, from when it is made until `stop`, which writes the file."""

    def __init__(self, path: str | Path, collector: Collector, everything: bool = False) -> None:
        self.path = Path(path)
        self.path.touch()  # whoever may not write there hears of it now
        self._collector = collector
        self._everything = everything
        self._cleaner = Cleaner()
        self._lock = threading.Lock()
        self._sections: View = {}
        self._frames: list[Frame] = []
        self._rows: Counter[str] = Counter()
        self._skipped: set[str] = set()
        self._full = False
        self._began = time.monotonic()
        self._stale, self._over = Flag(), Flag()
        self._unsubscribe = collector.subscribe(self._stale.set, MESSAGES)
        collector.settle()
        self.mark("begin")
        self._thread = threading.Thread(target=self._run, name="rpcbench-record", daemon=True)
        self._thread.start()

    def mark(self, name: str) -> None:
        """Look now, and give this moment a name."""
        self._look(name)

    def stop(self) -> Record:
        """Wait for what members have to tell, look once more and write the file."""
        if not self._over.is_set():
            self._collector.settle()
            self.mark("end")
            self._over.set()
            self._stale.set()
            self._unsubscribe()
            self._thread.join()
            self.record().save(self.path)
        return self.record()

    def record(self) -> Record:
        """What there is so far."""
        with self._lock:
            members = len(self._sections.get("members", {}))
            holds = {
                "members": members,
                "frames": len(self._frames),
                **{f"rows of {t}": n for t, n in self._rows.items() if n},
            }
            left_out = ["values of tensors"]
            if not self._everything:
                left_out += [
                    "environment",
                    "home paths",
                    "secrets",
                    *(f"table {name}" for name in sorted(self._skipped)),
                ]
            if self._full:
                left_out.append(f"what came after its first {MOST_ROWS} rows")
            about = {"format": FORMAT, "version": VERSION, "holds": holds, "leaves_out": left_out}
            return Record(about, tuple(self._frames))

    def _run(self) -> None:
        while not self._over.is_set():
            self._stale.wait()
            self._stale.clear()
            self._look("")
            self._over.wait(PERIOD)

    def _look(self, name: str) -> None:
        with self._lock:
            if self._over.is_set() or self._full:
                return
            world = {id_: began_since(member, self._began) for id_, member in self._collector.world().items()}
            self._skipped |= {t for member in world.values() for t in member["tables"]} - {*TABLES}
            sections = flat(world, None if self._everything else TABLES)
            delta = diff(self._sections, sections)
            if delta or name:
                self._count(delta)
                cleaned = delta if self._everything else self._cleaner.clean(delta)
                self._frames.append((time.monotonic() - self._began, cleaned, name))
                self._sections = sections

    def _count(self, delta: Delta) -> None:
        for section, change in delta.items():
            if change is not None and " " in section:
                self._rows[section.partition(" ")[2]] += len(change["set"])
        self._full = self._rows.total() > MOST_ROWS

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def record(path: str | Path, everything: bool = False) -> Recording:
    """Record the current world into a file, until `stop()` or the end of a `with`.

    `everything`: all tables and strings as they are, with paths, logs and whatever else is in them.
    RuntimeError where RPC is not initialized.
    """
    return Recording(path, collect.current_collector(), everything)
