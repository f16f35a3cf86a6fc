"""Mismatched or invalid calls of today's operations: each is an error in words on all ranks, and the group goes on."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed_outcome import outcome
from test_faults_of_ranks import full, me, told

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.errors import AuthenticationError, CollectiveError
from rpcbench.base.futures import wait_all
from rpcbench.distributed import objects
from rpcbench.distributed.arguments import accept_older_order, choose_rank, timeout_seconds
from rpcbench.distributed.point_to_point import MOST_TAG
from rpcbench.transport import run_dir

pytestmark = pytest.mark.process
HANG_SECONDS = 25.0


def lambda_with_lock() -> object:
    import threading

    return threading.Lock()


DIFFERENT: list[tuple[Callable[[], object], str, str]] = [
    (lambda: dist.all_gather_into_tensor(torch.zeros(7), torch.ones(2)),
     "rank 0 (worker1) calls all_gather_into_tensor",
     "output_tensor is float32[7]; for 4 ranks it must be float32[8]"),
    (lambda: dist.all_gather_into_tensor(torch.zeros(8, dtype=torch.float64), torch.ones(2)), "rank 0 (worker1)",
     "output_tensor is float64[8]; for 4 ranks it must be float32[8]"),
    (lambda: dist.all_gather_into_tensor([1], torch.ones(2)), "rank 0 (worker1)", "pass a tensor, not list"),
    (lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(2)), "rank 3 (worker4)",
     "input is float32[2]; for 4"),
    (lambda: dist.reduce_scatter(torch.zeros(2), full(4), dist.ReduceOp.BAND), "rank 2 (worker3)",
     "BAND has no meaning"),
    (lambda: dist.reduce_scatter(torch.zeros(2), full(3 if me() == 1 else 4)), "rank 1 (worker2)",
     "input_list has 3 tensors for a group of 4"),
    (lambda: dist.all_to_all(full(4), full(4 if me() else 5)), "rank 0 (worker1)",
     "input_tensor_list has 5 tensors for a group of 4"),
    (lambda: dist.all_to_all([torch.zeros(3 if me() == i == 2 else 2) for i in range(4)], full(4)),
     "rank 2 (worker3) sends 2 elements to rank 2 (worker3), which takes 3", "do not fit together"),
    (lambda: dist.all_to_all(full(4), [torch.zeros(2, dtype=torch.float64) for _ in range(4)]), "rank 0 (worker1)",
     "its tensors are of several dtypes: float32, float64"),
    (lambda: dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1] * 4, [1, 1, 2, 0] if me() == 3 else None),
     "rank 3 (worker4) sends 2 rows to rank 2 (worker3), which takes 1",
     "rank 3 (worker4) sends 0 rows to rank 3 (worker4), which takes 1"),
    (lambda: dist.all_to_all_single(torch.zeros(5), torch.ones(4)), "rank 0 (worker1)",
     "output has 5 rows, which do not split evenly among 4 ranks"),
    (lambda: dist.all_to_all_single(torch.zeros(4), torch.ones(4), [4]), "rank 0 (worker1)",
     "output_split_sizes=[4] do not split 4 rows among 4 ranks"),
    (lambda: dist.all_to_all_single(torch.zeros(4, 3), torch.ones(4, 2)), "rank 0 (worker1)",
     "output is float32[*, 3], and input float32[*, 2]"),
    (lambda: dist.all_to_all_single(torch.zeros(4, 2), torch.ones(4, 2)) if me() else
     dist.all_to_all_single(torch.zeros(4, 3), torch.ones(4, 3)),
     "rank 0 (worker1) calls all_to_all_single of float32[*, 3]",
     "rank 1 (worker2) calls all_to_all_single of float32[*, 2]"),
    (lambda: dist.all_to_all_single(torch.tensor(1.0), torch.ones(4)), "rank 0 (worker1)",
     "output is not a tensor of rows"),
    (lambda: dist.broadcast(torch.ones(1)), "rank 0 (worker1)", "pass src, a rank of the world, or group_src"),
    (lambda: dist.broadcast(torch.ones(1), 0, group_src=0), "rank 0 (worker1)", "pass src or group_src, not both"),
    (lambda: dist.broadcast(torch.ones(1), "0"), "rank 0 (worker1)", "src is a rank, not str"),
    (lambda: dist.reduce(torch.ones(1), group_dst=4), "rank 0 (worker1)", "group_dst=4 is not in the group, which has"),
    (lambda: dist.all_reduce(torch.ones(1 + me() % 2), async_op=True).wait(), "rank 0 (worker1)", "of float32[2]"),
    (lambda: dist.barrier(async_op=True).wait() if me() else dist.all_reduce(torch.ones(1), async_op=True).wait(),
     "rank 0 (worker1) calls all_reduce(SUM) of float32[1]", "rank 2 (worker3) calls barrier"),
    (lambda: dist.monitored_barrier() if me() else dist.barrier(), "rank 0 (worker1) calls barrier",
     "rank 2 (worker3) calls monitored_barrier"),
    (lambda: dist.all_gather_object([None] * 3, 1), "rank 0 (worker1)", "object_list has 3 places for a group of 4"),
    (lambda: dist.all_gather_object([None] * 4, lambda_with_lock() if me() == 1 else 1), "rank 1 (worker2)",
     "cannot pickle '_thread.lock' object"),
    (lambda: dist.gather_object(1, [None] * 4, 2), "rank 0 (worker1)",
     "object_gather_list is for rank 2, not for rank 0"),
    (lambda: dist.gather_object(1), "rank 0 (worker1)", "rank 0 passes no object_gather_list"),
    (lambda: dist.scatter_object_list([None], [1, 2], 1), "rank 1 (worker2)",
     "scatter_object_input_list has 2 places for"),
    (lambda: dist.scatter_object_list([], [1] * 4), "rank 0 (worker1)", "scatter_object_output_list has no place"),
    (lambda: dist.broadcast_object_list([1] * (1 + me() // 3)),
     "rank 0 (worker1) calls broadcast_object_list(src=0) of 1",
     "rank 3 (worker4) calls broadcast_object_list(src=0) of 2"),
    (lambda: dist.new_group([0, 1], backend="smoke"), "new_group([0, 1], backend smoke)",
     "there is no backend 'smoke'"),
    (lambda: dist.new_group([0, 1], timeout=5 + me()), "rank 0 (worker1): [0, 1], timeout 5 s",
     "rank 3 (worker4): [0, 1], timeout 8 s"),
    (lambda: dist.new_group([1, 0], sort_ranks=me() > 0), "rank 0 (worker1): [1, 0], in this order",
     "rank 1 (worker2): [1, 0]\n"),
]  # fmt: skip


@pytest.mark.parametrize(("deed", "first", "second"), DIFFERENT)
def test_a_wrong_call_of_today_raises_the_reason_on_all_ranks(
    everyone: Any, deed: Callable[[], object], first: str, second: str
) -> None:
    told(everyone, deed, first, second)


def refused_at_once() -> list[str]:
    """Calls that do not begin: no other rank waits for them."""
    x, other = torch.ones(1), (me() + 1) % 4
    deeds: list[Callable[[], object]] = [
        lambda: dist.send(x, other, tag=-1), lambda: dist.recv(x, other, tag=MOST_TAG + 1),
        lambda: dist.isend(x, other, tag="a"), lambda: dist.isend(x), lambda: dist.irecv(x, -1),
        lambda: dist.P2POp(dist.all_reduce, x, other), lambda: dist.P2POp(dist.isend, x, me()),
        lambda: dist.batch_isend_irecv([]), lambda: dist.batch_isend_irecv([x]),
        lambda: dist.send_object_list([1], me()), lambda: dist.recv_object_list([None], 7),
        lambda: dist.send_object_list([lambda_with_lock()], other), lambda: dist.new_subgroups(3),
        lambda: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]]), lambda: dist.get_group_rank(None, 4),
        lambda: dist.get_global_rank(None, 4), lambda: dist.barrier(timeout=0),
        lambda: dist.all_reduce(x, group=torch.distributed.GroupMember.NON_GROUP_MEMBER),
    ]  # fmt: skip
    return [outcome(deed) for deed in deeds]


REFUSED = [
    f"tag=-1 is not a number from 0 to {MOST_TAG}", f"tag={MOST_TAG + 1} is not a number", "tag='a' is not a number",
    "pass dst, a rank of the world, or group_dst", "rank -1 is not in the group",
    "a P2POp is an isend or an irecv, not all_reduce", "rank 0 is this rank", "takes a list of P2POp of rpcbench.distr",
    "not Tensor", "rank 0 is this rank", "rank 7 is not in the group", "cannot pickle '_thread.lock' object",
    "a group of 4 ranks does not split into subgroups of 3", "ranks [1] are in more than one of the subgroups",
    "rank 4 is not in the group", "position 4 is not in the group, which has ranks 0 to 3",
    "timeout=0: pass a positive number of seconds", "rank 0 (worker1) is not in this group",
]  # fmt: skip


def test_calls_that_cannot_begin_are_refused_at_once(everyone: Any) -> None:
    said = everyone(refused_at_once)[0]
    assert len(said) == len(REFUSED)
    for text, words in zip(said, REFUSED, strict=True):
        assert text.startswith("CollectiveError: ") and words in text, text


def failed_futures() -> tuple[str, str, bool, str]:
    """An operation whose ranks differ: its future, its `exception` and its `wait` have the error."""
    work = dist.all_reduce(torch.ones(1 + me()), async_op=True)
    future = outcome(work.get_future().wait)
    early = dist.irecv(torch.ones(1), (me() + 1) % 4, tag=7)
    unready = outcome(early.result)
    dist.barrier()  # no rank sends before all have looked
    dist.isend(torch.ones(1), (me() - 1) % 4, tag=7).wait()
    early.wait()
    return future, type(work.exception()).__name__, work.is_success(), unready


def test_the_future_of_a_failed_operation_has_its_error(everyone: Any) -> None:
    for future, kind, success, unready in everyone(failed_futures):
        assert "calls all_reduce(SUM) of float32[3]" in future and (kind, success) == ("CollectiveError", False)
        assert "has not completed: call wait() first" in unready


def taken_by_other_kinds() -> list[str]:
    """Rank 0 sends objects; rank 1 receives a tensor, then a list of another length, then the list."""
    said, places = [], [None, None]
    if me() == 0:
        said = [outcome(dist.send_object_list, [1, 2], 1) for _ in range(3)]
    elif me() == 1:
        said = [outcome(dist.recv, torch.ones(1), 0), outcome(dist.recv_object_list, [None], 0)]
        dist.recv_object_list(places, 0)
    return [*said, str(places)]


def test_objects_that_are_received_as_anything_else_raise_on_both_ranks(everyone: Any) -> None:
    sender, receiver, *_ = everyone(taken_by_other_kinds)
    tensor = "rank 0 (worker1) sends a list of 2 objects, but rank 1 (worker2) receives float32[1]"
    length = "rank 0 (worker1) sends a list of 2 objects, but rank 1 (worker2) receives a list of 1 objects"
    assert sender[:3] == [f"CollectiveError: {tensor}", f"CollectiveError: {length}", ""]
    assert receiver == [f"CollectiveError: {tensor}", f"CollectiveError: {length}", "[1, 2]"]


def ended_in_use() -> list[str]:
    """A group cannot be ended while one of its operations waits; afterwards it can, and is refused then."""
    group = dist.new_group([0, 1])
    if me() > 1:
        dist.barrier()
        return []
    if me() == 1:
        dist.barrier()
        dist.barrier(group)
        return []
    work = dist.barrier(group, async_op=True)
    said = [outcome(dist.destroy_process_group, group)]
    dist.barrier()
    work.wait()
    dist.destroy_process_group(group)
    return [*said, outcome(dist.barrier, group)]


def test_a_group_is_not_ended_during_its_collectives(everyone: Any) -> None:
    said = everyone(ended_in_use)[0]
    assert "cannot end group" in said[0] and said[0].endswith("during a collective: wait for it first")
    assert "belongs to a world that has ended" in said[1]


def overlapping() -> list[str]:
    """A receive from any rank and one from a named rank, of one tag: refused in both orders; not of another tag."""
    if me():
        dist.barrier()
        if me() == 1:
            dist.send(torch.ones(1), 0)
            dist.send(torch.ones(1), 0, tag=1)
        return []
    waiting = dist.irecv(torch.zeros(1))
    said = outcome(dist.irecv, torch.zeros(1), 1)
    other = dist.irecv(torch.zeros(1), 1, tag=1)
    both = outcome(dist.irecv, torch.zeros(1), tag=1)
    dist.barrier()
    return [said, both, str((waiting.wait(), other.wait()))]


def test_receives_that_could_take_each_others_messages_are_refused(everyone: Any) -> None:
    said = everyone(overlapping)[0]
    assert "recv is not possible while an irecv from any rank waits" in said[0]
    assert "recv from any rank is not possible while an irecv waits" in said[1] and said[2] == "(1, 1)"


def forged() -> str:
    """Rank 1 signs with another secret: rank 0 refuses its object unread."""
    if me() == 1:
        signature = objects._sign_object
        objects._sign_object = lambda end, deed, source, data: bytes(32)
        try:
            return outcome(dist.gather_object, "x", None, 0)
        finally:
            objects._sign_object = signature
    return outcome(dist.gather_object, "x", [None] * 4 if me() == 0 else None, 0)


def test_an_object_with_another_signature_is_not_unpickled(everyone: Any) -> None:
    said = everyone(forged)
    assert said[0].startswith("AuthenticationError: an object from rank 1 (worker2) is not signed with the secret of")
    assert said[1:] == ["", "", ""]


def test_a_secret_signs_objects_for_one_operation_of_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(token="t", rank=0, rank_label=lambda rank: f"rank {rank}")
    end: Any = SimpleNamespace(world=world, key="0", notes_device=torch.device("cpu"))
    other: Any = SimpleNamespace(world=world, key="1", notes_device=torch.device("cpu"))

    def opened(at: Any, deed: str, data: bytes) -> Any:
        return objects._open_object(at, deed, 0, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    monkeypatch.setattr(objects.current, "find_current", lambda: None)
    monkeypatch.delenv(run_dir.SECRET_VARIABLE, raising=False)
    unsigned, _ = objects._pack_object(end, "gather", [1])
    assert opened(end, "gather", unsigned) == [1]
    run_dir.make_secret(tmp_path / "secret")
    monkeypatch.setenv(run_dir.SECRET_VARIABLE, str(tmp_path / "secret"))
    signed, _ = objects._pack_object(end, "gather", [1])
    assert opened(end, "gather", signed) == [1]
    for at, deed, data in ((end, "gather", unsigned), (end, "scatter", signed), (other, "gather", signed)):
        with pytest.raises(AuthenticationError, match="is not signed with the secret of rank 0: all ranks must"):
            opened(at, deed, data)


def test_an_unknown_name_is_refused_in_one_sentence() -> None:
    with pytest.raises(AttributeError, match=r"torch 2.* has no 'all_redcue', and neither has .*: did you mean all_re"):
        dist.all_redcue
    with pytest.raises(ImportError, match="cannot import name 'nothing_like_that'"):
        from rpcbench.distributed import nothing_like_that  # noqa: F401
    assert dist.rpc is rpcbench.rpc and "TCPStore" in dir(dist) and dist.TCPStore is torch.distributed.TCPStore


# -- worlds that end
def waits(deed: Callable[[], Any]) -> tuple[str, float, str]:
    """On a worker: the outcome of an operation in the background that its world ends, and of its future."""
    work = deed()
    future = work.get_future()
    since = time.monotonic()
    said = outcome(work.wait, timedelta(seconds=1)), time.monotonic() - since, outcome(future.wait)
    del work
    gc.collect()
    return said


def hurried() -> str:
    """In a group with a limit of its own, within which both can make it: rank 1 does not come."""
    group = dist.new_group(timeout=4)
    return outcome(dist.barrier, group) if me() == 0 else ""


def test_the_timeout_of_a_wait_ends_the_world_and_names_the_missing_ranks() -> None:
    with rpcbench.Cluster(2) as cluster:
        wait_all([cluster.rpc_async(name, dist.init_process_group) for name in cluster.workers])
        deed = lambda: dist.all_reduce(torch.ones(1), async_op=True)  # noqa: E731
        said, seconds, future = cluster.rpc_sync("worker1", waits, (deed,))
        assert said.startswith("RpcTimeoutError: 1 s have passed in all_reduce(SUM) of float32[1]:")
        assert "rank 1 (worker2) has not come" in said and seconds < HANG_SECONDS
        assert future.startswith("RpcTimeoutError: 1 s have passed")
        wait_all([cluster.rpc_async(name, dist.init_process_group) for name in cluster.workers])
        said = cluster.rpc_sync("worker2", outcome, (dist.monitored_barrier, None, timedelta(seconds=1), True))
        assert said.startswith("RpcTimeoutError: 1 s have passed in monitored_barrier:")
        assert "rank 0 (worker1) has not come" in said
        wait_all([cluster.rpc_async(name, dist.init_process_group) for name in cluster.workers])
        said, after = wait_all([cluster.rpc_async(name, hurried) for name in cluster.workers])
        assert said.startswith("RpcTimeoutError: 4 s have passed in barrier:") and after == ""


# -- arguments, alone
def either(a: int, b: Any = None, c: int | None = None, d: Any = None) -> tuple[Any, ...]:
    return a, b, c, d


def test_an_accept_older_order_is_told_apart_by_its_types() -> None:
    both = accept_older_order(1, "c", "b")(either)
    assert both(1, [2], 3, 4) == (1, [2], 3, 4) and both(1, 3, [2]) == both(1, 3, b=[2]) == (1, [2], 3, None)
    assert both(1) == (1, None, None, None) and both(1, None, 3) == (1, None, 3, None)
    with pytest.raises(TypeError, match=r"either\(\) got b twice"):
        both(1, 3, [2], b=[4])
    with pytest.raises(TypeError, match=r"takes at most c, b after"):
        both(1, 3, [2], 5)


def test_ranks_and_seconds_are_read_from_all_their_forms() -> None:
    assert choose_rank([4, 7], 7, None, "src") == (7, "") and choose_rank([4, 7], None, 1, "src") == (7, "")
    assert choose_rank([4, 7], None, None, "dst", default=4) == (4, "")
    assert choose_rank([4, 7], 5, None, "dst")[1] == "rank 5 is not in the group of ranks [4, 7]"
    assert choose_rank([4, 7], True, None, "dst")[1] == "dst is a rank, not bool"
    assert (timeout_seconds(None), timeout_seconds(2), timeout_seconds(timedelta(minutes=1))) == (None, 2, 60.0)
    with pytest.raises(CollectiveError, match="timeout='1': pass a positive number of seconds, or a timedelta"):
        timeout_seconds("1")  # type: ignore[arg-type]
