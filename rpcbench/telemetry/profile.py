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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rpcbench.base.errors import RpcError, count_noun, format_bytes
from rpcbench.base.futures import Future
from rpcbench.base.ids import Counter
from rpcbench.cells.targets import ALL
from rpcbench.pipeline.timeline import TRACK, TraceEvent
from rpcbench.runtime import current as agents
from rpcbench.runtime import operator_profile
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.operator_columns import Operator
from rpcbench.runtime.operator_profile import MemberProfile, measured_allocations
from rpcbench.simulation.hardware import Hardware
from rpcbench.simulation.hardware import hardware as find_hardware
from rpcbench.telemetry.collector import Collector
from rpcbench.telemetry.message_views import clock_of
from rpcbench.telemetry.profile_groups import GroupPart, list_parts, tabulate_groups
from rpcbench.telemetry.profile_modules import tabulate_modules
from rpcbench.telemetry.profile_tables import (
    Members,
    ProfileTable,
    compare_tables,
    format_busy,
    format_growth,
    format_seconds,
    format_sums,
    measure_utilization,
    tabulate_kinds,
    tabulate_operators,
    tabulate_workers,
)
from rpcbench.telemetry.recording import save_text
from rpcbench.telemetry.stragglers import describe_stragglers
from rpcbench.telemetry.trace import CollectiveTimeline, Trace, chrome_trace, trace
from rpcbench.telemetry.views import World

