"""The view of the plan panel: the layouts of a `LayoutPlan` as rows, each with the timeline of its step; and its words.

Guarantees
- Rows are plain data. A layout whose program fails has its error, and no figures.
- A timeline has `MOST_BARS` bars at most: of a longer one neighbours of one lane and phase are joined.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rpcbench.base.charts import Bar, Chart, shorten_words
from rpcbench.base.ids import Row, Table
from rpcbench.simulation.simulated_world import format_seconds
from rpcbench.telemetry.views import View, World, rows_of, worker_rows

if TYPE_CHECKING:
    from rpcbench.launch.plan_layouts import LayoutPlan, PlannedMesh

FITS, TOO_LARGE, FAILS = "fits", "does not fit", "fails"
MOST_BARS = 400
_GIB = 2**30
_LINE = 160  # characters of a line of text


def plan_tables(plan: LayoutPlan) -> dict[str, Table]:
    """Return a plan as the tables "plans" (one row), "planned" and "timelines" (a row for each layout)."""
    rows = {str(n): _layout_row(n, layout) for n, layout in enumerate(plan.layouts)}
    ranks = math.prod(plan.layouts[0].mesh.values())
    about = {"hardware": plan.hardware.name, "memory": plan.hardware.memory_bytes, "ranks": ranks}
    timelines = {str(n): _timeline_row(layout) for n, layout in enumerate(plan.layouts) if layout.world is not None}
    return {"plans": {"0": about}, "planned": rows, "timelines": timelines}


def plan_view(world: World) -> View:
    """Return a plan. Sections: workers, plans, planned, timelines.

    `plans` has one row: the `hardware`, its bytes of `memory`, and the number of `ranks`. `planned`, best first: the
    `state` of a layout, one of `FITS`, `TOO_LARGE` and `FAILS`, with its `error`; else `seconds` of a step, the share
    of the `peak` that it reaches, the most `bytes` of a rank, by `parts`, those that the allocator has `reserved`,
    `tokens` per second and rank or None, and `causes` ([cause, seconds], longest first). `timelines` (by key of
    `planned`): the `role` with the longest step, names of its `lanes`, and `bars` ([lane, begin, end, phase, words]
    each).
    """
    view: View = {"workers": worker_rows(world, ())}
    for section in ("plans", "planned", "timelines"):
        view[section] = {key: row for _, key, row in rows_of(world, section)}
    return view


def _layout_row(order: int, layout: PlannedMesh) -> Row:
    about = {"order": order, "name": layout.name, "error": layout.error}
    if (world := layout.world) is None:
        return {**about, "state": FAILS}
    _, peak = max(world.memory.items(), key=lambda each: each[1].bytes)
    return {
        **about, "state": FITS if layout.is_fitting else TOO_LARGE, "seconds": world.step_seconds, "peak": world.mfu,
        "bytes": peak.bytes, "parts": [[name, size] for name, size in peak.by_category.items() if size],
        "reserved": world.reserved_bytes, "tokens": world.tokens_per_second,
        "causes": [[cause, seconds] for cause, seconds in world.causes.items()],
    }  # fmt: skip


# -- timelines
def _timeline_row(layout: PlannedMesh) -> Row:
    assert layout.world is not None
    chart = layout.world.timeline
    bars = [[bar.lane, bar.begin, bar.end, bar.mark.name, bar.labels[0]] for bar in _join_bars(chart)]
    return {"role": layout.world.slowest.name, "lanes": [chart.names[lane] for lane in chart.lanes], "bars": bars}


def _join_bars(chart: Chart) -> Sequence[Bar]:
    """Return the bars of a chart, joined to longer ones until there are few enough."""
    bars: Sequence[Bar] = sorted(chart.bars, key=lambda bar: (bar.lane, bar.begin))
    longest = chart.total_time / MOST_BARS
    while len(bars) > MOST_BARS and longest < 2 * chart.total_time:
        bars = list(_join_neighbours(bars, longest))
        longest *= 2
    return bars


def _join_neighbours(bars: Sequence[Bar], longest: float) -> Iterable[Bar]:
    """Yield bars: those of one lane and mark are one that is at most so long, with the words of both ends."""
    group: list[Bar] = []
    for bar in bars:
        if group and ((bar.lane, bar.mark) != (group[0].lane, group[0].mark) or bar.end - group[0].begin > longest):
            yield _make_joined(group)
            group = []
        group.append(bar)
    if group:
        yield _make_joined(group)


def _make_joined(bars: Sequence[Bar]) -> Bar:
    first, last = bars[0], bars[-1]
    ends = dict.fromkeys((first.labels[0].partition(" … ")[0], last.labels[0].rpartition(" … ")[2]))
    return Bar(first.lane, first.begin, last.end, first.mark, (" … ".join(ends),))


# -- text
def plan_text(view: View) -> tuple[str, list[str]]:
    """Return the view as text: a line with the sums, and a line for each layout."""
    (plan,) = view["plans"].values()
    rows = list(view["planned"].values())
    counts = Counter(row["state"] for row in rows)
    tally = ", ".join(f"{counts[state]} {_COUNTED[state][counts[state] > 1]}" for state in _COUNTED if counts[state])
    head = f"plan of {plan['ranks']:,} ranks of {plan['hardware']}, {plan['memory'] / _GIB:.1f} GiB each: {tally}"
    width = max(len(row["name"]) for row in rows)
    return head, [shorten_words(f"  {row['name']:{width}}  {_layout_words(row)}", _LINE) for row in rows]


_COUNTED = {FITS: (FITS, "fit"), TOO_LARGE: (TOO_LARGE, "do not fit"), FAILS: (FAILS, "fail")}


def _layout_words(row: Row) -> str:
    if row["state"] == FAILS:
        return str(row["error"]).partition("\n")[0]
    rate = "" if row["tokens"] is None else f", {row['tokens']:,.0f} tokens per second and rank"
    verdict = "" if row["state"] == FITS else "; does not fit"
    step = f"{format_seconds(row['seconds'])}, {row['peak']:.1%} of the peak"
    return f"{step}{rate}, {row['bytes'] / _GIB:.2f} GiB{verdict}"
