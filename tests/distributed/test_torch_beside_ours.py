"""Process groups of torch's own functions and of ours in one cluster, in turn, any number of times at its address."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import addresses
import pytest
import torch
from distributed_outcome import outcome

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.futures import wait_all
from rpcbench.distributed import stores

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def cluster() -> Iterator[rpcbench.Cluster]:
    with rpcbench.Cluster(2) as made:
        yield made


def of_torch() -> float:
    torch.distributed.init_process_group("gloo")
    torch.distributed.all_reduce(x := torch.ones(1))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return x.item()


def of_ours() -> float:
    dist.init_process_group("gloo", timeout=20)
    dist.all_reduce(x := torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()
    return x.item()


def test_torch_and_we_found_groups_in_turn_at_one_address(cluster: rpcbench.Cluster) -> None:
    for deed in (of_ours, of_torch, of_torch, of_ours, of_ours, of_torch):
        assert wait_all([cluster.rpc_async(name, deed) for name in cluster.workers]) == [2.0, 2.0]
    cluster.restart("worker2")  # another generation has other ports
    for deed in (of_torch, of_ours, of_torch):
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


def met_at(port: int) -> str:
    """On a worker: the port of the ranks' store, where the program has set its own MASTER_PORT."""
    before = os.environ["MASTER_PORT"]
    ours = stores.read("env://", -1, -1).port
    os.environ["MASTER_PORT"] = str(port)
    found = stores.read("env://", -1, -1).port
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
