"""Options of `init_rpc`, with torch's names.

There is one backend here; the classes exist so that programs keep working.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpcbench.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC


class RpcBackendOptions:
    """`rpc_timeout` in seconds (0: none) for calls that name none, and the URL where the workers of a world meet."""

    def __init__(
        self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD, **kwargs: Any
    ) -> None:
        if kwargs:
            raise TypeError(f"no such option: {', '.join(kwargs)}")
        if isinstance(rpc_timeout, bool) or not isinstance(rpc_timeout, int | float):
            raise TypeError(f"incompatible constructor arguments: rpc_timeout is in seconds, not {rpc_timeout!r}")
        if rpc_timeout < 0:
            raise RuntimeError(f"RPC Timeout must be non-negative; got {rpc_timeout}")
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """As `RpcBackendOptions`, with the number of threads that run calls.

    `_transports` and `_channels` name parts of torch's own transport; they are accepted and have no effect. Device
    maps are not supported yet: NotImplementedError.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: dict[str, dict[Any, Any]] | None = None,
        devices: Sequence[Any] | None = None,
        _transports: list[str] | None = None,
        _channels: list[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        if num_worker_threads <= 0:
            raise RuntimeError(f"num_worker_threads must be positive; got {num_worker_threads}")
        if device_maps or devices:
            raise NotImplementedError("device maps are not supported yet: send CPU tensors")
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[Any, Any]] = {}
        self.devices: list[Any] = []
