"""Workers in a Ray cluster: a placement group, and in each of its bundles an actor that does no more than keep one.

Guarantees
- Workers that start together all get their places, or none starts.
- The secret goes through Ray's channel to the actor, and by standard input to the worker. Who can read Ray's traffic or
  calls its actors is trusted.
- Workers, actors, placement groups and the run directory outlive neither `close` nor this process. A session in Ray
  that this process has is used and stays; where there is none, one is begun, and ended with the last launcher.
- A group of places that Ray cannot place is told within bounded time, with what was asked for and what Ray has, and
  taken back. A place that has become free is used again; a group is given back when its last place has become free.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rpcbench.base.conditions import Changes, Flag
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError
from rpcbench.launch import fork_client, ray_actor, supervisor
from rpcbench.launch.base import UNKNOWN, ExitCallback, ProcessHandle, check_name, stopped
from rpcbench.launch.process import ForkServerLease, ended
from rpcbench.launch.ray_actor import Arrival, Keeper, tell, words
from rpcbench.transport.hosts import host_id
from rpcbench.transport.run_dir import RunDirectory

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


_ARRIVE_SECONDS = 60.0
_END_SECONDS = 1.0
_OWN_SECONDS = 0.5
_GLANCE_SECONDS = 1.0


class RayLauncher:
    """Starts workers of one cluster, which keeps its files in `run_directory`. See `Launcher` for the methods.

    cpus, gpus, resources: what Ray sets aside for each worker. strategy: of the placement group, "STRICT_SPREAD",
    "SPREAD", "PACK" or "STRICT_PACK"; by default "SPREAD" where there are as many nodes, else "PACK".
    patience: seconds to wait for places. runtime_env: Ray's, for the actors. ray_address: of the Ray cluster to join if
    this process is in none; by default as `ray.init()` has it, which starts one here if it finds none.

    ValueError for a strategy that is none, RpcError where that Ray cannot be joined.
    """

    far = True

    def __init__(
        self,
        run_directory: RunDirectory,
        *,
        cpus: float = 1,
        gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: str = "",
        patience: float = 30.0,
        runtime_env: Mapping[str, Any] | None = None,
        ray_address: str | None = None,
    ) -> None:
        if strategy and strategy not in STRATEGIES:
            raise ValueError(f"strategy={strategy!r} is none of Ray's; use one of {STRATEGIES}")
        each = {"CPU": float(cpus), "GPU": float(gpus), **(resources or {})}
        self._bundle = {name: amount for name, amount in each.items() if amount}
        if not self._bundle:
            raise ValueError("a place for a worker needs something: cpus=0.1, or one of resources=")
        self._runtime_env = dict(runtime_env or {})
        self._directory = run_directory
        self._maker = os.getpid()
        self._lease = ForkServerLease(run_directory.path, fork_client.take_any)
        self._running: set[_Kept] = set()
        self._changes = Changes()
        self._places = Places(self._bundle, strategy, float(patience))
        self._ours = ray_actor.enter(ray_address)

    def warm(self) -> None:
        """Have the starter that removes the directory if this process dies."""
        self._lease.starter()

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> ProcessHandle:
        """As `start_all`, for one."""
        return self.start_all([config], on_exit)[0]

    def start_all(self, configs: Sequence[WorldConfig], on_exit: ExitCallback | None = None) -> list[ProcessHandle]:
        """Start these workers with the notebook's directory and import path, where their nodes have those.

        Errors: ValueError for a name that no file can have, RpcError where Ray has no places in time, or with Ray's own
        words where an actor cannot be started, ShutdownError.
        """
        for config in configs:
            check_name(config.name)
        self._lease.starter()
        ray_actor.check()
        names = [config.name for config in configs]
        places = self._places.take(len(configs), ", ".join(names))
        actors: list[Any] = []
        with ExitStack() as undo:
            for place in places:
                undo.callback(self._places.give_back, place)
                actors.append(self._hire(place))
                undo.callback(tell, ray.kill, actors[-1])
            arrivals = _arrivals(actors, names)
            kept = [_Kept(*of, on_exit) for of in zip(configs, actors, arrivals, places, strict=True)]
            undo.pop_all()
        return self._begin(kept)

    def _hire(self, place: Place) -> Any:
        """A new actor in that place."""
        group, bundle = place
        return (
            ray.remote(Keeper)
            .options(
                num_cpus=self._bundle.get("CPU", 0),
                num_gpus=self._bundle.get("GPU", 0),
                resources={name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group.ray, placement_group_bundle_index=bundle
                ),
                runtime_env=self._runtime_env,
                max_concurrency=3,
            )
            .remote()
        )

    def _begin(self, kept: list[_Kept]) -> list[ProcessHandle]:
        for each in kept:
            self._running.add(each)
            name = f"rpcbench-{each.handle.name}"
            threading.Thread(target=self._see_to, args=(each,), name=name, daemon=True).start()
        if self._lease.closed:
            for each in kept:
                each.handle.abandon()
            raise ended()
        return [each.handle for each in kept]

    def _see_to(self, kept: _Kept) -> None:
        status = kept.wait()
        self._places.give_back(kept.place)
        kept.handle.end(status)
        self._running.discard(kept)
        self._changes.tell()

    def close(self) -> None:
        """End the workers, which have half a second to do so by themselves, their actors, and the placement groups."""
        if os.getpid() != self._maker:
            return
        self._lease.shut()
        try:
            stopped(lambda: [kept.handle for kept in list(self._running)], self._changes, _OWN_SECONDS)
            self._places.close()
            self._lease.end()
        finally:
            ours, self._ours = self._ours, None
            ray_actor.leave(ours)
            self._directory.remove()


class RayHandle(ProcessHandle):
    """A worker in a Ray cluster; `pid` is its actor's, on its node."""

    local = False
    told = ""
    """How it ended: its last lines, or what Ray knows of the end of its actor."""
    readable = ""
    """The log, if it lies on this host."""

    def last_words(self) -> str:
        return self.told or words(self.readable)


