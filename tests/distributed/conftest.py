"""Four workers in one process group, shared by the tests of a session that leave it as it was."""

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
    """A cluster of four whose workers are in a world; a rank waits 20 s for others."""
    with rpcbench.Cluster(4) as cluster:
        start = {"timeout": 20}
        wait_all([cluster.rpc_async(name, dist.init_process_group, ("gloo",), start) for name in cluster.workers])
        yield cluster


@pytest.fixture
def everyone(ranks: rpcbench.Cluster) -> Everyone:
    """Run a function on all ranks at once; what each returns, in order."""
    return lambda function, *args: wait_all([ranks.rpc_async(name, function, args) for name in ranks.workers])
