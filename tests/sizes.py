"""How much of a simulation a run goes through: ten times as much with `--hypothesis-profile=long`, `make test-all`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings

LONG = "long"


def sized(count: int) -> int:
    """So many in `make test`."""
    return count * (10 if settings.get_current_profile_name() == LONG else 1)


def examples(count: int) -> Callable[[Any], Any]:
    """Of a `@given` test, the same in each run."""
    return settings(max_examples=sized(count), deadline=None, derandomize=True, database=None)
