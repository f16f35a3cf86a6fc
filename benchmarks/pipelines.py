"""`python -m benchmarks --pipeline`: our pipelines and `torch.distributed.pipelining` on the same training, in turns.

The same run also measures the cost of an operation and of the driver, and compares the workers' idle shares with those
of the simulator.

Figures of different runs are never compared: a busy machine slows both sides, and not always alike. Rates are all
samples in all seconds: so the mean of the four ratios varied by 2.5 % over 14 starts, with medians of steps by 4.4 %.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks import idle_shares
from benchmarks.pairs import BenchError
from benchmarks.pipeline_sides import MICROBATCHES, MODELS, SCHEDULES, Order, Side, Steps, ours, theirs, work
from rpcbench.launch.cluster import Cluster
from rpcbench.pipeline import Pipeline, split
from rpcbench.runtime import current
from rpcbench.telemetry.trace import trace

MEAN_GOAL = 1.1
_NEAR = 1e-3
_EMPTY = 32


class Plan(NamedTuple):
    """`starts` of both sides, `rounds` of `steps` each; steps of nothing for what an operation costs; idle shares."""

    starts: int = 2
    rounds: int = 12
    steps: int = 5
    empty_steps: int = 30
    idle: idle_shares.Plan = idle_shares.Plan()


QUICK = Plan(starts=1, rounds=1, steps=2, empty_steps=2, idle=idle_shares.QUICK)


class Line(NamedTuple):
    """What was measured, in the words of the table, and what it is held against; `value` and `bound` are plain."""

    title: str
    measured: str
    beside: str
    goal: str
    value: float
    bound: float
    ok: bool

    def row(self) -> tuple[str, ...]:
        return self.title, self.measured, self.beside, f"{'✓' if self.ok else '✗'} {self.goal}"


def measure(plan: Plan, seed: int) -> Iterator[Line]:
    """All lines, each as soon as it is known. BenchError where the two sides do not train alike."""
    yield from _against_torch(plan, seed)
    yield from _costs(plan)
    for each in idle_shares.measure(plan.idle):
        yield _idle(each, plan.idle.seconds)


def _idle(each: idle_shares.Idle, seconds: float) -> Line:
    title, goal = f"{each.schedule}, stages of {seconds * 1e3:g} ms", f"within {idle_shares.TOLERANCE * 100:g} points"
    away = abs(each.measured - each.simulated)
    lag = f"{each.explained:.1%} with transfers of {each.lag * 1e3:.1f} ms"
    shares = f"idle {each.measured:.1%}", f"simulated {each.simulated:.1%}, {lag}"
    return Line(title, *shares, goal, away, idle_shares.TOLERANCE, each.ok)


# -- beside torch
def _against_torch(plan: Plan, seed: int) -> Iterator[Line]:
    """More than one start, as what a process has drawn, such as where its memory lies, it keeps."""
    cases: dict[Order, tuple[list[Steps], list[Steps]]] = {
        Order(model, schedule, plan.steps, seed): ([], []) for model in MODELS for schedule in SCHEDULES
    }
    for _ in range(plan.starts):
        with ours() as mine, theirs() as other:
            for order, found in cases.items():
                for side, steps in zip(found, _in_turns(mine, other, order, plan.rounds), strict=True):
                    side.append(steps)
    lines = [_compared(order, *map(_joined, found)) for order, found in cases.items()]
    yield from lines
    mean = geometric_mean(line.value for line in lines)
    yield Line("geometric mean", f"{mean:.2f}x", "", f"at least {MEAN_GOAL:g}x", mean, MEAN_GOAL, mean >= MEAN_GOAL)


def _compared(order: Order, mine: Steps, other: Steps) -> Line:
    samples = len(work(order.model, order.seed).x)
    rate, their_rate = (samples * len(steps.seconds) / sum(steps.seconds) for steps in (mine, other))
    ratio = rate / their_rate
    beside = f"torch {their_rate:,.0f}: {ratio:.2f}x, in CPU time {other.cpu / mine.cpu:.2f}x"
    title = f"{order.model}, {order.schedule}"
    return Line(title, f"{rate:,.0f} samples/s", beside, "at least 1x", ratio, 1.0, ratio >= 1)


def _in_turns(mine: Side, other: Side, order: Order, rounds: int) -> tuple[Steps, Steps]:
    """Both sides' steps, after the first few, whose losses must be the same."""
    first, second = mine.run(order), other.run(order)
    if any(abs(a - b) > _NEAR * abs(b) for a, b in zip(first.losses, second.losses, strict=True)):
        raise BenchError(f"{order.model}, {order.schedule}: losses {first.losses} here, {second.losses} at torch's")
    found: list[list[Steps]] = [[], []]
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            found[side].append((mine, other)[side].run(order))
    return _joined(found[0]), _joined(found[1])


