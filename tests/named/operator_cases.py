"""For each documented operator: a call, the names of its result, and a call that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rpcbench import named
from rpcbench.named.operators import ROWS
from rpcbench.named.rules import NameRule, Row

NC = ("N", "C")
Make = Callable[[], Tensor]


def rand(*names: str | None) -> Tensor:
    """Values in (0.1, 0.9), the same each time; sizes N=3, C=4, others 2."""
    sizes = [{"N": 3, "C": 4, None: 4}.get(name, 2) for name in names]
    plain = torch.rand(*sizes, generator=torch.Generator().manual_seed(len(names))) * 0.8 + 0.1
    return named.named(plain, *names)


def x() -> Tensor:
    return rand("N", "C")


def bits() -> Tensor:
    return named.named(torch.arange(12).view(3, 4), *NC)


def number() -> Tensor:
    return x().sum()


def mask() -> Tensor:
    return x() > 0.5


def index() -> Tensor:
    return torch.tensor([1])


@dataclass(frozen=True)
class Case:
    """`make()` gives the first argument; callables among `args` and `wrong` are evaluated for each call."""

    make: Make = x
    args: tuple[Any, ...] = ()
    names: Any = NC  # None: no tensor, or none with names
    wrong: tuple[Any, ...] | None = None  # arguments that must be refused
    options: dict[str, Any] = field(default_factory=dict)


def _column() -> Tensor:
    return rand("N")


_UNIFY = Case(args=(x,), wrong=(_column,))
_ALONG = Case(args=("C",), wrong=("Q",))
_REMOVE = Case(args=("C",), names=("N",), wrong=("Q",))

SPECIAL: dict[str, Case] = {
    "bitwise_not": Case(bits),
    "bitwise_not_": Case(bits),
    "clamp": Case(args=(0.2, 0.5)),
    "masked_fill": Case(args=(mask, 0.0)),
    "to": Case(args=(torch.double,)),
    "type_as": Case(args=(bits,)),
    "chunk": Case(args=(2, "C"), wrong=(2, "Q")),
    "split": Case(args=(2, "C"), wrong=(2, "Q")),
    "narrow": Case(args=("C", 0, 2), wrong=("Q", 0, 2)),
    "index_fill": Case(args=("C", index, 0.5), wrong=("Q", index, 0.5)),
    "expand": Case(args=(5, 3, 4), names=(None, *NC)),
    "cumprod": _ALONG,
    "cumsum": _ALONG,
    "cat": Case(args=()),
    "mm": Case(args=(lambda: rand("C", "out"),), names=("N", "out"), wrong=(lambda: rand("C", "N"),)),
    "mv": Case(args=(lambda: rand("C"),), names=("N",)),
    "bmm": Case(
        lambda: rand("B", "N", "C"),
        (lambda: rand("B", "C", "out"),),
        ("B", "N", "out"),
        (lambda: rand("Q", "C", "out"),),
    ),
    "matmul": Case(
        lambda: rand("A", "B", "N", "C"),
        (lambda: rand("B", "C", "out"),),
        ("A", "B", "N", "out"),
        (lambda: rand("A", "C", "out"),),
    ),
    "addmm": Case(
        args=(lambda: rand("N", "D"), lambda: rand("D", "C")), wrong=(lambda: rand("Q", "D"), lambda: rand("D", "C"))
    ),
    "addmv": Case(_column, (x, lambda: rand("C")), ("N",), (lambda: rand("N", "C").rename(N="Q"), lambda: rand("C"))),
    "mode": _REMOVE,
    "kthvalue": Case(args=(2, "C"), names=("N",), wrong=(2, "Q")),
    "topk": Case(args=(2, "C"), wrong=(2, "Q")),
    "select": Case(args=("C", 0), names=("N",), wrong=("Q", 0)),
    "squeeze": Case(lambda: x().align_to("K", "N", "C"), ("K",), NC, ("Q",)),
    "transpose": Case(args=("N", "C"), names=("C", "N"), wrong=("N", "Q")),
    "normal": Case(args=(0.5,)),
    "masked_select": Case(args=(mask,), names=(None,), wrong=(lambda: mask().rename("C", "N"),)),
    "copy_": Case(args=(x,), wrong=(lambda: x().rename(N="Q"),)),
    "resize_": Case(args=(3, 4), wrong=(4, 3)),
    "resize_as_": Case(args=(x,), wrong=(_column,)),
    "detach_": Case(lambda: named.ones(3, 4, names=NC)),  # no view
    "clamp_": Case(args=(0.2, 0.5)),
    "fill_": Case(args=(0.5,)),
    "masked_fill_": Case(args=(mask, 0.5)),
    "index_fill_": Case(args=("C", index, 0.5), wrong=("Q", index, 0.5)),
    "pow": _UNIFY,
    "pow_": _UNIFY,
    "size": Case(args=("C",), names=None, wrong=("Q",)),
    "stride": Case(args=("C",), names=None, wrong=("Q",)),
    "all": Case(mask, (), None),
    "any": Case(mask, (), None),
    "dot": Case(lambda: rand("C"), (lambda: rand("D", None).select(0, 0),), None),
    "item": Case(number, names=None),
    "is_tensor": Case(names=None),
    "manual_seed": Case(lambda: torch.tensor(1), (), None),
    "register_hook": Case(lambda: x().requires_grad_(), (lambda: print,), None),
    "align_as": Case(args=(lambda: rand("C", "K", "N"),), names=("C", "K", "N"), wrong=(_column,)),
    "align_to": Case(args=("C", ...), names=("C", "N"), wrong=("C",)),
    "flatten": Case(args=(["N", "C"], "F"), names=("F",), wrong=(["C", "N"], "F")),
    "unflatten": Case(args=("C", [("A", 2), ("B", 2)]), names=("N", "A", "B"), wrong=("C", [("A", 2), ("N", 2)])),
    "refine_names": Case(lambda: rand("N", None), ("N", "C"), NC, ("Q", "C")),
    "rename": Case(args=("A", ...), names=("A", "C"), wrong=("A",)),
    "rename_": Case(args=("A", ...), names=("A", "C"), wrong=("C", "C")),
    "has_names": Case(names=None),
    "names": Case(names=None),
    "empty_like": Case(),
}
SPECIAL["addmm_"], SPECIAL["addmv_"] = SPECIAL["addmm"], SPECIAL["addmv"]


def case(row: Row) -> Case:
    """Return the case of a row."""
    if row.name in SPECIAL:
        return SPECIAL[row.name]
    if row.rule is NameRule.UNIFIES:
        return _UNIFY
    if row.rule is NameRule.REMOVES:
        return _REMOVE
    if row.rule is NameRule.NONE and not row.is_inplace:
        return Case(names=None)
    return Case()


def documented(*rules: NameRule) -> list[Row]:
    """Return the documented rows with these rules."""
    return [row for row in ROWS.values() if row.documented and row.rule in rules]


def fresh(values: tuple[Any, ...]) -> list[Any]:
    """Return the arguments, with all callables evaluated."""
    return [value() if callable(value) else value for value in values]
