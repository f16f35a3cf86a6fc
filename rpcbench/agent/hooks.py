"""How autograd (and whatever else must see every call) attaches to the agent, which knows none of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rpcbench.base.ids import Id
from rpcbench.serialization.tensor_types import Route
from rpcbench.wire.messages import Gradients, Scope, WalkFailed

if TYPE_CHECKING:
    import torch


class Crossing(NamedTuple):
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

    def crossed(self, crossings: Sequence[Crossing]) -> None:
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
