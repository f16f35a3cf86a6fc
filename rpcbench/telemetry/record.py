"""A record: what a world's tables said, change after change, in a file that plays without any worker.

The file is JSON: `format`, `version`, `holds` (what is in it, counted), `leaves_out` (what is not), and `frames`, each
[seconds since the begin, delta, name or ""]; a delta is that of `views.diff`, over the world as flat sections:
"members", and one for each member and table, "1 owned". Values of tensors are in no table, so in no record. Unless
everything was asked for, only tables of the protocol are in it, and no string in it has a home directory or a secret of
the environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpcbench.base.conditions import Listeners
from rpcbench.telemetry.shapes import fault, frame_fault
from rpcbench.telemetry.text_file import save_text
from rpcbench.telemetry.views import Delta, View, World, patch

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
