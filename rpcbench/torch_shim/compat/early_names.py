"""Names of torch.distributed.rpc in torch 1.3 and 1.4: `init_model_parallel`, and two names of `shutdown`."""

from __future__ import annotations

import enum
import secrets
from typing import Any

import torch.distributed

from rpcbench.rpc.api import shutdown
from rpcbench.rpc.backend_registry import BackendType
from rpcbench.rpc.init import init_rpc
from rpcbench.rpc.options import TensorPipeRpcBackendOptions

__all__ = ["RpcBackend", "init_model_parallel", "join_rpc", "wait_all_workers"]


class RpcBackend(enum.Enum):
    """The backends of torch 1.3; all of them select the same runtime here."""

    PROCESS_GROUP = 1


def init_model_parallel(
    self_name: str,
    backend: RpcBackend | BackendType = RpcBackend.PROCESS_GROUP,
    self_rank: int = -1,
    init_method: str | None = None,
    num_send_recv_threads: int = 4,
) -> None:
    """Join a world as torch 1.3 did: rank and world size are those of torch's default process group.

    Args:
        self_name: Name of this worker, unique in the world.
        backend: Ignored: there is one runtime.
        self_rank: Rank in the default group, or -1 to take it from there.
        init_method: Rendezvous URL; None: the workers meet through the group.
        num_send_recv_threads: Number of threads that run calls.

    Raises:
        RuntimeError: There is no default group: call `torch.distributed.init_process_group("gloo", ...)` first.
        ValueError: `self_rank` is not the rank in the group.
    """
    group = torch.distributed
    if not group.is_initialized():
        raise RuntimeError(
            "init_model_parallel takes rank and world size from the default process group, and there is none: call "
            'torch.distributed.init_process_group("gloo", ...) first, or use init_rpc'
        )
    rank, size = group.get_rank(), group.get_world_size()
    if self_rank not in (-1, rank):
        raise ValueError(f"self_rank is {self_rank}, but this process has rank {rank} in the default process group")
    place: list[Any] = [secrets.token_hex(16)]
    group.broadcast_object_list(place, src=0)
    url = init_method or f"file:///{place[0]}"
    options = TensorPipeRpcBackendOptions(init_method=url, num_worker_threads=num_send_recv_threads)
    init_rpc(self_name, None, rank, size, options)


def join_rpc() -> None:
    """Call `shutdown()`, under its name in torch 1.3."""
    shutdown()


def wait_all_workers() -> None:
    """Call `shutdown()`, under its name in torch 1.4."""
    shutdown()
