"""`Sums` equals additions one by one, for dense and sparse gradients, and writes only to memory of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpcbench.pipeline.gradient_sums import Sums

COUNT = 3
KINDS = ("dense", "sparse", "none")


def params() -> list[torch.Tensor]:
    return [torch.zeros(4, 2, requires_grad=True) for _ in range(COUNT)]


def gradient(kind: str, seed: int) -> torch.Tensor | None:
    if kind == "none":
        return None
    made = torch.rand(4, 2, generator=torch.Generator().manual_seed(seed))
    return made if kind == "dense" else made.to_sparse()


batches = st.lists(st.lists(st.sampled_from(KINDS), min_size=COUNT, max_size=COUNT), min_size=1, max_size=6)


@given(batches, st.sets(st.integers(0, COUNT - 1)))
def test_sums_equal_additions_one_by_one_and_leave_the_gradients_unchanged(
    kinds: list[list[str]], before: set[int]
) -> None:
    own = params()
    there = {own[place]: torch.full((4, 2), 0.25) for place in before}
    wanted = {own[place]: torch.full((4, 2), 0.25) for place in before}
    sums, given_ = Sums({0: own}, there), []
    for number, each in enumerate(kinds):
        gradients = [gradient(kind, 10 * number + place) for place, kind in enumerate(each)]
        given_ += [(one, one.to_dense().clone()) for one in gradients if one is not None]
        for param, one in zip(own, gradients, strict=True):
            if one is not None:
                wanted[param] = wanted[param] + one.to_dense() if param in wanted else one.to_dense()
        sums.add_gradients(0, gradients)
    found = dict(sums.summed_leaves())
    assert found.keys() == {p for each in kinds for p, kind in zip(own, each, strict=True) if kind != "none"}
    assert all(torch.equal(total.to_dense(), wanted[param]) for param, total in found.items())
    assert all(torch.equal(one.to_dense(), copy) for one, copy in given_), "a given gradient was written to"
    assert all(torch.equal(one, torch.full((4, 2), 0.25)) for one in there.values())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_sums_have_no_graph(count: int) -> None:
    own = params()
    sums = Sums({0: own}, {})
    for _ in range(count):
        sums.add_gradients(0, [torch.ones(4, 2, requires_grad=True) for _ in own])
    assert torch.is_grad_enabled()
    assert count == 1 or not any(total.requires_grad for _, total in sums.summed_leaves())


def test_gradients_are_summed_separately_for_each_stage() -> None:
    first, second = params(), params()
    sums = Sums({0: first, 3: second}, {})
    for _ in range(3):
        sums.add_gradients(0, [torch.ones(4, 2)] * COUNT)
        sums.add_gradients(3, [torch.ones(4, 2), None, None])
    found = dict(sums.summed_leaves())
    assert all(torch.equal(found[param], torch.full((4, 2), 3.0)) for param in (*first, second[0]))
    assert len(found) == COUNT + 1
