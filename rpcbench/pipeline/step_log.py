"""What a worker notes of its steps: the rows of "steps" and "ops", and the operation that it is at, which outlives it.

A step's row says what is planned here and which workers take part. So a reader of the rows of all of them knows whether
a step is over, and what a worker that runs nothing waits for. An operation leaves two stamps; a row is made of them
when it is read.

What a worker is at stands in eight bytes of memory that both processes of one host share: after its death the driver
reads at which operation it was. To note something is one store into it, no message; a worker on another host notes it
where no other process looks. The file behind it is gone as soon as both have it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from rpcbench.base.events import Row, Table
from rpcbench.pipeline.ops import Kind, Op, ops_in
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.events import EventLog

_BYTES = 8
PLACES = 1 << 16
"""So many operations are told apart."""
_DOINGS = 1 << 4


class WorkerPhase(IntEnum):
    """What a worker is at. `NOTHING`: it has not begun."""

    NOTHING = 0
    WAITS = 1
    RUNS = 2
    SENDS = 3
    READY = 4
    APPLIES = 5
    APPLIED = 6


class Place(NamedTuple):
    """`where`: the position in the worker's list of operations, or, where it applies, the stage."""

    step: int
    doing: WorkerPhase
    where: int


class CrashRecord:
    """One worker's bytes, in one pipeline."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self.word = memoryview(memory).cast("Q")

    @staticmethod
    def at(path: str) -> CrashRecord:
        """The one behind a file of `files`; for an empty path one that nobody else reads."""
        if not path:
            return CrashRecord(bytearray(_BYTES))
        with Path(path).open("r+b") as file:
            return CrashRecord(mmap.mmap(file.fileno(), _BYTES))

    def note(self, step: int, doing: WorkerPhase, where: int = 0) -> None:
        """One store of a machine word: whoever reads it after a death reads this place, or the one before."""
        self.word[0] = noted(step, doing) + where % PLACES

    @property
    def place(self) -> Place:
        rest, where = divmod(self.word[0], PLACES)
        step, doing = divmod(rest, _DOINGS)
        return Place(step, WorkerPhase(doing), where)


def noted(step: int, doing: WorkerPhase) -> int:
    """What the word says of the first place, and one more for each after it."""
    return (step * _DOINGS + doing) * PLACES


@contextlib.contextmanager
def files(directory: str, ids: Sequence[int]) -> Iterator[dict[int, str]]:
    """An empty record's path for each of these workers, for as long as the block takes: open them inside."""
    token = secrets.token_hex(8)
    paths = {id_: Path(directory) / f"ops-{token}.{id_}" for id_ in ids}
    try:
        for path in paths.values():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(bytes(_BYTES))
        yield {id_: str(path) for id_, path in paths.items()}
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


def words(place: Place, step: int, ops: Sequence[Op]) -> str:
    """What a worker was at in this step, of which it had these operations."""
    if place.step != step or place.doing is WorkerPhase.NOTHING:
        return "before its first operation"
    if place.doing is WorkerPhase.APPLIES:
        return f"in the optimizer of stage {place.where}"
    if place.doing in (WorkerPhase.READY, WorkerPhase.APPLIED):
        return "after its last operation" if place.doing is WorkerPhase.READY else "after its optimizers"
    op = ops[place.where]
    name = f"{'the all-reduce' if op.kind is Kind.ALL_REDUCE else op.label} of stage {op.stage}"
    return {
        WorkerPhase.WAITS: f"waiting to begin {name}",
        WorkerPhase.RUNS: f"in {name}",
        WorkerPhase.SENDS: f"sending what {name} has made",
    }[place.doing]


KEPT_STEPS = 8
RUNNING, DONE, FAILED = "running", "done", "failed"
Ended = tuple[float, int, int, bool]
"""Of an operation: when it ended, bytes for other stages, bytes that its stage holds after it, whether it failed."""
_RUNNING = (None, 0, None, False)


