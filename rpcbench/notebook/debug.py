"""`%debug worker1`: a debugger, here in the notebook, on the cell that failed last on that worker.

With anything else than a worker's name, or nothing, it is IPython's own `%debug`, which `give_back` leaves alone again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class, needs_local_scope, no_var_expand

from rpcbench.notebook.help import helps


@magics_class
class DebugMagics(Magics):
    """`is_worker(word)` says who may be meant, `debug_on(worker)` opens the debugger there."""

    def __init__(self, shell: Any, is_worker: Callable[[str], bool], debug_on: Callable[[str], object]) -> None:
        super().__init__(shell)
        self._is_worker, self._debug_on = is_worker, debug_on
        self._magics = shell.magics_manager.magics
        # Found, not looked up: IPython may not have loaded it yet, and what stands in for it would find ours.
        self._own = {kind: shell.find_magic("debug", kind) for kind in ("line", "cell")}

    def give_back(self) -> None:
        for kind, own in self._own.items():
            self._magics[kind]["debug"] = own

    @no_var_expand
    @needs_local_scope
    @line_cell_magic
    @helps
    def debug(self, line: str = "", cell: str | None = None, local_ns: Any = None) -> Any:
        """`%debug worker1`: look at the cell that failed last on worker1, at a prompt of IPython's debugger.

        `p name` shows a variable, `u` and `d` go up and down the stack, `q` or the stop button ends it. Without a
        worker's name this is IPython's own `%debug`.
        """
        if cell is None and self._is_worker(line.strip()):
            return self._debug_on(line.strip())
        if cell is None:
            return self._own["line"](line, local_ns=local_ns)
        return self._own["cell"](line, cell, local_ns=local_ns)
