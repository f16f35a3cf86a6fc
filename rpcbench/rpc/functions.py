"""Checks of torch's operators before they are sent, and functions that are called by name.

The check lets torch itself parse the arguments of `rpc_sync("w1", torch.add, ("a", 1))`, so it accepts all that Python
accepts, which is more than TorchScript's schemas contain.

A function may be given by name: `rpc_sync("w1", "train")`, `rpc_sync("w1", "mylib.data:Loader.open")`. A plain name is
looked up in the callee's main namespace, which its script, or the cells run on it, define.

`async_execution` is torch's: it marks a function that returns a future of its result.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import BuiltinFunctionType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from rpcbench.base.errors import NoOverloadError
from rpcbench.runtime import current
from rpcbench.runtime.server import ASYNC_MARK, DeferredResult
from rpcbench.serialization.closures import MissingCodeError
from rpcbench.serialization.importable import find_in_main

__all__ = ["async_execution"]
_MAIN = "__main__"


class NamedFunction:
    """A function by name, looked up on the worker that calls it."""

    def __init__(self, name: str) -> None:
        self.name = self.__qualname__ = name

    def __reduce__(self) -> Any:
        return NamedFunction, (self.name,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_marked(_find_function(self.name), args, kwargs)


def _find_function(name: str) -> Any:
    module, _, path = name.rpartition(":")
    here = current.current_agent().name
    if module in ("", _MAIN):
        found = find_in_main(path)
        if found is None:
            raise MissingCodeError(f"{here} has no function {path!r} in its main namespace")
    else:
        try:
            found = attrgetter(path)(importlib.import_module(module))
        except (AttributeError, ImportError) as error:
            raise MissingCodeError(f"{here} has no function {path!r} in module {module}: {error}") from error
    if not callable(found):
        raise TypeError(f"{name!r} on {here} is not a function: its type is {type(found).__name__}")
    return found


_C: Any = torch._C
_HOMES = {  # modules of operators whose arguments torch's own parser reads
    "torch": _C._VariableFunctions,
    "torch._C._nn": _C._nn,
    "torch._C._linalg": _C._linalg,
    "torch._C._fft": _C._fft,
    "torch._C._special": _C._special,
}


class _ParseOnly(TorchFunctionMode):
    # torch parses the arguments before it calls the innermost mode: a mode that does nothing leaves only the parsing.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        return None


_PARSE_ONLY = _ParseOnly()
_TENSORS = {torch.Tensor}
_fit: set[tuple[Callable[..., Any], int]] = set()
"""Operators that accept this number of tensors and no other argument: parsing depends only on the number."""


def check_overload(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise NoOverloadError where `function` is an operator of torch that does not take these arguments."""
    if type(function) is not BuiltinFunctionType:
        return
    tensors = not kwargs and set(map(type, args)) == _TENSORS
    if tensors and (function, len(args)) in _fit:
        return
    namespace = _HOMES.get(function.__module__)
    # Other builtins, which no mode intercepts, would really run here.
    if namespace is None or getattr(namespace, function.__name__, None) is not function:
        return
    try:
        with _PARSE_ONLY:
            function(*args, **kwargs)
    except TypeError as error:
        raise NoOverloadError(
            f"Overloaded torch operator invoked from Python failed to match any schema:\n{error}\n"
            f"{_overload_signatures(function)}nothing was sent"
        ) from None
    except Exception:  # noqa: BLE001  (one of the few operators that no mode intercepts: the callee reports its error)
        return
    if tensors:
        _fit.add((function, len(args)))


def _overload_signatures(function: Callable[..., Any]) -> str:
    schemas = _C._jit_get_schemas_for_operator(f"aten::{function.__name__}")
    return "".join(f"  {schema}\n" for schema in schemas)


F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function whose return value is a Future of its result.

    The worker's thread is free as soon as the function has returned; the reply is sent when the Future completes.
    Apply it inside `staticmethod` and `classmethod`, outside all other decorators. The caller gets a RuntimeError where
    the function returns another value than a Future.

    >>> @rpc.functions.async_execution
    ... def relay(x):
    ...     return rpc.rpc_async("worker2", torch.neg, (x,))
    >>> rpc.rpc_sync("worker1", relay, (torch.ones(2),))
    tensor([-1., -1.])
    """

    @functools.wraps(fn)
    def call_function(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(call_function, ASYNC_MARK, fn)
    return call_function  # type: ignore[return-value]


def run_marked(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function that a served one has looked up: the server, which does not see it, would miss its mark."""
    result = function(*args, **kwargs)
    return DeferredResult(result) if getattr(function, ASYNC_MARK, None) is not None else result
