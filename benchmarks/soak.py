"""The soak: many calls and many shared RRefs on three workers, and whether memory and tables are as they were before.

Work comes in equal rounds. After each all must be quiet: then no table may hold a row, and memory is read, after a
garbage collection. What counts is the last third of the rounds: a leak goes on at its pace, while caches have filled.
Two things that look like leaks are kept out of it
- The program runs without the caches that glibc's malloc keeps for each thread: they fill for hours, as now and then a
  thread takes some size for the first time.
- Memory is counted whether or not it is still shared with the process that the worker was forked from: a page of that
  becomes the worker's own when a count of references in it changes, and nothing has grown.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from typing import NamedTuple

import psutil
from rich.table import Table

from rpcbench.base.errors import RpcError
from rpcbench.base.futures import wait_all
from rpcbench.launch.cluster import Cluster
from rpcbench.rpc import RRef, rpc_async
from rpcbench.runtime import current

WORKERS = 3
_AT_ONCE = 100
_QUIET_SECONDS = 30.0
_NO_CACHES = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"
SLACK = 1 << 19
"""Bytes that a process may grow by in the last third: less than if each of 30,000 calls left a small object behind."""


class Plan(NamedTuple):
    """How much work, over how many rounds."""

    calls: int = 100_000
    rrefs: int = 10_000
    rounds: int = 10


class Reading(NamedTuple):
    """One process when all is quiet: bytes of memory that are not files, and rows of its tables."""

    own: int
    rows: int


def without_caches() -> None:
    """Begin this program anew, with a malloc that keeps nothing for its threads, unless it has one already."""
    if platform.libc_ver()[0] == "glibc" and _NO_CACHES not in os.environ.get("GLIBC_TUNABLES", ""):
        tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), _NO_CACHES)))
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": tunables})


def soak(plan: Plan) -> list[dict[str, Reading]]:
    """The readings of all processes after each round, by name. RpcError where it does not become quiet."""
    readings = []
    with Cluster(WORKERS) as cluster:
        for _ in range(plan.rounds):
            _call(cluster, plan.calls // plan.rounds)
            _share(cluster, plan.rrefs // plan.rounds)
            readings.append(_read(cluster))
    return readings


def _call(cluster: Cluster, count: int) -> None:
    """Each worker in turn; one call in ten calls on to the next worker."""
    names = cluster.workers
    for begin in range(0, count, _AT_ONCE):
        here, there = names[begin // _AT_ONCE % len(names)], names[(begin // _AT_ONCE + 1) % len(names)]
        many = min(_AT_ONCE, count - begin)
        onward = [cluster.rpc_async(here, _pass_on, (there, number)) for number in range(many // 10)]
        direct = [cluster.rpc_async(here, max, (number, 0)) for number in range(many - len(onward))]
        wait_all(onward + direct)


def _pass_on(to: str, number: int) -> int:
    found: int = rpc_async(to, max, (number, 0)).wait()
    return found


def _share(cluster: Cluster, count: int) -> None:
    """Each value is made on one worker, and used by the two others."""
    names = cluster.workers
    for begin in range(0, count, _AT_ONCE):
        owner = names[begin // _AT_ONCE % len(names)]
        rrefs = [cluster.remote(owner, list, ((n,),)) for n in range(min(_AT_ONCE, count - begin))]
        wait_all([cluster.rpc_async(name, _use, (rrefs,)) for name in names if name != owner])


def _use(rrefs: list[RRef[list[int]]]) -> int:
    return len(wait_all([rref.to_here_async() for rref in rrefs[:10]]))


def _read(cluster: Cluster) -> dict[str, Reading]:
    """All processes, as soon as no table holds anything."""
    until = time.monotonic() + _QUIET_SECONDS
    while True:
        found = {cluster.agent.name: _reading()}
        found |= {name: cluster.rpc_sync(name, _reading) for name in cluster.workers}
        busy = {name: reading.rows for name, reading in found.items() if reading.rows}
        if not busy:
            return found
        if time.monotonic() > until:
            raise RpcError(f"rows that do not go: {busy}")
        time.sleep(0.05)  # goodbyes of RRefs are on their way, and nothing announces the last one


def _reading() -> Reading:
    gc.collect()
    agent = current.current_agent()
    mine = agent.machine.read_node(lambda node: len(node.calls.serving) - (agent.id != 0))  # less the call that asks
    return Reading(_memory(), mine + sum(len(table) for table in agent.tables().values()))


def _memory() -> int:
    process = psutil.Process()
    memory = process.memory_info()
    shared: int | None = getattr(memory, "shared", None)  # Linux has it: files and shared memory
    own: int = process.memory_full_info().uss if shared is None else memory.rss - shared
    return own


def growth(readings: list[dict[str, Reading]]) -> dict[str, int]:
    """Bytes that each process has grown by in the last third of the rounds."""
    return {name: readings[-1][name].own - readings[-1 - len(readings) // 3][name].own for name in readings[-1]}


def as_table(readings: list[dict[str, Reading]], plan: Plan) -> Table:
    """Memory after each round, one column for each process; and at what pace it still grew in the end."""
    table = Table(title="memory after each round in MB")
    table.add_column("round", justify="right")
    for name in readings[-1]:
        table.add_column(name, justify="right")
    for number, found in enumerate(readings, 1):
        table.add_row(str(number), *(f"{reading.own / 2**20:.2f}" for reading in found.values()))
    late = plan.calls * (len(readings) // 3) / len(readings)
    pace = [more / 2**20 / late * 10_000 if late else 0.0 for more in growth(readings).values()]
    table.add_row("late, in 10,000 calls", *(f"{each:+.3f}" for each in pace))
    return table
