"""Warns of large data that a function by value takes along unasked: a global of the notebook, a closure, a default.

Guarantees
- One warning per version of a function, however often it is sent. Nothing of the user's runs to find the size.
- Looking takes a bounded number of steps: of a very large structure the size may be understated, never overstated.
"""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

import numpy as np
import torch

from rpcbench.wire.identity import importable
from rpcbench.wire.parts import captured, parts

WORTH_A_WARNING = 4 << 20
"""Bytes that one captured object may have without a word."""
_MOST_STEPS = 20_000


class CapturedData:
    """What one codec has looked at already."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[CodeType] = weakref.WeakSet()

    def look(self, function: FunctionType) -> None:
        """Warn if a part of what this function takes along is large; the first time it is asked."""
        if function.__code__ in self._seen:
            return
        self._seen.add(function.__code__)
        for where, name, part in captured(function):
            size = weight(part)
            if size >= WORTH_A_WARNING:
                warnings.warn(_warning(function, where, name, size), stacklevel=_users_frame())


def weight(value: object) -> int:
    """About how many bytes of data a value has."""
    return sum(itertools.islice(_weights(value), _MOST_STEPS))


def _weights(value: object) -> Iterator[int]:
    seen = {id(value)}
    ahead = [value]
    while ahead:
        part = ahead.pop()
        yield _own(part)
        for _, inner in () if _by_name(part) else parts(part, ""):
            if id(inner) not in seen:
                seen.add(id(inner))
                ahead.append(inner)


def _own(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return 0 if value.is_sparse or value.is_meta else value.nbytes
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, bytes | bytearray | str) else 0


def _by_name(value: object) -> bool:
    return isinstance(value, ModuleType) or (isinstance(value, FunctionType | type) and importable(value))


def _warning(function: FunctionType, where: str, name: str, size: int) -> str:
    return (
        f"function {function.__qualname__!r} takes its {where} {name!r} along, {size / 2**20:.1f} MB with every call. "
        "Make that once on the worker (in a %%remote cell, or with rpc.remote, and pass the RRef), or pass it as an "
        "argument where it is needed."
    )


def _users_frame() -> int:
    """How far up the stack the code is that is not ours."""
    level = 1
    while (frame := sys._getframe(level)).f_back and frame.f_globals.get("__name__", "").startswith("rpcbench."):
        level += 1
    return level
