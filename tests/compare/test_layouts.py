"""Layouts are inferred from values: whatever way a tensor is shared, that way is found, and no other tensor fits it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcbench.compare.layouts import CUT, DEALS, SUM, WHOLE, Layout, MeshShare, find_layouts, fit_layout, positions
from rpcbench.compare.verdicts import Mesh, hold_values

NEAR = 1e-5


def share_tensor(whole, mesh, layout, seed=0):
    """The value of each rank of a mesh, under a layout."""
    generator = torch.Generator().manual_seed(seed)
    held = {}
    summed = [d for d, share in enumerate(layout.shares) if share.kind == SUM]
    for place in itertools.product(*map(range, mesh)):
        value = whole
        for d, size in enumerate(whole.shape):
            cuts = [(layout.shares[m], mesh[m], place[m]) for m in layout.order if layout.shares[m].dim == d]
            value = value.index_select(d, positions(size, cuts))
        held[place] = value.clone()
    for d in summed:
        for place in held:
            if place[d] == 0:
                noise = torch.randn(held[place].shape, generator=generator, dtype=whole.dtype)
                others = [(*place[:d], n, *place[d + 1 :]) for n in range(1, mesh[d])]
                held[place] = held[place] - noise * len(others)
                for other in others:
                    held[other] = noise.clone()
    return held


def first_fit(whole, held, mesh):
    shapes = {place: tuple(value.shape) for place, value in held.items()}
    for layout in find_layouts(whole.shape, shapes, mesh):
        if fit_layout(whole, held, mesh, layout).error <= NEAR:
            return layout
    return None


@st.composite
def shared_tensors(draw):
    mesh = draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3)]))
    deals = [deal for deal in DEALS if deal != "as they are"]
    kinds = st.one_of(
        st.sampled_from([MeshShare(WHOLE), MeshShare(SUM)]),
        st.builds(MeshShare, st.just(CUT), st.integers(0, 1), st.just("")),
    )  # fmt: skip
    shares = [draw(kinds) for _ in mesh]
    cut = [n for n, share in enumerate(shares) if share.kind == CUT]
    if len(cut) == 1:
        shares[cut[0]] = MeshShare(CUT, shares[cut[0]].dim, draw(st.sampled_from(deals)))
    order = tuple(draw(st.permutations(range(len(mesh)))))
    shape = (draw(st.integers(13, 24)), draw(st.integers(13, 24)))
    return mesh, Layout(tuple(shares), order), shape


@given(shared_tensors(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_the_way_in_which_a_tensor_is_shared_is_found(shared, seed):
    mesh, layout, shape = shared
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    held = share_tensor(whole, mesh, layout, seed)
    found = first_fit(whole, held, mesh)
    assert found is not None
    again = share_tensor(whole, mesh, found, seed)
    kinds = [(share.kind, share.dim) for share in found.shares]
    assert kinds == [(share.kind, share.dim) for share in layout.shares]
    for place, value in held.items():
        if not layout.has_kind(SUM):
            assert torch.equal(again[place][: len(value)], value), "the same pieces, whatever their name"


@given(shared_tensors(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_a_rank_with_another_value_fits_no_layout(shared, seed):
    mesh, layout, shape = shared
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    held = share_tensor(whole, mesh, layout, seed)
    last = max(held)
    if held[last].numel():
        held[last].view(-1)[-1] += 1.0
        assert first_fit(whole, held, mesh) is None


@pytest.mark.parametrize(
    ("size", "deal", "pieces"),
    [
        (7, "", [[0, 1], [2, 3], [4, 5], [6]]),
        (9, "", [[0, 1, 2], [3, 4, 5], [6, 7, 8], []]),
        (8, "round robin", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (8, "zig-zag", [[0, 7], [1, 6], [2, 5], [3, 4]]),
        (8, "in 2 parts", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (12, "in 3 parts", [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]),
    ],
)
def test_positions_of_each_deal(size, deal, pieces):
    assert [positions(size, [(MeshShare(CUT, 0, deal), 4, n)]).tolist() for n in range(4)] == pieces


def test_pieces_of_uneven_sizes_and_with_padding():
    whole = torch.arange(1.0, 11.0)
    uneven = {(0,): whole[:3], (1,): whole[3:4], (2,): whole[4:]}
    assert str(first_fit(whole, uneven, (3,)).shares[0]) == "Shard(0), as they are"
    padded = {(n,): torch.cat([whole, torch.full((2,), 99.0)])[4 * n : 4 * n + 4] for n in range(3)}
    assert str(first_fit(whole, padded, (3,)).shares[0]) == "Shard(0)"


def test_two_dimensions_of_the_mesh_cut_one_of_the_tensor_in_either_order():
    whole = torch.randn(8, 3)
    for order in ((0, 1), (1, 0)):
        layout = Layout((MeshShare(CUT, 0), MeshShare(CUT, 0)), order)
        assert first_fit(whole, share_tensor(whole, (2, 2), layout), (2, 2)).order == order


def test_a_value_of_some_ranks_is_on_a_mesh_of_its_own():
    mesh = Mesh(("pp", "tp"), (2, 2))
    held = hold_values(mesh, {(1, 0): torch.ones(1), (1, 1): torch.zeros(1)})
    assert (held.mesh, held.missing) == (Mesh(("tp",), (2,)), ())
    assert held.places == {(0,): (1, 0), (1,): (1, 1)}
    odd = hold_values(mesh, {(0, 0): torch.ones(1), (1, 1): torch.zeros(1)})
    assert odd.missing == ((0, 1), (1, 0))


def test_factors_and_errors_by_rank():
    whole = torch.randn(4, 4, dtype=torch.float64)
    layout = Layout((MeshShare(CUT, 0),), (0,))
    held = {(0,): 2 * whole[:2], (1,): 2 * whole[2:]}
    fit = fit_layout(whole, held, (2,), layout)
    assert fit.factor == pytest.approx(2) and fit.scaled_error == pytest.approx(0, abs=1e-12)
    held = {(0,): whole[:2], (1,): whole[2:] + 1}
    fit = fit_layout(whole, held, (2,), layout)
    assert fit.by_rank[(0,)] == 0 and fit.by_rank[(1,)] == pytest.approx(8**0.5) and fit.error == fit.by_rank[(1,)]
