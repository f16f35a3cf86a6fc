"""A drop-in for `torch.distributed.autograd`: gradients across workers.

    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", forward, (x,)).sum()
        autograd.backward(context_id, [loss])
        grads = autograd.get_gradients(context_id)      # of this worker's leaves; .grad is left alone
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from rpcbench.agent import current
from rpcbench.agent.core import Agent
from rpcbench.autograd.recorder import AutogradRecorder
from rpcbench.protocol.node import Node

__all__ = ["backward", "context", "get_gradients"]


def recorder(agent: Agent | None = None) -> AutogradRecorder:
    """The recorder of an agent, by default the current one. RuntimeError where RPC is not initialized."""
    found = (agent or current.current()).values.recorder
    assert isinstance(found, AutogradRecorder), "an agent without distributed autograd"
    return found


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
        with here.inside(context_id):
            yield context_id
    finally:
        here.release(context_id)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Run backward from scalar `roots` on this worker, over all workers that took part in the context.

    Gradients add up in the context, on the workers that have the leaves. Only messages that the roots depend on take
    part. RuntimeError for bad roots or an unknown context; an error of a remote function or hook is raised here, as
    its own type and as RpcError; WorkerLostError where a worker that is needed is gone.

    >>> w = torch.ones(3, requires_grad=True)
    >>> with dist_autograd.context() as context_id:
    ...     loss = rpc.rpc_sync("worker1", torch.mul, (w, 2.0)).sum()
    ...     dist_autograd.backward(context_id, [loss])
    ...     dist_autograd.get_gradients(context_id)[w]
    tensor([2., 2., 2.])
    """
    recorder().backward(context_id, list(roots), retain_graph).wait()


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Leaf tensor → its gradient, for the leaves of this worker. RuntimeError for an unknown context."""
    return recorder().gradients(context_id)


def _current_context() -> int:
    """Id of this thread's context. RuntimeError where it has none."""
    found = recorder().current()
    if found is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return found


def _is_valid_context(context_id: int) -> bool:
    return recorder().is_valid(context_id)


def _get_max_id() -> int:
    return (current.current().id << 48) | ((1 << 48) - 1)


def _init(worker_id: int) -> None:
    """Does nothing: an agent has its recorder from the start."""


def _get_debug_info() -> dict[str, str]:
    """Counts: contexts known here, and passes that go on in them."""
    contexts, passes = current.current().machine.ask(_counts)
    return {"num_autograd_contexts": str(contexts), "num_current_backward_passes": str(passes)}


def _counts(node: Node) -> tuple[int, int]:
    contexts = node.contexts.contexts.values()
    return len(contexts), sum(len(context.walks) for context in contexts)
