"""The sizes of simulations: ten times as large with `--hypothesis-profile=long`, as in `make test-all`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings

LONG = "long"


def sized(count: int) -> int:
    """`count`, as in `make test`, or ten times as many in the long profile."""
    return count * (10 if settings.get_current_profile_name() == LONG else 1)


def examples(count: int) -> Callable[[Any], Any]:
    """Settings of a `@given` test: so many examples, the same in each run."""
    return settings(max_examples=sized(count), deadline=None, derandomize=True, database=None)
