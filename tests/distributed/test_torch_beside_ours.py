"""Process groups of torch's own functions and of ours in one cluster, in turn, any number of times at its address."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import addresses
import pytest
import torch
import torch.distributed as c10d
from distributed_outcome import outcome
from torch.distributed import distributed_c10d
from torch_world import sum_by_ours, sum_by_torch
from worlds import PATIENCE, cluster_fixture, until

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.futures import wait_all
from rpcbench.distributed import groups, stores
from rpcbench.distributed.stores import wait_until

pytestmark = pytest.mark.process
cluster = cluster_fixture(2)


def test_torch_and_we_found_groups_in_turn_at_one_address(cluster: rpcbench.Cluster) -> None:
    for deed in (sum_by_ours, sum_by_torch, sum_by_torch, sum_by_ours, sum_by_ours, sum_by_torch):
        assert wait_all([cluster.rpc_async(name, deed) for name in cluster.workers]) == [2.0, 2.0]
    cluster.restart("worker2")  # another generation has other ports
    for deed in (sum_by_torch, sum_by_ours, sum_by_torch):
        assert wait_all([cluster.rpc_async(name, deed) for name in cluster.workers]) == [2.0, 2.0]


def mixed() -> tuple[str, bool, bool, float]:
    """A world of torch is refused with advice, and ended by our function; one of ours follows, and torch ends it."""
    torch.distributed.init_process_group("gloo")
    said = outcome(dist.init_process_group)
    torch.distributed.barrier()
    dist.destroy_process_group()
    left = torch.distributed.is_initialized()
    dist.init_process_group("gloo", timeout=20)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    dist.init_process_group("gloo", timeout=20)
    dist.all_reduce(x := torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()
    return said, left, dist.is_initialized(), x.item()


def test_each_can_end_the_groups_of_the_other(cluster: rpcbench.Cluster) -> None:
    for said, *rest in wait_all([cluster.rpc_async(name, mixed) for name in cluster.workers]):
        assert "twice: destroy_process_group() first" in said and rest == [False, False, 2.0]


def begin_of_torch(way: str, path: str) -> None:
    """Found a world by torch's own functions."""
    if way == "mesh":
        dist.init_device_mesh("cpu", (2,))
    elif way == "store":
        store, rank = c10d.FileStore(f"{path}/store", 2), int(os.environ["RANK"])
        c10d.init_process_group("gloo", store=store, world_size=2, rank=rank)
    else:
        c10d.init_process_group("gloo", f"file://{path}/file", world_size=2, rank=int(os.environ["RANK"]))


def in_a_world_of_torch(way: str, path: str) -> list[Any]:
    """Use all kinds of our functions in a world that torch has founded, which torch ends as well."""
    begin_of_torch(way, path)
    told = [dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend()]
    me = dist.get_rank()
    dist.all_reduce(x := torch.ones(1))
    dist.broadcast(y := torch.tensor([me]), 1)
    dist.all_gather_object(found := [None] * 2, me)
    z = torch.tensor([me])
    (dist.send if me == 0 else dist.recv)(z, 1 - me)
    differs = outcome(lambda: dist.all_reduce(torch.ones(me + 1)))
    pair = dist.new_group([0, 1])
    dist.all_reduce(x, group=pair)
    dist.barrier()
    c10d.destroy_process_group()
    after = outcome(dist.barrier)
    return [*told, x.item(), y.item(), found, z.item(), differs, dist.is_initialized(), after]


@pytest.mark.parametrize("way", ["mesh", "store", "init"])
def test_a_world_that_torch_has_founded_is_ours_too_until_torch_ends_it(
    cluster: rpcbench.Cluster, tmp_path: Path, way: str
) -> None:
    each = wait_all([cluster.rpc_async(name, in_a_world_of_torch, (way, str(tmp_path))) for name in cluster.workers])
    for rank, (has, me, size, backend, *values, differs, still, after) in enumerate(each):
        assert (has, me, size, backend, values) == (True, rank, 2, "gloo", [4.0, 1, [0, 1], 0])
        assert "rank 1 (worker2) calls all_reduce(SUM) of float32[2]" in differs
        assert not still and "there is no process group here" in after
    assert wait_all([cluster.rpc_async(name, sum_by_ours) for name in cluster.workers]) == [2.0, 2.0]


def one_after_the_other(path: str) -> list[Any]:
    """Make three worlds of torch, whose ends we see late: torch's group has been freed at once."""
    told: list[Any] = []
    for number in range(3):
        store, rank = c10d.FileStore(f"{path}/{number}", 2), int(os.environ["RANK"])
        c10d.init_process_group("gloo", store=store, world_size=2, rank=rank)
        dist.all_reduce(x := torch.ones(1))
        dist.barrier()
        freed = weakref.ref(distributed_c10d._get_default_group())
        c10d.destroy_process_group()
        told += [x.item(), wait_until(lambda ref=freed: ref() is None, PATIENCE)]  # its thread may end the barrier
    return told


def test_worlds_of_torch_follow_one_another(cluster: rpcbench.Cluster, tmp_path: Path) -> None:
    each = [cluster.rpc_async(name, one_after_the_other, (str(tmp_path),)) for name in cluster.workers]
    assert wait_all(each) == [[2.0, True] * 3] * 2


