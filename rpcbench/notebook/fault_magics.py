"""Magics that inspect a cluster: they parse lines and delegate.

    %%step              run a cell whose messages wait for clicks
    %chaos drop=0.1     inject faults on all members
    %%trace             run a cell and show the messages between members that it caused
    %record FILE        record the cluster for `rpcbench.replay`, until `%record stop`
    %debug worker1      debug the cell that failed last on that worker

Without a worker's name `%debug` is IPython's own.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    cell_magic,
    line_cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)
from IPython.display import display

from rpcbench.base.errors import count_noun, suggest_nearest
from rpcbench.cells.cell_log import CellLog
from rpcbench.cells.client import CellClient, CellInputs, CellOptions
from rpcbench.cells.display import OutputDisplay
from rpcbench.cells.targets import Targets
from rpcbench.cells.tracebacks import short_tracebacks
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.launch.cluster import cluster
from rpcbench.notebook import require_extra, warn_on_stderr, with_help
from rpcbench.notebook.async_cells import HERE, CellHandle, LocalCell
from rpcbench.notebook.parsers import step_line
from rpcbench.telemetry.recording import Recording, Still, record
from rpcbench.telemetry.trace import Trace, trace
from rpcbench.testing.faults import PROGRAM, Drill, Settings
from rpcbench.testing.stepper import Stepper


@magics_class
class DebugMagics(Magics):
    """`%debug`. `is_worker(word)` tests for the name of a worker; `debug_worker(worker)` opens the debugger there."""

    def __init__(self, shell: Any, is_worker: Callable[[str], bool], debug_on: Callable[[str], object]) -> None:
        super().__init__(shell)
        self._is_worker, self._debug_on = is_worker, debug_on
        self._magics = shell.magics_manager.magics
        # By `find_magic`, which loads IPython's own now: its lazy placeholder would later find ours.
        # restored by `restore_debug_magic`
        self._own = {kind: shell.find_magic("debug", kind) for kind in ("line", "cell")}

    def restore_debug_magic(self) -> None:
        for kind, own in self._own.items():
            self._magics[kind]["debug"] = own

    @no_var_expand
    @needs_local_scope
    @line_cell_magic
    @with_help
    def debug(self, line: str = "", cell: str | None = None, local_ns: Any = None) -> Any:
        """`%debug worker1`: open IPython's debugger on the cell that failed last on worker1.

        `p name` shows a variable, `u` and `d` move up and down the stack, `q` or the stop button ends it. Without a
        worker's name this is IPython's own `%debug`.
        """
        if cell is None and self._is_worker(line.strip()):
            return self._debug_on(line.strip())
        if cell is None:
            return self._own["line"](line, local_ns=local_ns)
        return self._own["cell"](line, cell, local_ns=local_ns)


_SECONDS = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")  # 50ms, 0.2s
FAULTS = ("drop", "duplicate", "delay", "seed", "kill")
_EXAMPLE = "%chaos drop=0.1 delay=50ms seed=7 kill=worker2"


@magics_class
class FaultMagics(Magics):
    """`%%step` and `%chaos`. `settle(several, ask, answer)` binds and returns the results of a cell on workers; cells
    stay in the notebook in the block of `paused()`."""

    def __init__(
        self,
        shell: Any,
        targets: Targets,
        settle: Callable[[bool, CellInputs, Any], Any],
        paused: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(shell)
        self._shell = shell
        self._targets = targets
        self._settle = settle
        self._paused = paused

    @cell_magic
    @with_help
    def step(self, line: str, cell: str) -> Stepper:
        """`%%step [worker1 …] [options]`: run the cell with all messages held, to release them one by one.

            --hold Call,Result     hold only messages of these kinds
            --of worker1,worker2   hold only messages to and from these workers

        It returns at once, like `%%remote --async`. Without a worker the cell runs in the notebook, on a thread that
        the stop button cannot interrupt: it ends when its messages are released. A worker that joins meanwhile holds
        messages only after its first ones, once it has received the request.
        A panel below shows the held messages; clicks, and `_.deliver()`, `_.drop(3)`, `_.delay(3)`, `_.go()`, release
        them. `_.cell` is the cell's handle, to wait for. Deadlines, retransmits and heartbeats are suspended on all
        members until all is released. A second `%%step` releases the messages of the first one.
        """
        with short_tracebacks():
            options = step_line().parse(shlex.split(line))
            running, output_display = cluster(), OutputDisplay(self._shell)
            # before messages are held: it may fail
            start = self._make_start_call(running, output_display, options.workers, cell)
            for word in options.of:  # raises for an unknown or lost worker
                running.agent.member(word)
            stepper = Stepper.on(options.hold or PROGRAM, options.of, running.agent)
            stepper.cell = start()  # after: its first message is held, too
            return stepper

    def _make_start_call(
        self, running: BaseCluster, output_display: OutputDisplay, words: list[str], code: str
    ) -> Callable[[], CellHandle]:
        """Return a function that starts the cell. Raises errors in the cell's syntax or its line at once."""
        if not words or words == [HERE]:
            with self._paused():  # `%autoremote` would transform the code
                beside = LocalCell(self._shell, output_display, code)

            def start_here() -> CellHandle:
                if (record := running.agent.part(CellLog).keep_here()) is not None:  # it runs until its code has ended
                    beside.on_end = partial(record.end_part, 0)
                return CellHandle(output_display, lambda changed: beside, lambda answer: answer)  # nothing to bind

            return start_here
        names = self._targets.select_workers(words, running.workers)
        cell_client, inputs = running.agent.part(CellClient), CellInputs()
        for name in names:  # raises for an unknown or lost worker
            running.agent.member(name)
        return lambda: CellHandle(
            output_display,
            lambda changed: cell_client.start_on_workers(output_display, names, code, inputs, CellOptions(), changed),
            lambda answer: self._settle(len(names) > 1, inputs, answer),
        )

    @line_magic
    @with_help
    def chaos(self, line: str) -> None:
        """`%chaos drop=0.1 delay=50ms seed=7`: inject faults into the messages of programs, on all members.

            drop=0.1        lose a tenth of all messages: the runtime retransmits its own; a call whose data is lost
                            raises ConnectionLostError, whose `maybe_executed` tells whether it may have run
            duplicate=0.1   deliver a tenth twice
            delay=50ms      delay each message by up to this time (ms or s)
            seed=7          repeat the faults of an earlier run
            kill=worker2    end that worker by SIGKILL, now; `%cluster restart worker2` starts it again

        `%chaos off` ends the faults and reports them; `%chaos` alone shows the settings. Cells, their output and panels
        are exempt, so that you can watch how a program reacts.
        """
        words = shlex.split(line)
        with short_tracebacks():
            drill = Drill.of(cluster().agent)
            if words == ["off"]:
                sys.stdout.write(f"{_end_faults(drill)}\n")
                return
            settings = _parse_settings(words)
            victim = settings.pop("kill", None)  # an action, not a setting
            if victim is not None and victim not in cluster().workers:
                raise UsageError(f"kill={victim}: there is {', '.join(cluster().workers)}")
            if settings:
                Drill.on(**settings, agent=cluster().agent)
            if settings or victim is None:  # not for `kill` alone, which changes no settings
                sys.stdout.write(f"{_describe_faults(drill.settings)}\n")
            if victim is not None:
                cluster().kill(victim)
                sys.stdout.write(f"{victim} was killed. %cluster restart {victim} starts it again.\n")


