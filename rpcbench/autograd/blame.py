"""Errors of a backward pass, from the worker where it went wrong to the one that began it."""

from __future__ import annotations

from typing import Any

from rpcbench.base.errors import RemoteError, RpcError, WorkerLostError
from rpcbench.base.ids import Id
from rpcbench.base.rebuild import fill, remade, set_field, story, words
from rpcbench.serialization.pickler import Codec
from rpcbench.wire.messages import EMPTY, WalkFailed


def failure_of(error: BaseException, context: int, walk: Id, worker: int, codec: Codec) -> WalkFailed:
    """An error that was raised here, as a message: itself where its class can travel, and always its story."""
    text = f"Error on Node {worker}: {words(error, str)}\n{story(error)}"
    body = codec.encode_error(error) if isinstance(error, Exception) else EMPTY
    return WalkFailed(context, walk, worker, type(error).__name__, text, body)


def raised(failure: WalkFailed, worker: str, codec: Codec) -> Exception:
    """What to raise where the pass began: an error of both RpcError and the original type, with its story as cause."""
    original: Any = None
    if failure.body.payload:
        try:
            original = codec.decode(failure.body)
        except Exception:  # noqa: BLE001  (its class cannot be rebuilt here; its story can be shown)
            original = None
    if original is None and failure.type == WorkerLostError.__name__:
        return WorkerLostError(failure.text)
    error = _both(failure.text.splitlines()[0] if failure.text else failure.type, original)
    set_field(error, "__cause__", RemoteError(worker, f"{failure.type} while gradients went back:\n{failure.text}"))
    return error


def _both(text: str, original: Any) -> Exception:
    """An exception of both kinds, where the original's class allows it."""
    if not isinstance(original, Exception) or isinstance(original, RpcError):
        return original if isinstance(original, RpcError) else RpcError(text)
    kind = type(original)
    try:
        both: Any = type(kind.__name__, (RpcError, kind), {"__module__": kind.__module__})
        inner = (original.exceptions,) if isinstance(original, ExceptionGroup) else ()
        made: Exception = remade(both, text, *inner)
        fill(made, ((text,), vars(original), {}))
    except Exception:  # noqa: BLE001  (a user's __init_subclass__ or __setstate__, or classes that have no subclass)
        return RpcError(text)
    return made
