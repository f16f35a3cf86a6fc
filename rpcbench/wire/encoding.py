"""The encoding of messages as control bytes and body, and its inverse, which validates: the protocol trusts its result.

Most messages are calls and results without RRefs. They have a compact form of fixed fields, whose first byte (0 to 3)
begins no msgpack array; it takes a third of the time, as integers read by a struct need no validation:

    call      form, sequence number, call, budget (NaN for none); its scope, if any; its label
    result    form, sequence number, call; its scope, if any
    scope     context, message, count of the sends behind it (`_UNTOLD`: not given), and their numbers

All other messages are a msgpack array: code of the type, sequence number, fields. `rebuild` validates received fields
against the annotations of the named tuple before it makes one.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from functools import partial
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgpack

from rpcbench.base.errors import ProtocolError
from rpcbench.base.ids import Id
from rpcbench.wire.messages import (
    EMPTY,
    KINDS,
    Awaited,
    Body,
    Call,
    Device,
    Devices,
    Fork,
    Loss,
    Mapped,
    Member,
    Message,
    Origin,
    Past,
    Result,
    Scope,
    Settled,
    new_tuple,
)

TEXT = "surrogatepass"  # the text of an exception may be no valid Unicode, such as a file name
# Packers to reuse: each has a buffer of 256 KB. A packer is taken out of the list while it packs, as packing may start
# a garbage collection, which may run any code on this thread, and this code may pack as well.
_idle: list[Any] = []


def packed(data: Any) -> bytes:
    """Return the msgpack of numbers, strings, bytes, and lists, tuples and dicts of these."""
    try:
        packer = _idle.pop()
    except IndexError:
        packer = msgpack.Packer(unicode_errors=TEXT)
    result: bytes = packer.pack(data)
    _idle.append(packer)  # not after an error, which may leave bytes in it
    return result


_CALL, _SCOPED_CALL, _RESULT, _SCOPED_RESULT = range(4)
_BEGIN_CALL, _BEGIN_RESULT = struct.Struct("<BQQd"), struct.Struct("<BQQ")
_CALL_SIZE, _RESULT_SIZE = _BEGIN_CALL.size, _BEGIN_RESULT.size
_SCOPE = struct.Struct("<QQB")
_UNTOLD = 255  # in place of the count, which is one byte
_NAN = float("nan")
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_HAS_BODY = frozenset(kind for kind in KINDS if "body" in kind._fields)
_LOOKS = [(kind, kind in _HAS_BODY) for kind in KINDS]
_unpackb = partial(msgpack.unpackb, use_list=False, strict_map_key=True, unicode_errors=TEXT)


def pack(seq: int, message: Message) -> tuple[bytes, Body]:
    """Encode a message as control bytes and body (EMPTY for a type without one)."""
    kind = type(message)
    if (kind is Call or kind is Result) and not message.forks:
        try:
            return _pack_fast(kind, seq, message)
        except struct.error:  # a value is larger than its fixed field: msgpack has the size for it
            pass
    values, body = (message[:-1], message[-1]) if kind in _HAS_BODY else (message, EMPTY)
    return packed((_CODES[kind], seq, *values)), body


def _pack_fast(kind: type[Any], seq: int, message: Any) -> tuple[bytes, Body]:
    if kind is Result:
        call, _, scope, body = message
        if scope is None:
            return _BEGIN_RESULT.pack(_RESULT, seq, call), body
        return _BEGIN_RESULT.pack(_SCOPED_RESULT, seq, call) + _pack_scope(scope), body
    call, label, budget, _, scope, body = message
    text, until = label.encode("utf-8", TEXT), _NAN if budget is None else budget
    if scope is None:
        return _BEGIN_CALL.pack(_CALL, seq, call, until) + text, body
    return _BEGIN_CALL.pack(_SCOPED_CALL, seq, call, until) + _pack_scope(scope) + text, body


def _pack_scope(scope: Scope) -> bytes:
    context, message, behind = scope
    if behind is None:
        return _SCOPE.pack(context, message, _UNTOLD)
    if (count := len(behind)) >= _UNTOLD:
        raise struct.error  # too many for one byte: `pack` falls back to msgpack
    return struct.pack(f"<QQB{count}Q", context, message, count, *behind)


def unpack(control: bytes, body: Body) -> tuple[int, Any]:
    """Decode a message; return its sequence number and the message. ProtocolError for any other bytes."""
    try:
        if (form := control[0]) <= _SCOPED_RESULT:
            return _unpack_fast(form, control, body)
        found: Any = _unpackb(control)
        code, seq = found[:2]
        if code < 0 or type(seq) is not int or seq < 0:
            raise ProtocolError(f"the sequence number {seq!r} of a message is invalid")
        kind, has_body = _LOOKS[code]
        values = rebuild(kind, found[2:])
    except ProtocolError:
        raise
    except Exception as error:  # the bytes of a peer may fail in any of the steps above
        raise ProtocolError(f"the peer sent an invalid message: {error}") from error
    return seq, new_tuple(kind, (*values, body) if has_body else values)


def _unpack_fast(form: int, control: bytes, body: Body) -> tuple[int, Any]:
    scope = None
    if form >= _RESULT:
        _, seq, call = _BEGIN_RESULT.unpack_from(control)
        end = _RESULT_SIZE
        if form == _SCOPED_RESULT:
            scope, end = _unpack_scope(control, end)
        if end != len(control):
            raise ProtocolError("a result is longer than its fields")
        return seq, new_tuple(Result, (call, (), scope, body))
    _, seq, call, budget = _BEGIN_CALL.unpack_from(control)
    end = _CALL_SIZE
    if form == _SCOPED_CALL:
        scope, end = _unpack_scope(control, end)
    label = control[end:].decode("utf-8", TEXT)
    return seq, new_tuple(Call, (call, label, None if budget != budget else budget, (), scope, body))  # only NaN != NaN


def _unpack_scope(control: bytes, begin: int) -> tuple[Scope, int]:
    """Return the scope that begins at `begin`, and the offset of its end."""
    context, message, count = _SCOPE.unpack_from(control, begin)
    begin += _SCOPE.size
    if count == _UNTOLD:
        return new_tuple(Scope, (context, message, None)), begin
    return new_tuple(Scope, (context, message, struct.unpack_from(f"<{count}Q", control, begin))), begin + 8 * count


# -- the validation of fields
_Make = Callable[[Any], Any]
"""Makes the value of a field from a received value, or raises ProtocolError."""


class _FieldTypes(NamedTuple):
    """How `rebuild` validates and makes one type of message."""

    types: frozenset[tuple[type, ...]]  # all allowed combinations of the types of its fields: one look-up validates
    made: tuple[tuple[int, _Make], ...]  # (index, make) of the fields that are named tuples, or tuples of values


_FIELDS: dict[type[Any], _FieldTypes] = {}


def know(*kinds: type[Any]) -> None:
    """Register named tuples that may be received; a tuple comes after those that its fields consist of."""
    for kind in kinds:
        hints = get_type_hints(kind)
        found = [_field_types(hints[name]) for name in kind._fields if name != "body"]
        types = frozenset(itertools.product(*[types for types, _ in found]))
        _FIELDS[kind] = _FieldTypes(types, tuple([(place, make) for place, (_, make) in enumerate(found) if make]))


def rebuild(kind: type[Any], values: Any) -> Sequence[Any]:
    """Return the fields of a registered type, made from received values. ProtocolError for invalid ones."""
    types, made = _FIELDS[kind]
    if type(values) is not tuple or tuple(map(type, values)) not in types:  # exact types: a bool is no count
        raise ProtocolError(f"a {kind.__name__} cannot have the fields {_describe_shape(values)}")
    if not made:
        return values
    found = [*values]
    for place, make in made:
        if (value := found[place]) is not None:
            found[place] = make(value)
    return found


def _field_types(hint: Any) -> tuple[set[type], _Make | None]:
    """Return the types that a received field may have, and how to make its value, if it is not used as received."""
    types: set[type] = set()
    make = None
    for option in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        if get_origin(option) is tuple:
            make = _tuple_maker(get_args(option)[0])
        elif hasattr(option, "_fields"):
            make = _record_maker(option)
        else:
            types |= {float, int} if option is float else {option}  # as in annotations, an int is a float
    return (types | {tuple} if make else types), make


def _record_maker(kind: type[Any]) -> _Make:
    assert kind in _FIELDS, f"{kind.__name__} is to be known before the tuples that it is part of"
    return lambda value: new_tuple(kind, rebuild(kind, value))


def _tuple_maker(kind: type[Any]) -> _Make:
    if hasattr(kind, "_fields"):
        one = _record_maker(kind)
        return lambda value: tuple([one(item) for item in value])

    def same(value: Any) -> Any:
        if not {kind}.issuperset(map(type, value)):
            raise ProtocolError(f"a {_describe_shape(value)} is no tuple of {kind.__name__}")
        return value

    return same


def _describe_shape(value: Any) -> str:
    if type(value) is not tuple:
        return type(value).__name__
    return f"({', '.join([type(item).__name__ for item in value])})"


know(Id, Fork, Scope, Origin, Awaited, Settled, Device, Mapped, Devices, Member, Loss, Past, *KINDS)
