"""A drop-in for `torch.distributed.rpc`: `import rpcbench.rpc as rpc`.

Importing it starts no thread and loads neither IPython nor zmq.
"""

from __future__ import annotations

from rpcbench.agent.current import cancelled
from rpcbench.agent.roster import WorkerInfo
from rpcbench.rpc import constants, functions, options
from rpcbench.rpc.api import (
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _set_rpc_timeout,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from rpcbench.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from rpcbench.rpc.rref import RRef
from rpcbench.words.futures import Future

__all__ = [
    "Future",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "_set_rpc_timeout",
    "cancelled",
    "constants",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "options",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
