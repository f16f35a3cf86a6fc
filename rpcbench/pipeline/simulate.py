"""A schedule simulated: how long each worker is idle, and how much it keeps.

Rules
- Each worker runs its list in order, each op as early as its worker and its needs (see `ops`) allow. A result for
  another worker arrives `transfer` later, which delays neither; the step ends when the last op ends.
- Spans and idle shares are defined here once, for measured and for simulated steps. Both are drawn as a chart: a line
  for each worker, blank where it is idle; letter, shade and colour show the kind of op.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rpcbench.base.charts import RUNNING, Bar, Chart, Mark
from rpcbench.pipeline.ops import (
    Kind,
    Op,
    Ops,
    enumerate_ops,
    iterate_runnable,
    needed_results,
    peak_activations,
    result_of_op,
)

MARKS = {
    Kind.FORWARD: Mark("░", "blue", "on-blue", "F forward"),
    Kind.BACKWARD: Mark("▓", "amber", "on-amber", "B backward"),
    Kind.INPUT: Mark("▒", "amber", "on-amber", "I input gradient"),
    Kind.WEIGHT: Mark("▚", "purple", "paper", "W weight gradients"),
    Kind.RECOMPUTE: Mark("▞", "green", "paper", "R recomputed forward"),
    Kind.ALL_REDUCE: Mark("◇", "orange", "paper", "A all-reduce over the replicas"),
}


def make_chart(
    spans: Sequence[Span],
    names: Mapping[int, str],
    title: str,
    running: Collection[Span] = (),
    unit: str = "",
    per: float = 1.0,
) -> Chart:
    """Return a chart. `names`: of the workers, by id; `running`: ops without an end; `unit`, `per`: see `Chart`."""
    stages: dict[int, set[int]] = {}
    for span in spans:
        stages.setdefault(span.worker, set()).add(span.op.stage)
    bars = tuple(_make_bar(span, len(stages[span.worker]) > 1, span in running) for span in spans)
    kinds = {span.op.kind for span in spans}
    marks = tuple(mark for kind, mark in MARKS.items() if kind in kinds)
    return Chart(bars, names, "Pipeline", title, marks, _legend_text(kinds, bool(running)), unit, per)


def _make_bar(span: Span, staged: bool, running: bool) -> Bar:
    labels = (str(span.op), span.op.label) if staged else (span.op.label,)
    return Bar(span.worker, span.begin, span.end, MARKS[span.op.kind], labels, running)


def _legend_text(kinds: set[Kind], running: bool) -> str:
    legends = {kind: mark.fill + mark.name[1:] for kind, mark in MARKS.items() if kind in kinds}
    besides = f"; A{legends.pop(Kind.ALL_REDUCE)}" if Kind.ALL_REDUCE in legends else ""
    still = f"; {RUNNING} still running" if running else ""
    marks = ", ".join(f"{kind}0{words}" for kind, words in legends.items())
    return f"{marks} of micro-batch 0{besides}; blank: idle{still}"


@dataclass(frozen=True, slots=True)
class Span:
    """The time in which a worker ran an op."""

    worker: int
    op: Op
    begin: float
    end: float


def idle_share(spans: Iterable[Span], workers: int) -> float:
    """Return the share of the workers' time, between the first op and the last, in which no op ran."""
    return idle_between([(span.begin, span.end) for span in spans], workers)


def idle_between(ops: Collection[tuple[float, float]], workers: int) -> float:
    """Return 1 - (time in ops) / (workers * (end of the last op - begin of the first)); 0 if that took no time."""
    # The one definition of idle share, for begin and end of each op. An optimizer at the end of a step is not an op.
    if not ops:
        return 0.0
    lasted = max(end for _, end in ops) - min(begin for begin, _ in ops)
    busy = sum(end - begin for begin, end in ops)
    return 1 - busy / (workers * lasted) if lasted else 0.0


Cost = Callable[[Op], float]
"""The duration of an op, in any unit."""
Each = float | Sequence[float]
"""One number for all stages, or one for each stage."""


