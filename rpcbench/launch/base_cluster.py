"""The base class of clusters: the methods by which a notebook uses the workers of its world.

`Cluster` starts workers; `AttachedCluster` joins running ones. Cells, calls, groups and status are the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from rpcbench.base.config import UNSET_TIMEOUT
from rpcbench.base.futures import Future, wait_all
from rpcbench.cells import client
from rpcbench.cells.client import Rerun
from rpcbench.cells.reload import execute_source, source_of
from rpcbench.launch import meshes, ranks
from rpcbench.launch.meshes import ClusterMesh
from rpcbench.launch.status import ClusterStatus, ProcessSampler, WorkerRecord
from rpcbench.rpc.api import arguments_of
from rpcbench.rpc.rref import RRef
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent

if TYPE_CHECKING:
    from rpcbench.distributed.groups import NamedGroup

START_SECONDS = 60.0  # for a worker to join


class BaseCluster(ABC):
    """The workers of a world, seen from its notebook. End it with `shutdown()`, or use it in a `with` block."""

    agent: Agent
    kind: str  # the kind of workers in a word, for display
    farewell = "The cluster is stopped."  # shown by `%cluster stop`

    def __init__(self) -> None:
        self._sampler = ProcessSampler()
        self._using: ExitStack | None = None  # a `with` block makes this cluster the current one

    def prefer(self) -> None:
        """Make this cluster the current one."""
        current.prefer(self.agent)

    # -- members
    @property
    def inseparable(self) -> str:
        """Why no worker can be restarted alone, and the alternative; empty if each can be."""
        return ""

    @property
    def over(self) -> bool:
        """Whether the world has ended by itself: no worker can serve in it any more."""
        return False

    @property
    def workers(self) -> list[str]:
        """Names of the workers that serve."""
        return [info.name for info in self.agent.members() if info.id != 0]

    @property
    @abstractmethod
    def lost(self) -> list[str]:
        """Names of workers that ended without being asked to, and have not been started again."""

    @abstractmethod
    def watched(self) -> list[WorkerRecord]:
        """Return the data of each worker, lost ones as well, that is known without a look at its process."""

    @abstractmethod
    def log(self, name: str) -> str:
        """Return the last lines that a worker, lost or not, wrote outside any cell or call; empty if it wrote none."""

    def _calls(self) -> Counter[int]:
        """Return how many calls of this process wait for a reply, by the id of the worker."""
        return Counter(self.agent.machine.ask(lambda node: [call.to for call in node.calls.outgoing.values()]))

    def status(self) -> ClusterStatus:
        """Return the status of each worker, lost ones as well, as a table. No request goes to the workers."""
        return self._sampler.at(self.watched())

    def wait_for(self, n: int, timeout: float = START_SECONDS) -> None:
        """Wait until `n` workers serve, including workers that others start.

        Args:
            n: The number of workers.
            timeout: Seconds.

        Raises:
            RpcError: Fewer serve after `timeout`; the text names those that came and those that did not.
        """
        self.agent.wait_for(n + 1, timeout)  # and the notebook itself

    # -- changes
    @abstractmethod
    def scale(self, n: int) -> None:
        """Start more workers, or end the last ones, until there are `n`."""

    @abstractmethod
    def restart(self, name: str, *, replay: bool = False) -> list[Rerun]:
        """End a worker, if it still runs, and start it again under its name, without its former state."""

    @abstractmethod
    def interrupt(self, name: str) -> None:
        """Interrupt the cell that runs on a worker, with KeyboardInterrupt there. Harmless if the worker is idle."""

    @abstractmethod
    def kill(self, name: str) -> None:
        """End a worker at once, as a crash would (SIGKILL), and wait until it counts as lost."""

    @abstractmethod
    def shutdown(self) -> None:
        """End this process's part in the world. Idempotent."""

    def stop(self) -> None:
        """Do the same as `shutdown`."""
        self.shutdown()

    def reload(self, *modules: str | ModuleType) -> None:
        """Reload modules in this order, here and then on all workers, from the source files of this host: workers need
        no such files. An error on a worker is raised with its own type.

        Raises ModuleNotFoundError, or ImportError for a module that is not written in Python.
        """
        sources = [source_of(module) for module in modules]
        execute_source(sources)  # here first: if that fails, no worker changes
        wait_all([self.agent.call(name, execute_source, (sources,), own=True) for name in self.workers])

    # -- cells and calls
    def run(
        self, workers: str | Sequence[str], code: str, *, push: Mapping[str, Any] | None = None,
        want: str | Sequence[str] = (), timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Run a cell, as `%%remote` does: its output appears here at once, its error is raised here with its type.

        Args:
            workers: The name of a worker; or several: names, "all", "[1:]".
            code: The text of the cell.
            push: Variables to set there first.
            want: Names of variables to return.
            timeout: Seconds until the cell is interrupted. Ctrl-C interrupts it as well.

        Returns:
            A dict of the variables `want`; without `want` the value of the last expression. From several workers each
            value is a dict by worker.

        Raises:
            ValueError: `workers` is a malformed slice.
            UnknownWorkerError: There is no such worker.
            RpcTimeoutError: The cell ran longer than `timeout`.

        >>> cluster.run("worker1", "y = x + 1", push={"x": 6}, want=["y"])
        {'y': 7}
        >>> cluster.run("all", "import os; os.getpid() > 0")
        {'worker1': True, 'worker2': True}
        """
        return client.run_script_cell(self.agent, self.workers, workers, code, push, want, timeout)

    def rpc_sync(
        self, to: str, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: float = UNSET_TIMEOUT
    ) -> Any:
        """Call a function as `rpcbench.rpc.rpc_sync` does, in this cluster."""
        return self.agent.ask(to, func, *arguments_of(args, kwargs), timeout)

    def rpc_async(
        self, to: str, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: float = UNSET_TIMEOUT
    ) -> Future[Any]:
        """Call a function as `rpcbench.rpc.rpc_async` does, in this cluster."""
        return self.agent.call(to, func, *arguments_of(args, kwargs), timeout)

    def remote(
        self, to: str, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: float = UNSET_TIMEOUT
    ) -> RRef[Any]:
        """Create a remote value as `rpcbench.rpc.remote` does, in this cluster."""
        rref = self.agent.create(to, func, *arguments_of(args, kwargs), timeout)
        assert isinstance(rref, RRef)
        return rref

    def group(self, *workers: str) -> NamedGroup:
        """Make a process group of these workers, and return a handle for `group=`, which can be sent to the workers.
        UnknownWorkerError; CollectiveError if a worker has not called `init_process_group`."""
        return ranks.group(self.agent, self.workers, workers)

    def mesh(self, *, name: str = "mesh", **sizes: int) -> ClusterMesh:
        """Make a torch `DeviceMesh` of all workers, as a variable of their cells, and return a description of it.

        Where the workers have no process group, they make one. After `scale` or `restart` call it again; a mesh of
        another shape may be made at any time.

        Args:
            name: The variable.
            **sizes: The name and the number of workers of each dimension, outermost first.

        Raises:
            ValueError: The product of the sizes is not the number of workers, a size is less than 1, or a name is no
                identifier.
            TypeError: A size is no whole number.
            WorkerLostError: A worker is lost.
            CollectiveError: Some workers are in process groups of their own.

        >>> cluster.mesh(dp=1, tp=2)
        mesh(dp=1, tp=2) on cpu
              tp=0     tp=1
        dp=0  worker1  worker2
        >>> cluster.run("worker2", "mesh['tp'].get_local_rank()")
        1
        >>> _ = cluster.run("all", "import rpcbench.distributed as dist; dist.destroy_process_group()")
        """
        return meshes.make(self.agent, self.workers, self.lost, name, sizes)

    def __enter__(self) -> Self:
        self._using = ExitStack()
        self._using.enter_context(current.using(self.agent))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._using is not None:
            self._using.close()
        self.shutdown()


def cluster() -> BaseCluster:
    """Return the current cluster: the innermost `with`, else the latest one. RuntimeError if there is none."""
    agent = current.find()
    if agent is None or not isinstance(agent.owner, BaseCluster):
        raise RuntimeError("no cluster is running: start one with rpcbench.Cluster(2), in a notebook %cluster start 2")
    return agent.owner
