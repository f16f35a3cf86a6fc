"""The cells of this process as rows of the table "cells": those that it sends to workers, and the notebook's own.

Guarantees
- The last `MOST` cells are kept; of more, one that has ended goes first. A row has at most `LONGEST` characters of
  code.
- A row is made only when a watcher reads it: a cell costs a few microseconds.
- A cell of the notebook that does no more than send its code to workers is one row, that of the workers, in the log of
  their cluster alone.
- No cell is left as running in the last world: cells that run when this process leaves it are recorded until then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from rpcbench.base.charts import shorten_words
from rpcbench.base.errors import CallCancelled, is_worker_loss
from rpcbench.base.ids import Counter, Row, Table
from rpcbench.base.sources import ipython_shell
from rpcbench.runtime.locked_node import is_main_thread
from rpcbench.runtime.publisher import Health
from rpcbench.wire.messages import Origin

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent

MOST = 200
LONGEST = 2000
RUNS, OK, ERROR, INTERRUPTED, LOST, STOPPED = "runs", "ok", "error", "interrupted", "lost", "stopped"
"""The states of a cell on a worker. `STOPPED`: it still ran when the cluster was stopped, perhaps by itself."""
_LONGEST_ERROR = 300


class CellRecord:
    """The record of one cell. It is made by `CellLog.begin_cell`; its methods may be called on any thread."""

    def __init__(
        self, about: Row, here: int, members: Iterable[tuple[int, str]], report_change: Callable[[], object]
    ) -> None:
        self.code: str = about["code"]
        self._here = here  # the member that records it
        self._about = about
        self._report_change = report_change
        self._lock = threading.Lock()  # guards `_parts`
        # By member: its name, the state, the error, the end, the number of its prompt, seconds that it took there.
        self._parts: dict[int, list[Any]] = {id_: [name, RUNS, "", None, None, None] for id_, name in members}
        self._began = time.monotonic()

    @property
    def has_ended(self) -> bool:
        return all(part[1] != RUNS for part in self._parts.values())

    def end_part(self, member: int, error: BaseException | None, kind: str | None = None) -> None:
        """Record the end on a member. `kind`: the name of the error's class there, where the call has another one."""
        now = time.monotonic()
        with self._lock:
            part = self._parts[member]
            part[1:4] = *_state_and_error(error, kind, is_here=member == self._here), now
        self._report_change()

    def stop(self) -> None:
        """Record the end of the world for the parts that run."""
        now = time.monotonic()
        with self._lock:
            for part in self._parts.values():
                if part[1] == RUNS:
                    part[1], part[3] = STOPPED, now
        self._report_change()

    def tell_run(self, member: int, number: int | None, seconds: float | None) -> None:
        """Record the member's own report: the number of the prompt, and how long the code ran."""
        with self._lock:
            self._parts[member][4:6] = number, seconds
        self._report_change()

    def make_row(self) -> Row:
        with self._lock:
            parts = [[id_, *part] for id_, part in self._parts.items()]
        code = self._about["code"]
        return {
            **self._about, "code": code[:LONGEST], "is_cut": len(code) > LONGEST, "began": self._began, "parts": parts,
        }  # fmt: skip


def _state_and_error(error: BaseException | None, kind: str | None, is_here: bool) -> tuple[str, str]:
    if error is None:
        return OK, ""
    if is_worker_loss(error) and not is_here:  # here it is an error of the code: another member is lost
        return LOST, ""
    if isinstance(error, KeyboardInterrupt | CallCancelled) and kind in (None, "KeyboardInterrupt"):
        return INTERRUPTED, ""
    name, text = kind or type(error).__name__, "" if isinstance(error, CallCancelled) else str(error)
    return ERROR, shorten_words(f"{name}: {text}".removesuffix(": "), _LONGEST_ERROR)


