"""A cluster of workers that others started, for a notebook that joins their world: see `torchrun_worker`.

Guarantees
- The notebook connects to each worker when it joins, so no worker needs to reach the notebook's host.
- The notebook may leave and join again, under its name as a new incarnation; workers keep their values. While one is
  attached, another one is refused with a message.
- The end of a worker is reported with the reason that the worker sent, else with that of its connection.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rpcbench.base.conditions import Condition
from rpcbench.base.config import DEFAULT_THREADS, DEFAULT_TIMEOUT, NOTEBOOK, START_SECONDS, WorldConfig
from rpcbench.base.errors import IncompleteWorldError, RefusedError, RpcError, UnknownWorkerError
from rpcbench.base.futures import wait_all
from rpcbench.cells.cell_log import CellLog
from rpcbench.cells.client import CellClient
from rpcbench.cells.history import Rerun
from rpcbench.launch.base import ARRIVAL
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.launch.environment import warn_of_differences
from rpcbench.launch.status import LaunchedTable, WorkerRecord
from rpcbench.launch.torchrun_worker import ENDS, KILL, torchrun_world_size
from rpcbench.launch.worker_main import STOP, WorkerLocation, await_members
from rpcbench.rpc import init
from rpcbench.rpc.agent import RpcAgent
from rpcbench.rpc.init import join_open_world
from rpcbench.rpc.options import TensorPipeRpcBackendOptions
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import GONE, LaunchRecords, WorkerInfo
from rpcbench.serialization.tensor_types import Name
from rpcbench.transport.hosts import host_id
from rpcbench.transport.run_dir import RunDirectory

JOIN_SECONDS = 10.0  # for the workers to answer
_LEAST_SECONDS = 0.01  # of a timeout: 0 would mean no limit
_KILL_SECONDS = 10.0  # for a killed worker to count as lost
_OBITUARY_SECONDS = 0.5  # for the reason that a worker sends to arrive, after its connection has ended


class AttachedCluster(BaseCluster):
    """The workers of `torchrun … -m rpcbench.worker`, which stay after `shutdown()` or the end of a `with` block.

    Args:
        url: The address that the workers print, "tcp://HOST:PORT".
        rpc_timeout, device_maps, same_modes: As of `Cluster`, for calls of this process.
        timeout: Seconds to wait for the workers.

    Raises:
        ValueError: `url` is malformed.
        RpcError: No workers answer, another notebook has joined them, or a secret is missing.
    """

    kind = "joined"
    farewell = "This notebook has left its workers; they stay until torchrun ends."

    def __init__(
        self,
        url: str,
        *,
        rpc_timeout: float = DEFAULT_TIMEOUT,
        device_maps: Mapping[str, Mapping[Any, Name]] | None = None,
        same_modes: bool = False,
        timeout: float = JOIN_SECONDS,
    ) -> None:
        super().__init__()
        if not url.startswith("tcp://"):
            raise ValueError(f"{url!r} is not an address of workers; write it as they print it: tcp://HOST:PORT")
        config = init.resolve_config(NOTEBOOK, url, 0, None, rpc_timeout, DEFAULT_THREADS)
        config = TensorPipeRpcBackendOptions(device_maps=device_maps, same_modes=same_modes)._complete_config(config)
        self.url = url
        self._run_directory = RunDirectory()  # the workers have theirs
        self.directory = self._run_directory.path
        self._ended: dict[str, str] = {}  # by name: the reason that a worker sent
        self._lost: dict[str, str] = {}  # by name: why it was lost
        self._changes = Condition()  # notified of changes of `_ended`
        self._members: dict[str, WorkerInfo] = {}
        self._places: dict[str, WorkerLocation] = {}
        deadline = time.monotonic() + timeout
        self.agent = self._join_world(config, deadline)
        try:
            self._await_workers(deadline)
            self.agent.owner = self
            self.agent.ending = "this notebook has left the cluster while this ran"
            self.agent.part(CellClient)  # on this thread, whose cell has the output of calls
            self.agent.part(CellLog)
            # of this host, which has no data of other processes, and lost ones
            shown = lambda: [one for one in self.watched() if one.place.host == host_id() or one.lost]  # noqa: E731
            LaunchedTable(self.agent, shown, lambda name: "")
            self.agent.links.bootstrap.ready.set()
            self._answer_questions()
        except BaseException:
            self.shutdown()
            raise
        atexit.register(self.shutdown)

    def _join_world(self, config: WorldConfig, deadline: float) -> RpcAgent:
        try:
            records = LaunchRecords(self._loss_reason, lambda: list(self._members))
            held = replace(config, held=True)  # calls of workers wait until `__init__` sets `ready`
            return join_open_world(held, False, deadline, parts=[self._add_listeners], records=records)
        except IncompleteWorldError as error:
            raise RpcError(
                f"no workers answer at {self.url}: check that `torchrun … -m rpcbench.worker` printed this address "
                f"and still runs, as this user ({error})"
            ) from error
        except RefusedError as error:
            raise RpcError(
                f"another notebook has joined the workers at {self.url}, and only one can at a time: run %cluster stop "
                f"there ({error})"
            ) from error

    def _add_listeners(self, agent: Agent) -> None:  # a part of the agent: it exists before the first message arrives
        agent.on_notice(ENDS, lambda source, why: self._reason_received(agent.links.members.member_name(source), why))
        agent.on_member(self._member_changed)

    def _await_workers(self, deadline: float) -> None:
        """Wait until all workers have joined and are connected, and get their locations."""

        def left() -> float:
            return max(_LEAST_SECONDS, deadline - time.monotonic())

        agent = self.agent
        leader = agent.machine.read_node(lambda node: node.members.leader)
        size = agent.call(leader, torchrun_world_size, label=ARRIVAL, own=True, timeout=left()).wait_or_cancel()
        agent.wait_for(size + 1, left())
        self._members = {info.name: info for info in agent.members() if info.id}
        location_calls = [
            agent.call(name, await_members, (size + 1,), timeout=START_SECONDS, label=ARRIVAL, own=True)
            for name in self._members
        ]
        self._places = dict(zip(self._members, wait_all(location_calls), strict=True))
        found = {name: place.versions for name, place in self._places.items()}
        warn_of_differences(found, but=("torch", "cloudpickle"))  # connections of such worlds have told of these

    def _reason_received(self, name: str, why: str) -> None:
        self._ended[name] = why
        self._changes.notify_all()

    def _loss_reason(self, name: str, reason: str) -> str:
        """Return why a worker was lost: the reason that it sent, which may arrive a moment later, else `reason`."""
        self._changes.wait_for(lambda: name in self._ended, _OBITUARY_SECONDS)
        return self._ended.get(name, reason)

    def _member_changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        if kind in GONE:
            self._lost[who.name] = self._ended.get(who.name, reason)

    # -- members
    @property
    def inseparable(self) -> str:
        return "torchrun has started these workers and cannot start more, or restart one: run it again, then join again"

    @property
    def over(self) -> bool:
        return self.agent.links.closing.is_set()

    @property
    def lost(self) -> list[str]:
        serve = self.workers
        return [name for name in self._members if name not in serve]

    def watched(self) -> list[WorkerRecord]:
        calls = self._count_calls()
        return [
            WorkerRecord(info.id, name, 0, self._places[name], self._describe_loss(name), calls[info.id])
            for name, info in self._members.items()
        ]

    def pid(self, name: str) -> int:
        """Return the process id of a worker, on its host."""
        return self._location_of_worker(name).pid

    def log(self, name: str) -> str:
        self._location_of_worker(name)
        raise RpcError(f"torchrun has started {name}: its output outside cells goes to torchrun's output")

    def find_log(self, name: str) -> Path:
        raise RpcError(f"torchrun has started {name}: its output outside cells goes to torchrun's output")

    # -- changes
    def scale(self, n: int) -> None:
        raise RpcError(self.inseparable)

    def restart(self, name: str, *, replay: bool = False) -> list[Rerun]:
        self._location_of_worker(name)
        raise RpcError(self.inseparable)

    def _interrupt_worker(self, name: str) -> None:
        self._location_of_worker(name)
        if name in self.workers:
            self.agent.notify(self._members[name].id, STOP, None)

    def kill(self, name: str) -> None:
        """End a worker at once (SIGKILL), and wait until it counts as lost; torchrun then ends the others."""
        self._location_of_worker(name)
        if name in self.workers:
            self.agent.notify(self._members[name].id, KILL, None)
        if not self.agent.links.members.wait_until_reached(lambda: name in self.lost, _KILL_SECONDS):
            raise RpcError(f"timed out after {_KILL_SECONDS:g} s waiting for the end of {name}")

    def shutdown(self) -> None:
        """Leave the world; the workers stay. Idempotent."""
        atexit.unregister(self.shutdown)
        self.agent.shutdown(graceful=False)
        self._run_directory.remove_directory()

    def __repr__(self) -> str:
        if not self.agent.running:
            return f"<workers at {self.url}: left>"
        lost = f"; lost: {', '.join(self.lost)}" if self.lost else ""
        return f"<workers at {self.url}: {', '.join(self.workers) or 'none'}{lost}>"

    def _describe_loss(self, name: str) -> str:
        """Return how a worker ended; empty while it serves."""
        return "" if name in self.workers else self._lost.get(name, "has ended")

    def _location_of_worker(self, name: str) -> WorkerLocation:
        if name not in self._places:
            raise UnknownWorkerError.of(name, self._places)
        return self._places[name]
