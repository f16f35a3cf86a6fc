"""What takes the place of a message that is not sent, or is lost: each smaller than the one before."""

from __future__ import annotations

from rpcbench.wire import messages as m

_NO_CALL = -1


def instead_of(message: m.Message, error: Exception) -> m.Message | None:
    """None where nothing is smaller any more."""
    if isinstance(message, m.Result) or (isinstance(message, m.Failure) and message.body.payload):
        return m.Failure(message.call, type(error).__name__, str(error), m.EMPTY)
    if isinstance(message, m.Create):
        return m.Uncreated(message.rref, message.fork, message.label, str(error))
    return None if isinstance(message, m.Cancel) else m.Cancel(_NO_CALL)
