"""Dumps of torch's flight recorder from jobs that were started elsewhere: files, or a rank's answer on its debug port.

Guarantees
- A dump is data. A pickle in it may hold numbers, texts, lists and dicts; one that names a class or a function is
  refused, and nothing of it runs.
- A dump that is cut, of another kind, or without a rank is a ValueError that names the file and the fault.
- The rows are those of the table "collectives" (`distributed.events`), so that all views read them. Times are seconds
  since 1970 by the clock of each rank. NCCL's recorder knows when a collective ended; that of gloo only whether.
- A group's members are those that the dumps list; of a group that none lists, the ranks that have used it.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpcbench.base.errors import count_noun
from rpcbench.base.ids import Row, Table
from rpcbench.distributed.flight_records import describe_tensors
from rpcbench.runtime.handles import is_user_file

_RANK = re.compile(r"(\d+)\D*$")
_DEFAULT = "default_pg"
_REQUIRED: dict[str, type | tuple[type, ...]] = {
    "process_group": (list, tuple), "profiling_name": str, "collective_seq_id": int, "time_created_ns": int,
    "input_sizes": (list, tuple), "is_p2p": bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlightDump:
    """The contents of one rank's flight recorder."""

    rank: int
    source: str  # the file, or the address that answered
    entries: tuple[dict[str, Any], ...]  # oldest first
    groups: Mapping[str, Mapping[str, Any]]  # by a number of torch: "name", "desc" and "ranks" of each


class _DataUnpickler(pickle.Unpickler):
    """Reads numbers, texts, None, lists, tuples and dicts."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {module}.{name}, which no dump of torch's flight recorder does; nothing of it ran")

    def persistent_load(self, key: Any) -> Any:
        raise ValueError(f"it refers to an object outside of it, {key!r}")


def parse_dump(data: bytes, source: str, rank: int | None = None) -> FlightDump:
    """Return the dump in `data`, JSON or a pickle. `rank`: where the dump itself does not say it."""
    found = _decode_dump(data, source)
    if not isinstance(found, dict) or not isinstance(found.get("entries", []), list) or "version" not in found:
        raise ValueError(f"{source} is no dump of torch's flight recorder: it has no list of entries with a version")
    known = found.get("rank", rank)
    if not isinstance(known, int):
        raise ValueError(f"{source} does not say its rank: a dump's name ends with it, as nccl_trace_rank_3")
    entries = tuple(found.get("entries", []))
    for place, entry in enumerate(entries):
        _check_entry(entry, f"{source}, entry {place}")
    return FlightDump(known, source, entries, _read_groups(found.get("pg_config"), source))


def _decode_dump(data: bytes, source: str) -> Any:
    if not data:
        raise ValueError(f"{source} is empty: the rank ended while it wrote its dump, or had recorded nothing")
    try:
        if data[:1] == b"{":
            return json.loads(data)
        return _DataUnpickler(io.BytesIO(data)).load()
    except (ValueError, EOFError, RecursionError, pickle.UnpicklingError, KeyError, IndexError, TypeError) as error:
        why = "it is cut off" if isinstance(error, EOFError) or "truncated" in str(error) else str(error)
        raise ValueError(f"{source} cannot be read as a dump of torch's flight recorder: {why}") from None


def _check_entry(entry: Any, place: str) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{place}: it is no dict")
    for name, kind in _REQUIRED.items():
        if not isinstance(entry.get(name), kind):
            raise ValueError(f"{place}: {name} is missing or of another type; rpcbench reads the dumps of torch 2")


def _read_groups(config: Any, source: str) -> dict[str, dict[str, Any]]:
    """Return torch's table of groups, with the ranks of each as a list."""
    groups = {}
    for number, group in (config or {}).items():
        try:
            ranks = [int(rank) for rank in ast.literal_eval(str(group["ranks"]))]
        except (ValueError, SyntaxError, KeyError, TypeError) as error:
            raise ValueError(f"{source}: the ranks of group {number!r} cannot be read: {error}") from None
        groups[str(number)] = {"name": str(group.get("name", "")), "desc": str(group.get("desc", "")), "ranks": ranks}
    return groups


def read_dumps(files: str | Path | Sequence[str | Path]) -> list[FlightDump]:
    """Read the dumps of a job, one file for each rank.

    Args:
        files: A pattern, as `nccl_trace_rank_*`, a folder, one file, or several.

    Returns:
        The dumps in the order of ranks.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file is no dump, is cut off, holds more than data, or two are of one rank.
    """
    dumps: dict[int, FlightDump] = {}
    for path in find_files(files):
        named = _RANK.search(path.name.removesuffix(".json"))
        dump = parse_dump(path.read_bytes(), str(path), int(named[1]) if named else None)
        if (other := dumps.get(dump.rank)) is not None:
            raise ValueError(f"{other.source} and {path} are both of rank {dump.rank}: give the files of one job")
        dumps[dump.rank] = dump
    return [dumps[rank] for rank in sorted(dumps)]


