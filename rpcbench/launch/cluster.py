"""A cluster: this process as member 0, "notebook", and workers on this host, started and ended together.

Guarantees
- When the constructor returns all workers serve and know each other; if one cannot start, all are ended and the error
  has its last words.
- Workers, sockets and files go with `shutdown()`, at the end of a `with` block, and however this process ends.
- A worker that dies is told of with its exit status or signal; its name can be started again, as a new incarnation.
"""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rpcbench.base.conditions import Changes
from rpcbench.base.config import DEFAULT_TIMEOUT, NOTEBOOK, STOP_SECONDS, WorldConfig
from rpcbench.base.errors import RpcError, ShutdownError, UnknownWorkerError
from rpcbench.base.futures import Future, wait_all
from rpcbench.cells import client
from rpcbench.cells.client import CellClient, Rerun
from rpcbench.cells.worker_main import LEAVE, STOP, Place, meet
from rpcbench.launch import ranks, registry
from rpcbench.launch.base import UNKNOWN, Gang, Handle, Inseparable, Launcher, has_ended, late_warning, stopped
from rpcbench.launch.base_cluster import START_SECONDS, BaseCluster, cluster
from rpcbench.launch.status import Launched, Started, Watched, check_descriptors, oom_kills
from rpcbench.protocol.membership import SILENT
from rpcbench.rpc.init import start_agent
from rpcbench.rpc.options import TensorPipeRpcBackendOptions
from rpcbench.runtime.members import WorkerInfo
from rpcbench.serialization.tensor_types import Name
from rpcbench.transport.hosts import bind_address, host_id, outbound_address
from rpcbench.transport.run_dir import RunDirectory

if TYPE_CHECKING:
    from rpcbench.launch.join import Joined

__all__ = ["START_SECONDS", "Cluster", "Progress", "cluster"]

_KILL_SECONDS = 10.0
_LONGEST_GRACE = 86_400.0
_OBITUARY_SECONDS = 5.0
_LAST_LINES = 12

Progress = Callable[[int, int], object]


