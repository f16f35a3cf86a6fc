"""Proxies that call methods of an RRef's value on its owner: `rref.rpc_sync().method(*args)`.

Unlike torch's, they do not request the type before a call: the owner itself checks whether the method exists, and
whether it is marked with `async_execution`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rpcbench.base.config import UNSET_TIMEOUT
from rpcbench.base.ids import Id
from rpcbench.rpc.functions import run_marked
from rpcbench.runtime import current
from rpcbench.runtime.handles import RRefHandle

__all__ = ["RRefProxy"]
_ITSELF = "__call__"  # the method name that stands for the value itself
_OF_COPIES = {"__deepcopy__", "__wrapped__"}  # libraries look these up on any object; a proxy has none to forward


class RRefProxy:
    """A proxy of an RRef's value: `proxy.method(*args)` and `proxy(*args)` call it, `proxy.attr(name)` reads.

    Each call returns the result of `rpc_api(to, function, args=, timeout=)`: rpc_sync, rpc_async, remote or the like.
    """

    def __init__(self, rref: RRefHandle, rpc_api: Callable[..., Any], timeout: float = UNSET_TIMEOUT) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., Any]:
        if func_name in _OF_COPIES:
            raise AttributeError(func_name)
        return functools.partial(self._invoke_method, func_name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself, for example a module."""
        return self._invoke_method(_ITSELF, *args, **kwargs)

    def attr(self, name: str) -> Any:
        """Read an attribute of the value that is not a method."""
        return self._send_to_owner(_read_attribute, name)

    def _invoke_method(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._send_to_owner(run_method, method, args, kwargs)

    def _send_to_owner(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.rpc_api(self.rref._owner, function, args=(self.rref, *args), timeout=self.rpc_timeout)


# -- functions that run on the owner
def run_method(rref: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a method of the value."""
    return _run_method(rref.local_value(), method, args, kwargs)


def run_method_there(worker: int, serial: int, incarnation: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """As `run_method`, for the RRef with this id: the caller holds it during the call, so no fork need be sent."""
    return _run_method(
        current.current_agent().calls.values.live_future(Id(worker, serial, incarnation)).wait(), method, args, kwargs
    )


def _run_method(value: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function = value if method == _ITSELF else getattr(value, method)
    return run_marked(function, args, kwargs)


def _read_attribute(rref: Any, name: str) -> Any:
    return getattr(rref.local_value(), name)


def check_method(rref: Any, name: str) -> None:
    """Raise the error of a call of this method where the value has none."""
    value = rref.local_value()
    if name == _ITSELF and not callable(value):
        raise TypeError(f"{type(value).__name__!r} object is not callable")
    getattr(value, name)
