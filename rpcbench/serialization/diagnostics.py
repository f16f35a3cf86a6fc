"""Diagnostics of values that cannot be pickled, or that are larger than their sender may expect.

Guarantees
- `find_fault` names the part of a value that cannot be pickled. It descends from the value to the deepest part that
  fails alone with the same error: through containers, attributes, closures and the globals that a function uses. It
  runs only after pickling has failed, for about a second at most: the path may end early, but is never wrong.
- `CapturedData` warns of large data that a function by value captures: a global of the notebook, a closure, a default.
  There is one warning per version of a function. No code of the user runs, and the number of steps is bounded: the
  size of a very large structure may be understated, never overstated.

Both descend through `iterate_parts`, which are candidates: a class with its own way of pickling may not send some of
them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import AsyncGeneratorType, CodeType, CoroutineType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch

from rpcbench.base.errors import SerializationError, format_bytes
from rpcbench.serialization.importable import is_importable
from rpcbench.serialization.tensor_types import unsendable_reason

Part = tuple[str, object]


def iterate_parts(value: object, path: str) -> Iterator[Part]:
    """Yield the path to each part of a value, and the part."""
    match value:
        case list() | tuple() | collections.deque():
            yield from ((f"{path}[{i}]", part) for i, part in enumerate(value))
        case set() | frozenset():
            yield from ((f"{path} (an element)", part) for part in value)
        case Mapping():
            yield from ((f"{path} (a key)", key) for key in value)
            yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
        case FunctionType():
            yield from ((f"{path} (its {where} {name!r})", part) for where, name, part in captured_objects(value))
        case MethodType():
            yield f"{path}.__self__", value.__self__
        case BaseException():
            yield f"{path}.args", value.args
        case functools.partial():
            yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
        case type():
            if not is_importable(value):
                yield from ((f"{path} (its {name!r})", member) for name, member in vars(value).items())
            return  # an importable class is sent by name, without its parts
        case torch.jit.ScriptModule():  # sent as one file
            return
        case torch.Tensor() if unsendable_reason(value):  # the tensor itself is at fault
            return
    yield from ((f"{path}.{name}", part) for name, part in _attributes_of(value).items())
    yield f"{path} (its class)", type(value)


def captured_objects(function: FunctionType) -> Iterator[tuple[str, str, object]]:
    """Yield the objects that a function sent by value captures: the kind of place, the name there, and the object."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is still empty
            yield "closure's", name, cell.cell_contents
    for name in dict.fromkeys(used_names(code)):
        if name in function.__globals__:
            yield "global", name, function.__globals__[name]
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    yield from (("default", name, part) for name, part in zip(names, defaults, strict=True))


def used_names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function uses, in its inner functions too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from used_names(inner)


def _attributes_of(value: object) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    return found


WORTH_A_WARNING = 4 << 20
"""Bytes of one captured object from which on there is a warning."""
_MOST_STEPS = 20_000  # parts that are weighed


class CapturedData:
    """The functions that one codec has checked for large captured data."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[CodeType] = weakref.WeakSet()

    def check_function(self, function: FunctionType) -> None:
        """Warn at the first use of a function if an object that it captures is large."""
        if function.__code__ in self._seen:  # by code: a function that a loop makes again has the same
            return
        self._seen.add(function.__code__)
        for where, name, part in captured_objects(function):
            try:
                size = data_size(part)
            except Exception:  # noqa: BLE001  (code of the user shows keys, and another thread may change a container)
                continue
            if size >= WORTH_A_WARNING:
                warnings.warn(_warning_text(function, where, name, size), stacklevel=_users_frame())


_COLLECTED = "a generator cannot leave its process. Send a function that collects its items, as lambda: list({}(...))"
_AWAITED = "a call does not await an async function. Send a function that runs it, as lambda: asyncio.run({}(...))"
_ITERATED = "a call does not iterate over an async generator. Send a function that runs it, and returns a list"
_REMEDIES = {GeneratorType: _COLLECTED, CoroutineType: _AWAITED, AsyncGeneratorType: _ITERATED}


def refuse_suspended(value: Any) -> NoReturn:
    """Raise the SerializationError for a coroutine or a generator, the results of async and generator functions."""
    remedy = _REMEDIES[type(value)].format(value.__name__)
    raise SerializationError(f"cannot pickle {type(value).__name__!r} object: {remedy}")


def data_size(value: object) -> int:
    """Return the approximate size of a value's data in bytes."""
    return sum(itertools.islice(_part_sizes(value), _MOST_STEPS))


def _part_sizes(value: object) -> Iterator[int]:
    seen = {id(value)}  # an object counts once, as in its pickle
    ahead = [value]
    while ahead:
        part = ahead.pop()
        yield _own_size(part)
        for _, inner in () if _by_name(part) else itertools.islice(iterate_parts(part, ""), _MOST_STEPS):
            if id(inner) not in seen:
                seen.add(id(inner))
                ahead.append(inner)


def _own_size(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return 0 if value.is_sparse or value.is_meta else value.nbytes
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, bytes | bytearray | str) else 0


def _by_name(value: object) -> bool:
    return isinstance(value, ModuleType) or (isinstance(value, FunctionType | type) and is_importable(value))


def _warning_text(function: FunctionType, where: str, name: str, size: int) -> str:
    return (
        f"function {function.__qualname__!r} takes its {where} {name!r} along, {format_bytes(size)} with every call. "
        "Make that once on the worker (in a %%remote cell, or with rpc.remote, and pass the RRef), or pass it as an "
        "argument where it is needed."
    )


def _users_frame() -> int:
    """Return the stack level of the nearest frame outside of rpcbench, to which the warning refers."""
    level = 1
    while (frame := sys._getframe(level)).f_back and frame.f_globals.get("__name__", "").startswith("rpcbench."):
        level += 1
    return level


_MOST_PROBES = 2000  # parts that are pickled on trial
_MOST_SECONDS = 1.0

Problem = Callable[[object], Exception | None]


def find_fault(
    value: object, label: str | tuple[str, ...], error: Exception, problem: Problem
) -> tuple[str, Exception]:
    """Return the path to the part of `value` that is at fault, and the error. `error` is that of the whole value;
    `problem(part)` returns the error of a part alone, or None."""
    path, inner = _first_parts(value, label)
    if isinstance(error, RecursionError):  # each part on the way down would fail alone, too
        return path, SerializationError("nested too deeply")
    above = {id(value): value}  # the path down to here: a cycle would lead back to it
    end = time.monotonic() + _MOST_SECONDS
    budget = itertools.takewhile(lambda _: time.monotonic() < end, range(_MOST_PROBES))
    while (found := _first_failing(inner, above, error, problem, budget)) is not None:
        path, part = found
        above[id(part)] = part
        inner = iterate_parts(part, path)
    return path, error


def _first_failing(
    inner: Iterator[Part], above: dict[int, object], error: Exception, problem: Problem, budget: Iterator[int]
) -> Part | None:
    for _, (name, part) in zip(budget, inner, strict=False):
        if id(part) not in above and _is_same_failure(problem(part), error):
            return name, part
    return None


def _is_same_failure(failure: Exception | None, error: Exception) -> bool:
    """Return whether a part fails with the error of the whole; else it is not the cause."""
    return type(failure) is type(error) and str(failure) == str(error)


def _first_parts(value: object, label: str | tuple[str, ...]) -> tuple[str, Iterator[Part]]:
    if isinstance(label, str):
        return label, iterate_parts(value, label)
    if not isinstance(value, tuple):
        return "value", iterate_parts(value, "value")
    return "value", iter(zip(label, value, strict=True))
