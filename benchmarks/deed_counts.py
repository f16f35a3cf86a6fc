"""The cost of one deed, in counts that travel between machines: `count_deed`, `count_threads` and `count_messages`.

- Counts are of whole processes, all threads, dead ones too. The cost of reading them is subtracted.
- Python calls are counted by a profiler that slows everything down, so they have a run of their own, in processes that
  called `count_python_calls` before they started a thread.
"""

from __future__ import annotations

import gc
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

from benchmarks.rows import Operation

_WARM_UP = 20

_python_calls: dict[int, int] = {}  # by thread, which alone writes its number


class Counters(NamedTuple):
    """Of one process: CPU seconds, context switches (it waited | it had to make room), calls of Python functions."""

    cpu: float = 0.0
    voluntary: float = 0.0
    involuntary: float = 0.0
    python_calls: float = 0.0

    def minus(self, other: Counters) -> Counters:
        return Counters(*(mine - its for mine, its in zip(self, other, strict=True)))

    def shared_by(self, deeds: int) -> Counters:
        return Counters(*(each / deeds for each in self))


Reading = Callable[[], list[Counters]]
"""Reads the counters of all processes that take part, this one first."""


class DeedCount(NamedTuple):
    """Of one deed: the counters of each process, and the wall time in seconds."""

    processes: list[Counters]
    wall: float


class MessageTotal(NamedTuple):
    """Of one deed: how many messages all members send, and their bytes."""

    messages: float
    bytes: float


def count_python_calls() -> None:
    """Count them from now on, in this thread and in those that start later."""
    threading.setprofile(_count_call)
    sys.setprofile(_count_call)


def _count_call(frame: FrameType, event: str, arg: object) -> None:
    if event == "call":
        thread = threading.get_ident()
        _python_calls[thread] = _python_calls.get(thread, 0) + 1


def read_counters() -> Counters:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    calls = sum(read_threads().values())
    return Counters(time.process_time(), usage.ru_nvcsw, usage.ru_nivcsw, calls)


def read_threads() -> dict[int, int]:
    """Return the Python calls of each thread so far; none unless they are counted."""
    return dict(_python_calls)


def count_deed(operation: Operation, read: Reading, deeds: int) -> DeedCount:
    """Do it so many times, and share the cost. AssertionError where the result is wrong."""
    with operation.around():
        _check(operation)
        empty = _between(read(), read())
        before, begin = read(), perf_counter()
        for _ in range(deeds):
            operation.run()
        wall = perf_counter() - begin
        spent = _between(before, read())
    total = deeds * operation.calls
    return DeedCount([one.minus(own).shared_by(total) for one, own in zip(spent, empty, strict=True)], wall / total)


def count_threads(operation: Operation, read: Callable[[], list[dict[int, int]]], deeds: int) -> list[int]:
    """Return how many threads of each process take part: those that call a Python function in each deed."""
    with operation.around():
        _check(operation)
        before = read()
        for _ in range(deeds):
            operation.run()
        after = read()
    return [
        sum(calls - earlier.get(thread, 0) >= deeds for thread, calls in later.items())
        for earlier, later in zip(before, after, strict=True)
    ]


def count_messages(operation: Operation, deeds: int) -> MessageTotal:
    """The same for messages, which a trace of all members sees. Only with this package as the runtime."""
    from rpcbench.telemetry.trace import trace

    with operation.around():
        _check(operation)
        gc.collect()  # the RRefs of the deeds before
        with trace() as seen:
            for _ in range(deeds):
                operation.run()
    if not seen.complete:
        raise AssertionError("a member has not reported all messages")
    rows: Sequence[dict[str, Any]] = list(seen.view["messages"].values())
    total = deeds * operation.calls
    return MessageTotal(len(rows) / total, sum(row["bytes"] for row in rows) / total)


def _check(operation: Operation) -> None:
    for _ in range(_WARM_UP):
        result = operation.run()
    if not operation.right(result):
        raise AssertionError("the deed has returned a wrong result")


def _between(before: list[Counters], after: list[Counters]) -> list[Counters]:
    return [later.minus(earlier) for earlier, later in zip(before, after, strict=True)]
