"""Rendezvous of ranks by environment, port and file, also with missing ranks, and again after that."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import addresses
import pytest
import torch
from distributed_outcome import outcome
from worlds import cluster_fixture, until

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.errors import CollectiveError, RpcTimeoutError
from rpcbench.base.futures import wait_all
from rpcbench.distributed import groups, stores

cluster = cluster_fixture(4, gpus="none")


@pytest.fixture
def port() -> Iterator[int]:
    with addresses.port() as kept:
        yield kept


def found(**how: Any) -> tuple[int, int, float]:
    """On a worker: its rank, the number of ranks, and the sum of 10 ** rank over all of them; then the world ends."""
    dist.init_process_group("gloo", timeout=20, **how)
    dist.all_reduce(total := torch.tensor([10.0 ** dist.get_rank()]))
    place = dist.get_rank(), dist.get_world_size(), total.item()
    dist.barrier()
    dist.destroy_process_group()
    return place


def on(cluster: rpcbench.Cluster, how: dict[str, dict[str, Any]]) -> list[tuple[int, int, float]]:
    return wait_all([cluster.rpc_async(name, found, (), each) for name, each in how.items()])


METHODS: list[Callable[[int, Path], str]] = [
    lambda port, folder: f"tcp://127.0.0.1:{port}", lambda port, folder: f"file://{folder}/meeting",
]  # fmt: skip


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_rank_0_hosts_the_store_at_any_address_of_loopback(host: str) -> None:
    assert stores.parse_init_method(f"tcp://{host}:29500", 0, 2).hosts_store is True
    assert stores.parse_init_method(f"tcp://{host}:29500", 1, 2).hosts_store is False


@pytest.mark.process
@pytest.mark.parametrize("method", METHODS)
def test_ranks_are_assigned_or_kept_if_given(cluster: rpcbench.Cluster, port: int, tmp_path: Path, method: Any) -> None:
    how = {"init_method": method(port, tmp_path), "world_size": 3}
    names = ["worker4", "worker2", "worker1"]
    for _ in range(2):  # twice at the same address
        assert sorted(on(cluster, dict.fromkeys(names, how))) == [(0, 3, 111), (1, 3, 111), (2, 3, 111)]
    if "file" in method(port, tmp_path):
        given = {name: {**how, "rank": rank} for rank, name in enumerate(names)}
        assert on(cluster, given) == [(0, 3, 111), (1, 3, 111), (2, 3, 111)]


@pytest.mark.process
def test_given_ranks_meet_at_the_port_of_rank_0(cluster: rpcbench.Cluster, port: int) -> None:
    how = {"init_method": f"tcp://127.0.0.1:{port}", "world_size": 2}
    given = {"worker3": {**how, "rank": 1}, "worker2": {**how, "rank": 0}}
    for _ in range(2):
        assert on(cluster, given) == [(1, 2, 11), (0, 2, 11)]


@pytest.mark.process
@pytest.mark.parametrize("method", METHODS)
def test_groups_with_different_names_at_one_address_are_separate(
    cluster: rpcbench.Cluster, port: int, tmp_path: Path, method: Any
) -> None:
    how = {"init_method": method(port, tmp_path), "world_size": 2}
    names = {"worker1": "a", "worker2": "b", "worker3": "b", "worker4": "a"}
    met = on(cluster, {worker: {**how, "group_name": name} for worker, name in names.items()})
    assert sorted(met[::3]) == sorted(met[1:3]) == [(0, 2, 11), (1, 2, 11)]


@pytest.mark.process
def test_workers_of_a_cluster_have_the_environment_of_their_rank(cluster: rpcbench.Cluster) -> None:
    assert on(cluster, {name: {} for name in cluster.workers}) == [(rank, 4, 1111) for rank in range(4)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    told = [cluster.rpc_sync(name, lambda: [os.environ[each] for each in names]) for name in cluster.workers]
    assert told == [[str(rank), "4", str(rank), "4", "127.0.0.1"] for rank in range(4)]


def waits(method: str, seconds: float) -> str:
    return outcome(dist.init_process_group, "gloo", method, 3, timeout=seconds)


@pytest.mark.process
def test_an_incomplete_rendezvous_times_out_and_names_the_missing_ranks(
    cluster: rpcbench.Cluster, tmp_path: Path
) -> None:
    meeting = tmp_path / "meeting"
    method = f"file://{meeting}"
    patient = cluster.rpc_async("worker1", waits, (method, 100))
    until(lambda: meeting.exists() and b"here/0" in meeting.read_bytes())
    first, second = wait_all([patient, cluster.rpc_async("worker2", waits, (method, 0.5))])
    assert first == second and "Of 3 ranks 2 had come; missing: 2." in first and first.startswith("RpcTimeoutError: ")
    how = {"init_method": method, "world_size": 3}  # a late rank meets the ones that try again
    assert sorted(on(cluster, dict.fromkeys(["worker1", "worker2", "worker3"], how)))[2] == (2, 3, 111)


def waits_for_ever(method: str, sign: str) -> None:
    Path(sign).touch()
    dist.init_process_group("gloo", method, 3, timeout=100)


@pytest.mark.process
def test_a_worker_that_was_killed_while_it_waited_takes_no_rank(tmp_path: Path) -> None:
    meeting, sign = tmp_path / "meeting", tmp_path / "sign"
    method = f"file://{meeting}"
    with rpcbench.Cluster(3) as cluster:
        cluster.rpc_async("worker1", waits_for_ever, (method, str(sign)))
        until(lambda: sign.exists() and meeting.exists() and b"here/0" in meeting.read_bytes())
        os.kill(cluster.pid("worker1"), signal.SIGKILL)
        until(lambda: cluster.lost == ["worker1"])
        cluster.restart("worker1")
        how = {"init_method": method, "world_size": 3}
        assert sorted(on(cluster, dict.fromkeys(cluster.workers, how))) == [(0, 3, 111), (1, 3, 111), (2, 3, 111)]


REFUSED = [
    ("tcp://239.1.2.3:29500", 0, 2, "239.1.2.3 is a multicast address, and torch no longer supports those: use"),
    ("tcp://[ff15::1]:29500", 0, 2, "ff15::1 is a multicast address"),
    ("tcp://localhost", 0, 2, "names no address and port"),
    ("mpi://", 0, 2, "there is no init method 'mpi://': use env://, tcp://HOST:PORT or file:///PATH"),
    ("file://meeting", 0, 2, "three slashes"),
    ("file:///no/such/place", 0, 2, "there is no directory for /no/such/place"),
    ("tcp://127.0.0.1:29500", 0, -1, "does not give the number of ranks: pass world_size="),
    ("tcp://127.0.0.1:29500", 2, 2, "a world of 2 has ranks 0 to 1, not 2"),
    ("tcp://127.0.0.1:29500?rank=1", 0, 2, "leave one out"),
    ("tcp://127.0.0.1:abc", 0, 2, "is not valid (Port could not be cast to integer value as 'abc'): use env://"),
    ("tcp://127.0.0.1:29500?rank=a", -1, 2, "is not valid (invalid literal for int() with base 10: 'a')"),
    ("tcp://nowhere.invalid:29500", 0, 2, "tcp://nowhere.invalid:29500 is not valid ("),
    ("env://", -1, -1, "env:// needs RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment"),
]


@pytest.mark.parametrize(("method", "rank", "size", "words"), REFUSED)
def test_an_invalid_init_method_is_refused_with_its_reason(
    monkeypatch: Any, method: str, rank: int, size: int, words: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CollectiveError) as caught:
        stores.parse_init_method(method, rank, size)
    assert words in str(caught.value)


def test_an_environment_with_an_unknown_host_or_an_invalid_port_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(CollectiveError, match=r"cannot open the store at nowhere\.invalid:29500"):
        stores.store_at(stores.parse_init_method("env://", 0, 2), 5)
    monkeypatch.setenv("MASTER_PORT", "abc")
    with pytest.raises(CollectiveError, match="with numbers in RANK, WORLD_SIZE and MASTER_PORT"):
        stores.parse_init_method("env://", 0, 2)


def test_a_store_is_reused_and_listens_only_on_the_named_address(port: int) -> None:
    place = stores.parse_init_method(f"tcp://127.0.0.1:{port}", 0, 2)
    store = stores.store_at(place, 5)
    assert store is stores.store_at(place, 5)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    stores.forget_store("127.0.0.1", port)


def test_a_port_in_use_is_refused_with_advice() -> None:
    with socket.socket() as taken, pytest.raises(CollectiveError, match=r"rank 0 cannot open .* choose another"):
        taken.bind(("127.0.0.1", 0))
        stores.store_at(stores.parse_init_method(f"tcp://127.0.0.1:{taken.getsockname()[1]}", 0, 2), 5)


def test_a_store_that_does_not_answer_is_reported_with_what_was_met_there(port: int) -> None:
    place = stores.parse_init_method(f"tcp://127.0.0.1:{port}", 1, 2)
    words = rf"answered at 127\.0\.0\.1:{port} for 0\.1 s \(Connection refused\): rank 0 has not come, or a firewall"
    with pytest.raises(RpcTimeoutError, match=words):
        stores.store_at(place, 0.1)


@pytest.mark.process
def test_no_other_socket_can_take_the_port_of_a_cluster(cluster: rpcbench.Cluster) -> None:
    port = int(str(cluster.rpc_sync("worker1", os.getenv, ("MASTER_PORT",))))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    ranks = on(cluster, {name: {} for name in cluster.workers})
    assert ranks == [(rank, 4, 1111.0) for rank in range(4)]


BACKENDS = [("tcp", "torch has dropped the backend 'tcp': use 'gloo'"), ("smoke", "there is no backend 'smoke'")]


@pytest.mark.parametrize(("name", "words"), BACKENDS)
def test_an_unknown_or_dropped_backend_is_refused(name: str, words: str) -> None:
    with pytest.raises(CollectiveError, match=words):
        groups.torch_backend(name)


def test_a_backend_is_refused_only_if_torch_does_not_have_it() -> None:
    has = {"gloo": True, "mpi": torch.distributed.is_mpi_available(), "nccl": torch.cuda.is_available()}
    for name, there in has.items():
        reason = outcome(groups.torch_backend, name)
        assert (reason == "") is there, reason
