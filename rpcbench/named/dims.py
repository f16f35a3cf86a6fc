"""Names of dimensions as tuples: which are allowed, what two tuples make together, where a name stands.

No tensor comes in here, so every rule about names can be read, and tried, by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rpcbench.base.errors import NamesError as NamesError

Names = tuple[str | None, ...]
"""One for each dimension; None where it has no name."""


def checked(names: Iterable[object], ndim: int) -> Names:
    """`names` as those of a tensor with `ndim` dimensions: identifiers, none twice, one for each."""
    given = tuple(names)
    for name in given:
        if name is not None and not (isinstance(name, str) and name.isidentifier()):
            raise NamesError(f"{name!r} is no name of a dimension: a name is an identifier such as 'N', or None")
    if len(given) != ndim:
        raise NamesError(f"{len(given)} names, {listed(given)}, for a tensor of {ndim} dimensions")
    return unique(given)  # type: ignore[arg-type]


def unique(names: Names) -> Names:
    """`names`, where none stands twice."""
    said = [name for name in names if name is not None]
    if len(set(said)) < len(said):
        twice = next(name for name in said if said.count(name) > 1)
        raise NamesError(f"{twice!r} would stand twice in {listed(names)}: rename one of them first")
    return names


def unify(first: Names, second: Names) -> Names:
    """The names of two tensors that broadcast: compared from the right, a name fits itself and None.

    A name that meets None must not stand elsewhere in the tensor without it: that is two tensors out of line.
    """
    if first == second:
        return first
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    offset = len(longer) - len(shorter)
    made = list(longer)
    for place, name in enumerate(shorter, offset):
        other = longer[place]
        if name == other:
            continue
        if name is not None and other is not None:
            raise _differ(first, second, place - len(longer))
        if (name or other) in (longer if other is None else shorter):
            raise _misaligned(first, second, str(name or other))
        made[place] = name or other
    return tuple(made)


def _differ(first: Names, second: Names, position: int) -> NamesError:
    return NamesError(
        f"at position {position} (from the right) the first has {first[position]!r} and the second "
        f"{second[position]!r}. Bring them in line by second.align_as(first), or rename one"
    )


def _misaligned(first: Names, second: Names, name: str) -> NamesError:
    one, other = (names.index(name) - len(names) for names in (first, second))
    return NamesError(
        f"{name!r} stands at position {one} of the first and {other} of the second (from the right), next to a "
        "dimension without a name. Bring them in line by second.align_as(first), once all dimensions have names"
    )


def position(dim: Any, names: Names) -> Any:
    """The index of a dimension that is named, or given as an index already; lists and tuples of them likewise."""
    if isinstance(dim, str):
        if dim not in names:
            raise NamesError(f"no dimension {dim!r} in {listed(names)}")
        return names.index(dim)
    if isinstance(dim, list | tuple):
        return tuple(position(each, names) for each in dim)
    return dim


def listed(names: Sequence[object]) -> str:
    """`(N, C)`; a dimension without a name is `None`."""
    return f"({', '.join(map(str, names))})"


def shown(names: Names, shape: Sequence[int]) -> str:
    """`(N=32, C=3)`; a dimension without a name is its size alone."""
    return listed([f"{name}={size}" if name else size for name, size in zip(names, shape, strict=True)])
