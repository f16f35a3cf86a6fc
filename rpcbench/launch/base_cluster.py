"""The base class of clusters: the methods by which a notebook uses the workers of its world.

`Cluster` starts workers; `AttachedCluster` joins running ones. Cells, calls, groups and status are the same for both.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from rpcbench.base.config import START_SECONDS, UNSET_TIMEOUT
from rpcbench.base.futures import Future, wait_all
from rpcbench.cells import client
from rpcbench.cells.history import Rerun
from rpcbench.cells.partition import Dimension
from rpcbench.cells.reload import execute_sources, read_source
from rpcbench.cells.targets import ALL
from rpcbench.launch import meshes, ranks, stacks, worker_variables
from rpcbench.launch.meshes import ClusterMesh
from rpcbench.launch.stacks import StackReport
from rpcbench.launch.status import ClusterStatus, ProcessSampler, WorkerRecord
from rpcbench.launch.task_map import TaskMap
from rpcbench.launch.task_pool import TaskPool
from rpcbench.launch.worker_variables import WorkerVariables
from rpcbench.rpc.api import arguments_of
from rpcbench.rpc.rref import RRef
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.transport.question_socket import QuestionSocket

if TYPE_CHECKING:
    from rpcbench.compare.report import CompareReport
    from rpcbench.distributed.groups import NamedGroup
    from rpcbench.launch.compare_programs import Program

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
MAIN = "main"  # the name of a cluster that was given none
_given_name: ContextVar[str] = ContextVar("rpcbench_cluster_name", default="")
_naming = threading.Lock()  # two threads must not give one cluster two names


class BaseCluster(ABC):
    """The workers of a world, seen from its notebook. End it with `shutdown()`, or use it in a `with` block."""

    agent: Agent
    directory: Path  # for sockets and the like, which only this user can enter
    kind: str  # the kind of workers in a word, for display
    arguments: Mapping[str, Any] = {}  # of `Cluster`, by which the workers were started; without their number and kind
    label: str  # the name that the notebook has given it, or `running_clusters`; empty before that
    farewell = "The cluster is stopped."  # shown by `%cluster stop`

    def __init__(self) -> None:
        self.label = _given_name.get()
        self._sampler = ProcessSampler()
        self._using: ExitStack | None = None  # a `with` block makes this cluster the current one

    def prefer(self) -> None:
        """Make this cluster the current one."""
        current.make_current(self.agent)

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

    @abstractmethod
    def find_log(self, name: str) -> Path:
        """Return the file that has a worker's output outside cells. RpcError, with the place of that output, where no
        file of this host has it."""

    def _count_calls(self) -> Counter[int]:
        """Return how many calls of this process wait for a reply, by the id of the worker."""
        return Counter(self.agent.machine.read_node(lambda node: [call.to for call in node.calls.outgoing.values()]))

    def status(self) -> ClusterStatus:
        """Return the status of each worker, lost ones as well, as a table. No request goes to the workers."""
        return self._sampler.sample_workers(self.watched())

    def wait_for(self, n: int, timeout: float = START_SECONDS) -> None:
        """Wait until `n` workers serve, including workers that others start.

        Args:
            n: The number of workers.
            timeout: Seconds.

        Raises:
            RpcError: Fewer serve after `timeout`; the text names those that came and those that did not.
        """
        self.agent.wait_for(n + 1, timeout)  # and the notebook itself

    def stack(self, name: str = "all") -> StackReport:
        """Report where each thread of a worker is: the cell or call that it runs, calls that it waits for, its lines.

        A worker of this host whose code lets no Python thread run is asked by a signal.

        Args:
            name: Of the worker; "all" for all.

        Returns:
            A text, which a cell shows line by line.

        Raises:
            UnknownWorkerError: There is no such worker.
            WorkerLostError: It is lost.

        >>> cluster.stack("worker1")
        worker1: nothing to do, and no thread waits
        """
        return stacks.stack_report(self.agent, self.workers if name == ALL else [name], self.watched())

    def _answer_questions(self) -> None:
        """Answer other programs of this user, such as `rpcbench state`, until the agent ends."""
        listener = QuestionSocket(self.directory, self._answer_question)
        self.agent.hooks.on_end.append(listener.close)
        self.agent.hooks.on_fork.append(listener.after_fork)

    def _answer_question(self, question: str) -> Any:
        # Loaded by name, for the first question: telemetry stands above this package, and is large.
        return importlib.import_module("rpcbench.telemetry.cluster_state").answer_question(self.agent, question)

    # -- changes
    @abstractmethod
    def scale(self, n: int) -> None:
        """Start more workers, or end the last ones, until there are `n`."""

    @abstractmethod
    def restart(self, name: str, *, replay: bool = False) -> list[Rerun]:
        """End a worker, if it still runs, and start it again under its name, without its former state."""

    def interrupt(self, name: str) -> bool:
        """Interrupt the cell that runs on a worker, with KeyboardInterrupt there. Harmless if the worker is idle.

        Calls go on: each ends with the code that waits for it.

        Returns:
            Whether a cell of this process ran, or waited, there.
        """
        has_cell = name in self.workers and self.agent.part(client.CellClient).has_cell_on(self.agent.member(name).id)
        self._interrupt_worker(name)
        return has_cell

    @abstractmethod
    def _interrupt_worker(self, name: str) -> None:
        """Send an interrupt to a worker's main thread. UnknownWorkerError if there is none of this name."""

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
        sources = [read_source(module) for module in modules]
        execute_sources(sources)  # here first: if that fails, no worker changes
        wait_all(
            [self.agent.call(name, execute_sources, (sources,), label="reload", own=True) for name in self.workers]
        )

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

    def __getitem__(self, worker: str) -> WorkerVariables:
        """Return the variables of a worker's cells, as a mapping that reads, sets and deletes them, also while a cell
        runs there.

        Raises:
            UnknownWorkerError: There is no such worker.
            WorkerLostError: It is lost.

        >>> cluster["worker1"]["x"] = torch.ones(2, 3)
        >>> cluster["worker1"]["x"].sum()
        tensor(6.)
        >>> del cluster["worker1"]["x"]
        >>> "x" in cluster["worker1"]
        False
        """
        return worker_variables.variables_of_worker(self.agent, self.workers, worker)

    def scatter(
        self, name: str, value: Any, *, dim: Dimension = 0, workers: str | Sequence[str] = ALL
    ) -> dict[str, int]:
        """Split a value, and set a part of it as a variable on each worker, as `%%remote all -i x:scatter` does.

        Args:
            name: The variable.
            value: A tensor, an array, or a sequence such as a list.
            dim: The dimension to split, a number or a name.
            workers: As in `run`; the first one gets the first part.

        Returns:
            The size of the part of each worker. Sizes differ by at most one.

        Raises:
            ValueError: The value has no such dimension, or is shorter than there are workers.
            TypeError: It cannot be split.

        >>> cluster.scatter("x", torch.arange(5))
        {'worker1': 3, 'worker2': 2}
        >>> cluster.run("all", "y = x * 2")
        {'worker1': None, 'worker2': None}
        >>> cluster.gather("y")
        tensor([0, 2, 4, 6, 8])
        """
        return worker_variables.scatter(self.agent, self.workers, name, value, dim, workers)

    def gather(self, name: str, how: str = "cat", *, dim: Dimension = 0, workers: str | Sequence[str] = ALL) -> Any:
        """Return the values that a variable has on all workers as one, as `%%remote all -o y:cat` does.

        Args:
            name: The variable.
            how: "cat" joins tensors, arrays and sequences; "stack" makes a new dimension, of numbers a tensor; "sum"
                adds up; "list" makes a list.
            dim: The dimension for "cat" and "stack".
            workers: As in `run`; their order is that of the values.

        Raises:
            ValueError: The values do not fit together; the text has the layout of each.
            UnknownVariableError: A worker has no such variable.
        """
        return worker_variables.gather(self.agent, self.workers, name, how, dim, workers)

    def spmd(
        self, train: Callable[..., T], *args: Any, backend: str | None = None,
        workers: str | Sequence[str] = ALL, typecheck: bool = False, **kwargs: Any,
    ) -> list[T]:  # fmt: skip
        """Run a function on all workers at once, as ranks of a process group that is made before and ended after it.

        It runs as a cell does: output appears here with the worker's name, Ctrl-C interrupts all ranks. The error of
        one rank ends the others, and is raised here with its type. The variables of torchrun (RANK, WORLD_SIZE,
        LOCAL_RANK) are set. The workers stay, with their variables.

        Args:
            train: The function, which may be one of the notebook; `torch.distributed` works in it.
            *args: Its arguments.
            backend: As of `rpcbench.distributed.init_process_group`.
            workers: As in `run`; the first one is rank 0.
            typecheck: Whether the package spmd_types checks the function's types meanwhile, strictly, over a mesh of
                one dimension, `rank`. The extra `types` has it.
            **kwargs: Its arguments by name.

        Returns:
            The results, by rank.

        Raises:
            TypeError: `train` is no function.
            CollectiveError: A worker is in a process group already, or there is no such backend.
            ModuleNotFoundError: `typecheck` without the extra `types`, here or on a worker.
            WorkerLostError: A worker is lost.

        >>> def train(lr):
        ...     total = torch.tensor(lr)
        ...     torch.distributed.all_reduce(total)
        ...     return torch.distributed.get_rank(), total.item()
        >>> cluster.spmd(train, 0.5)
        [(0, 1.0), (1, 1.0)]
        """
        from rpcbench.launch import spmd  # here: it loads torch.distributed

        if not callable(train):
            raise TypeError(f"spmd runs a function on each rank, and {train!r} is none: cluster.spmd(train, 0.01)")
        names = spmd.select_ranks(self.workers, self.lost, workers)
        program = partial(train, *args, **kwargs)
        return spmd.run_program(self.agent, names, backend, program, typecheck=typecheck)

    def compare(
        self, *, reference: Program, parallel: Program, mesh: Mapping[str, int] | None = None, steps: int = 1,
        workers: str | Sequence[str] = ALL, backend: str | None = None, driver: bool = False,
    ) -> CompareReport:  # fmt: skip
        """Compare a parallel training step with the same step in one process, and name the first wrong tensor.

        Outputs of modules, the loss, gradients, parameters, buffers and the optimizer's state are compared, by the
        names of modules and parameters. How the ranks share each tensor is inferred; nothing is annotated. Dropout is
        left out of both computations, and its masks are compared apart.

        Args:
            reference: Two functions: `make_model()` returns the model, `step(model)` runs forward and backward, and
                perhaps an optimizer, and returns the loss. They run here.
            parallel: The same on each rank: `make_model(mesh)` and `step(model, mesh)`, with a `DeviceMesh`; either may
                do without it. They run as a function of `spmd` does. Of a pipeline, the model is the rank's stage, and
                the step returns None where there is no loss. With `driver=True` they run here, as `make_model()` and
                `step(model)`, where the model is a `Pipeline` of `rpcbench.pipeline`, or has parts in RRefs.
            mesh: Sizes of the mesh by name, as of `cluster.mesh`; None: one dimension, `rank`.
            steps: How often to call `step`.
            workers: As in `run`; the first one is rank 0.
            backend: As of `rpcbench.distributed.init_process_group`.
            driver: The parallel program is one that this process drives.

        Returns:
            The report: `ok`, `first`, `verdicts`, `layouts`; `print(report)` shows it.

        Raises:
            CompareError: A program returns no loss, the reference is random, no names match, or `driver` is not as the
                program is.
            ValueError: The mesh does not fit the workers.
            WorkerLostError: A worker is lost.

        >>> def make_model():
        ...     torch.manual_seed(0)
        ...     return torch.nn.Linear(4, 1)
        >>> def step(model):
        ...     loss = model(torch.ones(2, 4)).mean()
        ...     loss.backward()
        ...     return loss
        >>> cluster.compare(reference=(make_model, step), parallel=(make_model, step)).ok
        True
        """
        from rpcbench.launch import compare_programs, spmd  # here: they load torch.distributed

        names = spmd.select_ranks(self.workers, self.lost, workers)
        if driver:
            from rpcbench.launch import compare_drivers  # here: it loads pipelines

            return compare_drivers.compare_driver(self.agent, names, reference, parallel, mesh, steps, backend)
        return compare_programs.compare_programs(self.agent, names, reference, parallel, mesh, steps, backend)

    def compare_captures(
        self, name: str, reference: Program, *, mesh: Mapping[str, int] | None = None,
        workers: str | Sequence[str] = ALL,
    ) -> CompareReport:  # fmt: skip
        """Compare what cells of workers have captured with the same training in one process.

        Args:
            name: The variable that the capture has on each worker: `with rpcbench.capture(model) as run:` in a cell.
            reference: Two functions, as of `compare`; the step is called as often as the workers have taken one.
            mesh: As of `compare`: which worker is at which coordinate, the last dimension running fastest.
            workers: As in `run`.

        Raises:
            CompareError: A worker has no such capture, or another number of steps, or the reference is random.

        >>> begin = "import rpcbench, torch; torch.manual_seed(0); model = torch.nn.Linear(4, 1)"
        >>> block = "with rpcbench.capture(model) as run: run.end_step(model(torch.ones(2, 4)).sum())"
        >>> done = cluster.run("all", begin), cluster.run("all", block)
        >>> def make_model():
        ...     torch.manual_seed(0)
        ...     return torch.nn.Linear(4, 1)
        >>> cluster.compare_captures("run", (make_model, lambda model: model(torch.ones(2, 4)).sum())).ok
        True
        """
        from rpcbench.launch import compare_programs, spmd  # here: they load torch.distributed

        names = spmd.select_ranks(self.workers, self.lost, workers)
        return compare_programs.compare_captures(self.agent, names, name, reference, mesh)

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

    # -- tasks
    def map(
        self, function: Callable[[S], T], items: Iterable[S], workers: str | Sequence[str] = "all", *,
        ordered: bool = True, retries: int = 0, progress: bool = True,
    ) -> TaskMap[T]:  # fmt: skip
        """Run a function for each item on workers; the next item goes to the worker that is free first.

        The results come by `for`, by `async for`, or by `await`, which gives the list of all. Items are drawn as
        results are taken, so there may be any number of them. The first error ends the map, with its item in a note.
        Ctrl-C, `break` and `close()` end it, too: items that have not begun are dropped, and `rpc.cancelled()` is True
        in those that run.

        Args:
            function: Called with one item, on a thread of a worker, beside its cells; it may be a lambda.
            items: Any iterable, also an infinite one.
            workers: Where to run: "all", which means workers that join later, too; "[1:]", names.
            ordered: Give the results in the order of the items; else as they come.
            retries: How many times an item may run again, on another worker, if its worker is lost.
            progress: Show a bar if it takes longer than a second.

        Returns:
            An iterator of the results.

        Raises:
            TypeError: `function` is no function, or `items` no iterable.
            ValueError: `retries` is no whole number of at least 0, or `workers` a malformed slice.
            UnknownWorkerError: There is no such worker.
            ShutdownError: The cluster is shut down.

        >>> list(cluster.map(lambda x: x * x, range(5)))
        [0, 1, 4, 9, 16]
        >>> sorted(cluster.map(abs, (x for x in [-2, -1]), ordered=False))
        [1, 2]
        """
        return TaskMap(self.executor(workers), function, items, ordered, retries, progress)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        """Run `function(*args, **kwargs)` on the first worker that is free, of several free ones on the least busy.

        Each worker runs one of these tasks at a time; the others wait here.

        Returns:
            A `concurrent.futures.Future`; `cancel()` succeeds while its task waits. WorkerLostError is its error if the
            worker is lost.

        Raises:
            TypeError: `function` is no function.
            ShutdownError: The cluster is shut down.

        >>> cluster.submit(pow, 2, 10).result()
        1024
        """
        return self._task_pool.submit(function, *args, **kwargs)

    def executor(self, workers: str | Sequence[str] = "all") -> TaskPool:
        """Make a `concurrent.futures.Executor` that runs each task on a worker, one at a time on each.

        For code that takes an executor, such as `loop.run_in_executor`; `with` waits at its end for all tasks.

        Args:
            workers: Where to run, as of `map`.

        Raises:
            ValueError: `workers` is a malformed slice.
            UnknownWorkerError: There is no such worker.
            ShutdownError: The cluster is shut down.

        >>> with cluster.executor("worker2") as executor:
        ...     futures = [executor.submit(pow, 2, n) for n in (3, 4)]
        >>> [future.result() for future in futures]
        [8, 16]
        """
        return TaskPool(self.agent, workers, self._count_calls)

    @cached_property
    def _task_pool(self) -> TaskPool:
        return self.executor()

    # -- groups
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
        return meshes.make_mesh(self.agent, self.workers, self.lost, name, sizes)

    def __enter__(self) -> Self:
        self._using = ExitStack()
        self._using.enter_context(current.use_agent(self.agent))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._using is not None:
            self._using.close()
        self.shutdown()


def cluster() -> BaseCluster:
    """Return the current cluster: the innermost `with`, else the latest one. RuntimeError if there is none."""
    agent = current.find_current()
    if agent is None or not isinstance(agent.owner, BaseCluster):
        raise RuntimeError("no cluster is running: start one with rpcbench.Cluster(2), in a notebook %cluster start 2")
    return agent.owner


@contextmanager
def name_new_cluster(name: str) -> Iterator[None]:
    """Give the cluster that is made meanwhile a name: others see it before its workers have started."""
    token = _given_name.set(name)
    try:
        yield
    finally:
        _given_name.reset(token)


def running_clusters() -> dict[str, BaseCluster]:
    """Return the clusters that this process has now, by name. One that was given no name gets `MAIN`, or a number."""
    there = [agent.owner for agent in current.running_agents() if isinstance(agent.owner, BaseCluster)]
    with _naming:
        taken = {one.label for one in there}
        for one in [one for one in there if not one.label]:
            one.label = next(name for name in _proposed_names() if name not in taken)
            taken.add(one.label)
    return {one.label: one for one in there}


def _proposed_names() -> Iterator[str]:
    yield MAIN
    yield from (f"cluster{number}" for number in itertools.count(2))
