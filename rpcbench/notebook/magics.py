"""The magics `%cluster`, `%%remote`, `%remote`, `%autoremote` and `%panel`: they parse and delegate.

Rules
- With `%autoremote worker1` cells run there, without a first line that says so. A cell that begins with a magic of its
  own (`%%…`, `%cluster`, `%remote`, `%panel`, …) runs as it says. Lines that such a cell shows begin with the worker's
  name.
- Errors of calls are shown as far as the user's code. So are errors that a worker raised, those that say themselves
  what is wrong (RpcError, PipelineError, NamesError), and Ctrl-C; and what they came of. Any other error that is raised
  in this package shows where.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand
from IPython.display import display

from rpcbench.base.errors import NamesError, PipelineError, RemoteError, RpcError, UnknownWorkerError, WorkerLostError
from rpcbench.cells.client import CellClient, CellInputs, CellOptions, CellResult
from rpcbench.cells.debugger import POST_MORTEM
from rpcbench.cells.display import OutputDisplay, collapsed, one_below_the_other
from rpcbench.cells.targets import Targets
from rpcbench.cells.tracebacks import of_user, short, shown_as
from rpcbench.launch import process
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.launch.cluster import cluster
from rpcbench.notebook import require_extra, with_help
from rpcbench.notebook.async_cells import CellHandle, in_tabs
from rpcbench.notebook.cluster_magic import Commands, running
from rpcbench.notebook.completion import Assist, Vocabulary
from rpcbench.notebook.fault_magics import DebugMagics, DrillMagics, RecordMagics, TraceMagics
from rpcbench.notebook.sidebar import Sidebar

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_OURS = ("%cluster", "%remote", "%autoremote", "%panel", "%record", "%debug ")
_OWN = ("%%", *_OURS, "%load_ext", "%unload_ext", "%reload_ext")


class AutoRemote:
    """A transformer of input lines, for IPython's `input_transformers_cleanup`."""

    def __init__(self) -> None:
        self.targets = ""
        """As `%%remote` takes them; empty: cells run here."""

    def __call__(self, lines: list[str]) -> list[str]:
        if self.before("".join(lines)) is None:
            return lines
        return [f"%%remote --label {self.targets}\n", *lines]

    def before(self, code: str) -> str | None:
        """Where the cell goes; None where it runs as it says."""
        first = code.lstrip()
        return self.targets if self.targets and first and not first.startswith(_OWN) else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside runs here."""
        targets, self.targets = self.targets, ""
        try:
            yield
        finally:
            self.targets = targets


class Frames:
    """Stands before `shell.showtraceback` until it is given back."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._before = shell.showtraceback
        shell.showtraceback = self._show

    def give_back(self) -> None:
        self._shell.showtraceback = self._before

    def _show(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        kind, error, frames = exc_tuple or sys.exc_info()
        from_worker = isinstance(getattr(error, "__cause__", None), RemoteError)
        if from_worker or isinstance(error, RpcError | PipelineError | NamesError | KeyboardInterrupt):
            exc_tuple = kind, error, of_user(frames)
            while (error := getattr(error, "__cause__", None)) is not None:
                error.__traceback__ = of_user(error.__traceback__)
        self._before(exc_tuple, *args, **kwargs)


_HERE = CellOptions()


def _names(text: str) -> tuple[str, ...]:
    """`a,b` as names of variables."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is not the name of a variable; write names with commas between: a,b")
    return names


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise UsageError(f"--timeout {text}: say a number of seconds, greater than 0")


@magics_class
class ClusterMagics(Magics):
    """Registered by `%load_ext rpcbench`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._shell = shell
        self.targets = Targets()
        self.auto = AutoRemote()
        self.assist: Assist | None = None
        self.frames: Frames | None = None
        self.sidebar: Sidebar | None = None
        self.commands = Commands(self.targets, lambda running: shell.push({"cluster": running}))

    @line_magic
    @with_help
    def cluster(self, line: str) -> None:
        """The workers of this notebook.

        %cluster start 2            start two; twice is harmless. The cluster is bound here under the name `cluster`
        %cluster start 2 --kind kernel    … kernels, for other clients, too: cluster.connection_file("worker1")
        %cluster start 2 --launcher command template="ssh {host} {cmd}" hosts=node1,node2    … on other hosts
        %cluster start 2 --grace 30    … which have 30 s to end when they are stopped, by default 5
        %cluster start 2 --name b   start another one beside it, which is the current one from now on
        %cluster join tcp://HOST:PORT    workers that `torchrun … -m rpcbench.worker` has started, at what they show
        %cluster use main           make another one the current one, which all magics and `cluster` mean
        %cluster list               the clusters that run, and how many workers they have
        %cluster status             how each is: process, memory, cpu, calls that wait for it
        %cluster scale 3            start more, or end the last ones
        %cluster restart worker2    end it, if it still runs, and start it again under its name; with --replay it
                                    then runs again what it had run without an error, and tells what fails
        %cluster reload helpers     load a module anew, as its file is now, here and on all workers
        %cluster interrupt [NAME…]  stop the cells that run there
        %cluster logs [NAME…]       the last lines that they wrote outside cells and calls
        %cluster group rest [1:]    save a name for some of them, for %%remote; alone: the groups there are
        %cluster stop               end them all
        """
        action, *words = shlex.split(line) or ["status"]
        with short():
            answer = self.commands.run(action, words)
        if isinstance(answer, str):
            sys.stdout.write(f"{answer}\n")
        else:
            display(answer)  # type: ignore[no-untyped-call]

    @no_var_expand
    @line_cell_magic
    @with_help
    def remote(self, line: str, cell: str | None = None) -> Any:
        """`%%remote worker1 [worker2 … | all | [1:] | GROUP] [options]`: run the cell there; its output appears here.

            -i a,b         set these variables there first
            -o y           bring variables back after: as values, from several workers as dicts by worker
            --rref y       bring back an RRef of a variable, which stays there
            --async        be back at once; the answer is a handle (`_`) to wait for, await or cancel
            --timeout 10   interrupt the cell after so many seconds: RpcTimeoutError
            --local        run the cell here, too, once it has run there
            --label        begin each line with the worker's name, as with several workers
            --collapse     show what several workers wrote alike once, when all are through: [worker1-3] …
            --tabs         show each worker's output in a tab of its own

        As a line, `%remote worker1 expression` is the expression's value there.
        """
        with short():
            if cell is None:
                return self._value(line)
            options = _remote_line().parse_args(shlex.split(line))
            ask = CellInputs(self._variables(options.i), options.o, leave=options.rref)
            way = CellOptions(options.timeout, options.label, options.panes)
            if options.later:
                return self._begin(options, cell, ask, way)
            self._run(options.workers, cell, ask, way)
        if options.local:
            self.run_here(cell)
        return None

    def _value(self, line: str) -> Any:
        words = line.split(maxsplit=1)
        if len(words) < 2:
            raise UsageError("say where and what: %remote worker1 expression; or begin the cell with %%remote worker1")
        return self._run(words[:1], words[1], CellInputs(value=True)).get("")

    def _run(self, targets: list[str], code: str, ask: CellInputs, way: CellOptions = _HERE) -> dict[str, Any]:
        """Run it, bind what was asked for, raise what went wrong."""
        running = cluster()
        names = self._meant(running, targets)
        answer = running.agent.part(CellClient).run(OutputDisplay(self._shell), names, code, ask, way)
        return self.settled(len(names) > 1, ask, answer)

    def _begin(self, options: argparse.Namespace, code: str, ask: CellInputs, way: CellOptions) -> CellHandle:
        """Run it, and be back at once."""
        if options.local:
            raise UsageError("--local waits for the cell, --async does not: take one of them")
        running, screen = cluster(), OutputDisplay(self._shell)
        desk, names = running.agent.part(CellClient), self._meant(running, options.workers)
        return CellHandle(
            screen,
            lambda changed: desk.start(screen, names, code, ask, way, changed),
            lambda answer: self.settled(len(names) > 1, ask, answer),
        )

    def _meant(self, running: BaseCluster, words: list[str]) -> list[str]:
        """The workers that these words mean; said besides if `all`, a slice or a group may have meant a lost one."""
        names = self.targets.find(words, running.workers)
        if running.lost and not set(words) <= {*names}:
            lost = " ".join(running.lost)
            how = running.inseparable or f"%cluster restart {lost} starts it again"
            sys.stderr.write(f"Not on {lost}, which is lost: {how}.\n")
        return names

    def settled(self, several: bool, ask: CellInputs, answer: CellResult) -> dict[str, Any]:
        """Bind what came back and give it by name; raise what went wrong."""
        values = answer.by_name(several)
        self._shell.push({name: values[name] for name in (*ask.want, *ask.leave) if name in values})
        if (error := answer.error(self._shell)) is not None:
            raise error
        return values

    def run_here(self, cell: str) -> None:
        """Run a cell in the notebook, and raise what it has raised."""
        with self.auto.paused():
            result = self._shell.run_cell(cell)
        if (error := result.error_before_exec or result.error_in_exec) is not None:
            raise shown_as(error, [])  # it has been shown; the cell has failed all the same

    def _variables(self, names: tuple[str, ...]) -> dict[str, Any]:
        for name in names:
            if name not in self._shell.user_ns:
                raise UsageError(f"-i {name}: this notebook has no such variable")
        return {name: self._shell.user_ns[name] for name in names}

    @line_magic
    @with_help
    def panel(self, line: str) -> None:
        """Show a live panel.

        %panel workers     how each worker is; buttons that interrupt, restart and scale, also while a cell runs
        %panel rrefs       who owns and who uses each RRef, its size, age and the cell that made it
        %panel autograd    what distributed-autograd contexts have recorded, and how far backward is
        %panel pipeline    where each micro-batch is, and how long workers stood idle
        %panel messages    what members say to each other and do together, as a sequence diagram
        """
        with require_extra("a panel", "ipywidgets", "anywidget"):
            from rpcbench.panels import PANELS, panel

        name = line.strip()
        if name not in PANELS:
            raise UsageError(f"say which panel to show: {', '.join(PANELS)}")
        with short():
            display(panel(name))  # type: ignore[no-untyped-call]

    @line_magic
    @with_help
    def autoremote(self, line: str) -> None:
        """`%autoremote worker1`: run each cell there, as `%%remote --label worker1` does, until `%autoremote off`."""
        words = shlex.split(line)
        if not words:
            where = f"on {self.auto.targets}" if self.auto.targets else "here, in the notebook"
            sys.stdout.write(f"Cells run {where}.\n")
        elif words == ["off"]:
            self.auto.targets = ""
            sys.stdout.write("Cells run here again, in the notebook.\n")
        else:
            with short():
                names = self.targets.find(words, cluster().workers)
                for name in names:
                    cluster().agent.member(name)
            self.auto.targets = line.strip()
            sys.stdout.write(f"Cells run on {', '.join(names)} until %autoremote off.\n")

    def is_worker(self, word: str) -> bool:
        """Whether that is the name of a worker, or was."""
        found = running()
        if found is None or not word:
            return False
        try:
            return found.agent.member(word).name in found.workers
        except UnknownWorkerError:
            return False
        except WorkerLostError:  # that is told when it is used
            return True

    def debug_on(self, worker: str) -> None:
        """Open a debugger there on the cell that failed last."""
        with short():
            self._run([worker], POST_MORTEM, CellInputs())

    def first_of(self, line: str) -> str | None:
        """The first worker that a line of `%%remote` means, if it means any."""
        found = running()
        if found is None:
            return None
        try:
            return self.targets.find(_remote_line().parse_args(shlex.split(line)).workers, found.workers)[0]
        except (UsageError, RuntimeError, ValueError):  # the line is not complete yet
            return None

    def vocabulary(self) -> Vocabulary:
        """What may stand on the lines of these magics now."""
        found = running()
        options = tuple(re.findall(r"--?[a-z]+", _remote_line().format_usage()))
        workers = tuple(found.workers) if found else ()
        actions, clusters = tuple(self.commands.by_name), tuple(self.commands.named)
        return Vocabulary(workers, tuple(self.targets.groups), options, actions, clusters)


class _Line(argparse.ArgumentParser):
    """The line of a magic: a mistake in it is IPython's UsageError, not the end of the process."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, add_help=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.format_usage().strip()}")


def _remote_line() -> _Line:
    line = _Line("%%remote")
    line.add_argument("workers", nargs="+", metavar="worker")
    line.add_argument("-i", type=_names, default=(), metavar="a,b")
    line.add_argument("-o", type=_names, default=(), metavar="y")
    line.add_argument("--rref", type=_names, default=(), metavar="y")
    line.add_argument("--async", dest="later", action="store_true")
    line.add_argument("--timeout", type=_seconds, default=math.inf, metavar="seconds")
    line.add_argument("--local", action="store_true")
    line.add_argument("--label", action="store_true")
    shown = line.add_mutually_exclusive_group()
    shown.set_defaults(panes=one_below_the_other)
    shown.add_argument("--collapse", dest="panes", action="store_const", const=collapsed)
    shown.add_argument("--tabs", dest="panes", action="store_const", const=in_tabs)
    return line


def assist(shell: Any, magics: ClusterMagics) -> Assist | None:
    """Tab and its like, where there is a kernel that a front end asks."""
    kernel = getattr(shell, "kernel", None)
    return kernel and Assist(kernel, magics.first_of, magics.auto.before, lambda *at: magics.vocabulary().after(*at))


def register(shell: InteractiveShell) -> None:
    """Make the magics known, and torch warm for the workers to come. Loading twice changes nothing."""
    if ClusterMagics.__name__ not in shell.magics_manager.registry:
        magics = ClusterMagics(shell)
        shell.register_magics(magics, DebugMagics(shell, magics.is_worker, magics.debug_on))
        shell.register_magics(DrillMagics(shell, magics.targets, magics.settled))
        shell.register_magics(TraceMagics(shell, magics.run_here), RecordMagics(shell))
        shell.input_transformers_cleanup.append(magics.auto)
        magics.assist = assist(shell, magics)
        magics.frames = Frames(shell)
        if hasattr(shell, "kernel"):  # where pages can ask
            magics.sidebar = Sidebar(magics.commands, lambda: magics.auto.targets)
        process.warm()


def unregister(shell: InteractiveShell) -> None:
    """Forget the magics and stop the cluster they started."""
    manager = shell.magics_manager
    magics = manager.registry.pop(ClusterMagics.__name__, None)
    if magics is None:
        return
    manager.registry[RecordMagics.__name__].end()
    others = [manager.registry.pop(kind.__name__) for kind in (DrillMagics, TraceMagics, RecordMagics)]
    for one in (magics, *others):
        for kind, names in one.magics.items():
            for name in names:
                manager.magics[kind].pop(name, None)
    manager.registry.pop(DebugMagics.__name__).give_back()
    shell.input_transformers_cleanup.remove(magics.auto)
    if magics.frames is not None:
        magics.frames.give_back()
    if magics.assist is not None:
        magics.assist.remove()
    if magics.sidebar is not None:
        magics.sidebar.close()
    magics.commands.stop_started()
