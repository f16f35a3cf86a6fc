"""The functions of torch.distributed.rpc.api: calls, RRefs, members of the world, and shutdown."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from types import BuiltinFunctionType
from typing import Any, ParamSpec, TypeVar, cast

from rpcbench.base.config import JOIN_SECONDS
from rpcbench.base.errors import NOT_INITIALIZED, WorkerLostError
from rpcbench.base.futures import Future, wait_all
from rpcbench.rpc import functions
from rpcbench.rpc.agent import _get_current_rpc_agent
from rpcbench.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from rpcbench.rpc.functions import NamedFunction
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
from rpcbench.rpc.profiling import RPCExecMode, _build_rpc_profiling_key, profile_call
from rpcbench.rpc.profiling import enabled as profiler_enabled
from rpcbench.rpc.rref import RRef
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import WorkerInfo

__all__ = [
    "AllGatherStates", "RRef", "_all_gather", "_barrier", "_broadcast_to_followers", "_build_rpc_profiling_key",
    "_gather_to_leader", "_get_current_rpc_agent", "_rref_context_get_debug_info", "_wait_all_workers",
    "get_worker_info", "remote", "rpc_async", "rpc_sync", "shutdown",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any] | str
PyRRef = RRef  # torch's name for it in C++
_Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]
logger = logging.getLogger(__name__)

_ignore_rref_leak = True
"""If False, `shutdown` raises where RRefs are left."""
pack_call: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], _Call] | None = None
"""Packs each call, while a pickler of torch's interface is in use: see `torch_shim.compat.internal`."""
_thread_local_var = threading.local()  # `future_list`, inside a `_wait_all` block


# -- calls
def rpc_sync(
    to: int | str | WorkerInfo,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run `func(*args, **kwargs)` on worker `to`, and return its result or raise its error.

    Args:
        to: Name, id or WorkerInfo of the worker.
        func: A callable, the name of a function in the callee's main namespace, or "module:name".
        args: Positional arguments, a tuple or list.
        kwargs: Named arguments.
        timeout: Seconds until RpcTimeoutError; 0 for no limit; by default the agent's timeout (60 s).

    Raises:
        RpcTimeoutError: No result arrived in time.
        WorkerLostError: The worker is lost.
        SerializationError: The arguments or the result cannot be pickled.
        NoOverloadError: `func` is an operator of torch that does not take these arguments; nothing was sent.

    >>> rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 3))
    tensor([4., 4.])
    """
    function, args, kwargs = _prepare_call(func, args, kwargs)
    agent = current.current_agent()
    event = profile_call(agent, RPCExecMode.SYNC, func, to) if profiler_enabled() else None
    if event is None:  # `ask` creates no future; with one, small calls took 9 to 23 % longer
        return agent.ask(to, function, args, kwargs, timeout)
    with event as until:
        future = until(_call_agent(agent, to, (function, args, kwargs), timeout))
    return future.wait_or_cancel()


def rpc_async(
    to: int | str | WorkerInfo,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Run `func(*args, **kwargs)` on worker `to`, and return a Future of its result at once.

    Do not change argument tensors until the future is done.

    Args:
        to, func, args, kwargs, timeout: As of `rpc_sync`.

    Returns:
        A Future with the result, or with one of the errors of `rpc_sync`.

    Raises:
        NoOverloadError: As of `rpc_sync`; nothing was sent.

    >>> futures = [rpc.rpc_async(name, pow, (2, 10)) for name in ("worker1", "worker2")]
    >>> [future.wait() for future in futures]
    [1024, 1024]
    """
    call = _prepare_call(func, args, kwargs)
    agent = current.current_agent()
    event = profile_call(agent, RPCExecMode.ASYNC, func, to) if profiler_enabled() else None
    if event is None:
        future = _call_agent(agent, to, call, timeout)
    else:
        with event as until:
            future = until(_call_agent(agent, to, call, timeout))
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
    """Run `func(*args, **kwargs)` on worker `to`, leave the result there, and return an RRef of it at once.

    Args:
        to, func, args, kwargs, timeout: As of `rpc_sync`. The timeout bounds the creation, not later uses.

    Returns:
        An RRef that raises the error of `func` where its value is used.

    Raises:
        NoOverloadError: As of `rpc_sync`; nothing was sent.

    >>> rref = rpc.remote("worker1", torch.arange, (5,))
    >>> rpc.rpc_sync("worker2", lambda rref: rref.to_here().sum(), (rref,))
    tensor(10)
    """
    call = _prepare_call(func, args, kwargs)
    agent = current.current_agent()
    event = profile_call(agent, RPCExecMode.REMOTE, func, to) if profiler_enabled() else None
    if event is None:
        return cast("RRef[Any]", agent.create(to, *call, timeout))
    with event as until:
        rref = agent.create(to, *call, timeout)
        if rref._creation is not None:
            rref._creation = until(rref._creation)
    return cast("RRef[Any]", rref)


def _call_agent(agent: Agent, to: int | str | WorkerInfo, call: _Call, timeout: float) -> Future[Any]:
    try:
        return agent.call(to, *call, timeout)
    except WorkerLostError as error:  # the caller gets one form of the error, whether the loss comes before or after
        future: Future[Any] = Future()
        future.set_exception(error)
        return future


