"""`%%trace`: runs a cell and shows the messages between members that it caused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from IPython.core.magic import Magics, cell_magic, magics_class, no_var_expand
from IPython.display import display

from rpcbench.launch.tracebacks import short
from rpcbench.notebook.help import helps
from rpcbench.notebook.needs import needs
from rpcbench.telemetry.still import Still
from rpcbench.telemetry.trace import Trace, trace


@magics_class
class TraceMagics(Magics):
    """`here(cell)` runs a cell in the notebook and raises what it raises."""

    def __init__(self, shell: Any, here: Callable[[str], object]) -> None:
        super().__init__(shell)
        self._shell, self._here = shell, here

    @no_var_expand
    @cell_magic
    @helps
    def trace(self, line: str, cell: str) -> Any:
        """`%%trace`: run the cell here, `%%trace worker1`: there, as `%%remote worker1` does; then show its messages.

        The answer is the picture (`_`): `print(_)` lists the messages. Everything that members said to each other
        meanwhile is in it, also what other cells that still run have caused. The second line of a cell that begins
        with `%%trace` may be a `%%remote` line.
        """
        with needs("a trace", "ipywidgets", "anywidget"):
            from rpcbench.panels.messages import MessagesPanel
        seen = Trace()
        try:
            with short(), trace() as seen:
                if line.strip():
                    self._shell.run_cell_magic("remote", line, cell)
                else:
                    self._here(cell)
        except BaseException:
            if seen.world:
                display(MessagesPanel(Still(seen.world)))  # type: ignore[no-untyped-call]
            raise
        if not seen.complete:
            sys.stderr.write("Not all workers have told of their messages: some may be missing here.\n")
        return MessagesPanel(Still(seen.world))
