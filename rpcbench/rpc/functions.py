"""`async_execution`, as in torch.distributed.rpc.functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function whose return value is a Future of its result.

    The worker's thread is free as soon as the function has returned; the answer is sent when the Future completes.
    Inside `staticmethod` or `classmethod`, around anything else. RuntimeError at the caller where the function
    returns something else.

    >>> @rpc.functions.async_execution
    ... def relay(x):
    ...     return rpc.rpc_async("worker2", torch.neg, (x,))
    >>> rpc.rpc_sync("worker1", relay, (torch.ones(2),))
    tensor([-1., -1.])
    """

    @functools.wraps(fn)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    marked._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return marked  # type: ignore[return-value]
