"""A drop-in for `torch.distributed.rpc`; its import starts no thread and loads neither IPython nor zmq."""

from __future__ import annotations

import importlib
from typing import Any

from rpcbench.autograd import _get_debug_info as _autograd_debug_info
from rpcbench.base.futures import Future
from rpcbench.rpc import api, backend_registry, constants, functions, options
from rpcbench.rpc.agent import RpcAgent
from rpcbench.rpc.api import (
    AllGatherStates,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    enable_gil_profiling,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
    wait_for,
)
from rpcbench.rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from rpcbench.rpc.constants import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
)
from rpcbench.rpc.gather import _delete_all_user_and_unforked_owner_rrefs, _rref_context_get_debug_info
from rpcbench.rpc.init import (
    _init_rpc_backend,
    init_rpc,
    is_available,
)
from rpcbench.rpc.options import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    _is_tensorpipe_available,
    _TensorPipeRpcBackendOptionsBase,
)
from rpcbench.rpc.rref import RRef
from rpcbench.runtime.current import cancelled
from rpcbench.runtime.members import WorkerInfo

__all__ = [
    "_DEFAULT_INIT_METHOD", "_DEFAULT_NUM_WORKER_THREADS", "_DEFAULT_RPC_TIMEOUT_SEC", "_UNSET_RPC_TIMEOUT",
    "AllGatherStates", "BackendType", "BackendValue", "Future", "RRef", "RpcAgent", "RpcBackendOptions",
    "TensorPipeRpcBackendOptions", "WorkerInfo", "_TensorPipeRpcBackendOptionsBase",
    "_delete_all_user_and_unforked_owner_rrefs", "_get_current_rpc_agent", "_init_rpc_backend",
    "_is_current_rpc_agent_set", "_is_tensorpipe_available", "_rref_context_get_debug_info",
    "_set_and_start_rpc_agent", "_set_rpc_timeout", "api", "backend_registered", "backend_registry", "cancelled",
    "constants", "construct_rpc_backend_options", "enable_gil_profiling", "functions", "get_rpc_timeout",
    "get_worker_info", "init_backend", "init_rpc", "is_available", "options", "register_backend", "remote",
    "rpc_async", "rpc_sync", "shutdown", "wait_for",
]  # fmt: skip

# torch's other names for the same classes and functions
PyRRef = RRef
TensorPipeAgent = RpcAgent
method_factory, new_method = api.method_factory, api.new_method

_COMPAT = {  # module of torch_shim.compat, loaded on first use -> its names here; it is itself one in torch
    "internal": (),
    "server_process_global_profiler": ("_server_process_global_profile",),
    "early_names": ("RpcBackend", "init_model_parallel", "join_rpc", "wait_all_workers"),
}


def __getattr__(name: str) -> Any:
    for module, names in _COMPAT.items():
        if name == module or name in names:
            found = importlib.import_module(f"rpcbench.torch_shim.compat.{module}")
            return found if name == module else getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _get_debug_info() -> dict[str, str]:
    """Return counts of RRefs, threads, calls and autograd contexts of this worker."""
    agent = _get_current_rpc_agent()
    return {**_rref_context_get_debug_info(), **agent.get_debug_info(), **_autograd_debug_info()}
