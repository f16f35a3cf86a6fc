"""Which part of a value cannot travel: looked for only after pickling has failed.

The search walks from the value to the deepest part that fails on its own with the same error, through containers,
attributes, closures and the globals a function mentions. It gives up on the way down, not on the error: the path may
end early, never wrongly. It takes a second or so at most, however large the value.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from rpcbench.wire.identity import importable
from rpcbench.wire.kinds import unsendable
from rpcbench.words.errors import SerializationError

_MOST_PROBES = 2000
_MOST_SECONDS = 1.0

Problem = Callable[[object], Exception | None]
_Part = tuple[str, object]


def blame(value: object, label: str | tuple[str, ...], error: Exception, problem: Problem) -> tuple[str, Exception]:
    """The path to the part of `value` that is to blame, and its error.

    `error` is what the whole value failed with; `problem(part)` says why a part fails alone, or None.
    """
    path, parts = _start(value, label)
    if isinstance(error, RecursionError):  # every part on the way down would fail alone, too
        return path, SerializationError("nested too deeply")
    above = {id(value): value}
    end = time.monotonic() + _MOST_SECONDS
    budget = itertools.takewhile(lambda _: time.monotonic() < end, range(_MOST_PROBES))
    while (found := _first_failing(parts, above, error, problem, budget)) is not None:
        path, part = found
        above[id(part)] = part
        parts = _parts(part, path)
    return path, error


def _first_failing(
    parts: Iterator[_Part], above: dict[int, object], error: Exception, problem: Problem, budget: Iterator[int]
) -> _Part | None:
    for _, (name, part) in zip(budget, parts, strict=False):
        if id(part) not in above and _same(problem(part), error):
            return name, part
    return None


def _same(failure: Exception | None, error: Exception) -> bool:
    """Whether a part fails as the whole did: if not, the whole does not fail because of it."""
    return type(failure) is type(error) and str(failure) == str(error)


def _start(value: object, label: str | tuple[str, ...]) -> tuple[str, Iterator[_Part]]:
    if isinstance(label, str):
        return label, _parts(value, label)
    if not isinstance(value, tuple):
        return "value", _parts(value, "value")
    return "value", iter(zip(label, value, strict=True))


def _parts(value: object, path: str) -> Iterator[_Part]:
    match value:
        case list() | tuple() | collections.deque():
            yield from ((f"{path}[{i}]", part) for i, part in enumerate(value))
        case set() | frozenset():
            yield from ((f"{path} (an element)", part) for part in value)
        case Mapping():
            yield from ((f"{path} (a key)", key) for key in value)
            yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
        case FunctionType():
            yield from _code_parts(value, path)
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


def _code_parts(function: FunctionType, path: str) -> Iterator[_Part]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is bound yet
            yield f"{path} (its closure's {name!r})", cell.cell_contents
    used = [name for name in _names(code) if name in function.__globals__]
    yield from ((f"{path} (its global {name!r})", function.__globals__[name]) for name in used)
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    yield from ((f"{path} (its default {name!r})", part) for name, part in zip(names, defaults, strict=True))


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
