"""The functions of torch.distributed.rpc: init_rpc, shutdown, rpc_sync, rpc_async, remote, get_worker_info."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from rpcbench.agent import current
from rpcbench.agent.core import Agent
from rpcbench.agent.roster import WorkerInfo
from rpcbench.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from rpcbench.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from rpcbench.rpc.rendezvous import meet
from rpcbench.rpc.rref import RRef
from rpcbench.rpc.start import start_agent
from rpcbench.words.config import JOIN_SECONDS
from rpcbench.words.futures import Future


def is_available() -> bool:
    """Whether RPC can be used: always."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join a world of workers; returns when it is complete and this process serves calls.

    name: unique in the world. rank: this worker's id; worker 0 leads. world_size: how many workers to wait for, and
    that no others may join; None for a world where workers come and go. backend is accepted for torch's programs.
    RuntimeError where this process is in a world already, or the world refuses it.
    """
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if current.find() is not None:
        raise RuntimeError("RPC is already initialized in this process; call rpc.shutdown() first")
    options = rpc_backend_options or TensorPipeRpcBackendOptions()
    threads = getattr(options, "num_worker_threads", TensorPipeRpcBackendOptions().num_worker_threads)
    config = meet(name, options.init_method, rank, world_size, options.rpc_timeout, threads)
    start_agent(config, timeout=max(JOIN_SECONDS, options.rpc_timeout))


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the world. Graceful: wait for calls in flight, and in a world of fixed size for all other workers.

    timeout in seconds bounds each wait, 0 waits without end. RuntimeError where RPC is not initialized.
    """
    current.current().shutdown(graceful, timeout)


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Name and id of a worker, this one by default. RuntimeError for an unknown one."""
    agent = current.current()
    return WorkerInfo(agent.name, agent.id) if worker_name is None else agent.member(worker_name)


def rpc_sync(
    to: int | str | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run `func(*args, **kwargs)` on worker `to` and return what it returns, or raise what it raises.

    timeout in seconds; 0 for none; default the agent's (60 s). RpcTimeoutError, WorkerLostError, SerializationError.
    """
    return rpc_async(to, func, args, kwargs, timeout).wait_or_cancel()


def rpc_async(
    to: int | str | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """As `rpc_sync`, returning a Future at once. Do not change argument tensors until it is done."""
    if not callable(func):
        raise TypeError("function should be callable.")
    return current.current().call(to, func, args or (), kwargs, timeout)


def remote(
    to: int | str | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run `func(*args, **kwargs)` on worker `to` and leave the result there; an RRef of it, at once."""
    if not callable(func):
        raise TypeError("function should be callable.")
    return cast("RRef[Any]", current.current().create(to, func, args or (), kwargs, timeout))


def get_rpc_timeout() -> float:
    """Seconds a call may take that names no timeout of its own; 0 for no limit."""
    return current.current().rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    current.current().rpc_timeout = seconds


def _get_current_rpc_agent() -> Agent:
    return current.current()


def _is_current_rpc_agent_set() -> bool:
    return current.find() is not None
