"""The agent as torch.distributed.rpc.RpcAgent: what programs that ask for the current agent may call on it."""

from __future__ import annotations

import functools
import time
from typing import cast

import torch

from rpcbench.protocol.node import Node
from rpcbench.runtime import current, server
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import WorkerInfo
from rpcbench.wire.messages import Call, Create, Fetch

__all__ = ["RpcAgent"]


class RpcAgent(Agent):
    """An agent with torch's names for what it knows. Figures are strings, as torch's."""

    _profiles_gil = False
    _gil_waits = (0, 0.0)

    @property
    def is_static_group(self) -> bool:
        """Whether the world has a fixed size."""
        return self.config.world_size is not None

    def get_worker_info(self, worker_name: str | int | None = None) -> WorkerInfo:
        """Name and id of a member, this one by default. UnknownWorkerError, WorkerLostError."""
        return WorkerInfo(self.name, self.id) if worker_name is None else self.member(worker_name)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All members, by id."""
        return self.members()

    def _get_device_map(self, dst: WorkerInfo) -> dict[torch.device, torch.device]:
        """The device here and the device there, for calls of a worker."""
        return dict(self.values.routes.to(dst.id, False).targets)

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait, `timeout` seconds at most (0: without end), until no call of this member is in flight."""
        self.pending.settle(timeout or None)

    def sync(self) -> None:
        """Does nothing: a call that was made has been handed to the transport."""

    def get_metrics(self) -> dict[str, str]:
        """Threads and calls: `agent.thread_pool_size`, `agent.num_idle_threads`, `agent.*_active_calls`."""
        served, called = self.machine.ask(_calls)
        metrics = {
            "agent.thread_pool_size": self._pool.limit,
            "agent.num_idle_threads": max(0, self._pool.limit - self._pool.busy),
            "agent.client_active_calls": called,
            "agent.server_active_calls": served,
            "agent.server_active_async_calls": len(self.asynchronous),
        }
        if self._profiles_gil:
            waits, seconds = self._gil_waits
            metrics["agent.gil_average_wait_time_us"] = round(seconds / max(1, waits) * 1e6)
        return {name: str(value) for name, value in metrics.items()}

    def get_debug_info(self) -> dict[str, str]:
        """As `get_metrics`."""
        return self.get_metrics()

    def enable_gil_profiling(self, flag: bool) -> None:
        """Measure, for each call served, how long its thread waits for Python's lock; the mean is among the metrics."""
        self._profiles_gil = flag
        self._arrivals.run = self._timed if flag else functools.partial(server.serve, self)
        self._gil_waits = (0, 0.0)

    def _timed(self, source: int, message: Call | Create | Fetch) -> None:
        began = time.perf_counter()
        time.sleep(0)  # gives the lock up, and takes it again
        waits, seconds = self._gil_waits
        self._gil_waits = (waits + 1, seconds + time.perf_counter() - began)
        server.serve(self, source, message)


def _calls(node: Node) -> tuple[int, int]:
    return len(node.calls.serving), len(node.calls.outgoing)


def _get_current_rpc_agent() -> RpcAgent:
    """The agent that `rpc_sync` and its like speak through. RuntimeError where there is none."""
    return cast(RpcAgent, current.current())
