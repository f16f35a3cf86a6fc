"""The history of cells: those that each worker has run without an error since its start.

A restarted worker can run them again: the last `CELLS` cells, with at most `BYTES` bytes of variables. The history
keeps references: a value that was changed here after it was sent is sent as changed. It never keeps an RRef, which
would keep the value alive.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch

from rpcbench.base.errors import WorkerLostError
from rpcbench.cells.runner import Cell
from rpcbench.rpc.rref import RRef

CELLS = 1000  # in the history, per worker
BYTES = 1 << 26  # of variables in the history, per worker


class Rerun(NamedTuple):
    """A cell that was run again."""

    code: str
    error: BaseException | None  # None if the cell succeeded


class HistoryEntry(NamedTuple):
    """A cell in the history."""

    code: str
    push: dict[str, Any]
    bytes: float  # of `push`, about
    missing: tuple[str, ...]  # names of variables that were not kept: RRefs, or too large


class WorkerHistory:
    """The history of one worker."""

    def __init__(self) -> None:
        self.cells: dict[int, HistoryEntry] = {}  # by the cell's number, which orders them
        self.forgotten = 0  # cells dropped as there were more than `CELLS`
        self._bytes = 0.0

    def record_cell(self, cell: Cell) -> None:
        kept, total = {}, 0.0
        for name, value in cell.push.items():
            size = _size_of_value(value)
            if size + total + self._bytes <= BYTES:
                kept[name] = value
                total += size
        missing = tuple(name for name in cell.push if name not in kept)
        self.cells[cell.number] = HistoryEntry(cell.code, kept, total, missing)
        self._bytes += total
        if len(self.cells) > CELLS:
            self._bytes -= self.cells.pop(min(self.cells)).bytes
            self.forgotten += 1


class CellHistories:
    """The histories of all workers of one world. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, WorkerHistory] = {}

    def record_cell(self, worker: str, cell: Cell) -> None:
        with self._lock:
            self._of.setdefault(worker, WorkerHistory()).record_cell(cell)

    def pop_history(self, worker: str) -> WorkerHistory:
        with self._lock:
            return self._of.pop(worker, WorkerHistory())


def replay(past: WorkerHistory, run: Callable[[str, dict[str, Any]], BaseException | None]) -> list[Rerun]:
    """Run all cells of the history in order, also after one that fails; stop if the worker is lost.

    `run(code, variables to set first)` returns the cell's error, or None."""
    done = []
    if past.forgotten:
        done.append(Rerun(f"({past.forgotten} earlier ones)", RuntimeError(f"only the last {CELLS} are kept")))
    for _, cell in sorted(past.cells.items()):
        if names := ", ".join(cell.missing):
            why = f"not kept, as they are RRefs or too large: {names}; run it again with -i {names}"
            done.append(Rerun(cell.code, RuntimeError(why)))
            continue
        done.append(Rerun(cell.code, run(cell.code, cell.push)))
        if isinstance(done[-1].error, WorkerLostError):
            break
    return done


def _size_of_value(value: Any, inside: tuple[int, ...] = ()) -> float:
    """Return about how many bytes a value keeps alive; infinity for an RRef, or a container that holds one."""
    if isinstance(value, RRef):
        return math.inf
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:  # `nbytes` is not defined
        return value._indices().nbytes + value._values().nbytes
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return value.nbytes
    if isinstance(value, torch.nn.Module):
        return sum(_size_of_value(parameter) for parameter in value.parameters())
    # `inside` are the ids of the containers around it: a container may hold itself.
    if isinstance(value, dict | list | tuple | set | frozenset) and id(value) not in inside:
        held = value.values() if isinstance(value, dict) else value
        return sys.getsizeof(value) + sum(_size_of_value(each, (*inside, id(value))) for each in held)
    return sys.getsizeof(value)
