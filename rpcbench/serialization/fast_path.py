"""The quick way for most calls, functions that go by name with plain data and ordinary tensors, and for plain results.

Such a payload begins as no other does, in an older protocol of pickle. It holds a plain value, or for a call a tuple:
module and name of the function, and its arguments, where `(number,)` stands for a tensor of the table, and a longer
tuple is the name of an external that the message does not have to bring. What `encode` answers with None takes the
general way (`pickling`), and so does what a reducer was registered for.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Container
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from rpcbench.base.errors import ProtocolError
from rpcbench.serialization.importable import has_name
from rpcbench.serialization.tensors import encode_dense
from rpcbench.wire.messages import Body

_PROTOCOL = 3
_BEGINS = bytes((0x80, _PROTOCOL))
_DATA = frozenset({bool, float, int, str, bytes, type(None)})
"""Types whose instances have nothing to look into."""

_new = tuple.__new__  # a step less than the class itself takes
Encoded = tuple[Body, list[torch.Tensor]]
"""A body, and the sender's own tensors in the order of its table."""
Name = Callable[[Any], "tuple[Any, ...] | None"]
"""The name of an external that goes by its name alone; else None."""
External = Callable[..., Any]
"""(*name): the external of that name."""
Find = Callable[[str, str], Any]
"""(module, name): what is there, imported if it has to be; an error that says what to do if it is not."""


def encode(value: Any) -> Encoded | None:
    """A plain value."""
    return (_new(Body, (pickle.dumps(value, _PROTOCOL), b"", [])), []) if type(value) in _DATA else None


def encode_call(
    function: Any, args: tuple[Any, ...], reducers: Container[type], name_of: Name | None = None
) -> Encoded | None:
    """A call without keyword arguments."""
    name = _name(function, reducers)
    if name is None:
        return None
    if _DATA.issuperset(map(type, args)):
        return _new(Body, (pickle.dumps((function.__module__, name, args), _PROTOCOL), b"", [])), []
    tensors: list[torch.Tensor] = []
    parts: list[Any] = []
    for arg in args:
        if type(arg) in _DATA:
            parts.append(arg)
        elif is_ordinary(arg, reducers):
            parts.append((len(tensors),))
            tensors.append(arg)
        elif name_of is None or type(arg) in reducers or (found := name_of(arg)) is None or found in parts:
            return None  # of two with one name, both may be one object
        else:
            parts.append(found)
    table = encode_dense(tensors)  # None as well where two are one
    if table is None:
        return None
    return _new(Body, (pickle.dumps((function.__module__, name, tuple(parts)), _PROTOCOL), *table)), tensors


def _name(function: Any, reducers: Container[type]) -> str | None:
    """Under which its module has this function."""
    kind = type(function)
    if kind in reducers:
        return None
    if kind is FunctionType:  # as `importable` of what is no one's attribute but its module's
        name: str = function.__qualname__
        module = sys.modules.get(function.__module__)
        return name if getattr(module, name, None) is function and module is not sys.modules.get("__main__") else None
    return str(function.__name__) if kind is BuiltinFunctionType and has_name(function) else None


def is_ordinary(value: Any, reducers: Container[type]) -> bool:
    """Whether `encode_dense` may do for this tensor."""
    return type(value) is torch.Tensor and not vars(value) and torch.Tensor not in reducers


def begins(payload: bytes) -> bool:
    """Whether a payload is of this form."""
    return payload[:2] == _BEGINS


def opened(value: Any, received: list[torch.Tensor], find: Find, external: External | None = None) -> Any:
    """What the pickle of such a payload says. ProtocolError for what `encode` cannot have made."""
    if type(value) is not tuple:
        return value
    try:
        module, name, args = value
        if tuple in map(type, args):
            args = tuple([_beside(received, external, part) if type(part) is tuple else part for part in args])
        holder = sys.modules.get(module)
        function = None if holder is None else getattr(holder, name, None)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"the peer sent a broken payload: {error}") from error
    return find(module, name) if function is None else function, args, {}


def _beside(received: list[torch.Tensor], external: External | None, part: tuple[Any, ...]) -> Any:
    """What a tuple among the arguments stands for."""
    if len(part) > 1:
        if external is None:
            raise ProtocolError(f"a message mentions external {part}, where none can be")
        return external(*part)
    (number,) = part
    if not 0 <= number < len(received):
        raise ProtocolError(f"a message mentions tensor {number}, but brings {len(received)}")
    return received[number]
