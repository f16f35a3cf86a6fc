"""A drop-in for `torch.distributed.autograd`: gradients across workers.

with autograd.context() as context_id:
    loss = rpc.rpc_sync("worker1", forward, (x,)).sum()
    autograd.backward(context_id, [loss])
    grads = autograd.get_gradients(context_id)      # of this worker's leaves; .grad is left alone
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

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
from rpcbench.autograd.recorder import accumulate, accumulator, recorder, same_modes

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
    "is_available",
    "recorder",
    "same_modes",
]


def is_available() -> bool:
    """Always: gradients across workers are a part of this package."""
    return True


@contextlib.contextmanager
def context() -> Iterator[int]:
    """A new autograd context for this thread; its id. Released on all workers at the end of the block.

    RuntimeError where this thread is in a context already.
    """
    here = recorder()
    if here.current() is not None:
        raise RuntimeError("Already have an autograd context id for this thread.")
    context_id = here.new_context()
    try:
        token = here._current.set(context_id)
        try:
            yield context_id
        finally:
            here._current.reset(token)
    finally:
        here.release(context_id)


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
