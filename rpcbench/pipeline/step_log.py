"""The log of a worker's steps: rows of the tables "steps" and "ops", and a crash record, which outlives the process.

The row of a step has this worker's plan and the ids of all workers in it. So a reader of all workers' rows can
determine whether a step has ended, and which operation a waiting worker waits for. An operation stores two stamps; its
row is built when it is read.

The crash record is a word of 8 bytes in memory that the driver and a worker of its host share: after the worker's death
the driver reads from it at which operation the worker was. To update it is one store, without a message; a worker on
another host stores it in memory of its own. The file behind it is deleted as soon as both have mapped it.
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

from rpcbench.base.ids import Row, Table
from rpcbench.pipeline.ops import Kind, Op, parse_plan
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.events import EventLog

_BYTES = 8  # a machine word, so that one store writes it whole
PLACES = 1 << 16
"""How many operations of a step the word can number."""
_PHASES = 1 << 4  # room for the phases


class WorkerPhase(IntEnum):
    """The phase of a worker in a step: one word that is only read, after a death; `StepLife` has the states."""

    NOTHING = 0  # the step has not begun
    WAITS = 1  # for the needs of an operation
    RUNS = 2
    SENDS = 3
    READY = 4  # after its last operation, before the commit
    APPLIES = 5
    APPLIED = 6


class StepPosition(NamedTuple):
    """A crash record, decoded: the position of a worker in a step."""

    step: int
    doing: WorkerPhase
    where: int  # index in the worker's list of operations; in APPLIES the stage


class CrashRecord:
    """The crash record of one worker in one pipeline."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self.word = memoryview(memory).cast("Q")  # unsigned, 64 bits

    @staticmethod
    def open_file(path: str) -> CrashRecord:
        """Return the record in a file of `create_record_files`; for an empty path, one in this process's own memory."""
        if not path:
            return CrashRecord(bytearray(_BYTES))
        with Path(path).open("r+b") as file:
            return CrashRecord(mmap.mmap(file.fileno(), _BYTES))

    def store_phase(self, step: int, doing: WorkerPhase, where: int = 0) -> None:
        """Store the phase, and the index of the operation or stage."""
        # One store of a machine word: a reader after a death gets this place or the one before, nothing in between.
        self.word[0] = phase_word(step, doing) + where % PLACES

    @property
    def last_position(self) -> StepPosition:
        rest, where = divmod(self.word[0], PLACES)
        step, doing = divmod(rest, _PHASES)
        return StepPosition(step, WorkerPhase(doing), where)


def phase_word(step: int, doing: WorkerPhase) -> int:
    """Return the word for index 0 in this phase; each later index adds 1."""
    return (step * _PHASES + doing) * PLACES


@contextlib.contextmanager
def create_record_files(directory: str, ids: Sequence[int]) -> Iterator[dict[int, str]]:
    """Create an empty record file for each of these workers; delete them after the block, which opens them."""
    token = secrets.token_hex(8)  # pipelines of one driver share the directory
    paths = {id_: Path(directory) / f"ops-{token}.{id_}" for id_ in ids}
    try:
        for path in paths.values():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(bytes(_BYTES))
        yield {id_: str(path) for id_, path in paths.items()}
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


def describe_position(place: StepPosition, step: int, ops: Sequence[Op]) -> str:
    """Return a phrase for the place of a worker in this step, in which it had these operations."""
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


KEPT_STEPS = 8  # steps whose rows a worker keeps
RUNNING, DONE, FAILED, INTERRUPTED = "running", "done", "failed", "interrupted"
Ended = tuple[float, int, int | None, bool]
"""When an operation ended, bytes sent to other stages, bytes that its stage then held, whether it failed. Bytes held
are None where they are not known."""
_RUNNING = (None, 0, None, False)  # in place of an Ended that is still to come


class Stamps(NamedTuple):
    """The stamps of a worker's operations in a step, in order: begins, and ends of those that have ended."""

    began: Sequence[float]
    ended: Sequence[Ended]

    def op_rows(self, step: int, worker: int, ops: Sequence[Op]) -> list[Row]:
        """Return the rows of all operations that have begun."""
        began = self.began[:]  # copied first: the step's thread may end an operation and begin the next meanwhile
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


