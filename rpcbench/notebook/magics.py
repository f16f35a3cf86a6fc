"""The magics `%cluster`, `%%remote`, `%remote`, `%autoremote` and `%panel`: they parse lines and delegate.

Rules
- With `%autoremote worker1` each cell runs there as under `%%remote --label worker1`. A cell that begins with another
  magic of ours, or a cell magic (`%%…`, `%cluster`, `%remote`, `%panel`, …), runs unchanged.
- Tracebacks omit this package's frames for errors of workers, for errors that explain themselves (RpcError,
  PipelineError, NamesError), for Ctrl-C, and for the causes of these. Any other error of this package shows all frames.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand
from IPython.display import display

from rpcbench.base.errors import (
    NamesError,
    PipelineError,
    RemoteError,
    RpcError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpcbench.cells.client import CellClient, CellInputs, CellOptions, CellResult
from rpcbench.cells.debugger import POST_MORTEM
from rpcbench.cells.display import OutputDisplay
from rpcbench.cells.partition import split
from rpcbench.cells.targets import Targets
from rpcbench.cells.tracebacks import short_tracebacks, user_frames, with_rendering
from rpcbench.launch import process, saved
from rpcbench.launch.cluster import cluster
from rpcbench.notebook import admit_widgets, is_help, panel_names, require_extra, warn_on_stderr, with_help
from rpcbench.notebook.async_cells import CellHandle
from rpcbench.notebook.cell_status import CellStatus
from rpcbench.notebook.cluster_magic import Commands, running
from rpcbench.notebook.completion import Assist, Vocabulary
from rpcbench.notebook.fault_magics import DebugMagics, FaultMagics, Modes, RecordMagics, TraceMagics
from rpcbench.notebook.parsers import Transfer, cluster_line, remote_line
from rpcbench.notebook.profile_magic import ProfileMagics
from rpcbench.notebook.sidebar import Sidebar
from rpcbench.simulation.simulated_world import SimulatedWorld
from rpcbench.telemetry.shard_watch import watch_on_workers

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from rpcbench.notebook.lab_debugger import LabDebugger

# Cells that begin with one of these run in the notebook under `%autoremote`, too.
_OURS = ("%cluster", "%remote", "%autoremote", "%panel", "%record", "%chaos", "%debug ")
_CALLER = 3  # frames from `remote` to the code that runs the magic, whose variables its line may use
_RESULTS = {  # types of results by name, as they load torch.distributed.tensor, and the panels that notebooks show
    ("rpcbench.compare.report", "CompareReport"): "compare", ("rpcbench.launch.plan_layouts", "LayoutPlan"): "plan",
}  # fmt: skip
_OWN = ("%%", *_OURS, "%load_ext", "%unload_ext", "%reload_ext")


class AutoRemote:
    """`%autoremote`, as a transformer of input lines for IPython's `input_transformers_cleanup`."""

    def __init__(self) -> None:
        self.targets = ""  # as on a `%%remote` line; empty: cells run here

    def __call__(self, lines: list[str]) -> list[str]:
        if self.targets_for_cell("".join(lines)) is None:
            return lines
        return [f"%%remote --label {self.targets}\n", *lines]

    def targets_for_cell(self, code: str) -> str | None:
        """Return the targets for the cell, or None if it runs unchanged."""
        first = code.lstrip()
        return self.targets if self.targets and first and not first.startswith(_OWN) else None

    def switch_off(self) -> str:
        """Let cells run here again; return a report."""
        self.targets = ""
        return "Cells run here again, in the notebook."

    @contextlib.contextmanager
    def pause_remote_cells(self) -> Iterator[None]:
        """Switch it off meanwhile."""
        targets, self.targets = self.targets, ""
        try:
            yield
        finally:
            self.targets = targets


