"""Profiles of members (`with profile("all") as p:`): torch's operators, memory and messages of a block, on one clock.

Guarantees
- Each member profiles itself (`runtime/operator_profile.py`), also while it runs a cell; all times are then on the
  clock of this process, as those of messages are.
- A member that is lost, or whose profile fails, is named in `missing`, and the result has the others.
- A process has one profile at a time. A block that ends in any way ends the profiles of all its members.
- Sums count all operators. The file for Perfetto has the longest of each member, and `left_out` counts the others.
- A table says what its times are. Text and HTML have the same columns; in HTML a bar shows the share of the time.
"""

from __future__ import annotations

import html
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rpcbench.base.errors import RpcError, count_noun, format_bytes
from rpcbench.base.futures import Future
from rpcbench.base.ids import Counter
from rpcbench.cells.targets import ALL
from rpcbench.launch.status import text_table
from rpcbench.pipeline.timeline import TRACK, TraceEvent
from rpcbench.runtime import current as agents
from rpcbench.runtime import operator_profile
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.operator_profile import CPU, MemberProfile, Operator, measured_allocations
from rpcbench.telemetry.collector import Collector
from rpcbench.telemetry.message_views import clock_of
from rpcbench.telemetry.recording import save_text
from rpcbench.telemetry.trace import Trace, chrome_trace, trace
from rpcbench.telemetry.views import World

BEGIN_SECONDS = 60.0  # in which a member must begin its profile
END_SECONDS = 300.0  # in which it must end it: torch needs this time for some million operators
SHOWN = 15
"""Rows of a table that is displayed or printed with its profile."""
_FIRST_TRACK = TRACK + 1
Members = dict[str, MemberProfile]
_MB = 1 << 20


class ProfileTable:
    """A table of a profile, displayed or printed: `rows` are dicts, with seconds and bytes, the largest sum first."""

    def __init__(self, rows: list[dict[str, Any]], cells: list[tuple[str, ...]], shares: list[float]) -> None:
        self.rows = rows
        self._cells = cells  # the head first
        self._shares = shares  # of each row, from 0 to 1: the length of its bar

    def keep_first(self, count: int) -> ProfileTable:
        """Return the table with these first rows alone."""
        return ProfileTable(self.rows[:count], self._cells[: count + 1], self._shares[:count])

    def __repr__(self) -> str:
        return text_table(self._cells)

    def _repr_html_(self) -> str:
        (name, *head), *rows = self._cells
        heads = f'<th style="text-align:left">{html.escape(name)}</th><th></th>' + "".join(
            f"<th>{html.escape(cell)}</th>" for cell in head
        )
        body = "".join(_html_row(row, share) for row, share in zip(rows, self._shares, strict=True))
        return (
            '<div style="overflow-x:auto"><table style="margin:0;font-variant-numeric:tabular-nums">'
            f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        )


_BAR_PIXELS = 80


def _html_row(cells: Sequence[str], share: float) -> str:
    # Styles stand at the elements, as pages that sanitize outputs drop a style sheet. The colour suits both themes.
    width = min(1.0, max(0.0, share)) * _BAR_PIXELS
    bar = f'<div style="width:{width:.1f}px;height:0.7em;border-radius:2px;background:#4a86e8"></div>'
    name, *others = map(html.escape, cells)
    name_style = "text-align:left;max-width:28em;overflow-wrap:anywhere"
    first = f'<td style="{name_style}">{name}</td><td style="min-width:{_BAR_PIXELS}px">{bar}</td>'
    return f"<tr>{first}{''.join(f'<td style=white-space:nowrap>{cell}</td>' for cell in others)}</tr>"


