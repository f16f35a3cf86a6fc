"""Reads a trace of torch's profiler (kineto's JSON, plain or gzip): the operators and collectives of one rank.

Guarantees
- A trace of any size is read piece by piece; what stays in memory are 20 bytes for each operator.
- It is data: nothing of it runs. A file that is cut, empty, or another kind of JSON is a ValueError that names it.
- Times are seconds after `RankTrace.origin`, nanoseconds since 1970 by the clock of the rank's host.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from rpcbench.base.json_stream import LongList
from rpcbench.distributed.flight_records import describe_tensors
from rpcbench.runtime.operator_columns import CPU, Identity, OperatorColumns
from rpcbench.runtime.operator_kinds import COMMUNICATION, classify_operator
from rpcbench.runtime.operator_parts import MODULE, PartColumns
from rpcbench.runtime.operator_profile import MemberProfile, bounded_profile
from rpcbench.simulation.operator_counts import count_traced_flops

_EVENTS = "traceEvents"
_SLICE, _ABOUT = "X", "M"
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events"}
_OPERATORS = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "mtia_runtime", "xpu_runtime", *_ON_DEVICE}
_LINK, _LINK_ENDS = "fwdbwd", "sf"  # from a forward operator to the backward operator that it has caused
_GZIP = b"\x1f\x8b"
_RANK = re.compile(r"rank\D{0,2}(\d+)|(?<!\d)(\d{1,5})$")
_IN_TEXT = {name: re.compile(rf"'{name}': (\d+)") for name in ("rank", "world_size")}
_OF_BACKEND = re.compile(r"[a-z]+:(\w+)|nccl(?:Dev)?Kernel_([A-Za-z]+)")
_COLLECTIVES = {
    name.replace("_", ""): name
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
                 "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier")
} | {"alltoallv": "all_to_all"}  # fmt: skip
"""Names of torch by those without underscores, which NCCL and torch's profiler vary."""
_DTYPES = {
    "float": "Float", "double": "Double", "c10::Half": "Half", "c10::BFloat16": "BFloat16", "long int": "Long",
    "long": "Long", "int": "Int", "short": "Short", "signed char": "Char", "unsigned char": "Byte", "bool": "Bool",
}  # fmt: skip
"""The flight recorder's names of dtypes by those of C++."""


