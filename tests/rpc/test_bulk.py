"""Large tensors between workers: in flight, waited for, kept and dropped, with and without shared memory."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from worlds import PATIENCE, until, world

import rpcbench
from rpcbench.base.futures import wait_all
from rpcbench.rpc import rpc_async, rpc_sync
from rpcbench.runtime import timers
from rpcbench.transport import shared_memory

MB = 1 << 20
kept: list[torch.Tensor] = []
gate = threading.Event()


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def total(tensor: torch.Tensor) -> int:
    return int(tensor.sum())


def scribble(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    tensor.zero_()
    return copy


def keep(tensor: torch.Tensor) -> None:
    kept.append(tensor)


def late(tensor: torch.Tensor) -> int:
    gate.wait(PATIENCE)
    return total(tensor)


def echoes(to: str, count: int) -> bool:
    sent = [torch.full((MB,), number, dtype=torch.int32) for number in range(count)]
    return all(map(torch.equal, wait_all([rpc_async(to, echo, (tensor,)) for tensor in sent]), sent))


def shared_bytes() -> int:
    """The allocated bytes of the shared memory that this process has open; a file that is open twice counts twice."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists the directory
            if os.readlink(entry).startswith("/memfd:rpcbench"):
                found += entry.stat().st_blocks * 512
    return found


@pytest.fixture(params=["shared memory", "socket"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCBENCH_SHARED_MEMORY", str(int(request.param == "shared memory")))


@pytest.mark.process
def test_many_large_echoes_can_be_in_flight_at_once(no_leaks: None, way: None) -> None:
    """Eight of 4 MB; then both directions at once; then round three workers."""
    with rpcbench.Cluster(3) as cluster:
        assert echoes("worker1", 8)
        ring = ["worker1", "worker2", "worker3", "worker1"]
        for rounds in (ring[:2] + ring[:1], ring):
            calls = [cluster.rpc_async(one, echoes, (other, 8)) for one, other in itertools.pairwise(rounds)]
            assert all(wait_all(calls))


@pytest.mark.process
def test_a_tensor_outlives_the_worker_that_sent_it(no_leaks: None) -> None:
    with rpcbench.Cluster(2) as cluster:
        sent = torch.arange(MB)
        mine = cluster.rpc_sync("worker1", echo, (sent,))
        cluster.rpc_sync("worker1", keep, (sent,))
        os.kill(cluster.pid("worker1"), signal.SIGKILL)
        until(lambda: "worker1" not in cluster.workers, "the loss to be noticed")
        assert torch.equal(mine, sent)
        mine.neg_()
        assert torch.equal(mine, -sent)
        assert echoes("worker2", 2)
        del mine
        gc.collect()


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_leaks: None) -> Iterator[int]:
    """Two agents that share 10 MB each way, and soon free it if it is unused; yields the bytes shared before."""
    monkeypatch.setattr(shared_memory, "SIZE", 10 * MB)
    monkeypatch.setattr(timers, "TIDY_SECONDS", 0.05)
    gate.clear()
    monkeypatch.delenv("RPCBENCH_TRANSPORT", raising=False)  # only unix sockets can pass shared memory
    gc.collect()
    before = shared_bytes()  # by failed tests: the errors of these keep their memory alive
    with world(tmp_path, 2, threads=9):  # a place for one call beside eight that wait
        yield before
        gate.set()
        kept.clear()


def test_slow_calls_with_large_tensors_do_not_delay_other_calls(little: int) -> None:
    tensors = [torch.full((4 * MB,), number, dtype=torch.uint8) for number in range(8)]
    calls = [rpc_async("worker1", late, (tensor,)) for tensor in tensors]
    assert shared_bytes() > little, "some tensors are in shared memory, which has no room for all"
    assert rpc_sync("worker1", max, (1, 2)) == 2
    gate.set()
    assert wait_all(calls) == [4 * MB * number for number in range(8)]


def test_kept_tensors_do_not_block_later_tensors(little: int) -> None:
    for number in range(4):
        rpc_sync("worker1", keep, (torch.full((MB,), number, dtype=torch.int32),))
    assert echoes("worker1", 4)
    assert [int(tensor[0]) for tensor in kept] == [0, 1, 2, 3]
    assert [total(tensor) for tensor in kept] == [MB * number for number in range(4)]


def test_a_write_to_a_received_tensor_changes_no_other_copy(little: int) -> None:
    sent = torch.arange(MB // 2)
    before = sent.clone()
    got = [rpc_sync("worker1", scribble, (sent,)) for _ in range(3)]
    assert torch.equal(sent, before)
    got[0].zero_()
    assert torch.equal(got[1], before) and torch.equal(got[2], before)


def test_unused_shared_memory_is_returned_to_the_system(little: int) -> None:
    mine = rpc_sync("worker1", echo, (torch.arange(MB // 2),))
    rpc_sync("worker1", keep, (mine,))
    assert shared_bytes() >= little + 8 * MB, "one tensor here, and another one at worker1"
    assert torch.equal(mine, torch.arange(MB // 2))
    del mine
    kept.clear()
    gc.collect()
    until(lambda: shared_bytes() <= little, "the system to have its memory back")
    assert echoes("worker1", 2)


SMALL_SHM = """
import torch, rpcbench
from rpcbench.rpc import rpc_sync
if __name__ == "__main__":
    with rpcbench.Cluster(1):
        big = torch.arange(1 << 22)
        print(torch.equal(rpc_sync("worker1", torch.neg, (big,)), -big))
"""


@pytest.mark.process
def test_large_tensors_work_with_a_small_dev_shm(no_leaks: None, tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a /dev/shm of its own needs root and unshare")
    script = tmp_path / "script.py"
    script.write_text(SMALL_SHM)
    mount = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE)
    assert done.stdout == "True\n", done.stderr
