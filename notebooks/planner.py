"""What a step of 3-D parallel training costs, for lesson 34: time and memory of a layout, before any worker starts.

A layout is a triple (dp, tp, pp): replicas, ranks that share each layer, stages. Sizes are bytes, times seconds, as in
lesson 03. The model knows no overlap: each part waits for the one before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

Layout = tuple[int, int, int]
"""dp, tp, pp."""


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes alpha + n / beta seconds (lesson 03)."""

    alpha: float
    beta: float

    def message(self, size: float) -> float:
        return self.alpha + size / self.beta

    def all_reduce(self, size: float, ranks: int) -> float:
        """A ring (lesson 20): 2 (ranks - 1) rounds, and in each of them one part in `ranks`. One rank needs no time."""
        return 2 * (ranks - 1) * self.message(size / ranks)


@dataclass(frozen=True)
class Job:
    """A model and its batch.

    work: Seconds that one worker needs for forward and backward of a micro-batch through the whole model.
    sums: All-reduces of a layer with tensor parallel, forward and backward together, each of `vector` bytes.
    gradient, kept, state: Bytes for each parameter: of its gradient in the all-reduce; of itself and its gradient; of
    the optimizer's state, which replicas share if `zero` (lesson 22).
    activations: Bytes that the whole model keeps of a micro-batch.
    """

    parameters: float
    layers: int
    heads: int
    microbatches: int  # of the whole batch
    work: float
    sums: int
    vector: float
    activations: float
    gradient: int = 4
    kept: int = 8
    state: int = 8
    zero: bool = False


def held(job: Job, layout: Layout) -> float:
    """Bytes of the fullest worker, which is that of the first stage."""
    dp, tp, pp = layout
    state = job.state / dp if job.zero else job.state
    under_way = min(pp, job.microbatches // dp)  # micro-batches of which 1F1B keeps the activations
    return (job.parameters * (job.kept + state) + under_way * job.activations) / (tp * pp)


def parts(job: Job, layout: Layout, near: Link, far: Link) -> dict[str, float]:
    """The seconds of a step by cause. Tensor parallel uses the near links, all else the far ones."""
    dp, tp, pp = layout
    each = job.microbatches // dp
    sums = job.layers * job.sums * near.all_reduce(job.vector, tp)  # of a micro-batch, over all stages
    computing, turns = job.work / tp / pp * each, each + pp - 1
    forward, backward = ((job.work / tp * share + sums / 2) / pp for share in (1 / 3, 2 / 3))
    whole = pipeline(pp, each, forward, backward, far.message(job.vector))
    return {
        "compute": computing,
        "bubble": job.work / tp / pp * (pp - 1),
        "tensor parallel": sums / pp * turns,
        "messages": whole - turns * (forward + backward) if pp > 1 else 0.0,
        "data parallel": far.all_reduce(job.parameters * job.gradient / (tp * pp), dp),
    }


def pipeline(stages: int, microbatches: int, forward: float, backward: float, transfer: float) -> float:
    """The time of 1F1B with equal stages, played through: as `schedule(...).simulate`, but quick for large numbers."""
    plans = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)  # forwards before the first backward
        plan = [("F", number) for number in range(ahead)]
        for number in range(microbatches):
            plan.append(("B", number))
            plan += [("F", ahead + number)] if ahead + number < microbatches else []
        plans.append(plan)
    clock, done = [0.0] * stages, [0] * stages  # of each stage: when it is free, and how many operations it has run
    ends: dict[tuple[str, int, int], float] = {}
    while sum(done) < 2 * stages * microbatches:
        for stage, plan in enumerate(plans):
            while done[stage] < len(plan):
                kind, number = plan[done[stage]]
                other = stage - 1 if kind == "F" else stage + 1
                came = ends.get((kind, other, number), None if 0 <= other < stages else -transfer)
                if came is None:
                    break
                clock[stage] = max(clock[stage], came + transfer) + (forward if kind == "F" else backward)
                ends[kind, stage, number] = clock[stage]
                done[stage] += 1
    return max(clock)


def layouts(job: Job, workers: int) -> list[Layout]:
    """All layouts that divide workers, layers, heads and micro-batches without a rest."""
    sizes = [size for size in range(1, workers + 1) if workers % size == 0]
    return [
        (dp, tp, pp)
        for dp, tp, pp in itertools.product(sizes, repeat=3)
        if dp * tp * pp == workers and not (job.layers % pp or job.heads % tp or job.microbatches % dp)
    ]


def words(layout: Layout) -> str:
    return "dp {} · tp {} · pp {}".format(*layout)


def step(job: Job, near: Link, far: Link) -> Callable[[Layout], float]:
    """The seconds of a step as a function of the layout."""
    return lambda layout: sum(parts(job, layout, near, far).values())
