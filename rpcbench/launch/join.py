"""Workers that others have started, as a notebook sees them which has joined their world: see `torchrun_worker`.

Guarantees
- The notebook dials each worker as it joins, so none needs to reach the notebook's host.
- It may leave and come again, under its name and with a new life; its workers keep what they hold. While one is there,
  another one is refused, with words.
- How a worker ended is told in its own last words, or as far as the connection tells.
"""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rpcbench.base.conditions import Changes
from rpcbench.base.config import DEFAULT_THREADS, DEFAULT_TIMEOUT, NOTEBOOK, WorldConfig
from rpcbench.base.errors import IncompleteWorldError, RefusedError, RpcError, UnknownWorkerError
from rpcbench.base.futures import wait_all
from rpcbench.cells.client import Rerun
from rpcbench.cells.worker_main import STOP, Place, meet
from rpcbench.launch.base_cluster import START_SECONDS, BaseCluster
from rpcbench.launch.status import Launched, Started, Watched
from rpcbench.launch.torchrun_worker import ENDS, KILL, size_of_world
from rpcbench.rpc import init
from rpcbench.rpc.agent import RpcAgent
from rpcbench.rpc.init import join
from rpcbench.rpc.options import TensorPipeRpcBackendOptions
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import GONE, WorkerInfo
from rpcbench.serialization.tensor_types import Name
from rpcbench.transport.hosts import host_id

JOIN_SECONDS = 10.0
_KILL_SECONDS = 10.0
_OBITUARY_SECONDS = 0.5


class Joined(BaseCluster):
    """The workers of `torchrun … -m rpcbench.worker`, at the address that they show. Leave by `shutdown()`, or use it
    in a `with` block; the workers stay.

    rpc_timeout, device_maps, same_modes: as of `Cluster`, for calls of this process. timeout: seconds to wait for the
    workers. ValueError for what is no address, RpcError where none answer, another notebook has joined them, or a
    secret is missing.
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
            raise ValueError(f"{url!r} is no address of workers; write it as they show it: tcp://HOST:PORT")
        config = init.meet_at(NOTEBOOK, url, 0, None, rpc_timeout, DEFAULT_THREADS)
        config = TensorPipeRpcBackendOptions(device_maps=device_maps, same_modes=same_modes)._completed(config)
        self.url = url
        self._ended: dict[str, str] = {}  # why they say that they end
        self._lost: dict[str, str] = {}
        self._news = Changes()
        self._members: dict[str, WorkerInfo] = {}
        self._places: dict[str, Place] = {}
        self.agent = self._join(config, timeout)
        try:
            self._meet(timeout)
        except BaseException:
            self.shutdown()
            raise
        self.agent.owner = self
        self.agent.roster.expected = lambda: list(self._members)
        Launched(self.agent, self._started)
        self.agent.ready.set()
        atexit.register(self.shutdown)

    def _join(self, config: WorldConfig, timeout: float) -> RpcAgent:
        try:
            held = replace(config, held=True)
            return join(held, False, time.monotonic() + timeout, parts=[self._listen])
        except IncompleteWorldError as error:
            raise RpcError(
                f"no workers answer at {self.url}: is this the address that `torchrun … -m rpcbench.worker` has shown, "
                f"and does it run still, for this user? ({error})"
            ) from error
        except RefusedError as error:
            raise RpcError(
                f"another notebook has joined the workers at {self.url}, and there can be one at a time: that one "
                f"leaves by %cluster stop ({error})"
            ) from error

    def _listen(self, agent: Agent) -> None:
        """From the beginning on, before anything can come."""
        agent.roster.explain = self._obituary
        agent.on_notice(ENDS, lambda source, why: self._ends(agent.roster.name(source), why))
        agent.on_member(self._changed)

    def _meet(self, timeout: float) -> None:
        """Wait until all are there, and have a connection to each."""
        agent = self.agent
        leader = agent.machine.ask(lambda node: node.members.leader)
        size = agent.call(leader, size_of_world, own=True, timeout=timeout).wait_or_cancel()
        agent.wait_for(size + 1, timeout)
        self._members = {info.name: info for info in agent.members() if info.id}
        told = [agent.call(name, meet, (size + 1,), timeout=START_SECONDS, own=True) for name in self._members]
        self._places = dict(zip(self._members, wait_all(told), strict=True))

    def _ends(self, name: str, why: str) -> None:
        self._ended[name] = why
        self._news.tell()

    def _obituary(self, name: str, reason: str) -> str:
        """Why a worker's connection ended: what it has said of that may come a moment later."""
        self._news.wait_for(lambda: name in self._ended, _OBITUARY_SECONDS)
        return self._ended.get(name, reason)

    def _changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        if kind in GONE:
            self._lost[who.name] = self._ended.get(who.name, reason)

    # -- members
    @property
    def inseparable(self) -> str:
        return "torchrun has started these workers, and only it starts more, or them again: run it anew, and join again"

    @property
    def over(self) -> bool:
        return self.agent.closing.is_set()

    @property
    def lost(self) -> list[str]:
        serve = self.workers
        return [name for name in self._members if name not in serve]

    def watched(self) -> list[Watched]:
        calls = Counter(self.agent.machine.ask(lambda node: [call.to for call in node.calls.outgoing.values()]))
        return [
            Watched(name, 0, self._places[name], self._ending(name), calls[info.id])
            for name, info in self._members.items()
        ]

    def pid(self, name: str) -> int:
        """Process id of a worker, on its host."""
        return self._place(name).pid

    def log(self, name: str) -> str:
        self._place(name)
        raise RpcError(f"torchrun has started {name}: what it writes outside cells is where torchrun writes it")

    # -- changes
    def scale(self, n: int) -> None:
        raise RpcError(self.inseparable)

    def restart(self, name: str, *, replay: bool = False) -> list[Rerun]:
        self._place(name)
        raise RpcError(self.inseparable)

    def interrupt(self, name: str) -> None:
        self._place(name)
        if name in self.workers:
            self.agent.notify(self._members[name].id, STOP, None)

    def kill(self, name: str) -> None:
        """End a worker at once, as a crash would (SIGKILL), and wait until it is known to be lost. torchrun then ends
        the others."""
        self._place(name)
        if name in self.workers:
            self.agent.notify(self._members[name].id, KILL, None)
        if not self.agent.roster.wait_until(lambda: name in self.lost, _KILL_SECONDS):
            raise RpcError(f"waited {_KILL_SECONDS:g} s in vain for the end of {name}")

    def shutdown(self) -> None:
        """Leave the world; the workers stay. Idempotent."""
        atexit.unregister(self.shutdown)
        self.agent.shutdown(graceful=False)

    def __repr__(self) -> str:
        if not self.agent.running:
            return f"<workers at {self.url}: left>"
        lost = f"; lost: {', '.join(self.lost)}" if self.lost else ""
        return f"<workers at {self.url}: {', '.join(self.workers) or 'none'}{lost}>"

    def _ending(self, name: str) -> str:
        """How it ended; empty while it serves."""
        return "" if name in self.workers else self._lost.get(name, "has ended")

    def _started(self) -> list[Started]:
        """Those of this host, and those that are lost: of others the system here knows nothing."""
        return [
            Started(info.id, name, self._places[name], 0, self._ending(name), "")
            for name, info in self._members.items()
            if self._places[name].host == host_id() or self._ending(name)
        ]

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise UnknownWorkerError.of(name, self._places)
        return self._places[name]
