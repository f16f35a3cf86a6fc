"""pdb on a worker: `%debug worker1` on the cell that failed last, `breakpoint()` or `pdb.set_trace()` in one that runs.

It is IPython's debugger; it asks as `input()` does and prints as the cell does. The stop button ends it and the cell,
at its prompt and once the cell goes on: IPython's own would go on with the cell, and open again instead of ending it.
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
"""The code of a cell that opens it."""


def install_debugger() -> None:
    """`pdb.set_trace()` opens it, and `breakpoint()`, unless PYTHONBREAKPOINT names another debugger."""
    pdb.set_trace = _stop_here
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = _stop_here


def post_mortem() -> None:
    """In a cell: look at the one that failed last. Says so if there was none."""
    frames = _from_the_cell(getattr(sys, "last_traceback", None))
    if frames is None:
        sys.stdout.write("No cell has failed here yet, or the last one that did never began to run.\n")
        return
    with _last_kept(), contextlib.suppress(KeyboardInterrupt):
        debugger = _debugger()
        debugger.reset()
        debugger.interaction(None, frames)


def _stop_here(*_: Any, header: str | None = None, **__: Any) -> None:
    debugger = _debugger()
    if header is not None:
        debugger.message(header)
    debugger.set_trace(sys._getframe(1))


def _debugger() -> Any:
    """Made late: few cells want one, and it takes a while to load."""
    from IPython.core.debugger import InterruptiblePdb

    class CellPdb(InterruptiblePdb):
        stopped = False

        def cmdloop(self, intro: Any = None) -> None:
            try:
                super().cmdloop(intro)  # type: ignore[no-untyped-call]
            except KeyboardInterrupt:
                self.stopped = True
                raise

        def interaction(self, frame: Any, tb_or_exc: Any) -> None:
            super().interaction(frame, tb_or_exc)  # type: ignore[no-untyped-call]
            if self.stopped:
                raise KeyboardInterrupt

    debugger: Any = CellPdb(nosigint=True)  # else it would take the stop button for itself once the cell goes on
    return debugger


@contextlib.contextmanager
def _last_kept() -> Iterator[None]:
    """What failed last stays that, whatever goes wrong at the prompt."""
    names = ("last_exc", "last_type", "last_value", "last_traceback")
    before = {name: getattr(sys, name) for name in names if hasattr(sys, name)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(sys, name, value)


def _from_the_cell(frames: TracebackType | None) -> TracebackType | None:
    """From the first frame on that is neither IPython's nor ours."""
    import IPython

    machinery = tuple(f"{folder}{os.sep}" for folder in (Path(str(IPython.__file__)).parent, Path(__file__).parents[1]))
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(machinery):
        frames = frames.tb_next
    return frames
