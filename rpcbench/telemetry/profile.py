"""Profiles of members (`with profile("all") as p:`): torch's operators, memory and messages of a block, on one clock.

Guarantees
- Each member profiles itself (`runtime/operator_profile.py`), also while it runs a cell; all times are then on the
  clock of this process, as those of messages are.
- A member that is lost, or whose profile fails, is named in `missing`, and the result has the others.
- A process has one profile at a time. A block that ends in any way ends the profiles of all its members.
- Sums count all operators. The file for Perfetto has the longest of each member, and `left_out` counts the others.
"""

from __future__ import annotations

import html
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rpcbench.base.errors import RpcError, count_noun
from rpcbench.base.futures import Future
from rpcbench.base.ids import Counter
from rpcbench.cells.targets import ALL
from rpcbench.launch.status import html_table, text_table
from rpcbench.pipeline.timeline import TRACK, TraceEvent
from rpcbench.runtime import current as agents
from rpcbench.runtime import operator_profile
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.operator_profile import CPU, MemberProfile, Operator
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

    def __init__(self, rows: list[dict[str, Any]], cells: list[tuple[str, ...]]) -> None:
        self.rows = rows
        self._cells = cells  # the head first

    def __repr__(self) -> str:
        return text_table(self._cells)

    def _repr_html_(self) -> str:
        return html_table("Profile", self._cells)