class StepRecord:
    """The log of one step, while it runs and afterwards. One thread writes to it, others read."""

    def __init__(self, bus: EventLog, plan: str, row: Row) -> None:
        self._bus, self._ops = bus, parse_plan(plan)
        self.key = f"s{row['step']}.w{row['worker']}"
        self.row = row  # of the step; replaced, never changed, as others read it
        self._began: list[float] = []
        self._ended: list[Ended] = []
        self.stamps = Stamps(self._began, self._ended)

    def begin_op(self) -> None:
        """Record that the next operation begins."""
        self._began.append(monotonic())
        if self._bus.listening:  # a row costs more than a stamp
            self._report_op("OpStarted")

    def expect_op(self, op: Op) -> None:
        """Let the next operation be this one, before the others that the plan has left."""
        done, left = self._ops[: len(self._began)], [*self._ops[len(self._began) :]]
        if left and left[0] == op:
            return
        with contextlib.suppress(ValueError):  # the plan does not have it
            left.remove(op)
        self._ops = (*done, op, *left)
        self.row = {**self.row, "plan": [str(each) for each in self._ops]}
        self.emit_event("StepReordered")

    def end_op(self, sent: int, held: int | None, failed: bool = False) -> None:
        """Record its end: `sent` bytes for other stages; its stage now holds `held` bytes of activations."""
        self._ended.append((monotonic(), sent, held, failed))
        if self._bus.listening:
            self._report_op("OpEnded")

    def _report_op(self, kind: str) -> None:
        index = len(self._began) - 1
        self._bus.record_change(kind, "ops", f"{self.key}.{index}", partial(self._row_of, index))

    def end_step(self, state: str, **more: float | None) -> None:
        """Record the end of the step on this worker, DONE, FAILED or INTERRUPTED, and more fields of its row."""
        self.row = {**self.row, "state": state, **more}
        self.emit_event("StepEnded")

    def emit_event(self, kind: str) -> None:
        """Emit an event of the step."""
        self._bus.record_change(kind, "steps", self.key, lambda: self.row)

    def emit_removal(self) -> None:
        """Emit the removal of the step and of its operations from the tables."""
        self._bus.record_change("StepForgotten", "steps", self.key, lambda: None)
        for key in self.op_rows():
            self._bus.record_change("StepForgotten", "ops", key, lambda: None)

    def op_rows(self) -> Table:
        """Return the rows of its operations, by key."""
        rows = self.stamps.op_rows(self.row["step"], self.row["worker"], self._ops)
        return {f"{self.key}.{index}": row for index, row in enumerate(rows)}

    def _row_of(self, index: int) -> Row:
        own = slice(index, index + 1)
        stamps = Stamps(self._began[own], self._ended[own])
        (row,) = stamps.op_rows(self.row["step"], self.row["worker"], self._ops[own])
        return row


class OpLog:
    """The log of an agent's steps, one for each agent: `agent.part(OpLog)`."""

    def __init__(self, agent: Agent) -> None:
        self._id, self._bus = agent.id, agent.links.bus
        self._steps: dict[int, StepRecord] = {}
        agent.links.bus.register_table("steps", lambda: {logged.key: logged.row for logged in self._kept_steps()})
        agent.links.bus.register_table(
            "ops", lambda: {key: row for logged in self._kept_steps() for key, row in logged.op_rows().items()}
        )

    def open_step(
        self,
        run: str,
        step: int,
        plan: str,
        workers: Sequence[int],
        ideal: float | None,
        samples: int | None,
        replica: int | None,
    ) -> StepRecord:
        """Begin a step, and drop the rows of steps long before it.

        Args:
            run: What counts the steps, alike on all workers: "" for this package's pipelines, which have one count.
            step: Its number.
            plan: The operations here.
            workers: The ids of all that take part.
            ideal: Idle share of the schedule; None in evaluation, which drops no step that trains.
            samples: Those of the batch, if this worker knows it.
            replica: Which one these stages are, where there are several.
        """
        for old in [row["step"] for row in [logged.row for logged in self._kept_steps()] if _is_over(row, step, ideal)]:
            # With a default, as two steps may begin at once.
            if (logged := self._steps.pop(old, None)) is not None and self._bus.listening:
                logged.emit_removal()
        row: Row = {
            "run": run,
            "step": step,
            "worker": self._id,
            "workers": list(workers),
            "plan": plan.split(),
            "ideal": ideal,
            **({} if samples is None else {"samples": samples}),
            "replica": replica,
            "state": RUNNING,
        }
        self._steps[step] = logged = StepRecord(self._bus, plan, row)
        logged.emit_event("StepBegan")
        return logged

    def _kept_steps(self) -> list[StepRecord]:
        return list(self._steps.values())  # a list, because other threads read the dict


def _is_over(old: Row, step: int, ideal: float | None) -> bool:
    """Return whether a new step displaces an old one: that of its number, of another pipeline, or one long ago."""
    if old["step"] == step:
        return True
    return old["step"] <= step - KEPT_STEPS and (old["ideal"] is None or ideal is not None)
