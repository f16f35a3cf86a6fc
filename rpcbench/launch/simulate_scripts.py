"""Plays scripts as torchrun starts them, each rank in a process of its own: `rpcbench simulate script.py`.

Guarantees
- The script is run as it is: with torchrun's variables, its arguments, and `__name__ == "__main__"`, on the main thread
  of a process that has played no other rank.
- The step is found by the optimizer: from the second return of its `step()` to the third, at which the script ends. Of
  several optimizers the first one that steps counts. Its `finally` blocks run; an `except Exception` does not stop it.
- An error of the script, also that it has no such step, is a SimulationError with the script's own lines.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.overrides
from torch.optim.optimizer import register_optimizer_step_post_hook

from rpcbench.base.errors import SimulationError, count_noun
from rpcbench.launch.plan_layouts import LayoutPlan, plan_with
from rpcbench.launch.simulate_programs import simulate_with
from rpcbench.simulation.fake_operators import FakeOperators
from rpcbench.simulation.fake_world import RankPlace, fake_world
from rpcbench.simulation.hardware import Hardware
from rpcbench.simulation.rank_log import RankLog
from rpcbench.simulation.rank_recorder import RankRecorder
from rpcbench.simulation.simulated_world import SimulatedWorld

_FIRST, _LAST = 2, 3  # returns of `optimizer.step()` between which the step is


@dataclass(frozen=True, slots=True)
class Script:
    """A script, or a module with `is_module`, as torchrun starts it.

    Args:
        name: Its path, or the module's name.
        hardware: On which it runs: the script sees its name, its memory, and the ranks of a host.
        arguments: `{dp}` stands for the size of the dimension "dp" of the mesh.
        is_module: As after `torchrun -m`.
        values: What a read of a tensor's value returns; None: it is an error.
    """

    name: str
    hardware: Hardware
    arguments: Sequence[str] = ()
    is_module: bool = False
    values: float | None = None

    def arguments_on(self, mesh: Mapping[str, int]) -> list[str]:
        """Return the arguments for a mesh."""
        arguments = list(self.arguments)
        for name, size in mesh.items():
            arguments = [each.replace(f"{{{name}}}", str(size)) for each in arguments]
        return arguments

    def run(self) -> None:
        """Run it in this process; `sys.argv` has its arguments."""
        if self.is_module:
            sys.path.insert(0, "")
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(self.name).absolute().parent))
            runpy.run_path(self.name, run_name="__main__")


class StepPlayed(BaseException):
    """The step has ended: raised in the script, which nothing else is asked of. No Exception, as a script might catch
    those."""


class StepFinder:
    """Records from the return `first` to the return `last` of the optimizer's `step()`; enter it after the recorder."""

    def __init__(self, recorder: RankRecorder, first: int, last: int) -> None:
        self._recorder = recorder
        self._first, self._last = first, last
        self._counted: torch.optim.Optimizer | None = None
        self._exits = contextlib.ExitStack()
        self.steps = 0  # of the optimizer that counts
        self.log: RankLog | None = None  # of the step, once it has been found

    def __enter__(self) -> StepFinder:
        self._exits.callback(register_optimizer_step_post_hook(self._count_step).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> bool:
        self._exits.close()
        return kind is StepPlayed

    def _count_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._counted is None:
            self._counted = optimizer
        if optimizer is not self._counted or self.log is not None:
            return
        self.steps += 1
        if self.steps == self._first:
            self._recorder.begin_step()
        elif self.steps == self._last:
            self.log = self._recorder.end_step()
            raise StepPlayed


def simulate_script(script: Script, mesh: Mapping[str, int], tokens: int | None = None) -> SimulatedWorld:
    """Play a script as the ranks of a world. For the roles of ranks and the result see `rpcbench.simulate`."""
    return simulate_with(partial(_play_in_processes, script), mesh, script.hardware, tokens)


def plan_script(
    script: Script, ranks: int, dimensions: Sequence[str], tokens: int | None = None
) -> LayoutPlan:  # fmt: skip
    """Simulate a script on all meshes of so many ranks. See `rpcbench.plan`."""
    return plan_with(partial(_try_in_processes, script), ranks, script.hardware, dimensions, tokens=tokens)


def _play_in_processes(script: Script, places: Sequence[tuple[Mapping[str, int], int]]) -> list[RankLog]:
    """Play a script on ranks, each of a mesh, at most as many at once as there are cores."""
    with _start_ranks(script, places) as played:
        return [_read_log(each) for each in played]


def _try_in_processes(script: Script, places: Sequence[tuple[Mapping[str, int], int]]) -> list[RankLog | str]:
    """As `_play_in_processes`, with the text of its error for a rank that fails."""
    with _start_ranks(script, places) as played:
        return [_read_log_or_error(each) for each in played]


@contextlib.contextmanager
def _start_ranks(
    script: Script, places: Sequence[tuple[Mapping[str, int], int]]
) -> Iterator[list[Future[RankLog]]]:  # fmt: skip
    context = multiprocessing.get_context("spawn")  # a fork of a process that has used torch might hang
    count = min(len(places), os.cpu_count() or 1)
    with ProcessPoolExecutor(count, mp_context=context, max_tasks_per_child=1) as processes:
        played = [processes.submit(play_script, script, mesh, rank) for mesh, rank in places]
        try:
            yield played
        finally:
            for each in played:
                each.cancel()


def _read_log(played: Future[RankLog]) -> RankLog:
    try:
        return played.result()
    except BrokenProcessPool as error:
        raise SimulationError(
            "the process of a rank has ended before its step: the script has ended it, or its memory was used up"
        ) from error


def _read_log_or_error(played: Future[RankLog]) -> RankLog | str:
    try:
        return _read_log(played)
    except SimulationError as error:
        return str(error)


def play_script(script: Script, mesh: Mapping[str, int], rank: int) -> RankLog:
    """Play one rank of a script in this process, and return the log of its step. Once in a process."""
    place = RankPlace(rank, math.prod(mesh.values()), script.hardware)
    os.environ.update(place.torchrun_variables())
    sys.argv = [script.name, *script.arguments_on(mesh)]
    recorder, operators = RankRecorder(rank), FakeOperators(script.values)
    finder = StepFinder(recorder, _FIRST, _LAST)
    with _explain_script(script), fake_world(place, recorder.mark_gradients, False), operators, recorder, finder:
        script.run()
    if finder.log is None:
        raise SimulationError(_describe_missing_step(script, finder.steps))
    finder.log.assumed += operators.remarks
    return finder.log


def _describe_missing_step(script: Script, steps: int) -> str:
    seen = f"stepped its optimizer {count_noun(steps, 'time')}" if steps else "stepped no optimizer of torch.optim"
    return (
        f"{script.name} has ended and {seen}: a simulated step is the one between the returns {_FIRST} and {_LAST} of "
        f"optimizer.step(), so let it train for at least {_LAST} steps"
    )


@contextlib.contextmanager
def _explain_script(script: Script) -> Iterator[None]:
    """Turn the errors of a script into a SimulationError with its lines, and let it exit."""
    try:
        yield
    except SimulationError:
        raise
    except SystemExit as end:
        if end.code not in (None, 0):
            raise SimulationError(f"{script.name} has exited: {end.code}") from end
    except Exception as error:
        lines = [each for each in traceback.extract_tb(error.__traceback__) if _is_shown(each.filename)]
        text = "".join(traceback.format_list(lines))
        kind = type(error).__name__
        raise SimulationError(f"{script.name} has failed: {kind}: {error}\n{text}{kind}: {error}") from error


def _is_shown(file: str) -> bool:
    """Return whether a frame's file is shown: not those that play the script."""
    return not file.startswith((str(Path(__file__).parents[1]), "<frozen", runpy.__file__, torch.overrides.__file__))
