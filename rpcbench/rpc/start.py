"""Puts an agent together: RRefs for its handles, distributed autograd for its recorder, and telemetry; gets it in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rpcbench.autograd.recorder import AutogradRecorder
from rpcbench.base.config import JOIN_SECONDS, WorldConfig
from rpcbench.base.errors import TurnedAwayError
from rpcbench.rpc import petition
from rpcbench.rpc.agent import RpcAgent
from rpcbench.rpc.rref import RRef
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.deadlocks import Watchdog
from rpcbench.runtime.publisher import Health, Publisher
from rpcbench.runtime.timers import keep_what_is_freed
from rpcbench.transport.base import Link


def start_agent(
    config: WorldConfig,
    link: Link | None = None,
    timeout: float = JOIN_SECONDS,
    parts: Sequence[Callable[[Agent], object]] = (),
) -> RpcAgent:
    """A started agent, with these parts, ready to serve.

    RpcError where the world does not let it in, or stays incomplete; ValueError on all members where the device maps
    of one of them are wrong.
    """
    keep_what_is_freed()
    agent = RpcAgent(config, RRef.held, link)
    agent.values.recorder = AutogradRecorder(agent)
    for part in (Publisher, Watchdog, Health, *parts):
        agent.part(part)
    current.start(agent, timeout)
    if problem := agent.values.routes.problem(config.world_size is not None):
        agent.shutdown()  # when the others, who find the same, have seen a complete world, too
        raise ValueError(problem)
    return agent


def join(
    config: WorldConfig,
    founder: bool,
    deadline: float,
    link: Link | None = None,
    parts: Sequence[Callable[[Agent], object]] = (),
) -> RpcAgent:
    """As `start_agent`, for a process that comes by itself: it asks who leads an open world, and may be its `founder`.

    IncompleteWorldError where nobody leads it until `deadline` (of time.monotonic); RefusedError, AuthenticationError.
    """
    while True:
        if config.world_size is None or not founder:
            config = petition.ask(config, founder, deadline)
        try:
            return start_agent(config, link, deadline - time.monotonic(), parts)
        except TurnedAwayError:  # an open world may have passed to another leader, or ended, since this process asked
            if config.world_size is not None or time.monotonic() > deadline:
                raise