BEGIN_SECONDS = 60.0  # in which a member must begin its profile
END_SECONDS = 300.0  # in which it must end it: torch needs this time for some million operators
SHOWN = 15
"""Rows of a table that is displayed or printed with its profile."""
_FIRST_TRACK = TRACK + 1
_MB = 1_000_000  # bytes


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

    name_parts = "torch.profiler.record_function names parts"
    """The sources of names of parts of the model, which a table says of the rest."""

    def table(self, by: str = "operator", depth: int = 4) -> ProfileTable:
        """Return the sums of all operators.

        Args:
            by: `operator`: a row for each operator, with its calls, its own time (without the operators that it
                called) on each member, its time, and the bytes that it and those that it called have allocated, if the
                profile was asked for them. `worker`: a row for each member, with its calls, the own time of all its
                operators, how busy it was (that time on its CPU, of all threads, in one second of the block), and the
                resident memory of its process, where it is known: at the end, the peak, and the growth. `kind`: a row
                for each member, with the seconds in which it computed, communicated, did both, copied memory, or
                nothing, as Holistic Trace Analysis defines them: those of its accelerator, else of its threads.
                `group`: a row for each process group (dimension of a mesh) of each member, with its collectives that
                have ended, their bytes, their seconds, and those of them in which the member computed nothing.
                `module`: a row for each part of the model, that is for each module within another one and for each
                annotation, with its time on threads, of it what no part within it has, the time of the backward
                operators of its forward operators, and the communication of both; on GPUs the time of kernels, too.
            depth: For `module`: how many parts within each other are shown.

        Returns:
            A table to display or print; its `rows` have times in seconds, memory in bytes.

        Raises:
            ValueError: There is no such table, or no such depth.
        """
        if by == "module":
            return tabulate_modules(self.members, depth, self.name_parts)
        if by not in _TABLES:
            raise ValueError(f"a profile has tables by {', '.join(_TABLES)} or module, not by {by!r}")
        return _TABLES[by](self)

    def compare(self, before: Profile, by: str = "operator") -> ProfileTable:
        """Return what takes longer here than in an earlier profile, the mean of all members.

        Args:
            before: The earlier profile; it may have other members.
            by: `operator`: own times of operators. `kind`: computation, communication, copies, idle.

        Returns:
            A table whose `rows` have `before`, `after` and `longer`, in seconds; what grew most comes first.

        Raises:
            ValueError: There is no such comparison, or one of the two has no members.
        """
        return compare_tables(self.members, before.members, by)

    def mfu(self, hardware: Hardware | str, dtype: str = "bfloat16") -> dict[str, float]:
        """Return the model FLOPs utilization of each member: the share of the peak that its operators reached.

        Counted are matrix products, convolutions and attention, of forward and backward passes, recomputation included,
        over the whole span of the profile.

        Args:
            hardware: A description, or its name, as `rpcbench.hardware` has it.
            dtype: The type of the numbers, whose peak is taken.

        Raises:
            ValueError: No shapes are known: traces have them with `record_shapes=True`. Or there is no such hardware.
            KeyError: The hardware has no peak for this type.
        """
        described = find_hardware(hardware) if isinstance(hardware, str) else hardware
        return measure_utilization(self.members, described.peak_flops(dtype))

    @property
    def collectives(self) -> CollectiveTimeline:
        """The timeline of the collectives, with the members that came last."""
        return self._seen.collectives

    def list_parts(self) -> Mapping[str, Sequence[GroupPart]]:
        """Return the parts of collectives of each member, by its name."""
        return list_parts(self.world)

    def explain(self) -> str:
        """Return the members that kept the others waiting in collectives, and the operators that take longer there."""
        return describe_stragglers(self.collectives, self.members) or "No member kept others waiting in collectives."

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
        reasons: dict[str, list[str]] = {}
        for name, why in self.missing.items():
            reasons.setdefault(why, []).append(name)
        gone = [f"{_list_names(names)} missing: {why}" for why, names in reasons.items()]
        cut = [
            f"the file that .save() writes lacks {count_noun(n, 'operator')} of {name}, the shortest"
            for name, n in self.left_out.items()
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
        rows = {row["worker"]: row for row in self.table(by="worker").rows}
        shown = [rows[name] for name in self.members if name in rows]
        busy = ", ".join(f"{row['worker']} {format_busy(row)}" for row in shown)
        peaks = ", ".join(
            f"{row['worker']} {format_bytes(row['peak'])} ({format_growth(row['peak'] - row['before'])})"
            for row in shown
        )
        found = [f"Wall time {format_seconds(self.seconds)}. In operators: {busy}." if shown else ""]
        found.append(f"Peak resident memory (growth): {peaks}." if shown else "")
        return [line for line in found if line]

    def _summary_parts(self) -> tuple[ProfileTable, list[str]]:
        """Return the longest operators, and the lines below them."""
        table = self.table()
        others = table.rows[SHOWN:]
        rest = []
        if others:
            rest = [f"… and {count_noun(len(others), 'more operator')}: {format_sums(others)}, in .table()"]
        if not table.rows:
            rest = ["no operator of torch ran"]
        return table.keep_first(SHOWN), [*rest, *self.notes]


_TABLES: dict[str, Callable[[Profile], ProfileTable]] = {
    "operator": lambda made: tabulate_operators(made.members),
    "worker": lambda made: tabulate_workers(made.members, made.seconds),
    "kind": lambda made: tabulate_kinds(made.members),
    "group": lambda made: tabulate_groups(made.members, made.list_parts()),
}
_LEGEND = (
    "self: time without the operators that it called, with what it waits for; total: with them. share: of the self "
    "time of all. Threads and workers add up: over 100 % several ran at once. Python between operators is in none. "
    "Resident memory has pages that other processes share, too; memory in the workers panel leaves these out."
)


_NAMED = 4  # members that a note names


def _list_names(names: Sequence[str]) -> str:
    """Return `rank 1 is`, or `rank 1, rank 2 and 30 others are`."""
    more = len(names) - _NAMED
    shown = [*names[:_NAMED], *([f"{more} others" if more > 1 else names[-1]] if more > 0 else [])]
    return f"{', '.join(shown[:-1])} and {shown[-1]} are" if len(shown) > 1 else f"{shown[0]} is"


def _track_ids(operators: Iterable[Operator]) -> dict[str, int]:
    """Return the ids of the tracks, by name."""
    return {name: n for n, name in enumerate(sorted({one.track for one in operators}), _FIRST_TRACK)}


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
