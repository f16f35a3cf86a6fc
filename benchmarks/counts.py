"""`python -m benchmarks --counts`: the cost of each deed in counts, ours beside another runtime's.

Times do not travel between machines, counts nearly do. Per deed: messages and bytes (ours alone: a trace sees them),
system calls (where strace is installed), context switches, CPU of each side, wall time; and of ours, as a profiler sees
it in Python's own threads alone, calls of Python functions and threads that take part.

- Each run has processes of its own. In a run messages, Python calls and system calls have batches of their own, since
  counting them slows a deed down. A range is that of all runs.
- Deeds of two processes are those of `workloads`; those of a whole cluster are in `cluster_deeds`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import cluster_deeds, rows
from benchmarks.deed_counts import Counters
from benchmarks.member import COUNT_CALLS
from benchmarks.pairs import BenchError, Pair, Side, pairs
from benchmarks.report import interpreter
from benchmarks.workloads import SMALL, WORKLOADS
from rpcbench.base.errors import RpcError

DEEDS = (
    SMALL, "function on two tiny tensors", "remote + to_here", "method through an RRef", "forward, d=16",
    "context + forward, d=16", "context + backward, d=16", "context + backward, d=128", "context + backward, d=512",
    "optimizer step, 6 + 6 parameters", "with a panel open",
)  # fmt: skip
"""Those of two processes, by title."""
_STRACE_SECONDS = 20.0
_TOTAL = re.compile(r"^\s*100\.00\s+\S+\s+(?:\d+\s+)?(\d+)(?:\s+\d+)?\s+total$", re.MULTILINE)


class Plan(NamedTuple):
    """`runs`, with new processes each; in a run so many `deeds` of each kind."""

    runs: int = 3
    deeds: int = 200


QUICK = Plan(runs=1, deeds=10)


@dataclass(slots=True)
class Found:
    """The counts of one deed on one side, a value for each run. A list stays empty where that cannot be counted."""

    messages: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    system_calls: list[float] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)
    cpu_here: list[float] = field(default_factory=list)
    cpu_there: list[float] = field(default_factory=list)
    python_calls: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def add_processes(self, processes: Sequence[Sequence[float]], wall: float) -> None:
        here, *others = (Counters(*one) for one in processes)
        self.switches.append(sum(one.voluntary + one.involuntary for one in (here, *others)))
        self.cpu_here.append(here.cpu)
        self.cpu_there.append(sum(one.cpu for one in others))
        self.wall.append(wall)

    def add_messages(self, messages: float, size: float) -> None:
        self.messages.append(messages)
        self.bytes.append(size)


Table = dict[str, dict[str, Found]]
"""{title of the deed: {name of the side: counts}}"""


def measure(apis: Mapping[str, str], plan: Plan, seed: int, only: Sequence[str] = ()) -> Table:
    """Count all deeds, or those with one of the texts `only` in their title, on each side (ours comes first).

    RpcError where no title has such a text; BenchError where a side cannot do its work.
    """
    known = [*DEEDS, *cluster_deeds.DEEDS]
    chosen = [title for title in known if not only or any(text in title for text in only)]
    if not chosen:
        raise RpcError("no deed has such a title; there are\n  " + "\n  ".join(known))
    found: Table = {title: {} for title in chosen}
    for _ in range(plan.runs):
        for name, module in apis.items():
            is_ours = name == next(iter(apis))
            able = [title for title in DEEDS if title in chosen and _is_able(module, title, is_ours)]
            _count_pair(found, Side(name, module), able, plan, seed, is_ours)
        _count_cluster(found, next(iter(apis)), [title for title in cluster_deeds.DEEDS if title in chosen], plan)
    return found


def _is_able(module: str, title: str, is_ours: bool) -> bool:
    work = WORKLOADS[title]
    return is_ours or (work.on == rows.BOTH and rows.does(module, work.needs))


def _count_pair(found: Table, side: Side, titles: Sequence[str], plan: Plan, seed: int, is_ours: bool) -> None:
    """Add the counts of one run of one side."""
    order = {"seed": str(seed), "deeds": plan.deeds}
    with pairs([side]) as (pair,):
        pair.thaw()
        for title in titles:
            into = found[title].setdefault(side.name, Found())
            counting = {**order, "workload": title, "count": "processes"}
            into.add_processes(**pair.send_order(counting))
            if is_ours:
                total = pair.send_order({**order, "workload": title, "count": "messages"})
                into.add_messages(total["messages"], total["bytes"])
            if shutil.which("strace"):
                into.system_calls.append(_count_system_calls(pair, counting))
    if not is_ours:  # most of its threads are not Python's, and no profiler sees their calls
        return
    with pairs([side], {COUNT_CALLS: "1"}) as (pair,):
        pair.thaw()
        for title in titles:
            into = found[title][side.name]
            reply = pair.send_order({**order, "workload": title, "count": "processes"})
            into.python_calls.append(sum(Counters(*one).python_calls for one in reply["processes"]))
            into.threads.append(sum(pair.send_order({**order, "workload": title, "count": "threads"})["threads"]))


def _count_cluster(found: Table, name: str, titles: Sequence[str], plan: Plan) -> None:
    for title, deed, total in cluster_deeds.count(titles, plan.deeds):
        into = found[title].setdefault(name, Found())
        into.add_processes(deed.processes, deed.wall)
        into.add_messages(*total)


# -- system calls
def _count_system_calls(pair: Pair, order: dict[str, Any]) -> float:
    """The system calls of both processes for one deed, as the difference of two batches: without those around them."""
    asked: int = order["deeds"]
    few, many = max(1, asked // 10), max(2, asked // 2)  # each is ten times as slow as without strace
    totals: list[int] = []
    for deeds in (few, many):
        with _traced(pair.pids) as calls:
            pair.send_order({**order, "deeds": deeds})
        totals.append(sum(calls))
    return (totals[1] - totals[0]) / (many - few)


@contextmanager
def _traced(pids: Sequence[int]) -> Iterator[list[int]]:
    """Yield a list that has the number of system calls of each process after the block."""
    calls: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(pid)) for pid in pids]
        traces = [_attach_strace(pid, file) for pid, file in zip(pids, files, strict=True)]
        try:
            yield calls
        finally:
            for trace in traces:
                trace.send_signal(signal.SIGINT)
            for trace in traces:
                trace.wait(_STRACE_SECONDS)
        calls += [_read_total(file) for file in files]


def _attach_strace(pid: int, file: Path) -> subprocess.Popen[str]:
    command = ["strace", "-f", "-c", "-U", "time-percent,total-time,avg-time,calls,errors,name", "-o", str(file)]
    english = {**os.environ, "LC_ALL": "C"}
    trace = subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE, text=True, env=english)
    assert trace.stderr is not None
    line = trace.stderr.readline()
    if "attached" not in line:
        trace.wait(_STRACE_SECONDS)
        raise BenchError(f"strace cannot attach to a process: {line.strip()}")
    return trace


def _read_total(file: Path) -> int:
    total = _TOTAL.search(text := file.read_text())
    if total is None:
        raise BenchError(f"strace has written no total: {text[-200:]}")
    return int(total[1])


# -- the table
_COLUMNS = {
    "messages": "messages", "bytes": "bytes", "system_calls": "system calls", "switches": "switches",
    "threads": "threads", "cpu_here": "CPU of the caller", "cpu_there": "CPU of the others",
    "python_calls": "Python calls", "wall": "wall time",
}  # fmt: skip
_TIMES = ("cpu_here", "cpu_there", "wall")


def as_markdown(found: Table, ours: str, theirs: str, plan: Plan) -> str:
    """A table with a line for each deed; a cell has our range, then theirs."""
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}, {interpreter()}"
    head = f"Of {plan.runs} runs of {plan.deeds} deeds, least to most, {ours} / {theirs}; {machine}."
    lines = [("deed", *_COLUMNS.values()), ("---",) * (len(_COLUMNS) + 1)]
    for title, sides in found.items():
        lines.append((title, *(_cell(sides, column, ours, theirs) for column in _COLUMNS)))
    return f"{head}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(sides: Mapping[str, Found], column: str, ours: str, theirs: str) -> str:
    both = [_range(getattr(sides[name], column), column) if name in sides else "" for name in (ours, theirs)]
    return " / ".join(part or "-" for part in both) if any(both) else ""


def _range(values: Sequence[float], column: str) -> str:
    if not values:
        return ""
    write = _write_time if column in _TIMES else _write_count
    least, most = write(min(values)), write(max(values))
    return least if least == most else f"{least} to {most}"


def _write_count(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{round(value, 1):g}"


def _write_time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def as_values(found: Table) -> dict[str, Any]:
    """All counts of all runs; times in seconds."""
    return {
        title: {name: {column: getattr(one, column) for column in _COLUMNS} for name, one in sides.items()}
        for title, sides in found.items()
    }
