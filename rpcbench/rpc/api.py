"""The functions of torch.distributed.rpc.api: calls, RRefs, who is there, and the end."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from types import BuiltinFunctionType
from typing import Any, ParamSpec, TypeVar, cast

from rpcbench.base.config import JOIN_SECONDS
from rpcbench.base.errors import NOT_INITIALIZED, WorkerLostError
from rpcbench.base.futures import Future, wait_all
from rpcbench.rpc import overloads
from rpcbench.rpc.agent import _get_current_rpc_agent
from rpcbench.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from rpcbench.rpc.gather import (
    AllGatherStates,
    _all_gather,
    _barrier,
    _broadcast_to_followers,
    _delete_all_user_and_unforked_owner_rrefs,
    _gather_to_leader,
    _rref_context_get_debug_info,
    _wait_all_workers,
    check_leaks,
)
from rpcbench.rpc.internal import (
    PythonUDF,
    RPCExecMode,
    _build_rpc_profiling_key,
    _internal_rpc_pickler,
    _run_pickled,
)
from rpcbench.rpc.overloads import NamedFunction
from rpcbench.rpc.profiling import profiled
from rpcbench.rpc.rref import RRef
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import WorkerInfo

__all__ = [
    "AllGatherStates",
    "RRef",
    "_all_gather",
    "_barrier",
    "_broadcast_to_followers",
    "_build_rpc_profiling_key",
    "_gather_to_leader",
    "_get_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_wait_all_workers",
    "get_worker_info",
    "method_factory",
    "new_method",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any] | str
PyRRef = RRef  # torch's name in C++
_Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]
logger = logging.getLogger(__name__)

_ignore_rref_leak = True
"""False: `shutdown` raises where RRefs are left."""
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()


# -- calls
def rpc_sync(
    to: int | str | WorkerInfo,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run `func(*args, **kwargs)` on worker `to` and return what it returns, or raise what it raises.

    `func` may be the name of a function in the callee's main namespace, or "module:name". timeout in seconds; 0 for
    none; default the agent's (60 s). RpcTimeoutError, WorkerLostError, SerializationError; NoOverloadError for an
    operator of torch that does not take these arguments.

    >>> rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 3))
    tensor([4., 4.])
    """
    function, args, kwargs = _prepare(func, args, kwargs)
    agent = current.current()
    event = profiled(agent, RPCExecMode.SYNC, func, to)
    if event is None:
        return agent.ask(to, function, args, kwargs, timeout)
    with event as until:
        future = until(_call(agent, to, (function, args, kwargs), timeout))
    return future.wait_or_cancel()


