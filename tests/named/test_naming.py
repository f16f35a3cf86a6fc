"""Operations of named tensors alone: renaming, refining, aligning, flattening, indexing, and their repr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rpcbench import named
from rpcbench.named import NamedTensor, NamesError, names_of


def images() -> NamedTensor:
    return named.named(torch.arange(120.0).view(2, 3, 4, 5), "N", "C", "H", "W")


def test_named_returns_a_view() -> None:
    plain = torch.zeros(2, 3)
    x = named.named(plain, "N", "C")
    x += 1
    assert torch.equal(plain, torch.ones(2, 3))
    assert type(plain) is Tensor
    assert (x.names, x.has_names(), names_of(plain)) == (("N", "C"), True, (None, None))
    assert named.named(plain, "N", ...).names == ("N", None)
    assert isinstance(x, Tensor)


def test_rename_changes_names_by_position_or_by_name() -> None:
    x = images()
    assert x.rename(H="height", W="width").names == ("N", "C", "height", "width")
    assert x.rename("batch", ..., "width").names == ("batch", "C", "H", "width")
    assert x.rename(N="C", C="N").names == ("C", "N", "H", "W")
    assert x.rename(N=None).names == (None, "C", "H", "W")
    plain = x.rename(None)
    assert type(plain) is Tensor
    assert plain.data_ptr() == x.data_ptr()
    assert x.rename_(N="B") is x
    assert x.names == ("B", "C", "H", "W")
    assert not x.rename_(None).has_names()


def test_refine_names_sets_missing_names() -> None:
    x = named.named(torch.rand(2, 3, 5, 7, 11), ...)
    assert x.refine_names("A", ..., "B", "C").names == ("A", None, None, "B", "C")
    assert images().refine_names("N", ...).names == ("N", "C", "H", "W")
    assert named.named(images(), ..., "W").names == ("N", "C", "H", "W")


def test_align_to_and_align_as_order_and_insert_dimensions() -> None:
    x = images()
    moved = x.align_to("W", "H", ...)
    assert (moved.names, moved.shape) == (("W", "H", "N", "C"), (5, 4, 2, 3))
    assert moved.data_ptr() == x.data_ptr()
    wider = x.align_to("N", "T", "C", "H", "W")
    assert (wider.names, wider.shape) == (("N", "T", "C", "H", "W"), (2, 1, 3, 4, 5))
    scale = named.tensor([1.0, 10.0, 100.0], names=("C",))
    for each in (x, x.align_to("N", "H", "W", "C")):
        scaled = each * scale.align_as(each)
        assert scaled.names == each.names
        assert torch.equal(scaled.select("C", 1).rename(None), each.select("C", 1).rename(None) * 10)


def test_flatten_and_unflatten_work_by_name() -> None:
    x = images()
    listed = x.flatten(dims=["C", "H", "W"], out_dim="F")
    for flat in (x.flatten(["C", "H", "W"], "F"), x.flatten("C", "W", "F"), listed):
        assert (flat.names, flat.shape) == (("N", "F"), (2, 60))
    assert x.flatten(1).names == ("N", None)
    assert torch.flatten(x, 1).names == ("N", None)
    back = flat.unflatten("F", [("C", 3), ("H", 4), ("W", 5)])
    assert back.names == x.names
    assert torch.equal(back.rename(None), x.rename(None))
    assert flat.unflatten("F", {"A": 6, "B": 10}).names == ("N", "A", "B")
    assert flat.unflatten(1, (6, 10)).names == ("N", None, None)
    assert x.sum().flatten().names == (None,)


REFUSED: list[tuple[Callable[[NamedTensor], Any], str]] = [
    (lambda x: named.named(torch.rand(2), "N", "C"), r"named of \(2\): 2 names, \(N, C\), for a tensor of 1 dim"),
    (lambda x: named.named(torch.rand(2), "2x"), "'2x' is no name"),
    (lambda x: x.rename("A"), r"rename of \(N=2, C=3, H=4, W=5\): 1 names"),
    (lambda x: x.rename("A", ..., "B", ...), "can be there once"),
    (lambda x: x.rename("A", N="B"), "not both"),
    (lambda x: x.rename(Q="A"), "no dimension 'Q'"),
    (lambda x: x.rename(N="C"), "'C' would occur twice"),
    (lambda x: x.refine_names("A", ...), "'N' at position 0 cannot become 'A'"),
    (lambda x: x.align_to("N", "C"), r"\(N, C\) leaves out \(H, W\)"),
    (lambda x: x.rename(N=None).align_to("C", ...), "by refine_names"),
    (lambda x: x.sum("N").align_as(torch.rand(3)), r"align_as of \(C=3, H=4, W=5\) and \(3\)"),
    (lambda x: x.flatten(["N", "H"], "F"), "are not adjacent"),
    (lambda x: x.flatten("W", "C", "F"), "is not before"),
    (lambda x: x.flatten(["N", "C"], "H"), "'H' would occur twice"),
    (lambda x: x.unflatten("Q", [("A", 1)]), "no dimension 'Q'"),
    (lambda x: x.unflatten("N", []), "at least one name and size"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_invalid_names_are_refused(call: Callable[[NamedTensor], Any], message: str) -> None:
    with pytest.raises(NamesError, match=message):
        call(images())


INDICES: list[tuple[Any, tuple[str | None, ...]]] = [
    (0, ("C", "H", "W")),
    ((0, slice(1, 3)), ("C", "H", "W")),
    ((..., 0), ("N", "C", "H")),
    ((slice(None), None), ("N", None, "C", "H", "W")),
    ((..., [0, 2]), ("N", "C", "H", "W")),
    (torch.tensor([True, False]), ("N", "C", "H", "W")),
    ((0, 0, 0, 0), ()),
    (np.array([1, 0]), ("N", "C", "H", "W")),
    (range(2), ("N", "C", "H", "W")),
    ((0, slice(None), torch.tensor([0, 2])), ("C", "H", "W")),
    ((torch.tensor(1), ..., [0, 2]), ("C", "H", "W")),
    (np.int64(1), ("C", "H", "W")),
    (torch.tensor(1), ("C", "H", "W")),
    (torch.tensor([[0, 1]]), (None, None, "C", "H", "W")),
]


@pytest.mark.parametrize(("index", "expected"), INDICES, ids=str)
def test_indexing_keeps_the_names_of_the_other_dimensions(index: Any, expected: tuple[str | None, ...]) -> None:
    found = images()[index]
    assert (found.names, found.dim()) == (expected, len(expected))
    assert torch.equal(found.rename(None), images().rename(None)[index])


def test_ambiguous_indices_and_assignments_with_wrong_names_are_refused() -> None:
    x = images()
    with pytest.raises(NamesError, match="masked_select"):
        x[x > 3]
    with pytest.raises(NamesError, match="True as an index"):
        x[True]
    with pytest.raises(NamesError, match="several lists"):
        x[[0, 1], [0, 1]]
    x[0] = named.ones(3, 4, 5, names=("C", "H", "W"))
    x[1] = 0
    assert (x.names, float(x.sum())) == (("N", "C", "H", "W"), 60.0)
    with pytest.raises(NamesError, match="__setitem__"):
        x[0] = named.ones(3, 4, 5, names=("H", "C", "W"))
    with pytest.raises(NamesError, match=r"the value has names that \(N, None\) has not"):
        named.zeros(2, 3, names=("N", None))[:] = named.ones(2, 3, names=("N", "C"))


def test_iteration_and_tuple_results_keep_names() -> None:
    assert [each.names for each in images()] == [("C", "H", "W")] * 2
    values, places = images().max("W")
    assert values.names == places.names == ("N", "C", "H")


def test_functions_accept_names_for_dimensions() -> None:
    x = images()
    assert named.softmax(x, "C").names == x.names
    assert torch.equal(named.sum(x, ["H", "W"]).rename(None), x.rename(None).sum((2, 3)))
    assert named.stack([x, x]).names == (None, "N", "C", "H", "W")
    assert x.permute("W", "H", "C", "N").names == ("W", "H", "C", "N")
    assert x.select("N", 0).select("C", 0).T.names == ("W", "H")
    assert x.flip("N", "W").names == x.names
    assert x.size("H") == 4
    with pytest.raises(AttributeError):
        named.no_such_thing


def test_the_repr_shows_names_and_sizes() -> None:
    assert repr(named.zeros(1, 2, names=("N", "C"))) == "NamedTensor([[0., 0.]], (N=1, C=2))"
    assert repr(named.zeros(1, 2, names=("N", None), requires_grad=True)) == (
        "NamedTensor([[0., 0.]], requires_grad=True, (N=1, 2))"
    )
