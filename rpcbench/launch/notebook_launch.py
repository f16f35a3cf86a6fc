"""`rpcbench.notebook_launcher`: accelerate's function of that name, on workers.

Guarantees
- It has accelerate's arguments, in their order. One that cannot be honoured here is refused with the reason and what to
  do; only `use_port` and `monitor_interval`, which need nothing here, are accepted without effect.
- The notebook itself runs nothing of the function, is never forked, and may have used CUDA.
- The workers of a running cluster stay; workers that were started for the call end with it, also after an error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rpcbench.base.errors import count_noun
from rpcbench.cells.targets import ALL
from rpcbench.cells.tracebacks import error_message
from rpcbench.launch import spmd
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.launch.cluster import Cluster
from rpcbench.runtime.current import find_current
from rpcbench.runtime.gpus import visible_gpus

_PRECISIONS = ("no", "fp8", "fp16", "bf16")
_HERE = ("127.0.0.1", "localhost", "::1")
_OTHER_HOSTS = (
    "the notebook starts the ranks of all hosts itself: start workers there (docs/past-one-machine.md), and call "
    "notebook_launcher once, without it"
)
_MEETING = "the ranks meet through the notebook, which needs no other place for that: leave it out"


def notebook_launcher(
    function: Callable[..., object], args: Sequence[Any] = (), num_processes: int | None = None,
    mixed_precision: str = "no", use_port: str | int = "29500", master_addr: str = "127.0.0.1", node_rank: int = 0,
    num_nodes: int = 1, rdzv_backend: str = "static", rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None, rdzv_id: str = "none", max_restarts: int = 0,
    monitor_interval: float = 0.1, log_line_prefix_template: str | None = None,
) -> None:  # fmt: skip
    """Run a function on several processes, as ranks of torch.distributed: accelerate's function of this name.

    It runs on the first workers of the current cluster. Without a cluster it starts workers, and ends them afterwards.
    Output appears here with the worker's name, Ctrl-C interrupts all ranks, and the error of one rank, which ends the
    others, is raised here with its type and its worker. Unlike accelerate's, the function may be one of the notebook,
    and the notebook may have used CUDA; also a single process is a worker, never the notebook. `cluster.spmd` does the
    same, and returns the results.

    Args:
        function: The function. `torch.distributed` works in it, with its process group, and so does `Accelerator()`.
        args: Its arguments.
        num_processes: The number of ranks; by default all workers, or without a cluster one for each GPU.
        mixed_precision: "no", "fp16", "bf16" or "fp8", for an `Accelerator()` that names none.
        use_port: Accepted; the ranks meet at a free port, so no two launches collide.
        master_addr: This host. Others are refused, as are `node_rank`, `num_nodes`, `rdzv_endpoint`, `rdzv_conf` and
            `rdzv_id` that differ from the default: the notebook itself starts the ranks of all hosts.
        rdzv_backend: "static" or "c10d", with the same effect.
        max_restarts: How often all ranks begin again after an error of one. Workers that were started for the call are
            new ones then; of a cluster only those that were lost are started again.
        monitor_interval: Accepted; a failure is reported at once, and nothing polls for it.
        log_line_prefix_template: Refused: each line has the name of its worker.

    Raises:
        TypeError: `function` is no function.
        ValueError: for an argument that cannot be honoured, or without a number of processes where none can be found.
        CollectiveError: A worker is in a process group already.
        WorkerLostError: A worker is lost.

    >>> def train(factor):
    ...     total = torch.tensor(factor)
    ...     torch.distributed.all_reduce(total)
    ...     if torch.distributed.get_rank() == 0:
    ...         print(total.item())
    >>> rpcbench.notebook_launcher(train, (0.5,), num_processes=2)
    [worker1] 1.0
    """
    if not callable(function):
        raise TypeError(f"notebook_launcher runs a function, and {function!r} is none")
    _refuse_places(master_addr, node_rank, num_nodes, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id)
    _check_values(mixed_precision, max_restarts, log_line_prefix_template)
    found = _find_cluster()
    count = _count_ranks(found, num_processes)
    environ = {"ACCELERATE_MIXED_PRECISION": mixed_precision.lower(), "TORCHELASTIC_MAX_RESTARTS": str(max_restarts)}
    for attempt in range(max_restarts + 1):
        environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        try:
            with contextlib.nullcontext(found) if found is not None else Cluster(count) as cluster:
                _run_ranks(cluster, count, partial(function, *args), environ)
            return
        except Exception as error:
            if attempt == max_restarts:
                raise
            where = f" on {worker}" if (worker := getattr(error.__cause__, "worker", None)) else ""
            told = f"attempt {attempt + 1} of {max_restarts + 1} has failed{where}: {error_message(error)}"
            sys.stderr.write(f"{told}\nAll ranks begin again.\n")


def _run_ranks(cluster: BaseCluster, count: int, program: partial[Any], environ: Mapping[str, str]) -> None:
    if environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        for name in cluster.lost:
            cluster.restart(name)
    names = cluster.workers[:count] if len(cluster.workers) >= count else ALL
    names = spmd.select_ranks(cluster.workers, cluster.lost, names)
    spmd.run_program(cluster.agent, names, None, program, deed="notebook_launcher", environ=environ)


def _find_cluster() -> BaseCluster | None:
    """Return the current cluster; None if none runs."""
    agent = find_current()
    return agent.owner if agent is not None and isinstance(agent.owner, BaseCluster) else None


def _count_ranks(cluster: BaseCluster | None, wanted: int | None) -> int:
    """Return how many ranks there shall be. ValueError if that is not known, or if the cluster has too few workers."""
    there = None if cluster is None else len(cluster.workers) + len(cluster.lost)
    if wanted is None and not (wanted := there or len(visible_gpus())):
        raise ValueError("this host shows no GPU to count: say how many ranks there shall be, num_processes=2")
    if not isinstance(wanted, int) or wanted < 1:
        raise ValueError(f"num_processes={wanted!r}: it is the number of ranks, 1 or more")
    if there is not None and wanted > there:
        raise ValueError(
            f"num_processes={wanted}, and the cluster has {count_noun(there, 'worker')}: %cluster scale {wanted} starts"
            " more, and %cluster stop ends it, so that notebook_launcher starts its own"
        )
    return wanted


def _refuse_places(
    address: str, node_rank: int, num_nodes: int, backend: str, endpoint: str, conf: Mapping[str, Any] | None, id_: str
) -> None:
    """Raise ValueError for a place where ranks would meet, or a host, of their own choice."""
    if backend not in ("static", "c10d"):
        raise ValueError(f"rdzv_backend={backend!r}: {_MEETING}")
    given = {"rdzv_endpoint": endpoint, "rdzv_conf": conf, "rdzv_id": None if id_ == "none" else id_}
    for name, value in given.items():
        if value:
            raise ValueError(f"{name}={value!r}: {_MEETING}")
    if (node_rank, num_nodes) != (0, 1):
        raise ValueError(f"node_rank={node_rank}, num_nodes={num_nodes}: {_OTHER_HOSTS}")
    if address not in _HERE:
        raise ValueError(f"master_addr={address!r}: {_OTHER_HOSTS}")


def _check_values(precision: str, restarts: int, template: str | None) -> None:
    if template is not None:
        raise ValueError("log_line_prefix_template: each line has the name of its worker: leave it out")
    if precision.lower() not in _PRECISIONS:
        raise ValueError(f"mixed_precision={precision!r}: it is one of {', '.join(_PRECISIONS)}")
    if restarts < 0:
        raise ValueError(f"max_restarts={restarts}: it is 0 or more")
