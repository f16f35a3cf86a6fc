"""Splits a value into a part for each worker, and combines the values of all workers into one.

Guarantees
- The parts of a value follow one another in its order, and their sizes differ by at most one: the first ones are
  larger. A value with fewer rows than there are workers is refused.
- A part of a tensor or an array is a view of it, and has its type and the names of its dimensions.
- Values that do not fit together are refused with the layout of each; nothing is broadcast.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from rpcbench.base.errors import count_noun, suggest_nearest
from rpcbench.runtime.handles import layout_of, type_of

SCATTER = "scatter"
"""The word by which a variable is split: `-i x:scatter`."""
COMBINATIONS = {"cat": "concatenated", "stack": "stacked", "list": "listed", "sum": "added up"}
"""Ways to combine values, each with its participle for errors."""

Dimension = int | str
"""The number of a dimension, or the name that a tensor of `rpcbench.named` gives it."""


class Parts(NamedTuple):
    """The parts of a value, in order, with the size of each along the dimension that was split."""

    values: list[Any]
    sizes: list[int]
    dim: Dimension = 0

    def size_report(self, name: str) -> str:
        """Return a line on sizes that differ: `x: 10 rows as 4, 3, 3`; empty if all are equal."""
        if len(set(self.sizes)) == 1:
            return ""
        along = "rows" if self.dim == 0 else f"along dimension {self.dim}"
        return f"{name}: {sum(self.sizes)} {along} as {', '.join(map(str, self.sizes))}"


def split(name: str, value: Any, count: int, dim: Dimension = 0) -> Parts:
    """Split a value into parts of almost equal size.

    Args:
        name: The variable, for errors.
        value: A tensor, an array, or a sequence whose slices are such sequences too (list, range, DataFrame).
        count: The number of parts, at least 1.
        dim: The dimension of a tensor or array.

    Raises:
        TypeError: The value is no sequence.
        ValueError: It has no such dimension, or is shorter than `count` along it.
    """
    total = _size_along(name, value, dim)
    if total < count:
        rows = count_noun(total, "row") if dim == 0 else f"size {total} along dimension {dim}"
        raise ValueError(f"{name} has {rows}, and there are {count_noun(count, 'worker')}: name fewer workers")
    least, larger = divmod(total, count)
    sizes = [least + (index < larger) for index in range(count)]
    starts = [sum(sizes[:index]) for index in range(count)]
    parts = [_slice_part(value, start, size, dim) for start, size in zip(starts, sizes, strict=True)]
    if not isinstance(value, torch.Tensor | numpy.ndarray) and [_length_of_value(part) for part in parts] != sizes:
        raise TypeError(f"{name} has type {type_of(value)}, whose slices are no sequences of the items: pass a list")
    return Parts(parts, sizes, dim)


def _size_along(name: str, value: Any, dim: Dimension) -> int:
    if isinstance(value, torch.Tensor | numpy.ndarray):
        try:
            size = value.size(dim) if isinstance(value, torch.Tensor) else value.shape[dim]  # type: ignore[arg-type]
        except (IndexError, TypeError, RuntimeError):  # a NamesError is a RuntimeError
            raise ValueError(
                f"{name} is {value_layout(value)}, which has no dimension {dim!r} to split along"
            ) from None
        return int(size)
    if isinstance(value, Mapping) or not hasattr(value, "__getitem__") or (size := _length_of_value(value)) < 0:
        raise TypeError(f"{name} has type {type_of(value)}: only a tensor, an array or a sequence can be split")
    if dim != 0:
        raise ValueError(f"{name} has type {type_of(value)}, without a dimension {dim!r}: leave the dimension out")
    return size


def _length_of_value(value: Any) -> int:
    """Return the number of items; -1 for a value that has none."""
    return len(value) if hasattr(value, "__len__") else -1


def _slice_part(value: Any, start: int, size: int, dim: Dimension) -> Any:
    if isinstance(value, torch.Tensor):
        return value.narrow(dim, start, size)  # type: ignore[arg-type]
    if isinstance(value, numpy.ndarray):
        assert isinstance(dim, int), "`_size_along` refuses names of an array's dimensions"
        return value[(slice(None),) * (dim % value.ndim) + (slice(start, start + size),)]
    return getattr(value, "iloc", value)[start : start + size]  # pandas: rows by position, not by label


def check_combination(how: str) -> None:
    """Raise ValueError if there is no such way to combine values."""
    if how not in COMBINATIONS:
        raise ValueError(f"values cannot be combined by {how!r}: {suggest_nearest(how, COMBINATIONS)}")


def combine_values(name: str, values: Mapping[str, Any], how: str = "cat", dim: Dimension = 0) -> Any:
    """Combine the values that a variable has on each worker.

    Args:
        name: The variable, for errors.
        values: By worker, at least one.
        how: "cat" joins tensors and arrays along a dimension, and sequences; "stack" makes a new dimension, of numbers
            a tensor; "sum" adds up; "list" makes a list.
        dim: The dimension for "cat" and "stack".

    Raises:
        ValueError: There is no such way, or the values do not fit together.
    """
    check_combination(how)
    parts = [*values.values()]
    if how == "list":
        return parts
    combination = next((each for kinds, each in _WAYS[how] if all(isinstance(part, kinds) for part in parts)), None)
    try:
        if combination is None:
            raise TypeError("no rule for these types")
        return combination(parts, dim)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        there = ", ".join(f"{worker} has {value_layout(part)}" for worker, part in values.items())
        along = "" if how == "sum" or not _has_dimensions(parts) else f" along dimension {dim}"
        text = f"{name} cannot be {COMBINATIONS[how]}{along}: {there}. Bring it back as a list"
        raise ValueError(text) from error


def _cat_tensors(parts: Sequence[Any], dim: Dimension) -> Any:
    if isinstance(dim, str):
        from rpcbench import named  # here: it has a table of all operators, which other cells do not need

        return named.cat(parts, dim)
    return torch.cat([*parts], dim)


def _sum_shaped(parts: Sequence[Any], _dim: Dimension) -> Any:
    if len({tuple(part.shape) for part in parts}) > 1:  # `+` would broadcast some of them
        raise ValueError("the shapes differ")
    return functools.reduce(operator.add, parts)


def _dimension_number(dim: Dimension) -> int:
    if isinstance(dim, str):
        raise ValueError(f"{dim!r} is no number of a dimension")
    return dim


_ARRAYS, _NUMBERS = (numpy.ndarray, numpy.generic), (int, float, complex)
_WAYS: dict[str, list[tuple[Any, Any]]] = {  # the first whose types all values have
    "cat": [
        (torch.Tensor, _cat_tensors),
        (numpy.ndarray, lambda parts, dim: numpy.concatenate(parts, axis=_dimension_number(dim))),
        *((kind, lambda parts, _: functools.reduce(operator.add, parts)) for kind in (list, tuple, str, bytes)),
    ],
    "stack": [
        (torch.Tensor, lambda parts, dim: torch.stack([*parts], _dimension_number(dim))),
        (_ARRAYS, lambda parts, dim: numpy.stack(parts, axis=_dimension_number(dim))),
        (_NUMBERS, lambda parts, _: torch.tensor([*parts])),
    ],
    "sum": [
        (torch.Tensor, _sum_shaped),
        (_ARRAYS, _sum_shaped),
        (_NUMBERS, lambda parts, _: sum(parts)),
    ],
}


def _has_dimensions(parts: Sequence[Any]) -> bool:
    return all(isinstance(part, torch.Tensor | numpy.ndarray) for part in parts)


def value_layout(value: object) -> str:
    """Return the dtype and shape of a tensor or array, the type of another value."""
    if isinstance(value, torch.Tensor):
        return layout_of(value)
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return type_of(value)