def _parse_settings(words: list[str]) -> dict[str, Any]:
    """Parse the settings on a line of `%chaos`."""
    read: dict[str, Callable[[str], Any]] = {
        "drop": _parse_share,
        "duplicate": _parse_share,
        "delay": _parse_delay,
        "seed": _parse_seed,
    }
    found: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if key not in FAULTS or not sign or not value:  # an unknown word; suggest the nearest
            raise UsageError(
                f"{word}: {suggest_nearest(key, [*(f'{key}=' for key in FAULTS), 'off'])}; as in {_EXAMPLE}"
            )
        found[key] = read.get(key, str)(value)
    if found.keys() == {"seed"}:
        raise UsageError(f"a seed alone causes no faults; as in {_EXAMPLE}")
    return found


def _parse_share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{text}: say which share of the messages, 0.1 or 10%")
    return share


def _parse_delay(text: str) -> float:
    found = _SECONDS.fullmatch(text)
    if not found:
        raise UsageError(f"delay={text}: say how long, with its unit: delay=50ms, delay=0.2s")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def _parse_seed(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"seed={text}: a seed is a whole number")
    return int(text)


def _describe_faults(on: Settings | None) -> str:
    if on is None:
        return f"No faults are on. {_EXAMPLE} puts some on."
    return f"On the messages of programs between all members: {fault_text(on)}; seed {on.seed}. %chaos off ends it."


def _end_faults(drill: Drill) -> str:
    if drill.settings is None:
        return "No faults were on."
    counts = drill.off()
    return "Faults are off. Messages sent: {sent}, lost: {lost}, late: {late}, doubled: {twice}.".format(
        **{"sent": 0, "lost": 0, "late": 0, "twice": 0} | counts
    )


@magics_class
class TraceMagics(Magics):
    """`%%trace`. `here(cell)` runs a cell in the notebook and raises its error."""

    def __init__(self, shell: Any, here: Callable[[str], object]) -> None:
        super().__init__(shell)
        self._shell, self._here = shell, here

    @cell_magic
    @with_help
    def trace(self, line: str, cell: str) -> Any:
        """`%%trace`: run the cell here, or with `%%trace worker1` as `%%remote worker1` does; then show its messages.

        The result is the picture (`_`): `print(_)` lists the messages. It has all messages between members in that
        time, also those of other cells that still run. The second line of a cell that begins with `%%trace` may be a
        `%%remote` line.
        """
        with require_extra("a trace", "ipywidgets", "anywidget"):
            from rpcbench.panels.messages import MessagesPanel
        seen = Trace()
        try:
            with short_tracebacks(), trace() as seen:
                if line.strip():
                    self._shell.run_cell_magic("remote", line, cell)
                else:
                    self._here(cell)
        except BaseException:  # show the messages of a failed cell as well: they explain the failure
            if seen.world:
                display(MessagesPanel(Still(seen.world)))  # type: ignore[no-untyped-call]
            raise
        if not seen.complete:
            warn_on_stderr("Not all workers have reported their messages: some may be missing here.")
        return MessagesPanel(Still(seen.world))


