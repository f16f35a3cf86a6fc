"""Clusters on real GPUs: pins, the default backend, figures, tensors on GPUs in calls, and an error about memory.

One GPU suffices for most: two workers share it where a test names it twice.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.futures import wait_all
from rpcbench.distributed import groups
from rpcbench.rpc import rpc_sync
from rpcbench.runtime import gpus

COUNT = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(COUNT < 1, reason="there is no CUDA device here"),
]
two_devices = pytest.mark.skipif(COUNT < 2, reason="there are not two CUDA devices here")
SHARED = {"worker1": {"cuda:0": "cuda:0"}, "worker2": {"cuda:0": "cuda:0"}}


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """CUDA and the driver's library keep descriptors for as long as this process lives: they are no leak of a test."""
    torch.zeros(1, device="cuda:0")
    gpus.visible_gpus()


def seen() -> tuple[int, str, str]:
    """How many GPUs CUDA shows, which one is the first, and LOCAL_RANK."""
    return torch.cuda.device_count(), str(torch.cuda.get_device_properties(0).uuid), os.environ["LOCAL_RANK"]


def everywhere(cluster: rpcbench.Cluster, function: Any, *args: Any) -> list[Any]:
    return list(wait_all([cluster.rpc_async(name, function, args) for name in cluster.workers]))


def test_each_worker_computes_on_a_gpu_of_its_own_also_after_a_restart(no_leaks: None) -> None:
    with rpcbench.Cluster(min(COUNT, 4)) as made:
        there = everywhere(made, seen)
        assert [(count, rank) for count, _, rank in there] == [(1, "0")] * len(there)
        assert len({uuid for _, uuid, _ in there}) == len(there)
        last = made.workers[-1]
        made.restart(last)
        assert made.rpc_sync(last, seen) == there[-1]


def test_a_number_said_twice_is_shared_and_none_shows_all(no_leaks: None) -> None:
    last = COUNT - 1
    with rpcbench.Cluster(2, gpus=[last, last]) as made:
        first, second = everywhere(made, seen)
        assert first == second and first[0] == 1
    with rpcbench.Cluster(1, gpus="none") as made:
        assert made.rpc_sync("worker1", torch.cuda.device_count) == COUNT


def summed() -> tuple[str, float, float]:
    """The default backend, and the sums of a tensor on the GPU and of one on the CPU."""
    dist.init_process_group(timeout=60)
    world = groups._State.world
    assert world is not None
    there, here = torch.ones(1000, device="cuda"), torch.ones(1000)
    dist.all_reduce(there)
    dist.all_reduce(here)
    dist.destroy_process_group()
    return world.backend, there.sum().item(), here.sum().item()


@two_devices
def test_ranks_with_a_gpu_each_use_nccl_by_default(no_leaks: None) -> None:
    with rpcbench.Cluster(2) as made:
        assert everywhere(made, summed) == [("nccl", 2000.0, 2000.0)] * 2


def test_ranks_that_share_a_gpu_use_gloo_by_default(no_leaks: None) -> None:
    with rpcbench.Cluster(2, gpus=[0, 0]) as made:
        assert everywhere(made, summed) == [("gloo", 2000.0, 2000.0)] * 2
    with rpcbench.Cluster(1, gpus=[0]) as made:
        assert everywhere(made, summed) == [("nccl", 1000.0, 1000.0)]


def doubled(tensor: torch.Tensor, to: str = "") -> torch.Tensor:
    """Twice the tensor, computed here or on another worker; it must be on a GPU."""
    assert tensor.is_cuda, tensor.device
    return rpc_sync(to, doubled, (tensor,)) if to else tensor * 2


def made_there(to: str) -> list[float]:
    return doubled(torch.arange(3.0, device="cuda"), to).tolist()


def test_tensors_go_from_gpu_to_gpu_by_device_maps(no_leaks: None) -> None:
    pins = [0, COUNT - 1]
    with rpcbench.Cluster(2, gpus=pins, device_maps=SHARED) as made:
        x = torch.arange(3.0, device="cuda:0")
        answer = made.rpc_sync("worker1", doubled, (x, "worker2"))
        assert answer.device == x.device and answer.tolist() == [0, 2, 4]
        assert made.rpc_sync("worker2", made_there, ("worker1",)) == [0, 2, 4]


def test_the_status_shows_the_memory_that_a_worker_takes(no_leaks: None) -> None:
    pytest.importorskip("pynvml", reason="figures need nvidia-ml-py")
    with rpcbench.Cluster(1, gpus=[0]) as made:
        made.run("worker1", "import torch; torch.zeros(1, device='cuda')")
        (before,) = made.status()
        made.run("worker1", "kept = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda')")
        (after,) = made.status()
        assert before.gpu is not None and after.gpu is not None
        assert (after.gpu.memory or 0) - (before.gpu.memory or 0) > 1 << 29
        assert after.gpu.name in torch.cuda.get_device_name(0) and "GPU memory" in repr(made.status())


def taken() -> torch.Tensor:
    return torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")


def test_a_worker_without_memory_left_says_what_it_asked_for(no_leaks: None) -> None:
    with rpcbench.Cluster(1, gpus=[0]) as made:
        with pytest.raises(torch.OutOfMemoryError) as called:
            made.rpc_sync("worker1", taken)
        (note,) = called.value.__notes__
        assert note.startswith("worker1 ran out of GPU memory") and " GiB" in note and "it asked for " in note
        with pytest.raises(torch.OutOfMemoryError) as ran:
            made.run("worker1", "import torch; torch.empty(1 << 44, dtype=torch.uint8, device='cuda')")
        assert any("worker1 ran out of GPU memory" in line for line in ran.value._render_traceback_())
