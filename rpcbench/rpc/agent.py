"""The agent with the methods of torch.distributed.rpc.RpcAgent, for programs that use the current agent."""

from __future__ import annotations

import functools
import time
from typing import cast

import torch

from rpcbench.runtime import current, server
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import WorkerInfo
from rpcbench.wire.messages import Call, Create, Fetch

__all__ = ["RpcAgent"]


class RpcAgent(Agent):
    """An agent with torch's names for its figures. Figures are strings, as in torch."""

    _profiles_gil = False
    _gil_waits = (0, 0.0)  # calls, sum of seconds

    @property
    def is_static_group(self) -> bool:
        """Return whether the world has a fixed size."""
        return self.config.world_size is not None

    def get_worker_info(self, worker_name: str | int | None = None) -> WorkerInfo:
        """Return name and id of a member, by default of this one. Raises UnknownWorkerError, WorkerLostError."""
        return WorkerInfo(self.name, self.id) if worker_name is None else self.member(worker_name)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return all members, in order of their ids."""
        return self.members()

    def _get_device_map(self, dst: WorkerInfo) -> dict[torch.device, torch.device]:
        """Return the device map for calls of a worker: device here -> device there."""
        return dict(self.calls.values.routes.route_to(dst.id, False).targets)

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no call of this member is in flight.

        Args:
            shutdown: Ignored, as `shutdown()` of the module leaves the world.
            timeout: Seconds; 0 for no limit.
        """
        self.calls.pending.settle(timeout or None)

    def sync(self) -> None:
        """Do nothing: a call that was made has been handed to the transport."""

    def get_metrics(self) -> dict[str, str]:
        """Return counts of threads and calls: `agent.thread_pool_size`, `agent.num_idle_threads`, `*_active_calls`."""
        served, called = self.machine.read_node(lambda node: (len(node.calls.serving), len(node.calls.outgoing)))
        metrics = {
            "agent.thread_pool_size": self.calls.pool.limit,
            "agent.num_idle_threads": max(0, self.calls.pool.limit - self.calls.pool.busy),
            "agent.client_active_calls": called,
            "agent.server_active_calls": served,
            "agent.server_active_async_calls": len(self.calls.asynchronous),
        }
        if self._profiles_gil:
            waits, seconds = self._gil_waits
            metrics["agent.gil_average_wait_time_us"] = round(seconds / max(1, waits) * 1e6)
        return {name: str(value) for name, value in metrics.items()}

    def get_debug_info(self) -> dict[str, str]:
        """Return the same as `get_metrics`."""
        return self.get_metrics()

    def enable_gil_profiling(self, flag: bool) -> None:
        """Measure for each served call how long its thread waits for the GIL; `get_metrics` then has the mean."""
        self._profiles_gil = flag
        # Swapped, not tested in each call: a call that is not profiled pays nothing.
        self.dispatcher.run = self._serve_timed if flag else functools.partial(server.serve_request, self)
        self._gil_waits = (0, 0.0)

    def _serve_timed(self, source: int, message: Call | Create | Fetch) -> None:
        began = time.perf_counter()
        time.sleep(0)  # releases the GIL and takes it again
        waits, seconds = self._gil_waits  # no lock: a lost update changes the mean of a profile a little
        self._gil_waits = (waits + 1, seconds + time.perf_counter() - began)
        server.serve_request(self, source, message)


def _get_current_rpc_agent() -> RpcAgent:
    """Return the agent that `rpc_sync` and the other functions use. Raises RuntimeError where there is none."""
    return cast(RpcAgent, current.current_agent())
