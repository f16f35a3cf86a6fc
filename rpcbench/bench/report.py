"""A comparison as a table for people, as Markdown, and as plain values for programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from rich.table import Table

import rpcbench
from rpcbench.bench.figures import Figures, Samples
from rpcbench.bench.goals import BYTES, CORES, Row
from rpcbench.bench.plan import Plan
from rpcbench.bench.plots import bars
from rpcbench.bench.sides import has_goals


class Line(NamedTuple):
    """The cells of one row, as text."""

    title: str
    ours: str
    theirs: str
    ratio: str
    cpu: str
    goal: str


HEADINGS = ("ratio", "CPU ratio", "goal")


def lines(figures: Figures, ours: str, theirs: str, plan: Plan) -> Iterator[Line]:
    known = plan.rows()
    for title, sides in figures.items():
        mine, other, row = sides[ours], sides.get(theirs), known[title]
        theirs_cell = _cell(other, row.unit) if other else ""
        ratio = f"{other.value / mine.value:.2f}x" if other else ""
        cpu = f"{other.cpu / mine.cpu:.2f}x" if other and mine.cpu and other.cpu else ""
        goal = _against_goal(row, mine, other if has_goals(theirs) else None, figures, ours)
        yield Line(title, _cell(mine, row.unit), theirs_cell, ratio, cpu, goal)


def _against_goal(row: Row, mine: Samples, other: Samples | None, figures: Figures, ours: str) -> str:
    goal = row.goal
    if goal.ratio is not None:
        if other is None:
            return ""
        reached = other.value / mine.value >= goal.ratio
        return f"{_mark(reached)} {goal.ratio:g}x" + (f" ({goal.stretch:g}x)" if goal.stretch else "")
    if goal.most is None:
        return ""
    if not goal.of:
        return f"{_mark(mine.value <= goal.most)} at most {_text(goal.most, row.unit)}"
    if goal.of not in figures:
        return f"at most {goal.most:g}x of “{goal.of}”"
    share = mine.value / figures[goal.of][ours].value
    return f"{_mark(share <= goal.most)} at most {goal.most:g}x of “{goal.of}”: {share:.2f}x"


def _mark(reached: bool) -> str:
    return "✓" if reached else "✗"


def as_table(figures: Figures, ours: str, theirs: str, plan: Plan) -> Table:
    """One line a row, and by what factor ours is faster, by the clock and in CPU time of both processes."""
    title = f"median (10th percentile) of {plan.rounds} rounds, seed {plan.seed}"
    table = Table(title=title, caption=f"Ratio: {theirs} / {ours}. Compare only figures of one run.")
    table.add_column("", no_wrap=True)
    for heading in (ours, theirs, *HEADINGS):
        table.add_column(heading, justify="left" if heading == "goal" else "right")
    for line in lines(figures, ours, theirs, plan):
        table.add_row(*line)
    return table


def as_markdown(figures: Figures, ours: str, theirs: str, plan: Plan) -> str:
    """The same as a table of Markdown, with what it was measured on."""
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"
    headings = ("", ours, theirs, *HEADINGS)
    body = [headings, ("---",) * len(headings), *lines(figures, ours, theirs, plan)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in body)
    return f"Median (10th percentile) of {plan.rounds} rounds, seed {plan.seed}; {machine}.\n\n{table}\n"


def as_plot(figures: Figures, ours: str, theirs: str, plan: Plan) -> str:
    """Bars of the ratios, with their goals, as SVG."""
    known = plan.rows()
    ratios = [
        (title, sides[theirs].value / sides[ours].value, known[title].goal.ratio)
        for title, sides in figures.items()
        if theirs in sides
    ]
    return bars(f"{theirs} / {ours}, median of {plan.rounds} rounds", ratios)


def _cell(samples: Samples, unit: str) -> str:
    return f"{_text(samples.value, unit)} ({_text(samples.p10, unit)})"


def _text(value: float, unit: str) -> str:
    if unit == BYTES:
        return f"{value / 1e6:.3g} MB"
    if unit == CORES:
        return f"{value:.2%} of a core"
    name, scale = ("s", 1.0) if value >= 1 else ("ms", 1e3) if value >= 1e-3 else ("µs", 1e6)
    return f"{value * scale:.3g} {name}"


def as_values(figures: Figures, ours: str, theirs: str, plan: Plan) -> dict[str, Any]:
    """All figures in the units of their rows, with what is needed to read them later."""
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
        "workloads": {title: _sides(sides, ours, theirs) for title, sides in figures.items()},
    }


def _sides(sides: dict[str, Samples], ours: str, theirs: str) -> dict[str, Any]:
    values: dict[str, Any] = {name: _numbers(samples) for name, samples in sides.items()}
    if theirs in sides:
        values["ratio"] = sides[theirs].value / sides[ours].value
        values["ratio_p10"] = sides[theirs].p10 / sides[ours].p10
    return values


def _numbers(samples: Samples) -> dict[str, Any]:
    batches = [Samples(samples.main, [batch]) for batch in samples.batches]
    return {
        **_quantiles(samples),
        "quantile": samples.main,
        "batches": [_quantiles(batch) for batch in batches],
    }


def _quantiles(samples: Samples) -> dict[str, Any]:
    return {"value": samples.value, "p10": samples.p10, "cpu": samples.cpu, "calls": samples.count}
