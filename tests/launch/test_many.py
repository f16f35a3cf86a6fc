"""Many workers on a machine with few cores."""

from __future__ import annotations

import os

import pytest

import rpcbench
from rpcbench.base.futures import Future, wait_all
from rpcbench.rpc import rpc_async

pytestmark = pytest.mark.process
SECONDS = 150.0


@pytest.mark.long
def test_32_workers_start_and_call_each_other(no_leaks: None) -> None:
    """It takes 3 to 7 s on two idle cores. The waits only end a hang: beside other tests 1,024 calls take long."""
    with rpcbench.Cluster(32) as cluster:
        names = cluster.workers
        assert len(names) == 32
        pids = sorted(cluster.pid(name) for name in names)
        assert all(sorted(found) == pids for found in wait_all([_asked(cluster, n) for n in names]))


def _asked(cluster: rpcbench.Cluster, name: str) -> Future[list[int]]:
    return cluster.rpc_async(name, _pids, (cluster.workers,), timeout=SECONDS)


def _pids(names: list[str]) -> list[int]:
    return wait_all([rpc_async(name, os.getpid, timeout=SECONDS) for name in names])
