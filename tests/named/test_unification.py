"""Unification of the names of two tensors, against a simple model; and the examples of torch's documentation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rpcbench import named
from rpcbench.named import NamesError
from rpcbench.named.dimnames import Names, unify_names

LETTERS = "ABCD"


@st.composite
def names(draw: st.DrawFn, most: int = 4) -> Names:
    """Draw the names of one tensor: none twice, some None."""
    order = draw(st.permutations(LETTERS))[: draw(st.integers(0, most))]
    return tuple(name if draw(st.booleans()) else None for name in order)


def model(first: Names, second: Names) -> set[tuple[int, str]] | None:
    """Return {(position from the right, name)} of both; None if a position has two names, or a name two positions."""
    facts = {(place, name) for each in (first, second) for place, name in enumerate(reversed(each)) if name}
    places, said = [place for place, _ in facts], [name for _, name in facts]
    return facts if len(set(places)) == len(places) and len(set(said)) == len(said) else None


@given(names(), names())
def test_unify_equals_the_model(first: Names, second: Names) -> None:
    expected = model(first, second)
    if expected is None:
        with pytest.raises(NamesError):
            unify_names(first, second)
        return
    made = unify_names(first, second)
    assert len(made) == max(len(first), len(second))
    assert {(place, name) for place, name in enumerate(reversed(made)) if name} == expected


@given(names(), names())
def test_unify_does_not_depend_on_the_order_of_its_arguments(first: Names, second: Names) -> None:
    assume(model(first, second) is not None)
    assert unify_names(first, second) == unify_names(second, first)


@given(names(3), names(3), st.data())
def test_broadcasting_unifies_or_refuses_names(first: Names, second: Names, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))

    def made(given: Names) -> torch.Tensor:
        shape = [data.draw(st.sampled_from([1, size])) for size in sizes[3 - len(given) :]]
        return named.named(torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape), *given)

    one, other = made(first), made(second)
    if model(first, second) is None:
        with pytest.raises(NamesError, match=r"mul of \(.*\) and \(.*\): "):
            one * other
        return
    result = one * other
    assert result.names == unify_names(first, second)
    assert torch.equal(result.rename(None), one.rename(None) * other.rename(None))


@given(st.permutations(LETTERS), st.data())
def test_aligned_tensors_broadcast_by_name(order: list[str], data: st.DataObject) -> None:
    """In any order of dimensions, each element is combined with the one of the same coordinates."""
    sizes = {name: data.draw(st.integers(1, 3)) for name in LETTERS}
    part = data.draw(st.permutations(order))[: data.draw(st.integers(1, 4))]
    whole = named.rand(*(sizes[name] for name in order), names=order)
    small = named.rand(*(sizes[name] for name in part), names=part)
    result = whole * small.align_as(whole)
    assert result.names == tuple(order)
    equation = f"{''.join(order)},{''.join(part)}->{''.join(order)}"
    assert torch.equal(result.rename(None), torch.einsum(equation, whole.rename(None), small.rename(None)))


def tensor(*given: str | None) -> torch.Tensor:
    return named.rand(*[3] * len(given), names=given)


def test_a_name_unifies_with_none() -> None:
    assert (tensor("N", None) + tensor(None, "C")).names == ("N", "C")


def test_different_names_at_the_same_position_are_refused() -> None:
    message = r"add of \(N=3, C=3\) and \(N=3\): at position -1 \(from the right\) the first has 'C' and the second 'N'"
    with pytest.raises(NamesError, match=message):
        tensor("N", "C") + tensor("N")


def test_a_name_at_two_positions_is_refused() -> None:
    message = r"add of \(N=3, 3\) and \(N=3\): 'N' is at position -2 of the first and -1 of the second"
    with pytest.raises(NamesError, match=message):
        tensor("N", None) + tensor("N")


def test_squeeze_and_sum_remove_names() -> None:
    images = named.rand(1, 3, 3, 3, names=("N", "C", "H", "W"))
    assert images.squeeze("N").names == ("C", "H", "W")
    assert images.squeeze().names == ("C", "H", "W")
    assert images.sum(["N", "C"]).names == ("H", "W")
    assert images.sum(["N", "C"], keepdim=True).names == ("N", "C", "H", "W")
    assert images.sum().names == ()


def test_matrix_products_contract_names() -> None:
    assert tensor("N", "D").mm(tensor("in", "out")).names == ("N", "out")
    assert torch.matmul(tensor("A", "B", "C", "D"), tensor("B", "E", "F")).names == ("A", "B", "C", "F")
    assert (tensor("N", "D") @ tensor("D")).names == ("N",)
    assert (tensor("D") @ tensor("B", "D", "E")).names == ("B", "E")
    with pytest.raises(NamesError, match="'N' would occur twice"):
        tensor("N", "D") @ tensor("D", "N")


def test_an_in_place_operation_gives_names_to_a_plain_tensor() -> None:
    plain = torch.rand(3, 3)
    plain += tensor("N", "C")
    assert plain.names == ("N", "C")