class Profile:
    """A profile of members, complete when its block has ended; displayed or printed it shows its longest operators.

    `members`: the profiles by name of the member. `missing`: the reasons why others have none, by name. `left_out`: the
    number of operators that the file does not have, by name. `complete`: whether no member is missing, and all have
    reported all of their messages. `world`: the tables of the block, as panels read them; empty until it has ended.
    `seconds`: the wall time of the block, without the beginning and the end of the profile; 0 until it has ended.
    """

    def __init__(self, seen: Trace) -> None:
        self.members: Members = {}
        self.missing: dict[str, str] = {}
        self.seconds = 0.0
        self._seen = seen  # the messages of the block

    @property
    def world(self) -> World:
        return self._seen.world

    @property
    def complete(self) -> bool:
        return self._seen.complete and not self.missing

    @property
    def left_out(self) -> dict[str, int]:
        return {name: one.left_out for name, one in self.members.items() if one.left_out}

    def table(self, by: str = "operator") -> ProfileTable:
        """Return the sums of all operators.

        Args:
            by: `operator`: a row for each operator, with its calls, its own time (without the operators that it
                called) on each member, its time, and the bytes that it and those that it called have allocated, if the
                profile was asked for them. `worker`: a row for each member, with its calls, the own time of all its
                operators, how busy it was (that time on its CPU, of all threads, in one second of the block), and the
                memory of its process: at the end, the peak, and the growth.

        Returns:
            A table to display or print; its `rows` have times in seconds, memory in bytes.

        Raises:
            ValueError: There is no such table.
        """
        if by not in _TABLES:
            raise ValueError(f"a profile has tables by {' and by '.join(_TABLES)}, not by {by!r}")
        return _TABLES[by](self)

    def trace(self) -> dict[str, Any]:
        """Return the profile as data for JSON, in Chrome's trace event format, with messages and collectives."""
        ids = {member["name"]: id_ for id_, member in self.world.items()}
        tracks = {ids[name]: _track_ids(one.operators) for name, one in self.members.items()}
        events = [event for name, one in self.members.items() for event in self._member_events(ids[name], one)]
        names = {id_: {track: name for name, track in each.items()} for id_, each in tracks.items()}
        made = chrome_trace(self.world, events, names)
        made["otherData"] |= {"operators_left_out": self.left_out, "missing": self.missing}
        return made

    def save(self, path: str | Path) -> Path:
        """Write it for ui.perfetto.dev and chrome://tracing, and return its path.

        A member is a process, with a track for each thread that ran operators, one for its memory, and those of
        `rpcbench.trace`: calls, collectives, pipeline operations, messages.
        """
        return save_text(path, json.dumps(self.trace()))

    def _member_events(self, id_: int, one: MemberProfile) -> Iterator[TraceEvent]:
        ahead, tracks = clock_of(self.world[id_]).ahead, _track_ids(one.operators)
        for n, op in enumerate(one.operators):
            about = {"name": op.name, "cat": "operators", "pid": id_, "tid": tracks[op.track]}
            begin = op.begin - ahead
            if op.alone:
                yield {"ph": "X", **about, "ts": begin, "dur": op.seconds}
            else:  # slices of one track must be nested
                yield {"ph": "b", **about, "id": f"operator {id_} {n}", "ts": begin}
                yield {"ph": "e", **about, "id": f"operator {id_} {n}", "ts": begin + op.seconds}
        for when, memory in one.memory:
            used = {f"{name} (MB)": round(size / _MB, 3) for name, size in memory.items()}
            yield {"ph": "C", "name": "memory", "pid": id_, "tid": 0, "ts": when - ahead, "args": used}

    @property
    def notes(self) -> list[str]:
        """Sentences: the members that are missing, and the operators that the file does not have."""
        gone = [f"{name} is missing: {why}" for name, why in self.missing.items()]
        cut = [
            f"the file lacks {count_noun(n, 'operator')} of {name}, the shortest" for name, n in self.left_out.items()
        ]
        return gone + cut

    def __repr__(self) -> str:
        table, below = self._summary_parts()
        return "\n".join([*self.head, repr(table), *below, *([_LEGEND] if table.rows else [])])

    def _repr_html_(self) -> str:
        table, below = self._summary_parts()
        head = "".join(f"<div>{html.escape(line)}</div>" for line in self.head)
        legend = f'<p style="opacity:0.75">{html.escape(_LEGEND)}</p>' if table.rows else ""
        shown = table._repr_html_() if table.rows else ""
        return head + shown + "".join(f"<p>{html.escape(line)}</p>" for line in below) + legend

    @property
    def head(self) -> list[str]:
        """Sentences: the wall time, how busy each member was in it, and the peak of its memory."""
        rows = {row["worker"]: row for row in _by_worker(self).rows}
        shown = [rows[name] for name in self.members if name in rows]
        busy = ", ".join(f"{row['worker']} {_format_busy(row)}" for row in shown)
        peaks = ", ".join(
            f"{row['worker']} {format_bytes(row['peak'])} ({_format_growth(row['peak'] - row['before'])})"
            for row in shown
        )
        found = [f"Wall time {_format_seconds(self.seconds)}. In operators: {busy}." if shown else ""]
        found.append(f"Peak memory (growth): {peaks}." if shown else "")
        return [line for line in found if line]

    def _summary_parts(self) -> tuple[ProfileTable, list[str]]:
        """Return the longest operators, and the lines below them."""
        table = self.table()
        others = table.rows[SHOWN:]
        rest = []
        if others:
            rest = [f"… and {count_noun(len(others), 'more operator')}: {_format_sums(others)}, in .table()"]
        if not table.rows:
            rest = ["no operator of torch ran"]
        return table.keep_first(SHOWN), [*rest, *self.notes]


