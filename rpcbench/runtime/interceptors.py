"""What sees every call and every message: the hooks of autograd, which the agent does not know, and links.

All messages between an agent's protocol and its connections pass its links, and its clock is theirs: fault injection,
recording and the stepper attach there. Links may come and go while messages do. What a link that was taken out still
has goes its way without the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rpcbench.base.ids import Id
from rpcbench.serialization.tensor_types import Route
from rpcbench.transport.base import Deliver, Link, Transmit
from rpcbench.wire.messages import Gradients, Scope, WalkFailed

if TYPE_CHECKING:
    import torch


class InterceptedMessage(NamedTuple):
    """A value that went out, or came in where `label` is None, beside the messages: see `Recorder.crossed`."""

    context: int
    message: int
    other: int
    label: object
    requires_grad: bool


class Passes(Protocol):
    """Answers the machines' questions about the graph."""

    def explore(self, context: int, walk: Id, message: int) -> None:
        """Find the recvs behind a send."""
        ...

    def propagate(self, context: int, walk: Id) -> None:
        """Run backward from the roots."""
        ...

    def accumulate(self, message: Gradients) -> None:
        """Gradients have come for a send."""
        ...

    def ended(self, walk: Id, failure: WalkFailed | None) -> None:
        """A pass that this worker began is over."""
        ...

    def forget(self, context: int, walk: Id) -> None:
        """A pass is over here."""
        ...


class Recorder(Protocol):
    """Sees the tensors of every message of a context. Nothing here waits, or runs a user's code."""

    @property
    def passes(self) -> Passes: ...

    def current(self) -> int | None:
        """The context of this thread, if it has one."""
        ...

    def outgoing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What a call takes along in place of a function: that itself, or one that runs it as it would run here."""
        ...

    def sending(self, context: int, tensors: Sequence[torch.Tensor], to: int, label: str) -> Scope | None:
        """A message of this context, part of the call `label`, is about to go out; None where the context is over."""
        ...

    def cut(self, tensors: Sequence[torch.Tensor], to: int, label: str) -> Scope | None:
        """As `sending`, in the context of this thread, of a message that no backward pass goes back through."""
        ...

    def cut_off(self, scope: Scope, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Such a message has come in."""
        ...

    def crossing(self) -> tuple[int, int] | None:
        """Context and number of a value that goes out as by `cut`, but is recorded later, see `crossed`; None outside
        of any context, or where that is over."""
        ...

    def crossed(self, crossings: Sequence[InterceptedMessage]) -> None:
        """Record values that went out or came in."""
        ...

    def unrecorded(self, tensors: Sequence[torch.Tensor], label: str) -> None:
        """The call `label` is about to go out with these tensors, outside of any context."""
        ...

    def unattached(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """An answer that belongs to no context has brought these tensors."""

    def unsent(self, scope: Scope) -> None:
        """It could not be sent."""
        ...

    def received(self, scope: Scope, tensors: list[torch.Tensor], source: int, back: Route) -> list[torch.Tensor]:
        """A message has come in; the tensors to use instead of those that were decoded. `back`: the way of their
        gradients."""
        ...

    def inside(self, context: int) -> AbstractContextManager[None]:
        """Around a function that a message of this context asked for."""
        ...

    def forget(self, context: int) -> None:
        """A context is over here."""
        ...


class Interceptors:
    """`near` is next to the machines, `far` next to the connections; between them they are in the order of `all`.

    `outgoing` takes what machines send, `incoming` what connections bring.

    `clock` counts the seconds of deadlines and retries; it must never jump. `changed` is called after each change.
    """

    def __init__(self, first: Link, transmit: Transmit, deliver: Deliver) -> None:
        self.changed: Callable[[], object] = lambda: None
        self.clock = first.clock
        self.all: tuple[Link, ...] = (first,)
        self.near = self.far = first
        self._transmit, self._deliver = transmit, deliver
        self._lock = threading.Lock()
        self._wire((first,))

    @property
    def lossy(self) -> bool:
        return any(link.lossy for link in self.all)

    def use(self, link: Link) -> None:
        """This one, and no other."""
        with self._lock:
            self._wire((link,))
        self.changed()

    def add(self, link: Link) -> None:
        """One more, next to the connections."""
        with self._lock:
            self._wire((*self.all, link))
        self.changed()

    def remove(self, link: Link) -> None:
        """Take one out; the last one leaves a plain one. Harmless if it is out already."""
        with self._lock:
            self._wire(tuple(one for one in self.all if one is not link) or (Link(),))
        self.changed()

    def run_by(self, clock: Callable[[], float]) -> None:
        """Another clock from now on, which shows what the one before does."""
        self.clock = clock
        self.changed()

    def closed(self) -> None:
        """The agent has stopped."""
        for link in self.all:
            link.closed()

    def _wire(self, links: tuple[Link, ...]) -> None:
        for at, link in enumerate(links):
            transmit = links[at + 1].outgoing if at + 1 < len(links) else self._transmit
            link.attach(transmit, links[at - 1].incoming if at else self._deliver)
        for link in set(self.all) - set(links):
            link.attach(self._transmit, self._deliver)
        self.all, self.near, self.far = links, links[0], links[-1]
        self.plain = all(type(link) is Link for link in links)  # those pass on what they get: no need to ask them
        self.outgoing = self._transmit if self.plain else self.near.outgoing
        self.incoming = self._deliver if self.plain else self.far.incoming