class Cluster(BaseCluster):
    """`n` workers, named worker1 … workern. Leave by `shutdown()`, or use it in a `with` block.

    kind: "process", or "kernel" for workers that are Jupyter kernels, of the kernel spec `kernel`: other clients see
    what their cells have made (`connection_file`). start, of processes: "fork" (from one that has torch loaded; default
    on Linux) or "spawn". launcher: what starts them, by name, and its `options`: "local" and "kernel" are those two;
    "command" takes them to other hosts (docs/past-one-machine.md). address: where workers on other hosts dial this
    process, "host", "host:port" or ":port"; by default on the interface that leads outward, or on RPCBENCH_BIND, at a
    free port. grace: seconds that workers have to end by themselves, at `shutdown`, `scale` and `restart`: `atexit`
    functions and finalizers run; then they are terminated, and named in a RuntimeWarning. Ctrl-C ends that wait.
    rpc_timeout: seconds a call may take that names no timeout, 0 for none. device_maps: for calls of each
    worker, by whichever member, the device here and the device there; same_modes: calls of all members take grad mode
    and autocast along (for both see `TensorPipeRpcBackendOptions`). progress: called, while they start, with how many
    serve and of how many. RpcError where a worker cannot start, ValueError where kind, start, launcher or an
    option is unknown, or the device maps do not fit.

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
        grace: float = STOP_SECONDS,
        rpc_timeout: float = DEFAULT_TIMEOUT,
        device_maps: Mapping[str, Mapping[Any, Name]] | None = None,
        same_modes: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if n < 1:
            raise ValueError(f"a cluster has at least one worker, not {n}")
        if not 0 <= grace <= _LONGEST_GRACE:
            raise ValueError(f"grace={grace}: workers have between 0 and {_LONGEST_GRACE:,.0f} seconds to end")
        super().__init__()
        config = WorldConfig(NOTEBOOK, 0, secrets.token_hex(8), "", secrets.token_bytes(32), rpc_timeout=rpc_timeout)
        config = TensorPipeRpcBackendOptions(device_maps=device_maps, same_modes=same_modes)._completed(config)
        name, given = registry.chosen_launcher(launcher, kind, kernel, start)
        self.kind = {"local": "process"}.get(name, name)
        with ExitStack() as undo:
            directory = RunDirectory()
            undo.callback(directory.remove)
            self._launcher: Launcher = registry.make_launcher(name, directory, {**given, **(options or {})})
            undo.callback(self._launcher.close)
            if self._launcher.far:
                config = replace(config, remote=outbound_address(address), bind=bind_address())
            elif address is not None:
                raise ValueError(f"address={address!r}: workers of launcher {name!r} are on this host and need none")
            self._launcher.warm()
            self._config = replace(config, directory=str(directory.path), host=host_id(), stop_seconds=grace)
            self.agent = start_agent(self._config)
            undo.pop_all()
        self._handles: dict[str, Handle] = {}
        self._places: dict[str, Place] = {}  # of those that serve, and those that did
        self._incarnations: dict[str, int] = {}
        self._oom_kills: dict[str, int] = {}  # when each worker was started
        self._given_up: dict[str, str] = {}  # why, of those elsewhere whose end nobody has told of
        self._moving = threading.Lock()  # `scale` or `restart` is at work; a click may ask beside a cell
        self._changes = Changes()
        self._ending = threading.Lock()
        self._ended = False
        self._maker = os.getpid()
        self.agent.owner = self
        self.agent.roster.explain = self._obituary
        self.agent.roster.expected = lambda: list(self._handles)
        self.agent.on_member(self._member_changed)
        Launched(self.agent, self._started)
        atexit.register(self.shutdown)
        try:
            self._start([f"worker{i}" for i in range(1, n + 1)], progress)
        except BaseException:
            self._shut(0.0)
            raise

    # -- members
    @property
    def lost(self) -> list[str]:
        """Names of those that ended without being asked to, and have not been started again."""
        return [name for name in list(self._handles) if self._lost(name)]

    @staticmethod
    def join(url: str, **options: Any) -> Joined:
        """The workers that others have started, as by `torchrun … -m rpcbench.worker`, at the address that these show.

        For the options, and what cannot be done with such workers, see `rpcbench.launch.join.Joined`.
        """
        from rpcbench.launch.join import Joined

        return Joined(url, **options)

    def pid(self, name: str) -> int:
        """Process id of a worker, on its host."""
        self._handle(name)
        return self._place(name).pid

    def watched(self) -> list[Watched]:
        """What is known here of each worker, lost ones as well, without a look at its process."""
        calls = Counter(self.agent.machine.ask(lambda node: [call.to for call in node.calls.outgoing.values()]))
        there = {info.name: info.id for info in self.agent.members()}
        return [
            Watched(name, self._incarnations[name], self._place(name), self._lost(name), calls[there.get(name, -1)])
            for name in list(self._handles)
        ]

    def log(self, name: str) -> str:
        """The last lines that a worker, lost or not, has written outside any cell or call; empty if it wrote none."""
        return self._handle(name).last_words()

    def connection_file(self, name: str) -> str:
        """By what clients find a kernel worker: `jupyter console --existing FILE`. RuntimeError if it is none."""
        self._handle(name)
        return registry.connection_file(self._launcher, name)

    def scale(self, n: int) -> None:
        """Start more workers, or end the last ones, until there are `n`. Names of lost workers are started again."""
        if n < 1:
            raise ValueError(f"a cluster has at least one worker, not {n}; end it with shutdown()")
        wanted = [f"worker{i}" for i in range(1, n + 1)]
        with self._moving:
            if self.workers and wanted != self.workers:
                self._check_parting()
            self._leave(leaving := [name for name in self.workers if name not in wanted])
            if missing := [name for name in wanted if name not in self.workers]:
                self._start(missing)
            elif leaving:
                ranks.settled(self._settle(f"{', '.join(leaving)} left"))

    def restart(self, name: str, *, replay: bool = False) -> list[Rerun]:
        """End a worker, if it still runs, and start it again under its name; what it held is lost. A worker that could
        not be started is lost.

        replay: then run the cells again that it had run without an error, in order, and with the variables that were
        sent along. Returns those cells, each with the error that it failed with this time, or None.
        """
        with self._moving:
            self._handle(name)
            self._check_parting()
            self._part([self._handles[name]])
            past = self.agent.part(CellClient).history.take(name)
            ranks.settled(self._settle(f"{name} was restarted"))  # whoever waits for it in a process group is told
            self._start([name])
        return client.rerun_script_cells(self.agent, name, past) if replay else []

    def interrupt(self, name: str) -> None:
        """Interrupt the cell that runs on a worker, from outside: KeyboardInterrupt there. Harmless when it is idle."""
        handle = self._handle(name)
        if not self._launcher.far:
            handle.interrupt()
        elif name in self.workers:
            self.agent.notify(self.agent.member(name).id, STOP, None)

    def kill(self, name: str) -> None:
        """End a worker at once, as a crash would (SIGKILL), and wait until it is known to be lost. See `restart`."""
        handle = self._handle(name)
        handle.kill()
        handle.wait(_KILL_SECONDS)
        self._await(lambda: name not in self.workers, [], f"the end of {name}")

    def shutdown(self) -> None:
        """End all workers, which have their grace for that, and remove all files. Idempotent."""
        self._shut(self._config.stop_seconds)

    def _shut(self, grace: float) -> None:
        with self._ending:
            if self._ended:
                return
            self._ended = True
        atexit.unregister(self.shutdown)
        late: list[str] = []
        try:
            self.agent.shutdown(graceful=False)
            if os.getpid() == self._maker:
                late = stopped(lambda: self._running(self._handles.values()), self._changes, grace)
        finally:
            self._launcher.close()
        if grace:  # else no start was complete
            self._tell(late)

    def __repr__(self) -> str:
        if self._ended:
            return "<Cluster: shut down>"
        lost = f"; lost: {', '.join(self.lost)}" if self.lost else ""
        return f"<Cluster of {', '.join(self.workers) or 'no workers'}{lost}>"

    # -- starting and ending
    def _start(self, names: list[str], progress: Progress | None = None) -> None:
        """Start workers side by side and wait until all serve."""

        def joined() -> bool:
            serve = len(set(names) & set(self.workers))
            if progress is not None:
                progress(serve, len(names))
            return serve == len(names)

        self._check_open()  # `shutdown` does not wait for a start on another thread
        check_descriptors(len(names))
        before = self._handles.copy()
        try:
            handles = self._launch([self._new(name) for name in names])
            self._await(joined, handles, f"{', '.join(names)} to join")
            count = len(self.workers) + 1
            told = self._settle(f"{', '.join(names)} joined")
            came = [self.agent.call(name, meet, (count,), timeout=START_SECONDS, own=True) for name in names]
            self._places.update(zip(names, wait_all(came), strict=True))
            ranks.settled(told)
        except BaseException:
            self._undo(names, before)
            raise

    def _undo(self, names: list[str], before: Mapping[str, Handle]) -> None:
        """Of workers that could not all be started none is left half-started; those that were lost before still are."""
        handles = [self._handles[name] for name in names if name in self._handles]
        for handle in handles:
            handle.kill()
        try:
            self._changes.wait_for(lambda: not self._running(handles), _KILL_SECONDS)
            self._changes.wait_for(lambda: not set(names) & set(self.workers), _KILL_SECONDS)
        finally:
            for name in names:
                if name not in before:
                    self._handles.pop(name, None)

    def _new(self, name: str) -> WorldConfig:
        """What a worker is to know that starts now."""
        self.agent.part(CellClient).history.take(name)  # it has run nothing
        self._incarnations[name] = incarnation = self._incarnations.get(name, -1) + 1
        self._oom_kills[name] = oom_kills()
        self._places.pop(name, None)
        self._given_up.pop(name, None)
        leader = self.agent.machine.ask(lambda node: node.members.me.remote)
        ours = replace(self._config, leader=leader, remote="", bind="", devices=())
        return replace(ours, name=name, id=_id(name), incarnation=incarnation)

    def _launch(self, configs: list[WorldConfig]) -> list[Handle]:
        if isinstance(self._launcher, Gang):
            handles = self._launcher.start_all(configs, self._exited)
            self._handles.update((handle.name, handle) for handle in handles)
            return list(handles)
        for config in configs:
            self._handles[config.name] = self._launcher.start(config, self._exited)
        return [self._handles[config.name] for config in configs]

    @property
    def inseparable(self) -> str:
        if not isinstance(self._launcher, Inseparable):
            return ""
        every = f"cluster.scale({len(self._handles)}) starts all that were lost"
        return f"{self._launcher.inseparable}: none comes or goes alone; {every}"

    def _check_parting(self) -> None:
        if self.inseparable:
            raise RpcError(self.inseparable)

    def _settle(self, why: str) -> list[Future[None]]:
        """Tell the workers that serve which ranks they are now."""
        return ranks.settle(self.agent, {name: _id(name) - 1 for name in self.workers}, len(self._handles), why)

    def _leave(self, names: list[str]) -> None:
        self._part([self._handles.pop(name) for name in names])

    def _part(self, handles: Sequence[Handle]) -> None:
        """Ask workers to end, and see them to their end; those that are lost are killed, as they may hang."""
        names = [handle.name for handle in handles]
        for handle in handles:
            if handle.name in self.workers:
                self.agent.notify(self.agent.member(handle.name).id, LEAVE, None)
            else:
                handle.kill()
        late = stopped(lambda: self._running(handles), self._changes, self._config.stop_seconds)
        for handle in handles:
            handle.kill()  # its children, too; and a starter that hangs is noticed by this
            handle.wait(_KILL_SECONDS)
        self._await(lambda: not set(names) & set(self.workers), [], f"the end of {', '.join(names)}")
        self._tell(late)

    def _running(self, handles: Iterable[Handle]) -> list[Handle]:
        """A worker that has ended does not run, even if its starter hangs and tells nobody."""
        return [handle for handle in list(handles) if handle.poll() is None and not has_ended(handle)]

    def _tell(self, late: Sequence[str]) -> None:
        if late and self._config.stop_seconds:
            warnings.warn(late_warning(late, self._config.stop_seconds), RuntimeWarning, stacklevel=4)

    def _await(self, done: Callable[[], bool], handles: Sequence[Handle], what: str) -> None:
        def reached() -> bool:
            if done():
                return True
            self._check_open()
            for handle in handles:
                if (status := handle.poll()) is not None:
                    told = f":\n{words}" if (words := handle.last_words()) else ", and has said nothing"
                    raise RpcError(f"{handle.name} ended ({_ending(status)}) before it could serve{told}")
            return False

        if not self._changes.wait_for(reached, START_SECONDS):
            raise RpcError(f"waited {START_SECONDS:g} s in vain for {what}")

    def _check_open(self) -> None:
        if self._ended:
            raise ShutdownError("this cluster is shut down; make a new one")

    def _exited(self, handle: Handle, status: int) -> None:
        self._changes.tell()

    def _member_changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        if kind == "lost" and self._launcher.far:
            self._give_up(who.name, reason)
        self._changes.tell()

    def _give_up(self, name: str, reason: str) -> None:
        """End what has launched a worker that is lost: it may wait for it for long. Not that of one started since."""
        handle = self._handles.get(name)
        if handle is not None and handle.poll() is None and name in self._places and name not in self.workers:
            self._given_up[name] = reason
            handle.kill()

    def _obituary(self, name: str, reason: str) -> str:
        """Why a worker's connection ended, as far as its process knows."""
        handle = self._handles.get(name)
        if handle is None or reason.startswith(SILENT):  # nor is anything heard of its process
            return reason
        try:
            status = handle.wait(_OBITUARY_SECONDS)
        except TimeoutError:
            return reason
        starved = status == -signal.SIGKILL and oom_kills() > self._oom_kills[name]
        ended = f"its process ended ({_ending(status)}{', likely out of memory' if starved else ''})"
        last = handle.last_words().splitlines()[:_LAST_LINES] if status else []
        return "\n  ".join([f"{ended}; its last words:", *last]) if last else ended

    def _started(self) -> list[Started]:
        """Those that are there, and those that are lost."""
        return [
            Started(_id(name), name, self._place(name), self._incarnations[name], self._lost(name), handle.last_words())
            for name, handle in self._handles.copy().items()
        ]

    def _lost(self, name: str) -> str:
        """How its process has ended, or why it is given up; empty while it runs."""
        status = self._handles[name].poll()
        if status is None:  # calls may fail before the launcher has heard of the end
            gone = self.agent.machine.ask(lambda node: node.gone.find(name))
            if gone is not None and gone.lost and gone.member.incarnation == self._incarnations[name]:
                return gone.reason
        return self._given_up.get(name) or ("" if status is None else _ending(status))

    def _place(self, name: str) -> Place:
        """Where a worker is; until it has said so, where what launches it is."""
        return self._places.get(name) or Place(host_id(), socket.gethostname(), self._handles[name].pid)

    def _handle(self, name: str) -> Handle:
        handle = self._handles.get(name)
        if handle is None:
            raise UnknownWorkerError.of(name, self._handles)
        return handle


def _id(name: str) -> int:
    return int(name.removeprefix("worker"))


def _ending(status: int | None) -> str:
    """An exit status in words."""
    if status == UNKNOWN:
        return "nobody knows how"
    if status is None or status >= 0:
        return f"exit code {status}"
    return f"killed by {signal.Signals(-status).name}"
