"""A schedule played through on paper: how long is each worker idle, how much does it keep?

Each worker runs its list in order, each op as early as its worker and its needs (see `ops`) allow. What goes from
one worker to another arrives `transfer` later, and no worker is held up by it; the step ends when the last op ends.

When workers ran their ops, and how long they were idle, is defined once, for measured and for simulated steps. Both are
drawn as a chart: a line for each worker, blank where it is idle, kinds of ops told apart by letter, shade and colour.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rpcbench.base.charts import RUNNING, Bar, Chart, Mark
from rpcbench.pipeline.ops import Kind, Op, Ops, gives, needs, peak, playable, walk

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


@dataclass(frozen=True, slots=True)
class Span:
    """When a worker ran an op: `begin` to `end`."""

    worker: int
    op: Op
    begin: float
    end: float


def idle_share(spans: Iterable[Span], workers: int) -> float:
    """The share of the workers' time, between the first op and the last, in which none ran."""
    return idle_between([(span.begin, span.end) for span in spans], workers)


def idle_between(ops: Collection[tuple[float, float]], workers: int) -> float:
    """1 - (time in ops) / (workers * (end of the last op - begin of the first)); 0 where nothing took time.

    `ops`: begin and end of each. One definition for measured and for simulated steps. The optimizer is no op, so it
    does not count.
    """
    if not ops:
        return 0.0
    lasted = max(end for _, end in ops) - min(begin for begin, _ in ops)
    busy = sum(end - begin for begin, end in ops)
    return 1 - busy / (workers * lasted) if lasted else 0.0


Cost = Callable[[Op], float]
"""Duration of an op, in any unit."""
Each = float | Sequence[float]
"""One number for all stages, or one for each stage."""


@dataclass(frozen=True, slots=True)
class Costs:
    """A cost by kind of op: how long each takes, the same in all stages or a number for each stage, in any unit.

    A backward takes twice as long as a forward if not told, each of its halves as long as half a backward, and a
    recomputed forward as long as the forward. Updates of weights take no time, as at the end of a step, and neither do
    all-reduces, as transfers.

    >>> from rpcbench.pipeline import Costs, schedule
    >>> schedule("1f1b", workers=2, microbatches=2).simulate(Costs(forward=[1, 3])).makespan
    21.0
    """

    forward: Each = 1.0
    backward: Each | None = None
    input: Each | None = None
    weight: Each | None = None
    recompute: Each | None = None

    def __call__(self, op: Op) -> float:
        if op.kind is Kind.FORWARD:
            return _of(self.forward, op.stage)
        if op.kind is Kind.BACKWARD:
            return 2 * _of(self.forward, op.stage) if self.backward is None else _of(self.backward, op.stage)
        if op.kind in (Kind.UPDATE, Kind.ALL_REDUCE):
            return 0.0
        if op.kind is Kind.RECOMPUTE:
            return _of(self.forward if self.recompute is None else self.recompute, op.stage)
        half = self.input if op.kind is Kind.INPUT else self.weight
        return self(Op(op.stage, Kind.BACKWARD, op.microbatch)) / 2 if half is None else _of(half, op.stage)


def _of(each: Each, stage: int) -> float:
    return float(each[stage] if isinstance(each, Sequence) else each)


equal_stages = Costs()
"""The usual cost on paper: every forward takes 1, every backward 2, each half of one 1."""


@dataclass(frozen=True, slots=True, repr=False)
class Simulation:
    """A schedule played through. Times are in the unit of the cost; the step begins at 0. In a notebook: its picture.

    idle: share of `workers * makespan` in which no op ran, 0 to 1.
    peak_live: per worker, the most micro-batches whose activations one moment finds kept for a later backward,
        counted once for each stage that keeps them.
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
        return chart(self.spans, names, f"{self.makespan:g} long, idle {self.idle:.1%}, kept at most {kept}")

    def text(self, width: int = 100) -> str:
        """Drawn at most `width` columns wide (20 columns of time at least), a line for each worker."""
        return self.chart.text(width)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.chart.html()


def simulate(ops: Ops, cost: Cost = equal_stages, transfer: float = 0.0, activation: Each = 1.0) -> Simulation:
    """The ops played through. PipelineError at a deadlock.

    cost: how long an op takes; `transfer`, in the same unit, what goes from worker to worker. activation: what a stage
    keeps of a micro-batch for its backward, as in bytes.

    >>> from rpcbench.pipeline import schedule, simulate
    >>> f"{simulate(schedule('gpipe', workers=4, microbatches=8).ops).idle:.1%}"
    '27.3%'
    """
    clock = [0.0] * len(ops)
    ended: dict[Op, tuple[float, int]] = {}
    spans: list[Span] = []
    stages = 1 + max((op.stage for _, _, op in walk(ops)), default=0)
    for worker, op in playable(ops, stages):
        came = (end + transfer * (home != worker) for end, home in (ended[need] for need in needs(op, stages)))
        begin = max([clock[worker], *came])
        clock[worker] = begin + cost(op)
        ended[gives(op)] = clock[worker], worker
        spans.append(Span(worker, op, begin, clock[worker]))
    memory = tuple(peak(own, lambda stage: _of(activation, stage)) for own in ops)
    return Simulation(
        tuple(spans), max(clock, default=0.0), idle_share(spans, len(ops)), tuple(int(peak(own)) for own in ops), memory
    )
