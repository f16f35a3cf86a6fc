"""Faults while torch creates groups: a rank is killed after all have agreed, or interrupted; later groups work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_outcome import outcome, survivors_name_the_dead
from torch_world import all_wait
from worlds import cluster_fixture, until

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.errors import CollectiveError, RpcError
from rpcbench.base.futures import wait_all
from rpcbench.distributed import groups
from rpcbench.distributed.world import World

pytestmark = pytest.mark.process

HANG_SECONDS = 25.0  # five times the limit; torch itself would wait for minutes
TIMEOUT = 200.0
cluster = cluster_fixture(3, scope="function")


def dies(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def never_comes(*_: object, **__: object) -> None:
    threading.Event().wait()


def found() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)


def torch_does(name: str, deed: Callable[..., None]) -> None:
    """On a worker: replace a function of torch from now on."""
    setattr(groups.c10d, name, deed)


def begin(cluster: rpcbench.Cluster) -> None:
    wait_all([cluster.rpc_async(name, found) for name in cluster.workers])


def summed() -> float:
    group = dist.new_group([0, 1, 2])
    dist.all_reduce(x := torch.ones(1), group=group)
    return x.item()


def goes_on(cluster: rpcbench.Cluster) -> None:
    """All ranks found a world again, and a group in it."""
    begin(cluster)
    assert wait_all([cluster.rpc_async(name, summed) for name in cluster.workers]) == [3.0] * 3


@pytest.mark.parametrize("dead", ["worker1", "worker3"])  # worker1 keeps the store
@pytest.mark.parametrize("founding", [False, True])
def test_a_rank_that_is_killed_while_torch_creates_a_group_is_named_at_once(
    cluster: rpcbench.Cluster, dead: str, founding: bool
) -> None:
    deed, of_torch = (found, "init_process_group") if founding else (summed, "new_group")
    if not founding:
        begin(cluster)
    cluster.rpc_sync(dead, torch_does, (of_torch, dies))
    rest = [name for name in cluster.workers if name != dead]
    waiting = [cluster.rpc_async(name, outcome, (deed,), timeout=HANG_SECONDS) for name in rest]
    cluster.rpc_async(dead, deed)
    rank = f"rank {int(dead[-1]) - 1} ({dead})"
    words = [f"WorkerLostError: {rank} of the process group is gone, "]
    if founding and dead == "worker1":  # the others may still look for its store, or for the rank
        unmet = "WorkerLostError: the process group was not founded: "
        words += [f"{unmet}the rank that hosts its store has ended", f"{unmet}{rank} has not come. {dead} is gone "]
    for said in wait_all(waiting):
        assert said.startswith(tuple(words)), said
    cluster.restart(dead)
    goes_on(cluster)


def interrupted(cluster: rpcbench.Cluster) -> None:
    with pytest.raises((KeyboardInterrupt, RpcError)):
        cluster.run("worker2", "import rpcbench.distributed as dist; dist.new_group([0, 1, 2])")


def test_an_interrupt_in_new_group_ends_the_waits_and_threads_of_all_ranks(cluster: rpcbench.Cluster) -> None:
    begin(cluster)
    cluster.rpc_sync("worker3", torch_does, ("new_group", never_comes))
    waiting = [cluster.rpc_async(name, outcome, (summed,), timeout=2 * HANG_SECONDS) for name in ("worker1", "worker3")]
    cell = threading.Thread(target=interrupted, args=(cluster,))
    cell.start()
    until(lambda: cluster.rpc_sync("worker1", all_wait, (0, 1, 2)))
    cluster.interrupt("worker2")
    words = "CollectiveError: rank 1 (worker2) was interrupted in new_group([0, 1, 2]). Call init_process_group"
    assert all(said.startswith(words) for said in wait_all(waiting))
    cell.join()
    for name in ("worker1", "worker2"):
        until(lambda name=name: not cluster.rpc_sync(name, lanes))  # type: ignore[misc]
    cluster.restart("worker3")
    goes_on(cluster)


def lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rpcbench-group-")]


def too_late(method: str) -> tuple[str, bool, bool, float]:
    """On a worker: end a world while torch creates its group; return the error, the state left, and a later sum."""
    torchs, ours = groups.c10d.init_process_group, groups.create_default_group

    def ended(world: World, behind: str) -> Any:
        def late(*args: Any, **given: Any) -> None:
            torchs(*args, **given)
            world.break_on_this_rank(CollectiveError("over"))

        groups.c10d.init_process_group = late
        return ours(world, behind)

    groups.create_default_group = ended
    said = outcome(dist.init_process_group, "gloo", method, 1, 0)
    until(lambda: not lanes())
    left = torch.distributed.is_initialized(), dist.is_initialized()
    groups.c10d.init_process_group, groups.create_default_group = torchs, ours
    dist.init_process_group("gloo", method, 1, 0)
    dist.all_reduce(x := torch.ones(1))
    return said, *left, x.item()


def test_a_group_that_torch_creates_after_the_end_of_its_world_is_destroyed(
    cluster: rpcbench.Cluster, tmp_path: Path
) -> None:
    said = cluster.rpc_sync("worker1", too_late, (f"file://{tmp_path}/meeting",), timeout=HANG_SECONDS)
    assert said == ("CollectiveError: over", False, False, 1.0)


SCRIPT = """
import os, sys, torch, rpcbench.distributed as dist
from rpcbench.distributed import groups
dist.init_process_group("gloo", "file://" + sys.argv[1], world_size=3, timeout=200)
if dist.get_rank() == 1:
    groups.c10d.new_group = lambda *_, **__: os.kill(os.getpid(), 9)
dist.new_group([0, 1, 2])
"""


@pytest.mark.long
def test_ranks_of_a_script_name_a_rank_that_is_killed_in_new_group(tmp_path: Path) -> None:
    survivors_name_the_dead(1, SCRIPT, f"{tmp_path}/meeting")
