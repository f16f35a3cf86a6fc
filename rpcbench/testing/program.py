"""Which messages are a program's: those of calls, RRefs and backward passes.

All else is what a bench needs to go on: who is in the world, acknowledgements, cells and their output, telemetry,
stepping itself. Faults and steppers that leave it alone are seen by the program only.
"""

from __future__ import annotations

from typing import Any

from rpcbench.base.ids import OWN
from rpcbench.wire import messages as m

PROGRAM: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        m.Call, m.Create, m.Uncreated, m.Fetch, m.Result, m.Failure, m.Cancel,
        m.ForkRequest, m.ForkAccept, m.ChildAccept, m.UserDelete,
        m.Discover, m.Discovered, m.Gradients, m.Settled, m.WalkFailed, m.ReleaseContext, m.Attending, m.Parcel,
    )
}  # fmt: skip
"""Kinds of messages that programs cause, by name."""
_KINDS = frozenset(PROGRAM.values())
_IDS = ("rref", "fork", "context", "call", "message")


def of_program(message: m.Message) -> bool:
    """Whether it is no word of the bench's own."""
    return type(message) in _KINDS and not getattr(message, "call", 0) & OWN


def ids(message: m.Message) -> dict[str, str]:
    """What a message is about: the RRef, fork, autograd context, call, and number in its context, as text."""
    found = {name: str(getattr(message, name)) for name in _IDS if hasattr(message, name)}
    scope = getattr(message, "scope", None)
    if scope is not None:
        found |= {"context": str(scope.context), "message": str(scope.message)}
    forks = getattr(message, "forks", ())
    if forks:
        found["shares"] = ", ".join(str(fork.rref) for fork in forks)
    return found
