"""Ops over time, of a measured step and of a simulated one, as a chart: kinds told apart by letter, shade and colour.

A line for each worker, blank where it is idle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rpcbench.base.charts import RUNNING, Bar, Chart, Mark
from rpcbench.pipeline.ops import Kind
from rpcbench.pipeline.spans import Span

MARKS = {
    Kind.FORWARD: Mark("░", "blue", "on-blue", "F forward"),
    Kind.BACKWARD: Mark("▓", "amber", "on-amber", "B backward"),
    Kind.INPUT: Mark("▒", "amber", "on-amber", "I input gradient"),
    Kind.WEIGHT: Mark("▚", "purple", "paper", "W weight gradients"),
    Kind.RECOMPUTE: Mark("▞", "green", "paper", "R recomputed forward"),
    Kind.UPDATE: Mark("▪", "red", "paper", "U update of the weights"),
    Kind.ALL_REDUCE: Mark("◇", "orange", "paper", "A all-reduce over the replicas"),
}


def chart(
    spans: Sequence[Span],
    names: Mapping[int, str],
    title: str,
    running: Collection[Span] = (),
    unit: str = "",
    per: float = 1.0,
) -> Chart:
    """`names` tells the workers' names by id, `running` the ops that have not ended; `unit`, `per`: as `Chart`'s."""
    stages: dict[int, set[int]] = {}
    for span in spans:
        stages.setdefault(span.worker, set()).add(span.op.stage)
    bars = tuple(_bar(span, len(stages[span.worker]) > 1, span in running) for span in spans)
    kinds = {span.op.kind for span in spans}
    marks = tuple(mark for kind, mark in MARKS.items() if kind in kinds)
    return Chart(bars, names, "Pipeline", title, marks, _legend(kinds, bool(running)), unit, per)


def _bar(span: Span, staged: bool, running: bool) -> Bar:
    labels = (str(span.op), span.op.label) if staged else (span.op.label,)
    return Bar(span.worker, span.begin, span.end, MARKS[span.op.kind], labels, running)


def _legend(kinds: set[Kind], running: bool) -> str:
    told = {kind: mark.fill + mark.name[1:] for kind, mark in MARKS.items() if kind in kinds}
    besides = f"; A{told.pop(Kind.ALL_REDUCE)}" if Kind.ALL_REDUCE in told else ""
    still = f"; {RUNNING} still running" if running else ""
    marks = ", ".join(f"{kind}0{words}" for kind, words in told.items())
    return f"{marks} of micro-batch 0{besides}; blank: idle{still}"
