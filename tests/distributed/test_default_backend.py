"""The backend that no program names: nccl where each rank has a GPU of its own, otherwise gloo, alike on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpus import fake_gpus

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.errors import CollectiveError
from rpcbench.base.futures import wait_all
from rpcbench.distributed import backends, groups
from rpcbench.distributed.backends import backend_offer, choose_backend
from rpcbench.transport.hosts import host_id


@pytest.mark.parametrize(
    ("offers", "backend"),
    [
        (["h/GPU-0", "h/GPU-1"], "nccl"),
        (["h/GPU-0"], "nccl"),
        (["h/0", "k/0"], "nccl"),  # of two hosts
        (["h/GPU-0", ""], "gloo"),
        (["h/GPU-0", "h/GPU-0"], "gloo"),  # shared
        (["", ""], "gloo"),
        (["h/GPU-0", "backend gloo"], "gloo"),
        (["", "backend nccl"], "nccl"),
        (["backend mpi", "backend mpi"], "mpi"),
    ],
)
def test_ranks_with_these_offers_choose(offers: list[str], backend: str) -> None:
    assert choose_backend({f"rank {rank}": each for rank, each in enumerate(offers)}) == backend


def test_ranks_that_name_different_backends_are_named() -> None:
    with pytest.raises(CollectiveError, match=r"(?s)different backends.*\n  rank 0 \(a\): gloo\n  rank 2 \(c\): nccl$"):
        choose_backend({"rank 0 (a)": "backend gloo", "rank 1 (b)": "h/0", "rank 2 (c)": "backend nccl"})


def test_a_rank_offers_its_own_gpu_or_names_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpus(tmp_path, 2, "1") as fake:
        assert backend_offer(None) == "", "torch cannot use it"
        monkeypatch.setattr(backends, "_can_use_nccl", lambda: True)
        assert backend_offer(None) == f"{host_id()}/{fake.uuid(1)}"
        assert backend_offer("GLOO") == "backend gloo"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        assert backend_offer(None) == "", "it may select either"
    assert not torch.cuda.is_initialized()


def begun(backend: str | None) -> str:
    try:
        return summed(backend)
    except RuntimeError as error:
        return str(error)


def summed(backend: str | None) -> str:
    dist.init_process_group(*([] if backend is None else [backend]), timeout=30)
    world = groups._State.world
    assert world is not None
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return f"{world.backend} {total.item():g}"


def told(cluster: rpcbench.Cluster, *named: str | None) -> list[Any]:
    """The backend and the sum on each worker, or its error."""
    calls = zip(cluster.workers, named, strict=True)
    return list(wait_all([cluster.rpc_async(worker, begun, (backend,)) for worker, backend in calls]))


@pytest.mark.process
def test_workers_agree_before_a_tensor_moves(no_leaks: None) -> None:
    with rpcbench.Cluster(2) as made:
        expected = "nccl" if torch.cuda.device_count() > 1 else "gloo"
        assert told(made, None, None) == [f"{expected} 2"] * 2
        assert told(made, None, "gloo") == ["gloo 2"] * 2
        if torch.distributed.is_mpi_available() or torch.cuda.is_available():
            return
        assert all("has none" in each for each in told(made, "nccl", "nccl")), "each knows that alone"
