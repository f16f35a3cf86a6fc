"""The programs of ranks in these tests: `main` runs the function that `config.cluster` names, as rank `config.id`.

An assertion that fails ends the process with status 1, and is in its log.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import rpcbench.rpc as rpc
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcTimeoutError, UnknownWorkerError, WorkerLostError
from rpcbench.rpc import api, init
from rpcbench.transport.base import Link
from rpcbench.wire.messages import View

OVER = "RPC has not been initialized"


def main(config: WorldConfig) -> None:
    globals()[config.cluster](config.id, f"file://{config.directory}/meeting")


def join(rank: int, url: str, world_size: int | None = 3, timeout: float = 20.0) -> None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=timeout, init_method=url)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)


def who() -> str:
    return rpc.get_worker_info().name


# -- calls
def calls(rank: int, url: str) -> None:
    join(rank, url)
    left, right = f"rank{(rank - 1) % 3}", f"rank{(rank + 1) % 3}"
    assert rpc.get_worker_info() == rpc.get_worker_info(f"rank{rank}") == rpc.WorkerInfo(f"rank{rank}", rank)
    assert rpc.get_worker_info(right).id == (rank + 1) % 3
    with pytest.raises(UnknownWorkerError, match="rank0, rank1, rank2"):
        rpc.get_worker_info("rank7")
    assert rpc.rpc_sync(right, who) == rpc.rpc_async(rpc.get_worker_info(right), who).wait() == right
    total = rpc.rpc_sync(left, torch.add, (torch.ones(2), 2), {"alpha": rank})
    assert torch.equal(total, torch.ones(2) + 2 * rank)
    with pytest.raises(RuntimeError, match="already initialized"):
        join(rank, url)
    with pytest.raises(TypeError, match="callable"):
        rpc.rpc_sync(right, 7)  # type: ignore[arg-type]
    rpc.shutdown()
    for late in (lambda: rpc.rpc_sync(right, who), rpc.get_worker_info, lambda: rpc.RRef(1), rpc.shutdown):
        with pytest.raises(RuntimeError, match=OVER):
            late()


def fetch(rref: rpc.RRef[Any]) -> Any:
    return rref.to_here()


def rrefs(rank: int, url: str) -> None:
    join(rank, url)
    right, next_right = f"rank{(rank + 1) % 3}", f"rank{(rank + 2) % 3}"
    rref = rpc.remote(right, torch.full, ((2,), rank + 0.5))
    assert rref.owner() == rpc.get_worker_info(right) and rref.owner_name() == right and not rref.is_owner()
    assert torch.equal(rref.to_here(), torch.full((2,), rank + 0.5))
    assert torch.equal(rpc.rpc_sync(next_right, fetch, (rref,)), torch.full((2,), rank + 0.5))
    assert rpc.rpc_sync(right, fetch, (rpc.RRef({"of": rank}),)) == {"of": rank}
    rpc.shutdown()


# -- asynchronous functions
@rpc.functions.async_execution
def plus_later(to: str, number: int) -> torch.futures.Future[int]:
    return rpc.rpc_async(to, torch.add, (torch.tensor(number), 1)).then(lambda done: int(done.value()) + 1)


@rpc.functions.async_execution
def no_future() -> int:
    return 3


@rpc.functions.async_execution
def fails_later() -> torch.futures.Future[int]:
    return torch.futures.Future().then(lambda _: 1 // 0) if False else rpc.rpc_async(rpc.get_worker_info(), int, ("x",))


class Adder:
    def __init__(self, base: int) -> None:
        self.base = base

    @staticmethod
    @rpc.functions.async_execution
    def static(to: str, number: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(to, int, (number + 1,))

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, to: str, number: int) -> torch.futures.Future[str]:
        return rpc.rpc_async(to, int, (number,)).then(lambda done: f"{cls.__name__} {done.value()}")

    @rpc.functions.async_execution
    def bound(self, to: str, number: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(to, int, (self.base + number,))


def asynchronous(rank: int, url: str) -> None:
    join(rank, url)
    if rank == 0:
        assert rpc.rpc_sync("rank1", plus_later, ("rank2", 5)) == 7
        assert rpc.remote("rank1", plus_later, ("rank2", 5)).to_here() == 7
        assert rpc.rpc_sync("rank1", Adder.static, ("rank2", 1)) == 2
        assert rpc.rpc_sync("rank1", Adder.of_class, ("rank2", 4)) == "Adder 4"
        adder = rpc.remote("rank1", Adder, (10,))
        assert adder.rpc_sync().bound("rank2", 1) == 11
        assert adder.rpc_async().bound("rank2", 2).wait() == 12
        assert adder.remote().bound("rank2", 3).to_here() == 13
        assert adder.rpc_sync().static("rank2", 1) == 2
        for wrong in (lambda: rpc.rpc_sync("rank1", no_future), rpc.remote("rank1", no_future).to_here):
            with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future.*got <class 'int'>"):
                wrong()
        with pytest.raises(ValueError, match="invalid literal"):
            rpc.rpc_sync("rank1", fails_later)
        del adder
    rpc.shutdown()


# -- timeouts
def slow(seconds: float = 30.0) -> None:
    _enough.wait(seconds)


def enough() -> None:
    _enough.set()


_enough = threading.Event()


def timeouts(rank: int, url: str) -> None:
    join(rank, url, world_size=2)
    if rank == 0:
        late = r"RPC ran for more than set timeout \(200 ms\).*slow on rank1"
        with pytest.raises(RpcTimeoutError, match=late):
            rpc.rpc_sync("rank1", slow, timeout=0.2)
        assert rpc.get_rpc_timeout() == 20.0
        rpc._set_rpc_timeout(0.2)
        with pytest.raises(RuntimeError, match=late):
            rpc.rpc_sync("rank1", slow)
        never_made = rpc.remote("rank1", slow)
        with pytest.raises(RuntimeError, match=r"timed out|set timeout"):
            never_made.to_here()
        unlimited = rpc.rpc_async("rank1", slow, timeout=0)
        with pytest.raises(ValueError, match="0 for none"):
            rpc.rpc_sync("rank1", slow, timeout=-3)
        rpc._set_rpc_timeout(20)
        assert not unlimited.done()
        rpc.rpc_sync("rank1", enough)
        assert unlimited.wait() is None
    rpc.shutdown()


# -- worlds that begin and end
def again(rank: int, url: str) -> None:
    """Worlds one after the other at one address, each rank as fast as possible."""
    for number in range(8):
        join(rank, url)
        right = f"rank{(rank + 1) % 3}"
        assert rpc.rpc_sync(right, who) == right, number
        rpc.shutdown()


def served_until_all_are_ready(rank: int, url: str) -> None:
    join(rank, url)
    if rank == 0:
        for _ in range(20):
            assert rpc.rpc_sync("rank1", down, (4, "rank1", "rank2")) == 4
            time.sleep(0.01)
    rpc.shutdown()


def down(levels: int, here: str, there: str) -> int:
    return 0 if levels == 0 else 1 + rpc.rpc_sync(there, down, (levels - 1, there, here))


def dies(rank: int, url: str) -> None:
    join(rank, url)
    if rank == 2:
        begin = time.monotonic()
        with pytest.raises(WorkerLostError, match="rank1"):
            rpc.rpc_sync("rank1", os.kill, (rpc.rpc_sync("rank1", os.getpid), signal.SIGKILL))
        assert time.monotonic() - begin < 5
        assert rpc.rpc_sync("rank0", who) == "rank0"
    if rank == 1:
        threading.Event().wait()
    rpc.shutdown()


settled = False


def look() -> bool:
    return settled


def waited_for(rank: int, url: str) -> None:
    """A call of a faster rank waits until `init_rpc` has set the states of RPC here."""
    states = api._init_rpc_states

    def late(agent: Any) -> None:
        global settled
        while not agent.machine.read_node(lambda node: bool(node.calls.serving)):
            time.sleep(0.005)
        settled = True
        states(agent)  # from here on calls are served

    if rank == 1:
        api._init_rpc_states = late
    join(rank, url)
    if rank != 1:
        assert rpc.rpc_sync("rank1", look)
    rpc.shutdown()


class LateNews(Link):
    """Delays each view by 0.5 s, in which a rank that does not wait for the delivery of the complete view can end."""

    def handle_outgoing(self, to: int, seq: int, message: Any, may_wait: bool) -> None:
        late = isinstance(message, View)
        send = super().handle_outgoing
        threading.Timer(0.5, send, (to, seq, message, True)).start() if late else send(to, seq, message, may_wait)


def leader_dies_as_soon_as_it_is_in(rank: int, url: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=20, init_method=url)
    init.join_world(None, f"rank{rank}", rank, 3, options, LateNews())
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def leader_dies(rank: int, url: str) -> None:
    told: list[str] = []
    logging.getLogger("rpcbench").addFilter(lambda record: bool(told.append(record.getMessage())) or True)
    join(rank, url)
    if rank == 1:
        rpc.rpc_sync("rank2", who)
        with pytest.raises(WorkerLostError, match="rank0"):
            rpc.rpc_sync("rank0", os.kill, (rpc.rpc_sync("rank0", os.getpid), signal.SIGKILL))
    if rank == 0:
        threading.Event().wait()
    with pytest.raises(WorkerLostError, match=f"world of rank{rank} has ended before all were done: rank0 is gone"):
        rpc.shutdown()
    assert [words for words in told if words.startswith(f"rank{rank}: rank0 is lost: its connection")], told


def goes_early(rank: int, url: str) -> None:
    join(rank, url)
    if rank == 1:
        rpc.shutdown(graceful=False)
        return
    if rank == 0:
        while "rank1" in [info.name for info in rpc._get_current_rpc_agent().members()]:
            time.sleep(0.01)
        with pytest.raises(WorkerLostError, match="rank1 is gone"):
            rpc.rpc_sync("rank1", who)
    rpc.shutdown()


def forgets_to_shut_down(rank: int, url: str) -> None:
    join(rank, url, world_size=2)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"waited 0\.2 s for the others to shut down"):
            rpc.shutdown(timeout=0.2)
        assert not rpc._is_current_rpc_agent_set()
        Path(url.removeprefix("file://")).touch()
        return
    while not Path(url.removeprefix("file://")).exists():
        time.sleep(0.01)


def comers_and_goers(rank: int, url: str) -> None:
    """A world without a size is complete at once and open, in any order of ranks."""
    join(rank, url, world_size=None)
    if rank == 0:
        _both.wait(20)
        while len(rpc._get_current_rpc_agent().members()) > 1:
            time.sleep(0.01)
    else:
        await_rank(0)
        rpc.rpc_sync("rank0", meet_there)
    rpc.shutdown()


def await_rank(rank: int) -> None:
    while f"rank{rank}" not in [info.name for info in rpc._get_current_rpc_agent().members()]:
        time.sleep(0.01)


_both = threading.Barrier(3)


def meet_there() -> None:
    _both.wait(20)


# -- the leader of an open world
def lead_passes_on(rank: int, url: str) -> None:
    """Rank 0 leaves first, then 1, then 2, which joins again; rank 3 joins late and leaves last; then 0 joins again."""
    late, over = Path(f"{url.removeprefix('file://')}-late"), Path(f"{url.removeprefix('file://')}-over")
    if rank == 3:
        await_file(late)
    join(rank, url, world_size=None)
    heard: list[tuple[str, str]] = []
    rpc._get_current_rpc_agent().on_member(lambda kind, who, reason: heard.append((kind, who.name)))
    if rank < 3:
        for other in range(3):
            await_rank(other)
        rpc.rpc_sync("rank0", all_there)
        _heard.set()
    {0: goes_first, 1: goes_second, 2: goes_and_comes_again, 3: goes_last}[rank](url, late, over)
    assert not [name for kind, name in heard if kind == "lost"], heard


def all_there() -> None:
    _all_there.wait(20)


_all_there = threading.Barrier(3)


def heard() -> None:
    assert _heard.wait(20)


_heard = threading.Event()


def goes_first(url: str, late: Path, over: Path) -> None:
    world = rpc._get_current_rpc_agent().links.peers.own_identity.epoch
    for other in ("rank1", "rank2"):  # a worker that leaves does not wait for calls that it has yet to answer
        rpc.rpc_sync(other, heard)
    rpc.shutdown()
    await_file(over)
    join(0, url, world_size=None)
    agent = rpc._get_current_rpc_agent()
    assert [info.name for info in agent.members()] == ["rank0"] and agent.links.peers.own_identity.epoch != world
    assert rpc.rpc_sync("rank0", who) == "rank0"
    rpc.shutdown()
    late.unlink()
    over.unlink()


def goes_second(url: str, late: Path, over: Path) -> None:
    await_gone(0)
    kept = rpc.remote("rank2", torch.ones, (2,))
    assert rpc.rpc_sync("rank2", rpc.rpc_sync, ("rank1", who)) == "rank1"
    late.touch()
    await_rank(3)
    assert rpc.rpc_sync("rank3", fetch, (kept,)).tolist() == [1, 1]
    rpc.shutdown()


def goes_and_comes_again(url: str, late: Path, over: Path) -> None:
    await_gone(0)
    await_rank(3)
    await_gone(1)
    assert rpc.rpc_sync("rank3", who) == "rank3"
    rpc.shutdown()
    join(2, url, world_size=None)
    agent = rpc._get_current_rpc_agent()
    assert agent.incarnation == 1
    rpc.rpc_sync("rank3", come_again)
    rpc.shutdown()


def goes_last(url: str, late: Path, over: Path) -> None:
    agent = rpc._get_current_rpc_agent()
    assert _again.wait(20)
    while [info.name for info in agent.members()] != ["rank3"]:
        time.sleep(0.01)
    assert rpc.rpc_sync("rank3", who) == "rank3"
    rpc.shutdown()
    over.touch()


def come_again() -> None:
    _again.set()


_again = threading.Event()


def await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def await_gone(rank: int) -> None:
    while f"rank{rank}" in [info.name for info in rpc._get_current_rpc_agent().members()]:
        time.sleep(0.01)


def leader_of_an_open_world_dies(rank: int, url: str) -> None:
    """An open world ends with a leader that was killed; the other ranks get an error, and may found another world."""
    if rank:
        await_file(Path(f"{url.removeprefix('file://')}"))
    join(rank, url, world_size=None)
    if rank == 0:
        Path(f"{url.removeprefix('file://')}").touch()
        threading.Event().wait()
    there = Path(f"{url.removeprefix('file://')}").parent / "there"
    await_rank(3 - rank)
    rpc.rpc_sync("rank1", both_there)
    if rank == 1:
        pid = rpc.rpc_sync("rank0", os.getpid)
        await_file(there)  # rank 2 has its answer, which the end of the world would take from it
        there.unlink()
        os.kill(pid, signal.SIGKILL)
    else:
        there.touch()
    await_gone(0)
    with pytest.raises(WorkerLostError, match="rank0 is gone"):
        rpc.rpc_sync("rank0", who)
    with pytest.raises(WorkerLostError, match="its world ended with its leader, rank0"):
        rpc.rpc_sync(f"rank{3 - rank}", who)
    told = there.parent
    (told / f"told{rank}").touch()
    await_file(told / f"told{3 - rank}")  # a rank that shuts down says goodbye, and has left from then on
    (told / f"told{3 - rank}").unlink()
    rpc.shutdown()
    join(rank, url, world_size=None)
    await_rank(3 - rank)
    assert rpc.rpc_sync(f"rank{3 - rank}", who) == f"rank{3 - rank}"
    rpc.rpc_sync("rank1", both_done)
    if rank == 1:
        await_gone(2)  # it has its answer, which this rank would take from it by leaving
    rpc.shutdown()


def both_there() -> None:
    _both_there.wait(20)


def both_done() -> None:
    _both_done.wait(20)


_both_there, _both_done = threading.Barrier(2), threading.Barrier(2)


def come_and_go(rank: int, url: str) -> None:
    """Join and leave as fast as possible: leaders change, and worlds end and begin, at any moment of the others."""
    for number in range(15):
        join(rank, url, world_size=None)
        infos = rpc._get_current_rpc_agent().members()
        try:
            to = infos[number % len(infos)]
            assert rpc.rpc_sync(to, who) == to.name
        except (WorkerLostError, UnknownWorkerError, RpcTimeoutError) as error:
            assert not isinstance(error, RpcTimeoutError), (
                error
            )  # the member has left meanwhile, and the error shows that
        rpc.shutdown()


# -- RRefs at shutdown
def lets_go(rank: int, url: str) -> None:
    """Python still holds RRefs at shutdown, in three ways; the workers release them nevertheless."""
    api._ignore_rref_leak = False
    join(rank, url)
    right, next_right = f"rank{(rank + 1) % 3}", f"rank{(rank + 2) % 3}"
    mine, own = rpc.remote(right, torch.ones, (2,)), rpc.RRef(rank)
    rpc.rpc_sync(next_right, hold, (mine,))
    rpc.rpc_sync(right, hold, (own,))
    rpc.shutdown()
    with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion"):
        mine.to_here()
    assert own.to_here() == rank


_held: list[rpc.RRef[Any]] = []


def hold(rref: rpc.RRef[Any]) -> None:
    _held.append(rref)


def leaks(rank: int, url: str) -> None:
    """The workers do not release them: the owner reports the holder of each RRef, unless leaks are ignored."""
    api._delete_all_user_and_unforked_owner_rrefs = lambda: None  # type: ignore[assignment]
    for ignored in (True, False):
        join(rank, url)
        api._ignore_rref_leak = ignored
        _held.append(rpc.remote(f"rank{(rank + 1) % 3}", torch.ones, (2,)))
        if ignored:
            rpc.shutdown()
            continue
        words = f"(?s)rank{rank} has 1 RRef.*Leaking RRef.*rank{(rank - 1) % 3} holds.*Held here.*made at.*_held.append"
        with pytest.raises(RuntimeError, match=words):
            rpc.shutdown()


# -- other ways to join
def old_ways(rank: int, url: str) -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        rpc.init_model_parallel(f"rank{rank}")
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"{url}-group", rank=rank, world_size=3)
    with pytest.raises(ValueError, match="self_rank is 7"):
        rpc.init_model_parallel(f"rank{rank}", self_rank=7)
    for place, end in ((None, rpc.join_rpc), (url, rpc.wait_all_workers)):
        rpc.init_model_parallel(f"rank{rank}", rpc.RpcBackend.PROCESS_GROUP, rank, place, num_send_recv_threads=3)
        assert [info.name for info in rpc._get_current_rpc_agent().get_worker_infos()] == ["rank0", "rank1", "rank2"]
        assert rpc._get_debug_info()["agent.thread_pool_size"] == "3"
        assert rpc.rpc_sync(f"rank{(rank + 1) % 3}", who) == f"rank{(rank + 1) % 3}"
        end()
    group.destroy_process_group()


def by_store(rank: int, url: str) -> None:
    store = torch.distributed.FileStore(f"{url.removeprefix('file://')}-store", 3)
    for _ in range(3):
        rpc._init_rpc_backend(rpc.BackendType.TENSORPIPE, store, f"rank{rank}", rank, 3)
        assert rpc.rpc_sync(f"rank{(rank + 1) % 3}", who) == f"rank{(rank + 1) % 3}"
        rpc.shutdown()


def same_names(rank: int, url: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="worker name one is not unique"):
        rpc.init_rpc("one", rank=rank, world_size=3, rpc_backend_options=options)
    assert time.monotonic() - begin < 20  # not only at the timeout of the join
