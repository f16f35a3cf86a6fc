"""The magics: `%cluster`, `%%remote`, `%remote`, `%panel`. They parse and delegate; nothing happens here.

A cluster that `%cluster start` made is stopped by `%cluster stop`, by unloading the extension, and at exit.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand
from IPython.display import display

from rpcbench.launch import process
from rpcbench.launch.cluster import Cluster, cluster
from rpcbench.notebook.cells import Ask, CellDesk
from rpcbench.notebook.screen import Screen
from rpcbench.notebook.tracebacks import raised, short

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

ALL = "all"


def _names(text: str) -> tuple[str, ...]:
    """`a,b` as names of variables."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is not the name of a variable; write names with commas between: a,b")
    return names


@magics_class
class ClusterMagics(Magics):
    """Registered by `%load_ext rpcbench`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._shell = shell
        self._desk: CellDesk | None = None
        self._started: Cluster | None = None

    @line_magic
    def cluster(self, line: str) -> None:
        """`%cluster start 2`, `%cluster status`, `%cluster stop`: the workers of this notebook.

        Starting twice is harmless. The cluster is bound here under the name `cluster`.
        """
        options = _cluster_line().parse_args(shlex.split(line))
        with short():
            getattr(self, f"_{options.action}")(options.size)

    def _start(self, size: int | None) -> None:
        if size is None or size < 1:
            raise UsageError("say how many workers to start: %cluster start 2")
        running = _running()
        if running is None:
            running = self._started = Cluster(size)
        elif len(running.workers) != size:
            _say(f"{_sentence(running)} cluster.scale({size}) makes it {size}.")
            return
        self._shell.push({"cluster": running})
        _say(f"{_sentence(running)} %%remote {running.workers[0]} runs a cell there, %cluster stop ends it.")

    def _status(self, _: int | None) -> None:
        running = _running()
        if running is None:
            _say("No cluster runs. %cluster start 2 starts two workers.")
            return
        _say(_sentence(running))
        for name in running.workers:
            _say(f"  {name}  process {running.pid(name)}")

    def _stop(self, _: int | None) -> None:
        running = _running()
        if running is None:
            _say("No cluster runs.")
            return
        running.shutdown()
        _say("The cluster is stopped.")

    @no_var_expand
    @line_cell_magic
    def remote(self, line: str, cell: str | None = None) -> Any:
        """`%%remote worker1 [worker2 … | all] [-i a,b] [-o y]`: run the cell there; output and errors appear here.

        -i sets variables there first, -o brings variables back after: as values, from several workers as dicts by
        worker. As a line, `%remote worker1 expression` is the expression's value there.
        """
        with short():
            if cell is None:
                return self._value(line)
            options = _remote_line().parse_args(shlex.split(line))
            self._run(options.workers, cell, Ask(self._variables(options.i), options.o))
        return None

    def _value(self, line: str) -> Any:
        words = line.split(maxsplit=1)
        if len(words) < 2:
            raise UsageError("say where and what: %remote worker1 expression; or begin the cell with %%remote worker1")
        return self._run(words[:1], words[1], Ask(value=True)).get("")

    def _run(self, targets: list[str], code: str, ask: Ask) -> dict[str, Any]:
        """Run it, bind what was asked for, raise what went wrong."""
        running = cluster()
        names = _workers(running, targets)
        answer = self._desk_of(running).run(Screen(self._shell), names, code, ask)
        values = answer.by_name(several=len(names) > 1)
        self._shell.push({name: values[name] for name in ask.want if name in values})
        if answer.failures:
            raise raised(answer.failures, self._shell)
        return values

    def _desk_of(self, running: Cluster) -> CellDesk:
        if self._desk is None or self._desk.agent is not running.agent:
            self._desk = CellDesk(running.agent)
        return self._desk

    def _variables(self, names: tuple[str, ...]) -> dict[str, Any]:
        for name in names:
            if name not in self._shell.user_ns:
                raise UsageError(f"-i {name}: this notebook has no such variable")
        return {name: self._shell.user_ns[name] for name in names}

    @line_magic
    def panel(self, line: str) -> None:
        """Show a live panel: `%panel rrefs`, `%panel autograd`, `%panel pipeline`."""
        from rpcbench.panels import PANELS, panel

        name = line.strip()
        if name not in PANELS:
            raise UsageError(f"say which panel to show: {', '.join(PANELS)}")
        with short():
            display(panel(name))  # type: ignore[no-untyped-call]

    def stop_started(self) -> None:
        """Stop the cluster that `%cluster start` made, if it still runs."""
        if self._started is not None:
            self._started.shutdown()


class _Line(argparse.ArgumentParser):
    """The line of a magic: a mistake in it is IPython's UsageError, not the end of the process."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, add_help=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.format_usage().strip()}")


def _cluster_line() -> _Line:
    line = _Line("%cluster")
    line.add_argument("action", nargs="?", default="status", choices=["start", "status", "stop"])
    line.add_argument("size", nargs="?", type=int)
    return line


def _remote_line() -> _Line:
    line = _Line("%%remote")
    line.add_argument("workers", nargs="+", metavar="worker")
    line.add_argument("-i", type=_names, default=(), metavar="a,b")
    line.add_argument("-o", type=_names, default=(), metavar="y")
    return line


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _running() -> Cluster | None:
    try:
        return cluster()
    except RuntimeError:
        return None


def _sentence(running: Cluster) -> str:
    names = running.workers
    return f"{len(names)} worker{'s' if len(names) != 1 else ''}: {', '.join(names)}."


def _workers(running: Cluster, targets: list[str]) -> list[str]:
    """Names that the words of a magic stand for, each once."""
    words = [name for target in targets for name in target.split(",") if name]
    names = list(dict.fromkeys(name for word in words for name in (running.workers if word == ALL else [word])))
    if not names:
        raise RuntimeError("no worker is left; cluster.scale(2) starts two")
    return names


def register(shell: InteractiveShell) -> None:
    """Make the magics known, and torch warm for the workers to come. Loading twice changes nothing."""
    if ClusterMagics.__name__ not in shell.magics_manager.registry:
        shell.register_magics(ClusterMagics(shell))
        process.warm()


def unregister(shell: InteractiveShell) -> None:
    """Forget the magics and stop the cluster they started."""
    manager = shell.magics_manager
    magics = manager.registry.pop(ClusterMagics.__name__, None)
    if magics is None:
        return
    for kind, names in magics.magics.items():
        for name in names:
            manager.magics[kind].pop(name, None)
    magics.stop_started()