@dataclass(frozen=True, slots=True)
class Costs:
    """A cost by kind of op: its duration in any unit, the same in all stages or a number for each stage.

    By default a backward takes twice as long as a forward, each of its halves half as long as the backward, and a
    recomputed forward as long as the forward. All-reduces take no time.

    >>> from rpcbench.pipeline import Costs, schedule
    >>> schedule("1f1b", workers=2, microbatches=2).simulate(Costs(forward=[1, 3])).makespan
    21.0
    """

    forward: Each = 1.0
    backward: Each | None = None
    input: Each | None = None  # first half of a backward
    weight: Each | None = None  # second half
    recompute: Each | None = None

    def __call__(self, op: Op) -> float:
        if op.kind is Kind.FORWARD:
            return _value_of_stage(self.forward, op.stage)
        if op.kind is Kind.BACKWARD:
            return (
                2 * _value_of_stage(self.forward, op.stage)
                if self.backward is None
                else _value_of_stage(self.backward, op.stage)
            )
        if op.kind is Kind.ALL_REDUCE:
            return 0.0
        if op.kind is Kind.RECOMPUTE:
            return _value_of_stage(self.forward if self.recompute is None else self.recompute, op.stage)
        half = self.input if op.kind is Kind.INPUT else self.weight
        return self(Op(op.stage, Kind.BACKWARD, op.microbatch)) / 2 if half is None else _value_of_stage(half, op.stage)


def _value_of_stage(each: Each, stage: int) -> float:
    return float(each[stage] if isinstance(each, Sequence) else each)


equal_stages = Costs()
"""The usual cost in papers: every forward takes 1, every backward 2, each half of a backward 1."""


@dataclass(frozen=True, slots=True, repr=False)
class Simulation:
    """A simulated schedule. Times are in the unit of the cost; the step begins at 0. In a notebook it is a picture.

    idle: share of `workers * makespan` in which no op ran, 0 to 1.
    peak_live: per worker, the most micro-batches with activations kept for a later backward at one time, counted once
    for each stage that keeps them.
    peak_memory: the same, each counted as much as its stage's `activation`.
    """

    spans: tuple[Span, ...]
    makespan: float
    idle: float
    peak_live: tuple[int, ...]
    peak_memory: tuple[float, ...]

    @property
    def chart(self) -> Chart:
        """The picture of it: `text(width)`, `svg()`."""
        names = {worker: f"worker {worker}" for worker in range(len(self.peak_live))}
        kept = ", ".join(f"{most:g}" for most in self.peak_memory)
        return make_chart(self.spans, names, f"{self.makespan:g} long, idle {self.idle:.1%}, kept at most {kept}")

    def text(self, width: int = 100) -> str:
        """Return a drawing, a line for each worker, at most `width` columns wide (20 columns of time at least)."""
        return self.chart.text(width)

    __repr__ = text

    def _repr_html_(self) -> str:
        return self.chart.html()


def simulate(ops: Ops, cost: Cost = equal_stages, transfer: float = 0.0, activation: Each = 1.0) -> Simulation:
    """Simulate a schedule's ops.

    >>> from rpcbench.pipeline import schedule, simulate
    >>> f"{simulate(schedule('gpipe', workers=4, microbatches=8).ops).idle:.1%}"
    '27.3%'

    Args:
        ops: a list of ops for each worker.
        cost: the duration of an op, in any unit.
        transfer: the duration, in the same unit, until a result reaches another worker.
        activation: the memory that a stage keeps of a micro-batch for its backward, in any unit, as bytes.

    Raises:
        PipelineError: at a deadlock.
    """
    clock = [0.0] * len(ops)  # for each worker, when it is free
    ended: dict[Op, tuple[float, int]] = {}  # result -> when, and on which worker
    spans: list[Span] = []
    stages = 1 + max((op.stage for _, _, op in enumerate_ops(ops)), default=0)
    for worker, op in iterate_runnable(ops, stages):
        arrivals = (
            end + transfer * (source != worker) for end, source in (ended[need] for need in needed_results(op, stages))
        )
        begin = max([clock[worker], *arrivals])
        clock[worker] = begin + cost(op)
        ended[result_of_op(op)] = clock[worker], worker
        spans.append(Span(worker, op, begin, clock[worker]))
    memory = tuple(peak_activations(own, lambda stage: _value_of_stage(activation, stage)) for own in ops)
    return Simulation(
        tuple(spans),
        max(clock, default=0.0),
        idle_share(spans, len(ops)),
        tuple(int(peak_activations(own)) for own in ops),
        memory,
    )
