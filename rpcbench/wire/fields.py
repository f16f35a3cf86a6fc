"""What a peer says are the fields of a named tuple, checked against what the tuple says of them, and made anew.

Fields are numbers, text, bytes, such tuples, or tuples of any of these. A field `body` does not count: it travels
beside the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from rpcbench.base.errors import ProtocolError

_Make = Callable[[Any], Any]
"""What a field holds, made of what a peer says."""


class _Fields(NamedTuple):
    """How a kind is made: the types that its fields may have, and (place, make) of those that are made of others."""

    types: frozenset[tuple[type, ...]]
    made: tuple[tuple[int, _Make], ...]


_FIELDS: dict[type[Any], _Fields] = {}
_new = tuple.__new__


def know(*kinds: type[Any]) -> None:
    """Named tuples that may come; first those that others are made of."""
    for kind in kinds:
        hints = get_type_hints(kind)
        found = [_field(hints[name]) for name in kind._fields if name != "body"]
        types = frozenset(itertools.product(*[types for types, _ in found]))
        _FIELDS[kind] = _Fields(types, tuple([(place, make) for place, (_, make) in enumerate(found) if make]))


def rebuild(kind: type[Any], values: Any) -> Sequence[Any]:
    """The fields of a kind that is known. ProtocolError where they are not."""
    types, made = _FIELDS[kind]
    if type(values) is not tuple or tuple(map(type, values)) not in types:
        raise ProtocolError(f"no {kind.__name__} is made of {_shape(values)}")
    if not made:
        return values
    found = [*values]
    for place, make in made:
        if (value := found[place]) is not None:
            found[place] = make(value)
    return found


def _field(hint: Any) -> tuple[set[type], _Make | None]:
    """The types that a field may come with, and how it is made if it is not as it comes."""
    types: set[type] = set()
    make = None
    for option in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        if get_origin(option) is tuple:
            make = _many(get_args(option)[0])
        elif hasattr(option, "_fields"):
            make = _one(option)
        else:
            types |= {float, int} if option is float else {option}
    return (types | {tuple} if make else types), make


def _one(kind: type[Any]) -> _Make:
    assert kind in _FIELDS, f"{kind.__name__} is to be known before what it is part of"
    return lambda value: _new(kind, rebuild(kind, value))


def _many(kind: type[Any]) -> _Make:
    if hasattr(kind, "_fields"):
        one = _one(kind)
        return lambda value: tuple([one(item) for item in value])

    def same(value: Any) -> Any:
        if not {kind}.issuperset(map(type, value)):
            raise ProtocolError(f"a {_shape(value)} is no tuple of {kind.__name__}")
        return value

    return same


def _shape(value: Any) -> str:
    if type(value) is not tuple:
        return type(value).__name__
    return f"({', '.join([type(item).__name__ for item in value])})"
