"""The soak: many calls and many shared RRefs on three workers, and whether memory and tables are as they were before.

Work comes in equal rounds. After each all must be quiet: then no table may hold a row, and memory is read, after a
garbage collection. The first rounds fill caches and pools; from the third on nothing may grow, but for `SLACK`.
"""

from __future__ import annotations

import gc
import time
from typing import NamedTuple

import psutil
from rich.table import Table

from rpcbench.agent import current
from rpcbench.launch.cluster import Cluster
from rpcbench.rpc import RRef, rpc_async
from rpcbench.words.errors import RpcError
from rpcbench.words.futures import wait_all

WORKERS = 3
_AT_ONCE = 100
_WARM = 2
_QUIET_SECONDS = 30.0
SLACK = 4 << 20
"""Bytes of unshared memory that a process may have more at the end than after the first rounds."""


class Plan(NamedTuple):
    """How much work, over how many rounds."""

    calls: int = 100_000
    rrefs: int = 10_000
    rounds: int = 10


class Reading(NamedTuple):
    """One process when all is quiet: bytes of memory, resident and its own alone; and rows of its tables."""

    rss: int
    uss: int
    rows: int


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
    agent = current.current()
    mine = agent.machine.ask(lambda node: len(node.calls.serving) - (agent.id != 0))  # less the call that asks
    memory = psutil.Process().memory_full_info()
    return Reading(memory.rss, memory.uss, mine + sum(len(table) for table in agent.tables().values()))


def growth(readings: list[dict[str, Reading]]) -> dict[str, int]:
    """Bytes of its own that each process has more at the end than after the first rounds."""
    return {name: readings[-1][name].uss - readings[min(_WARM, len(readings) - 1)][name].uss for name in readings[-1]}


def as_table(readings: list[dict[str, Reading]]) -> Table:
    """Memory after each round, one column for each process."""
    table = Table(title="memory after each round in MB: resident / its own")
    table.add_column("round", justify="right")
    for name in readings[-1]:
        table.add_column(name, justify="right")
    for number, found in enumerate(readings, 1):
        cells = [f"{reading.rss / 2**20:.1f} / {reading.uss / 2**20:.1f}" for reading in found.values()]
        table.add_row(str(number), *cells)
    table.add_row("grew", *(f"{more / 2**20:+.1f}" for more in growth(readings).values()))
    return table
