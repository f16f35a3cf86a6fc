"""What a value consists of, as pickling would come upon it: items, attributes, and what functions capture.

A list of candidates, not of facts: a class that says itself how it is pickled may leave some of them behind.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from rpcbench.wire.identity import importable
from rpcbench.wire.kinds import unsendable

Part = tuple[str, object]


def parts(value: object, path: str) -> Iterator[Part]:
    """The path to each part of a value, and the part."""
    match value:
        case list() | tuple() | collections.deque():
            yield from ((f"{path}[{i}]", part) for i, part in enumerate(value))
        case set() | frozenset():
            yield from ((f"{path} (an element)", part) for part in value)
        case Mapping():
            yield from ((f"{path} (a key)", key) for key in value)
            yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
        case FunctionType():
            yield from ((f"{path} (its {where} {name!r})", part) for where, name, part in captured(value))
        case MethodType():
            yield f"{path}.__self__", value.__self__
        case BaseException():
            yield f"{path}.args", value.args
        case functools.partial():
            yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
        case type():
            if not importable(value):
                yield from ((f"{path} (its {name!r})", member) for name, member in vars(value).items())
            return
        case torch.jit.ScriptModule():
            return
        case torch.Tensor() if unsendable(value):
            return
    yield from ((f"{path}.{name}", part) for name, part in _attributes(value).items())
    yield f"{path} (its class)", type(value)


def captured(function: FunctionType) -> Iterator[tuple[str, str, object]]:
    """What a function takes along when it goes by value: where it has that from, the name there, and the object."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is bound yet
            yield "closure's", name, cell.cell_contents
    for name in dict.fromkeys(_names(code)):
        if name in function.__globals__:
            yield "global", name, function.__globals__[name]
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    yield from (("default", name, part) for name, part in zip(names, defaults, strict=True))


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function mentions, also in the functions within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _attributes(value: object) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    return found
