"""Methods of the value behind an RRef, called on its owner: `rref.rpc_sync().method(*args)`.

Unlike torch, no question for the type goes ahead of a call: the owner looks whether the method is there, and whether
it answers later (`async_execution`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from rpcbench.base.config import UNSET_TIMEOUT
from rpcbench.base.futures import Future
from rpcbench.base.ids import Id
from rpcbench.runtime import current
from rpcbench.runtime.server import ASYNC_MARK, DeferredResult

__all__ = ["RRefProxy"]
_ITSELF = "__call__"
_OF_COPIES = {"__deepcopy__", "__wrapped__"}  # asked of any object; a proxy has them no more than it has a value


class Reference(Protocol):
    """What a proxy needs of an RRef."""

    _owner: int
    _has: set[str]

    def local_value(self) -> Any: ...

    def _call(self, to: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Future[Any]: ...


class RRefProxy:
    """`proxy.method(*args)` calls a method of the value, `proxy(*args)` the value itself; `proxy.attr(name)` reads.

    `rpc_api(to, function, args=, timeout=)` makes the call, in the manner of rpc_sync, rpc_async or remote, and what
    it returns is returned.
    """

    def __init__(self, rref: Reference, rpc_api: Callable[..., Any], timeout: float = UNSET_TIMEOUT) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., Any]:
        if func_name in _OF_COPIES:
            raise AttributeError(func_name)
        return functools.partial(self._invoke, func_name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself, say a module."""
        return self._invoke(_ITSELF, *args, **kwargs)

    def attr(self, name: str) -> Any:
        """An attribute of the value that is no method."""
        return self._send(_read, name)

    def _invoke(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._send(run_method, method, args, kwargs)

    def _send(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.rpc_api(self.rref._owner, function, args=(self.rref, *args), timeout=self.rpc_timeout)


class CheckedProxy(RRefProxy):
    """For `rref.remote()`, whose errors would show only where the result is used: asks for each name, once."""

    def _send(self, function: Callable[..., Any], *args: Any) -> Any:
        name: str = args[0]
        if name not in self.rref._has:
            self.rref._call(self.rref._owner, _check, (self.rref, name), self.rpc_timeout).wait()
            self.rref._has.add(name)
        return super()._send(function, *args)


# -- what runs on the owner
def run_method(rref: Reference, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A method of the value."""
    return _run_method(rref.local_value(), method, args, kwargs)


def run_method_there(worker: int, serial: int, incarnation: int, method: str, *args: Any, **kwargs: Any) -> Any:
    """As `run`, where the caller holds the RRef of that name: it need not travel, and the call is a plain one."""
    return _run_method(current.current().values.here(Id(worker, serial, incarnation)).wait(), method, args, kwargs)


def _run_method(value: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function = value if method == _ITSELF else getattr(value, method)
    result = function(*args, **kwargs)
    return DeferredResult(result) if getattr(function, ASYNC_MARK, None) is not None else result


def _read(rref: Reference, name: str) -> Any:
    return getattr(rref.local_value(), name)


def _check(rref: Reference, name: str) -> None:
    value = rref.local_value()
    if name == _ITSELF and not callable(value):
        raise TypeError(f"{type(value).__name__!r} object is not callable")
    getattr(value, name)
