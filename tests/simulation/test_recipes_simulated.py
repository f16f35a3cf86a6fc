"""Each recipe of the course, simulated, is as in a real run on four workers: collectives, and bytes at their peak."""

from __future__ import annotations

from functools import partial

import pytest
from real_runs import pair_peaks, real_peaks, real_rows, recipe_program, simulate_all, simulated_rows
from recipe_trials import TRIALS

import rpcbench

pytestmark = pytest.mark.process


@pytest.mark.parametrize("number", range(len(TRIALS)), ids=[trial.recipe for trial in TRIALS])
def test_a_recipe_is_as_in_a_real_run(four: rpcbench.Cluster, number: int) -> None:
    program, sizes = partial(recipe_program, number), TRIALS[number].sizes
    peaks = real_peaks(four, program, sizes)
    rows = real_rows(four, program, sizes)
    world = simulate_all(program, sizes)
    assert simulated_rows(world) == rows
    assert all(rows)
    for real, simulated in pair_peaks(world, peaks):
        assert simulated == pytest.approx(real, rel=0.003)
    is_of_experts = TRIALS[number].experts > 0
    assert [each for each in world.remarks if "counts are assumed to be even" in each] == is_of_experts * [
        *world.remarks
    ]
