"""Calls of torch's own operators are checked here, before anything is sent: `rpc_sync("w1", torch.add, ("a", 1))`.

torch parses the arguments and then asks the innermost function mode what to do; ours does nothing, so only the
parsing happens. What Python would accept is accepted, which is more than TorchScript's schemas say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rpcbench.base.errors import NoOverloadError

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


def check(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
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
