"""For checks of lessons 11 and 12: when and how the owners of weights are asked for gradients.

`Watch` replaces `get_gradients` on the workers and `context` here, for the time of one answer. It knows whether all
owners were asked at the same time, and it makes sure that a context that has ended is gone on all workers.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import rpcbench.autograd as dist_autograd
import rpcbench.rpc as rpc

PATIENCE = 2.0  # seconds for which one owner waits for the others: only a wrong answer needs it
ENDED = "Could not find autograd context"


class Watch:
    """What is known of an answer. `at_once`: all owners were asked before one of them had answered."""

    def __init__(self, owners: Sequence[str]) -> None:
        self.owners = set(owners)
        self.asked: set[str] = set()
        self.at_once = True
        self.ended: list[int] = []
        self._changed = threading.Condition()

    def arrive(self, owner: str) -> None:
        with self._changed:
            self.asked.add(owner)
            self._changed.notify_all()
            if self.at_once:
                self.at_once = self._changed.wait_for(lambda: self.asked >= self.owners, PATIENCE)


_watches: list[Watch] = []


@contextlib.contextmanager
def watching(owners: Sequence[str]) -> Iterator[Watch]:
    """Watch one answer."""
    _watches.append(Watch(owners))
    for owner in _watches[-1].owners:
        rpc.rpc_sync(owner, meet, (len(_watches) - 1,))
    try:
        with mock.patch.object(dist_autograd, "context", _thorough(_watches[-1])):
            yield _watches[-1]
    finally:
        for owner in _watches[-1].owners:
            rpc.rpc_sync(owner, meet, (None,))


def _thorough(watch: Watch) -> Callable[[], Any]:
    """`context`, which at its end waits until all workers have dropped it."""
    context = dist_autograd.context

    @contextlib.contextmanager
    def thorough() -> Iterator[int]:
        with context() as context_id:
            yield context_id
        watch.ended.append(context_id)
        for owner in watch.owners:
            while rpc.rpc_sync(owner, knows, (context_id,)):
                time.sleep(0.005)

    return thorough


def read_too_late(watch: Watch, error: BaseException) -> bool:
    """Whether an error of the answer says that it used a context after its end."""
    return ENDED in str(error) and bool(watch.ended)


# -- what runs on workers, but for `arrive`
_plain = dist_autograd.get_gradients


def meet(number: int | None) -> None:
    """From now on a call that reads gradients here waits until the other owners are asked, too. None: no more."""

    def get_gradients(context_id: int) -> dict[Any, Any]:
        contextvars.Context().run(rpc.rpc_sync, "notebook", arrive, (number, rpc.get_worker_info().name))
        return _plain(context_id)

    dist_autograd.get_gradients = _plain if number is None else get_gradients


def arrive(number: int, owner: str) -> None:
    """Runs in the notebook."""
    _watches[number].arrive(owner)


def knows(context_id: int) -> bool:
    try:
        _plain(context_id)
    except RuntimeError:
        return False
    return True
