"""Four workers in one process group, shared by the tests of a module, which leave it unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.futures import wait_all

Everyone = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[rpcbench.Cluster]:
    """A cluster of four workers in one process group; a rank waits 20 s for the others."""
    with rpcbench.Cluster(4) as cluster:
        start = {"timeout": 20}
        wait_all([cluster.rpc_async(name, dist.init_process_group, ("gloo",), start) for name in cluster.workers])
        yield cluster


@pytest.fixture
def everyone(ranks: rpcbench.Cluster) -> Everyone:
    """A function that runs a function on all ranks at once, and returns the results in order of rank."""
    return lambda function, *args: wait_all([ranks.rpc_async(name, function, args) for name in ranks.workers])
