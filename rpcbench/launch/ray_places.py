"""Places for workers in a Ray cluster: a placement group for those that start together, all of them or none.

Guarantees
- A group that Ray cannot place is told within bounded time, with what was asked for and what Ray has, and taken back.
- A place that has become free is used again; a group is given back when its last place has become free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from rpcbench.base.errors import RpcError
from rpcbench.launch.ray_session import tell

STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
_SLICE_SECONDS = 0.5  # Ray's own wait hears no Ctrl-C


@dataclass(eq=False)
class Group:
    """A placement group, and which of its bundles have no worker."""

    ray: Any
    free: set[int] = field(default_factory=set)


class Place(NamedTuple):
    """One bundle of a group."""

    group: Group
    bundle: int


class Places:
    """Of one launcher. bundle: what each worker gets. strategy: Ray's; "": a node each, as far as there
    are as many with room."""

    def __init__(self, bundle: Mapping[str, float], strategy: str, patience: float) -> None:
        self._bundle, self._strategy, self._patience = dict(bundle), strategy, patience
        self._lock = threading.Lock()
        self._groups: list[Group] = []

    def take(self, count: int, who: str) -> list[Place]:
        """Places for so many workers. RpcError where Ray has none in time."""
        with self._lock:
            free = [Place(group, bundle) for group in self._groups for bundle in sorted(group.free)][:count]
            for group, bundle in free:
                group.free.remove(bundle)
        try:
            return [*free, *self._new(count - len(free), who)]
        except BaseException:
            for place in free:
                self.give_back(place)
            raise

    def give_back(self, place: Place) -> None:
        """This place has no worker any more."""
        group = place.group
        with self._lock:
            group.free.add(place.bundle)
            if group not in self._groups or len(group.free) < group.ray.bundle_count:
                return
            self._groups.remove(group)
        tell(remove_placement_group, group.ray)

    def close(self) -> None:
        """Give all back."""
        with self._lock:
            left, self._groups = self._groups, []
        for group in left:
            tell(remove_placement_group, group.ray)

    def _new(self, count: int, who: str) -> list[Place]:
        if not count:
            return []
        strategy = self._strategy or ("SPREAD" if len(self._able()) >= count else "PACK")
        made = placement_group([self._bundle] * count, strategy=strategy)
        try:
            self._await(made, who, strategy)
        except BaseException:
            remove_placement_group(made)
            raise
        group = Group(made)
        with self._lock:
            self._groups.append(group)
        return [Place(group, bundle) for bundle in range(count)]

    def _able(self) -> list[dict[str, Any]]:
        """Nodes that could hold a worker if nothing else ran there."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        return [node for node in alive if all(node["Resources"].get(of, 0) >= n for of, n in self._bundle.items())]

    def _await(self, made: Any, who: str, strategy: str) -> None:
        until = time.monotonic() + self._patience
        while not made.wait(_SLICE_SECONDS):
            if time.monotonic() >= until:
                raise RpcError(self._told(made, who, strategy))

    def _told(self, made: Any, who: str, strategy: str) -> str:
        table = placement_group_table(made)
        nodes = [f"{node['NodeManagerHostname']} {_few(node['Resources'])}" for node in ray.nodes() if node["Alive"]]
        return (
            f"Ray has had no place for {who} in {self._patience:g} s: the placement group is {table['state']}, "
            f"{table['stats']['scheduling_state']}\n"
            f"  asked for: {made.bundle_count} x {self._bundle}, {strategy}\n"
            f"  nodes: {'; '.join(nodes)}\n"
            f"  free now, in all: {_few(ray.available_resources())}\n"
            'Ask for less of each (options={"cpus": 0.5}), end what else runs there, or wait longer (patience=)'
        )


def _few(resources: Mapping[str, float]) -> dict[str, float]:
    """Without Ray's own names of nodes and groups, and its stores."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if "node:" not in name and "_group_" not in name and name not in ("memory", "object_store_memory")
    }
