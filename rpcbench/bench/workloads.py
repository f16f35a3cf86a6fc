"""The work both sides are measured on, each piece written once over an API module given by name.

A workload draws its function, shape or width from a generator and gives back an operation: what is timed, and how its
result is told from a wrong one. The functions of the callee stand here too, so that they travel by reference.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CALLEE = "worker1"
_KB = 1 << 10
_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Api:
    """`torch.distributed.rpc` or a drop-in for it, with the autograd module beside it."""

    rpc: Any
    autograd: Any

    @staticmethod
    def named(name: str) -> Api:
        """`name` is the rpc module's; the other one is its sibling."""
        package = name.rpartition(".")[0]
        return Api(importlib.import_module(name), importlib.import_module(f"{package}.autograd"))


@dataclass(frozen=True, slots=True)
class Operation:
    """One unit of work, and whether what it returned is right."""

    run: Callable[[], Any]
    right: Callable[[Any], bool]


Prepare = Callable[[Api, random.Random], Operation]


def count_words(text: str) -> int:
    return len(text.split())


def larger(first: int, second: int) -> int:
    return max(first, second)


def digit_sum(number: int) -> int:
    return sum(map(int, str(number)))


def echo(tensor: Tensor) -> Tensor:
    return tensor


def make_stage(width: int, seed: int) -> nn.Module:
    """Three linear layers; the same on every process that is given the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
        )


def forward(stage: Any, activations: Tensor) -> Tensor:
    """`stage` is an RRef to a module that lives where this runs."""
    return stage.local_value()(activations)  # type: ignore[no-any-return]


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


def _backward(width: int, batch: int) -> Prepare:
    def prepare(api: Api, draw: random.Random) -> Operation:
        seed, remote_seed = draw.getrandbits(32), draw.getrandbits(32)
        near, inputs = make_stage(width, seed), torch.rand(batch, width)
        far = api.rpc.remote(CALLEE, make_stage, args=(width, remote_seed))
        loss = make_stage(width, remote_seed)(near(inputs)).square().mean()
        expected = dict(zip(near.parameters(), torch.autograd.grad(loss, list(near.parameters())), strict=True))

        def run() -> dict[Tensor, Tensor]:
            with api.autograd.context() as context:
                loss = api.rpc.rpc_sync(CALLEE, forward, args=(far, near(inputs))).square().mean()
                api.autograd.backward(context, [loss])
                return dict(api.autograd.get_gradients(context))

        def right(gradients: dict[Tensor, Tensor]) -> bool:
            return gradients.keys() == expected.keys() and all(
                torch.allclose(gradients[parameter], gradient) for parameter, gradient in expected.items()
            )

        return Operation(run, right)

    return prepare


WORKLOADS: dict[str, Prepare] = {
    "function returning an int": _int_call,
    "torch.add on tiny tensors": _tiny_add,
    "echo 64 KB": _echo(64 * _KB),
    "echo 16 MB": _echo(16 * _MB),
    "context + backward, d=16": _backward(16, 4),
    "context + backward, d=128": _backward(128, 32),
}
