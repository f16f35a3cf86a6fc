"""Many workers on a machine with few cores."""

from __future__ import annotations

import os

import pytest

import rpcbench
from rpcbench.base.futures import wait_all
from rpcbench.rpc import rpc_async

pytestmark = pytest.mark.process


def test_32_workers_start_and_call_each_other(no_leaks: None) -> None:
    """It takes 3 to 7 s on two cores; the waits inside end after a minute."""
    with rpcbench.Cluster(32) as cluster:
        names = cluster.workers
        assert len(names) == 32
        pids = sorted(cluster.pid(name) for name in names)
        assert all(sorted(found) == pids for found in wait_all([cluster.rpc_async(n, _pids, (names,)) for n in names]))


def _pids(names: list[str]) -> list[int]:
    return wait_all([rpc_async(name, os.getpid) for name in names])
