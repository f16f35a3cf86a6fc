"""What the caching allocator reserves: the rules of CUDACachingAllocator.cpp, one by one."""

import pytest

from rpcbench.launch.simulate_programs import play_rank
from rpcbench.simulation.allocator import count_reserved
from rpcbench.simulation.rank_log import Allocation

MIB = 2**20


def reserve(*steps: tuple[str, float, int] | str, expandable: bool = True) -> float:
    """Reserve for steps: (name, MiB, stream) allocates, a name alone gives back."""
    numbers: dict[str, int] = {}
    allocations = []
    for step in steps:
        name, size, stream = (step, 0.0, 0) if isinstance(step, str) else step
        number = numbers.setdefault(name, len(numbers))
        allocations.append(Allocation(number, int(size * MIB), stream))
    return count_reserved(allocations, expandable) / MIB


@pytest.mark.parametrize(
    ("size", "segments", "expandable"),
    [(0.001, 2, 2), (1, 2, 2), (1.5, 20, 20), (9, 20, 20), (10, 10, 20), (25, 26, 40)],
)
def test_sizes_are_rounded_up_to_segments(size, segments, expandable):
    assert reserve(("a", size, 0), expandable=False) == segments
    assert reserve(("a", size, 0)) == expandable


@pytest.mark.parametrize("expandable", [True, False])
def test_memory_that_is_given_back_is_used_again_on_its_own_stream_alone(expandable):
    assert reserve(("a", 100, 0), "a", ("b", 100, 0), expandable=expandable) == 100
    assert reserve(("a", 100, 0), "a", ("b", 100, 1), expandable=expandable) == 200


def test_a_free_end_grows_and_a_free_segment_does_not():
    assert reserve(("a", 40, 0), "a", ("b", 60, 0)) == 60
    assert reserve(("a", 40, 0), "a", ("b", 60, 0), expandable=False) == 100


def test_a_hole_that_is_too_small_is_left_until_its_neighbour_is_free():
    hole = [("a", 40, 0), ("b", 40, 0), "a", ("c", 60, 0)]
    assert reserve(*hole) == 140
    assert reserve(*hole, "b", ("d", 80, 0)) == 140
    assert reserve(*hole, "b", ("d", 100, 0)) == 240


def test_the_smallest_hole_that_is_large_enough_is_taken_and_split():
    held = [("a", 60, 0), ("x", 20, 0), ("b", 40, 0), ("y", 20, 0), "a", "b"]
    assert reserve(*held, ("c", 30, 0), ("d", 60, 0)) == 140  # c in the hole of b, so that d fits in that of a
    assert reserve(*held, ("c", 30, 0), ("d", 10, 0), ("e", 60, 0)) == 140  # d in what is left beside c


def test_a_played_rank_tells_its_allocations_from_its_begin():
    def program():
        import torch

        weight = torch.ones(64, 1024, 1024)  # 256 MiB

        def step():
            (weight * 2 + 1).sum()

        return step

    log = play_rank(program, {"dp": 1}, 0)
    assert count_reserved(log.allocations) / MIB == 3 * 260 + 2  # the weight, two results in steps of 20; small ones
    assert log.peak_memory().bytes / MIB == pytest.approx(3 * 256, rel=1e-3)
