"""Operators beyond torch's documented table: names and values of each that takes one tensor, two, or a dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import operator_cases as cases
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rpcbench import named
from rpcbench.named import NamesError
from rpcbench.named.operators import ROWS
from rpcbench.named.rules import NameRule, Row, input_names, reduction_names, unified_names

MORE = [row for row in ROWS.values() if not row.documented]
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "dropout": (0.5, True), "alpha_dropout": (0.5, True), "vector_norm": (2, 1),
    "full_like": (2.0,), "threshold": (0.5, 0.1), "clamp_min": (0.5,), "clamp_max": (0.5,), "normalize": (2.0, "C"),
    "max_pool1d": (2,), "max_pool2d": (2,), "max_pool3d": (2,), "avg_pool1d": (2,), "avg_pool2d": (2,),
    "avg_pool3d": (2,), "adaptive_avg_pool1d": (2,), "adaptive_avg_pool2d": (2,), "roll": (1, "C"), "flip": (["C"],),
    "lerp": (cases.x, 0.5), "lerp_": (cases.x, 0.5), "addcmul": (cases.x, cases.x), "addcmul_": (cases.x, cases.x),
    "addcdiv": (cases.x, cases.x), "addcdiv_": (cases.x, cases.x),
}  # fmt: skip
RANDOM = {"rand_like", "randn_like"}
INTEGERS = {"bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__", "__invert__"}
INTEGERS |= {"__rand__", "__ror__", "__rxor__", "__iand__", "__ior__", "__ixor__"}
ALONE = {"where", "pin_memory", "real", "imag", "data", "max_pool3d", "avg_pool3d", "expand_as", "dropout1d"}
ALONE |= {"dropout2d"}


def rows(rule: Callable[..., Any]) -> Iterator[Row]:
    yield from (row for row in MORE if row.infer is rule and row.name not in ALONE)


def call(name: str, tensor: Tensor, *args: Any) -> Any:
    """Call the method, or else the function."""
    torch.manual_seed(1)
    if hasattr(tensor, name):
        return getattr(tensor, name)(*args)
    return getattr(torch if hasattr(torch, name) else functional, name)(tensor, *args)


def same(found: Any, expected: Any) -> bool:
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    return all(torch.equal(ours.rename(None).nan_to_num(9.0), theirs.nan_to_num(9.0)) for ours, theirs in pairs)


def start(row: Row) -> Tensor:
    if row.name in ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"):
        return cases.rand("K", "N", "C")
    return cases.bits() if row.name in INTEGERS else cases.x()


def plain(args: tuple[Any, ...], tensor: Tensor) -> list[Any]:
    def one(arg: Any) -> Any:
        if isinstance(arg, list):
            return [one(each) for each in arg]
        return tensor.names.index(arg) if isinstance(arg, str) else arg

    return [each.rename(None) if isinstance(each, Tensor) else one(each) for each in cases.fresh(args)]


@pytest.mark.parametrize("row", [*rows(input_names)], ids=lambda row: row.name)
def test_an_operator_that_keeps_names_has_the_names_of_its_input(row: Row) -> None:
    tensor = start(row)
    args = ARGUMENTS.get(row.name, ("C",) if row.dims else ())
    found = call(row.name, tensor, *cases.fresh(args)) if hasattr(tensor, row.name) else _function(row, tensor, args)
    for part in found if isinstance(found, tuple) else (found,):
        assert part.names == tensor.names
    if row.name not in RANDOM:
        assert same(found, call(row.name, start(row).rename(None), *plain(args, tensor)))


def _function(row: Row, tensor: Tensor, args: tuple[Any, ...]) -> Any:
    torch.manual_seed(1)
    return getattr(named, row.name)(tensor, *cases.fresh(args))


@pytest.mark.parametrize("row", [*rows(unified_names)], ids=lambda row: row.name)
def test_an_operator_that_unifies_names_combines_or_refuses_them(row: Row) -> None:
    args = ARGUMENTS.get(row.name, (cases.bits if row.name in INTEGERS else cases.x,))
    tensor = start(row)
    found = call(row.name, tensor, *cases.fresh(args))
    assert found.names == ("N", "C")
    assert (found is tensor) == row.is_inplace
    assert same(found, call(row.name, start(row).rename(None), *plain(args, tensor)))
    with pytest.raises(NamesError, match=r"\(N=3, C=4\) and \(N=3\)"):
        call(row.name, start(row), cases.rand("N"), *cases.fresh(args)[1:])


@pytest.mark.parametrize("row", [*rows(reduction_names)], ids=lambda row: row.name)
def test_an_operator_that_removes_names_drops_the_name_of_its_dimension(row: Row) -> None:
    tensor = cases.x()
    args = ARGUMENTS.get(row.name, ("C",))
    function = torch.linalg.vector_norm if row.name == "vector_norm" else getattr(named, row.name)
    found = function(tensor, *args)
    assert found.names == ("N",)
    assert same(found, function(tensor.rename(None), *plain(args, tensor)))


def test_where_and_expand_as_name_their_results() -> None:
    tensor, mask = cases.x(), cases.mask()
    assert torch.where(mask, tensor, 0.0).names == tensor.where(mask, tensor).names == ("N", "C")
    assert cases.rand("C").expand_as(tensor).names == ("N", "C")
    with pytest.raises(NamesError, match="where"):
        torch.where(mask, tensor, tensor.rename(N="Q"))


def test_view_as_keeps_names_and_refuses_another_shape() -> None:
    tensor = cases.x()
    seen = tensor.view_as(other=torch.ones(3, 4))
    assert (seen.names, seen.data_ptr()) == (("N", "C"), tensor.data_ptr())
    with pytest.raises(NamesError, match=r"view_as of \(N=3, C=4\) and \(4, 3\): the shape would become \(4, 3\)"):
        tensor.view_as(torch.ones(4, 3))


@pytest.mark.parametrize("how", [lambda mask: ((mask,), {}), lambda mask: ((), {"condition": mask})])
def test_where_with_only_a_condition_gives_indices_without_names(how: Any) -> None:
    mask = cases.mask()
    args, given = how(mask)
    found = torch.where(*args, **given)
    assert [each.names for each in found] == [(None,), (None,)]
    expected = mask.rename(None).nonzero(as_tuple=True)
    assert all(torch.equal(ours.rename(None), theirs) for ours, theirs in zip(found, expected, strict=True))


def test_matrix_products_transposes_and_maxima_name_their_results() -> None:
    tensor = cases.x()
    assert (torch.rand(2, 3) @ tensor).names == (None, "C")
    assert tensor.mT.names == tensor.t().names == tensor.swapaxes("N", "C").names == ("C", "N")
    assert torch.maximum(tensor, tensor).max(tensor).names == ("N", "C")


def test_undocumented_rows_use_all_rules_except_for_factories() -> None:
    assert {row.rule for row in MORE} == set(NameRule) - {NameRule.FACTORY}
