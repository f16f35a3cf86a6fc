"""The fast path of the codec: calls of importable functions with plain data, and plain results.

Such a payload is a pickle of protocol 3, by which it differs from all others. It holds a plain value, or for a call a
tuple: module and name of the function, and its arguments. All values for which `encode_plain` or `encode_call` returns
None take the general path (`pickler`), also those of a class with a registered reducer.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Container
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from rpcbench.base.errors import ProtocolError
from rpcbench.wire.messages import Body

_PROTOCOL = 3
_BEGINS = bytes((0x80, _PROTOCOL))
_DATA = frozenset({bool, float, int, str, bytes, type(None)})
"""Types whose instances have no parts."""

Encoded = tuple[Body, list[torch.Tensor]]
"""A body, and the sender's own tensors in the order of its table."""
Find = Callable[[str, str], Any]
"""(module, name): returns the object there, imported if necessary; MissingCodeError if there is none."""


def encode_plain(value: Any) -> Encoded | None:
    """Encode a plain value; None for any other."""
    return _pickle_plain(value) if type(value) in _DATA else None


def _pickle_plain(value: Any) -> Encoded | None:
    """Pickle; None for bytes or a text above 4 GiB, for which this protocol has no code."""
    try:
        payload = pickle.dumps(value, _PROTOCOL)
    except OverflowError:
        return None
    return tuple.__new__(Body, (payload, b"", [])), []  # skips the constructor of the named tuple, which is slower


def encode_call(function: Any, args: tuple[Any, ...], reducers: Container[type]) -> Encoded | None:
    """Encode a call without keyword arguments; None if it needs the general path."""
    name = _function_name(function, reducers) if _DATA.issuperset(map(type, args)) else None
    return None if name is None else _pickle_plain((function.__module__, name, args))


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


def is_fast_payload(payload: bytes) -> bool:
    return payload[:2] == _BEGINS


def open_payload(value: Any, find: Find) -> Any:
    """Return the value, or the call (function, args, kwargs), of an unpickled payload. ProtocolError for any other."""
    if type(value) is not tuple:  # a plain value is never a tuple
        return value
    try:
        module, name, (*args,) = value
        holder = sys.modules.get(module)
        function = None if holder is None else getattr(holder, name, None)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"the peer sent a broken payload: {error}") from error
    return find(module, name) if function is None else function, tuple(args), {}
