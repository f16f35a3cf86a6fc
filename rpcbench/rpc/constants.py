"""The constants of `torch.distributed.rpc.constants`."""

from __future__ import annotations

from datetime import timedelta

from rpcbench.base.config import DEFAULT_THREADS, DEFAULT_TIMEOUT, UNSET_TIMEOUT

__all__ = [
    "DEFAULT_INIT_METHOD", "DEFAULT_NUM_WORKER_THREADS", "DEFAULT_PROCESS_GROUP_TIMEOUT", "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT", "UNSET_RPC_TIMEOUT",
]  # fmt: skip

DEFAULT_RPC_TIMEOUT_SEC: float = DEFAULT_TIMEOUT  # for calls that name none
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_SHUTDOWN_TIMEOUT: float = 0  # seconds; 0: no limit
DEFAULT_NUM_WORKER_THREADS: int = DEFAULT_THREADS
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=(1 << 31) - 1)
UNSET_RPC_TIMEOUT: float = UNSET_TIMEOUT  # selects the agent's timeout

# their names in torch's C++ module
_DEFAULT_INIT_METHOD = DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = UNSET_RPC_TIMEOUT
