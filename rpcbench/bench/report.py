"""A comparison as a table for people, as Markdown, and as plain values for programs."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table

import rpcbench
from rpcbench.bench.figures import Figures, Samples
from rpcbench.bench.goals import BYTES, CORES, SECONDS, Row
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


HEADINGS = ("ratio", "CPU ratio")


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
        return f"{_mark(reached)} {goal.ratio:g}x"
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
    for heading in (ours, theirs, *HEADINGS, "goal"):
        table.add_column(heading, justify="left" if heading == "goal" else "right")
    for line in lines(figures, ours, theirs, plan):
        table.add_row(*line)
    return table


def as_markdown(figures: Figures, ours: str, theirs: str, plan: Plan) -> str:
    """The same as a table of Markdown, with what it was measured on, and without the goals."""
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}, {interpreter()}"
    head = f"Median (10th percentile) of {plan.rounds} rounds, seed {plan.seed}; {machine}."
    body = [line[:-1] for line in lines(figures, ours, theirs, plan)]
    return f"{head}\n\n{_markdown(('', ours, theirs, *HEADINGS), body)}"


def as_columns(runs: Sequence[dict[str, Any]]) -> str:
    """Runs under several interpreters, as `as_values` gives them, side by side: what ours takes under each, and by what
    factor it is faster, as Markdown."""
    titles = dict.fromkeys(title for run in runs for title in run["workloads"])
    units = {title: row.unit for title, row in Plan(0).rows().items()}
    body = [(title, *(_column(run, title, units.get(title, SECONDS)) for run in runs)) for title in titles]
    return _markdown(("", *(run["versions"]["interpreter"] for run in runs)), body)


def _column(run: dict[str, Any], title: str, unit: str) -> str:
    sides = run["workloads"].get(title, {})
    mine, ratio = sides.get(run["ours"]), sides.get("ratio")
    if mine is None:
        return ""
    return _text(mine["value"], unit) + ("" if ratio is None else f", {ratio:.2f}x")


def _markdown(headings: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    rows = [headings, ("---",) * len(headings), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"


def interpreter() -> str:
    """The Python that runs this. One that was built with a profile is about a quarter faster, but not each tells."""
    profiled = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    return f"Python {platform.python_version()}{', built with a profile' if profiled else ''}"


def as_plot(figures: Figures, ours: str, theirs: str, plan: Plan) -> str:
    """Bars of the ratios, as SVG."""
    ratios = [(title, sides[theirs].value / sides[ours].value) for title, sides in figures.items() if theirs in sides]
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
            "interpreter": interpreter(),
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