class Stamps(NamedTuple):
    """Of a worker's operations in a step, in their order: when each began, and of those that have ended how."""

    began: Sequence[float]
    ended: Sequence[Ended]

    def rows(self, step: int, worker: int, ops: Sequence[Op]) -> list[Row]:
        """Of all that have begun."""
        began = self.began[:]  # first: where one is under way, another thread may end it and begin the next now
        ended = [*self.ended, *[_RUNNING] * len(began)]
        return [
            {
                "step": step,
                "worker": worker,
                "stage": op.stage,
                "op": op.kind.value,
                "microbatch": op.microbatch,
                "begin": begin,
                "end": end,
                "bytes": sent,
                "held": held,
                "failed": failed,
            }
            for op, begin, (end, sent, held, failed) in zip(ops, began, ended, strict=False)
        ]


class Logged:
    """A step, while it runs and afterwards; `row` is its own. One thread writes here, others look."""

    def __init__(self, bus: EventLog, plan: str, row: Row) -> None:
        self._bus, self._ops = bus, ops_in(plan)
        self.key = f"s{row['step']}.w{row['worker']}"
        self.row = row
        self._began: list[float] = []
        self._ended: list[Ended] = []
        self.stamps = Stamps(self._began, self._ended)

    def begin(self) -> None:
        """The next operation begins."""
        self._began.append(monotonic())
        if self._bus.listening:
            self._tell("OpStarted")

    def end(self, sent: int, held: int, failed: bool = False) -> None:
        """It has ended, with `sent` bytes for other stages; its stage now holds `held` bytes of activations."""
        self._ended.append((monotonic(), sent, held, failed))
        if self._bus.listening:
            self._tell("OpEnded")

    def _tell(self, kind: str) -> None:
        index = len(self._began) - 1
        self._bus.note(kind, "ops", f"{self.key}.{index}", partial(self._row_of, index))

    def close(self, state: str) -> None:
        """The step is over here: DONE or FAILED."""
        self.row = {**self.row, "state": state}
        self.tell("StepEnded")

    def tell(self, kind: str) -> None:
        """Of the step."""
        self._bus.note(kind, "steps", self.key, lambda: self.row)

    def forget(self) -> None:
        """No table has it any more."""
        self._bus.note("StepForgotten", "steps", self.key, _gone)
        for key in self.rows():
            self._bus.note("StepForgotten", "ops", key, _gone)

    def rows(self) -> Table:
        """Of its operations."""
        rows = self.stamps.rows(self.row["step"], self.row["worker"], self._ops)
        return {f"{self.key}.{index}": row for index, row in enumerate(rows)}

    def _row_of(self, index: int) -> Row:
        own = slice(index, index + 1)
        stamps = Stamps(self._began[own], self._ended[own])
        (row,) = stamps.rows(self.row["step"], self.row["worker"], self._ops[own])
        return row


def _gone() -> None:
    return None


class OpLog:
    """One for each agent: `agent.part(OpLog)`."""

    def __init__(self, agent: Agent) -> None:
        self._id, self._bus = agent.id, agent.bus
        self._steps: dict[int, Logged] = {}
        agent.bus.register("steps", lambda: {logged.key: logged.row for logged in self._kept()})
        agent.bus.register("ops", lambda: {key: row for logged in self._kept() for key, row in logged.rows().items()})

    def open(
        self, step: int, plan: str, workers: Sequence[int], ideal: float | None, replica: int | None = None
    ) -> Logged:
        """A step begins: what is to be done here, who else takes part, its ideal idle share, of which replica these
        stages are, where there are several.

        Rows of steps long before it are dropped.
        """
        for old in [number for number in list(self._steps) if number <= step - KEPT_STEPS]:
            if (logged := self._steps.pop(old, None)) is not None and self._bus.listening:
                logged.forget()
        row: Row = {
            "step": step,
            "worker": self._id,
            "workers": list(workers),
            "plan": plan.split(),
            "ideal": ideal,
            "replica": replica,
            "state": RUNNING,
        }
        self._steps[step] = logged = Logged(self._bus, plan, row)
        logged.tell("StepBegan")
        return logged

    def _kept(self) -> list[Logged]:
        return list(self._steps.values())
