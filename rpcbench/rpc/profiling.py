"""Calls as events, until the reply, of torch's legacy profiler; its other profilers record their own process only."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from rpcbench.base.futures import Future, make_future
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.operator_memory import measures_allocations
from rpcbench.runtime.requests import function_label

enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether any profiler of torch records this thread: the cheap test before `profile_call`."""
_LEGACY = torch._C._profiler.ActiveProfilerType.LEGACY


class RPCExecMode(enum.Enum):
    """The kind of a call, for names in profiles."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name of a call in profiles: `rpc_sync#aten::add(worker0 -> worker1)`."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def _get_should_profile() -> bool:
    """Return whether the legacy profiler records this thread."""
    return enabled() and torch._C._autograd._profiler_type() == _LEGACY and not measures_allocations()


Until = Callable[[Future[Any]], Future[Any]]
"""Takes the future of a call; returns one that completes after the event of that call has ended."""


@contextlib.contextmanager
def _record_event(key: str) -> Iterator[Until]:
    with torch.autograd.profiler.record_function(key) as record:
        yield lambda future: _end_with_future(record, future)


def _end_with_future(record: Any, future: Future[Any]) -> Future[Any]:
    # A second future: a thread that waits for the first could read the profile before torch has ended the event.
    whole: Future[Any] = make_future(on_cancel=future.cancel)

    def pass_on(_: object) -> None:
        try:
            whole.set_result(future.value())
        except Exception as error:  # noqa: BLE001  (any error of the call is passed on)
            whole.set_exception(error)

    record._call_end_callbacks_on_future(future).add_done_callback(pass_on)
    future.complete_eagerly()  # torch's callback runs only once the reply has been unpacked
    return whole


def profile_call(
    agent: Agent, mode: RPCExecMode, func: Any, to: Any
) -> contextlib.AbstractContextManager[Until] | None:
    """Return a context manager for the start of a call, which yields an `Until`; None if no profiler records."""
    if not _get_should_profile():
        return None
    builtin = None if isinstance(func, str) else _find_builtin(func)  # type: ignore[no-untyped-call]
    name = func if isinstance(func, str) else builtin or function_label(func)
    return _record_event(_build_rpc_profiling_key(mode, name, agent.name, agent.member(to).name))
