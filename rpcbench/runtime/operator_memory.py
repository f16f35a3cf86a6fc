"""The bytes that torch's operators allocate, by operator, while a profile asks for them.

torch reports an allocation only to the thread that started a profiler, and a profiler of all threads gets none. So each
thread that runs a cell or a call has torch's legacy profiler for that time, beside the one of all threads. Guarantees
- Only cells and calls that begin and end within the profile are counted. A thread with another profiler is left alone.
- Bytes are those of an operator and of the operators that it called, on all devices; what is freed is not subtracted.
- Where nobody asks for bytes, a cell costs one look at an attribute, and a call nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

UNKNOWN_BLOCK = b"Memory block of unknown size was allocated before the profiling started"
_legacy_config: Any = ProfilerConfig
_thread = threading.local()  # `meter`: whose block this thread is in


def measures_allocations() -> bool:
    """Return whether the legacy profiler of this thread is one of ours, which must not record calls."""
    return getattr(_thread, "meter", None) is not None


class AllocationMeter:
    """The sums of one profile in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards `_sums`
        self._sums: defaultdict[str, int] = defaultdict(int)
        # torch reports the first block, and then each thousandth, that is freed and was allocated before. Let that be
        # one of ours, where the caller drops the report.
        block = torch.ones(64)
        with self.measured_block():
            del block

    def collect_sums(self) -> dict[str, int]:
        """Return the bytes by operator, of all blocks that have ended."""
        with self._lock:
            return dict(self._sums)

    @contextlib.contextmanager
    def measured_block(self) -> Iterator[None]:
        """Count the allocations of this thread meanwhile."""
        try:
            _enable_profiler_legacy(_legacy_config(ProfilerState.CPU, False, True, *[False] * 3, _ExperimentalConfig()))
        except RuntimeError:  # the thread has one: of the program, or of an outer block
            yield
            return
        _thread.meter = self
        try:
            yield
        finally:
            leave_block()

    def add_events(self, threads: Iterable[Iterable[Any]]) -> None:
        """Add the events of torch's legacy profiler, by thread."""
        found = sum_allocations(threads)
        with self._lock:
            for name, size in found.items():
                self._sums[name] += size


def leave_block() -> None:
    """End the block that this thread is in, if any: torch's profilers must not end in it."""
    meter: AllocationMeter | None = getattr(_thread, "meter", None)
    if meter is not None:
        _thread.meter = None
        meter.add_events(_disable_profiler_legacy())


def sum_allocations(threads: Iterable[Iterable[Any]]) -> Mapping[str, int]:
    """Return the bytes allocated by each operator, with those that it called. Each event of an allocation counts for
    all operators that have begun and not ended on its thread, once for each name."""
    found: defaultdict[str, int] = defaultdict(int)
    for events in threads:
        inside: dict[int, str] = {}  # those that have begun, by handle
        for event in events:
            kind = event.kind()
            if kind == "push":
                inside[event.handle()] = event.name()
            elif kind == "pop":
                inside.pop(event.handle(), None)
            elif kind == "memory_alloc":
                size = max(0, event.cpu_memory_usage()) + max(0, event.cuda_memory_usage())
                for name in {*inside.values()} if size else ():
                    found[name] += size
    return found
