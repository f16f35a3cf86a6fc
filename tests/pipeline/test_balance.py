"""The dynamic programme against trying everything."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from rpcbench.pipeline.balance import balanced

WEIGHTS = st.lists(st.sampled_from([0, 0, 1, 2, 3, 10, 100]), min_size=1, max_size=9)


def badness(weights: list[int], sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Weights of the stages, heaviest first, then their numbers of things, largest first: what is to be small."""
    bounds = pairwise(accumulate(sizes, initial=0))
    return sorted((sum(weights[begin:end]) for begin, end in bounds), reverse=True), sorted(sizes, reverse=True)


def all_sizes(things: int, stages: int) -> list[tuple[int, ...]]:
    bounds = [(0, *cuts, things) for cuts in combinations(range(1, things), stages - 1)]
    return [tuple(end - begin for begin, end in pairwise(bound)) for bound in bounds]


@given(WEIGHTS, st.data())
def test_no_other_way_is_better(weights: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(weights)))
    sizes = balanced(weights, stages)
    assert len(sizes) == stages and sum(sizes) == len(weights) and min(sizes) >= 1
    assert badness(weights, sizes) == min(badness(weights, other) for other in all_sizes(len(weights), stages))


def test_the_rest_is_balanced_where_one_thing_outweighs_all() -> None:
    assert balanced([1000, 1, 1, 1, 1, 1, 1], 3) == (1, 3, 3)


def test_things_without_weight_stay_behind_the_thing_before() -> None:
    assert balanced([100, 0, 100, 0], 2) == (2, 2)
    assert balanced([100, 0, 100], 2) == balanced([100, 0, 1], 2) == (2, 1)


def test_no_weight_at_all_is_shared_by_number() -> None:
    assert sorted(balanced([0] * 8, 4)) == [2, 2, 2, 2]


def test_a_long_row() -> None:
    assert balanced([7] * 480, 8) == (60,) * 8