_USAGE = "name the file: %record lesson.json; %record stop ends the recording"


@magics_class
class RecordMagics(Magics):
    """`%record`, for one recording at a time."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._recording: Recording | None = None

    @property
    def recording_path(self) -> Path | None:
        """The file of the recording in progress."""
        return None if self._recording is None else self._recording.path

    @line_magic
    @with_help
    def record(self, line: str) -> None:
        """Record the activity of all members, for lessons that play without workers.

        %record lesson.json                 begin; with --everything also other tables and private text: logs, paths
        %record mark after the race         give this moment a name
        %record stop                        end it and write the file; rpcbench.replay("lesson.json") plays it
        """
        words = shlex.split(line)
        with short_tracebacks():
            sys.stdout.write(f"{self._run_command(words)}\n")

    def _run_command(self, words: list[str]) -> str:
        match words:
            case [] if self._recording is not None:
                return f"To {self._recording.path}: {self._recording.record()}."
            case ["stop"]:
                return self.stop_recording()
            case ["mark", _, *_]:
                self._require_recording().mark(" ".join(words[1:]))
                return "Marked."
            case [path] | [path, "--everything"] | ["--everything", path] if not path.startswith("-"):
                if self._recording is not None:
                    raise UsageError(f"a recording to {self._recording.path} is running; %record stop ends it")
                self._recording = record(path, "--everything" in words)
                return f"Recording to {path} until %record stop."
        raise UsageError(_USAGE)

    def _require_recording(self) -> Recording:
        if self._recording is None:
            raise UsageError(f"nothing is recorded; {_USAGE}")
        return self._recording

    def stop_recording(self) -> str:
        """Stop the recording and write its file; return a report. Raises UsageError if nothing is recorded."""
        recording = self._require_recording()
        self._recording = None  # first: if writing fails, another recording can begin
        made = recording.stop()
        return f'{recording.path}: {made}. rpcbench.replay("{recording.path}") plays it.'

    def end_recording(self) -> None:
        """Stop the recording and write its file, if there is one."""
        if self._recording is not None:
            self.stop_recording()


class AutoTargets(Protocol):
    """`%autoremote`: on while it has targets."""

    targets: str

    def switch_off(self) -> str: ...


class Modes:
    """The modes that stay on until a user ends them: chaos, record, autoremote, held messages; for the sidebar."""

    def __init__(self, auto: AutoTargets, record: RecordMagics) -> None:
        self.auto = auto
        self._record = record

    def active_modes(self, clusters: Mapping[str, BaseCluster]) -> list[dict[str, Any]]:
        """Return a row for each mode that is on: `name`, `text`, and `end`, the request of a page that ends it."""
        return list(self._mode_rows(clusters))

    def _mode_rows(self, clusters: Mapping[str, BaseCluster]) -> Iterator[dict[str, Any]]:
        for of, one in clusters.items():
            where = f" ({of})" if len(clusters) > 1 else ""
            if (settings := Drill.of(one.agent).settings) is not None:
                yield _mode_row("chaos", fault_text(settings) + where, of)
            if (stepper := Stepper.present(one.agent)) is not None:
                held = len(stepper.held)
                yield _mode_row(
                    "held", (f"{count_noun(held, 'message')} held" if held else "%%step is on, none held") + where, of
                )
        if self._record.recording_path is not None:
            yield _mode_row("record", f"recording {self._record.recording_path.name}")
        if self.auto.targets:
            yield _mode_row("autoremote", f"cells run on {self.auto.targets}")

    def end_mode(self, mode: str, found: Callable[[], BaseCluster]) -> str:
        """End a mode and return a report, also if it has ended meanwhile. `found()` is the cluster of the request."""
        match mode:
            case "chaos":
                return _end_faults(Drill.of(found().agent))
            case "held":
                if (stepper := Stepper.present(found().agent)) is not None:
                    stepper.go()
                return "No messages are held any more."
            case "record":
                return (
                    self._record.stop_recording() if self._record.recording_path is not None else "Nothing is recorded."
                )
            case "autoremote":
                return self.auto.switch_off()
        raise UsageError(f"there is no mode {mode!r}")


def _mode_row(name: str, text: str, of: str = "") -> dict[str, Any]:
    return {"name": name, "text": text, "end": {"do": "end", "mode": name, "of": of}}


def fault_text(on: Settings) -> str:
    what = [
        f"drop {100 * on.drop:.3g} %" if on.drop else "",
        f"duplicate {100 * on.duplicate:.3g} %" if on.duplicate else "",
        f"delay 0\N{EN DASH}{1000 * on.delay:g} ms" if on.delay else "",
    ]
    return ", ".join(filter(None, what)) or "no faults"
