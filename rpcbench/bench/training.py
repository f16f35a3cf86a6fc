"""What a trainer does over and over: backward over two workers, and a step of an optimizer of both."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rpcbench.bench.operation import CALLEE, Api, Operation, Prepare

_RATE = 1e-2


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


def shared(stage: Any) -> list[Any]:
    """RRefs of the stage's parameters, of the kind that `stage` is."""
    return [type(stage)(parameter) for parameter in stage.local_value().parameters()]


def values(stage: Any) -> list[Tensor]:
    """The stage's parameters, as plain tensors."""
    return [parameter.detach() for parameter in stage.local_value().parameters()]


class _TwoStages:
    """One stage here, one on the other worker, and what a local backward makes of both."""

    def __init__(self, api: Api, draw: random.Random, width: int, batch: int) -> None:
        seed, far_seed = draw.getrandbits(32), draw.getrandbits(32)
        self.api = api
        self.near = make_stage(width, seed)
        self.inputs = torch.rand(batch, width)
        self.far = api.rpc.remote(CALLEE, make_stage, args=(width, far_seed))
        twin = make_stage(width, far_seed)
        self.parameters = [*self.near.parameters(), *twin.parameters()]
        self.gradients = torch.autograd.grad(twin(self.near(self.inputs)).square().mean(), self.parameters)

    def backward(self, context: int) -> None:
        loss = self.api.rpc.rpc_sync(CALLEE, forward, args=(self.far, self.near(self.inputs))).square().mean()
        self.api.autograd.backward(context, [loss])


def backward(width: int, batch: int) -> Prepare:
    def prepare(api: Api, draw: random.Random) -> Operation:
        stages = _TwoStages(api, draw, width, batch)
        expected = dict(zip(stages.near.parameters(), stages.gradients, strict=False))

        def run() -> dict[Tensor, Tensor]:
            with api.autograd.context() as context:
                stages.backward(context)
                return dict(api.autograd.get_gradients(context))

        def right(gradients: dict[Tensor, Tensor]) -> bool:
            return gradients.keys() == expected.keys() and all(
                torch.allclose(gradients[parameter], gradient) for parameter, gradient in expected.items()
            )

        return Operation(run, right)

    return prepare


def alone(width: int, batch: int) -> Prepare:
    """The same forward and backward, with both stages here: what the two workers have to compute in turn."""

    def prepare(api: Api, draw: random.Random) -> Operation:
        near, far = (make_stage(width, draw.getrandbits(32)) for _ in range(2))
        inputs, parameters = torch.rand(batch, width), [*near.parameters(), *far.parameters()]

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(far(near(inputs)).square().mean(), parameters)

        expected = run()
        return Operation(run, lambda found: all(map(torch.equal, found, expected)))

    return prepare


def step(width: int, batch: int) -> Prepare:
    def prepare(api: Api, draw: random.Random) -> Operation:
        stages = _TwoStages(api, draw, width, batch)
        begun = [parameter.detach().clone() for parameter in stages.parameters]
        near = [api.rpc.RRef(parameter) for parameter in stages.near.parameters()]
        far = api.rpc.rpc_sync(CALLEE, shared, args=(stages.far,))
        optimizer = api.optim.DistributedOptimizer(torch.optim.SGD, [*near, *far], lr=_RATE)
        contexts: list[int] = []
        steps = 0

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with api.autograd.context() as context:
                stages.backward(context)
                contexts.append(context)
                yield

        def run() -> int:
            nonlocal steps
            optimizer.step(contexts[-1])
            steps += 1
            return steps

        def right(taken: int) -> bool:
            now = [*stages.near.parameters(), *api.rpc.rpc_sync(CALLEE, values, args=(stages.far,))]
            moved = [(before - after) / _RATE for before, after in zip(begun, now, strict=True)]
            return all(
                torch.allclose(way, taken * gradient, rtol=1e-3, atol=taken * 1e-5)
                for way, gradient in zip(moved, stages.gradients, strict=True)
            )

        return Operation(run, right, around)

    return prepare
