"""torch's own tests of torch.distributed, from the installed wheel, on workers: with a watcher they end as without one.

Only bodies that pass unwatched count: others need GPUs, more ranks, or packages that are not there.
"""

from __future__ import annotations

from pathlib import Path

import distributed_bodies
import pytest

import rpcbench
from rpcbench.base.futures import wait_all
from rpcbench.runtime import current
from rpcbench.telemetry.collector import Collector

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(1500)]
SECONDS = 120.0  # for a body, which takes one or two
LEAST = 80  # bodies that pass unwatched


def outcomes(cluster: rpcbench.Cluster, scratch: str, names: list[str], way: str) -> dict[str, list[str]]:
    """Run bodies, and return what each rank says of each."""
    return {
        name: wait_all(
            [
                cluster.rpc_async(worker, distributed_bodies.run, (scratch, name, f"{way}-{name}"), timeout=SECONDS)
                for worker in cluster.workers
            ]
        )
        for name in names
    }


def test_what_passes_unwatched_passes_watched(tmp_path: Path, no_leaks: None) -> None:
    scratch = str(tmp_path)
    with rpcbench.Cluster(3) as cluster, current.use_agent(cluster.agent):
        names = cluster.rpc_sync("worker1", distributed_bodies.names, (scratch,), timeout=SECONDS)
        plain = outcomes(cluster, scratch, names, "plain")
        passed = [name for name, said in plain.items() if set(said) == {"pass"}]
        assert len(passed) >= LEAST
        stop = cluster.agent.part(Collector).subscribe(lambda: None)
        try:
            assert cluster.agent.part(Collector).settle(20)
            watched = outcomes(cluster, scratch, passed, "watched")
            assert rpcbench.collectives(10_000).rows, "they were seen"
        finally:
            stop()
    differ = {name: said for name, said in watched.items() if set(said) != {"pass"}}
    told = "\n\n".join(f"=== {name}\n" + "\n".join(said) for name, said in differ.items())
    assert not differ, f"{len(differ)} of {len(passed)} bodies differ while watched: {', '.join(differ)}\n{told}"
