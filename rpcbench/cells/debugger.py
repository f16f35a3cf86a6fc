"""pdb on a worker: `%debug worker1` for the last failed cell, `breakpoint()` and `pdb.set_trace()` in a running one.

It is IPython's debugger; it reads by `input()` and prints like the cell. The stop button ends debugger and cell, at a
prompt and later. IPython's own would continue the cell when stopped at a prompt, and open again when stopped later.
"""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

POST_MORTEM = "__import__('rpcbench.cells.debugger', fromlist=['_']).post_mortem()"
"""The code of a cell that opens the debugger."""


def install_debugger() -> None:
    """Make `pdb.set_trace()` open it, and `breakpoint()` unless PYTHONBREAKPOINT names another debugger."""
    pdb.set_trace = _stop_here
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _stop_here


def post_mortem() -> None:
    """Open the debugger, in a cell, on the cell that failed last."""
    frames = _from_the_cell(getattr(sys, "last_traceback", None))
    if frames is None:
        sys.stdout.write("No cell has failed here yet, or the last failed cell never began to run.\n")
        return
    with _last_kept(), contextlib.suppress(KeyboardInterrupt):
        debugger = _make_debugger()
        debugger.reset()
        debugger.interaction(None, frames)


def _stop_here(*_: Any, header: str | None = None, **__: Any) -> None:
    debugger = _make_debugger()
    if header is not None:
        debugger.message(header)
    debugger.set_trace(sys._getframe(1))


def _make_debugger() -> Any:
    """Make the debugger, which is imported late: few cells need it, and it loads slowly."""
    from IPython.core.debugger import InterruptiblePdb

    class CellPdb(InterruptiblePdb):
        stopped = False  # by the stop button, at a prompt

        def cmdloop(self, intro: Any = None) -> None:
            try:
                super().cmdloop(intro)  # type: ignore[no-untyped-call]
            except KeyboardInterrupt:
                self.stopped = True
                raise

        def interaction(self, frame: Any, tb_or_exc: Any) -> None:
            super().interaction(frame, tb_or_exc)  # type: ignore[no-untyped-call]
            if self.stopped:  # pdb has swallowed the interrupt; raised here, it ends the cell
                raise KeyboardInterrupt

    debugger: Any = CellPdb(nosigint=True)  # otherwise it would catch the stop button once the cell continues
    return debugger


@contextlib.contextmanager
def _last_kept() -> Iterator[None]:
    """Keep the last failure in `sys`, so that an error at the prompt does not replace it."""
    names = ("last_exc", "last_type", "last_value", "last_traceback")
    before = {name: getattr(sys, name) for name in names if hasattr(sys, name)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(sys, name, value)


def _from_the_cell(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame on that is neither IPython's nor this package's."""
    import IPython

    machinery = tuple(f"{folder}{os.sep}" for folder in (Path(str(IPython.__file__)).parent, Path(__file__).parents[1]))
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(machinery):
        frames = frames.tb_next
    return frames
