"""What runs in a worker process: it serves calls on pool threads and cells on the main thread, until the world ends.

A worker that may be on another host than the notebook (`remote_main`) finds out where it is. On the notebook's host it
meets the others in their directory, by unix sockets; elsewhere it has one of its own, and is found on the interface
that leads to the notebook, or on RPCBENCH_BIND. It ends within seconds of its world, also while a cell runs: behind a
cut cable nothing reaches it, or the command that has started it, for hours.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rpcbench.base.config import WorldConfig
from rpcbench.cells.runner import CellRunner
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.transport import hosts
from rpcbench.transport.hosts import host_id
from rpcbench.transport.run_dir import RunDirectory

LEAVE = "leave"
"""The notice that asks a worker to leave."""
STOP = "stop"
"""The notice that interrupts what its main thread runs, as SIGINT would that no process of another host can send."""


SPARE_SECONDS = 1.0
"""So much later than `stop_seconds` a worker ends itself: the cluster gives up on it first, and says so."""


class Place(NamedTuple):
    """Where a worker is: the identity of its host, the host's name, and its process there."""

    host: str
    hostname: str
    pid: int


def main(config: WorldConfig, alone: bool = False) -> None:
    """Join the world and work in it; returns when it ends or this worker is asked to leave. `alone`: nobody may be left
    to end this process then, so it ends itself, with a cell that runs on."""
    agent = start_agent(config, parts=[CellRunner, obey])
    runner = agent.part(CellRunner)
    seconds = config.stop_seconds if alone else None
    threading.Thread(target=_end, args=(agent, runner, seconds), name="rpcbench-end", daemon=True).start()
    runner.serve()
    agent.shutdown(graceful=False)


def meet(count: int) -> Place:
    """Called on a worker: wait until it has heard of as many members; word of some may still be on its way there."""
    current.current().wait_for(count)
    return Place(host_id(), socket.gethostname(), os.getpid())


def _end(agent: Agent, runner: CellRunner, seconds: float | None) -> None:
    """Free the main thread once the world is over; a cell that runs on is ended with the process, by its starter or,
    after so many seconds, here."""
    agent.closing.wait()
    runner.stop()
    if seconds is not None:
        time.sleep(seconds + SPARE_SECONDS)  # until the main thread has ended, or is given up
        os._exit(1)


def obey(agent: Agent) -> None:
    """Leave when asked to, which may be as soon as this worker is in; be interrupted when asked to."""
    agent.on_notice(LEAVE, lambda source, _: agent.closing.set())
    agent.on_notice(STOP, lambda source, _: agent.part(CellRunner).rouse())


def remote_main(config: WorldConfig) -> None:
    """As `worker.main`. RpcError where no interface of this host leads to the notebook."""
    with settled_config(config) as here:
        main(here, alone=True)


@contextlib.contextmanager
def settled_config(config: WorldConfig) -> Iterator[WorldConfig]:
    """The configuration with what only this host knows; its directory goes at the end of the block."""
    here = replace(
        config, remote=hosts.address_towards(config.leader.removeprefix("tls://")), bind=hosts.bind_address()
    )
    if here.host == host_id():
        yield here
        return
    directory = RunDirectory()
    try:
        yield replace(here, directory=str(directory.path), host=host_id())
    finally:
        directory.remove()
