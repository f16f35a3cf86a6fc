"""The backend of a process group: the one that the program names, by default nccl or gloo.

Guarantees
- The default is nccl where each rank has a GPU of its own, which NCCL needs. One rank that has none, or shares it with
  another rank, makes it gloo for all.
- All ranks choose the same: each writes into its entry of the rendezvous the backend that it names, or its GPU, and all
  read all entries. Ranks that name none take the one that others name; where they name different ones, all raise.
- CUDA is asked only on a rank to which it shows exactly one GPU, as to the workers that a cluster pins. A program whose
  ranks see several GPUs, and select one by `torch.cuda.set_device`, names its backend.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as c10d

from rpcbench.base.errors import CollectiveError
from rpcbench.runtime import gpus
from rpcbench.transport.hosts import host_id

GLOO = "gloo"
"""For tensors on the CPU and on GPUs, by way of the CPU."""
NCCL = "nccl"
"""For tensors on NVIDIA GPUs; gloo stands beside it, for those on the CPU."""
_NAMED = "backend "


def backend_offer(named: str | None) -> str:
    """Return the entry of this rank: the backend that its program names, else its own GPU; empty if it has none."""
    if named is not None:
        return f"{_NAMED}{named.lower()}"
    gpu = gpus.own_gpu()
    return f"{host_id()}/{gpu.unique_name}" if gpu is not None and _can_use_nccl() else ""


def _can_use_nccl() -> bool:
    """Return whether torch is built with NCCL, and CUDA works in this process. It counts devices, and uses none."""
    return c10d.is_nccl_available() and torch.cuda.is_available()


def choose_backend(offers: Mapping[str, str]) -> str:
    """Return the backend for ranks with these offers, in lower case.

    Args:
        offers: The offer of each rank, by the name that errors have for it. The same on all ranks.

    Raises:
        CollectiveError: Ranks have named different backends.
    """
    named = {rank: text.removeprefix(_NAMED) for rank, text in offers.items() if text.startswith(_NAMED)}
    if len({*named.values()}) > 1:
        lines = [f"  {rank}: {backend}" for rank, backend in named.items()]
        raise CollectiveError("\n".join(["ranks name different backends; all must name the same, or none:", *lines]))
    if named:
        return next(iter(named.values()))
    owned = [*offers.values()]
    return NCCL if all(owned) and len({*owned}) == len(owned) else GLOO
