"""Ranks with mismatched requests: all ranks raise an error that names the differences, and the group goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_outcome import outcome

import rpcbench.distributed as dist
from rpcbench.distributed.collectives import all_reduce

pytestmark = pytest.mark.process


def me() -> int:
    return dist.get_rank()


def after(deed: Callable[[], object]) -> tuple[str, float]:
    """On a worker: the outcome of a deed, and the sum that the group computes after it."""
    said = outcome(deed)
    dist.all_reduce(total := torch.ones(1))
    return said, total.item()


def told(everyone: Any, deed: Callable[[], object], *words: str) -> None:
    """All four ranks raise an error with these words, and go on."""
    for said, total in everyone(after, deed):
        assert said.startswith("CollectiveError: ") and total == 4
        assert all(word in said for word in words), said


def full(count: int) -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(count)]


DIFFERENT: list[tuple[Callable[[], object], str, str]] = [
    (lambda: dist.all_reduce(torch.ones(3 if me() == 1 else 2)), "rank 0 (worker1) calls all_reduce(SUM) of float32[2]",
     "rank 1 (worker2) calls all_reduce(SUM) of float32[3]"),
    (lambda: dist.all_reduce(torch.ones(2, dtype=torch.float64 if me() == 2 else None)),
     "rank 1 (worker2) calls all_reduce(SUM) of float32[2]", "rank 2 (worker3) calls all_reduce(SUM) of float64[2]"),
    (lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if me() == 3 else dist.ReduceOp.MIN), "all_reduce(MIN)",
     "rank 3 (worker4) calls all_reduce(MAX)"),
    (lambda: dist.barrier() if me() else dist.broadcast(torch.ones(1), 0), "rank 0 (worker1) calls broadcast(src=0)",
     "rank 1 (worker2) calls barrier"),
    (lambda: dist.broadcast(torch.ones(1), me() % 2), "rank 2 (worker3) calls broadcast(src=0)",
     "rank 3 (worker4) calls broadcast(src=1)"),
    (lambda: dist.gather(torch.ones(2), 0, full(4)),
     "rank 1 (worker2) calls gather(dst=0) of float32[2]: gather_list is for rank 0, not for rank 1",
     "rank 0 (worker1) calls gather(dst=0) of float32[2]\n"),
    (lambda: dist.gather(torch.ones(2), 1, full(3) if me() == 1 else None), "rank 1 (worker2)",
     "gather_list has 3 tensors for a group of 4"),
    (lambda: dist.gather(torch.ones(2), 1), "rank 1 (worker2)", "rank 1 passes no gather_list"),
    (lambda: dist.scatter(torch.ones(3), 0, None if me() else full(4)), "rank 0 (worker1)",
     "scatter_list has a float32[2] for float32[3]"),
    (lambda: dist.scatter(torch.ones(2), 0, full(4) if me() in (0, 3) else None), "rank 3 (worker4)",
     "scatter_list is for rank 0, not for rank 3"),
    (lambda: dist.all_gather(full(3 if me() == 2 else 4), torch.ones(2)), "rank 2 (worker3)",
     "tensor_list has 3 tensors for a group of 4"),
    (lambda: dist.all_reduce(torch.ones(2, 2).t()[:1] if me() == 1 else torch.ones(1, 2)), "rank 1 (worker2)",
     "is not contiguous: pass tensor.contiguous()"),
    (lambda: dist.all_reduce([1.0] if me() == 1 else torch.ones(1)), "rank 1 (worker2)",
     "pass a tensor, not list"),
    (lambda: dist.broadcast(torch.ones(1), 7), "rank 0 (worker1)", "rank 7 is not in the group of ranks [0, 1, 2, 3]"),
    (lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BXOR), "rank 0 (worker1)", "BXOR has no meaning for"),
    (lambda: dist.all_reduce(torch.ones(1, dtype=torch.int16)), "rank 3 (worker4)", "does not support torch.int16"),
    (lambda: dist.all_reduce_multigpu([torch.ones(1)] * (1 + me() % 2)), "rank 0 (worker1)", "float32[1], float32[1]"),
    (lambda: dist.all_reduce_multigpu([torch.ones(1 + me()), torch.ones(1)]), "rank 3 (worker4)", "must be alike"),
    (lambda: dist.new_group([0, 1] if me() else [1, 2]), "rank 0 (worker1): [1, 2]", "rank 1 (worker2): [0, 1]"),
    (lambda: dist.new_group([0, 9]), "new_group([0, 9])", "pass distinct ranks from 0 to 3"),
    (lambda: dist.new_group([1, 1]), "new_group([1, 1])", "pass distinct ranks from 0 to 3"),
]  # fmt: skip


@pytest.mark.parametrize(("deed", "first", "second"), DIFFERENT)
def test_mismatched_or_invalid_requests_raise_the_reason_on_all_ranks(
    everyone: Any, deed: Callable[[], object], first: str, second: str
) -> None:
    told(everyone, deed, first, second)


def strangers() -> list[str]:
    """Operations that do not begin: no other rank waits for them."""
    pair = dist.new_group([0, 1])
    x = torch.ones(1)
    return [
        outcome(all_reduce, x, dist.ReduceOp.SUM, pair) if me() > 1 else "",
        outcome(all_reduce, x, dist.ReduceOp.SUM, "pair"),
        outcome(dist.send, x, me()),
        outcome(dist.recv, x, 9),
        outcome(dist.init_process_group),
    ]


def test_wrong_groups_and_ranks_are_refused_at_once(everyone: Any) -> None:
    said = everyone(strangers)
    assert said[2][0] == "CollectiveError: rank 2 (worker3) is not in the group of ranks [0, 1]"
    assert said[0][1] == "CollectiveError: pass a process group that new_group has returned, not str"
    assert said[1][2] == "CollectiveError: rank 1 (worker2) cannot send or receive: rank 1 is this rank"
    assert "rank 9 is not in the group" in said[3][3]
    assert all("default process group twice" in each[4] for each in said)


def join_error() -> tuple[str, float]:
    """Rank 0 sends a tensor that rank 1 does not expect; then one that it expects."""
    said, x = "", torch.zeros(2)
    if me() == 0:
        said = outcome(dist.send, torch.ones(3), 1)
        dist.send(torch.full((2,), 5.0), 1)
    elif me() == 1:
        said = outcome(dist.recv, x, 0)
        dist.recv(x, 0)
    return said, x.sum().item()


def test_a_send_that_does_not_match_its_recv_raises_on_both_ranks(everyone: Any) -> None:
    sender, receiver, *_ = everyone(join_error)
    words = "CollectiveError: rank 0 (worker1) sends float32[3], but rank 1 (worker2) receives float32[2]"
    assert sender == (words, 0.0) and receiver == (words, 10.0)


def stealing() -> str:
    """A recv from any rank, while an irecv waits for one."""
    said = ""
    if me() == 0:
        waiting = dist.irecv(torch.zeros(1), 1)
        said = outcome(dist.recv, torch.zeros(1))
        dist.barrier()
        waiting.wait()
    else:
        dist.barrier()
    if me() == 1:
        dist.send(torch.ones(1), 0)
    return said


def test_recv_from_any_rank_is_refused_while_an_irecv_waits(everyone: Any) -> None:
    assert "not possible while an irecv waits" in everyone(stealing)[0]