def rpc_async(
    to: int | str | WorkerInfo,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """As `rpc_sync`, returning a Future at once. Do not change argument tensors until it is done.

    >>> futures = [rpc.rpc_async(name, pow, (2, 10)) for name in ("worker1", "worker2")]
    >>> [future.wait() for future in futures]
    [1024, 1024]
    """
    call = _prepare(func, args, kwargs)
    agent = current.current()
    event = profiled(agent, RPCExecMode.ASYNC, func, to)
    if event is None:
        future = _call(agent, to, call, timeout)
    else:
        with event as until:
            future = until(_call(agent, to, call, timeout))
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def remote(
    to: int | str | WorkerInfo,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run `func(*args, **kwargs)` on worker `to` and leave the result there; an RRef of it, at once.

    >>> rref = rpc.remote("worker1", torch.arange, (5,))
    >>> rpc.rpc_sync("worker2", lambda rref: rref.to_here().sum(), (rref,))
    tensor(10)
    """
    call = _prepare(func, args, kwargs)
    agent = current.current()
    event = profiled(agent, RPCExecMode.REMOTE, func, to)
    if event is None:
        return cast("RRef[Any]", agent.create(to, *call, timeout))
    with event as until:
        rref = agent.create(to, *call, timeout)
        if rref._creation is not None:
            rref._creation = until(rref._creation)
    return cast("RRef[Any]", rref)


def _call(agent: Agent, to: int | str | WorkerInfo, call: _Call, timeout: float) -> Future[Any]:
    try:
        return agent.call(to, *call, timeout)
    except WorkerLostError as error:  # that it is gone is known already: no different from hearing of it later
        future: Future[Any] = Future()
        future.set_exception(error)
        return future


def _prepare(func: Function, args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> _Call:
    """What is really called over there. TypeError for what cannot be."""
    args, kwargs = arguments_of(args, kwargs)
    function = NamedFunction(func) if isinstance(func, str) else func
    if not callable(function):
        raise TypeError("function should be callable.")
    if type(function) is BuiltinFunctionType:
        overloads.check_overload(function, args, kwargs)
    if _default_pickler is not _internal_rpc_pickler:
        return _run_pickled, _default_pickler.serialize(PythonUDF(function, args, kwargs)), {}
    return function, args, kwargs


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """At the end of the block, wait for all that this thread began in it with `rpc_async`; raise the first error."""
    futures: list[Future[Any]] = []
    _thread_local_var.future_list = futures
    try:
        yield
    finally:
        del _thread_local_var.future_list
        wait_all(futures)


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Calls made in this block, in all threads, are packed by `rpc_pickler.serialize(obj) -> (bytes, tensors)`."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


# -- who is there
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Name and id of a worker, this one by default. RuntimeError for an unknown one."""
    agent = current.current()
    return WorkerInfo(agent.name, agent.id) if worker_name is None else agent.member(worker_name)


def wait_for(count: int, timeout: float = JOIN_SECONDS) -> None:
    """Wait until the world has `count` workers, this one among them; for worlds without a size.

    RpcError after `timeout` seconds; it names who came and, as far as it is known, who is missing.
    """
    current.current().wait_for(count, timeout)


def _to_worker_info(to: int | str | WorkerInfo) -> WorkerInfo:
    return current.current().member(to)


def get_rpc_timeout() -> float:
    """Seconds a call may take that names no timeout of its own; 0 for no limit."""
    return current.current().rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    given: object = seconds
    if not isinstance(given, Real):
        raise TypeError(f"incompatible function arguments: a timeout is in seconds, not {seconds!r}")
    current.current().rpc_timeout = seconds


# -- the agent
def _is_current_rpc_agent_set() -> bool:
    return current.find() is not None


def _set_and_start_rpc_agent(agent: Agent) -> None:
    """Speak through this agent from now on. It may be started already."""
    if not isinstance(agent, Agent):
        raise TypeError(f"an agent must be an rpcbench Agent, or derive from it, to take calls; not {agent!r}")
    current.adopt(agent)
    agent.ready.set()


def _init_rpc_states(agent: Any) -> None:
    """An agent that a backend has made becomes the current one, unless it is already. It serves calls from now on."""
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)
    elif isinstance(agent, Agent):
        agent.ready.set()


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    """For functions that need an agent: RuntimeError where there is none."""

    @functools.wraps(func)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_current_rpc_agent_set():
            raise RuntimeError(NOT_INITIALIZED)
        return func(*args, **kwargs)

    return checked


def enable_gil_profiling(flag: bool) -> None:
    """Measure how long calls wait for Python's lock here: `agent.gil_average_wait_time_us` in `get_metrics`."""
    _get_current_rpc_agent().enable_gil_profiling(flag)


# -- the end
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the world. Graceful: wait for calls in flight, and in a world of fixed size for all other workers; then
    let go of all RRefs.

    timeout in seconds bounds each wait, 0 waits without end. RuntimeError where RPC is not initialized, and where
    worker 0 was lost before all had come here; where `_ignore_rref_leak` is False also with a list of the RRefs that
    are left.
    """
    agent = current.current()
    agent.shutdown(graceful, timeout, last=lambda: _let_go(agent))
    if not _ignore_rref_leak:
        check_leaks(agent)


def _let_go(agent: Agent) -> None:
    if agent.machine.ask(lambda node: node.members.ended):
        gone = agent.roster.unreachable(0, "it is gone")
        raise WorkerLostError(f"the world of {agent.name} has ended before all were done: {gone}")
    with current.using(agent):
        _delete_all_user_and_unforked_owner_rrefs()


# -- names that torch exports from the loop that makes its RRef
def method_factory(method_name: str, docstring: str) -> Callable[..., Any]:
    """A method that calls the method of this name of the class above."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(type(self), self), method_name)(*args, **kwargs)

    method.__doc__ = docstring
    return method


new_method = method_factory("to_here", RRef.to_here.__doc__ or "")


def arguments_of(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of a call; None for none. TypeError for what cannot be any: a forgotten comma."""
    if args is not None and not isinstance(args, tuple | list):
        raise TypeError(f"args is a tuple or list of arguments, not {_a(args)}; for one argument write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"kwargs is a dict of named arguments, not {_a(kwargs)}")
    return tuple(args or ()), kwargs or {}


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