_LEGEND = (
    "self: time without the operators that it called, with what it waits for; total: with them. share: of the self "
    "time of all. Threads and workers add up: over 100 % several ran at once. Python between operators is in none."
)


def _track_ids(operators: Iterable[Operator]) -> dict[str, int]:
    """Return the ids of the tracks, by name."""
    return {name: n for n, name in enumerate(sorted({one.track for one in operators}), _FIRST_TRACK)}


def _by_operator(made: Profile) -> ProfileTable:
    members = made.members
    rows = _sum_over_members(members)
    device_seconds = {row["device"]: 0.0 for row in rows}
    for row in rows:
        device_seconds[row["device"]] += row["self"]
    has_devices = any(row["device"] != CPU for row in rows)
    has_bytes = any(one.allocated is not None for one in members.values())
    member_names = [*members] if len(members) > 1 else []
    optional = ["on"] * has_devices, ["allocated"] * has_bytes
    cells = [("operator", *optional[0], "calls", "self", "share", "total", *optional[1], *member_names)]
    shares = []
    for row in rows:
        share = row["self"] / device_seconds[row["device"]] if device_seconds[row["device"]] else None
        shares.append(share or 0.0)
        on = [row["device"]] if has_devices else []
        times = _format_ms(row["self"]), "" if share is None else f"{share:.1%}", _format_ms(row["total"])
        size = [] if not has_bytes else ["" if row["allocated"] is None else format_bytes(row["allocated"])]
        parts = [_format_ms(row["workers"][name]) if name in row["workers"] else "" for name in member_names]
        cells.append((row["operator"], *on, str(row["calls"]), *times, *size, *parts))
    return ProfileTable(rows, cells, shares)


def _sum_over_members(members: Members) -> list[dict[str, Any]]:
    rows_by_operator: dict[tuple[str, str], dict[str, Any]] = {}
    for name, member_profile in members.items():
        for operator_sum in member_profile.sums:
            new_row = {
                "operator": operator_sum.name,
                "device": operator_sum.device,
                "calls": 0,
                "self": 0.0,
                "total": 0.0,
                "allocated": None,  # unknown
                "workers": {},
            }
            row = rows_by_operator.setdefault((operator_sum.name, operator_sum.device), new_row)
            row["calls"] += operator_sum.calls
            row["self"] += operator_sum.own
            row["total"] += operator_sum.seconds
            row["workers"][name] = operator_sum.own
            size = (member_profile.allocated or {}).get(operator_sum.name)
            if size is not None and operator_sum.device == CPU:  # where it was called, also for bytes of a GPU
                row["allocated"] = (row["allocated"] or 0) + size
    return sorted(rows_by_operator.values(), key=lambda row: (-row["self"], row["operator"]))


def _by_worker(made: Profile) -> ProfileTable:
    rows: list[dict[str, Any]] = []
    for name, one in made.members.items():
        own: dict[str, float] = defaultdict(float, {CPU: 0.0})
        for sum_ in one.sums:
            own[sum_.device] += sum_.own
        sizes = [memory["process"] for _, memory in one.memory]
        used = {"memory": sizes[-1], "peak": max(sizes), "growth": sizes[-1] - sizes[0], "before": sizes[0]}
        busy = {device: seconds / made.seconds for device, seconds in own.items()} if made.seconds else {}
        calls = sum(sum_.calls for sum_ in one.sums)
        rows.append({"worker": name, "calls": calls, "self": dict(own), "busy": busy, **used})
    rows.sort(key=lambda row: -row["self"][CPU])
    devices = list(dict.fromkeys(device for row in rows for device in row["self"]))
    head = ("worker", "calls", *(f"self, {device}" for device in devices), "busy", "memory", "peak", "growth")
    most = max([1.0, *(row["busy"].get(CPU, 0.0) for row in rows)])
    shares = [row["busy"].get(CPU, 0.0) / most for row in rows]
    return ProfileTable(rows, [head, *(_worker_cells(row, devices) for row in rows)], shares)


def _worker_cells(row: dict[str, Any], devices: Sequence[str]) -> tuple[str, ...]:
    own = [_format_ms(row["self"].get(device, 0.0)) for device in devices]
    sizes = format_bytes(row["memory"]), format_bytes(row["peak"]), _format_growth(row["growth"])
    return row["worker"], str(row["calls"]), *own, _format_busy(row), *sizes


