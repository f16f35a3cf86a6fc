"""torch's private names for autograd contexts, which programs and tests lean on."""

from __future__ import annotations

from typing import Any

from rpcbench.autograd.graph import send_node
from rpcbench.autograd.recorder import AutogradRecorder, recorder
from rpcbench.base.ids import COUNTER_BITS
from rpcbench.runtime import current


class DistAutogradContext:
    """A look at one context on this worker. RuntimeError once it is released."""

    def __init__(self, here: AutogradRecorder, context_id: int) -> None:
        here.recorded(context_id)
        self._here, self._id = here, context_id

    def _context_id(self) -> int:
        return self._id

    def _send_functions(self) -> dict[int, Any]:
        """Message number → the node above the tensors that were sent."""
        return {number: send_node(sent.edges) for number, sent in self._here.recorded(self._id).sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        """Message number → the node behind the tensors that were received."""
        return dict(self._here.recorded(self._id).recvs)

    def _known_worker_ids(self) -> set[int]:
        """Workers that this one has exchanged messages of the context with."""
        self._here.recorded(self._id)
        return self._here.known_workers(self._id)


def _init(worker_id: int) -> None:
    """Nothing to do: an agent records from its start."""


def _new_context() -> DistAutogradContext:
    """A new context, which is this thread's own from here on, until `_release_context`."""
    here = recorder()
    if here.current() is not None:
        raise RuntimeError("Already have an autograd context id for this thread.")
    context_id = here.new_context()
    here.enter(context_id)
    return DistAutogradContext(here, context_id)


def _release_context(context_id: int) -> None:
    here = recorder()
    here.recorded(context_id)
    if here.current() == context_id:
        here.enter(None)
    here.release(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """RuntimeError for a context that is not there."""
    return DistAutogradContext(recorder(), context_id)


def _current_context() -> DistAutogradContext:
    """This thread's context. RuntimeError where it has none."""
    here = recorder()
    found = here.current()
    if found is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return DistAutogradContext(here, found)


def _is_valid_context(context_id: int) -> bool:
    return context_id in recorder().contexts()


def _get_max_id() -> int:
    return (current.current().id << COUNTER_BITS) | ((1 << COUNTER_BITS) - 1)


def _get_debug_info() -> dict[str, str]:
    here = recorder()
    running = sum(len(here.recorded(context_id).passes) for context_id in here.contexts())
    return {"num_current_backward_passes": str(running), "num_autograd_contexts": str(len(here.contexts()))}
