"""The launcher "ray": workers in a Ray cluster. Each bundle of a placement group has an actor that keeps one worker.

Guarantees
- Of workers that start together all get bundles, or none starts.
- The secret goes through Ray's channel to the actor, and by standard input to the worker. Programs that can read
  Ray's traffic or call its actors are trusted.
- Workers, actors, placement groups and the run directory outlive neither `remove_groups` nor this process. A Ray
  session that this process has is used and kept; if there is none, one is begun, and ended with the last launcher.
- A placement group that Ray cannot place is removed within bounded time, with an error that lists the request and Ray's
  resources. A free bundle is used again; a group is removed when all its bundles are free.
"""

from __future__ import annotations

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

from rpcbench.base.conditions import Condition, Event
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError
from rpcbench.base.ids import check_name
from rpcbench.launch import ray_actor, supervisor
from rpcbench.launch.base import UNKNOWN, ExitCallback, ProcessHandle, wait_or_terminate
from rpcbench.launch.process import OWN_SECONDS, ForkServerLauncher, launcher_closed_error
from rpcbench.launch.ray_actor import Arrival, WorkerActor, send_late_request, worker_log_lines
from rpcbench.transport.hosts import host_id
from rpcbench.transport.run_dir import RunDirectory

STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
_SLICE_SECONDS = 0.5  # of a wait: Ctrl-C does not end Ray's own


@dataclass(eq=False)
class Group:
    """A placement group."""

    ray: Any  # the PlacementGroup
    free: set[int] = field(default_factory=set)  # indexes of bundles without a worker


class Bundle(NamedTuple):
    """One bundle of a group."""

    group: Group
    bundle: int


class Places:
    """The bundles of one launcher. `bundle`: resources of each worker. `strategy`: Ray's; "": a node for each worker if
    enough nodes have room, else as few nodes as possible."""

    def __init__(self, bundle: Mapping[str, float], strategy: str) -> None:
        self._bundle, self._strategy = dict(bundle), strategy
        self._lock = threading.Lock()  # guards `_groups` and their `free`; not held during requests to Ray
        self._groups: list[Group] = []

    def take_bundles(self, count: int, who: str, patience: float) -> list[Bundle]:
        """Return bundles for `count` workers: free ones, then a new group's. RpcError if Ray has none in time (s)."""
        with self._lock:
            free = [Bundle(group, bundle) for group in self._groups for bundle in sorted(group.free)][:count]
            for group, bundle in free:
                group.free.remove(bundle)
        try:
            return [*free, *self._request_bundles(count - len(free), who, patience)]
        except BaseException:
            for place in free:
                self.return_bundle(place)
            raise

    def return_bundle(self, place: Bundle) -> None:
        """Mark a bundle as free, and remove its group if all its bundles are."""
        group = place.group
        with self._lock:
            group.free.add(place.bundle)
            if group not in self._groups or len(group.free) < group.ray.bundle_count:
                return
            self._groups.remove(group)
        send_late_request(remove_placement_group, group.ray)

    def remove_groups(self) -> None:
        with self._lock:
            left, self._groups = self._groups, []
        for group in left:
            send_late_request(remove_placement_group, group.ray)

    def _request_bundles(self, count: int, who: str, patience: float) -> list[Bundle]:
        if not count:
            return []
        strategy = self._strategy or ("SPREAD" if len(self._able_nodes()) >= count else "PACK")
        made = placement_group([self._bundle] * count, strategy=strategy)
        try:
            self._await_group(made, who, strategy, patience)
        except BaseException:
            remove_placement_group(made)
            raise
        group = Group(made)
        with self._lock:
            self._groups.append(group)
        return [Bundle(group, bundle) for bundle in range(count)]

    def _able_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that have the resources for a worker, in use or not."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        return [node for node in alive if all(node["Resources"].get(of, 0) >= n for of, n in self._bundle.items())]

    def _await_group(self, made: Any, who: str, strategy: str, patience: float) -> None:
        until = time.monotonic() + patience
        while not made.wait(_SLICE_SECONDS):
            if time.monotonic() >= until:
                raise RpcError(
                    f"Ray found no place for {who} in {patience:g} s: {self._describe_shortage(made, strategy)}"
                )

    def _describe_shortage(self, made: Any, strategy: str) -> str:
        table = placement_group_table(made)
        nodes = [
            f"{node['NodeManagerHostname']} {_user_resources(node['Resources'])}"
            for node in ray.nodes()
            if node["Alive"]
        ]
        return (
            f"the placement group is {table['state']}, {table['stats']['scheduling_state']}\n"
            f"  requested: {made.bundle_count} x {self._bundle}, {strategy}\n"
            f"  nodes: {'; '.join(nodes)}\n"
            f"  free now, in all: {_user_resources(ray.available_resources())}\n"
            'Request less for each (options={"cpus": 0.5}), end other programs there, or wait longer: patience='
        )


