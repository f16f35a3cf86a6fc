"""Calls in profiles of torch's legacy profiler, under torch's names: `rpc_sync#aten::add(worker0 -> worker1)`.

Such an event lasts until the answer is there. torch's other profilers see what runs in their own process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from rpcbench.agent.core import Agent
from rpcbench.agent.waiting import label_of
from rpcbench.rpc.internal import RPCExecMode, _build_rpc_profiling_key

_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_LEGACY = torch._C._profiler.ActiveProfilerType.LEGACY


def _get_should_profile() -> bool:
    """Whether the legacy profiler watches this thread."""
    return _enabled() and torch._C._autograd._profiler_type() == _LEGACY


@contextlib.contextmanager
def _event(key: str) -> Iterator[Callable[[Any], None]]:
    with torch.autograd.profiler.record_function(key) as record:
        yield lambda future: record._call_end_callbacks_on_future(future) and None


def _ignore(future: Any) -> None:
    return None


_NO_EVENT = contextlib.nullcontext(_ignore)


def profiled(
    agent: Agent, mode: RPCExecMode, func: Any, to: Any
) -> contextlib.AbstractContextManager[Callable[[Any], Any]]:
    """Around the start of a call; what it yields takes the future at whose end the event ends."""
    if not _enabled() or not _get_should_profile():
        return _NO_EVENT
    builtin = None if isinstance(func, str) else _find_builtin(func)  # type: ignore[no-untyped-call]
    name = func if isinstance(func, str) else builtin or label_of(func)
    return _event(_build_rpc_profiling_key(mode, name, agent.name, agent.member(to).name))
