"""The encoding of messages as control bytes and body, and its inverse, which validates: the protocol trusts its result.

Control bytes are the code of the type in one byte, the sequence number in eight, and the fields without the body as a
msgpack array. The decoder of a type is made from the annotations of its named tuple. It refuses missing and surplus
fields, other types (a bool is no count) and lengths beyond the end of the bytes, and makes the named tuples inside a
message with their types.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import GenericAlias
from typing import Any, get_type_hints

import msgspec

from rpcbench.base.errors import ProtocolError
from rpcbench.wire import messages
from rpcbench.wire.messages import EMPTY, KINDS, Body, Message, new_tuple

_HEAD = struct.Struct("<BQ")  # code of the type, sequence number
_HEAD_SIZE = _HEAD.size
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_HAS_BODY = frozenset(kind for kind in KINDS if "body" in kind._fields)


def _as_plain(value: Any) -> Any:
    """Return the value of a subclass of str, int or float, such as numpy's float64, as the base class has it."""
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"msgpack has no form for values of type {type(value).__name__}")


encode_plain: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_as_plain).encode
"""Returns the msgpack of numbers, strings, bytes, and lists, tuples and dicts of these."""

RECEIVED_BODY = tuple[bytes, bytes, list[bytearray]]
"""The parts of a `Body` that was encoded alone; tensors and arrays may use the writable buffers as their memory."""


def encode_message(seq: int, message: Message) -> tuple[bytes, Body]:
    """Encode a message as control bytes and body (EMPTY for a type without one)."""
    kind = type(message)
    fields, body = (message[:-1], message[-1]) if kind in _HAS_BODY else (message, EMPTY)
    head = _HEAD.pack(_CODES[kind], seq)
    try:
        return head + encode_plain(fields), body
    except UnicodeEncodeError:  # the text of an exception may be no valid Unicode, such as a file name
        return head + encode_plain(_escape_surrogates(fields)), body


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return [_escape_surrogates(each) for each in value] if isinstance(value, tuple) else value


def decode_message(control: bytes, body: Body) -> tuple[int, Any]:
    """Decode a message; return its sequence number and the message. ProtocolError for any other bytes."""
    try:
        code, seq = _HEAD.unpack_from(control)
        kind, has_body, decode = _DECODERS[code]
        fields = decode(control[_HEAD_SIZE:])
    except Exception as error:  # the bytes of a peer may fail in any of the steps above
        raise ProtocolError(f"the peer sent an invalid message: {error}") from error
    return seq, new_tuple(kind, (*fields, body)) if has_body else fields


def _make_decoder(kind: type[Any]) -> Callable[[bytes], Any]:
    hints = get_type_hints(kind)
    without_body = GenericAlias(tuple, tuple([hints[name] for name in kind._fields if name != "body"]))
    return msgspec.msgpack.Decoder(without_body if kind in _HAS_BODY else kind).decode


for record in vars(messages).values():
    if isinstance(record, type) and hasattr(record, "_field_defaults"):
        record._field_defaults = {}  # else msgspec gives missing fields their defaults
_DECODERS = [(kind, kind in _HAS_BODY, _make_decoder(kind)) for kind in KINDS]
