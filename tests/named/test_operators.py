"""Each row of the table: the stated names, the values of torch, and wrong arguments are refused before any change.

Tests are generated from the table, one for each documented operator and each way to call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import operator_cases as cases
import pytest
import torch
from operator_cases import case, documented, fresh
from torch import Tensor

from rpcbench import named
from rpcbench.named import NamedTensor, NamesError, names_of
from rpcbench.named.named_tensor import FUNCTIONS, operator_functions, strip_names
from rpcbench.named.operators import ROWS
from rpcbench.named.rules import NameRule, Row

DOCUMENTED = documented(*NameRule)
OWN_TESTS = {"cat", "grad"} | (set() if torch.cuda.is_available() else {"cuda"})
CALLED = [row for row in DOCUMENTED if row.rule is not NameRule.FACTORY and row.name not in OWN_TESTS]
Way = Callable[..., Any]


def ways(row: Row) -> Iterator[Way]:
    """Yield the method and the function."""
    if hasattr(NamedTensor, row.name):
        yield lambda tensor, *args: _member(getattr(tensor, row.name), args)
    function = getattr(named, row.name, None) if row.dims else getattr(torch, row.name, None)
    if callable(function) and row.name not in ("dtype", "device") and row.rule is not NameRule.OWN:
        yield function


def _member(member: Any, args: tuple[Any, ...]) -> Any:
    return member(*args) if callable(member) else member


def _plain(values: Any) -> Any:
    return [strip_names(value) for value in values]


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) and value and isinstance(value[0], Tensor) else value


def test_the_table_has_all_rows_of_the_documentation() -> None:
    counts = {rule: len(documented(rule)) for rule in NameRule}
    assert sum(counts.values()) == 200  # its 202 rows have rand and randn twice
    assert counts[NameRule.KEEPS] == 65
    assert counts[NameRule.UNIFIES] == 18
    assert counts[NameRule.CONTRACTS] == 8
    assert counts[NameRule.REMOVES] == 15
    assert counts[NameRule.PERMUTES] == 1
    assert counts[NameRule.FACTORY] == 7


def test_each_row_belongs_to_a_function_of_torch_unless_it_is_new() -> None:
    ours = {"data=", "align_as", "align_to", "has_names", "names", "refine_names", "rename", "rename_"}
    assert [row.name for row in ROWS.values() if not [*operator_functions(row)] and row.name not in ours] == []
    told = [row for row in DOCUMENTED if row.name != "manual_seed"]  # torch replaces that function
    assert all(FUNCTIONS[function].name == row.name for row in told for function in operator_functions(row))


@pytest.mark.parametrize("row", CALLED, ids=lambda row: row.name)
def test_an_operator_gives_the_names_that_its_row_states(row: Row) -> None:
    how = case(row)
    tried = [*ways(row)]
    assert tried
    for way in tried:
        torch.manual_seed(3)
        tensor = how.make()
        result = way(tensor, *fresh(how.args))
        if how.names is None:
            assert not isinstance(result, Tensor) or not any(names_of(result))
            continue
        parts = result if isinstance(result, tuple | list) else (result,)
        assert [part.names for part in parts] == [how.names] * len(parts)
        assert all(len(part.names) == part.dim() for part in parts)
        if row.is_inplace:
            assert result is tensor


@pytest.mark.parametrize("row", [row for row in CALLED if row.rule is not NameRule.OWN], ids=lambda row: row.name)
def test_an_operator_gives_the_values_of_torch(row: Row) -> None:
    how = case(row)
    if row.name in ("data_ptr", "register_hook", "detach_"):
        return
    for way in ways(row):
        torch.manual_seed(3)
        found = _first(way(how.make(), *fresh(how.args)))
        plain = strip_names(how.make())
        indices = [dict(zip(names_of(how.make()), range(9), strict=False)).get(arg, arg) for arg in _hashable(how.args)]
        torch.manual_seed(3)
        home = getattr(plain, row.name, None)
        function = getattr(torch, row.name, None)
        expected = _first(_member(home, tuple(indices)) if home is not None else function(plain, *indices))
        if isinstance(expected, Tensor):
            torch.testing.assert_close(strip_names(found), expected, rtol=0, atol=0, equal_nan=True)
        elif not isinstance(expected, torch.Generator):
            assert found == expected


def _hashable(args: tuple[Any, ...]) -> list[Any]:
    return _plain(fresh(args))


@pytest.mark.parametrize("row", [row for row in CALLED if case(row).wrong is not None], ids=lambda row: row.name)
def test_wrong_arguments_are_refused_and_change_nothing(row: Row) -> None:
    how = case(row)
    for way in ways(row):
        tensor = how.make()
        before = strip_names(tensor).clone()
        with pytest.raises(NamesError, match=row.name) as caught:
            way(tensor, *fresh(how.wrong or ()))
        assert all(f"{name}=" in str(caught.value) for name in tensor.names if name)
        assert tensor.names == how.make().names
        assert torch.equal(strip_names(tensor), before)


def takes_out(row: Row) -> bool:
    """Return whether torch's function can write to a given tensor."""
    if row.rule not in (NameRule.KEEPS, NameRule.UNIFIES) or row.dims or not hasattr(torch, row.name):
        return False
    if row.name == "masked_fill":  # only torch's own code can give it an out
        return False
    operator = getattr(torch.ops.aten, row.name, None)
    return operator is not None and any(each.endswith("out") for each in operator.overloads())


