"""A cluster: this process as member 0, "notebook", and workers that a launcher starts, here or on other hosts.

Guarantees
- When the constructor returns, all workers serve and have connections to each other. If one cannot start, all are
  ended, and the error contains the last lines that it wrote.
- Workers, sockets and files end with `shutdown()`, with a `with` block, and with this process, in any way it ends.
- The loss of a worker is reported with its exit status or signal; its name can be started again, as a new incarnation.
"""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpcbench.base.conditions import Condition
from rpcbench.base.config import DEFAULT_TIMEOUT, NOTEBOOK, START_SECONDS, STOP_SECONDS, WorldConfig
from rpcbench.base.errors import RpcError, ShutdownError, UnknownWorkerError
from rpcbench.base.futures import Future, wait_all
from rpcbench.cells import client
from rpcbench.cells.cell_log import CellLog
from rpcbench.cells.client import CellClient
from rpcbench.cells.history import Rerun
from rpcbench.launch import ranks, registry, start_errors
from rpcbench.launch.base import ARRIVAL, Handle, Launcher, exit_status_text, has_ended, late_warning, wait_or_terminate
from rpcbench.launch.base_cluster import BaseCluster, cluster
from rpcbench.launch.environment import warn_of_debugging, warn_of_differences, worker_environment
from rpcbench.launch.gpu_pins import Chosen, GpuPins
from rpcbench.launch.saved import find_cluster
from rpcbench.launch.status import LaunchedTable, WorkerRecord, check_descriptors, oom_kill_count
from rpcbench.launch.worker_main import LEAVE, STOP, WorkerLocation, await_members
from rpcbench.protocol.membership import SILENT
from rpcbench.rpc.init import start_agent
from rpcbench.rpc.options import TensorPipeRpcBackendOptions
from rpcbench.runtime.members import LaunchRecords, WorkerInfo
from rpcbench.serialization.tensor_types import Name
from rpcbench.transport.hosts import bind_address, host_id, outbound_address
from rpcbench.transport.run_dir import RunDirectory

if TYPE_CHECKING:
    from rpcbench.launch.join import AttachedCluster

__all__ = ["START_SECONDS", "Cluster", "Progress", "cluster"]

_KILL_SECONDS = 10.0  # for a killed worker to end, and to leave the world
_GONE_SECONDS = 60.0  # for a worker that has ended to leave the world
_LONGEST = 86_400.0  # seconds of a grace, or of patience: a day
_OBITUARY_SECONDS = 5.0  # for the launcher to report the exit of a worker after its connection has ended

Progress = Callable[[int, int], object]


