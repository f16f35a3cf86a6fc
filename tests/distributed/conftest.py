"""Four workers in one process group, or three in a world of torch's own, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch_world import begin, watching

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.futures import wait_all
from rpcbench.base.ids import Row
from rpcbench.runtime import current

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


@pytest.fixture(scope="module")
def three() -> Iterator[rpcbench.Cluster]:
    """A cluster of three workers in a world of torch's own."""
    with rpcbench.Cluster(3) as cluster, current.use_agent(cluster.agent):
        wait_all([cluster.rpc_async(name, begin) for name in cluster.workers])
        yield cluster


@pytest.fixture
def all_three(three: rpcbench.Cluster) -> Everyone:
    """As `everyone`, on these three."""
    return lambda function, *args: wait_all([three.rpc_async(name, function, args) for name in three.workers])


@pytest.fixture
def watched(three: rpcbench.Cluster) -> Iterator[Callable[[], list[Row]]]:
    """A function that returns the rows that have come since the watch began."""
    with watching(three) as rows:
        yield rows
