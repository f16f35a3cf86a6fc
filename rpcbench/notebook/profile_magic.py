"""`%%profile`: runs a cell, here or on workers, and shows the profile of it.

The cell is run as `%%remote` runs it, with all its options but `--async`. A failed or stopped cell shows its profile,
too, before its error. The line is checked, with the folder of the file, before anything runs.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.display import display

from rpcbench.base.rebuild import add_note
from rpcbench.cells.targets import ALL
from rpcbench.cells.tracebacks import short_tracebacks, with_rendering
from rpcbench.launch.cluster import cluster
from rpcbench.notebook import with_help
from rpcbench.notebook.async_cells import HERE
from rpcbench.notebook.parsers import profile_line
from rpcbench.telemetry.profile import Profile, profile

_HERE_ALONE = (
    "{name} is a variable of the notebook, but `%%profile {where}` runs the cell on workers, which do not have it.\n"
    "Profile the workers from a plain cell, which the notebook runs, without a magic:\n"
    '    with rpcbench.profile("all") as p:\n'
    "        ...  # the lines of this cell\n"
    "    p"
)


@magics_class
class ProfileMagics(Magics):
    """`%%profile`. `here(cell)` runs a cell in the notebook and raises its error; `workers(words)` reads the words of a
    `%%remote` line and returns the workers that they select."""

    def __init__(self, shell: Any, here: Callable[[str], object], workers: Callable[[list[str]], list[str]]) -> None:
        super().__init__(shell)
        self._shell, self._here, self._workers = shell, here, workers

    @cell_magic
    @with_help
    def profile(self, line: str, cell: str) -> Profile:
        """`%%profile [worker1 … | all] [options]`: run the cell as `%%remote` does, and show its torch operators.

            --save FILE    write a file for ui.perfetto.dev: operators, messages, pipeline, collectives, memory
            --memory       also count the bytes that each operator allocates; it makes each operator half as slow again

        Other options are those of `%%remote`. Without workers, or with the word `notebook`, the cell runs here. The
        workers that run it are profiled, on all their threads; with `all` the notebook is, too. The result (`_`) is the
        profile: `_.table(by="worker")` sums by worker. A profiled operator takes about a microsecond longer, with
        `--memory` two.
        """
        with short_tracebacks():
            options, words = profile_line().parse_some(shlex.split(line))
            members, run = self._plan_run(words, cell)
            if options.save is not None and not Path(options.save).resolve().parent.is_dir():
                raise UsageError(f"--save {options.save}: there is no folder {Path(options.save).parent}")
            made: Profile | None = None
            try:
                with profile(*members, memory=options.memory) as made:
                    run()
            except BaseException as error:
                if made is not None:
                    display(made)  # type: ignore[no-untyped-call]
                self._explain_name(error, words)
                raise
            finally:
                if made is not None and options.save is not None:
                    path = made.save(options.save)
                    sys.stdout.write(f"{path}: open it at ui.perfetto.dev, or in chrome://tracing.\n")
            return made

    def _explain_name(self, error: BaseException, words: list[str]) -> None:
        """Add to the error of a worker that lacks a variable of the notebook how a plain cell is profiled."""
        found = re.match(r"name '(\w+)' is not defined", str(error)) if isinstance(error, NameError) else None
        render = getattr(error, "_render_traceback_", None)
        if found and found[1] in self._shell.user_ns and render is not None:
            note = _HERE_ALONE.format(name=found[1], where=" ".join(words))
            add_note(error, note)
            with_rendering(error, [*render(), *note.splitlines()])

    def _plan_run(self, words: list[str], cell: str) -> tuple[Sequence[str], Callable[[], object]]:
        """Return the members to profile, and a function that runs the cell."""
        me = cluster().agent.name
        if not words or words == [HERE]:
            return [me], lambda: self._here(cell)
        if "--async" in words:
            raise UsageError("--async returns before the cell has ended, so nothing would be profiled: leave it out")
        members = [*self._workers(words), *([me] if ALL in words else [])]
        return members, lambda: self._shell.run_cell_magic("remote", shlex.join(words), cell)
