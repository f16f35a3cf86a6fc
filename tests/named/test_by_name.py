"""Each function of the table, called as `named.function` with dimension names: the values of torch, with names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import operator_cases as cases
import pytest
import torch
from operator_cases import NC, Case, fresh, rand, x
from test_more_operators import ARGUMENTS, INTEGERS, RANDOM, start
from torch import Tensor

from rpcbench import named
from rpcbench.named import NamedTensor, names_of
from rpcbench.named.named_tensor import strip_names
from rpcbench.named.operators import ROWS
from rpcbench.named.rules import NameRule, Row

FACTORIES = {*["empty", "empty_like", "ones", "zeros", "rand", "randn", "tensor"]}  # tested with names=
PATCHED = {"manual_seed"}  # torch.export replaces it
BY_NAME = [
    row
    for name, row in ROWS.items()
    if name not in FACTORIES | PATCHED and not name.startswith("__") and hasattr(named, name)
]
IMAGE, WEIGHT = ("N", "C", "H", "W"), ("F", "C", None, None)


def _images(*names: str | None) -> Callable[[], Tensor]:
    return lambda: named.named(torch.rand(*(2 for _ in names), generator=torch.Generator().manual_seed(1)), *names)


def _classes() -> Tensor:
    return named.tensor([0, 1, 2], names=("N",))


_LOSS = Case(args=(x,), names=())
CASES: dict[str, Case] = {
    "cat": Case(lambda: [x(), x()], ("N",)),
    "stack": Case(lambda: [x(), x()], (0,), (None, *NC)),
    "flatten": Case(args=(["N", "C"], "F"), names=("F",)),
    "unflatten": Case(args=("C", [("A", 2), ("B", 2)]), names=("N", "A", "B")),
    "masked_select": cases.SPECIAL["masked_select"],
    "t": Case(names=("C", "N")),
    "swapaxes": Case(args=("N", "C"), names=("C", "N")),
    "swapdims": Case(args=("N", "C"), names=("C", "N")),
    "permute": Case(args=(["C", "N"],), names=("C", "N")),
    "where": Case(cases.mask, (x, x)),
    "unsqueeze": Case(args=(0,), names=(None, *NC)),
    "linear": Case(args=(lambda: rand("F", "C"),), names=("N", "F")),
    "conv1d": Case(_images(*IMAGE[:3]), (_images(*WEIGHT[:3]),), ("N", "F", "H")),
    "conv2d": Case(_images(*IMAGE), (_images(*WEIGHT),), ("N", "F", "H", "W")),
    "conv3d": Case(_images(*IMAGE, "D"), (_images(*WEIGHT, None),), ("N", "F", "H", "W", "D")),
    "layer_norm": Case(args=([4],)),
    "rms_norm": Case(args=([4],)),
    "batch_norm": Case(args=(lambda: torch.zeros(4), lambda: torch.ones(4))),
    "group_norm": Case(args=(2,)),
    "instance_norm": Case(_images(*IMAGE), names=IMAGE),
    "max_pool3d": Case(_images(*IMAGE), (2,), IMAGE),
    "avg_pool3d": Case(_images(*IMAGE), (2,), IMAGE),
    "dropout1d": Case(_images(*IMAGE[:3]), (0.5, False), IMAGE[:3]),
    "dropout2d": Case(_images(*IMAGE), (0.5, False), IMAGE),
    "einsum": Case(lambda: "nc,cf->nf", (x, lambda: rand("C", "F")), ("N", "F")),
    "embedding": Case(_classes, (lambda: rand("N", "E"),), ("N", "E")),
    "scaled_dot_product_attention": Case(
        lambda: rand("N", "T", "E"), (lambda: rand("N", "S", "E"), lambda: rand("N", "S", "V")), ("N", "T", "V")
    ),
    **dict.fromkeys(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"], _LOSS),
    "binary_cross_entropy_with_logits": _LOSS,
    "cross_entropy": Case(args=(_classes,), names=()),
    "nll_loss": Case(args=(_classes,), names=()),
    "max": Case(args=("C",), names=("N",)),
    "min": Case(args=("C",), names=("N",)),
    "real": Case(),
    "imag": Case(lambda: x() * 1j),
    **dict.fromkeys(
        ["equal", "allclose", "is_same_size", "_has_compatible_shallow_copy_type"], Case(args=(x,), names=None)
    ),
    "is_nonzero": Case(cases.number, names=None),
    "_foreach_norm": Case(lambda: [x(), x()], names=()),
    "_foreach_mul_": Case(lambda: [x(), x()], (2.0,)),
}


def case(row: Row) -> Case:
    if row.name in CASES:
        return CASES[row.name]
    if row.documented:
        return cases.case(row)
    bits = cases.bits if row.name in INTEGERS else x
    args = ARGUMENTS.get(row.name, (bits,) if row.rule is NameRule.UNIFIES else ("C",) if row.dims else ())
    removes = row.rule is NameRule.REMOVES
    return Case(
        lambda: start(row), args, ("N",) if removes else None if row.rule is NameRule.NONE else start(row).names
    )


def _plain(value: Any, names: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each, names) for each in value]
    return names.index(value) if isinstance(value, str) and value in names else strip_names(value)


def _tensors(value: Any) -> list[Any]:
    return [*value] if isinstance(value, tuple | list) else [value]


def _expected(row: Row, first: Any, args: list[Any]) -> Any:
    """Return the result of torch's function, which takes only sizes for new dimensions, and no names."""
    names = names_of(first) if isinstance(first, Tensor) else NC
    given = {"flatten": [0, 1], "unflatten": [1, [2, 2]]}.get(row.name, [_plain(each, names) for each in args])
    torch.manual_seed(3)
    return getattr(named, row.name).__wrapped__(_plain(first, ()), *given)


