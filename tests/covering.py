"""Rows of parameters that cover all pairs, in place of every combination.

Faults that need three parameters to meet are rare; rows in which each value of a parameter meets each value of every
other find the rest, and there are few of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each axis, so that any two values of two axes share a row; always the same rows."""
    candidates = list(itertools.product(*axes))
    open_ = {pair for row in candidates for pair in _peer_events(row)}
    rows = []
    while open_:
        best = max(candidates, key=lambda row: len(open_ & _peer_events(row)))
        open_ -= _peer_events(best)
        rows.append(best)
    return rows


def _peer_events(row: tuple[Any, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(row), 2))
