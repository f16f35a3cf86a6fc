"""Optimizers for parameters on many workers: a drop-in for `torch.distributed.optim.DistributedOptimizer`.

Each owner steps its own parameters with the gradients of one autograd context; `.grad` is used only inside a step and
is None after it. Steps of one process are serialised, as torch does, so two trainers never mix their gradients.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from rpcbench.agent import current
from rpcbench.agent.core import Agent
from rpcbench.autograd import recorder
from rpcbench.rpc import RRef, remote, rpc_async
from rpcbench.words.futures import wait_all

__all__ = ["DistributedOptimizer", "LocalOptimizer"]


class _StepLock:
    """One lock for each agent: parameters may be shared between optimizers."""

    def __init__(self, agent: Agent) -> None:
        self.lock = threading.Lock()


class LocalOptimizer:
    """A torch optimizer over parameters of this process, stepped with the gradients of a context."""

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], params: Sequence[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        self.params = list(params)
        self.optimizer = optimizer_class(self.params, *args, **kwargs)

    def step(self, context_id: int) -> None:
        """One step; parameters without a gradient in the context are left alone.

        RuntimeError for an unknown context.
        """
        gradients = recorder().gradients(context_id)
        with current.current().part(_StepLock).lock:
            try:
                for param in self.params:
                    param.grad = gradients.get(param)
                self.optimizer.step()
            finally:
                for param in self.params:
                    param.grad = None


class DistributedOptimizer:
    """One torch optimizer for each worker that owns some of the parameters.

        optimizer = DistributedOptimizer(torch.optim.SGD, [rref1, rref2], lr=0.05)
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Errors of a worker's optimizer are raised here, when it is made and when it steps.
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], params_rref: Sequence[RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        by_owner: dict[int, list[RRef[Any]]] = defaultdict(list)
        for rref in params_rref:
            by_owner[rref.owner().id].append(rref)
        self.remote_optimizers: list[RRef[Any]] = [
            remote(owner, _make, (optimizer_class, rrefs, args, kwargs)) for owner, rrefs in by_owner.items()
        ]
        wait_all([rpc_async(rref.owner(), _exists, (rref,)) for rref in self.remote_optimizers])

    def step(self, context_id: int) -> None:
        """Step on all owners at once, with the gradients of the context. RuntimeError for an unknown context."""
        recorder().gradients(context_id)
        wait_all([rpc_async(rref.owner(), _step, (rref, context_id)) for rref in self.remote_optimizers])


def _make(
    optimizer_class: type[torch.optim.Optimizer], rrefs: list[RRef[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LocalOptimizer:
    return LocalOptimizer(optimizer_class, [rref.local_value() for rref in rrefs], *args, **kwargs)


def _exists(rref: RRef[Any]) -> None:
    rref.local_value()


def _step(rref: RRef[Any], context_id: int) -> None:
    rref.local_value().step(context_id)