class Frames:
    """Replaces `shell.showtraceback` until `restore_showtraceback`, to omit this package's frames."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._before = shell.showtraceback
        shell.showtraceback = self._show_traceback

    def restore_showtraceback(self) -> None:
        self._shell.showtraceback = self._before

    def _show_traceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        kind, error, frames = exc_tuple or sys.exc_info()
        from_worker = isinstance(getattr(error, "__cause__", None), RemoteError)
        if from_worker or isinstance(error, RpcError | PipelineError | NamesError | KeyboardInterrupt):
            exc_tuple = kind, error, user_frames(frames)
            # Causes have frames of this package as well, and IPython renders them from `__traceback__`.
            while (error := getattr(error, "__cause__", None)) is not None:
                error.__traceback__ = user_frames(error.__traceback__)
        self._before(exc_tuple, *args, **kwargs)


_HERE = CellOptions()


def _split_value(sent: Transfer, value: Any, count: int) -> list[Any]:
    """Return the parts of a variable's value; report sizes that differ."""
    try:
        parts = split(sent.name, value, count, sent.dim)
    except (ValueError, TypeError) as error:
        raise UsageError(f"-i {sent}: {error}") from None
    if report := parts.size_report(sent.name):
        sys.stdout.write(f"{report}\n")
    return parts.values