class _Kept:
    """A worker, the actor that keeps it, and its place."""

    def __init__(
        self, config: WorldConfig, actor: Any, arrival: Arrival, place: Place, on_exit: ExitCallback | None
    ) -> None:
        self.place = place
        self._actor, self._killed = actor, False
        self.handle = RayHandle(config.name, Path(arrival.log), self._signal, on_exit)
        self.handle.readable = arrival.log if arrival.host == host_id() else ""
        self.handle.begin(arrival.pid)
        self._session = ray_actor.name()
        self._over = Flag()
        self._done = actor.keep.remote(config.name, supervisor.request(config)).future()
        self._done.add_done_callback(lambda _: self._over.set())

    def wait(self) -> int:
        """Its exit status, once it has ended; its actor is over then."""
        while not self._over.wait(_GLANCE_SECONDS):
            if ray_actor.name() != self._session:  # of which Ray tells nobody who waits
                self.handle.told = "its session in Ray was ended"
                return UNKNOWN
        status = self._status()
        tell(ray.kill, self._actor)
        return status

    def _status(self) -> int:
        try:
            status, self.handle.told = self._done.result()
        except RayTaskError as error:
            status, self.handle.told = 1, str(error)
        except RayError as error:
            status, self.handle.told = -signal.SIGKILL if self._killed else UNKNOWN, f"{type(error).__name__}: {error}"
        return int(status)

    def _signal(self, which: int) -> None:
        """The actor ends it, with what it has started; an actor that does not is ended itself."""
        if which != signal.SIGKILL or self.handle.poll() is not None:
            return
        self._killed = True
        tell(self._actor.end.remote)
        later = threading.Timer(_END_SECONDS, tell, (ray.kill, self._actor))
        later.daemon = True
        later.start()


def _arrivals(actors: Sequence[Any], names: Sequence[str]) -> list[Arrival]:
    """Where they are, once all are there. RpcError with Ray's words where one cannot be."""
    who = ", ".join(names)
    try:
        return list(ray.get([actor.arrive.remote() for actor in actors], timeout=_ARRIVE_SECONDS))
    except GetTimeoutError as error:
        raise RpcError(f"the actors of {who} have places, but were not there in {_ARRIVE_SECONDS:g} s") from error
    except RayError as error:
        raise RpcError(f"Ray could not start the actors of {who}:\n{error}") from error