def _joined(parts: Sequence[Steps]) -> Steps:
    seconds = [second for part in parts for second in part.seconds]
    return Steps(seconds, [loss for part in parts for loss in part.losses], sum(part.cpu for part in parts))


# -- what the runtime costs
class Nothing(nn.Module):
    """As little as a stage with a gradient can do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


def total(output: Tensor, _target: Tensor) -> Tensor:
    return output.sum()


def alone(x: Tensor) -> float:
    """Seconds for each of the last stage's operations, in a plain loop over the same micro-batches in this process."""
    stage = Nothing()
    parts = [part.clone().requires_grad_() for part in torch.split(x, 1)]
    begin = perf_counter()
    losses = [total(stage(part), part) for part in parts]
    _values = [loss.item() for loss in losses]
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    return (perf_counter() - begin) / (2 * len(parts))


def _costs(plan: Plan) -> Iterator[Line]:
    with Cluster(2) as cluster:
        stages = split([Nothing(), Nothing()], cluster.workers, balance=[1, 1])
        pipe = Pipeline(stages, "gpipe", _EMPTY, total, (torch.optim.SGD, {"lr": 0.1}))
        x = torch.ones(_EMPTY, 1)
        whole, own = [], []
        for step in range(plan.empty_steps + 1):  # in turns, as a core may be slower a second later
            seconds = pipe.step(x, x).timeline.seconds / len(pipe.ops[0])
            plain = cluster.rpc_sync(cluster.workers[-1], alone, (x,))
            if step:  # the first ones have to get going
                whole.append(seconds * 1e6)
                own.append(plain * 1e6)
        yield _overhead(median(whole), median(own))
        with trace() as seen:
            pipe.step(x, x)
        said = _of_driver(list(seen.view["messages"].values()))
        most = max(said.values())
        yield Line("driver's messages to a worker in a step", f"{most}", "", "at most 2", most, 2, most <= 2)


def _of_driver(messages: Sequence[Any]) -> Counter[int]:
    """How many messages went from here to each worker, but for telemetry's own."""
    me = current.current_agent().id
    return Counter(row["to"] for row in messages if row["from"] == me and row["kind"] != "Notice")


def _overhead(whole: float, own: float) -> Line:
    """Microseconds of an operation in a pipeline, and of the same in a plain loop."""
    cost = whole - own
    beside = f"{own:.0f} µs of it in a plain loop: {cost:.0f} µs are ours"
    return Line(
        "an operation that does nothing", f"{whole:.0f} µs", beside, "ours at most 150 µs", cost, 150, cost <= 150
    )


# -- for people and programs
def as_table(found: Sequence[Line], plan: Plan, seed: int) -> Table:
    machine = f"{os.cpu_count()} cores under a load of {os.getloadavg()[0]:.1f}"
    steps = f"{plan.starts} starts of {plan.rounds} rounds of {plan.steps} steps"
    title = f"pipelines: {steps}, {MICROBATCHES} micro-batches, seed {seed}; {machine}"
    table = Table(
        title=title, caption="Beside torch.distributed.pipelining, in turns. Compare only figures of one run."
    )
    for heading in ("", "measured", "beside", "goal"):
        table.add_column(heading, justify="left" if heading in ("", "goal") else "right", no_wrap=True)
    for line in found:
        table.add_row(*line.row())
    return table


def as_values(found: Sequence[Line], seed: int) -> dict[str, Any]:
    return {"seed": seed, "lines": [line._asdict() for line in found]}
