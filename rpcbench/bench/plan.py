"""How much to measure, and which rows there are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rpcbench.bench import startup
from rpcbench.bench.goals import Row
from rpcbench.bench.startup import Scene
from rpcbench.bench.workloads import WORKLOADS


@dataclass(frozen=True, slots=True)
class Plan:
    """`budget`: seconds of one batch, `rounds` times; worlds are started `repeats` times, of up to `workers`."""

    seed: int
    rounds: int = 10
    budget: float = 0.3
    workers: int = 8
    repeats: int = 3

    @staticmethod
    def quick(seed: int) -> Plan:
        """Enough to see that everything runs, too little to trust the figures."""
        return Plan(seed, rounds=2, budget=0.1, workers=2, repeats=1)

    def rows(self) -> dict[str, Row]:
        """All rows, by title."""
        calls = {title: workload.row for title, workload in WORKLOADS.items()}
        return calls | {title: row for scene in startup.scenes(self.workers) for title, row in scene.rows.items()}

    def scenes(self, chosen: Collection[str]) -> list[Scene]:
        """Those that have a chosen row."""
        return [scene for scene in startup.scenes(self.workers) if not scene.rows.keys().isdisjoint(chosen)]
