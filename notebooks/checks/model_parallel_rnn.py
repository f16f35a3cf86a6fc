"""Checks of lesson 14."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from crossings import own
from torch import Tensor, nn

import rpcbench.autograd as dist_autograd
import rpcbench.rpc as rpc
from checks import require, returned, right, shown, trying
from rpcbench.nn import RemoteModule
from rpcbench.optim import DistributedOptimizer

Modules = tuple[Any, Any, Any]
Forward = Callable[[Modules, Tensor], Tensor]
NAMES = ("embedding", "reader", "decoder")


def move_decoder(answer: Callable[[Modules], DistributedOptimizer]) -> None:
    """`answer(modules)` moves the decoder to worker2 and returns an optimizer of all parameters."""
    modules = _linear_modules()
    before = _values(modules)
    with trying():
        optimizer = returned(answer(modules))
    require(isinstance(optimizer, DistributedOptimizer), f"Return the optimizer, not {shown(optimizer)}.")
    owners = [module.get_module_rref().owner_name() for module in modules]
    wanted = ["worker1", "worker2", "worker2"]
    require(owners == wanted, f"The modules should be on {wanted} then; they are on {owners}.")
    require(_values(modules) == before, "The weights should move along as they are. These are other ones.")
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [_forward(modules, torch.ones(2, 3)).sum()])
        optimizer.step(context_id)
    for name, old, new in zip(NAMES, before, _values(modules), strict=True):
        require(old != new, f"After a step of this optimizer the {name} is what it was: it does not learn.")
    right("Two crossings less in each step.")


def short_way(answer: Forward) -> None:
    """`answer(modules, numbers)` keeps activations out of the notebook."""
    modules = _linear_modules()
    numbers = torch.rand(4, 3)
    with dist_autograd.context() as context_id:
        with trying():
            scores = returned(answer(modules, numbers))
        row = own(context_id) or {"recvs": []}
        require(isinstance(scores, Tensor), f"The answer should be the scores, not {shown(scores)}.")
        require(torch.allclose(scores, _forward(modules, numbers)), "These are not the scores that `forward` gives.")
        require(row["recvs"], "No graph leads back from the scores: the gradients could not go anywhere.")
        back = len(row["recvs"])
        require(back == 1, f"{back} messages with activations came to this notebook. Only the scores should.")
    right("The notebook gives the order, and the workers do the rest among themselves.")


def two_halves(answer: Forward) -> None:
    """`answer(modules, numbers)` has both halves of a batch under way at once."""
    modules = _linear_modules()
    for size in (6, 5):
        numbers = torch.rand(size, 3)
        with trying():
            scores = returned(answer(modules, numbers))
        require(isinstance(scores, Tensor), f"The answer should be the scores, not {shown(scores)}.")
        same = scores.shape == (size, 3) and torch.allclose(scores, _forward(modules, numbers))
        require(same, f"For {size} sequences, these are not the scores that `forward` gives, in the same order.")

    _batches.append(_Batches())
    watched = tuple(RemoteModule(*place) for place in (("worker1", Told), ("worker2", Waiting), ("worker1", Sizes)))
    with trying():
        sizes = answer(watched, torch.rand(6, 3))
    require(sizes.max() < 6, "The whole batch went in one piece.")
    turns = "The halves took turns: worker2 had read the first before worker1 was asked for the second."
    require(_batches[-1].together, turns)
    right("So a pipeline begins.")


def _linear_modules() -> Modules:
    places = ("worker1", "worker2", "worker1")
    embedding, reader, decoder = (RemoteModule(place, nn.Linear, (3, 3)) for place in places)
    return embedding, reader, decoder


def _forward(modules: Modules, numbers: Tensor) -> Tensor:
    embedding, reader, decoder = modules
    scores: Tensor = decoder(reader(embedding(numbers)))
    return scores


def _values(modules: Modules) -> list[list[Any]]:
    return [[rref.to_here().tolist() for rref in module.remote_parameters()] for module in modules]


# -- modules that see whether both halves are under way; the notebook counts
class _Batches:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.embedded = 0
        self.together: bool | None = None


_batches: list[_Batches] = []


def embedded() -> None:
    batches = _batches[-1]
    with batches.changed:
        batches.embedded += 1
        batches.changed.notify_all()


def await_second() -> None:
    """The reader of a half waits here for the other half to arrive at worker1."""
    batches = _batches[-1]
    with batches.changed:
        if batches.together is None:  # the second half need not wait for itself
            batches.together = batches.changed.wait_for(lambda: batches.embedded >= 2, 5)


class Told(nn.Module):
    def forward(self, numbers: Tensor) -> Tensor:
        rpc.rpc_sync("notebook", embedded)
        return numbers


class Waiting(nn.Module):
    def forward(self, vectors: Tensor) -> Tensor:
        rpc.rpc_sync("notebook", await_second)
        return vectors


class Sizes(nn.Module):
    """How many sequences came along, for each of them."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.full((len(hidden),), len(hidden))
