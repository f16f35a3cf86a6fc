"""A collective or transfer in the background: the result of `async_op=True`, of `isend` and of `irecv`.

Guarantees
- Its error is raised by each `wait`, never lost in a thread: also that of ranks with different calls.
- Each wait ends: after its timeout, with the group's world, or by Ctrl-C, as `world` describes.
- torch's profiler shows the first wait for it, under torch's name for the operation.
- Its future gets the result, or the error, also where the world ends before the operation has.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.futures import Future

from rpcbench.base.errors import CollectiveError
from rpcbench.distributed.arguments import timeout_seconds
from rpcbench.distributed.executor import Pending
from rpcbench.distributed.world import Wait, World
from rpcbench.runtime import current
from rpcbench.runtime.operator_profile import is_profiled


class Work:
    """An operation in the background. Its tensors must not be touched before `wait` has returned."""

    def __init__(
        self, world: World, pending: Pending[int], wait: Wait, tensors: Sequence[torch.Tensor] = (),
        ranks: Sequence[int] = (), name: str = "",
    ) -> None:  # fmt: skip
        self._world, self._pending, self._wait = world, pending, wait
        self._tensors = list(tensors)  # those that get the result
        self._ranks = ranks  # of the group, for a receive
        self._name: str | None = name or None  # torch's for the operation; None once a profiler has shown it
        self._lock = threading.Lock()  # two threads may ask for the future, and two may complete it
        self._future: Future[list[torch.Tensor]] | None = None
        self._settled = False  # whether the future is complete
        self._revoke: Callable[[], object] = lambda: None

    def wait(self, timeout: float | timedelta | None = None) -> int:
        """Wait until the operation has completed.

        Args:
            timeout: Seconds for this wait; None: the timeout of the group. After it the process group is over.

        Returns:
            True; for a send or a receive the rank of the peer.

        Raises:
            CollectiveError: The calls of the ranks differ, or one is invalid; the group stays usable. Or, as the
                following errors, the world is broken.
            RpcTimeoutError: A rank has not come in time.
            WorkerLostError: A rank has ended.
        """
        limit = timeout_seconds(timeout)
        wait = self._wait if limit is None else replace(self._wait, seconds=limit)
        with self._shown_to_profiler():
            return self._world.wait_for_result(self._pending, wait)

    def synchronize(self) -> None:
        """Do as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it has completed or failed."""
        return self._pending.done or self._world.is_broken

    def is_success(self) -> bool:
        """Return whether it has completed without an error."""
        return self._pending.done and self._pending.error is None

    def exception(self) -> BaseException | None:
        """Return its error; None while it runs, and after success."""
        return self._pending.error if self._pending.done else self._world.failure_reason()

    def source_rank(self) -> int:
        """Return the rank that has sent, of a completed receive. Raises its error; CollectiveError while it runs."""
        return self._result_or_raise()

    def _source_rank(self) -> int:
        """Return the position in the group of the rank that has sent, as torch's own Work; raises as `source_rank`."""
        return self._ranks.index(self._result_or_raise())

    def result(self) -> list[torch.Tensor]:
        """Return the tensors with the result. Raises its error; CollectiveError while it runs."""
        self._result_or_raise()
        return self._tensors

    def _result_or_raise(self) -> int:
        if (error := self.exception()) is not None:
            raise error
        if not self._pending.done:
            raise CollectiveError(f"{self._wait.what} has not completed: call wait() first")
        return self._pending.result()

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return a future of the tensors with the result.

        Functions that follow it run on the thread of the group: there they must not wait for another operation.
        """
        with self._lock:
            first = self._future is None
            future = self._future = Future() if self._future is None else self._future
        if first:
            self._revoke = self._world.call_when_closed(self._complete_future)
            self._pending.call_when_done(self._complete_future)
        return future

    def _shown_to_profiler(self) -> contextlib.AbstractContextManager[object]:
        """Have the profiler of this thread, if one runs, record what happens meanwhile as the operation, once."""
        # The wait, not the operation: an event that another thread ends after the profiler has would be freed memory.
        # torch's profiler does not see the thread that does the work; ours, which sees all threads, needs no help.
        if self._name is None or not _profiler_enabled() or is_profiled(current.find_current()):
            return contextlib.nullcontext()
        name, self._name = self._name, None
        return record_function(name)

    def _complete_future(self) -> None:
        """Complete the future, once: after the operation, or at the end of the world."""
        with self._lock:
            if self._settled or self._future is None:
                return
            self._settled = True
        self._revoke()
        if (error := self.exception()) is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]


Request = Work  # its name in torch 0.4
