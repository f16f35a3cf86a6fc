"""Checks of lesson 12."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rpcbench.autograd as dist_autograd
import rpcbench.rpc as rpc
from checks import NotYet, require, returned, right, shown, trying
from rpcbench.optim import DistributedOptimizer
from rpcbench.rpc import RRef

Weights = Sequence[Any]


def descend(answer: Callable[[Any, int, float], Any]) -> None:
    """`answer(weight, context_id, lr)`, on the owner of the weight, is one step of gradient descent."""
    used, unused = rpc.remote("worker1", _weight, (1.0,)), rpc.remote("worker1", _weight, (5.0,))
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", _square_sum, (used,))])
        with trying("On worker1 it"):
            result = returned(rpc.rpc_sync("worker1", answer, (used, context_id, 0.25)))
            other = _unused(answer, unused, context_id)
        before, after = (1.0, 2.0, 3.0), (0.5, 1.0, 1.5)
        now = tuple(used.to_here().tolist())
        require(now != before, "The weight itself has not changed. Did the step make a new tensor?")
        require(now == after, f"From {before}, with the gradient (2, 4, 6) and lr=0.25, it goes to {after}, not {now}.")
        require(isinstance(result, Tensor) and tuple(result.tolist()) == after, "Return the weight.")
        require(isinstance(other, Tensor), "Return a weight that took no part too.")
        require(unused.to_here().tolist() == [5.0, 6.0, 7.0], "A weight that took no part should stay as it is.")
    right("This is what an optimizer does on each owner.")


def _unused(answer: Callable[[Any, int, float], Any], weight: Any, context_id: int) -> Any:
    try:
        return rpc.rpc_sync("worker1", answer, (weight, context_id, 0.25))
    except KeyError:
        raise NotYet("A weight that took no part has no entry in the context, and that was an error.") from None


def global_norm(answer: Callable[[int, Weights], Any]) -> None:
    """`answer(context_id, weights)` is the norm over all workers."""
    for owners in (["worker1", "worker2", "worker2"], ["worker2"], ["worker1", "worker2"]):
        weights = [rpc.remote(owner, _weight, (2.0 + place,)) for place, owner in enumerate(owners)]
        with dist_autograd.context() as context_id:
            parts = [rpc.rpc_sync(weight.owner(), _square_sum, (weight,)) for weight in weights]
            dist_autograd.backward(context_id, [torch.stack(parts).sum()])
            with trying():
                found = returned(answer(context_id, weights))
        gradients = [2 * (2.0 + place + step) for place in range(len(owners)) for step in range(3)]
        wanted = math.sqrt(sum(value * value for value in gradients))
        require(isinstance(found, float), f"The norm should be a float, not {shown(found)}.")
        where = f"For weights on {owners} it is {wanted:.4f}, and yours gave {found:.4f}."
        require(math.isclose(found, wanted, rel_tol=1e-9), where)
    right("One number from each, one number in the end.")


Save = Callable[[str, DistributedOptimizer, Weights], None]


def restore(answer: Save, checkpoint: Save) -> None:
    """`answer(directory, optimizer, weights)` undoes what has happened since `checkpoint`."""
    weights, optimizer = _training()
    _train(weights, optimizer)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint(directory, optimizer, weights)
        saved = _everything(weights, optimizer)
        _train(weights, optimizer)
        wanted = _values(weights)

        weights, optimizer = _training()
        fresh = _everything(weights, optimizer)
        with trying():
            answer(directory, optimizer, list(weights))
    values, momentum = _everything(weights, optimizer)
    require((values, momentum) != fresh, "Nothing has been restored. Replace the three dots.")
    require(values == saved[0], "The weights on the workers are not those that were saved.")
    require(momentum == saved[1], "The weights are back, but the optimizer has lost its memory.")
    _train(weights, optimizer)
    require(_values(weights) == wanted, "The training does not go on as it would have without the break.")
    right("It goes on as if nothing had happened.")


# -- what the answers are tried with
def _weight(first: float) -> nn.Parameter:
    return nn.Parameter(torch.arange(3, dtype=torch.double) + first)


def _square_sum(weight: RRef[Tensor]) -> Tensor:
    """Its gradient is twice the weight."""
    return weight.local_value().square().sum()


def _training() -> tuple[list[Any], DistributedOptimizer]:
    weights = [rpc.remote(owner, _weight, (1.0,)) for owner in ("worker1", "worker2")]
    return weights, DistributedOptimizer(torch.optim.SGD, weights, lr=0.125, momentum=0.5)


def _train(weights: Weights, optimizer: DistributedOptimizer) -> None:
    for _ in range(3):
        with dist_autograd.context() as context_id:
            parts = [rpc.rpc_sync(weight.owner(), _square_sum, (weight,)) for weight in weights]
            dist_autograd.backward(context_id, [torch.stack(parts).sum()])
            optimizer.step(context_id)


def _values(weights: Weights) -> list[list[float]]:
    return [weight.to_here().tolist() for weight in weights]


def _everything(weights: Weights, optimizer: DistributedOptimizer) -> tuple[list[list[float]], list[Any]]:
    """Weights, and the optimizer's momentum."""
    state = optimizer.state_dict()["state"]
    return _values(weights), [kept["momentum_buffer"].tolist() for _, kept in sorted(state.items())]
