"""Profiles, by torch's legacy profiler, of all calls that a worker serves in a block, in all its threads.

profile = rpc.remote("worker1", rpc._server_process_global_profile)
profile.rpc_sync().__enter__()
...
profile.rpc_sync().__exit__(None, None, None)
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import profiler_legacy, profiler_util
from torch.autograd.profiler_legacy import profile

from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent

__all__: list[str] = []
_autograd: Any = torch.autograd
_parse: Any = profiler_legacy._parse_legacy_records
_EventList: Any = profiler_util.EventList
_profiler: Any = torch.profiler


class _ActiveProfiles:
    """The running profiles of one agent; each records every call."""

    def __init__(self, agent: Agent) -> None:
        self._lock = threading.Lock()
        self._records: dict[int, tuple[Any, list[Any]]] = {}  # number of a profile: its config, its records
        self._numbers = itertools.count()
        agent.hooks.around.append(self._record_call)

    def begin_profile(self, config: Any) -> int:
        """Start a profile, and return its number."""
        with self._lock:
            number = next(self._numbers)
            self._records[number] = (config, [])
        return number

    def end_profile(self, number: int) -> list[Any]:
        """End a profile, and return its records, one for each call."""
        with self._lock:
            return self._records.pop(number)[1]

    @contextlib.contextmanager
    def _record_call(self) -> Iterator[None]:
        with self._lock:
            watching = list(self._records.values())
        if not watching or _autograd._profiler_enabled():  # enabled: a call to this worker itself, profiled already
            yield
            return
        _autograd._enable_profiler_legacy(watching[-1][0])  # torch allows one per thread, so the latest config holds
        try:
            yield
        finally:
            record = _autograd._disable_profiler_legacy()
            for _, records in watching:
                records.append(record)


class _server_process_global_profile(profile):  # noqa: N801  (torch's name)
    """torch.autograd.profiler_legacy.profile for the threads that serve calls here.

    After the block `function_events` has all events, and `process_global_function_events` a list for each served call.
    """

    def __enter__(self) -> _server_process_global_profile | None:
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        kind = _autograd.ProfilerState.CUDA if self.use_cuda else _autograd.ProfilerState.CPU
        config = _autograd.ProfilerConfig(
            kind, self.record_shapes, self.profile_memory, False, False, False, _profiler._ExperimentalConfig()
        )
        self._number = current.current_agent().part(_ActiveProfiles).begin_profile(config)
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.enabled:
            return
        records = current.current_agent().part(_ActiveProfiles).end_profile(self._number)
        self.process_global_function_events = [
            sorted(_parse(record), key=lambda event: (event.time_range.start, -event.time_range.end))
            for record in records
        ]
        flat = list(itertools.chain.from_iterable(self.process_global_function_events))
        device = "cuda" if self.use_cuda else None
        self.function_events = _EventList(flat, use_device=device, profile_memory=self.profile_memory)
        self.function_events._build_tree()
