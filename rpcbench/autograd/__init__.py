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
    """Return True: gradients across workers are a part of this package."""
    return True


@contextlib.contextmanager
def context() -> Iterator[int]:
    """Make an autograd context for this thread, and yield its id. All workers release it at the end of the block.

    RuntimeError if this thread has a context already.
    """
    here = recorder()
    context_id = here.new_own_context()
    try:
        with here.enter_context(context_id):
            yield context_id
    finally:
        here.release_context(context_id)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    mode: Literal["smart", "fast"] = "smart",
) -> None:
    """Run backward from `roots` on this worker, over all workers that took part in the context.

    Gradients add up in the context, on the workers that have the leaves. Returns after the pass is over on all workers.

    Args:
        context_id: The context of the calls that the roots depend on.
        roots: Scalar tensors that require grad and have a `grad_fn`.
        retain_graph: Keep the buffers of the graph for another pass over the context.
        mode: `"smart"`: the messages that the roots depend on take part. `"fast"`, torch's mode: all messages that
            participating workers have sent in the context must take part; RpcError names those without a gradient.

    Raises:
        TypeError: `roots` is no list of tensors.
        ValueError: Another mode.
        RuntimeError: A root is no such tensor, or the context is unknown.
        WorkerLostError: A worker that takes part is lost.
        RpcError: A remote function or hook failed; the error has its own type, too.

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
    recorder().passes.run_pass(context_id, list(roots), retain_graph, fast=mode == "fast")


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return leaf tensor → gradient, for the leaves of this worker. RuntimeError for an unknown context."""
    return recorder().named_gradients(context_id)