@magics_class
class ClusterMagics(Magics):
    """The magics that `%load_ext rpcbench` registers."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._shell = shell
        self.targets = Targets()
        self.auto = AutoRemote()  # targets of `%autoremote`
        self.assist: Assist | None = None  # None without a kernel, like `sidebar`
        self.frames: Frames | None = None
        self.lab_debugger: LabDebugger | None = None
        self.sidebar: Sidebar | None = None
        self.cell_status: CellStatus | None = None
        self.commands = Commands(self.targets, lambda running: shell.push({"cluster": running}))

    @line_magic
    def cluster(self, line: str) -> None:
        action, *words = shlex.split(line) or ["status"]
        if is_help(line):
            found = cluster_line().actions.get(action)
            sys.stdout.write(f"{inspect.getdoc(ClusterMagics.cluster) if found is None else found.format_help()}\n")
            return
        with short_tracebacks():
            answer = self.commands.run_action(action, words)
        if isinstance(answer, str):
            sys.stdout.write(f"{answer}\n")
        else:
            display(answer)  # type: ignore[no-untyped-call]

    cluster.__doc__ = "\n".join([cluster_line().format_help(), cluster_line().action("start").format_help()])

    @no_var_expand
    @line_cell_magic
    @with_help
    def remote(self, line: str, cell: str | None = None) -> Any:
        """`%%remote worker1 [worker2 … | all | [1:] | GROUP] [options]`: run the cell there and show its output here.

            -i a,b         set these variables there first
            -i x:scatter   split x by rows: each worker gets a part; x:scatter:1 splits along dimension 1
            -o y           copy variables back afterwards; from several workers, as dicts by worker
            -o y:cat       join the values of all workers: cat or stack (y:cat:1 along dimension 1), sum, list
            --rref y       bind an RRef of a variable, whose value stays there
            --async        return at once; the result is a handle (`_`) to wait for, await or cancel
            --timeout 10   interrupt the cell after this many seconds, with an RpcTimeoutError
            --local        run the cell here, too, once it has run there
            --label        begin each line with the worker's name, as with several workers
            --collapse     show equal output of several workers once, when all are through: [worker1-3] …
            --tabs         show each worker's output in a tab of its own

        The line `%remote worker1 expression` returns the expression's value there.
        """
        with short_tracebacks():
            if cell is None:
                return self._evaluate_line(line)
            line = self._shell.var_expand(line, _CALLER)  # not of code: the line above is left alone
            options = remote_line().parse(shlex.split(line))
            names = self._select_workers(options.workers)
            inputs = self._make_inputs(options, names)
            cell_options = CellOptions(options.timeout, options.label, options.areas)
            if options.later:
                return self._begin_cell(options, names, cell, inputs, cell_options)
            self._run_cell(names, cell, inputs, cell_options)
        if options.local:
            self.run_locally(cell)
        return None

    def _evaluate_line(self, line: str) -> Any:
        words = line.split(maxsplit=1)
        if len(words) < 2:
            raise UsageError("say where and what: %remote worker1 expression; or begin the cell with %%remote worker1")
        return self._run_cell(self._select_workers(words[:1]), words[1], CellInputs(value=True)).get("")

    def _run_cell(
        self, names: list[str], code: str, inputs: CellInputs, options: CellOptions = _HERE
    ) -> dict[str, Any]:
        """Run the cell, bind its variables and return them; raise its error."""
        answer = cluster().agent.part(CellClient).run(OutputDisplay(self._shell), names, code, inputs, options)
        return self.bind_results(len(names) > 1, inputs, answer)

    def _begin_cell(
        self, options: argparse.Namespace, names: list[str], code: str, inputs: CellInputs, cell_options: CellOptions
    ) -> CellHandle:
        if options.local:
            raise UsageError("--local waits for the cell, --async does not: take one of them")
        cell_client, output_display = cluster().agent.part(CellClient), OutputDisplay(self._shell)
        return CellHandle(
            output_display,
            lambda changed: cell_client.start_on_workers(output_display, names, code, inputs, cell_options, changed),
            lambda answer: self.bind_results(len(names) > 1, inputs, answer),
        )

    def _select_workers(self, words: list[str]) -> list[str]:
        """Return the selected workers; warn if the selection may have included a lost one."""
        running = cluster()
        names = self.targets.select_workers(words, running.workers)
        if running.lost and not set(words) <= {*names}:  # `all`, a slice or a group
            lost = " ".join(running.lost)
            how = running.inseparable or f"%cluster restart {lost} starts it again"
            warn_on_stderr(f"Not on {lost}, which is lost: {how}.")
        return names

    def bind_results(self, several: bool, inputs: CellInputs, answer: CellResult) -> dict[str, Any]:
        """Bind the returned variables and return them by name; raise the cell's error."""
        values = answer.values_by_name(several)
        # First: the results of workers that succeeded are kept even if another one failed.
        self._shell.push({name: values[name] for name in (*inputs.want, *inputs.leave) if name in values})
        if (error := answer.error_to_raise(self._shell)) is not None:
            raise error
        for name, (how, dim) in inputs.combined.items():
            try:
                values[name] = answer.combined_value(name, how, dim)
            except ValueError as mismatch:  # the values of the workers are bound, so the work is not lost
                raise UsageError(f"-o {name}:{how}: {mismatch}") from None
            self._shell.push({name: values[name]})
        return values

    def run_locally(self, cell: str) -> None:
        """Run a cell in the notebook, and raise its error."""
        with self.auto.pause_remote_cells():
            result = self._shell.run_cell(cell)
        if (error := result.error_before_exec or result.error_in_exec) is not None:
            raise with_rendering(error, [])  # `run_cell` has shown it; raised again, so that this cell fails, too

    def _make_inputs(self, options: argparse.Namespace, workers: list[str]) -> CellInputs:
        """Return the variables that the line gives these workers and wants back; report parts of different size."""
        push: dict[str, Any] = {}
        own: dict[str, dict[str, Any]] = defaultdict(dict)
        for sent in options.i:
            if sent.name not in self._shell.user_ns:
                raise UsageError(f"-i {sent}: this notebook has no such variable")
            value = self._shell.user_ns[sent.name]
            if not sent.how:
                push[sent.name] = value
                continue
            for worker, part in zip(workers, _split_value(sent, value, len(workers)), strict=True):
                own[worker][sent.name] = part
        wanted = tuple(each.name for each in options.o)
        combined = {each.name: (each.how, each.dim) for each in options.o if each.how}
        return CellInputs(push, wanted, leave=tuple(options.rref), own=own, combined=combined)

    @line_magic
    @with_help
    def panel(self, line: str) -> None:
        """Show a live panel.

        %panel workers     state of each worker; buttons that interrupt, restart and scale, also while a cell runs
        %panel progress    maps, training loops and cells: how far each is, and how it ended
        %panel rrefs       owner and users of each RRef, its size, age and the cell that made it
        %panel autograd    records of distributed-autograd contexts, and progress of backward passes
        %panel pipeline    location of each micro-batch, and idle time of workers
        %panel messages    messages and collectives between members, as a sequence diagram
        %panel shards model    the pieces of the model that this variable of the workers' cells holds, on each rank
        %panel compare     the last report of cluster.compare: each value of a training step, right or wrong
        %panel metrics     curves of what ranks log with rpcbench.log: loss, learning rate; the ranks that diverge
        %panel resources   CPU, memory, bytes and GPUs of all members over the last minutes, as charts
        %panel traffic     bytes per second from each member to each other one, as a matrix
        %panel logs        output of workers outside cells: by worker, searched, warnings and errors; of lost ones too
        %panel plan plan   the layouts of a result of rpcbench.plan, which this variable of the notebook holds

        `%panel pipeline world`, `%panel messages world` and `%panel shards world` show the step of a result of
        rpcbench.simulate, `%panel compare report` one of cluster.compare, if the notebook's variable holds it.
        """
        with require_extra("a panel", "ipywidgets", "anywidget"):
            from rpcbench.panels import ALL_PANELS, panel

        name, _, variable = line.strip().partition(" ")
        if name not in ALL_PANELS:
            raise UsageError(f"say which panel to show: {', '.join(ALL_PANELS)}")
        with short_tracebacks():
            display(panel(name, self._find_shown(name, variable.strip())))  # type: ignore[no-untyped-call]

    def _find_shown(self, panel: str, variable: str) -> object:
        """Return the value of the notebook's variable that a panel is to show; None for the current cluster."""
        found = self._shell.user_ns.get(variable)
        if variable and panel == "shards" and not isinstance(found, SimulatedWorld):
            watch_on_workers(variable)  # a variable of the workers' cells
            return None
        if variable and found is None:
            raise UsageError(f"%panel {panel} {variable}: this notebook has no result in a variable of that name")
        return found

    @line_magic
    @with_help
    def autoremote(self, line: str) -> None:
        """`%autoremote worker1`: run each cell there, like `%%remote --label worker1`, until `%autoremote off`."""
        words = shlex.split(line)
        if not words:
            where = f"on {self.auto.targets}" if self.auto.targets else "here, in the notebook"
            sys.stdout.write(f"Cells run {where}.\n")
        elif words == ["off"]:
            sys.stdout.write(f"{self.auto.switch_off()}\n")
        else:
            with short_tracebacks():
                names = self.targets.select_workers(words, cluster().workers)
                for name in names:  # an error now instead of in the next cell
                    cluster().agent.member(name)
            self.auto.targets = line.strip()
            sys.stdout.write(f"Cells run on {', '.join(names)} until %autoremote off.\n")

    def is_worker(self, word: str) -> bool:
        """Return whether the word is the name of a worker, or was one."""
        found = running()
        if found is None or not word:
            return False
        try:
            return found.agent.member(word).name in found.workers
        except UnknownWorkerError:
            return False
        except WorkerLostError:  # raised again when the name is used
            return True

    def debug_worker(self, worker: str) -> None:
        """Open a debugger on the worker, on the cell that failed last."""
        with short_tracebacks():
            self._run_cell(self._select_workers([worker]), POST_MORTEM, CellInputs(), CellOptions(listed=""))

    def first_worker(self, line: str) -> str | None:
        """Return the first worker that a `%%remote` line selects, or None."""
        found = running()
        if found is None:
            return None
        try:
            return self.targets.select_workers(remote_line().parse(shlex.split(line)).workers, found.workers)[0]
        except (UsageError, RuntimeError, ValueError):  # the line is not complete yet
            return None

    def workers_of_line(self, words: list[str]) -> list[str]:
        """Return the workers that the words of a `%%remote` line select."""
        return self.targets.select_workers(remote_line().parse(words).workers, cluster().workers)

    def make_vocabulary(self) -> Vocabulary:
        """Return the words that completion offers on the lines of these magics now."""
        found = running()
        workers = tuple(found.workers) if found else ()
        try:
            described = tuple(saved.saved_cluster_names())
        except ValueError:  # of a file that `%cluster start` will name
            described = ()
        return Vocabulary(workers, tuple(self.targets.groups), tuple(self.commands.named), described)


