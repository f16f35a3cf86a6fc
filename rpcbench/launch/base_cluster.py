"""What is done with the workers of a world from one of its members, the notebook, however they came to be.

`Cluster` has started them; `Joined` has found them running. Cells, calls, groups and the tables of both are alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from rpcbench.base.config import UNSET_TIMEOUT
from rpcbench.base.futures import Future, wait_all
from rpcbench.cells import client
from rpcbench.cells.client import Rerun
from rpcbench.cells.reload import execute_source, source_of
from rpcbench.launch import ranks
from rpcbench.launch.status import ClusterStatus, Looks, Watched
from rpcbench.rpc.api import arguments_of
from rpcbench.rpc.rref import RRef
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent

if TYPE_CHECKING:
    from rpcbench.distributed.groups import NamedGroup


START_SECONDS = 60.0


class BaseCluster(ABC):
    """Leave by `shutdown()`, or use it in a `with` block. `kind` says in a word what the workers are."""

    agent: Agent
    kind: str
    farewell = "The cluster is stopped."

    def __init__(self) -> None:
        self._looks = Looks()
        self._using: ExitStack | None = None

    def prefer(self) -> None:
        """Make this one the current cluster, of several that run."""
        current.prefer(self.agent)

    # -- members
    @property
    def inseparable(self) -> str:
        """Why none of its workers is started again alone, and what to do instead; empty where each can be."""
        return ""

    @property
    def over(self) -> bool:
        """Whether it has ended without being asked to: nobody can serve in it any more."""
        return False

    @property
    def workers(self) -> list[str]:
        """Names of the workers that serve."""
        return [info.name for info in self.agent.members() if info.id != 0]

    @property
    @abstractmethod
    def lost(self) -> list[str]:
        """Names of those that ended without being asked to, and have not been started again."""

    @abstractmethod
    def watched(self) -> list[Watched]:
        """What is known here of each worker, lost ones as well, without a look at its process."""

    @abstractmethod
    def log(self, name: str) -> str:
        """The last lines that a worker, lost or not, has written outside any cell or call; empty if it wrote none."""

    def status(self) -> ClusterStatus:
        """How each worker is, lost ones as well; drawn as a table. Nothing is asked of the workers themselves."""
        return self._looks.at(self.watched())

    def wait_for(self, n: int, timeout: float = START_SECONDS) -> None:
        """Wait until `n` workers serve, also such as others start. RpcError after `timeout` s: who came, who not."""
        self.agent.wait_for(n + 1, timeout)

    # -- changes
    @abstractmethod
    def scale(self, n: int) -> None:
        """Start more workers, or end the last ones, until there are `n`."""

    @abstractmethod
    def restart(self, name: str, *, replay: bool = False) -> list[Rerun]:
        """End a worker, if it still runs, and start it again under its name; what it held is lost."""

    @abstractmethod
    def interrupt(self, name: str) -> None:
        """Interrupt the cell that runs on a worker, from outside: KeyboardInterrupt there. Harmless when it is idle."""

    @abstractmethod
    def kill(self, name: str) -> None:
        """End a worker at once, as a crash would (SIGKILL), and wait until it is known to be lost."""

    @abstractmethod
    def shutdown(self) -> None:
        """End this process's part in the world. Idempotent."""

    def stop(self) -> None:
        """As `shutdown`."""
        self.shutdown()

    def reload(self, *modules: str | ModuleType) -> None:
        """Load modules anew, in this order, here and then on all workers: as their files are here and now.

        A worker needs no such file. What fails here is raised, and no worker changes; what fails on a worker is raised
        with its own type. ModuleNotFoundError, or ImportError for what is not written in Python.
        """
        sources = [source_of(module) for module in modules]
        execute_source(sources)
        wait_all([self.agent.call(name, execute_source, (sources,), own=True) for name in self.workers])

    # -- cells and calls
    def run(
        self, workers: str | Sequence[str], code: str, *, push: Mapping[str, Any] | None = None,
        want: str | Sequence[str] = (), timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Run a cell, as `%%remote` does: its output appears here as it comes, its error is raised here with its type.

        workers: a name; or several: names, "all", "[1:]". push: variables to set there first. want: names of variables
        to bring back, as a dict; with none, the value of the last expression is. From several workers each value is a
        dict by worker. timeout: seconds; then the cell is interrupted and RpcTimeoutError raised. Ctrl-C interrupts it
        as well. ValueError for a slice that is none, UnknownWorkerError.

        >>> cluster.run("worker1", "y = x + 1", push={"x": 6}, want=["y"])
        {'y': 7}
        >>> cluster.run("all", "import os; os.getpid() > 0")
        {'worker1': True, 'worker2': True}
        """
        return client.run_script_cell(self.agent, self.workers, workers, code, push, want, timeout)

    def rpc_sync(
        self, to: str, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: float = UNSET_TIMEOUT
    ) -> Any:
        """As `rpcbench.rpc.rpc_sync`, in this cluster."""
        return self.agent.ask(to, func, *arguments_of(args, kwargs), timeout)

    def rpc_async(
        self, to: str, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: float = UNSET_TIMEOUT
    ) -> Future[Any]:
        """As `rpcbench.rpc.rpc_async`, in this cluster."""
        return self.agent.call(to, func, *arguments_of(args, kwargs), timeout)

    def remote(
        self, to: str, func: Callable[..., Any], args: Any = (), kwargs: Any = None, timeout: float = UNSET_TIMEOUT
    ) -> RRef[Any]:
        """As `rpcbench.rpc.remote`, in this cluster."""
        rref = self.agent.create(to, func, *arguments_of(args, kwargs), timeout)
        assert isinstance(rref, RRef)
        return rref

    def group(self, *workers: str) -> NamedGroup:
        """A process group of these workers, once `init_process_group` has been called on all: a handle for `group=`.

        It may travel to the workers as any value. CollectiveError where a worker is in no world, UnknownWorkerError.
        """
        return ranks.group(self.agent, self.workers, workers)

    def __enter__(self) -> Self:
        self._using = ExitStack()
        self._using.enter_context(current.using(self.agent))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._using is not None:
            self._using.close()
        self.shutdown()


def cluster() -> BaseCluster:
    """The current cluster: the innermost `with`, else the latest started. RuntimeError where there is none."""
    agent = current.find()
    if agent is None or not isinstance(agent.owner, BaseCluster):
        raise RuntimeError("no cluster is running: start one with rpcbench.Cluster(2), in a notebook %cluster start 2")
    return agent.owner
