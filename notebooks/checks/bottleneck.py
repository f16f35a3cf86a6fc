"""Checks of lesson 32."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import slow_jobs

from checks import NotYet, differ, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.mysteries import judge_verdict

Ops = dict[str, tuple[float, list[str]]]

STEPS: list[Ops] = [
    {"a": (3, []), "b": (2, ["a"]), "c": (4, ["b"])},
    # the longest operation first is no longest chain, nor is the longest single operation on it
    {"load": (1, []), "long": (9, []), "f": (5, ["load"]), "b": (6, ["f"]), "send": (1, ["b"])},
    {"a": (1, []), "b": (7, ["a"]), "c": (2, ["a"]), "d": (8, ["c"]), "e": (1, ["b", "d"]), "log": (1, ["b"])},
    # many short operations against few long ones; the chain does not end with the last operation
    {"a": (1, []), "b": (1, ["a"]), "c": (1, ["b"]), "d": (1, ["c"]), "x": (4, []), "y": (3, ["x"]), "z": (1, ["a"])},
    # a pipeline of two stages with two micro-batches, the second stage slower
    {
        "0F0": (1, []), "0F1": (1.25, ["0F0"]), "1F0": (2, ["0F0"]), "1B0": (4, ["1F0"]), "1F1": (2, ["0F1", "1B0"]),
        "0B0": (2, ["0F1", "1B0"]), "1B1": (4, ["1F1"]), "0B1": (2, ["0B0", "1B1"]),
    },
    {"only": (5, [])},
]  # fmt: skip
GREEDY = " What is longest for one step of the way need not lie on the longest way: short operations may follow it."
UNSORTED_NEEDS: Ops = {"p": (6, []), "q": (2, []), "r": (1, ["q", "p"]), "s": (1, ["r", "q"])}


def _ends(ops: Ops) -> tuple[dict[str, float], dict[str, str | None]]:
    """When each operation ends, and which one it waited for last."""
    ends: dict[str, float] = {}
    waited: dict[str, str | None] = {}
    for name, (time, needs) in ops.items():
        waited[name] = max(needs, key=ends.__getitem__, default=None)
        ends[name] = time + max((ends[need] for need in needs), default=0.0)
    return ends, waited


def _path(ops: Ops) -> list[str]:
    ends, waited = _ends(ops)
    name: str | None = max(ends, key=ends.__getitem__)
    found: list[str] = []
    while name is not None:
        found.insert(0, name)
        name = waited[name]
    return found


@exercise(
    "First find when each operation ends: its own time after the last end of its needs. Then go back from the end.",
    "Keep for each operation, beside its end, the need that ended last. The path leads back from the last end of all.",
)
def critical(answer: Callable[[Ops], list[str]]) -> None:
    """`answer(ops)` is the longest chain of operations that wait for each other."""
    for ops in [*STEPS, UNSORTED_NEEDS]:
        wanted = _path(ops)
        with trying():
            found = returned(answer(copy.deepcopy(ops)))
        found = read(found, [str], "A list of names is wanted")
        unknown = [name for name in found if name not in ops]
        require(not unknown, f"Of {ops}: {shown(unknown[:1])} names no operation.")
        if found != wanted:
            long, right_ = (sum(ops[name][0] for name in chain) for chain in (found, wanted))
            what = f"{wanted} takes {right_:g}; you say {shown(found)}"
            turned = ", which is the right path from its end to its beginning" if found == wanted[::-1] else ""
            chained = all(a in ops[b][1] for a, b in itertools.pairwise(found))
            takes = f", which takes {long:g}" if chained else ", where one does not wait for the one before"
            raise NotYet(f"Of {ops}: {what}{turned or takes}.{GREEDY if chained and not turned else ''}")
    right("The step takes as long as this chain. Whatever is not on it may be slower, up to a point, at no cost.")


ARRIVALS: list[tuple[int, list[list[float]]]] = [
    (2, [[0, 1, 5], [10, 10.5, 16], [20, 21, 25]]),
    # rank 0 was held up once, for a long time
    (1, [[0.0, 3, 0.5, 1], [90, 12, 10, 11], [100, 104, 101, 100.5], [200, 203, 200.5, 200], [300, 304, 301, 300]]),
    # rank 0 comes last most often, but is on time in more than half of the collectives; rank 1 is always late
    (1, [[9, 3, 0], [19, 13, 10], [29, 23, 20], [30, 33, 32], [40, 43, 42], [50, 53, 54], [60, 63, 64]]),
    # an even number of collectives; rank 3 late, rank 0 held up in the middle
    (3, [[0, 0, 1, 4], [8, 0, 1, 4], [10, 10, 11, 15], [20, 21, 20, 25]]),
    # an even number; rank 0 was held up in half of them
    (1, [[0, 4, 0], [11, 14, 10], [26, 24, 20], [36, 35, 30]]),
    # rank 0 was held up in the middle one
    (1, [[0, 3, 0], [10, 13, 10], [28, 23, 20], [30, 33, 30], [40, 43, 40]]),
    # rank 1 is late by the same time in all; rank 0 by much, in fewer than half
    (1, [[0, 2], [50, 40], [60, 62], [70, 72], [99, 80]]),
    # the mean over the ranks is not the time of the first
    (1, [[0, 2, 0], [10, 11, 17], [20, 20, 20], [38, 32, 30], [42, 40, 40]]),
    # an even number: the lower one of the two in the middle is larger for rank 1, their mean for rank 0
    (0, [[1, 3, 0], [19, 14, 10]]),
    (6, [[3, 1, 0, 2, 3, 1, 8, 2]]),
]


def _median_lateness(arrivals: list[list[float]]) -> list[float]:
    late = [[at - min(collective) for at in collective] for collective in arrivals]
    return [statistics.median(ranks) for ranks in zip(*late, strict=True)]


def _mix_up(arrivals: list[list[float]], found: int) -> str:
    """Why an answer has taken collectives for ranks, if it has; else nothing."""
    ranks, turned = len(arrivals[0]), _median_lateness([*map(list, zip(*arrivals, strict=True))])
    none = f" There is no rank {found}: each list has {ranks} times." if found not in range(ranks) else ""
    if none or found == turned.index(max(turned)):
        return f"{none} Each list is that of a collective, not of a rank, and has a time for each rank."
    return ""


@exercise(
    "For each collective subtract the time of the first rank from all; then look at one rank over all collectives.",
    "`statistics.median` of the lateness of each rank; the answer is the rank with the largest one.",
)
def straggler(answer: Callable[[list[list[float]]], int]) -> None:
    """`answer(arrivals)` is the rank with the largest median lateness."""
    for wanted, arrivals in ARRIVALS:
        medians = _median_lateness(arrivals)
        with trying():
            found = returned(answer(copy.deepcopy(arrivals)))
        told = ", ".join(f"rank {rank}: {median:g}" for rank, median in enumerate(medians))
        found = read(found, int, "The number of a rank is wanted")
        require(
            found == wanted,
            f"The ranks came at {arrivals}. It is rank {wanted} (median lateness {told}), not {shown(found)}."
            f"{_mix_up(arrivals, found)}",
        )
    right("One long delay does not make a straggler; being late in most collectives does.")


MEASURED: list[tuple[float, list[float], int]] = [
    (90.0, [45.0, 45.0, 45.0, 45.0], 3),
    (300.0, [120.0, 120.0, 120.0, 120.0], 8),
    (345.0, [120.0, 240.0, 120.0, 120.0], 8),
    (100.0, [30.0, 50.0, 40.0], 4),
    (64.0, [60.0], 5),
    (67.0, [30.0, 50.0, 40.0], 4),  # the rest is a little below zero
]


SHARE_OF_STEP = (
    " (p - 1) / (m + p - 1) is the bubble's share of the whole step of equal stages, and the bubble is in that step. "
    "Here it is added to computing, which is less than that step."
)


@exercise(
    "`mean = sum(busy) / len(busy)` is the first number. Each other one is a difference between two times of the text.",
    "Begin with `equal = mean * (m + p - 1) / m`, a step with equal stages; that with the real ones stands above. "
    "Which differences are the bubble, the imbalance and the rest?",
)
def causes(answer: Callable[[float, list[float], int], list[float]]) -> None:
    """`answer(step, busy, microbatches)` is the parts of a step: computing, bubble, imbalance, the rest."""
    names = ("computing", "the bubble", "the imbalance", "the rest")
    for step, busy, microbatches in MEASURED:
        mean, workers = sum(busy) / len(busy), len(busy)
        bubble = mean * (workers - 1) / microbatches
        real = sum(busy) / microbatches + (microbatches - 1) / microbatches * max(busy)
        wanted = [mean, bubble, real - mean - bubble, step - real]
        case = f"A step of {step:g}, workers busy for {busy}, {microbatches} micro-batches"
        with trying(case):
            found: Any = returned(answer(step, list(busy), microbatches))
        found = read(found, (float,) * 4, "A list of four numbers is wanted")
        far, share = max(busy) - mean, (workers - 1) / (microbatches + workers - 1)
        for name, number, right_number in zip(names, found, wanted, strict=True):
            slip = ""
            if name == "the imbalance" and abs(number - far) < 1e-9 * step:
                slip = " That is the largest minus the mean, as if all m micro-batches waited for the slowest stage."
            if name == "the bubble" and any(abs(number - share * whole) < 1e-9 * step for whole in (mean, step)):
                slip = SHARE_OF_STEP
            require(
                abs(number - right_number) < 1e-6 * step,
                f"{case}: {name} takes {differ(right_number, number)}.{slip}",
            )
    right("The largest of the last three says what to mend first.")


REPAIRS: list[tuple[int, str, float]] = [  # step, operation, factor
    (0, "c", 2),
    (1, "long", 9),
    (1, "b", 3),  # then another chain is the longest
    (2, "d", 8),
    (3, "x", 2),
    (4, "1B0", 2),
    (4, "0F1", 5),
    (5, "only", 4),
]


AMDAHL_ALONE = " Amdahl's law alone is too hopeful here: another chain is the longest after the repair."


@exercise(
    "Work out when the last operation ends, before and after the repair; the answer is one divided by the other.",
    "Make a copy of `ops` with the new time of `name`, and use what you have written for exercise 1 on both.",
)
def gain(answer: Callable[[Ops, str, float], float]) -> None:
    """`answer(ops, name, factor)` is how many times as fast the step becomes."""
    for number, name, factor in REPAIRS:
        ops = STEPS[number]
        mended = {**ops, name: (ops[name][0] / factor, ops[name][1])}
        before, after = max(_ends(ops)[0].values()), max(_ends(mended)[0].values())
        given = copy.deepcopy(ops)
        with trying():
            found = returned(answer(given, name, factor))
        require(given == ops, "`ops` has changed. Make a copy of it, with another time for the one operation.")
        found = read(found, float, "A number is wanted")
        share = ops[name][0] / before
        alone = name in _path(ops) and abs(found - 1 / (1 - share + share / factor)) < 1e-6
        require(
            abs(found - before / after) < 1e-6,
            f"Of {ops}, with {name} {factor:g} times as fast: the step takes {after:g} after {before:g}, so it is "
            f"{differ(before / after, found, ' times as fast, not ')}.{AMDAHL_ALONE if alone else ''}",
        )
    right("Amdahl's law, and the chain that is the longest afterwards.")


# -- mysteries
SEEDS = (23, 20, 11)


def verdict(worker: str, kind: str) -> None:
    """Judge a verdict on the mystery that was started last, of any number."""
    fault = slow_jobs.fault_of_latest()
    require(fault is not None, "No mystery was started yet: `job = slow_jobs.mystery(cluster, seed=7)`.")
    assert fault is not None
    right(judge_verdict(fault, (worker, kind)))


@exercise(
    "Profile the workers for two seconds. `profile.explain()` says for which rank the others wait, and which operators "
    "take longer there. What if it names no operator?",
    "Of time in which no operator runs, a stack says more. Look ten times at the rank for which the others wait, by "
    "`cluster.stack`: which line do you see most often?",
)
def mystery1(answer: tuple[str, str]) -> None:
    """`answer`: the worker and the kind of the fault of the first mystery."""
    right(judge_verdict(slow_jobs.choose_fault(SEEDS[0]), answer))


@exercise(
    "Compare `job.result.idle` with `job.result.idle_ideal` first. Is the schedule enough to explain the idle time?",
    "Two causes are left: `critical_path.busy(job.result)` has the time of each worker's operations, and "
    "`critical_path.delays(job.result)` that of the messages of each link.",
)
def mystery2(answer: tuple[str, str]) -> None:
    """`answer`: the same of the second mystery."""
    right(judge_verdict(slow_jobs.choose_fault(SEEDS[1]), answer))


@exercise(
    "Trace the messages for a second, and print them. Does the worker that asks begin all its calls at once? Does it "
    "ask again as soon as the last answer was sent?",
    "An answer can be late for two reasons: it was long in the making, or long under way. A profile shows the first, "
    "`critical_path.flights(seen)` the second.",
)
def mystery3(answer: tuple[str, str]) -> None:
    """`answer`: the same of the third mystery."""
    right(judge_verdict(slow_jobs.choose_fault(SEEDS[2]), answer))