def _user_resources(resources: Mapping[str, float]) -> dict[str, float]:
    """Return resources without Ray's internal entries for nodes, groups and memory."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if "node:" not in name and "_group_" not in name and name not in ("memory", "object_store_memory")
    }


_END_SECONDS = 1.0  # for an actor to end its worker before the actor is killed

_GLANCE_SECONDS = 1.0  # between looks at whether the Ray session still exists


class RayLauncher(ForkServerLauncher):
    """A launcher of workers in a Ray cluster. For the methods see `Launcher`.

    Args:
        run_directory: Of the cluster's files; `remove_groups` removes it.
        cpus, gpus, resources: The resources that Ray reserves for each worker.
        strategy: Of the placement group, "STRICT_SPREAD", "SPREAD", "PACK" or "STRICT_PACK"; by default "SPREAD" if
            there are as many nodes as workers, else "PACK".
        runtime_env: Ray's, for the actors.
        ray_address: Of the Ray cluster to join if this process has joined none; by default as `ray.init()`, which
            starts one here if it finds none.

    Raises:
        ValueError: The strategy is unknown, or no resource is requested.
        RpcError: Ray cannot be joined or started.
    """

    far = True
    gpu_advice = "Ray assigns GPUs: options={'gpus': 1}"

    def __init__(
        self,
        run_directory: RunDirectory,
        *,
        cpus: float = 1,
        gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: str = "",
        runtime_env: Mapping[str, Any] | None = None,
        ray_address: str | None = None,
    ) -> None:
        if strategy and strategy not in STRATEGIES:
            raise ValueError(f"strategy={strategy!r} is not one of Ray's; use one of {STRATEGIES}")
        each = {"CPU": float(cpus), "GPU": float(gpus), **(resources or {})}
        self._bundle = {name: amount for name, amount in each.items() if amount}
        if not self._bundle:
            raise ValueError("a worker has to request a resource from Ray: cpus=0.1, or one of resources=")
        super().__init__(run_directory)
        self._runtime_env = dict(runtime_env or {})
        self._running: set[_RayWorker] = set()
        self._changes = Condition()
        self._places = Places(self._bundle, strategy)
        self._ours = ray_actor.join_session(ray_address)

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> ProcessHandle:
        """Start one worker. See `start_all`."""
        return self.start_all([config], on_exit)[0]

    def start_all(self, configs: Sequence[WorldConfig], on_exit: ExitCallback | None = None) -> list[ProcessHandle]:
        """See `Launcher`. Workers have the notebook's directory and import path as far as their nodes have these.
        RpcError if Ray has no bundles in time, RuntimeError for a name that no member may have."""
        for config in configs:
            check_name(config.name)
        self._working_server()
        ray_actor.check_session()
        names, patience = [config.name for config in configs], configs[0].start_seconds
        places = self._places.take_bundles(len(configs), ", ".join(names), patience)
        actors: list[Any] = []
        with ExitStack() as undo:
            for place in places:
                undo.callback(self._places.return_bundle, place)
                actors.append(self._start_actor(place))
                undo.callback(send_late_request, ray.kill, actors[-1])
            arrivals = _await_actors(actors, names, patience)
            kept = [_RayWorker(*of, on_exit) for of in zip(configs, actors, arrivals, places, strict=True)]
            undo.pop_all()
        return self._begin_workers(kept)

    def _start_actor(self, place: Bundle) -> Any:
        group, bundle = place
        return (
            ray.remote(WorkerActor)
            .options(
                num_cpus=self._bundle.get("CPU", 0),
                num_gpus=self._bundle.get("GPU", 0),
                resources={name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group.ray, placement_group_bundle_index=bundle
                ),
                runtime_env=self._runtime_env,
                max_concurrency=3,  # `end` and `arrive` run beside `keep`
            )
            .remote()
        )

    def _begin_workers(self, kept: list[_RayWorker]) -> list[ProcessHandle]:
        for each in kept:
            self._running.add(each)
            name = f"rpcbench-{each.handle.name}"
            threading.Thread(target=self._run_to_end, args=(each,), name=name, daemon=True).start()
        if self._closed:  # `remove_groups` ran meanwhile, and may have missed these workers
            for each in kept:
                each.handle.abandon_process()
            raise launcher_closed_error()
        return [each.handle for each in kept]

    def _run_to_end(self, kept: _RayWorker) -> None:
        status = kept.wait_for_exit()
        self._places.return_bundle(kept.place)
        kept.handle.process_ended(status)
        self._running.discard(kept)
        self._changes.notify_all()

    def _end_workers(self) -> None:
        try:
            wait_or_terminate(lambda: [kept.handle for kept in list(self._running)], self._changes, OWN_SECONDS)
            self._places.remove_groups()
        finally:
            ours, self._ours = self._ours, None
            ray_actor.release_session(ours)


class RayHandle(ProcessHandle):
    """A worker in a Ray cluster; `pid` is its actor's, on its node."""

    local = False
    end_reason = ""  # how it ended: its last lines, or Ray's reason for the end of its actor
    readable = ""  # the path of the log if it is on this host

    def last_words(self) -> str:
        return self.end_reason or worker_log_lines(self.readable)


