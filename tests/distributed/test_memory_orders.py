"""Tensors of any order in memory, and sparse ones, as torch takes them; those that gloo would get wrong are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_outcome import outcome

import rpcbench.distributed as dist

pytestmark = pytest.mark.process
Everyone = Callable[..., list[Any]]
SIZE, SHAPE = 4, (2, 3, 2, 2)


def ordered(rank: int, kind: str) -> torch.Tensor:
    """Return a tensor of this rank with all elements different, in one order of memory."""
    plain = torch.arange(24.0).reshape(SHAPE) + 100 * rank
    if kind == "channels_last":
        return plain.contiguous(memory_format=torch.channels_last)
    return plain.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)


def all_operations(kind: str) -> list[str]:
    """Return the names of the operations whose results are wrong."""
    me = dist.get_rank()
    every = [ordered(rank, kind) for rank in range(SIZE)]
    total = sum(every[1:], every[0])

    def spare() -> torch.Tensor:
        return torch.zeros_like(every[0])

    first, last = me == 0, me == 3
    dist.all_reduce(summed := ordered(me, kind))
    dist.broadcast(copied := ordered(me, kind), 2)
    dist.reduce(reduced := ordered(me, kind), 0)
    dist.all_gather(found := [spare() for _ in range(SIZE)], every[me])
    dist.gather(every[me], gathered := [spare() for _ in range(SIZE)] if first else [], 0)
    dist.scatter(scattered := spare(), every if last else [], 3)
    dist.reduce_scatter(part := spare(), [each + to for to, each in enumerate([every[me]] * SIZE)])
    dist.all_to_all(swapped := [spare() for _ in range(SIZE)], [every[me] + to for to in range(SIZE)])
    received = spare()
    dist.isend(every[me], (me + 1) % SIZE)
    work = dist.irecv(received, (me - 1) % SIZE)
    work.wait()
    right = {
        "all_reduce": summed.equal(total), "broadcast": copied.equal(every[2]),
        "reduce": not first or reduced.equal(total), "scatter": scattered.equal(every[me]),
        "all_gather": all(map(torch.equal, found, every)), "gather": all(map(torch.equal, gathered, every)),
        "reduce_scatter": part.equal(total + SIZE * me), "recv": received.equal(every[(me - 1) % SIZE]),
        "all_to_all": all(map(torch.equal, swapped, [each + me for each in every])),
        "its source": work._source_rank() == (me - 1) % SIZE,
    }  # fmt: skip
    return [name for name, fine in right.items() if not fine]


@pytest.mark.parametrize("kind", ["channels_last", "permuted"])
def test_tensors_without_gaps_move_in_any_order_of_memory(everyone: Everyone, kind: str) -> None:
    assert everyone(all_operations, kind) == [[]] * SIZE


def refused() -> list[str]:
    me = dist.get_rank()
    plain, other = torch.ones(2, 3), torch.ones(3, 2).t()
    return [
        outcome(lambda: dist.all_reduce(other if me == 1 else plain)),
        outcome(lambda: dist.all_gather([torch.ones(2, 3) for _ in range(SIZE)], other)),
        outcome(lambda: dist.all_reduce(torch.ones(4, 4)[:, ::2])),
        outcome(lambda: dist.all_reduce(torch.ones(1).expand(4))),
        outcome(lambda: dist.all_gather_into_tensor(torch.ones(8, 3), other)),
        outcome(lambda: dist.all_to_all_single(torch.ones(4, 2).t().contiguous().t(), torch.ones(4, 2))),
        outcome(lambda: dist.broadcast(torch.ones(2).to_sparse(), 0)),
        outcome(lambda: dist.all_reduce(torch.ones(2).to_sparse(), dist.ReduceOp.MAX)),
    ]


def test_orders_that_differ_and_gaps_are_refused_on_all_ranks(everyone: Everyone) -> None:
    turned = "float32[2, 3] with dimensions [1, 0] in memory"
    for differ, listed, gaps, shared, joined, split, sparse, most in everyone(refused):
        assert "rank 0 (worker1) calls all_reduce(SUM) of float32[2, 3]\n" in differ
        assert f"rank 1 (worker2) calls all_reduce(SUM) of {turned}" in differ
        assert f"tensor_list has a float32[2, 3] for {turned}" in listed
        assert "not contiguous" in gaps and "not contiguous" in shared
        assert "not contiguous" in joined and "not contiguous" in split
        assert "pass tensor.to_dense()" in sparse and "MAX is not possible for sparse tensors" in most


def sparse() -> list[float]:
    me = dist.get_rank()
    total = torch.sparse_coo_tensor([[me, 3]], [1.0, 2.0], (SIZE,))  # of another number of elements on rank 3
    dist.all_reduce(total)
    later = torch.sparse_coo_tensor([[me]], [1.0], (SIZE,))
    work: Any = dist.all_reduce(later, async_op=True)
    work.wait()
    return [*total.to_dense().tolist(), *later.to_dense().tolist()]


def test_sparse_tensors_are_summed(everyone: Everyone) -> None:
    assert everyone(sparse) == [[1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0]] * SIZE


def objects_of_one_rank() -> list[Any]:
    """Pass empty lists where this rank is not the destination or the source."""
    me = dist.get_rank()
    dist.gather_object(me, found := [None] * SIZE if me == 2 else [], 2)
    return found


def test_an_empty_list_elsewhere_is_none(everyone: Everyone) -> None:
    assert everyone(objects_of_one_rank) == [[], [], [0, 1, 2, 3], []]
