"""torch's private names for autograd contexts, on which programs and tests rely."""

from __future__ import annotations

from typing import Any

from rpcbench.autograd.graph import send_node
from rpcbench.autograd.recorder import AutogradRecorder, recorder
from rpcbench.base.ids import global_id
from rpcbench.runtime import current


class DistAutogradContext:
    """A view of one context on this worker. Raises RuntimeError after the context is released."""

    def __init__(self, here: AutogradRecorder, context_id: int) -> None:
        here.find_record(context_id)
        self._here, self._id = here, context_id

    def _context_id(self) -> int:
        return self._id

    def _send_functions(self) -> dict[int, Any]:
        """Return message number → the node above the tensors that were sent."""
        return {number: send_node(sent.edges) for number, sent in self._here.find_record(self._id).sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        """Return message number → the node behind the tensors that were received."""
        return dict(self._here.find_record(self._id).recvs)

    def _known_worker_ids(self) -> set[int]:
        """Return the workers with which this one has exchanged messages of the context."""
        self._here.find_record(self._id)  # raises if it is released
        return self._here.known_workers(self._id)


def _init(worker_id: int) -> None:
    """Do nothing: an agent records from its start."""


def _new_context() -> DistAutogradContext:
    """Make a context that is this thread's own until `_release_context`."""
    here = recorder()
    context_id = here.new_own_context()
    here.set_context(context_id)
    return DistAutogradContext(here, context_id)


def _release_context(context_id: int) -> None:
    here = recorder()
    here.find_record(context_id)
    if here.current_context() == context_id:
        here.set_context(None)
    here.release_context(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """Return a context. RuntimeError if there is none with this id."""
    return DistAutogradContext(recorder(), context_id)


def _current_context() -> DistAutogradContext:
    """Return this thread's context. RuntimeError if it has none."""
    here = recorder()
    found = here.current_context()
    if found is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return DistAutogradContext(here, found)


def _is_valid_context(context_id: int) -> bool:
    return context_id in recorder().context_ids()


def _get_max_id() -> int:
    return global_id(current.current_agent().id + 1, 0) - 1


def _get_debug_info() -> dict[str, str]:
    here = recorder()
    running = sum(len(here.find_record(context_id).passes) for context_id in here.context_ids())
    return {"num_current_backward_passes": str(running), "num_autograd_contexts": str(len(here.context_ids()))}
