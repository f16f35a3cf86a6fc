"""Hooks of features on an agent: on threads, calls and messages (interceptors), and the recorder of autograd.

All messages between an agent's node and its connections pass its interceptors (class `Link`), and its clock comes from
them: fault injection, recording and the stepper attach there. Interceptors may be added and removed while messages
pass. Messages that a removed one still holds continue without the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rpcbench.runtime.pool import Job
from rpcbench.serialization.tensor_types import Route
from rpcbench.transport.base import Deliver, Link, Transmit
from rpcbench.wire.messages import Scope

if TYPE_CHECKING:
    import torch


class Recorder(Protocol):
    """Records the tensors of every message of a context. Its methods do not block and run no user code."""

    def current_context(self) -> int | None:
        """Return the context of this thread, if it has one."""

    def wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to send in a call: itself, or one that runs it as it would run on this thread."""

    def record_send(self, context: int, tensors: Sequence[torch.Tensor], to: int, label: str) -> Scope | None:
        """Record a message of the call `label` that is about to leave; return None if the context is over."""

    def record_cut_send(self, tensors: Sequence[torch.Tensor], to: int, label: str) -> Scope | None:
        """Do as `record_send`, in this thread's context, for a message that no backward pass passes through."""

    def record_cut_receive(self, scope: Scope, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Record that such a message has arrived."""

    def note_unrecorded(self, tensors: Sequence[torch.Tensor], label: str) -> None:
        """Take note of tensors that leave in the call `label` outside of any context."""

    def note_unattached(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Take note of tensors that a reply outside of any context has brought."""

    def withdraw_send(self, scope: Scope) -> None:
        """Take back the record of a message that could not be sent."""

    def record_receive(self, scope: Scope, tensors: list[torch.Tensor], source: int, back: Route) -> list[torch.Tensor]:
        """Record that a message has arrived; return the tensors to use instead of the decoded ones. `back`: the devices
        that their gradients go back to."""

    def enter_context(self, context: int) -> AbstractContextManager[None]:
        """Enter the context around a function that one of its messages asked for."""


@dataclass(frozen=True, slots=True)
class AgentHooks:
    """The functions that features add to an agent. Those of a list run in the order in which they were added."""

    on_thread: list[Job] = field(default_factory=list)  # run first on each thread of the pool
    around: list[Callable[[], AbstractContextManager[None]]] = field(default_factory=list)  # around callers' functions
    on_called: list[Job] = field(default_factory=list)  # when a caller's function has ended, before the reply
    on_deferred: list[Job] = field(default_factory=list)  # when the Future that it returned is done, before the reply
    on_error: list[Callable[[BaseException], object]] = field(default_factory=list)  # with errors of callers' functions
    on_long_wait: list[Callable[[float], object]] = field(default_factory=list)  # by a thread that waits, with seconds
    on_leave: list[Job] = field(default_factory=list)  # by `shutdown`, before other members can notice it
    on_end: list[Job] = field(default_factory=list)  # by `stop`
    on_fork: list[Job] = field(default_factory=list)  # in a forked child, where the agent is no longer

    def enter_thread(self) -> None:
        for job in self.on_thread:
            job()

    def report_wait(self, seconds: float) -> None:
        for handler in self.on_long_wait:
            handler(seconds)


class Interceptors:
    """The chain of interceptors: `near` is next to the node, `far` next to the connections, `all` in that order.
    `outgoing` takes messages from the node, `incoming` from the connections. `clock` counts the seconds of deadlines
    and retries, and must never jump. `changed` is called after each change."""

    def __init__(self, first: Link, transmit: Transmit, deliver: Deliver, changed: Job) -> None:
        self.clock = first.clock
        self.all: tuple[Link, ...] = (first,)
        self.near = self.far = first
        self._transmit, self._deliver, self._changed = transmit, deliver, changed
        self._lock = threading.Lock()  # one change at a time; messages pass without it
        self._connect_all((first,))

    @property
    def is_lossy(self) -> bool:
        return any(link.lossy for link in self.all)

    def replace_links(self, link: Link) -> None:
        """Replace all interceptors by this one."""
        with self._lock:
            self._connect_all((link,))
        self._changed()

    def add_link(self, link: Link) -> None:
        """Add one, next to the connections."""
        with self._lock:
            self._connect_all((*self.all, link))
        self._changed()

    def remove_link(self, link: Link) -> None:
        """Remove one; the last one leaves a plain one. Idempotent."""
        with self._lock:
            self._connect_all(tuple(one for one in self.all if one is not link) or (Link(),))
        self._changed()

    def replace_clock(self, clock: Callable[[], float]) -> None:
        """Replace the clock by another one, which must show the same time."""
        self.clock = clock
        self._changed()

    def close_links(self) -> None:
        for link in self.all:
            link.release_resources()

    def _connect_all(self, links: tuple[Link, ...]) -> None:
        for at, link in enumerate(links):
            transmit = links[at + 1].handle_outgoing if at + 1 < len(links) else self._transmit
            link.attach_callbacks(transmit, links[at - 1].handle_incoming if at else self._deliver)
        for link in set(self.all) - set(links):  # they may still hold messages
            link.attach_callbacks(self._transmit, self._deliver)
        self.all, self.near, self.far = links, links[0], links[-1]
        self.plain = all(type(link) is Link for link in links)  # plain ones pass everything on, so they can be skipped
        self.outgoing = self._transmit if self.plain else self.near.handle_outgoing
        self.incoming = self._deliver if self.plain else self.far.handle_incoming
