"""What a peer says are the fields of a named tuple, checked against what the tuple says of them, and made anew.

Fields are numbers, text, bytes, such tuples, or tuples of any of these. A field `body` does not count: it travels
beside the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from rpcbench.words.errors import ProtocolError
from rpcbench.words.ids import Id


class _Field(NamedTuple):
    """How one field is checked and rebuilt: plain types, a named tuple, or a tuple of either (`many`)."""

    plain: tuple[type, ...]
    record: type[Any] | None
    many: bool
    as_is: frozenset[type]  # exact types that need no second look


def _field(hint: Any) -> _Field:
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    plain: list[type] = []
    nothing = frozenset((NoneType,)) if NoneType in options else frozenset()
    for option in options:
        if get_origin(option) is tuple:
            return _Field((tuple, NoneType) if NoneType in options else (tuple,), get_args(option)[0], True, nothing)
        if isinstance(option, type) and hasattr(option, "_fields"):
            return _Field((tuple, NoneType) if NoneType in options else (tuple,), option, False, nothing)
        plain += [float, int] if option is float else [option]
    return _Field(tuple(plain), None, False, frozenset(plain))


def _layout(kind: type[Any]) -> tuple[_Field, ...]:
    hints = get_type_hints(kind)
    return tuple(_field(hints[name]) for name in kind._fields if name != "body")


_Make = Callable[[Any], Any]
"""What a field holds, from what a peer says; None where that is not as it should be."""


class _Fields(NamedTuple):
    """How all fields of a kind are rebuilt at once: the types that they may have, and (place, make) of those that are
    made of others."""

    types: frozenset[tuple[type, ...]]
    made: tuple[tuple[int, _Make], ...]


_LAYOUTS: dict[type[Any], tuple[_Field, ...]] = {}
_FIELDS: dict[type[Any], _Fields] = {}
_new = tuple.__new__


def know(*kinds: type[Any]) -> None:
    """Named tuples that may come; first those that others are made of."""
    for kind in kinds:
        layout = _LAYOUTS[kind] = _layout(kind)
        exact = [field.as_is | ({tuple} if field.record else set()) for field in layout]
        makes = tuple((place, _make(field)) for place, field in enumerate(layout) if field.record)
        _FIELDS[kind] = _Fields(frozenset(itertools.product(*exact)), makes)


def _make(field: _Field) -> _Make:
    record = field.record
    assert record is not None
    if record not in _LAYOUTS:
        assert field.many, f"{record.__name__} is to be known before what it is part of"

        def same(value: Any) -> Any:
            return value if {record}.issuperset(map(type, value)) else None

        return same

    def one(value: Any) -> Any:
        found = _at_once(record, value)
        return None if found is None else _new(record, found)

    def many(value: Any) -> Any:
        found = [one(item) for item in value]
        return None if None in found else tuple(found)

    return many if field.many else one


def _at_once(kind: type[Any], values: Any) -> list[Any] | None:
    """The fields of a kind that is known; None where anything is wrong."""
    types, made = _FIELDS[kind]
    if type(values) is not tuple or tuple(map(type, values)) not in types:
        return None
    found = [*values]
    for place, make in made:
        if (value := found[place]) is not None:
            found[place] = make(value)
            if found[place] is None:
                return None
    return found


class Usual(NamedTuple):
    """How one kind looks that needs no second look: the types of its fields, any of these, with nothing in the tuple at
    the place `empty`, and an Id in those at the places `ids`."""

    types: frozenset[tuple[type, ...]]
    empty: int | None
    ids: tuple[int, ...]


def usual(kind: type[Any]) -> Usual:
    """Of a kind that is known."""
    layout = _LAYOUTS[kind]
    many = [place for place, field in enumerate(layout) if field.many]
    ids = [place for place, field in enumerate(layout) if field.record is Id and field.plain == (tuple,)]
    exact = [field.as_is | ({tuple} if place in many + ids else set()) for place, field in enumerate(layout)]
    types = frozenset(itertools.product(*exact)) if len(many) < 2 else frozenset()
    return Usual(types, many[0] if many else None, tuple(ids))


def quickly(look: Usual, values: tuple[Any, ...]) -> Sequence[Any] | None:
    """The fields, where they look as usual."""
    types, empty, ids = look
    if tuple(map(type, values)) not in types or (empty is not None and values[empty]):
        return None
    return _with_ids(values, ids) if ids else values


def _with_ids(values: tuple[Any, ...], ids: tuple[int, ...]) -> list[Any] | None:
    found = [*values]
    for place in ids:
        if tuple(map(type, found[place])) != (int, int, int):
            return None
        found[place] = _new(Id, found[place])
    return found


def rebuild(kind: type[Any], fields: Any) -> list[Any]:
    """The fields of a kind that is known. ProtocolError where they are not."""
    if (found := _at_once(kind, fields)) is not None:
        return found
    layout = _LAYOUTS[kind]
    if len(fields) != len(layout):
        raise ProtocolError(f"{kind.__name__} has {len(layout)} fields, not {len(fields)}")
    values = []
    for field, value in zip(layout, fields, strict=True):
        if type(value) in field.as_is or (value == () and field.many):
            values.append(value)
        else:
            values.append(_check(kind, field, value))
    return values


def _check(kind: type[Any], field: _Field, value: Any) -> Any:
    plain: tuple[Any, ...] = field.plain
    if not isinstance(value, plain):
        raise ProtocolError(f"a field of {kind.__name__} holds a {type(value).__name__}")
    if field.record is None or value is None or (field.many and not value):
        return value
    record = field.record
    if not field.many:
        return record(*rebuild(record, value))
    if record in _LAYOUTS:
        return tuple([record(*rebuild(record, item)) for item in value])
    if wrong := set(map(type, value)) - {record}:
        raise ProtocolError(f"a field of {kind.__name__} holds a {wrong.pop().__name__}")
    return value