def register(shell: InteractiveShell) -> None:
    """Register the magics and preload torch for workers. Harmless when called twice."""
    if ClusterMagics.__name__ not in shell.magics_manager.registry:
        magics = ClusterMagics(shell)
        shell.register_magics(magics, DebugMagics(shell, magics.is_worker, magics.debug_worker))
        shell.register_magics(FaultMagics(shell, magics.targets, magics.bind_results, magics.auto.pause_remote_cells))
        shell.register_magics(TraceMagics(shell, magics.run_locally), record := RecordMagics(shell))
        shell.register_magics(ProfileMagics(shell, magics.run_locally, magics.workers_of_line))
        shell.input_transformers_cleanup.append(magics.auto)  # cleanup: runs before IPython parses magics
        magics.frames = Frames(shell)
        if kernel := getattr(shell, "kernel", None):  # only a kernel completes cells and has comms
            magics.assist = Assist(
                kernel,
                magics.first_worker,
                magics.auto.targets_for_cell,
                lambda *at: magics.make_vocabulary().words_after(*at),
            )
            magics.sidebar = Sidebar(magics.commands, Modes(magics.auto, record))
            magics.cell_status = CellStatus(kernel)
            magics.lab_debugger = _lab_debugger(shell)
            admit_widgets()
            for type_name, panel_name in _RESULTS.items():
                _display_formatter(shell).for_type_by_name(*type_name, functools.partial(_display_result, panel_name))
        process.warm()  # in the background: the first `%cluster start` then does not wait for torch to load