def find_files(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files of a pattern, a folder, one file or several, by name. FileNotFoundError if there is none."""
    given = [files] if isinstance(files, str | Path) else [*files]
    found: set[Path] = set()
    for one in given:
        path = Path(one)
        inside = path.iterdir() if path.is_dir() else [path] if path.exists() else _match_pattern(path)
        matching = {each for each in inside if each.is_file()}
        if not matching:
            raise FileNotFoundError(f"there is no file {one}")
        found |= matching
    return sorted(found)


def _match_pattern(pattern: Path) -> Iterable[Path]:
    """Return the files that match a pattern with wildcards in its last part alone."""
    return pattern.parent.glob(pattern.name)


def collective_tables(dumps: Sequence[FlightDump]) -> dict[int, Table]:
    """Return the table "collectives" of each rank. Names of members are `rank 0` and so on; transfers are left out."""
    members = {group: tuple(name_of_rank(rank) for rank in ranks) for group, ranks in _members_of_groups(dumps).items()}
    return {dump.rank: dict(_collective_row(entry, members) for entry in _collectives_of(dump)) for dump in dumps}


def name_of_rank(rank: int) -> str:
    return f"rank {rank}"


def _collectives_of(dump: FlightDump) -> Iterable[dict[str, Any]]:
    return (entry for entry in dump.entries if not entry["is_p2p"])


def _members_of_groups(dumps: Sequence[FlightDump]) -> dict[str, list[int]]:
    listed: dict[str, set[int]] = {}
    for dump in dumps:
        for group in dump.groups.values():
            if group["ranks"]:
                listed.setdefault(group["name"], set()).update(group["ranks"])
    used: dict[str, set[int]] = {}
    for dump in dumps:
        for entry in _collectives_of(dump):
            name, description = entry["process_group"]
            # gloo's recorder lists the default group alone, with an empty name.
            known = listed.get(name) or (listed.get("") if description == _DEFAULT else None)
            used.setdefault(name, set()).update(known or {dump.rank})
            if description == _DEFAULT:
                used[name].update(one.rank for one in dumps)
    return {name: sorted(ranks) for name, ranks in used.items()}


def _collective_row(entry: dict[str, Any], members: Mapping[str, tuple[str, ...]]) -> tuple[str, Row]:
    name, description = entry["process_group"]
    dtypes = entry.get("input_dtypes") or [""] * len(entry["input_sizes"])
    shape, size = describe_tensors(entry["input_sizes"], dtypes)
    begin = entry["time_created_ns"] / 1e9
    ended, known = entry.get("time_discovered_completed_ns") or None, True
    if ended is None and (entry.get("retired") or entry.get("state") == "completed"):
        ended, known = entry["time_created_ns"], False
    return f"{name}/{entry['collective_seq_id']}", {
        "group": "world" if description == _DEFAULT else _group_name(name, description),
        "number": entry["collective_seq_id"], "op": entry["profiling_name"].rpartition(":")[2],
        "members": list(members[name]), "shape": shape, "bytes": size,
        "begin": begin, "end": None if ended is None else ended / 1e9, "failed": False,
        "site": _site_of_frames(entry.get("frames") or ()), "end_known": known,
    }  # fmt: skip


def _group_name(name: str, description: str) -> str:
    return description if description not in ("", "undefined") else f"group {name}"


def _site_of_frames(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line of the program, as `train.py:12`; "" where the recorder kept no stack."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if is_user_file(file) and "/site-packages/torch/" not in file:
            return f"{Path(file).name}:{frame.get('line', 0)}"
    return ""


def describe_gaps(dumps: Sequence[FlightDump]) -> list[str]:
    """Return a sentence for each gap in the dumps: ranks that a group lists, and ranks whose recorder held nothing."""
    there = {dump.rank for dump in dumps}
    listed = {rank for dump in dumps for group in dump.groups.values() for rank in group["ranks"]}
    remarks = []
    if missing := sorted(listed - there):
        ranks = ", ".join(map(str, missing))
        remarks.append(f"{count_noun(len(missing), 'rank')} without a dump: {ranks}. Each ended before it wrote one.")
    if silent := [dump.rank for dump in dumps if not dump.entries]:
        remarks.append(
            f"The recorders of {', '.join(map(name_of_rank, silent))} are empty: TORCH_FR_BUFFER_SIZE=2000 switches "
            "them on."
        )
    return remarks