def _format_busy(row: dict[str, Any]) -> str:
    """Return `62 %`, or `62 %, CUDA 34 %`; a question mark while the wall time is unknown."""
    parts = [f"{'' if device == CPU else f'{device} '}{share * 100:.0f} %" for device, share in row["busy"].items()]
    return ", ".join(parts) or "?"


def _format_growth(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"


def _format_sums(rows: Sequence[dict[str, Any]]) -> str:
    """Return the sum of the own time of rows: `5.000 ms`, with that of each other device."""
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        sums[row["device"]] += row["self"]
    return ", ".join(f"{'' if device == CPU else f'{device} '}{_format_ms(sums[device])}" for device in sums)


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else _format_ms(seconds)


_TABLES: dict[str, Callable[[Profile], ProfileTable]] = {"operator": _by_operator, "worker": _by_worker}


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


class MemberProfilers:
    """The profilers of members, on behalf of this one. One for each agent: `agent.part(MemberProfilers)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._busy = threading.Lock()  # held for the block of a profile
        self._numbers = Counter()

    @contextmanager
    def profile_members(self, names: Sequence[str], made: Profile, allocations: bool) -> Iterator[None]:
        """Profile these members in a block, and put their profiles, or the reasons of those missing, into `made`."""
        if not self._busy.acquire(blocking=False):
            raise RpcError(f"{self._agent.name} profiles already: end that block before another profile begins")
        number = self._numbers.next()
        try:
            begun = self._call_members(operator_profile.begin_profile, names, (number, allocations), BEGIN_SECONDS)
            for error in begun.values():
                if isinstance(error, Exception):
                    raise error
            began = time.monotonic()
            try:
                with measured_allocations(self._agent):
                    yield
            finally:
                made.seconds = time.monotonic() - began
        finally:  # also where a member did not begin, or Ctrl-C came: none may go on
            try:
                for name, found in self._call_members(
                    operator_profile.end_profile, names, (number,), END_SECONDS
                ).items():
                    if isinstance(found, Exception):
                        made.missing[name] = str(found)
                    else:
                        made.members[name] = found
            finally:
                self._busy.release()

    def _call_members(
        self, do: Callable[..., Any], names: Sequence[str], more: Sequence[Any], seconds: float
    ) -> dict[str, Any]:
        """Let members begin or end their profile, all at once; return the result or the error of each."""
        args = self._agent.id, *more
        call = partial(self._agent.call, function=do, args=args, timeout=seconds, label="the profile", own=True)
        started_calls = {name: _result_or_error(partial(call, name)) for name in names}
        return {
            name: _result_or_error(one.wait) if isinstance(one, Future) else one for name, one in started_calls.items()
        }


def _result_or_error(result: Callable[[], Any]) -> Any:
    try:
        return result()
    except Exception as error:  # noqa: BLE001  (any error of a member: the profiles of the others are kept)
        return error


@contextmanager
def profile(*members: str, memory: bool = False) -> Iterator[Profile]:
    """Profile members in a block: torch's operators on all their threads, their memory, and all messages.

    Args:
        *members: Names of members, or `all`, the default: all workers and this process, the notebook.
        memory: Also count the bytes that each operator allocates, in the thread of this block, and in cells and calls
            that begin and end within it. Each operator then takes about half as long again as in a profile without
            (0.7 µs more, measured), so it is an option; the memory of the processes is always there.

    Yields:
        The profile: displayed it shows the longest operators. `p.table(by="worker")` sums by member, and
        `p.save("profile.json")` writes a file for ui.perfetto.dev, with the messages, pipeline operations and
        collectives of all members on the same clock.

    Raises:
        UnknownWorkerError: There is no member of a name; WorkerLostError: it is lost.
        RpcError: A profile of this process, or of one of the members, runs already.
        RuntimeError: RPC is not initialized.

    Example:
        >>> with rpcbench.profile("all") as p:
        ...     _ = cluster.run("worker1", "import torch; torch.ones(64, 64) @ torch.ones(64, 64)")
        >>> [row["operator"] for row in p.table().rows if "mm" in row["operator"]]
        ['aten::mm']
        >>> p.complete, [*p.members]
        (True, ['notebook', 'worker1', 'worker2'])
    """
    agent = agents.current_agent()
    chosen = {agent.member(name) for name in members if name != ALL}
    if not members or ALL in members:
        chosen |= {*agent.members()}
    names = [info.name for info in sorted(chosen, key=lambda info: info.id)]
    with trace(agent.part(Collector)) as seen:
        made = Profile(seen)
        with agent.part(MemberProfilers).profile_members(names, made, memory):
            yield made
