"""Each operation, on each group and for each dtype, equals the computation by one process from all ranks' tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import rpcbench.distributed as dist

pytestmark = pytest.mark.process

GROUPS = [(0, 1, 2, 3), (0, 1), (3, 1), (0, 2, 3)]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
SHAPES: list[tuple[int, ...]] = [(3,), (2, 3), ()]
_made: dict[tuple[int, ...], Any] = {}
OPS = ["SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR"]


def tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a rank: small numbers, so that every dtype adds and multiplies them without rounding."""
    count = 1
    for size in shape:
        count *= size
    values = [(5 * rank + 3 * i) % 4 for i in range(count)]
    return torch.tensor(values).reshape(shape).to(dtype)


def plain(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of an operation, computed by one process."""
    first = tensors[0]
    pairs: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
        "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }  # fmt: skip
    combined = functools.reduce(pairs[op], tensors)
    return combined / len(tensors) if op == "AVG" else combined.to(first.dtype)


def fits(op: str, dtype: torch.dtype) -> bool:
    return dtype not in (WHOLE if op == "AVG" else FLOATS if op.startswith("B") else ())


def cases(op: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(shape, dtype) for shape, dtype in itertools.product(SHAPES, FLOATS + WHOLE) if fits(op, dtype)]


def handles() -> dict[tuple[int, ...], Any]:
    """On a worker: a group for each of GROUPS, made once, on all ranks."""
    for ranks in GROUPS:
        if ranks not in _made:
            _made[ranks] = dist.new_group(ranks)
    return _made


def sweep(one: Callable[..., Any], op: str) -> list[str]:
    """On a worker: the differences, over all of its groups, all shapes and all dtypes."""
    me, wrong = dist.get_rank(), []
    for ranks, group in handles().items():
        for shape, dtype in cases(op) if me in ranks else ():
            given, wanted = one(op, me, tuple(sorted(ranks)), group, shape, dtype)
            if not all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True)):
                wrong.append(f"{ranks} {shape} {dtype}: {given} for {wanted}")
    return wrong


def all_reduce(op: str, me: int, ranks: Any, group: Any, shape: Any, dtype: Any) -> Any:
    given = tensor(me, shape, dtype)
    dist.all_reduce(given, getattr(dist.ReduceOp, op), group)
    return [given], [plain(op, [tensor(rank, shape, dtype) for rank in ranks])]


def reduce(op: str, me: int, ranks: Any, group: Any, shape: Any, dtype: Any) -> Any:
    given, dst = tensor(me, shape, dtype), ranks[-1]
    dist.reduce(given, dst, getattr(dist.ReduceOp, op), group)
    wanted = plain(op, [tensor(rank, shape, dtype) for rank in ranks])
    return ([given], [wanted]) if me == dst else ([], [])


def broadcast(op: str, me: int, ranks: Any, group: Any, shape: Any, dtype: Any) -> Any:
    given = tensor(me, shape, dtype)
    dist.broadcast(given, ranks[-1], group)
    return [given], [tensor(ranks[-1], shape, dtype)]


def all_gather(op: str, me: int, ranks: Any, group: Any, shape: Any, dtype: Any) -> Any:
    mine = tensor(me, shape, dtype)
    given = [torch.zeros_like(mine) for _ in ranks]
    dist.all_gather(given, mine, group)
    return given, [tensor(rank, shape, dtype) for rank in ranks]


def gather(op: str, me: int, ranks: Any, group: Any, shape: Any, dtype: Any) -> Any:
    mine, dst = tensor(me, shape, dtype), ranks[0]
    given = [torch.zeros_like(mine) for _ in ranks] if me == dst else None
    dist.gather(mine, dst, given, group)
    return (given, [tensor(rank, shape, dtype) for rank in ranks]) if given else ([], [])


def scatter(op: str, me: int, ranks: Any, group: Any, shape: Any, dtype: Any) -> Any:
    given, src = torch.zeros_like(tensor(me, shape, dtype)), ranks[0]
    parts = [tensor(rank + 1, shape, dtype) for rank in ranks] if me == src else None
    dist.scatter(given, src, parts, group)
    return [given], [tensor(me + 1, shape, dtype)]


def ring(op: str, me: int, ranks: Any, group: Any, shape: Any, dtype: Any) -> Any:
    """Each rank sends to the next one in the background; then some send back, one after the other."""
    at = ranks.index(me)
    after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
    given, back = torch.zeros_like(tensor(me, shape, dtype)), torch.zeros_like(tensor(me, shape, dtype))
    sent, received = dist.isend(tensor(me, shape, dtype), after, group), dist.irecv(given, before, group)
    assert sent.wait() == after and received.wait() == before and received.is_completed()
    if at % 2:
        dist.send(given, before, group)
    if at != len(ranks) - 1 and at % 2 == 0:
        assert dist.recv(back, after, group) == after
        return [given, back], [tensor(before, shape, dtype), tensor(me, shape, dtype)]
    return [given], [tensor(before, shape, dtype)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("one", [all_reduce, reduce])
def test_reductions_equal_those_of_one_process(everyone: Any, one: Any, op: str) -> None:
    assert everyone(sweep, one, op) == [[]] * 4


@pytest.mark.parametrize("one", [broadcast, all_gather, gather, scatter, ring])
def test_operations_that_move_tensors_deliver_the_right_ones(everyone: Any, one: Any) -> None:
    assert everyone(sweep, one, "SUM") == [[]] * 4


def several(op: str) -> list[Any]:
    """On a worker: the `multigpu` forms with two tensors of this rank each."""
    me, size, of = dist.get_rank(), dist.get_world_size(), getattr(dist.ReduceOp, op)

    def mine(rank: int) -> list[torch.Tensor]:
        return [torch.tensor([2.0 * rank + j + 1, 1.0]) for j in range(2)]

    everything = [each for rank in range(size) for each in mine(rank)]
    wanted, wrong = plain(op, everything), []
    dist.all_reduce_multigpu(reduced := mine(me), of)
    dist.reduce_multigpu(at_one := mine(me), 1, of)
    dist.broadcast_multigpu(spread := mine(me), 2)
    dist.all_gather_multigpu(gathered := [[torch.zeros(2) for _ in everything] for _ in range(2)], mine(me))
    checks = {
        "all_reduce": (reduced, [wanted] * 2),
        "reduce": (at_one, [wanted, mine(1)[1]] if me == 1 else mine(me)),
        "broadcast": (spread, [mine(2)[0]] * 2),
        "all_gather": ([*gathered[0], *gathered[1]], everything * 2),
    }
    for name, (given, right) in checks.items():
        if not all(torch.equal(a, b) for a, b in zip(given, right, strict=True)):
            wrong.append((name, given, right))
    return wrong


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_multigpu_operations_combine_several_tensors_of_each_rank(everyone: Any, op: str) -> None:
    assert everyone(several, op) == [[]] * 4


def from_anybody() -> list[tuple[int, float]]:
    me, size = dist.get_rank(), dist.get_world_size()
    if me:
        dist.send(torch.tensor([10.0 * me]), 0)
        return []
    came = []
    for _ in range(size - 1):
        source = dist.recv(into := torch.zeros(1))
        came.append((source, into.item()))
    return sorted(came)


def test_recv_from_any_rank_returns_its_source(everyone: Any) -> None:
    assert everyone(from_anybody)[0] == [(1, 10.0), (2, 20.0), (3, 30.0)]


def places() -> list[tuple[int, int]]:
    return [(dist.get_rank(group), dist.get_world_size(group)) for ranks, group in handles().items()
            if dist.get_rank() in ranks]  # fmt: skip


def test_each_rank_has_its_place_in_its_groups(everyone: Any) -> None:
    of_each = [[(0, 4), (0, 2), (0, 3)], [(1, 4), (1, 2), (0, 2)], [(2, 4), (1, 3)], [(3, 4), (1, 2), (2, 3)]]
    assert everyone(places) == of_each


def trained() -> list[list[float]]:
    """Parameters after two steps of a model under DistributedDataParallel, on this rank's quarter of the data."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    data, target = torch.randn(8, 3).double(), torch.randn(8, 1).double()
    me, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    whole = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(whole(data[me::size]), target[me::size]).backward()
        optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def test_distributed_data_parallel_trains_as_one_process(everyone: Any) -> None:
    for each in everyone(trained):
        torch.testing.assert_close(each, trained())
