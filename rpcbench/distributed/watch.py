"""A world hears of the end of a rank as soon as this process's agent does, where both know that worker by one name."""

from __future__ import annotations

import weakref

from rpcbench.distributed.world import World
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import WorkerInfo


class Watch:
    """One to an agent: it looks after the latest world."""

    def __init__(self, agent: Agent) -> None:
        self._world: weakref.ref[World] | None = None
        agent.on_member(self._changed)

    @staticmethod
    def over(world: World) -> None:
        """Look after a world, where this process has an agent."""
        if (agent := current.find()) is not None:
            agent.part(Watch)._world = weakref.ref(world)

    def _changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        world = self._world() if self._world is not None else None
        rank = world.rank_of(who.name) if world is not None and kind == "lost" else None
        if world is not None and rank is not None:
            world.ends(world.lost([rank], reason))