@pytest.mark.parametrize("row", [row for row in CALLED if takes_out(row)], ids=lambda row: row.name)
def test_out_gets_the_names_of_the_result_or_must_have_them(row: Row) -> None:
    how = case(row)
    function = getattr(torch, row.name)
    result = function(how.make(), *fresh(how.args))
    out = torch.empty_like(strip_names(result))
    assert function(how.make(), *fresh(how.args), out=out) is out
    assert out.names == how.names
    other = named.named(torch.empty_like(strip_names(result)), "A", "B")
    with pytest.raises(NamesError, match="out"):
        function(how.make(), *fresh(how.args), out=other)


@pytest.mark.parametrize("row", documented(NameRule.FACTORY), ids=lambda row: row.name)
def test_factories_accept_names(row: Row) -> None:
    make = getattr(named, row.name)
    size: tuple[Any, ...] = {"tensor": ([[1.0] * 4] * 3,), "empty_like": (torch.rand(3, 4),)}.get(row.name, (3, 4))
    made = make(*size, names=("N", None), dtype=torch.double)
    assert (made.names, made.shape, made.dtype, made.is_leaf) == (("N", None), (3, 4), torch.double, True)
    for wrong in (("N",), ("N", "N"), ("N", "a b"), ("N", 3)):
        with pytest.raises(NamesError, match=row.name):
            make(*size, names=wrong)


def test_cat_unifies_the_names_of_its_tensors() -> None:
    x, y = cases.rand("N", None), cases.rand("N", "C")
    assert named.cat([x, y], "N").names == cases.NC
    assert named.cat([x, y], "N").shape == (6, 4)
    assert torch.cat([y.rename(None), y]).names == cases.NC
    with pytest.raises(NamesError, match=r"cat of \(N=3, C=4\) and \(A=3, C=4\)"):
        torch.cat([y, y.rename(N="A")])


def test_an_operator_without_a_row_refuses_names_with_advice() -> None:
    x = cases.x()
    for call in (lambda: torch.fft.fft(x), lambda: x.cov(), lambda: torch.cov(correction=1, input=x)):
        with pytest.raises(NamesError, match=r"no rule for names.*\(N=3, C=4\).*rename\(None\)"):
            call()
    assert type(torch.fft.fft(x.rename(None))) is Tensor


def test_an_operator_without_a_row_accepts_tensors_without_names() -> None:
    assert torch.cov(cases.rand(None, None)).shape == (4, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the generated tests have it then")
def test_cuda_is_refused_only_by_torch() -> None:
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        cases.x().cuda()
    assert ROWS["cuda"].infer is ROWS["cpu"].infer
