"""Workloads of large tensors: there and back, and one way."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from rpcbench.bench.operation import CALLEE, Api, Operation, Prepare

KB = 1 << 10
MB = 1 << 20
_PATTERN = 1 << 16


def same(tensor: Tensor) -> Tensor:
    return tensor


def last_of(tensor: Tensor) -> int:
    return int(tensor[-1, -1])


def middle_of(tensor: Tensor) -> int:
    return int(tensor[tensor.shape[0] // 2, 0])


def draw_tensor(size: int, draw: random.Random) -> Tensor:
    """A matrix of `size` bytes, of drawn type and width."""
    dtype = draw.choice([torch.float32, torch.float64, torch.int64, torch.uint8])
    count = size // dtype.itemsize
    values = torch.randint(100, (min(count, _PATTERN),)).to(dtype)
    columns = min(1 << draw.randint(0, 12), count)
    return values.repeat(count // len(values)).view(-1, columns)


def echo(size: int) -> Prepare:
    """A tensor of `size` bytes goes there and comes back."""

    def prepare(api: Api, draw: random.Random) -> Operation:
        tensor = draw_tensor(size, draw)
        return Operation(
            lambda: api.rpc.rpc_sync(CALLEE, same, args=(tensor,)), lambda result: torch.equal(result, tensor)
        )

    return prepare


def send(size: int) -> Prepare:
    """A tensor of `size` bytes goes there, one of its numbers comes back."""

    def prepare(api: Api, draw: random.Random) -> Operation:
        tensor, function = draw_tensor(size, draw), draw.choice([last_of, middle_of])
        expected = function(tensor)
        return Operation(
            lambda: api.rpc.rpc_sync(CALLEE, function, args=(tensor,)), lambda result: bool(result == expected)
        )

    return prepare
