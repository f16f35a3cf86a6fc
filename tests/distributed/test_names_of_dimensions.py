"""Named tensors in collectives: results keep the names, and ranks with different names raise an error with both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_outcome import outcome

import rpcbench.distributed as dist
from rpcbench import named
from rpcbench.named import NamedTensor

pytestmark = pytest.mark.process


def me() -> int:
    return dist.get_rank()


def full(*names: str, dtype: torch.dtype = torch.double) -> NamedTensor:
    """A tensor of shape (2, 3), filled with the number of this rank."""
    return named.named(torch.full((2, 3), me(), dtype=dtype), *(names or ("N", "C")))


def several(count: int = 4) -> list[NamedTensor]:
    return [full() for _ in range(count)]


def all_reduced() -> list[NamedTensor]:
    dist.all_reduce(given := full())
    dist.all_reduce(largest := full(), dist.ReduceOp.MAX)
    return [given, largest]


def reduced() -> list[NamedTensor]:
    dist.reduce(given := full(), 1)
    return [given] if me() == 1 else []


def spread() -> list[NamedTensor]:
    dist.broadcast(given := full(), 2)
    dist.broadcast(complex_ := full(dtype=torch.complex64), 2)
    dist.scatter(part := full(), 3, several() if me() == 3 else None)
    return [given, complex_, part]


def gathered() -> list[NamedTensor]:
    dist.all_gather(everywhere := several(), full())
    dist.gather(full(), 0, there := several() if me() == 0 else None)
    return [*everywhere, *(there or [])]


def ring() -> list[NamedTensor]:
    sent, given = dist.isend(full(), (me() + 1) % 4), full()
    dist.recv(given, (me() - 1) % 4)
    sent.wait()
    return [given]


def of_several() -> list[NamedTensor]:
    dist.all_reduce_multigpu(given := several(2))
    dist.broadcast_multigpu(spread := several(2), 2)
    dist.all_gather_multigpu(outputs := [several(8), several(8)], several(2))
    return [*given, *spread, *outputs[0][:3]]


def kept(deed: Callable[[], list[NamedTensor]]) -> list[tuple[Any, float]]:
    """On a worker: the names and the single number of each result."""
    return [(each.names, each.rename(None).real.unique().item()) for each in deed()]


KEPT: list[tuple[Callable[[], list[NamedTensor]], list[list[float]]]] = [
    (all_reduced, [[6, 3]] * 4),
    (reduced, [[], [6], [], []]),
    (spread, [[2, 2, 3]] * 4),
    (gathered, [[0, 1, 2, 3, 0, 1, 2, 3], *[[0, 1, 2, 3]] * 3]),
    (ring, [[3], [0], [1], [2]]),
    (of_several, [[12, 12, 2, 2, 0, 0, 1]] * 4),
]


@pytest.mark.parametrize(("deed", "values"), KEPT)
def test_results_of_collectives_keep_their_names(everyone: Any, deed: Any, values: list[list[float]]) -> None:
    assert everyone(kept, deed) == [[(("N", "C"), value) for value in each] for each in values]


def odd(*names: str) -> NamedTensor:
    """Rank 1 has other names than the others."""
    return full(*names) if me() == 1 else full()


def plain_at_one() -> torch.Tensor:
    return full().rename(None) if me() == 1 else full()


def swapped_lists() -> list[list[NamedTensor]]:
    return [[full("C", "N") for _ in range(4)]]


FIRST, ODD, PLAIN = "float64[N=2, C=3]", "float64[C=2, N=3]", "float64[2, 3]"
DIFFERENT: list[tuple[Callable[[], object], str]] = [
    (lambda: dist.all_reduce(odd("C", "N")), f"rank 1 (worker2) calls all_reduce(SUM) of {ODD}"),
    (lambda: dist.all_reduce(plain_at_one()), f"rank 1 (worker2) calls all_reduce(SUM) of {PLAIN}"),
    (lambda: dist.reduce(odd("C", "N"), 0), f"rank 1 (worker2) calls reduce(SUM, dst=0) of {ODD}"),
    (lambda: dist.broadcast(odd("C", "N"), 0), f"rank 1 (worker2) calls broadcast(src=0) of {ODD}"),
    (lambda: dist.all_gather(several(), odd("C", "N")), f"tensor_list has a {FIRST} for {ODD}"),
    (lambda: dist.scatter(odd("C", "N"), 0, several() if me() == 0 else None), f"scatter(src=0) of {ODD}"),
    (lambda: dist.scatter(plain_at_one(), 1, several() if me() == 1 else None),
     f"scatter_list has a {FIRST} for {PLAIN}"),
    (lambda: dist.all_reduce_multigpu([full(), odd("C", "N")]), f"of {FIRST}, {ODD}: the tensors of a list must be"),
    (lambda: dist.all_gather_multigpu(swapped_lists(), [full()]), "the tensors of a list must be alike"),
]  # fmt: skip


def after(deed: Callable[[], object]) -> tuple[str, list[float]]:
    said = outcome(deed)
    return said, [value for _, value in kept(all_reduced)]


@pytest.mark.parametrize(("deed", "words"), DIFFERENT)
def test_ranks_with_different_names_raise_an_error_that_shows_the_names(
    everyone: Any, deed: Callable[[], object], words: str
) -> None:
    for said, later in everyone(after, deed):
        assert said.startswith("CollectiveError: ") and words in said and FIRST in said, said
        assert later == [6, 3]


def exchanged() -> str:
    if me() == 0:
        return outcome(dist.send, full(), 1)
    return outcome(dist.recv, full("C", "N"), 0) if me() == 1 else ""


def test_a_send_and_a_recv_with_different_names_raise_on_both_ranks(everyone: Any) -> None:
    words = f"CollectiveError: rank 0 (worker1) sends {FIRST}, but rank 1 (worker2) receives {ODD}"
    assert everyone(exchanged) == [words, words, "", ""]
