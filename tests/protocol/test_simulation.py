"""Whole worlds, thousands of interleavings; and the bugs that the simulation must find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from sharing import Sharing

seeds = st.integers(0, 1 << 32)


@given(seeds, st.integers(2, 4), st.integers(1, 60))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_rrefs_of_members_that_live(seed: int, size: int, actions: int) -> None:
    Sharing(seed, size).run(actions, deaths=0)
