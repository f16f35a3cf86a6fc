"""Calls in profiles of torch's legacy profiler, under torch's names: `rpc_sync#aten::add(worker0 -> worker1)`.

Such an event lasts until the answer is there. torch's other profilers see what runs in their own process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from rpcbench.base.futures import Future
from rpcbench.rpc.internal import (
    RPCExecMode,
    _build_rpc_profiling_key,
)
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import label_of

_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_LEGACY = torch._C._profiler.ActiveProfilerType.LEGACY


def _get_should_profile() -> bool:
    """Whether the legacy profiler watches this thread."""
    return _enabled() and torch._C._autograd._profiler_type() == _LEGACY


Until = Callable[[Future[Any]], Future[Any]]
"""Takes the future at whose end the event ends; who waits for the one it returns finds the event in the profile."""


@contextlib.contextmanager
def _event(key: str) -> Iterator[Until]:
    with torch.autograd.profiler.record_function(key) as record:
        yield lambda future: _ended(record, future)


def _ended(record: Any, future: Future[Any]) -> Future[Any]:
    whole: Future[Any] = Future(on_cancel=future.cancel)

    def pass_on(_: object) -> None:
        try:
            whole.set_result(future.value())
        except Exception as error:  # noqa: BLE001  (whatever the call raised)
            whole.set_exception(error)

    record._call_end_callbacks_on_future(future).add_done_callback(pass_on)
    future.follow()
    return whole


def profiled(agent: Agent, mode: RPCExecMode, func: Any, to: Any) -> contextlib.AbstractContextManager[Until] | None:
    """Around the start of a call, see `Until`; None where nobody watches."""
    if not _enabled() or not _get_should_profile():
        return None
    builtin = None if isinstance(func, str) else _find_builtin(func)  # type: ignore[no-untyped-call]
    name = func if isinstance(func, str) else builtin or label_of(func)
    return _event(_build_rpc_profiling_key(mode, name, agent.name, agent.member(to).name))
