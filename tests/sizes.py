"""What `make test-all` adds: long parameters, and simulations ten times as large (`--hypothesis-profile=long`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

LONG = "long"


def sized(count: int) -> int:
    """`count`, as in `make test`, or ten times as many in the long profile."""
    return count * (10 if settings.get_current_profile_name() == LONG else 1)


def long(*parameters: Any) -> list[Any]:
    """Parameters of a test that are in `make test-all` alone."""
    return [pytest.param(each, marks=pytest.mark.long) for each in parameters]


def examples(count: int) -> Callable[[Any], Any]:
    """Settings of a `@given` test: so many examples, the same in each run."""
    return settings(max_examples=sized(count), deadline=None, derandomize=True, database=None)
