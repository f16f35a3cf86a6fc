"""`pairs` returns few rows, which cover all pairs."""

from __future__ import annotations

import itertools

import pytest
from covering import pairs


@pytest.mark.parametrize("sizes", [(2, 2), (8, 3, 2), (4, 4, 3, 2), (6, 1, 2)])
def test_rows_cover_all_pairs_and_are_few(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = pairs(*axes)
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(one, other):
            assert any(set(pair) <= set(row) for row in rows), pair
    first, second, *_ = sorted(sizes, reverse=True)
    assert len(rows) <= first * second + 2
    assert rows == pairs(*axes)
