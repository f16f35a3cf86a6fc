"""The cells that each worker has run, as they were sent, so that the next one of its name can run them again.

Rules
- Only what a worker has run without an error since it was started is kept, in the order it was sent in.
- The last `CELLS` cells of a worker are kept, with variables of `BYTES` in all; a value that was changed here since it
  was sent goes as it is now. An RRef is never kept: it would keep what it refers to alive.
- What cannot be run again is told of like what fails.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from rpcbench.base.errors import WorkerLostError
from rpcbench.rpc.rref import RRef

if TYPE_CHECKING:
    from rpcbench.launch.cells import Cell

CELLS = 1000
BYTES = 1 << 26


class Rerun(NamedTuple):
    """A cell that was run again; `error` is what it failed with, None if it did not."""

    code: str
    error: BaseException | None


class Kept(NamedTuple):
    """A cell with its variables, but for those that are `missing`: too large, or RRefs."""

    code: str
    push: dict[str, Any]
    bytes: float
    missing: tuple[str, ...]


class Past:
    """What one worker has run."""

    def __init__(self) -> None:
        self.cells: dict[int, Kept] = {}
        self.forgotten = 0
        self._bytes = 0.0

    def note(self, cell: Cell) -> None:
        kept, total = {}, 0.0
        for name, value in cell.push.items():
            size = _size(value)
            if size + total + self._bytes <= BYTES:
                kept[name] = value
                total += size
        missing = tuple(name for name in cell.push if name not in kept)
        self.cells[cell.number] = Kept(cell.code, kept, total, missing)
        self._bytes += total
        if len(self.cells) > CELLS:
            self._bytes -= self.cells.pop(min(self.cells)).bytes
            self.forgotten += 1


class History:
    """The past of all workers of one world. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, Past] = {}

    def note(self, worker: str, cell: Cell) -> None:
        """It has run there."""
        with self._lock:
            self._of.setdefault(worker, Past()).note(cell)

    def take(self, worker: str) -> Past:
        """What it has run; from now on that is nothing."""
        with self._lock:
            return self._of.pop(worker, Past())


Run = Callable[[str, dict[str, Any]], BaseException | None]
"""(code, variables to set first) -> what the cell failed with."""


def replay(past: Past, run: Run) -> list[Rerun]:
    """Run all of it again, also after a cell that fails, unless the worker is lost."""
    done = []
    if past.forgotten:
        done.append(Rerun(f"({past.forgotten} earlier ones)", RuntimeError(f"only the last {CELLS} are kept")))
    for _, cell in sorted(past.cells.items()):
        done.append(Rerun(cell.code, _error(cell, run)))
        if isinstance(done[-1].error, WorkerLostError):
            break
    return done


def _error(cell: Kept, run: Run) -> BaseException | None:
    if cell.missing:
        names = ", ".join(cell.missing)
        return RuntimeError(f"not kept, as they are RRefs or too large: {names}; run it again with -i {names}")
    return run(cell.code, cell.push)


def _size(value: Any, inside: tuple[int, ...] = ()) -> float:
    """Bytes that are kept with it, about; of an RRef, or what holds one, without end."""
    if isinstance(value, RRef):
        return math.inf
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return value.nbytes
    if isinstance(value, torch.nn.Module):
        return sum(parameter.nbytes for parameter in value.parameters())
    if isinstance(value, dict | list | tuple | set | frozenset) and id(value) not in inside:
        held = value.values() if isinstance(value, dict) else value
        return sys.getsizeof(value) + sum(_size(each, (*inside, id(value))) for each in held)
    return sys.getsizeof(value)
