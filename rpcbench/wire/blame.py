"""Which part of a value cannot travel: looked for only after pickling has failed.

The search walks from the value to the deepest part that fails on its own with the same error, through containers,
attributes, closures and the globals a function mentions. It gives up on the way down, not on the error: the path may
end early, never wrongly. It takes a second or so at most, however large the value.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from rpcbench.base.errors import SerializationError
from rpcbench.wire.parts import Part, parts

_MOST_PROBES = 2000
_MOST_SECONDS = 1.0

Problem = Callable[[object], Exception | None]


def blame(value: object, label: str | tuple[str, ...], error: Exception, problem: Problem) -> tuple[str, Exception]:
    """The path to the part of `value` that is to blame, and its error.

    `error` is what the whole value failed with; `problem(part)` says why a part fails alone, or None.
    """
    path, inner = _start(value, label)
    if isinstance(error, RecursionError):  # every part on the way down would fail alone, too
        return path, SerializationError("nested too deeply")
    above = {id(value): value}
    end = time.monotonic() + _MOST_SECONDS
    budget = itertools.takewhile(lambda _: time.monotonic() < end, range(_MOST_PROBES))
    while (found := _first_failing(inner, above, error, problem, budget)) is not None:
        path, part = found
        above[id(part)] = part
        inner = parts(part, path)
    return path, error


def _first_failing(
    inner: Iterator[Part], above: dict[int, object], error: Exception, problem: Problem, budget: Iterator[int]
) -> Part | None:
    for _, (name, part) in zip(budget, inner, strict=False):
        if id(part) not in above and _same(problem(part), error):
            return name, part
    return None


def _same(failure: Exception | None, error: Exception) -> bool:
    """Whether a part fails as the whole did: if not, the whole does not fail because of it."""
    return type(failure) is type(error) and str(failure) == str(error)


def _start(value: object, label: str | tuple[str, ...]) -> tuple[str, Iterator[Part]]:
    if isinstance(label, str):
        return label, parts(value, label)
    if not isinstance(value, tuple):
        return "value", parts(value, "value")
    return "value", iter(zip(label, value, strict=True))
