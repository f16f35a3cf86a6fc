"""A message as a row of plain values that says what it was about, and holds nothing of a user's data.

Made for each message while somebody listens for them, under the machine's lock: so it looks at fields, and no more.
"""

from __future__ import annotations

from typing import NamedTuple

from rpcbench.wire.messages import Body, Message, Notice


class Traced(NamedTuple):
    """One half of a message, as one of its ends tells of it. `bytes`: of users' data; `context`: 0 for none."""

    what: str
    peer: int
    seq: int
    time: float
    kind: str
    call: int | None
    rrefs: list[str]
    context: int
    label: str
    bytes: int


def traced(what: str, peer: int, seq: int, time: float, message: Message) -> Traced:
    """`what`: "sent", "received" or "lost"; `peer` is the other end, `time` in monotonic seconds."""
    scope = getattr(message, "scope", None)
    context = scope.context if scope is not None else getattr(message, "context", 0)
    rrefs = [str(fork.rref) for fork in getattr(message, "forks", ())]
    if (about := getattr(message, "rref", None)) is not None:
        rrefs.insert(0, str(about))
    label = message.channel if type(message) is Notice else getattr(message, "label", "")
    call, kind = getattr(message, "call", None), type(message).__name__
    return Traced(what, peer, seq, time, kind, call, rrefs, context, label, _size(message))


def _size(message: Message) -> int:
    if type(message) is Notice:
        return len(message.data)
    body: Body | None = getattr(message, "body", None)
    if body is None:
        return 0
    return len(body.payload) + len(body.tensors) + sum(memoryview(buffer).nbytes for buffer in body.buffers)
