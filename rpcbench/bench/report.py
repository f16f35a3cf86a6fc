"""A comparison as a table for people and as plain values for programs."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
from rich.table import Table

import rpcbench
from rpcbench.bench.compare import Figures, Plan, Samples


def as_table(figures: Figures, ours: str, theirs: str, plan: Plan) -> Table:
    """One line a workload, and in the last column by what factor ours is faster."""
    title = f"median (10th percentile) of {plan.rounds} rounds, seed {plan.seed}"
    table = Table(title=title, caption=f"Ratio: {theirs} / {ours}. Compare only figures of one run.")
    table.add_column("workload", no_wrap=True)
    for heading in (ours, theirs, "ratio"):
        table.add_column(heading, justify="right")
    for name, sides in figures.items():
        table.add_row(name, _cell(sides[ours]), _cell(sides[theirs]), f"{sides[theirs].p50 / sides[ours].p50:.2f}x")
    return table


def _cell(samples: Samples) -> str:
    return f"{_duration(samples.p50)} ({_duration(samples.p10)})"


def _duration(seconds: float) -> str:
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * scale:.3g} {unit}"


def as_values(figures: Figures, ours: str, theirs: str, plan: Plan) -> dict[str, Any]:
    """All figures in seconds, with what is needed to read them later."""
    return {
        "seed": plan.seed,
        "rounds": plan.rounds,
        "batch_seconds": plan.budget,
        "ours": ours,
        "theirs": theirs,
        "versions": {
            "rpcbench": rpcbench.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "cpus": os.cpu_count(),
        "workloads": {
            title: {
                **{name: _numbers(samples) for name, samples in sides.items()},
                "ratio_p50": sides[theirs].p50 / sides[ours].p50,
                "ratio_p10": sides[theirs].p10 / sides[ours].p10,
            }
            for title, sides in figures.items()
        },
    }


def _numbers(samples: Samples) -> dict[str, Any]:
    batches = [Samples([batch]) for batch in samples.batches]
    return {
        "p50": samples.p50,
        "p10": samples.p10,
        "calls": samples.count,
        "batches": [{"p50": batch.p50, "p10": batch.p10, "calls": batch.count} for batch in batches],
    }
