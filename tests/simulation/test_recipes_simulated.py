"""Programs, simulated, are as in a real run on four workers: collectives, and bytes at their peak.

The recipes of the course, and programs with the other collectives: torch's pipelines, hybrid shards, buffers, layouts.
"""

from __future__ import annotations

from functools import partial

import pytest
from other_programs import PROGRAMS
from real_runs import Program, pair_peaks, real_peaks, real_rows, recipe_program, simulate_all, simulated_rows
from recipe_trials import TRIALS

import rpcbench

pytestmark = pytest.mark.process


def check_program(
    four: rpcbench.Cluster, program: Program, sizes: dict[str, int], tolerance: float
) -> rpcbench.SimulatedWorld:
    peaks = real_peaks(four, program, sizes)
    rows = real_rows(four, program, sizes)
    world = simulate_all(program, sizes)
    assert simulated_rows(world) == rows
    assert all(rows)
    for real, simulated in pair_peaks(world, peaks):
        assert simulated == pytest.approx(real, rel=tolerance)
    return world


@pytest.mark.parametrize("number", range(len(TRIALS)), ids=[trial.recipe for trial in TRIALS])
def test_a_recipe_is_as_in_a_real_run(four: rpcbench.Cluster, number: int) -> None:
    world = check_program(four, partial(recipe_program, number), TRIALS[number].sizes, 0.003)
    is_of_experts = TRIALS[number].experts > 0
    assert [each for each in world.remarks if "counts are assumed to be even" in each] == is_of_experts * [
        *world.remarks
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_with_other_collectives_is_as_in_a_real_run(four: rpcbench.Cluster, name: str) -> None:
    check_program(four, *PROGRAMS[name], 0.03)  # torch's pipelines keep a tensor that was sent for some time
