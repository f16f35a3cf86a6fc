"""Names of dimensions that parts state for the values they take and give: checked where values come in and go out.

    part(encode, takes={"x": ("N", "T")}, gives={"h": ("N", "T", "E"), "mask": None})    None: of that one nothing

Guarantees
- Two parts that state names for one value agree before anything is sent.
- A value has the names stated for it wherever the model is cut: a dimension without a name gets its name, and one of
  another name ends the step with an error that tells of stage, part, value, and both.
- Who states none loads nothing of `rpcbench.named`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rpcbench.base.errors import PipelineError

Dims = tuple[str | None, ...]
Stated = dict[str, Dims]
"""Value → the names of its dimensions."""
Values = Sequence[str] | Mapping[str, Sequence[str | None] | None]
"""Names of values, perhaps with those of their dimensions."""


class Terms(NamedTuple):
    """What a module of the row takes and gives: names of values, and of their dimensions."""

    name: str
    takes: tuple[str, ...] | None
    gives: tuple[str, ...] | None
    dims_taken: Stated
    dims_given: Stated

    def taken(self, values: Sequence[Any], where: str = "") -> tuple[Any, ...]:
        """What it is called with, under the names that it states. `where`: as "stage 1, ", for errors."""
        if not self.dims_taken:
            return tuple(values)
        return _under(self.dims_taken, zip(self.takes or (), values, strict=True), f"{where}{self.name!r} takes")

    def given(self, values: Sequence[Any], where: str = "") -> tuple[Any, ...]:
        """What it has given, likewise."""
        if not self.dims_given:
            return tuple(values)
        return _under(self.dims_given, zip(self.gives or (), values, strict=True), f"{where}{self.name!r} gives")


def _under(dims: Stated, values: Iterable[tuple[str, Any]], who: str) -> tuple[Any, ...]:
    return tuple(_named(value, dims[name], f"{who} {name!r}") if name in dims else value for name, value in values)


def _named(value: Any, dims: Dims, who: str) -> Any:
    from rpcbench.named import NamesError, named
    from rpcbench.named.rules import show

    if not isinstance(value, torch.Tensor):
        raise PipelineError(f"{who} as {_listed(dims)}, but it is no tensor: {value!r}")
    try:
        return named(value, *dims)
    except NamesError:
        raise PipelineError(f"{who} as {_listed(dims)}, but it is {show(value)}") from None


def stated(what: str, values: Values | None) -> Stated:
    """Those given in `takes=` or `gives=`. PipelineError where one is no name."""
    if not isinstance(values, Mapping):
        return {}
    found = {value: dims for value, dims in values.items() if dims is not None}
    return {value: _checked(what, value, dims) for value, dims in found.items()}


def _checked(what: str, value: str, dims: Sequence[str | None]) -> Dims:
    from rpcbench.named import dimnames

    if isinstance(dims, str):
        raise PipelineError(f'{what}={{{value!r}: {dims!r}}}: names of dimensions are a tuple, as ("N", "C")')
    try:
        return dimnames.checked(dims, len(dims))
    except dimnames.NamesError as error:
        raise PipelineError(f"{what}={{{value!r}: {tuple(dims)!r}}}: {error}") from None


def agree(value: str, giver: Terms, taker: Terms) -> None:
    """PipelineError where no value can have the names that one module states and those that another does."""
    given, taken = giver.dims_given.get(value), taker.dims_taken.get(value)
    if given is None or taken is None:
        return
    if len(given) != len(taken) or any(a not in (None, b) for a, b in zip(given, taken, strict=True)):
        raise PipelineError(
            f"{taker.name!r} takes {value!r} as {_listed(taken)}, but {giver.name!r} gives it as {_listed(given)}: "
            "state the same names of dimensions in both parts, in the same order"
        )


def _listed(dims: Dims) -> str:
    return f"({', '.join(map(str, dims))})"
