"""Grad mode and autocast that travel with a call. As in torch, they stay behind unless asked to come along: for one
call, or (`same_modes=True` of a Cluster or of the options of `init_rpc`) for all calls of a member.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


class SameModes:
    """A function that runs under the grad mode and autocast that its maker's thread had."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES
        ]
        self.__dict__.update(
            (name, getattr(function, name))
            for name in ("__qualname__", "_wrapped_async_rpc_function")
            if hasattr(function, name)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(self._grad))
            for device, enabled, dtype in self._autocast:
                if enabled != torch.is_autocast_enabled(device) or enabled:
                    modes.enter_context(torch.autocast(device, dtype, enabled))
            return self._function(*args, **kwargs)


def same_modes(function: Callable[..., Any]) -> SameModes:
    """`function`, to be called elsewhere as if it were called here: with this thread's grad mode and autocast.

    >>> w = torch.ones(3, requires_grad=True)
    >>> with torch.no_grad():
    ...     rpc.rpc_sync("worker1", dist_autograd.same_modes(torch.mul), (w, 2.0)).requires_grad
    False
    """
    return SameModes(function)
