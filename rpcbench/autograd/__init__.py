"""A drop-in for `torch.distributed.autograd`: gradients across workers.

with autograd.context() as context_id:
    loss = rpc.rpc_sync("worker1", forward, (x,)).sum()
    autograd.backward(context_id, [loss])
    grads = autograd.get_gradients(context_id)      # of this worker's leaves; .grad is left alone
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, Literal

import torch

from rpcbench.autograd.internals import (
    DistAutogradContext,
    _current_context,
    _get_debug_info,
    _get_max_id,
    _init,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
)
from rpcbench.autograd.modes import same_modes
from rpcbench.autograd.recorder import recorder
from rpcbench.autograd.sums import accumulate, accumulator

__all__ = [
    "DistAutogradContext",
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_init",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "accumulate",
    "accumulator",
    "backward",
    "context",
    "get_gradients",
    "recorder",
    "same_modes",
]


def context() -> AbstractContextManager[int]:
    """A new autograd context for this thread; its id. Released on all workers at the end of the block.

    RuntimeError where this thread is in a context already.
    """
    return _Block()


class _Block(ContextDecorator):
    """See `context`. A generator would take longer than all that is done here."""

    def __enter__(self) -> int:
        here = self._here = recorder()
        if here.current() is not None:
            raise RuntimeError("Already have an autograd context id for this thread.")
        self._id = here.new_context()
        self._inside = here.inside(self._id)
        self._inside.__enter__()
        return self._id

    def __exit__(self, *raised: Any) -> None:
        try:
            self._inside.__exit__(*raised)
        finally:
            self._here.release(self._id)

    def _recreate_cm(self) -> _Block:
        return _Block()


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    mode: Literal["smart", "fast"] = "smart",
) -> None:
    """Run backward from scalar `roots` on this worker, over all workers that took part in the context.

    Gradients add up in the context, on the workers that have the leaves. Only messages that the roots depend on take
    part. In mode `"fast"`, torch's, every message must that a worker which takes part has sent in the context; when all
    gradients that came have run, RpcError names those that got none.

    TypeError or RuntimeError for bad roots, RuntimeError for an unknown context; an error of a remote function or hook
    is raised here, as its own type and as RpcError; WorkerLostError where a worker that is needed is gone.

    >>> w = torch.ones(3, requires_grad=True)
    >>> with dist_autograd.context() as context_id:
    ...     loss = rpc.rpc_sync("worker1", torch.mul, (w, 2.0)).sum()
    ...     dist_autograd.backward(context_id, [loss])
    ...     dist_autograd.get_gradients(context_id)[w]
    tensor([2., 2., 2.])
    """
    if mode not in ("smart", "fast"):
        raise ValueError(f"mode is 'smart' or 'fast', not {mode!r}")
    given: object = roots
    if type(given) is not list and (isinstance(given, torch.Tensor) or not isinstance(given, Iterable)):
        raise TypeError(f"incompatible function arguments: roots is a list of tensors, such as [loss], not {given!r}")
    recorder().passes.backward(context_id, list(roots), retain_graph, fast=mode == "fast")


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Leaf tensor → its gradient, for the leaves of this worker. RuntimeError for an unknown context."""
    return recorder().gradients(context_id)
