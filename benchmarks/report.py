"""A comparison as a table, as Markdown, as plain values and as SVG: bars of ratios, curves over logarithmic axes."""

from __future__ import annotations

import math
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import torch
from rich.table import Table

import rpcbench
from benchmarks.compare import Plan
from benchmarks.rows import BYTES, CORES, SECONDS, Figures, Row, Samples, has_goals

_TEXT = 'font-family="sans-serif" font-size="12" fill="#333"'
_BAR, _OURS_SLOWER, _MARK = "#2a7", "#c54", "#333"
_COLOURS = ("#2a7", "#47c", "#c54", "#a5c")
_LINE = 22
_LABELS = 300
_SPACE = 420
_PLOT = 320
_MARGIN = 60

Point = tuple[float, float]


def bars(title: str, ratios: Sequence[tuple[str, float]]) -> str:
    """One bar a (label, ratio), on a logarithmic axis that begins at 1."""
    low = min(1.0, *(ratio for _, ratio in ratios))
    high = max(2.0, *(ratio for _, ratio in ratios))
    at = _Axis(low, high, _LABELS, _LABELS + _SPACE)
    return _drawing(_LABELS + _SPACE + 60, _LINE * (len(ratios) + 2), [
        _svg_text(10, 16, title, "start"),
        *(part for number, row in enumerate(ratios, 1) for part in _bar(*row, y=_LINE * number + 8, at=at)),
        _line((at(1), 26), (at(1), _LINE * (len(ratios) + 1) + 8), _MARK),
    ])  # fmt: skip


def _bar(label: str, ratio: float, *, y: float, at: _Axis) -> Iterator[str]:
    left, right = sorted((at(1), at(ratio)))
    colour = _BAR if ratio >= 1 else _OURS_SLOWER
    yield _svg_text(_LABELS - 60, y + 13, label, "end")
    yield f'<rect x="{left:.1f}" y="{y + 3}" width="{right - left:.1f}" height="{_LINE - 8}" fill="{colour}"/>'
    yield _svg_text(max(right, at(1)) + 5, y + 13, f"{ratio:.2f}x", "start")


def curves(title: str, x: str, y: str, points: Mapping[str, Sequence[Point]]) -> str:
    """One curve a name, both axes logarithmic."""
    xs, ys = ([point[axis] for curve in points.values() for point in curve] for axis in (0, 1))
    across, up = _axis(xs, _MARGIN, _MARGIN + _SPACE), _axis(ys, _PLOT - _MARGIN, _MARGIN)
    parts = [
        _svg_text(10, 16, title, "start"),
        _svg_text(_MARGIN + _SPACE, _PLOT - 15, x, "end"),
        _svg_text(10, 40, y, "start"),
    ]
    for at in _decades(xs):
        parts += [_line((across(at), _MARGIN), (across(at), _PLOT - _MARGIN), "#ddd")]
        parts += [_svg_text(across(at), _PLOT - _MARGIN + 16, f"{at:g}", "middle")]
    for at in _decades(ys):
        parts += [
            _line((_MARGIN, up(at)), (_MARGIN + _SPACE, up(at)), "#ddd"),
            _svg_text(10, up(at) + 4, f"{at:g}", "start"),
        ]
    for number, (name, curve) in enumerate(points.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{across(px):.1f},{up(py):.1f}" for px, py in curve)
        parts += [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
        parts += [_svg_text(_MARGIN + _SPACE + 10, _MARGIN + 20 * number, name, "start", colour)]
    return _drawing(_MARGIN + _SPACE + 220, _PLOT, parts)


class _Axis:
    """From values to places, logarithmic."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._begin = low, begin
        self._scale = (end - begin) / math.log(high / low)

    def __call__(self, value: float) -> float:
        return self._begin + self._scale * math.log(value / self._low)


def _axis(values: Sequence[float], begin: float, end: float) -> _Axis:
    return _Axis(min(values), max(*values, min(values) * 1.01), begin, end)


def _decades(values: Sequence[float]) -> list[float]:
    low, high = math.ceil(math.log10(min(values))), math.floor(math.log10(max(values)))
    return [10.0**power for power in range(low, high + 1)]


def _svg_text(x: float, y: float, text: str, anchor: str, colour: str = "") -> str:
    fill = f' style="fill:{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {_TEXT}{fill}>{escape(text)}</text>'


def _line(begin: Point, end: Point, colour: str) -> str:
    return f'<line x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="{colour}"/>'


def _drawing(width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


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
