"""The best way to share out a row of things among stages, each stage a piece of the row and none empty."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class _Plan(NamedTuple):
    """The first stages: how heavy they are, and how many things they have, each the largest first; less is better."""

    weights: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def badness(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.weights, self.counts

    def extended(self, weight: int, count: int) -> _Plan:
        weights, counts = sorted((*self.weights, weight), reverse=True), sorted((*self.counts, count), reverse=True)
        return _Plan(tuple(weights), tuple(counts), (*self.sizes, count))


def balanced(weights: Sequence[int], stages: int) -> tuple[int, ...]:
    """How many things each stage gets so that the heaviest stage is as light as can be, then the second, and so on.

    Ties go to the even numbers of things, then to the late cuts: a thing without weight stays with the one before it.
    Exact; needs 1 <= stages <= len(weights).
    """
    # Adding the same stage to two plans never changes which is better, so the best prefixes extend to the best plan.
    sums = list(accumulate(weights, initial=0))
    best = {0: _Plan((), (), ())}
    for stage in range(1, stages + 1):
        ends = range(stage, len(weights) - (stages - stage) + 1)
        best = {end: _extend(best, sums, end) for end in ends}
    return best[len(weights)].sizes


def _extend(best: dict[int, _Plan], sums: Sequence[int], end: int) -> _Plan:
    """The best plan up to `end` with one more stage than those in `best`."""
    begins = sorted((begin for begin in best if begin < end), reverse=True)
    found = best[begins[0]].extended(sums[end] - sums[begins[0]], end - begins[0])
    for begin in begins[1:]:
        weight = sums[end] - sums[begin]
        if weight > found.weights[0]:
            break  # too heavy alone, and it only grows
        other = best[begin].extended(weight, end - begin)
        found = min(found, other, key=lambda plan: plan.badness)
    return found