class _Details(msgspec.Struct, gc=False):
    """The arguments of an event, as far as they are read."""

    name: Any = None
    device: Any = None
    stream: Any = None
    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    values: Any = msgspec.field(name="Concrete Inputs", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    group: Any = msgspec.field(name="Process Group Name", default=None)
    described: Any = msgspec.field(name="Process Group Description", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    number: Any = msgspec.field(name="Seq", default=None)
    elements: Any = msgspec.field(name="In msg nelems", default=None)
    dtype: Any = None
    correlation: Any = None  # of a kernel and the call that launched it


class _Event(msgspec.Struct, gc=False):
    """An event, as far as it is read."""

    ph: str
    name: str = ""
    cat: str = ""
    pid: Any = None
    tid: Any = None
    ts: float = 0.0  # microseconds
    dur: float = 0.0
    id: Any = None
    args: _Details | None = None


_DECODER = msgspec.json.Decoder(list[_Event])


def _decode_events(data: bytes) -> list[_Event]:
    """Return the events in a JSON list. ValueError for other bytes."""
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError:  # torch escapes neither the bytes nor the control characters in names of kernels
        try:
            return msgspec.convert(json.loads(data.decode(errors="replace"), strict=False), list[_Event])
        except RecursionError as error:
            raise ValueError(str(error)) from None


@dataclass(slots=True)
class TracedCollective:
    """A rank's part of a collective."""

    op: str
    group: str  # torch's name, "" where the trace does not have it
    label: str
    ranks: tuple[int, ...]  # () where the trace does not have them
    number: int | None  # of the group
    begin: float
    end: float
    shape: str
    size: int  # bytes


class TracedGroup(NamedTuple):
    """A process group, as a trace lists it."""

    label: str  # torch's description: `mesh_dp`
    ranks: tuple[int, ...]  # () where the trace does not have them


@dataclass(slots=True)
class RankTrace:
    """The trace of one rank."""

    source: str
    rank: int | None
    size: int | None  # ranks of the job
    host: str
    origin: int
    seconds: float  # of the recording
    profile: MemberProfile
    collectives: list[TracedCollective]
    groups: dict[str, TracedGroup]  # those of this rank, by torch's name


@contextmanager
def _open_trace(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
        file.seek(0)
        if not packed:
            yield file
            return
        with gzip.open(file) as unpacked:
            yield unpacked  # type: ignore[misc]


def read_trace(path: Path) -> RankTrace:
    """Read the trace in a file. Its rank is that of the trace, else that of the file's name, else None.

    Raises:
        ValueError: The file is empty, cut off, damaged, or no trace of torch's profiler.
    """
    try:
        with _open_trace(path) as file:
            found = parse_trace(file, str(path))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        why = "cut off" if isinstance(error, EOFError) else f"damaged: {error}"
        raise ValueError(f"{path} cannot be read as a trace of torch's profiler: it is {why}") from None
    if found.rank is None and (named := _RANK.search(path.name.partition(".")[0])):
        found.rank = int(named[1] or named[2])
    return found


def parse_trace(file: BinaryIO, source: str) -> RankTrace:
    """Return the trace in a file of JSON. `source`: for errors."""
    try:
        events = LongList(file, _EVENTS, _decode_events)
        reader = _TraceReader()
        for piece in events:
            reader.take_events(piece)
        return reader.make_trace(events.fields, source)
    except (ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"{source} cannot be read as a trace of torch's profiler: {error}") from None


def parse_text(text: str, source: str, rank: int) -> RankTrace:
    """Return the trace in a text of JSON, which this rank has sent."""
    found = parse_trace(io.BytesIO(text.encode()), source)
    found.rank = rank
    return found


@dataclass(slots=True)
class _TraceReader:
    """What has been read of a trace so far."""

    columns: OperatorColumns = field(default_factory=OperatorColumns)
    parts: PartColumns = field(default_factory=PartColumns)
    first: float | None = None  # the stamp of the first event, from which all times count
    spans: list[tuple[float, float]] = field(default_factory=list)  # of the profiler, in microseconds
    threads: dict[Any, str] = field(default_factory=dict)
    identities: dict[tuple[Any, ...], Identity] = field(default_factory=dict)
    sent: list[_Event] = field(default_factory=list)  # collectives
    flops: float | None = None

    def take_events(self, events: list[_Event]) -> None:
        add, identities = self.columns.add_operator, self.identities
        for event in events:
            if event.ph != _SLICE or event.cat not in _OPERATORS:
                self._take_other(event)
                continue
            key = event.name, event.cat, event.tid, event.pid
            identity = identities.get(key)
            if identity is None:
                identity = identities[key] = self._identify_event(event)
            if self.first is None:
                self.first = event.ts
            begin, seconds = (event.ts - self.first) * 1e-6, event.dur * 1e-6
            add(identity, begin, seconds)
            if event.cat != "cpu_op":
                self._take_part(event, identity, begin, seconds)
            if event.args is not None and event.args.dims is not None and event.cat == "cpu_op":
                self.flops = (self.flops or 0.0) + count_traced_flops(event.name, event.args.dims, event.args.values)
            if identity[-1] == COMMUNICATION and event.cat != "cpu_op":  # those only ask for it
                self.sent.append(event)

    def _take_part(self, event: _Event, identity: Identity, begin: float, seconds: float) -> None:
        """Take the events that assign operators to parts of the model: annotations, launches, kernels."""
        name, track, device, alone, kind = identity
        if event.cat == "user_annotation":
            if alone:
                self.parts.add_range(name, track, begin, seconds)
        elif event.args is not None and isinstance(event.args.correlation, int):
            if device == CPU:
                self.parts.launches.add_point(event.args.correlation, self.parts.number_thread(track), begin)
            else:
                self.parts.add_kernel(event.args.correlation, seconds, kind)

    def _take_other(self, event: _Event) -> None:
        if event.ph == _SLICE and event.cat == "python_function":
            if event.name.startswith(MODULE):
                self.first = event.ts if self.first is None else self.first
                begin = (event.ts - self.first) * 1e-6
                self.parts.add_range(event.name, self._name_thread(event.tid), begin, event.dur * 1e-6)
        elif event.cat == _LINK and event.ph in _LINK_ENDS and isinstance(event.id, int) and self.first is not None:
            points = self.parts.forward if event.ph == _LINK_ENDS[0] else self.parts.backward
            thread = self.parts.number_thread(self._name_thread(event.tid))
            points.add_point(event.id, thread, (event.ts - self.first) * 1e-6)
        elif event.ph == _SLICE and event.cat == "Trace":
            self.spans.append((event.ts, event.ts + event.dur))
        elif event.ph == _ABOUT and event.name == "thread_name" and event.args is not None:
            self.threads[event.tid] = str(event.args.name)

    def _name_thread(self, tid: Any) -> str:
        return self.threads.get(tid, f"thread {tid}")

    def _identify_event(self, event: _Event) -> Identity:
        on_device = event.cat in _ON_DEVICE
        kind = classify_operator(event.name, event.cat, on_device)
        if on_device:
            about = event.args or _Details()
            device, stream = (event.pid if about.device is None else about.device), about.stream
            maker = "MTIA" if event.cat.startswith("mtia") else "CUDA"
            track = f"{maker} {device}, stream {event.tid if stream is None else stream}"
            return event.name, track, maker, True, kind
        spans_threads = kind == COMMUNICATION and event.cat == "user_annotation"
        return event.name, self._name_thread(event.tid), CPU, not spans_threads, kind

    def make_trace(self, fields: dict[str, Any], source: str) -> RankTrace:
        first = self.first if self.first is not None else min(self.spans)[0] if self.spans else None
        if first is None:
            raise ValueError("it has neither an operator nor the span of a profiler")
        about = fields.get("distributedInfo")
        rank, size = _read_place(about)
        base = fields.get("baseTimeNanoseconds")
        origin = (base if isinstance(base, int) else 0) + round(first * 1e3)
        span = (max(end for _, end in self.spans) - min(self.spans)[0]) * 1e-6 if self.spans else None
        profile = bounded_profile(self.columns, [], span)._replace(
            flops=self.flops, parts=self.parts.sum_parts(self.columns)
        )
        host = str(fields.get("host_name", ""))
        seconds = self.columns.measure_span() if span is None else span
        groups = _read_groups(about)
        collectives = self._list_collectives(first, groups)
        return RankTrace(source, rank, size, host, origin, seconds, profile, collectives, groups)

    def _list_collectives(self, first: float, groups: dict[str, TracedGroup]) -> list[TracedCollective]:
        """Return the collectives of the accelerator, else of the threads, in order."""
        only = next(iter(groups)) if len(groups) == 1 else ""  # then that of each collective which does not say its own
        on_device = [event for event in self.sent if event.cat in _ON_DEVICE]
        found = [_describe_collective(event, first, groups, only) for event in on_device or self.sent]
        return sorted((one for one in found if one is not None), key=lambda one: one.begin)


def _describe_collective(
    event: _Event, first: float, groups: dict[str, TracedGroup], only: str
) -> TracedCollective | None:
    """Return the collective of an event; None for a transfer between two ranks."""
    details = event.args or _Details()
    op = _name_collective(event.name, details.collective)
    if op is None:
        return None
    dims, dtypes = [[details.elements]], [details.dtype]
    if details.elements is None:
        dims, dtypes = details.dims or [], [_DTYPES.get(name, name) for name in details.types or []]
    shape, size = describe_tensors([each for each in dims if isinstance(each, list)], dtypes)
    group = str(details.group or only)
    listed = groups.get(group, TracedGroup("", ()))
    label, ranks = str(details.described or listed.label), _read_ranks(details.ranks) or listed.ranks
    number = details.number if isinstance(details.number, int) else None
    begin = (event.ts - first) * 1e-6
    return TracedCollective(op, group, label, ranks, number, begin, begin + event.dur * 1e-6, shape, size)


def _name_collective(event: str, named: Any) -> str | None:
    """Return `all_reduce` for torch's and NCCL's names of it; None for a transfer."""
    if isinstance(named, str):
        name = named
    else:
        found = _OF_BACKEND.search(event)
        name = (found[1] or found[2]) if found else ""
    plain = name.lower().replace("_", "").removesuffix("base").removesuffix("coalesced").removesuffix("coal")
    if plain in ("", "send", "recv", "sendrecv") or plain.startswith(("send", "recv")):
        return None
    return _COLLECTIVES.get(plain, name)


def _read_ranks(given: Any) -> tuple[int, ...]:
    """Return the ranks of a list, or of its text, which torch shortens where it is long; then ()."""
    if isinstance(given, str):
        given = _parse_list(given)
    return tuple(given) if isinstance(given, list) and all(isinstance(rank, int) for rank in given) else ()


def _parse_list(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _read_place(about: Any) -> tuple[int | None, int | None]:
    """Return the rank and the size of the world. Some tools have made a text of the field."""
    if isinstance(about, dict):
        rank, size = about.get("rank"), about.get("world_size")
        return rank if isinstance(rank, int) else None, size if isinstance(size, int) else None
    found = [_IN_TEXT[name].search(str(about)) for name in ("rank", "world_size")]
    rank, size = (int(each[1]) if each else None for each in found)
    return rank, size


def _read_groups(about: Any) -> dict[str, TracedGroup]:
    groups = about.get("pg_config") if isinstance(about, dict) else None
    listed = groups if isinstance(groups, list) else []
    return {
        str(group.get("pg_name")): TracedGroup(str(group.get("pg_desc") or ""), _read_ranks(group.get("ranks")))
        for group in listed
        if isinstance(group, dict)
    }