class Cluster(BaseCluster):
    """`n` workers, named worker1 … workern. End it with `shutdown()`, or use it in a `with` block.

    A RuntimeWarning names workers that have other versions of Python, torch, numpy or cloudpickle than this process.

    Args:
        n: The number of workers.
        kind: "process", or "kernel" for workers that are Jupyter kernels: other clients can connect to these, and see
            the variables of their cells (`connection_file`).
        kernel: The kernel spec of such workers.
        start: For processes: "fork", from a process that has torch loaded (default on Linux), or "spawn".
        launcher: The name of the launcher that starts the workers: "local" and "kernel" are the two kinds above;
            "command" starts workers on other hosts (docs/past-one-machine.md).
        options: Options of the launcher.
        address: At which workers on other hosts connect to this process, "host", "host:port" or ":port"; by default a
            free port on the interface that leads outward, or on RPCBENCH_BIND.
        gpus: The GPU of each worker, by number, as [0, 1] or "0,1": CUDA shows it this one alone, as its number 0.
            "none" pins none. By default each worker has a GPU of its own where there are enough for all; otherwise none
            is pinned.
            For launchers of this host; see `rpcbench.launch.gpu_pins`.
        env: Variables of workers, by name, beside those that they have from this process or their host. They are set
            before torch is loaded.
        python: The interpreter of workers, a path or a name, with its packages and this rpcbench; by default that of
            this process. With the launcher "command" it is one of the other hosts.
        grace: Seconds that workers have to end by themselves, at `shutdown`, `scale` and `restart`: `atexit` functions
            and finalizers run. Then they are terminated, and named in a RuntimeWarning. Ctrl-C ends that wait.
        patience: Seconds to wait until workers serve, at the start, `scale` and `restart`. A queue, or the first import
            of torch from a network disk, may need more than the default.
        rpc_timeout: Seconds a call may take that names no timeout; 0 for no limit.
        device_maps: For calls of each worker, by any member: the device here and the device there (see
            `TensorPipeRpcBackendOptions`).
        same_modes: Calls of all members transfer autocast (see there).
        progress: Called while workers start, with the number that serve and the number to start.

    Raises:
        RpcError: A worker cannot start, or does not serve in time; the text names its host, its command and its output.
        ValueError: `kind`, `start`, `launcher` or an option is unknown, the device maps do not fit, there is no such
            GPU, a variable is none, or `python` is no interpreter that suits.

    >>> import rpcbench
    >>> with rpcbench.Cluster(2) as cluster:
    ...     cluster.rpc_sync("worker2", max, (3, 5))
    5
    """

    def __init__(
        self,
        n: int = 2,
        *,
        kind: str = "process",
        kernel: str = "python3",
        start: str | None = None,
        launcher: str | None = None,
        options: Mapping[str, Any] | None = None,
        address: str | None = None,
        gpus: Chosen = None,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        grace: float = STOP_SECONDS,
        patience: float = START_SECONDS,
        rpc_timeout: float = DEFAULT_TIMEOUT,
        device_maps: Mapping[str, Mapping[Any, Name]] | None = None,
        same_modes: bool = False,
        progress: Progress | None = None,
    ) -> None:
        _check_arguments(n, grace, patience)
        super().__init__()
        config = WorldConfig(NOTEBOOK, 0, secrets.token_hex(8), "", secrets.token_bytes(32), rpc_timeout=rpc_timeout)
        config = TensorPipeRpcBackendOptions(device_maps=device_maps, same_modes=same_modes)._complete_config(config)
        name, given = registry.choose_launcher(launcher, kind, kernel, start, python)
        self.kind, options = {"local": "process"}.get(name, name), {**given, **(options or {})}
        self.arguments = {"options": options, "address": address, "gpus": gpus, "env": env, "grace": grace}
        self.arguments["patience"] = patience
        self._handles: dict[str, Handle] = {}  # by name, lost workers as well
        self._places: dict[str, WorkerLocation] = {}  # of workers that serve or have served
        self._incarnations: dict[str, int] = {}
        self._oom_kills: dict[str, int] = {}  # the host's count when each worker was started
        self._abandoned: dict[str, str] = {}  # why, of lost workers on other hosts without an exit report
        self._scaling = threading.Lock()  # held during `scale` and `restart`: a click in a panel may run beside a cell
        self._changes = Condition()  # notified when a worker joins, leaves or exits
        self._ending, self._ended = threading.Lock(), False  # the lock guards the flag
        self._maker = os.getpid()  # a fork of this process must not wait for workers
        with ExitStack() as undo:
            directory = RunDirectory()
            undo.callback(directory.remove_directory)
            self._launcher: Launcher = registry.make_launcher(name, directory, options)
            undo.callback(self._launcher.close)
            self._pins = GpuPins(gpus, n, name, _gpus_elsewhere(self._launcher))
            config = _with_remote_address(config, name, self._launcher.far, address)
            environ = worker_environment(env, bool(self._pins.entry_of_worker(1)))
            config = replace(config, environ=environ, start_seconds=patience)
            warn_of_debugging(config.environ)
            if hasattr(self._launcher, "environ"):
                self._launcher.environ = config.environ
            self._launcher.warm()
            self._config = replace(config, directory=str(directory.path), host=host_id(), stop_seconds=grace)
            records = LaunchRecords(self._loss_reason, lambda: list(self._handles))
            self.agent = start_agent(self._config, records=records)
            undo.pop_all()
        try:
            self._own_agent()
            self._start_workers([f"worker{i}" for i in range(1, n + 1)], progress)
        except BaseException:
            self._shut_down(0.0)
            raise

    def _own_agent(self) -> None:
        self.agent.owner = self
        self.agent.ending = "the cluster was stopped while this ran"
        self.directory = Path(self._config.directory)
        self.agent.part(CellLog)  # on this thread, whose cells it records
        self.agent.on_member(self._member_changed)
        LaunchedTable(self.agent, self.watched, self._last_words)
        self._answer_questions()
        atexit.register(self.shutdown)

    # -- members
    @property
    def lost(self) -> list[str]:
        """Names of those that ended without being asked to, and have not been started again."""
        return [name for name, handle in list(self._handles.items()) if self._describe_loss(name, handle)]

    @staticmethod
    def join(url: str, **options: Any) -> AttachedCluster:
        """Join workers that others have started, as by `torchrun … -m rpcbench.worker`.

        Args:
            url: The address that these workers print, "tcp://HOST:PORT".
            options: See `rpcbench.launch.join.AttachedCluster`, also for the methods that such workers lack.
        """
        from rpcbench.launch.join import AttachedCluster

        return AttachedCluster(url, **options)

    @staticmethod
    def saved(name: str, **changes: Any) -> Cluster:
        """Start a cluster as a file describes it: the table `[clusters.NAME]` of `~/.config/rpcbench.toml`, else
        `[tool.rpcbench.clusters.NAME]` of the nearest pyproject.toml, here or in a folder above.

        Args:
            name: The name in the file.
            changes: Arguments of `Cluster`, in place of those in the file.

        Raises:
            ValueError: No file describes it, another user may have written the file, or the description is malformed;
                the text names the file.
        """
        return Cluster(**find_cluster(name).merge_arguments(changes))

    def pid(self, name: str) -> int:
        """Return the process id of a worker, on its host."""
        return self._location_of_worker(name, self._find_handle(name)).pid

    def end_of(self, name: str) -> Callable[[], bool]:
        """Return a function that tells, without a lock, whether the present process of a worker has ended."""
        handle = self._find_handle(name)
        return lambda: handle.poll() is not None

    def watched(self) -> list[WorkerRecord]:
        """Return the data of each worker, lost ones as well, that is known without a look at its process."""
        calls = self._count_calls()
        return [
            WorkerRecord(
                _id_of_worker(name),
                name,
                self._incarnations[name],
                self._location_of_worker(name, handle),
                self._describe_loss(name, handle),
                calls[_id_of_worker(name)],
            )
            for name, handle in list(self._handles.items())  # `scale` may end some of them meanwhile
        ]

    def log(self, name: str) -> str:
        """Return the last lines that a worker, lost or not, wrote outside any cell or call; empty if it wrote none."""
        return self._find_handle(name).last_words()

    def find_log(self, name: str) -> Path:
        handle = self._find_handle(name)
        path = getattr(handle, "readable", getattr(handle, "log", None))  # not all launchers' handles have a log
        if not path:
            raise RpcError(f"the output of {name} is in no file of this host: look where its launcher keeps it")
        return Path(path)

    def connection_file(self, name: str) -> str:
        """Return the file for `jupyter console --existing FILE`. RuntimeError if the worker is not a kernel."""
        self._find_handle(name)
        find = getattr(self._launcher, "connection_file", None)
        if find is None:
            raise RuntimeError(f"{name} is not a kernel; Cluster(2, kind='kernel') starts kernels")
        return str(find(name))

    def scale(self, n: int) -> None:
        """Start workers, or end the last ones, until there are `n`. Lost workers are started again. ValueError if fewer
        GPUs than `n` were given."""
        if n < 1:
            raise ValueError(f"a cluster has at least one worker, not {n}; end it with shutdown()")
        self._pins.check_worker_count(n)
        wanted = [f"worker{i}" for i in range(1, n + 1)]
        with self._scaling:
            if self.workers and wanted != self.workers:
                self._check_parting()
            leaving = [name for name in self._handles if name not in wanted]  # those that are lost, too
            self._end_workers([self._handles.pop(name) for name in leaving])
            if missing := [name for name in wanted if name not in self.workers]:
                self._start_workers(missing)
            elif leaving:
                ranks.await_ranks(self._assign_ranks(f"{', '.join(leaving)} left"))

    def restart(self, name: str, *, replay: bool = False) -> list[Rerun]:
        """End a worker, if it still runs, and start it again under its name, without its former state.

        Args:
            name: Of the worker. If it cannot be started, it is lost.
            replay: Then run again, in order, the cells that it had run without an error, with the variables that were
                sent along.

        Returns:
            The cells that ran again, each with the error that it raised this time, or None.
        """
        with self._scaling:
            self._find_handle(name)
            self._check_parting()
            self._end_workers([self._handles[name]])
            past = self.agent.part(CellClient).history.pop_history(name)
            # ends waits for it in process groups; nothing here depends on that
            self._assign_ranks(f"{name} was restarted")
            self._start_workers([name])
        return client.rerun_script_cells(self.agent, name, past) if replay else []

    def _interrupt_worker(self, name: str) -> None:
        handle = self._find_handle(name)
        if not self._launcher.far:
            handle.interrupt()
        elif name in self.workers:
            self.agent.notify(self.agent.member(name).id, STOP, None)

    def kill(self, name: str) -> None:
        """End a worker at once, as a crash would (SIGKILL), and wait until it counts as lost. See `restart`."""
        handle = self._find_handle(name)
        handle.kill()
        handle.wait(_KILL_SECONDS)
        self._await_gone([name])

    def shutdown(self) -> None:
        """End all workers, within their grace, and remove all files. Idempotent."""
        self._shut_down(self._config.stop_seconds)

    def _shut_down(self, grace: float) -> None:
        with self._ending:
            if self._ended:
                return
            self._ended = True
        atexit.unregister(self.shutdown)
        late: list[str] = []
        try:
            self.agent.shutdown(graceful=False)
            if os.getpid() == self._maker:
                late = wait_or_terminate(lambda: self._running_handles(self._handles.values()), self._changes, grace)
        finally:
            self._launcher.close()
        if grace:  # 0 after a failed start: the caller gets that error
            self._warn_of_late(late)

    def __repr__(self) -> str:
        if self._ended:
            return "<Cluster: shut down>"
        lost = f"; lost: {', '.join(self.lost)}" if self.lost else ""
        return f"<Cluster of {', '.join(self.workers) or 'no workers'}{lost}>"

    # -- starting and ending
    def _start_workers(self, names: list[str], progress: Progress | None = None) -> None:
        """Start workers concurrently, and wait until all serve."""

        def joined() -> bool:
            serve = len(set(names) & set(self.workers))
            if progress is not None:
                progress(serve, len(names))
            return serve == len(names)

        self._check_open()  # `shutdown` does not wait for a start on another thread
        check_descriptors(len(names))  # now: later, a connection in the midst of the start would fail
        before = self._handles.copy()
        try:
            handles = self._launch_workers([self._make_config(name) for name in names])
            self._await_joined(joined, handles)
            count = len(self.workers) + 1
            rank_futures = self._assign_ranks(f"{', '.join(names)} joined", names)
            patience = self._config.start_seconds
            location_calls = [
                self.agent.call(name, await_members, (count,), timeout=patience, label=ARRIVAL, own=True)
                for name in names
            ]
            self._places.update(zip(names, wait_all(location_calls), strict=True))
            ranks.await_ranks(rank_futures, names)
        except BaseException:
            self._undo_start(names, before)
            raise
        warn_of_differences({name: self._places[name].versions for name in names})

    def _undo_start(self, names: list[str], before: Mapping[str, Handle]) -> None:
        """End all workers of a start that failed, and forget them; workers that were lost before are still lost."""
        handles = [self._handles[name] for name in names if name in self._handles]
        for handle in handles:
            handle.kill()
        try:
            self._changes.wait_for(lambda: not self._running_handles(handles), _KILL_SECONDS)
            self._changes.wait_for(lambda: not set(names) & set(self.workers), _KILL_SECONDS)
        finally:
            for name in names:
                if name not in before:
                    self._handles.pop(name, None)

    def _make_config(self, name: str) -> WorldConfig:
        """Return the configuration of a worker's next incarnation."""
        self.agent.part(CellClient).history.pop_history(name)  # discarded: a new worker has run no cell
        self._incarnations[name] = incarnation = self._incarnations.get(name, -1) + 1
        self._oom_kills[name] = oom_kill_count()
        self._places.pop(name, None)
        self._abandoned.pop(name, None)
        ours = replace(self._config, leader=self._leader_address(), remote="", bind="", devices=())
        id_ = _id_of_worker(name)
        return replace(ours, name=name, id=id_, incarnation=incarnation, gpu=self._pins.entry_of_worker(id_))

    def _launch_workers(self, configs: list[WorldConfig]) -> list[Handle]:
        if hasattr(self._launcher, "start_all"):
            self._handles.update(
                (handle.name, handle) for handle in self._launcher.start_all(configs, self._process_exited)
            )
        else:
            for config in configs:  # each is kept at once: if a later one fails, `_undo_start` ends it
                self._handles[config.name] = self._launcher.start(config, self._process_exited)
        return [self._handles[config.name] for config in configs]

    @property
    def inseparable(self) -> str:
        why = getattr(self._launcher, "inseparable", "")
        every = f"cluster.scale({len(self._handles)}) starts all that were lost"
        return f"{why}: none can start or end alone; {every}" if why else ""

    def _check_parting(self) -> None:
        if self.inseparable:
            raise RpcError(self.inseparable)

    def _assign_ranks(self, why: str, new: Sequence[str] = ()) -> dict[str, Future[None]]:
        """Assign ranks to the workers that serve. See `ranks.begin_generation`."""
        return ranks.begin_generation(
            self.agent, {name: _id_of_worker(name) - 1 for name in self.workers}, len(self._handles), why, new
        )

    def _end_workers(self, handles: Sequence[Handle]) -> None:
        names = [handle.name for handle in handles]
        for handle in handles:
            if handle.name in self.workers:
                self.agent.notify(self.agent.member(handle.name).id, LEAVE, None)
            else:
                handle.kill()  # it is lost, and may hang
        late = wait_or_terminate(lambda: self._running_handles(handles), self._changes, self._config.stop_seconds)
        for handle in handles:
            handle.kill()  # also kills its children, and detects a fork server that hangs
            handle.wait(_KILL_SECONDS)
        self._await_gone(names)
        self._warn_of_late(late)

    def _running_handles(self, handles: Iterable[Handle]) -> list[Handle]:
        # `has_ended` looks at the process itself: a fork server that hangs reports no exit.
        return [handle for handle in list(handles) if handle.poll() is None and not has_ended(handle)]

    def _warn_of_late(self, late: Sequence[str]) -> None:
        if late and self._config.stop_seconds:
            warnings.warn(late_warning(late, self._config.stop_seconds), RuntimeWarning, stacklevel=4)

    def _await_joined(self, joined: Callable[[], bool], handles: Sequence[Handle]) -> None:
        def is_complete() -> bool:
            if joined():
                return True
            self._check_open()
            for handle in handles:
                if (status := handle.poll()) is not None:
                    raise start_errors.early_end_error(handle, status)
            return False

        if not self._changes.wait_for(is_complete, self._config.start_seconds):
            there = self.workers
            joined_names = [handle.name for handle in handles if handle.name in there]
            missing = [handle for handle in handles if handle.name not in there]
            seconds = self._config.start_seconds
            raise start_errors.late_start_error(missing, joined_names, seconds, self._leader_address())

    def _await_gone(self, names: Sequence[str]) -> None:
        def has_left() -> bool:
            self._check_open()
            return not set(names) & set(self.workers)

        if not self._changes.wait_for(has_left, _GONE_SECONDS):
            raise RpcError(f"timed out after {_GONE_SECONDS:g} s waiting for the end of {', '.join(names)}")

    def _leader_address(self) -> str:
        """Return the address of this process for workers on other hosts; empty if there are none."""
        return self.agent.machine.read_node(lambda node: node.members.me.remote)

    def _check_open(self) -> None:
        if self._ended:
            raise ShutdownError("this cluster is shut down; make a new one")

    def _process_exited(self, handle: Handle, status: int) -> None:
        self._changes.notify_all()

    def _member_changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        if kind == "lost" and self._launcher.far:
            self._give_up(who.name, reason)
        self._changes.notify_all()

    def _give_up(self, name: str, reason: str) -> None:
        """Kill the local end of a lost worker on another host, for example ssh, which might wait for it for long."""
        handle = self._handles.get(name)  # one that was started again since is spared: it has no place yet
        if handle is not None and handle.poll() is None and name in self._places and name not in self.workers:
            self._abandoned[name] = reason
            handle.kill()

    def _loss_reason(self, name: str, reason: str) -> str:
        """Return why a worker was lost: the end of its process if that is known, else `reason`."""
        handle = self._handles.get(name)
        if handle is None or reason.startswith(SILENT):  # its host does not answer: nor will the launcher there
            return reason
        try:
            status = handle.wait(_OBITUARY_SECONDS)
        except TimeoutError:
            return reason
        starved = status == -signal.SIGKILL and oom_kill_count() > self._oom_kills[name]
        subject = getattr(handle, "subject", "its process")  # not all launchers' handles have it
        ended = f"{subject} ended ({exit_status_text(status)}{', likely out of memory' if starved else ''})"
        last = handle.last_words().splitlines() if status else []
        return "\n  ".join([f"{ended}; its last output:", *last]) if last else ended

    def _describe_loss(self, name: str, handle: Handle) -> str:
        """Return how a worker's process ended, or why it was given up; empty while it runs."""
        status = handle.poll()
        if status is None:  # its connection may end, and calls fail, before the launcher reports the exit
            gone = self.agent.machine.read_node(lambda node: node.gone.find_departed(name))
            if gone is not None and gone.lost and gone.member.incarnation == self._incarnations[name]:
                return gone.reason
        return self._abandoned.get(name) or ("" if status is None else exit_status_text(status))

    def _last_words(self, name: str) -> str:
        """Return what `log` does; nothing of a worker that `scale` has ended meanwhile."""
        handle = self._handles.get(name)
        return "" if handle is None else handle.last_words()

    def _location_of_worker(self, name: str, handle: Handle) -> WorkerLocation:
        # Until a worker has reported its place, that of the process that launches it.
        return self._places.get(name) or WorkerLocation(host_id(), socket.gethostname(), handle.pid)

    def _find_handle(self, name: str) -> Handle:
        handle = self._handles.get(name)
        if handle is None:
            raise UnknownWorkerError.of(name, self._handles)
        return handle


def _check_arguments(n: int, grace: float, patience: float) -> None:
    if n < 1:
        raise ValueError(f"a cluster has at least one worker, not {n}")
    if not 0 <= grace <= _LONGEST:
        raise ValueError(f"grace={grace}: workers have between 0 and {_LONGEST:,.0f} seconds to end")
    if not 0 < patience <= _LONGEST:
        raise ValueError(f"patience={patience}: a start may take more than 0 and up to {_LONGEST:,.0f} seconds")


def _gpus_elsewhere(launcher: Launcher) -> str:
    """Return how workers get their GPUs if the launcher assigns none; empty if it does."""
    advice: str = getattr(launcher, "gpu_advice", "leave gpus out, and choose there")
    return "" if getattr(launcher, "pins", False) else advice


def _with_remote_address(config: WorldConfig, launcher: str, far: bool, address: str | None) -> WorldConfig:
    """Return the configuration with the address at which workers on other hosts connect, if there may be some."""
    if far:
        return replace(config, remote=outbound_address(address), bind=bind_address())
    if address is not None:
        raise ValueError(f"address={address!r}: workers of launcher {launcher!r} are on this host and need none")
    return config


def _id_of_worker(name: str) -> int:
    return int(name.removeprefix("worker"))