def _prepare_call(func: Function, args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> _Call:
    """Return the call that is sent to the callee. Raises TypeError for a function or arguments that cannot be sent."""
    args, kwargs = arguments_of(args, kwargs)
    function = NamedFunction(func) if isinstance(func, str) else func
    if not callable(function):
        raise TypeError("function should be callable.")
    if type(function) is BuiltinFunctionType:
        functions.check_overload(function, args, kwargs)
    return (function, args, kwargs) if pack_call is None else pack_call(function, args, kwargs)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait at the end of the block for all `rpc_async` calls that this thread made in it; raise the first error."""
    futures: list[Future[Any]] = []
    _thread_local_var.future_list = futures
    try:
        yield
    finally:
        del _thread_local_var.future_list
        wait_all(futures)


def __getattr__(name: str) -> Any:
    # names of the module in torch
    if name in ("PythonUDF", "_default_pickler", "_internal_rpc_pickler", "_use_rpc_pickler"):
        return getattr(importlib.import_module("rpcbench.torch_shim.compat.internal"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# -- members
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Return name and id of a worker, by default of this one. Raises RuntimeError for an unknown one."""
    agent = current.current_agent()
    return WorkerInfo(agent.name, agent.id) if worker_name is None else agent.member(worker_name)


def wait_for(count: int, timeout: float = JOIN_SECONDS) -> None:
    """Wait until the world has `count` workers, including this one; for worlds without a fixed size.

    Args:
        count: Number of workers.
        timeout: Seconds.

    Raises:
        RpcError: The timeout has passed. Names the workers that came and, as far as known, those that are missing.
    """
    current.current_agent().wait_for(count, timeout)


def _to_worker_info(to: int | str | WorkerInfo) -> WorkerInfo:
    return current.current_agent().member(to)


def get_rpc_timeout() -> float:
    """Return the timeout in seconds of calls that name none; 0 for no limit."""
    return current.current_agent().calls.rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    given: object = seconds
    if not isinstance(given, Real):
        raise TypeError(f"incompatible function arguments: a timeout is in seconds, not {seconds!r}")
    current.current_agent().calls.rpc_timeout = seconds


# -- the agent
def _is_current_rpc_agent_set() -> bool:
    return current.find_current() is not None


def _set_and_start_rpc_agent(agent: Agent) -> None:
    """Make this agent the current one; it may be started already."""
    if not isinstance(agent, Agent):
        raise TypeError(f"an agent must be an rpcbench Agent, or derive from it, to take calls; not {agent!r}")
    current.register_agent(agent)
    agent.links.bootstrap.ready.set()


def _init_rpc_states(agent: Any) -> None:
    """Make an agent from a backend the current one, unless it is already, and let it serve calls."""
    # Calls of peers wait for `ready`: a function that they run may use the current agent.
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)
    elif isinstance(agent, Agent):
        agent.links.bootstrap.ready.set()


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise RuntimeError where there is no agent."""

    @functools.wraps(func)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_current_rpc_agent_set():
            raise RuntimeError(NOT_INITIALIZED)
        return func(*args, **kwargs)

    return checked


def enable_gil_profiling(flag: bool) -> None:
    """Measure how long calls wait for the GIL here: `agent.gil_average_wait_time_us` in `get_metrics`."""
    _get_current_rpc_agent().enable_gil_profiling(flag)


# -- shutdown
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the world.

    Args:
        graceful: First wait for calls in flight, and in a world of fixed size for all other workers; then release all
            RRefs.
        timeout: Seconds that bound each wait; 0 for no limit.

    Raises:
        RuntimeError: RPC is not initialized; worker 0 was lost before all workers had called `shutdown`; or RRefs are
            left, which it lists, where `_ignore_rref_leak` is False.
    """
    agent = current.current_agent()
    agent.shutdown(graceful, timeout, last=lambda: _let_go(agent))
    if not _ignore_rref_leak:
        check_leaks(agent)


def _let_go(agent: Agent) -> None:
    if agent.machine.read_node(lambda node: node.members.ended):
        gone = agent.links.members.unreachable_error(0, "it is gone")
        raise WorkerLostError(f"the world of {agent.name} has ended before all were done: {gone}")
    with current.use_agent(agent):
        _delete_all_user_and_unforked_owner_rrefs()


# -- names that torch exports because they are left over from the loop that builds its RRef
def method_factory(method_name: str, docstring: str) -> Callable[..., Any]:
    """Return a method that calls the base class's method of this name."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(type(self), self), method_name)(*args, **kwargs)

    method.__doc__ = docstring
    return method


new_method = method_factory("to_here", RRef.to_here.__doc__ or "")


def arguments_of(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of a call; None stands for none. Raises TypeError for other types."""
    # A tensor, or a string, is iterable too: without this check `args=(x)` would call with its elements.
    if args is not None and not isinstance(args, tuple | list):
        raise TypeError(
            f"args is a tuple or list of arguments, not {_with_article(args)}; for one argument write args=(x,)"
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"kwargs is a dict of named arguments, not {_with_article(kwargs)}")
    return tuple(args or ()), kwargs or {}


def _with_article(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