class CellLog:
    """The cells of one agent: `agent.part(CellLog)`. Make it on the thread that runs cells."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards `_cells`
        self._cells: dict[str, CellRecord] = {}  # the latest last
        self._numbers = Counter(1)
        self._here: tuple[object, str, CellRecord] | None = None  # IPython's info, key and record of what runs here
        self._kept: CellRecord | None = None  # see `keep_here`
        self._bus = agent.links.bus
        self._bus.register_table("cells", self.table)
        agent.hooks.on_leave.insert(0, self._stop_cells)  # before the collector waits for the last reports
        shell = ipython_shell()
        if shell is not None and agent.id == 0:
            _NOTEBOOKS.add(self)
            agent.part(Health).cells.append(lambda: int(self._here is not None))
            agent.hooks.on_end.append(partial(_NOTEBOOKS.discard, self))
            for event, called in (("pre_run_cell", self._begin_here), ("post_run_cell", self._end_here)):
                shell.events.register(event, called)
                agent.hooks.on_end.append(partial(shell.events.unregister, event, called))

    def begin_cell(self, code: str, members: Iterable[tuple[int, str]], origin: Origin | None) -> CellRecord:
        """Record that a cell is sent to members, by id and name."""
        if is_main_thread():
            for log in [*_NOTEBOOKS]:
                log._forget_sender(code)
        return self._record(code, members, origin)[1]

    def _forget_sender(self, code: str) -> None:
        """Forget the cell that runs here if it does no more than send this code to workers, of whichever cluster."""
        if self._here is not None and _sends_only(self._here[2].code, code):
            self._forget(self._here[1])
            self._here = None

    def _record(self, code: str, members: Iterable[tuple[int, str]], origin: Origin | None) -> tuple[str, CellRecord]:
        number = self._numbers.next()
        key = str(number)
        where = {"cell": origin.cell if origin else "", "number": origin.number if origin else None}

        def report_change() -> None:
            self._bus.record_change("CellChanged", "cells", key, record.make_row)

        record = CellRecord(
            {"order": number, "code": code.strip("\n"), **where}, self._agent.id, members, report_change
        )
        dropped = None
        with self._lock:
            self._cells[key] = record
            if len(self._cells) > MOST:
                dropped = next((old for old, each in self._cells.items() if each.has_ended), next(iter(self._cells)))
        report_change()
        if dropped is not None:
            self._forget(dropped)
        return key, record

    def _forget(self, key: str) -> None:
        with self._lock:
            self._cells.pop(key, None)
        self._bus.record_change("CellForgotten", "cells", key, _no_row)

    def _stop_cells(self) -> None:
        with self._lock:
            running = [cell for cell in self._cells.values() if not cell.has_ended]
        for cell in running:
            cell.stop()

    def table(self) -> Table:
        with self._lock:
            cells = dict(self._cells)
        return {key: cell.make_row() for key, cell in cells.items()}

    # -- the notebook's own cells
    def _begin_here(self, info: Any) -> None:
        if self._here is not None or not info.store_history or not is_main_thread():
            return  # run by another cell
        # Its input is not stored yet. `execution_count` may be that of the next cell already.
        number = len(ipython_shell().history_manager.input_hist_parsed)
        origin = Origin(str(getattr(info, "cell_id", None) or ""), number)
        key, record = self._record(info.raw_cell, [(0, self._agent.name)], origin)
        self._here = info, key, record

    def keep_here(self) -> CellRecord | None:
        """Return the record of the cell that runs here, if it has one: its code goes on on another thread, and the
        caller records its end. Called on the thread that runs cells."""
        self._kept = self._here[2] if self._here is not None else None
        return self._kept

    def _end_here(self, result: Any) -> None:
        if self._here is None or self._here[0] is not result.info:
            return
        _, _, record = self._here
        self._here = None
        error = result.error_before_exec or result.error_in_exec
        if record is not self._kept:
            record.end_part(0, error)
        self._kept = None


_NOTEBOOKS: WeakSet[CellLog] = WeakSet()
"""The logs that record the cells of the notebook, one for each of its clusters. Used on the thread that runs cells."""


def _sends_only(raw: str, code: str) -> bool:
    """Return whether a cell of the notebook is this code behind a magic, or nothing else."""
    raw, code = raw.strip(), code.strip()
    lead = raw[: len(raw) - len(code)].lstrip()
    return raw.endswith(code) and (not lead or (lead.startswith("%") and "\n" not in lead.rstrip()))


def _no_row() -> None:
    return None
