"""Files that a job has left: traces of torch's profiler, dumps of torch's flight recorder, records of rpcbench.

Guarantees
- The kind of a file is told by its beginning, not by its name. Files of several kinds, or of none, are a ValueError.
- Traces and dumps can be played as a record: a frame for each beginning and end of a collective, at most `MOST_FRAMES`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

from rpcbench.base.ids import Row
from rpcbench.distributed.flight_dumps import find_files
from rpcbench.telemetry.message_views import clock_of
from rpcbench.telemetry.profile_files import TracedProfile, open_profile
from rpcbench.telemetry.recording import FORMAT, VERSION, Frame, Record, flatten_world, load_record
from rpcbench.telemetry.trace import CollectiveTimeline, open_dumps
from rpcbench.telemetry.views import View, World, diff_views

Files = str | Path | Sequence[str | Path]
MOST_FRAMES = 200
_HEAD = 1 << 16  # bytes that tell a file's kind
RECORD, TRACES, DUMPS = "record", "traces", "dumps"
_SIGNS = {
    RECORD: (FORMAT.encode(),),
    TRACES: (b'"traceEvents"', b'"schemaVersion"', b'"distributedInfo"', b'"deviceProperties"'),
    DUMPS: (b"pg_config", b"entries"),
}  # fmt: skip
"""Kinds, and a text at the beginning of such a file."""


def identify_files(files: Files) -> str:
    """Return the kind of some files: `RECORD`, `TRACES` or `DUMPS`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: They are of different kinds, or of none.
    """
    kinds = {path: _identify_file(path) for path in find_files(files)}
    (first, kind), *others = kinds.items()
    for path, other in others:
        if other != kind or kind == RECORD:
            raise ValueError(
                f"{first} is one of {kind}, {path} one of {other}: give one record, or the files of one kind"
            )
    return kind


def _identify_file(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head.startswith(b"\x1f\x8b"):
        head = _unpack_head(head)
    for kind, signs in _SIGNS.items():
        if any(sign in head for sign in signs):
            return kind
    why = "empty" if not head.strip() else "no trace of torch.profiler, dump of torch's flight recorder or record"
    raise ValueError(f"{path} is {why}")


def _unpack_head(packed: bytes) -> bytes:
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(packed, _HEAD)
    except zlib.error:
        return b"damaged"


def open_job(files: Files) -> Record | TracedProfile | CollectiveTimeline:
    """Return the content of a job's files: a record, the profile of traces, or the timeline of dumps.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: They are of different kinds, or a file is damaged, or of no such kind.
    """
    kind = identify_files(files)
    if kind == RECORD:
        return load_record(find_files(files)[0])
    return open_profile(files) if kind == TRACES else open_dumps(files)


def make_record(files: Files) -> Record:
    """Return the record in a file, or one that plays the collectives of traces or dumps. Raises as `open_job` does."""
    found = open_job(files)
    return found if isinstance(found, Record) else record_collectives(found.world or {})


def record_collectives(world: World) -> Record:
    """Return a record of the collectives of a world, as they began and ended."""
    moments = sorted({moment for member in world.values() for moment in _moments(member)})
    step = max(1, -(-len(moments) // MOST_FRAMES))
    chosen = sorted({*moments[::step], *moments[-1:]})
    frames: list[Frame] = []
    before: View = {}
    for moment in chosen:
        sections = flatten_world(_world_at(world, moment))
        frames.append((moment - chosen[0], diff_views(before, sections), ""))
        before = sections
    rows = sum(len(member["tables"].get("collectives", {})) for member in world.values())
    holds = {"members": len(world), "frames": len(frames), "rows of collectives": rows}
    about = {"format": FORMAT, "version": VERSION, "holds": holds, "leaves_out": ["values of tensors", "messages"]}
    return Record(about, tuple(frames))


def _moments(member: dict[str, object]) -> set[float]:
    """Return the beginnings and ends of a member's collectives, on our clock."""
    ahead = clock_of(member).ahead
    tables = member["tables"]
    assert isinstance(tables, dict)
    rows = tables.get("collectives", {}).values()
    return {float(row[name]) - ahead for row in rows for name in ("begin", "end") if row[name] is not None}


def _world_at(world: World, moment: float) -> World:
    """Return the world as it was: without collectives that begin later; those that end later are under way."""
    found: World = {}
    for id_, member in world.items():
        then = moment + clock_of(member).ahead
        rows = member["tables"].get("collectives", {})
        begun = {key: _row_at(row, then) for key, row in rows.items() if row["begin"] <= then}
        found[id_] = {**member, "tables": {**member["tables"], "collectives": begun}}
    return found


def _row_at(row: Row, then: float) -> Row:
    return {**row, "end": None} if row["end"] is not None and row["end"] > then else row
