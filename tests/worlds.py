"""Worlds for tests: several real agents in this one process, over real sockets."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import rpcbench
from rpcbench.base.config import WorldConfig
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.transport.stream import StreamConnection

SECRET = secrets.token_bytes(32)
PATIENCE = 60.0
"""Seconds: only what hangs takes as long, also on a machine that is busy with much else."""


def config(directory: Path, number: int, **changes: Any) -> WorldConfig:
    name = "notebook" if number == 0 else f"worker{number}"
    fields: dict[str, Any] = {"cluster": "test", "directory": str(directory), "secret": SECRET, "threads": 4}
    return WorldConfig(**{"name": name, "id": number, **fields, **changes})


@contextlib.contextmanager
def world(directory: Path, count: int, **changes: Any) -> Iterator[list[Agent]]:
    """Start `count` agents that know each other; agent 0 is the current one."""
    with _world([config(directory, number, **changes) for number in range(count)]) as agents:
        yield agents


@contextlib.contextmanager
def mapped(directory: Path, *maps: dict[str, dict[str, str]]) -> Iterator[list[Agent]]:
    """Start one agent for each of these device maps."""
    with _world([config(directory, number, device_maps=each) for number, each in enumerate(maps)]) as agents:
        yield agents


@contextlib.contextmanager
def _world(configs: list[WorldConfig]) -> Iterator[list[Agent]]:
    agents: list[Agent] = []
    try:
        for each in configs:
            agents.append(start_agent(each))
        until(lambda: all(len(agent.members()) == len(configs) for agent in agents))
        with current.use_agent(agents[0]):
            yield list(agents)  # a test may remove the agents that it ends itself
    finally:
        for agent in reversed(agents):
            agent.stop()


def cluster_fixture(
    size: int, scope: Literal["function", "module"] = "module", kinds: list[Any] | None = None, **options: Any
) -> Any:
    """A fixture for the file that names it: a cluster of `size` workers, one after another of each of these kinds."""

    @pytest.fixture(scope=scope, params=kinds)
    def cluster(request: pytest.FixtureRequest) -> Iterator[rpcbench.Cluster]:
        kind = {"kind": request.param} if kinds else {}
        with rpcbench.Cluster(size, **kind, **options) as made:
            yield made

    return cluster


def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Wait for a condition that other threads fulfil; fail instead of hanging."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s in vain for {what}"
        time.sleep(0.005)


def stop(pid: int) -> None:
    """Stop a process. The signal reaches its threads one by one; when this returns, none of them runs."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: {_state(task) for task in Path(f"/proc/{pid}/task").iterdir()} == {"T"}, f"process {pid} to stop")


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""  # this thread has just ended


def nothing_left(agents: list[Agent]) -> None:
    """Wait until no RRef, context or call is left in any agent; fail with the rows that are."""
    deadline = time.monotonic() + PATIENCE
    while rows := left(agents):
        assert time.monotonic() < deadline, f"after {PATIENCE:g} s still there: {rows}"
        time.sleep(0.02)


def until_quiet(agents: list[Agent]) -> None:
    """Wait until all tables are empty, and no message is kept for retransmission or missing."""
    nothing_left(agents)
    until(
        lambda: not any(agent.machine.read_node(lambda node: node.delivery.describe_unfinished()) for agent in agents),
        "the last words",
    )


def left(agents: list[Agent]) -> dict[str, Any]:
    """The rows that are left in tables, by agent."""
    gc.collect()
    tables = {agent.name: {n: rows for n, rows in agent.tables().items() if rows} for agent in agents}
    for own in tables.values():
        for history in ("ops", "steps", "collectives", "jobs", "cells"):
            own.pop(history, None)
        # Rows of released contexts stay for panels.
        if not any(row.get("ended") is None for row in own.get("graphs", {}).values()):
            own.pop("graphs", None)
    for agent in agents:
        if channels := agent.calls.parcels.open_channels():
            tables[agent.name]["listens"] = channels
    return {name: rows for name, rows in tables.items() if rows}


def address_of(agent: Agent) -> str:
    """The address of an agent for members on its host."""
    return agent.machine.read_node(lambda node: node.members.me.address)


@contextlib.contextmanager
def far_world(directory: Path, count: int, **changes: Any) -> Iterator[list[Agent]]:
    """As `world`, but each agent has a host id of its own: they connect over TLS."""
    agents: list[Agent] = []
    leader = ""
    try:
        for number in range(count):
            host = directory / f"host{number}"
            host.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RPCBENCH_HOST_ID", host.name)
                fields = {"remote": "tls://127.0.0.1:0", "leader": leader, **changes}
                agents.append(start_agent(config(host, number, **fields)))
            leader = leader or agents[0].machine.read_node(lambda node: node.members.me.remote)
        until(lambda: all(len(agent.members()) == count for agent in agents))
        with current.use_agent(agents[0]):
            yield list(agents)
    finally:
        for agent in reversed(agents):
            agent.stop()


def entries(agent: Agent, to: Agent) -> list[StreamConnection]:
    """The connections that one agent has to another."""
    return [entry.connection for entry in agent.links.peers._table.all_entries() if entry.peer.id == to.id]
