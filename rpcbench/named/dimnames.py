"""Names of dimensions as tuples: which are allowed, how two tuples unify, and how the methods of tensors change them.

Rule: no function here takes a tensor, so every rule about names can be read and tested by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rpcbench.base.errors import NamesError as NamesError

Names = tuple[str | None, ...]
"""One for each dimension; None for a dimension without a name."""


def check_names(names: Iterable[object], ndim: int) -> Names:
    """Return `names` for a tensor. NamesError unless they are `ndim` identifiers or None, no name twice."""
    given = tuple(names)
    for name in given:
        if name is not None and not (isinstance(name, str) and name.isidentifier()):
            raise NamesError(f"{name!r} is no name of a dimension: a name is an identifier such as 'N', or None")
    if len(given) != ndim:
        raise NamesError(f"{len(given)} names, {format_names(given)}, for a tensor of {ndim} dimensions")
    return check_unique(given)  # type: ignore[arg-type]


def check_unique(names: Names) -> Names:
    """Return `names`; NamesError if one occurs twice."""
    said = [name for name in names if name is not None]
    if len(set(said)) < len(said):
        twice = next(name for name in said if said.count(name) > 1)
        raise NamesError(f"{twice!r} would occur twice in {format_names(names)}: rename one of them first")
    return names


def unify_names(first: Names, second: Names) -> Names:
    """Return the names of two tensors that broadcast: compared from the right, a name matches itself and None. A name
    that matches None must not occur elsewhere in the tensor without it: such tensors are misaligned."""
    if first == second:
        return first
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    offset = len(longer) - len(shorter)  # broadcasting aligns from the right
    made = list(longer)
    for place, name in enumerate(shorter, offset):
        other = longer[place]
        if name == other:
            continue
        if name is not None and other is not None:
            at = place - len(longer)
            raise NamesError(
                f"at position {at} (from the right) the first has {first[at]!r} and the second {second[at]!r}. Bring "
                "them in line by second.align_as(first), or rename one"
            )
        only = name or other  # the one that is not None
        if only in (longer if other is None else shorter):
            one, two = (names.index(only) - len(names) for names in (first, second))
            raise NamesError(
                f"{only!r} is at position {one} of the first and {two} of the second (from the right), next to a "
                "dimension without a name. Bring them in line by second.align_as(first), once all dimensions have names"
            )
        made[place] = only
    return tuple(made)


def dimension_index(dim: Any, names: Names) -> Any:
    """Return the index of a dimension given by name or index; lists and tuples of them likewise."""
    if isinstance(dim, str):
        if dim not in names:
            raise NamesError(f"no dimension {dim!r} in {format_names(names)}")
        return names.index(dim)
    if isinstance(dim, list | tuple):
        return tuple(dimension_index(each, names) for each in dim)
    return dim


def format_names(names: Sequence[object]) -> str:
    """Return `(N, C)`; a dimension without a name is `None`."""
    return f"({', '.join(map(str, names))})"


def format_named_shape(names: Names, shape: Sequence[int]) -> str:
    """Return `(N=32, C=3)`; a dimension without a name is its size alone."""
    return format_names([f"{name}={size}" if name else size for name, size in zip(names, shape, strict=True)])


def rename_names(names: Names, given: Sequence[Any], mapping: Mapping[str, str | None]) -> Names:
    """Return the names after `rename`: new names in order, with `...` for unchanged ones, or new names for old ones."""
    if given and mapping:
        raise NamesError("new names come in order, or each for an old one (N='batch'), not both ways")
    if given or not mapping:
        return check_names(_fill_ellipsis(given, names), len(names))
    if unknown := [name for name in mapping if name not in names]:
        raise NamesError(f"there is no dimension {unknown[0]!r} to rename")
    return check_names([mapping.get(name, name) if name else None for name in names], len(names))


def refine_names(names: Names, given: Sequence[Any]) -> Names:
    """Return the names after `refine_names`: names for dimensions without one; the others must not change."""
    made = check_names(_fill_ellipsis(given, names), len(names))
    for place, (old, new) in enumerate(zip(names, made, strict=True)):
        if old not in (None, new):
            raise NamesError(f"{old!r} at position {place} cannot become {new!r}: rename changes a name")
    return made


def align_names(names: Names, given: Sequence[Any]) -> Names:
    """Return the names of a tensor aligned to `given`, in which `...` means all names that are not listed."""
    if None in names:  # such a dimension could not be found again
        raise NamesError("give all its dimensions names first, by refine_names")
    left = tuple(name for name in names if name not in given)
    dots = _find_ellipsis(given)
    wanted = given if dots is None else (*given[:dots], *left, *given[dots + 1 :])
    made = check_names(wanted, len(wanted))
    if None in made:
        raise NamesError(f"{format_names(made)}: None is no name to align to")
    if missing := [name for name in names if name not in made]:
        raise NamesError(f"{format_names(made)} leaves out {format_names(missing)}")
    return made


def flatten_names(
    names: Names, start_dim: Any = 0, end_dim: Any = -1, out_dim: str | None = None, dims: Any = None
) -> tuple[int, int, Names]:
    """Return first and last of the dimensions that become one, and the names afterwards. Called as `("C", "W",
    "features")`, with indices or names, or as `(["C", "H", "W"], "features")`."""
    chosen = start_dim if dims is None else dims
    if not isinstance(chosen, list | tuple):
        first, last = _dimension_indices(names, (start_dim, end_dim))
        return first, last, _merge_names(names, first, last, out_dim)
    out_dim = out_dim if dims is not None or out_dim is not None else end_dim  # (dims, out_dim), by position
    order = _dimension_indices(names, chosen)
    if not order or order != [*range(order[0], order[0] + len(order))]:
        raise NamesError(f"{format_names(chosen)} are not adjacent in this order: call align_to first")
    return order[0], order[-1], _merge_names(names, order[0], order[-1], out_dim)


def _merge_names(names: Names, first: int, last: int, name: str | None) -> Names:
    if first > last:
        raise NamesError(f"dimension {first} is not before {last}")
    return check_names((*names[:first], name, *names[last + 1 :]), max(len(names) - last + first, 1))


def unflatten_names(names: Names, dim: Any, sizes: Any) -> tuple[int, list[int], Names]:
    """Return the dimension that becomes several, their sizes, and the names afterwards."""
    parts = [*(sizes.items() if isinstance(sizes, Mapping) else sizes)]
    if not parts:
        raise NamesError("give at least one name and size")
    pairs = [part if isinstance(part, tuple | list) else (None, part) for part in parts]  # (name, size), or a size
    (place,) = _dimension_indices(names, (dim,))
    new = check_unique(tuple(name for name, _ in pairs))
    made = check_names((*names[:place], *new, *names[place + 1 :]), len(names) - 1 + len(new))
    return place, [size for _, size in pairs], made


def _dimension_indices(names: Names, dims: Sequence[Any]) -> list[int]:
    """Return indices from 0; negative ones count from the right."""
    return [dimension_index(dim, names) % max(len(names), 1) for dim in dims]


def _find_ellipsis(given: Sequence[Any]) -> int | None:
    found = [place for place, name in enumerate(given) if name is ... or name == "..."]
    if len(found) > 1:
        raise NamesError("'...' stands for all names that are left: it can be there once")
    return found[0] if found else None


def _fill_ellipsis(given: Sequence[Any], names: Names) -> tuple[Any, ...]:
    """Return `given` with its `...` replaced by those of `names` at the same positions."""
    dots = _find_ellipsis(given)
    if dots is None:
        return tuple(given)
    behind = len(given) - dots - 1
    return (*given[:dots], *names[dots : max(dots, len(names) - behind)], *given[dots + 1 :])
