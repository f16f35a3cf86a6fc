"""The work both sides are measured on, each piece written once over an API module given by name.

A workload draws its function, shape or width from a generator and gives back an operation: what is timed, and how its
result is told from a wrong one. The functions of the callee stand here too, so that they travel by reference.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rpcbench.bench.operation import CALLEE, Api, Operation, Prepare
from rpcbench.bench.training import TRAINING

_KB = 1 << 10
_MB = 1 << 20


def count_words(text: str) -> int:
    return len(text.split())


def larger(first: int, second: int) -> int:
    return max(first, second)


def digit_sum(number: int) -> int:
    return sum(map(int, str(number)))


def echo(tensor: Tensor) -> Tensor:
    return tensor


def _int_call(api: Api, draw: random.Random) -> Operation:
    calls: list[tuple[Callable[..., int], tuple[Any, ...]]] = [
        (count_words, (" ".join(["word"] * draw.randint(1, 8)),)),
        (larger, (draw.randrange(1000), draw.randrange(1000))),
        (digit_sum, (draw.randrange(1 << 30),)),
    ]
    function, args = draw.choice(calls)
    expected = function(*args)
    return Operation(lambda: api.rpc.rpc_sync(CALLEE, function, args=args), lambda result: bool(result == expected))


def _tiny_add(api: Api, draw: random.Random) -> Operation:
    shape = (draw.randint(1, 8), draw.randint(1, 8))
    first, second = torch.rand(shape), torch.rand(shape)
    expected = first + second
    return Operation(
        lambda: api.rpc.rpc_sync(CALLEE, torch.add, args=(first, second)), lambda result: torch.equal(result, expected)
    )


def _echo(size: int) -> Prepare:
    def prepare(api: Api, draw: random.Random) -> Operation:
        dtype = draw.choice([torch.float32, torch.float64, torch.int64, torch.uint8])
        columns = 1 << draw.randint(0, 12)
        tensor = torch.randint(100, (size // dtype.itemsize // columns, columns)).to(dtype)
        return Operation(
            lambda: api.rpc.rpc_sync(CALLEE, echo, args=(tensor,)), lambda result: torch.equal(result, tensor)
        )

    return prepare


WORKLOADS: dict[str, Prepare] = {
    "function returning an int": _int_call,
    "torch.add on tiny tensors": _tiny_add,
    "echo 64 KB": _echo(64 * _KB),
    "echo 16 MB": _echo(16 * _MB),
    **TRAINING,
}
