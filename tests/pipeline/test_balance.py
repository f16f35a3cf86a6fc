"""The dynamic programme of `balanced`, compared with all possible cuts."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from rpcbench.pipeline.balance import balance_stages

WEIGHTS = st.lists(st.sampled_from([0, 0, 1, 2, 3, 10, 100]), min_size=1, max_size=9)


def badness(weights: list[int], sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the badness of a cut: the weights of the stages, heaviest first, then their sizes, largest first."""
    bounds = pairwise(accumulate(sizes, initial=0))
    return sorted((sum(weights[begin:end]) for begin, end in bounds), reverse=True), sorted(sizes, reverse=True)


def all_sizes(things: int, stages: int) -> list[tuple[int, ...]]:
    bounds = [(0, *cuts, things) for cuts in combinations(range(1, things), stages - 1)]
    return [tuple(end - begin for begin, end in pairwise(bound)) for bound in bounds]


@given(WEIGHTS, st.data())
def test_no_cut_is_better_than_the_balanced_one(weights: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(weights)))
    sizes = balance_stages(weights, stages)
    assert len(sizes) == stages and sum(sizes) == len(weights) and min(sizes) >= 1
    assert badness(weights, sizes) == min(badness(weights, other) for other in all_sizes(len(weights), stages))


def test_the_other_items_are_balanced_if_one_item_outweighs_all() -> None:
    assert balance_stages([1000, 1, 1, 1, 1, 1, 1], 3) == (1, 3, 3)


def test_items_without_weight_stay_with_the_item_before_them() -> None:
    assert balance_stages([100, 0, 100, 0], 2) == (2, 2)
    assert balance_stages([100, 0, 100], 2) == balance_stages([100, 0, 1], 2) == (2, 1)


def test_items_are_balanced_by_number_if_none_has_a_weight() -> None:
    assert sorted(balance_stages([0] * 8, 4)) == [2, 2, 2, 2]


def test_a_long_list_of_equal_items_is_cut_evenly() -> None:
    assert balance_stages([7] * 480, 8) == (60,) * 8
