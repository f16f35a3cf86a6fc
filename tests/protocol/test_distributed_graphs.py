"""Random graphs over several workers: a distributed backward pass gives the gradients of one local backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from graphs import Training
from hypothesis import given
from hypothesis import strategies as st
from sizes import examples, sized

from rpcbench.autograd import regions
from rpcbench.autograd.regions import LocalPass
from rpcbench.protocol import backward

seeds = st.integers(0, 1 << 32)
GRAPHS = sized(50)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_distributed_gradients_equal_those_of_one_local_backward(size: int) -> None:
    """`GRAPHS` of the graphs must lead to a leaf of another worker."""
    crossed = 0
    for seed in itertools.count():
        world = Training(seed, size)
        world.run(messages=8 + seed % 13, passes=1 + seed % 2)
        crossed += world.crossed
        if crossed == GRAPHS:
            return
        assert seed < 4 * GRAPHS, "too few graphs lead to a leaf of another worker"


@given(seeds, st.integers(2, 5), st.integers(1, 12), st.integers(1, 2), st.sampled_from(["errors", "death", "release"]))
@examples(100)
def test_a_disturbed_pass_gives_the_local_gradients_or_fails(
    seed: int, size: int, messages: int, passes: int, trouble: str
) -> None:
    Training(seed, size).run_into_trouble(messages, passes, trouble)


# -- bugs that the graphs must find
def parts_run_before_all_roots_have_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalPass, "_take_ready_regions", lambda self: list(self._waiting))


def gradients_replace_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(regions.Region, "add_gradient", lambda part, edge, grad: part.entries.update({edge: grad}))


def the_engine_hands_out_what_leaves_a_part(patch: pytest.MonkeyPatch) -> None:
    def captured(starts: Any, ends: Any, taps_: Any, retain: bool) -> Any:
        every = [*ends, *dict.fromkeys(target for edges in taps_.values() for _, target in edges)]
        grads = regions._compute_gradients(starts, every, retain)
        return grads[: len(ends)], list(zip(every[len(ends) :], grads[len(ends) :], strict=True))

    patch.setattr(regions, "run_tapped", captured)


def messages_tell_nothing_of_what_lies_further_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        backward, "union_of_sends", lambda parts_, *more: tuple({*more, *(part[0] for part in parts_ if part)})
    )


BUGS = [
    parts_run_before_all_roots_have_come,
    gradients_replace_each_other,
    the_engine_hands_out_what_leaves_a_part,
    messages_tell_nothing_of_what_lies_further_back,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_random_graphs_find_a_bug_in_the_backward_pass(
    bug: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017  (how it shows depends on where it hits first)
        for seed in range(60):
            Training(seed, 3).run(messages=10, passes=1)
