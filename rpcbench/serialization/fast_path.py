"""The fast path of the codec: calls of importable functions with plain data and ordinary tensors, and plain results.

Such a payload is a pickle of protocol 3, by which it differs from all others. It holds a plain value, or for a call a
tuple: module and name of the function, and its arguments, in which `(number,)` stands for a tensor of the table and a
longer tuple is the name of an external that is not in the message. All values for which `encode_plain` or `encode_call`
returns None take the general path (`pickler`), also those of a class with a registered reducer.

Why there are two paths: on one machine a call with two small tensors, which returns one, takes 74 µs by this one and
by that of dense tensors (`tensors`), and 99 by the general path.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Container
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from rpcbench.base.errors import ProtocolError
from rpcbench.serialization.tensors import encode_dense
from rpcbench.wire.messages import Body

_PROTOCOL = 3
_BEGINS = bytes((0x80, _PROTOCOL))
_DATA = frozenset({bool, float, int, str, bytes, type(None)})
"""Types whose instances have no parts."""

_new = tuple.__new__  # skips the constructor of the named tuple, which is slower
Encoded = tuple[Body, list[torch.Tensor]]
"""A body, and the sender's own tensors in the order of its table."""
Name = Callable[[Any], "tuple[Any, ...] | None"]
"""Returns the name of an external that is sent by its name alone; else None."""
External = Callable[..., Any]
"""(*name): returns the external of that name."""
Find = Callable[[str, str], Any]
"""(module, name): returns the object there, imported if necessary; MissingCodeError if there is none."""


def encode_plain(value: Any) -> Encoded | None:
    """Encode a plain value; None for any other."""
    if type(value) not in _DATA or (payload := _pickle_plain(value)) is None:
        return None
    return _new(Body, (payload, b"", [])), []


def _pickle_plain(value: Any) -> bytes | None:
    """Pickle; None for bytes or a text above 4 GiB, for which this protocol has no code."""
    try:
        return pickle.dumps(value, _PROTOCOL)
    except OverflowError:
        return None


def encode_call(
    function: Any, args: tuple[Any, ...], reducers: Container[type], name_of: Name | None = None
) -> Encoded | None:
    """Encode a call without keyword arguments; None if it needs the general path."""
    name = _function_name(function, reducers)
    if name is None:
        return None
    if _DATA.issuperset(map(type, args)):
        payload = _pickle_plain((function.__module__, name, args))
        return None if payload is None else (_new(Body, (payload, b"", [])), [])
    tensors: list[torch.Tensor] = []
    parts: list[Any] = []
    for arg in args:
        if type(arg) in _DATA:
            parts.append(arg)
        elif is_ordinary(arg, reducers):
            parts.append((len(tensors),))
            tensors.append(arg)
        elif name_of is None or type(arg) in reducers or (found := name_of(arg)) is None or found in parts:
            return None  # two arguments with one name may be one object, whose identity only the general path keeps
        else:
            parts.append(found)
    table = encode_dense(tensors)  # None also if two arguments are one tensor
    if table is None or (payload := _pickle_plain((function.__module__, name, tuple(parts)))) is None:
        return None
    return _new(Body, (payload, *table)), tensors


def _function_name(function: Any, reducers: Container[type]) -> str | None:
    """Return the name of a function in its module; None if it cannot be sent by name."""
    kind = type(function)
    if kind in reducers:
        return None
    if kind is FunctionType:  # as `importable`, but for top-level functions only, in fewer steps
        name: str = function.__qualname__
        module = sys.modules.get(function.__module__)
        return name if getattr(module, name, None) is function and module is not sys.modules.get("__main__") else None
    return str(function.__name__) if kind is BuiltinFunctionType and has_name(function) else None


def has_name(builtin: Any) -> bool:
    """Return whether a C function is found in its module under its name, even if it is also a method of a class."""
    return getattr(sys.modules.get(builtin.__module__), builtin.__name__, None) is builtin


def is_ordinary(value: Any, reducers: Container[type]) -> bool:
    """Return whether a tensor is a candidate for `encode_dense`: of torch's class, without attributes or a reducer."""
    return type(value) is torch.Tensor and not vars(value) and torch.Tensor not in reducers


def is_fast_payload(payload: bytes) -> bool:
    """Return whether a payload is of the fast path."""
    return payload[:2] == _BEGINS


def open_payload(value: Any, received: list[torch.Tensor], find: Find, external: External | None = None) -> Any:
    """Return the value, or the call (function, args, kwargs), of an unpickled payload. ProtocolError for any other."""
    if type(value) is not tuple:  # a plain value is never a tuple
        return value
    try:
        module, name, args = value
        if tuple in map(type, args):
            args = tuple(
                [_resolve_reference(received, external, part) if type(part) is tuple else part for part in args]
            )
        holder = sys.modules.get(module)
        function = None if holder is None else getattr(holder, name, None)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"the peer sent a broken payload: {error}") from error
    return find(module, name) if function is None else function, args, {}


def _resolve_reference(received: list[torch.Tensor], external: External | None, part: tuple[Any, ...]) -> Any:
    """Return the tensor or external that a tuple among the arguments stands for."""
    return find_external(external, part) if len(part) > 1 else find_tensor(received, *part)


def find_external(external: External | None, name: tuple[Any, ...]) -> Any:
    if external is None:
        raise ProtocolError(f"a message mentions external {name}, where none can be")
    return external(*name)


def find_tensor(received: list[torch.Tensor], number: int) -> torch.Tensor:
    if not 0 <= number < len(received):
        raise ProtocolError(f"a message mentions tensor {number}, but has {len(received)}")
    return received[number]
