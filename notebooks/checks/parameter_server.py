"""Checks of lesson 13."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rpcbench
import rpcbench.rpc as rpc
from checks import NotYet, require, returned, right, shown, trying
from rpcbench.optim import DistributedOptimizer
from rpcbench.runtime.server import ASYNC_MARK

Log = list[tuple[str, str]]
Batch = tuple[Tensor, Tensor]
LOGS = {
    "pull a, push a, pull a, push a": [0, 0],
    "pull a, pull b, push a, push b": [0, 1],
    "pull a, push a, push a, push a": [0, 1, 2],
    "pull a, pull b, push b, pull b, push b, push a": [0, 0, 2],
    "pull c, pull a, pull b, push a, pull a, push a, push c, push b": [0, 0, 2, 3],
}


def staleness(answer: Callable[[Log], list[int]]) -> None:
    """`answer(log)` counts the steps between each push and the pull that belongs to it."""
    for text, wanted in LOGS.items():
        log = [(what, who) for what, who in (entry.split() for entry in text.split(", "))]
        with trying():
            found = returned(answer(log))
        require(isinstance(found, list), f"The answer should be a list, not {shown(found)}.")
        require(len(found) == len(wanted), f"For “{text}” there are {len(wanted)} pushes, not {len(found)}.")
        require(found == wanted, f"For “{text}” it is {wanted}, and yours gave {found}.")
    right("So a server can know how late each of its gradients was.")


def big_step(answer: Callable[[Any, DistributedOptimizer, list[Batch]], float], kind: Any, begin: list[Tensor]) -> None:
    """`answer(weights, optimizer, batches)` is one step with the gradient of the mean loss, after one pull."""

    class Counted(kind):  # type: ignore[misc]
        pulls = 0

        def pull(self) -> Any:
            self.pulls += 1
            return super().pull()

        def state(self) -> tuple[int, list[Tensor]]:
            return self.pulls, [values.detach() for values in self.values]

    generator = torch.Generator().manual_seed(1)
    batches = [(torch.rand(8, 64, generator=generator).double(), torch.arange(8) + k) for k in range(3)]
    weights = rpc.remote("worker1", Counted, (begin,))
    optimizer = DistributedOptimizer(torch.optim.SGD, weights.rpc_sync().references(), lr=1.0)
    with trying():
        loss = returned(answer(weights, optimizer, list(batches)))
    pulls, values = weights.rpc_sync().state()
    wanted, gradients = _mean(begin, batches)
    moved = torch.cat([(before - after).flatten() for before, after in zip(begin, values, strict=True)])
    require(moved.any(), "The weights on the server have not moved. Which call makes the step?")
    times = (moved @ gradients / (gradients @ gradients)).item()
    straight = torch.allclose(moved, times * gradients, atol=1e-9)
    require(straight, "The step does not go along the gradient of the mean loss, taken at one point.")
    require(abs(times - 1) < 1e-6, f"The step is {times:.3g} times as long as that of the mean loss.")
    require(pulls == 1, f"The weights were pulled {pulls} times.")
    require(isinstance(loss, float), f"The mean loss should be a number, not {shown(loss)}.")
    require(abs(loss - wanted) < 1e-9, f"The mean loss is {wanted:.4f}, and yours is {loss:.4f}.")
    right("Three batches, one pull, one push.")


def _mean(begin: list[Tensor], batches: list[Batch]) -> tuple[float, Tensor]:
    """The mean loss and its gradient as one vector."""
    local = [values.clone().requires_grad_() for values in begin]
    w1, b1, w2, b2 = local
    losses = [F.cross_entropy(torch.relu(images @ w1 + b1) @ w2 + b2, labels) for images, labels in batches]
    loss = torch.stack(losses).mean()
    return loss.item(), torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, local)])


def average(answer: Any) -> None:
    """`answer(n)` is a server that answers n callers of `push` at once."""
    for rounds in ([[2.0]], [[1.0, 2.0, 6.0], [30.0, 10.0, 20.0]], [[1.0, 5.0], [0.0, 0.0], [4.0, 2.0]]):
        with trying():
            server = rpc.remote("worker1", answer, (len(rounds[0]),))
            for numbers in rounds:
                _round(server, numbers)
    marked = getattr(answer.push, ASYNC_MARK, None) is not None
    require(marked, "The numbers are right, but a thread of the server stands and waits. Return a future instead.")
    right("One caller completes it, and all of them get their answer.")


def _round(server: Any, numbers: Sequence[float]) -> None:
    futures = [server.rpc_async(timeout=5).push(number) for number in numbers]
    found = []
    for place, future in enumerate(futures, 1):
        try:
            found.append(returned(future.wait()))
        except rpcbench.RpcTimeoutError:
            raise NotYet(f"{len(numbers)} have called, and number {place} of them got no answer.") from None
    wanted = sum(numbers) / len(numbers)
    for value in found:
        require(isinstance(value, float), f"The answer should be a number, not {shown(value)}.")
    require(found == [wanted] * len(numbers), f"The callers brought {list(numbers)}, and their answers were {found}.")
