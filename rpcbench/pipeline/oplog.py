"""What this worker does in the last few steps: rows of the table "steps", a step each, and of "ops", an operation each.

A step's row says what is planned here and who else takes part. So whoever has the rows of all of them knows whether a
step is over, and what a worker that runs nothing waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from rpcbench.agent.core import Agent
from rpcbench.pipeline.ops import Op
from rpcbench.words.events import Row, Table

KEPT_STEPS = 8
RUNNING, DONE, FAILED = "running", "done", "failed"


class OpLog:
    """One for each agent: `agent.part(OpLog)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._tables: dict[str, Table] = {"steps": {}, "ops": {}}
        for name in self._tables:
            agent.bus.register(name, partial(self.table, name))

    def open(
        self,
        step: int,
        ops: Sequence[Op],
        workers: Sequence[int],
        ideal: float | None,
        replica: int | None = None,
    ) -> Row:
        """A step begins: what is to be done here, who else takes part, its ideal idle share, of which replica these
        stages are, where there are several; a row to give to `close`.

        Rows of steps long before it are dropped.
        """
        self._forget(step - KEPT_STEPS)
        row: Row = {
            "step": step,
            "worker": self._agent.id,
            "workers": list(workers),
            "plan": [str(op) for op in ops],
            "ideal": ideal,
            "replica": replica,
            "state": RUNNING,
        }
        self._set("StepBegan", "steps", self._key(step), row)
        return row

    def close(self, row: Row, state: str) -> None:
        """The step is over here: DONE or FAILED."""
        self._set("StepEnded", "steps", self._key(row["step"]), {**row, "state": state})

    def begin(self, step: int, index: int, op: Op) -> tuple[str, Row]:
        """An operation begins; give what is returned to `end`."""
        key = f"{self._key(step)}.{index}"
        row: Row = {
            "step": step,
            "worker": self._agent.id,
            "stage": op.stage,
            "op": op.kind.value,
            "microbatch": op.microbatch,
            "begin": time.monotonic(),
            "end": None,
            "bytes": 0,
            "held": None,
            "failed": False,
        }
        self._set("OpStarted", "ops", key, row)
        return key, row

    def end(self, key: str, row: Row, *, sent: int, held: int, failed: bool = False) -> Row:
        """It has ended, with `sent` bytes for the neighbour; its stage now holds `held` bytes of activations."""
        row = {**row, "end": time.monotonic(), "bytes": sent, "held": held, "failed": failed}
        self._set("OpEnded", "ops", key, row)
        return row

    def table(self, name: str) -> Table:
        with self._lock:
            return dict(self._tables[name])

    def _key(self, step: int) -> str:
        return f"s{step}.w{self._agent.id}"

    def _forget(self, last: int) -> None:
        with self._lock:
            old = [(name, key) for name, rows in self._tables.items() for key in rows if rows[key]["step"] <= last]
            for name, key in old:
                del self._tables[name][key]
        for name, key in old:
            self._agent.bus.note("StepForgotten", name, key, partial(self._tables[name].get, key))

    def _set(self, kind: str, table: str, key: str, row: Row) -> None:
        with self._lock:
            self._tables[table][key] = row
        self._agent.bus.note(kind, table, key, partial(self._tables[table].get, key))
