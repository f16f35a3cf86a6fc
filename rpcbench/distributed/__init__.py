"""torch.distributed, of today and of 0.4, with comparison of the ranks' calls: for cells, calls and scripts.

`import rpcbench.distributed as dist`, and call its functions on every rank. They are those of torch.distributed, on
torch's own process groups; a name that is not defined here is torch's own, on the same groups (the page
"torch.distributed, name by name" lists all). `src`, `dst` and `peer` are ranks of the world, for subgroups too. Errors
name the rank at fault, and no wait exceeds its timeout. The errors CollectiveError, RpcTimeoutError and WorkerLostError
are RuntimeErrors.

Many functions have the following arguments, result and errors; their own descriptions say where they differ.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ReduceOp, group

from rpcbench.distributed.arguments import ARGUMENTS, common_help
from rpcbench.distributed.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    monitored_barrier,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from rpcbench.distributed.group_functions import (
    destroy_process_group,
    get_backend,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    init_process_group,
    is_available,
    is_initialized,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
)
from rpcbench.distributed.groups import NamedGroup, Outsider, ddp_all_reduce
from rpcbench.distributed.multi_device import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
)
from rpcbench.distributed.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from rpcbench.distributed.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
from rpcbench.distributed.sharded_files import load_sharded, save_sharded
from rpcbench.distributed.work import Request, Work

__all__ = [
    "NamedGroup", "Outsider", "P2POp", "ReduceOp", "Request", "Work", "all_gather", "all_gather_into_tensor",
    "all_gather_multigpu", "all_gather_object", "all_gather_single", "all_reduce", "all_reduce_multigpu", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_multigpu", "broadcast_object_list",
    "ddp_all_reduce", "destroy_process_group", "gather", "gather_object", "get_backend", "get_global_rank",
    "get_group_rank", "get_process_group_ranks", "get_rank", "get_world_size", "group", "init_process_group", "irecv",
    "is_available", "is_initialized", "isend", "load_sharded", "monitored_barrier", "new_group", "new_subgroups",
    "new_subgroups_by_enumeration", "recv", "recv_object_list", "reduce", "reduce_multigpu", "reduce_op",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "save_sharded", "scatter",
    "scatter_object_list", "send", "send_object_list",
]  # fmt: skip

__doc__ = f"{__doc__}\n{common_help(ARGUMENTS)}"
reduce_op = ReduceOp  # its name in torch 0.4
_OURS = {"autograd": "rpcbench.autograd", "launch": "rpcbench.distributed.launch", "rpc": "rpcbench.rpc"}
"""Our modules with names of torch's, which would be found otherwise."""


def __getattr__(name: str) -> Any:
    """Return what only torch.distributed defines, also its modules, which are loaded then. Raises AttributeError for a
    name that it does not have, either."""
    if name in _OURS:
        return importlib.import_module(_OURS[name])
    try:
        return getattr(c10d, name)
    except AttributeError:
        if not name.startswith("_") and importlib.util.find_spec(f"torch.distributed.{name}"):
            return importlib.import_module(f"torch.distributed.{name}")
        near = difflib.get_close_matches(name, __dir__(), 1)
        raise AttributeError(
            f"torch.distributed of torch {torch.__version__} has no {name!r}, and neither has rpcbench.distributed"
            + (f": did you mean {near[0]}?" if near else "")
        ) from None


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(c10d)})
