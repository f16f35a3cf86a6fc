"""The main function of a worker process: it serves calls on pool threads and cells on the main thread.

A worker that a command starts, perhaps on another host (`remote_main`), determines its location. On the notebook's host
it uses the world's directory and unix sockets. Elsewhere it has a directory of its own, and listens on the interface
with a route to the notebook, or on RPCBENCH_BIND. It ends within seconds of its world, even while a cell runs: after a
network failure no process could end it, or the command that started it, for hours.

At the signal `STACKS_SIGNAL` each worker writes the stacks of its threads to a file (`StackDump`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rpcbench.base.config import WorldConfig
from rpcbench.cells.runner import CellRunner
from rpcbench.launch.environment import versions
from rpcbench.launch.torch_on_workers import adapt_torch
from rpcbench.pipeline.torch_schedules import record_torch_pipelines
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import current, gpus
from rpcbench.runtime.agent import Agent
from rpcbench.transport import hosts
from rpcbench.transport.hosts import host_id
from rpcbench.transport.run_dir import RunDirectory

LEAVE = "leave"
"""The notice that requests a worker to leave."""
STOP = "stop"
"""The notice that interrupts a worker's main thread. A process of another host cannot send it a SIGINT."""

STACKS_SIGNAL = signal.SIGRTMIN + 4 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""The signal at which a worker writes the stacks of its threads: one that programs and libraries hardly use."""

SPARE_SECONDS = 1.0
"""How long after `stop_seconds` a worker ends itself: the cluster gives up on it first, and reports that."""


class WorkerLocation(NamedTuple):
    """The location of a worker process."""

    host: str  # identity, see `transport.hosts.host_id`
    hostname: str
    pid: int
    gpu: gpus.Gpu | None = None  # its own, without figures; None if CUDA shows it none, or several
    versions: Mapping[str, str] | None = None  # of Python and packages; see `launch.environment`


def main(config: WorldConfig, alone: bool = False) -> None:
    """Join the world and serve it until it ends or this worker is asked to leave."""
    # `alone`: no other process may be able to end this one then, so it ends itself, even while a cell runs.
    agent = start_agent(config, parts=[CellRunner, register_handlers])
    runner = agent.part(CellRunner)
    seconds = config.stop_seconds if alone else None
    threading.Thread(target=_end_with_world, args=(agent, runner, seconds), name="rpcbench-end", daemon=True).start()
    runner.serve_cells()
    agent.shutdown(graceful=False)


def await_members(count: int) -> WorkerLocation:
    """Wait until this worker's view has `count` members, and return its location. Called through RPC."""
    current.current_agent().wait_for(count)
    return WorkerLocation(host_id(), socket.gethostname(), os.getpid(), gpus.own_gpu(), versions())


def _end_with_world(agent: Agent, runner: CellRunner, seconds: float | None) -> None:
    """Free the main thread once the world has ended; end the process after `seconds` if a cell still runs."""
    agent.links.closing.wait()
    runner.stop_serving()
    if seconds is not None:
        time.sleep(seconds + SPARE_SECONDS)  # the process ends meanwhile if the main thread does
        os._exit(1)  # not sys.exit, which would wait for the main thread


def register_handlers(agent: Agent) -> None:
    """Register the handlers of LEAVE, STOP and STACKS_SIGNAL, and adapt torch; before the agent starts, as LEAVE may
    arrive at once."""
    agent.on_notice(LEAVE, lambda source, _: agent.links.closing.set())
    agent.on_notice(STOP, lambda source, _: agent.part(CellRunner).interrupt_main_thread())
    agent.part(StackDump)
    adapt_torch()
    record_torch_pipelines()


class StackDump:
    """The handler of STACKS_SIGNAL, until the agent ends: that of faulthandler. It is C, so it also works while other
    code holds Python's lock."""

    def __init__(self, agent: Agent) -> None:
        self._path = stacks_file(agent.config.directory, agent.name)
        self._file = self._path.open("wb")  # the directory is private to this user
        chain = callable(signal.getsignal(STACKS_SIGNAL))  # a handler of the user's runs as well
        faulthandler.register(STACKS_SIGNAL, self._file, all_threads=True, chain=chain)
        agent.hooks.on_end.append(self._remove_handler)

    def _remove_handler(self) -> None:
        faulthandler.unregister(STACKS_SIGNAL)
        self._file.close()
        self._path.unlink(missing_ok=True)


def stacks_file(directory: str, worker: str) -> Path:
    """Return the file in the world's directory to which a worker of this host writes the stacks of its threads."""
    return Path(directory, f"{worker}.stacks")


def remote_main(config: WorldConfig) -> None:
    """Like `main`, on any host. Raises RpcError if no interface of this host has a route to the notebook."""
    with complete_config(config) as here:
        main(here, alone=True)


@contextlib.contextmanager
def complete_config(config: WorldConfig) -> Iterator[WorldConfig]:
    """Complete the configuration with this host's addresses and directory; remove the directory at the end."""
    here = replace(
        config, remote=hosts.address_towards(config.leader.removeprefix("tls://")), bind=hosts.bind_address()
    )
    if hosts.is_shared(here.host, here.directory):
        yield here
        return
    directory = RunDirectory()
    try:
        yield replace(here, directory=str(directory.path), host=host_id())
    finally:
        directory.remove_directory()
