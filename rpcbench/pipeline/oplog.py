"""When each operation of this worker ran, as rows of the table "ops", for the last few steps."""

from __future__ import annotations

import threading
import time

from rpcbench.agent.core import Agent
from rpcbench.pipeline.schedules import Op
from rpcbench.words.events import Row, Table

KEPT_STEPS = 4


class OpLog:
    """One for each agent: `agent.part(OpLog)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._rows: Table = {}
        agent.bus.register("ops", self.table)

    def begin(self, step: int, index: int, op: Op) -> tuple[str, Row]:
        """An operation begins; give what is returned to `end`."""
        key = f"s{step}.w{self._agent.id}.{index}"
        row: Row = {
            "step": step,
            "worker": self._agent.id,
            "stage": op.stage,
            "op": op.kind.value,
            "microbatch": op.microbatch,
            "begin": time.monotonic(),
            "end": None,
            "bytes": 0,
        }
        self._set("OpStarted", key, row)
        return key, row

    def end(self, key: str, row: Row, sent: int) -> Row:
        """It has ended, with `sent` bytes for the neighbour."""
        row = {**row, "end": time.monotonic(), "bytes": sent}
        self._set("OpEnded", key, row)
        return row

    def forget_before(self, step: int) -> None:
        """Keep rows of the last few steps only."""
        with self._lock:
            old = [key for key, row in self._rows.items() if row["step"] <= step - KEPT_STEPS]
            for key in old:
                del self._rows[key]
        for key in old:
            self._agent.bus.note("OpForgotten", "ops", key, None)

    def table(self) -> Table:
        with self._lock:
            return dict(self._rows)

    def _set(self, kind: str, key: str, row: Row) -> None:
        with self._lock:
            self._rows[key] = row
        self._agent.bus.note(kind, "ops", key, row)
