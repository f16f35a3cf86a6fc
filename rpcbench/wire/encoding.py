"""Messages as control bytes and body, and back. What comes back is checked, so machines may trust what they get.

Most messages are calls and answers that bring no RRefs. These have a form of their own, of fixed fields, whose first
byte no msgpack of ours begins with; it takes a third of the time, as numbers that a struct has read need no check:

    call      form, number, call, budget (NaN for none); its scope, if any; its label
    answer    form, number, call; its scope, if any
    scope     context, message, how many numbers are behind it (`_UNTOLD`: not told), and these

All other messages are msgpack: code of the kind, number, fields.

A msgpack packer has a buffer of a quarter of a megabyte, so packers are kept and used again, each by one thread at a
time: packing may set off a garbage collection, and with it any code, which packs something else on this thread.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import msgpack

from rpcbench.base.errors import ProtocolError
from rpcbench.wire import messages
from rpcbench.wire.messages import EMPTY, KINDS, Body, Call, Message, Result, Scope

TEXT = "surrogatepass"  # an exception may hold text that is no Unicode, such as a file name
_idle: list[Any] = []


def packed(data: Any) -> bytes:
    """Numbers, strings, bytes, lists, tuples and dicts of these."""
    try:
        packer = _idle.pop()
    except IndexError:
        packer = msgpack.Packer(unicode_errors=TEXT)
    result: bytes = packer.pack(data)
    _idle.append(packer)  # not where it failed: then something may be left in it
    return result


_CALL, _SCOPED_CALL, _RESULT, _SCOPED_RESULT = range(4)
_BEGIN_CALL, _BEGIN_RESULT = struct.Struct("<BQQd"), struct.Struct("<BQQ")
_CALL_SIZE, _RESULT_SIZE = _BEGIN_CALL.size, _BEGIN_RESULT.size
_SCOPE = struct.Struct("<QQB")
_UNTOLD = 255
_NAN = float("nan")
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_HAS_BODY = frozenset(kind for kind in KINDS if "body" in kind._fields)
_LOOKS = [(kind, kind in _HAS_BODY) for kind in KINDS]
_new = tuple.__new__  # a step less than the class itself takes
_unpackb = partial(msgpack.unpackb, use_list=False, strict_map_key=True, unicode_errors=TEXT)


def pack(seq: int, message: Message) -> tuple[bytes, Body]:
    """A message as control bytes and body (empty where the kind has none)."""
    kind = type(message)
    if (kind is Call or kind is Result) and not message.forks:
        try:
            return _quick(kind, seq, message)
        except struct.error:  # more than its fields can hold
            pass
    values, body = (message[:-1], message[-1]) if kind in _HAS_BODY else (message, EMPTY)
    return packed((_CODES[kind], seq, *values)), body


def _quick(kind: type[Any], seq: int, message: Any) -> tuple[bytes, Body]:
    if kind is Result:
        call, _, scope, body = message
        if scope is None:
            return _BEGIN_RESULT.pack(_RESULT, seq, call), body
        return _BEGIN_RESULT.pack(_SCOPED_RESULT, seq, call) + _scope(scope), body
    call, label, budget, _, scope, body = message
    text, until = label.encode("utf-8", TEXT), _NAN if budget is None else budget
    if scope is None:
        return _BEGIN_CALL.pack(_CALL, seq, call, until) + text, body
    return _BEGIN_CALL.pack(_SCOPED_CALL, seq, call, until) + _scope(scope) + text, body


def _scope(scope: Scope) -> bytes:
    context, message, behind = scope
    if behind is None:
        return _SCOPE.pack(context, message, _UNTOLD)
    if (count := len(behind)) >= _UNTOLD:
        raise struct.error
    return struct.pack(f"<QQB{count}Q", context, message, count, *behind)


def unpack(control: bytes, body: Body) -> tuple[int, Any]:
    """Number and message. ProtocolError for anything that `pack` cannot have made."""
    try:
        if (form := control[0]) <= _SCOPED_RESULT:
            return _unpacked(form, control, body)
        found: Any = _unpackb(control)
        code, seq = found[:2]
        if code < 0 or type(seq) is not int or seq < 0:
            raise ProtocolError(f"message number {seq!r} is not a count")
        kind, has_body = _LOOKS[code]
        values = messages.rebuild(kind, found[2:])
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"nonsense instead of a message: {error}") from error
    return seq, _new(kind, (*values, body) if has_body else values)


def _unpacked(form: int, control: bytes, body: Body) -> tuple[int, Any]:
    scope = None
    if form >= _RESULT:
        _, seq, call = _BEGIN_RESULT.unpack_from(control)
        end = _RESULT_SIZE
        if form == _SCOPED_RESULT:
            scope, end = _scoped(control, end)
        if end != len(control):
            raise ProtocolError("an answer is longer than it says")
        return seq, _new(Result, (call, (), scope, body))
    _, seq, call, budget = _BEGIN_CALL.unpack_from(control)
    end = _CALL_SIZE
    if form == _SCOPED_CALL:
        scope, end = _scoped(control, end)
    label = control[end:].decode("utf-8", TEXT)
    return seq, _new(Call, (call, label, None if budget != budget else budget, (), scope, body))


def _scoped(control: bytes, begin: int) -> tuple[Scope, int]:
    """The scope that begins there, and where it ends."""
    context, message, count = _SCOPE.unpack_from(control, begin)
    begin += _SCOPE.size
    if count == _UNTOLD:
        return _new(Scope, (context, message, None)), begin
    return _new(Scope, (context, message, struct.unpack_from(f"<{count}Q", control, begin))), begin + 8 * count
