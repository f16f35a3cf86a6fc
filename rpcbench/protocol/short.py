"""Four steps of a plain call, each of which does all that a node has to do at once.

    caller    `call`: begun and numbered             `resolve`: the answer has come
    callee    `take`: it has come, and begins        `answer`: it has run, and the answer is numbered

Each leaves a node as the general way would (`Node.call`, `handle` and `begin`, `send`, `handle`), where that had no
effect but the one that follows here by itself. Where it might have another, nothing is done, and the general way is to
be taken. Messages that bring RRefs always go there, and so does all while nothing ticks: then a number asks for a
`Wake`.
"""

from __future__ import annotations

from rpcbench.protocol.effects import Send
from rpcbench.protocol.node import Node
from rpcbench.wire.messages import Call, Create, Fetch, Result


def call(node: Node, to: int, message: Call | Create | Fetch, now: float, timeout: float | None) -> Send | None:
    """A call begins: what is to be sent; None where nothing has been done."""
    delivery = node.delivery
    pair = delivery.pairs.get(to)
    if pair is None or not delivery.ticking:
        return None
    if isinstance(message, Create) and message.fork not in node.rrefs.users:
        return None  # its maker has gone since; another may be in its place
    label = "to_here" if isinstance(message, Fetch) else message.label
    node.calls.start(message.call, to, label, now, timeout)
    return delivery.number(pair, message)


def take(node: Node, source: int, seq: int, message: Call | Fetch, now: float) -> bool:
    """A call has come, and its function runs now; False where nothing has been done."""
    pair = node.delivery.next_from(source, seq)
    if pair is None:
        return False
    node.delivery.came(pair, seq, message)
    node.calls.taken(source, message, now)
    return True


def answer(node: Node, to: int, result: Result) -> Send | None:
    """The function has returned: what is to be sent; None where nothing has been done."""
    delivery = node.delivery
    pair = delivery.pairs.get(to)
    if pair is None or not delivery.ticking or not node.calls.served(to, result.call):
        return None
    return delivery.number(pair, result)


def resolve(node: Node, source: int, seq: int, result: Result) -> bool:
    """The answer to a call that waits has come; False where nothing has been done."""
    pair = node.delivery.next_from(source, seq)
    if pair is None or result.call not in node.calls.outgoing:
        return False
    node.delivery.came(pair, seq, result)
    node.calls.ended(result.call)
    return True