def _display_formatter(shell: Any) -> Any:
    return shell.display_formatter.ipython_display_formatter


def _display_result(name: str, result: object) -> None:
    """Display a result in the panel of this name; as text where widgets are not installed."""
    if not panel_names():
        sys.stdout.write(f"{result}\n")
        return
    from rpcbench.panels import panel  # here: widgets take a moment to load

    panel(name, result)._ipython_display_()


def _lab_debugger(shell: Any) -> LabDebugger | None:
    """Extend the kernel's debugger, if it has one, to workers."""
    # here, as the next: only kernels have their imports loaded
    from rpcbench.launch.kernel_worker import (
        kernel_debugger,
    )

    if kernel_debugger(shell.kernel) is None:
        return None
    from rpcbench.notebook.lab_debugger import LabDebugger

    return LabDebugger(shell)


def unregister(shell: InteractiveShell) -> None:
    """Remove the magics and stop the clusters that they started."""
    manager = shell.magics_manager
    magics = manager.registry.pop(ClusterMagics.__name__, None)
    if magics is None:
        return
    manager.registry[RecordMagics.__name__].end_recording()  # before the clusters stop: it writes its file
    kinds = (FaultMagics, TraceMagics, RecordMagics, ProfileMagics)
    others = [manager.registry.pop(kind.__name__) for kind in kinds]
    for one in (magics, *others):
        for kind, names in one.magics.items():
            for name in names:
                manager.magics[kind].pop(name, None)
    manager.registry.pop(DebugMagics.__name__).restore_debug_magic()  # `%debug` is IPython's again, not removed
    shell.input_transformers_cleanup.remove(magics.auto)
    if magics.frames is not None:
        magics.frames.restore_showtraceback()
    if magics.assist is not None:
        magics.assist.restore_kernel()
    if magics.sidebar is not None:
        magics.sidebar.close()
    if magics.cell_status is not None:
        magics.cell_status.restore_kernel()
    for type_name in _RESULTS:
        _display_formatter(shell).pop(".".join(type_name), None)
    if magics.lab_debugger is not None:
        magics.lab_debugger.restore_kernel()
    magics.commands.stop_started_clusters()
