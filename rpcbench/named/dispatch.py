"""Calls of torch's operators with named tensors: the rule first, then the operator, then names on what comes out.

Guarantees
- What does not fit is told before anything is computed or changed, by an error that shows all tensors of the call.
- An operator without a row in the table refuses tensors that have names; none loses them in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rpcbench.named.call import Call, names_of, show
from rpcbench.named.dims import Names, NamesError, listed
from rpcbench.named.table import ROWS, Row

Function = Callable[..., Any]
HOMES = (torch, functional, torch._C._nn, torch.special, torch.linalg)
"""Where torch offers functions that have a row."""
_PLAIN = torch._C.DisableTorchFunctionSubclass


def dispatch(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Names | None]:
    """What `function` gives, and the names it is to have; None where it is to be left as it is."""
    row = FUNCTIONS.get(function)
    with _PLAIN():
        if row is None:
            return _unlisted(function, args, kwargs), None
        infer = row.infer
        if infer is None and not row.dims:
            return function(*args, **kwargs), None
        call = Call(row, args, kwargs)
        try:
            if row.dims:
                call.resolve()
            names = infer(call) if infer is not None else None
            if names is not None and (row.inplace or "out" in kwargs):
                _fits(row, call, names)
        except NamesError as error:
            raise NamesError(f"{row.name} of {call.shown()}: {error}") from None
        result = function(*call.args, **call.kwargs)
        if names is not None and not row.inplace and any(result is each for each in call.args):
            # torch gives back what it was given where there is nothing to do, as in to().
            return (result, None) if names == names_of(result) else (result.as_subclass(Tensor), names)
        return result, names


def _fits(row: Row, call: Call, names: Names) -> None:
    """What is written to may have no names, and gets them then, or must have these."""
    target = call.kwargs.get("out", call.args[0])
    for each in target if isinstance(target, tuple | list) else (target,):
        own = names_of(each)
        strict = "out" in call.kwargs or row.name == "copy_"
        if strict and any(own) and own != names:
            raise NamesError(f"the result is {listed(names)}, and out is {listed(own)}: rename that first")
        if type(each) is not Tensor and not hasattr(each, "_dim_names") and own != names:
            raise NamesError(f"a {type(each).__name__} without names would become {listed(names)}: name it before")


def _unlisted(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensors that have no names are taken by any operator."""
    tensors = [each for each in _inside((args, kwargs)) if any(names_of(each))]
    if tensors:
        raise NamesError(
            f"{_label(function)} has no rule for names, so it cannot take {' and '.join(map(show, tensors))}. "
            "Go on without them, by tensor.rename(None), and name what comes out: named(result, 'N', 'C')"
        )
    return function(*args, **kwargs)


def _inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _inside(each)
    elif isinstance(value, dict):
        yield from _inside([*value.values()])


def _label(function: Function) -> str:
    owner = getattr(function, "__self__", None)
    name: str = getattr(function, "__name__", repr(function))
    return f"tensor.{owner.__name__}" if name in ("__get__", "__set__") and owner is not None else name


def functions(row: Row) -> Iterator[Function]:
    """All by which torch offers an operator."""
    method = getattr(Tensor, row.name, None)
    if callable(method):
        yield method
    elif method is not None:
        yield method.__get__
    yield from (found for home in HOMES if callable(found := getattr(home, row.name, None)))


FUNCTIONS: dict[Function, Row] = {function: row for row in reversed(ROWS.values()) for function in functions(row)}
"""The row of each function that torch tells us of."""
FUNCTIONS[Tensor.requires_grad.__set__] = ROWS["requires_grad_"]  # type: ignore[attr-defined]
FUNCTIONS[Tensor.data.__set__] = ROWS["data="]  # type: ignore[attr-defined]
OWN: dict[Function, Function] = {}
"""What runs in place of a function, without the table: it looks after names itself."""