@pytest.mark.parametrize("row", BY_NAME, ids=lambda row: row.name)
def test_a_function_called_with_names_has_the_values_of_torch_and_the_right_names(row: Row) -> None:
    how = case(row)
    torch.manual_seed(3)
    function = getattr(named, row.name)
    found = _tensors(function(how.make(), *fresh(how.args)))
    torchs = row.name not in RANDOM and row.name != "detach_"  # torch cannot detach a plain view in place
    expected = _tensors(_expected(row, how.make(), fresh(how.args))) if torchs else found
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(strip_names(ours), strip_names(theirs), rtol=0, atol=0, equal_nan=True)
            assert names_of(ours) == how.names if how.names is not None else not any(names_of(ours))
        else:
            assert ours == theirs


def test_named_has_most_functions_of_torch_that_have_a_row() -> None:
    assert len(BY_NAME) > 250 and {"flatten", "unflatten", "vector_norm", "detach_"} <= {row.name for row in BY_NAME}
    with pytest.raises(AttributeError, match="no attribute 'dtype'"):
        _ = named.dtype


@pytest.mark.parametrize("given", [torch.ones(3, 4), named.ones(3, 4, names=NC)], ids=["plain", "named"])
def test_flatten_and_unflatten_accept_the_arguments_of_torch(given: Tensor) -> None:
    kind = type(given)
    assert type(named.flatten(given, 0, 1)) is type(named.unflatten(input=given, dim=1, sizes=(2, 2))) is kind
    assert torch.flatten(input=given).shape == (12,)


def test_names_can_be_set_in_place() -> None:
    tensor = x()
    tensor.names = ("A", None)
    assert tensor.names == ("A", None)
    tensor.names = ["B", ...]
    assert tensor.names == ("B", None)
    for wrong, told in ((("A",), "1 names"), (("A", "A"), "twice"), ("AB", "takes a tuple")):
        with pytest.raises(named.NamesError, match=told):
            tensor.names = wrong
    tensor.names = None
    assert tensor.names == (None, None) and isinstance(tensor, NamedTensor)


def test_a_named_view_can_be_detached_in_place() -> None:
    weight = torch.ones(3, 4, requires_grad=True)
    view = named.named(weight * 2, *NC)
    view.mark = "mine"
    memory, loss = view.data_ptr(), view.sum()
    assert view.detach_() is view and not view.requires_grad and view.grad_fn is None
    assert (view.names, view.data_ptr(), view.mark) == (NC, memory, "mine")
    loss.rename(None).backward()
    assert torch.equal(weight.grad, torch.full((3, 4), 2.0))
    assert x().detach_().names == NC  # without a graph


def test_a_view_that_a_graph_holds_cannot_be_detached_in_place() -> None:
    view = named.named(torch.ones(3, 4, requires_grad=True) * 2, *NC)
    product = view * view
    with pytest.raises(named.NamesError, match=r"detach_ of \(N=3, C=4\): a graph .*use x = x\.detach\(\)"):
        view.detach_()
    assert view.requires_grad and product.requires_grad
