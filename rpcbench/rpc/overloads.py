"""Functions of a call that need a look before anything is sent: torch's own operators, and functions by name.

torch parses the arguments of `rpc_sync("w1", torch.add, ("a", 1))`, and then asks the innermost function mode what to
do; ours does nothing, so only the parsing happens. What Python would accept is accepted, which is more than
TorchScript's schemas say.

A caller may know a function by name only: `rpc_sync("w1", "train")`, `rpc_sync("w1", "mylib.data:Loader.open")`. A
plain name is looked up in the callee's main namespace: what its script, or the cells run on it, define.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rpcbench.base.errors import NoOverloadError
from rpcbench.runtime import current
from rpcbench.runtime.server import ASYNC_MARK, DeferredResult
from rpcbench.serialization.closures import MissingCodeError

_MAIN = "__main__"


class NamedFunction:
    """Stands for the function of that name on whichever worker it is called."""

    def __init__(self, name: str) -> None:
        self.name = self.__qualname__ = name

    def __reduce__(self) -> Any:
        return NamedFunction, (self.name,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = _find(self.name)
        result = function(*args, **kwargs)
        return DeferredResult(result) if getattr(function, ASYNC_MARK, None) is not None else result


def _find(name: str) -> Any:
    module, _, path = name.rpartition(":")
    try:
        found: Any = sys.modules[_MAIN] if module in ("", _MAIN) else importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (AttributeError, ImportError) as error:
        place = "its main namespace" if module in ("", _MAIN) else f"module {module}"
        here = current.current().name
        raise MissingCodeError(f"{here} has no function {path!r} in {place}: {error}") from error
    if not callable(found):
        raise TypeError(f"{name!r} on {current.current().name} is no function but a {type(found).__name__}")
    return found


_C: Any = torch._C
_HOMES = {
    "torch": _C._VariableFunctions,
    "torch._C._nn": _C._nn,
    "torch._C._linalg": _C._linalg,
    "torch._C._fft": _C._fft,
    "torch._C._special": _C._special,
}  # where those live whose arguments torch's own parser reads


class _ParseOnly(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        return None


_PARSE_ONLY = _ParseOnly()
_TENSORS = {torch.Tensor}
_fit: set[tuple[Callable[..., Any], int]] = set()
"""Operators that so many tensors, and nothing else, have been seen to fit: what tensors they are does not matter."""


def check_overload(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """NoOverloadError where `function` is an operator of torch that does not take these arguments."""
    if type(function) is not BuiltinFunctionType:
        return
    tensors = not kwargs and set(map(type, args)) == _TENSORS
    if tensors and (function, len(args)) in _fit:
        return
    home = _HOMES.get(function.__module__)
    if home is None or getattr(home, function.__name__, None) is not function:
        return
    try:
        with _PARSE_ONLY:
            function(*args, **kwargs)
    except TypeError as error:
        raise NoOverloadError(
            f"Overloaded torch operator invoked from Python failed to match any schema:\n{error}\n"
            f"{_signatures(function)}nothing was sent"
        ) from None
    except Exception:  # noqa: BLE001  (one of the few that do not ask modes; what it does is for the callee to say)
        return
    if tensors:
        _fit.add((function, len(args)))


def _signatures(function: Callable[..., Any]) -> str:
    schemas = _C._jit_get_schemas_for_operator(f"aten::{function.__name__}")
    return "".join(f"  {schema}\n" for schema in schemas)