class Profile:
    """A profile of members, complete when its block has ended; displayed or printed it shows its longest operators.

    `members`: the profiles by name of the member. `missing`: the reasons why others have none, by name. `left_out`: the
    number of operators that the file does not have, by name. `complete`: whether no member is missing, and all have
    reported all of their messages. `world`: the tables of the block, as panels read them; empty until it has ended.
    """

    def __init__(self, seen: Trace) -> None:
        self.members: Members = {}
        self.missing: dict[str, str] = {}
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
                called) on each member, and its time. `worker`: a row for each member, with its calls, the own time of
                all its operators, and the memory of its process: at the end, the peak, and the growth.

        Returns:
            A table to display or print; its `rows` have times in seconds, memory in bytes.

        Raises:
            ValueError: There is no such table.
        """
        if by not in _TABLES:
            raise ValueError(f"a profile has tables by {' and by '.join(_TABLES)}, not by {by!r}")
        return _TABLES[by](self.members)

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
        return "\n".join([repr(table), *below])

    def _repr_html_(self) -> str:
        table, below = self._summary_parts()
        return table._repr_html_() + "".join(f"<p>{html.escape(line)}</p>" for line in below)

    def _summary_parts(self) -> tuple[ProfileTable, list[str]]:
        """Return the longest operators, and the lines below them."""
        table = self.table()
        more = len(table.rows) - SHOWN
        rest = [f"… and {count_noun(more, 'more operator')} in .table()"] if more > 0 else []
        if not table.rows:
            rest = ["no operator of torch ran"]
        return ProfileTable(table.rows[:SHOWN], table._cells[: SHOWN + 1]), [*rest, *self.notes]


def _track_ids(operators: Iterable[Operator]) -> dict[str, int]:
    """Return the ids of the tracks, by name."""
    return {name: n for n, name in enumerate(sorted({one.track for one in operators}), _FIRST_TRACK)}


def _by_operator(members: Members) -> ProfileTable:
    rows_by_operator: dict[tuple[str, str], dict[str, Any]] = {}
    for name, member_profile in members.items():
        for operator_sum in member_profile.sums:
            new_row = {
                "operator": operator_sum.name,
                "device": operator_sum.device,
                "calls": 0,
                "self": 0.0,
                "total": 0.0,
                "workers": {},
            }
            row = rows_by_operator.setdefault((operator_sum.name, operator_sum.device), new_row)
            row["calls"] += operator_sum.calls
            row["self"] += operator_sum.own
            row["total"] += operator_sum.seconds
            row["workers"][name] = operator_sum.own
    rows = sorted(rows_by_operator.values(), key=lambda row: (-row["self"], row["operator"]))
    device_seconds = {row["device"]: 0.0 for row in rows}
    for row in rows:
        device_seconds[row["device"]] += row["self"]
    has_devices = any(row["device"] != CPU for row in rows)
    member_names = [*members] if len(members) > 1 else []
    head = ("operator", *["on"] * has_devices, "calls", "self", "share", "total", *member_names)
    return ProfileTable(
        rows, [head, *(_operator_cells(row, device_seconds[row["device"]], member_names, has_devices) for row in rows)]
    )


def _operator_cells(row: dict[str, Any], whole: float, each: Sequence[str], device: bool) -> tuple[str, ...]:
    share = f"{row['self'] / whole:.1%}" if whole else ""
    on = [row["device"]] if device else []
    parts = [_format_ms(row["workers"][name]) if name in row["workers"] else "" for name in each]
    return row["operator"], *on, str(row["calls"]), _format_ms(row["self"]), share, _format_ms(row["total"]), *parts


def _by_worker(members: Members) -> ProfileTable:
    rows: list[dict[str, Any]] = []
    for name, one in members.items():
        own: dict[str, float] = defaultdict(float, {CPU: 0.0})
        for sum_ in one.sums:
            own[sum_.device] += sum_.own
        sizes = [memory["process"] for _, memory in one.memory]
        used = {"memory": sizes[-1], "peak": max(sizes), "growth": sizes[-1] - sizes[0]}
        rows.append({"worker": name, "calls": sum(sum_.calls for sum_ in one.sums), "self": dict(own), **used})
    rows.sort(key=lambda row: -row["self"][CPU])
    devices = list(dict.fromkeys(device for row in rows for device in row["self"]))
    head = ("worker", "calls", *(f"self, {device}" for device in devices), "memory", "peak", "growth")
    return ProfileTable(rows, [head, *(_worker_cells(row, devices) for row in rows)])


def _worker_cells(row: dict[str, Any], devices: Sequence[str]) -> tuple[str, ...]:
    own = [_format_ms(row["self"].get(device, 0.0)) for device in devices]
    sizes = f"{row['memory'] / _MB:.1f} MB", f"{row['peak'] / _MB:.1f} MB", f"{row['growth'] / _MB:+.1f} MB"
    return row["worker"], str(row["calls"]), *own, *sizes


_TABLES: dict[str, Callable[[Members], ProfileTable]] = {"operator": _by_operator, "worker": _by_worker}


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


class MemberProfilers:
    """The profilers of members, on behalf of this one. One for each agent: `agent.part(MemberProfilers)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._busy = threading.Lock()  # held for the block of a profile
        self._numbers = Counter()

    @contextmanager
    def profile_members(self, names: Sequence[str], made: Profile) -> Iterator[None]:
        """Profile these members in a block, and put their profiles, or the reasons of those missing, into `made`."""
        if not self._busy.acquire(blocking=False):
            raise RpcError(f"{self._agent.name} profiles already: end that block before another profile begins")
        number = self._numbers.next()
        try:
            for error in self._call_members(operator_profile.begin_profile, names, number, BEGIN_SECONDS).values():
                if isinstance(error, Exception):
                    raise error
            yield
        finally:  # also where a member did not begin, or Ctrl-C came: none may go on
            try:
                for name, found in self._call_members(operator_profile.end_profile, names, number, END_SECONDS).items():
                    if isinstance(found, Exception):
                        made.missing[name] = str(found)
                    else:
                        made.members[name] = found
            finally:
                self._busy.release()

    def _call_members(
        self, do: Callable[[int, int], Any], names: Sequence[str], number: int, seconds: float
    ) -> dict[str, Any]:
        """Let members begin or end their profile, all at once; return the result or the error of each."""
        args = self._agent.id, number
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
def profile(*members: str) -> Iterator[Profile]:
    """Profile members in a block: torch's operators on all their threads, their memory, and all messages.

    Args:
        *members: Names of members, or `all`, the default: all workers and this process, the notebook.

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
        with agent.part(MemberProfilers).profile_members(names, made):
            yield made