def late_in_a_world_of_torch(path: str) -> str:
    """Let rank 1 not come to a barrier; its error follows from that of rank 0."""
    store, rank = c10d.FileStore(path, 2), int(os.environ["RANK"])
    c10d.init_process_group("gloo", store=store, world_size=2, rank=rank, timeout=timedelta(seconds=4))
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        said = outcome(dist.barrier)
    else:
        until(
            lambda: not dist.is_initialized() or groups.member_of(None, at_work=False).world.poll_failure(), "the end"
        )
        said = outcome(dist.barrier)
    dist.destroy_process_group()
    return f"{said} {c10d.is_initialized()}"


def test_the_rank_that_does_not_come_in_a_world_of_torch_is_named(cluster: rpcbench.Cluster, tmp_path: Path) -> None:
    each = [cluster.rpc_async(name, late_in_a_world_of_torch, (f"{tmp_path}/store",)) for name in cluster.workers]
    for said in wait_all(each):
        assert said.startswith("RpcTimeoutError") and "rank 1 (worker2) has not come" in said and said.endswith("False")


def by_hand(path: str, kind: str) -> list[Any]:
    """Use a process group that the program has made from a store, without any world."""
    me = int(os.environ["RANK"])
    store = c10d.FileStore(f"{path}/{kind}", 2)
    group: Any = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", store), me, 2, timedelta(seconds=60))
    if kind == "group":
        backend, group = group, c10d.ProcessGroup(store, me, 2)
        group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backend)
        group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    dist.all_reduce(x := torch.ones(1), group=group)
    dist.broadcast(y := torch.tensor([me]), 1, group=group)
    z = torch.tensor([me])
    (dist.send if me == 0 else dist.recv)(z, 1 - me, group=group)
    differs = outcome(lambda: dist.all_reduce(torch.ones(me + 1), group=group))
    dist.barrier(group=group)
    told = [dist.get_rank(group), dist.get_world_size(group), dist.is_initialized()]
    dist.destroy_process_group(group)
    return [x.item(), y.item(), z.item(), *told, differs]


@pytest.mark.parametrize("kind", ["backend", "group"])
def test_a_group_that_the_program_makes_by_hand_is_a_group(
    cluster: rpcbench.Cluster, tmp_path: Path, kind: str
) -> None:
    each = wait_all([cluster.rpc_async(name, by_hand, (str(tmp_path), kind)) for name in cluster.workers])
    for rank, (*values, differs) in enumerate(each):
        assert values == [2.0, 1, 0, rank, 2, False]
        assert "rank 1 calls all_reduce(SUM) of float32[2]" in differs


def met_at(port: int) -> str:
    """On a worker: the port of the ranks' store, where the program has set its own MASTER_PORT."""
    before = os.environ["MASTER_PORT"]
    ours = stores.parse_init_method("env://", -1, -1).port
    os.environ["MASTER_PORT"] = str(port)
    found = stores.parse_init_method("env://", -1, -1).port
    os.environ["MASTER_PORT"] = before
    return f"{found == port} {ours != int(before)}"


def test_a_port_that_the_program_sets_is_the_one_where_ranks_meet(cluster: rpcbench.Cluster) -> None:
    assert cluster.rpc_sync("worker1", met_at, (29599,)) == "True True"


def given_store(path: str) -> float:
    store = torch.distributed.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, world_size=2, rank=int(os.environ["RANK"]), timeout=20)
    dist.all_reduce(x := torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()
    return x.item()


def test_ranks_meet_at_a_store_of_the_program(cluster: rpcbench.Cluster, tmp_path: Path) -> None:
    each = [cluster.rpc_async(name, given_store, (f"{tmp_path}/store",)) for name in cluster.workers]
    assert wait_all(each) == [2.0, 2.0]
    with pytest.raises(rpcbench.CollectiveError, match="store does not give the number of ranks: pass world_size"):
        dist.init_process_group(store=torch.distributed.HashStore())
    with pytest.raises(rpcbench.CollectiveError, match="pass store or init_method, not both"):
        dist.init_process_group("gloo", "env://", store=torch.distributed.HashStore())


SCRIPT = """
import sys, torch, rpcbench.distributed as dist
dist.init_process_group("gloo")
dist.all_gather_object(found := [None] * dist.get_world_size(), (dist.get_rank(), sys.argv[1:]))
sys.stdout.write(f"{found}\\n" if dist.get_rank() == 0 else "")
dist.barrier()
"""


@pytest.mark.long
def test_python_m_launch_starts_a_script_on_each_rank(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "rpcbench.distributed.launch", "--pass-local-rank", "--nproc-per-node=2"]
    with addresses.port() as port:
        command += [f"--master-port={port}", str(script), "--epochs"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(0, ['--local_rank=0', '--epochs']), (1, ['--local_rank=1', '--epochs'])]\n"
    wrong = subprocess.run([*command[:3], "gone.py"], capture_output=True, text=True, timeout=100)
    assert (wrong.returncode, wrong.stderr) == (1, "rpcbench launch: there is no script gone.py\n")
