"""Worlds that workers found by torch's own functions or by ours, and what a test reads of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as c10d

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.ids import Row
from rpcbench.distributed import groups
from rpcbench.telemetry.collector import Collector


def begin(method: str = "env://") -> None:
    """On a worker: take part in a world of torch's own."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    c10d.init_process_group("gloo", method, timeout=timedelta(seconds=60), rank=rank, world_size=size)


def sum_by_torch() -> float:
    """On a worker: found a world by torch's functions, add up in it, and end it."""
    c10d.init_process_group("gloo")
    c10d.all_reduce(x := torch.ones(1))
    c10d.barrier()
    c10d.destroy_process_group()
    return x.item()


def sum_by_ours() -> float:
    """The same by our functions."""
    dist.init_process_group("gloo")
    dist.all_reduce(x := torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()
    return x.item()


def all_wait(*ranks: int) -> bool:
    """On a worker: whether these ranks have reported that they wait. A rank that has waited reports an empty text."""
    store = groups.member_of(None).world.store
    return all(store.check([key]) and bool(store.get(key)) for key in [f"waits/{rank}" for rank in ranks])


@contextmanager
def watching(cluster: rpcbench.Cluster) -> Iterator[Callable[[], list[Row]]]:
    """Watch, and yield a function that returns the rows that have come since."""
    collector = cluster.agent.part(Collector)
    stop = collector.subscribe(lambda: None)
    try:
        assert collector.settle(20)
        before = rpcbench.collectives(10_000).rows
        yield lambda: [row for key, row in rpcbench.collectives(10_000).rows.items() if key not in before]
    finally:
        stop()