class _RayWorker:
    """A worker, the actor that keeps it, and its bundle."""

    def __init__(
        self, config: WorldConfig, actor: Any, arrival: Arrival, place: Bundle, on_exit: ExitCallback | None
    ) -> None:
        self.place = place
        self._actor, self._killed = actor, False
        self.handle = RayHandle(config.name, Path(arrival.log), self._signal_worker, on_exit)
        self.handle.host = arrival.hostname
        self.handle.readable = arrival.log if arrival.host == host_id() else ""
        self.handle.process_created(arrival.pid)
        self._session = ray_actor.session_name()
        self._call_ended = Event()  # set when the call of `keep` has ended
        self._done = actor.keep.remote(config.name, supervisor.supervisor_request(config)).future()
        self._done.add_done_callback(lambda _: self._call_ended.set())

    def wait_for_exit(self) -> int:
        """Wait for the worker's end, end its actor, and return the exit status."""
        while not self._call_ended.wait(_GLANCE_SECONDS):
            if ray_actor.session_name() != self._session:  # the future of `keep` never completes then
                self.handle.end_reason = "its Ray session has ended"
                return UNKNOWN
        status = self._exit_status()
        send_late_request(ray.kill, self._actor)
        return status

    def _exit_status(self) -> int:
        try:
            status, self.handle.end_reason = self._done.result()
        except RayTaskError as error:
            status, self.handle.end_reason = 1, str(error)
        except RayError as error:
            status, self.handle.end_reason = (
                -signal.SIGKILL if self._killed else UNKNOWN,
                f"{type(error).__name__}: {error}",
            )
        return int(status)

    def _signal_worker(self, which: int) -> None:
        """For SIGKILL, have the actor end the worker and its child processes. Other signals cannot be sent."""
        if which != signal.SIGKILL or self.handle.poll() is not None:
            return
        self._killed = True
        send_late_request(self._actor.end.remote)
        # An actor that does not answer is killed, and the worker with it.
        later = threading.Timer(_END_SECONDS, send_late_request, (ray.kill, self._actor))
        later.daemon = True
        later.start()


def _await_actors(actors: Sequence[Any], names: Sequence[str], patience: float) -> list[Arrival]:
    """Wait until all actors run, and return where. RpcError, with Ray's own message, if one cannot in time (s)."""
    who = ", ".join(names)
    try:
        return list(ray.get([actor.arrive.remote() for actor in actors], timeout=patience))
    except GetTimeoutError as error:
        raise RpcError(f"the actors of {who} have places, but did not start in {patience:g} s") from error
    except RayError as error:
        raise RpcError(f"Ray could not start the actors of {who}:\n{error}") from error
