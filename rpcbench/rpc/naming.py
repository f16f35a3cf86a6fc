"""Functions that a caller knows by name only: `rpc_sync("w1", "train")`, `rpc_sync("w1", "mylib.data:Loader.open")`.

A plain name is looked up in the callee's main namespace: what its script, or the cells run on it, define.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from rpcbench.runtime import current
from rpcbench.runtime.server import ASYNC_MARK, DeferredResult
from rpcbench.serialization.closures import MissingCodeError

_MAIN = "__main__"


class Named:
    """Stands for the function of that name on whichever worker it is called."""

    def __init__(self, name: str) -> None:
        self.name = self.__qualname__ = name

    def __reduce__(self) -> Any:
        return Named, (self.name,)

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
