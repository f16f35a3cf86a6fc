"""TorchScript functions and modules: by name where a module has them, else as what `torch.jit.save` makes of them.

Guarantees
- A function of a module goes by name, as any other; one of a notebook or a closure arrives as a `SentFunction`.
- A function that came before is not loaded again; each module that arrives is one of its own.
- Tensors inside a module travel in its own file. They may all be on the CPU, or all on one device that has a way.
"""

from __future__ import annotations

import functools
import importlib
import io
import operator
import pickle
from typing import Any

import torch

from rpcbench.base.errors import SerializationError
from rpcbench.wire.code import MissingCodeError
from rpcbench.wire.devices import CPU, Route, here
from rpcbench.wire.identity import importable

_LOADED = 64  # functions that are kept; each takes a few milliseconds to load


class SentFunction:
    """A TorchScript function that came from another process: call it as the original.

    torch keeps neither its default arguments nor its class in a file, so this has them beside the file.
    """

    def __init__(self, name: str, saved: bytes, names: tuple[str, ...], defaults: dict[str, Any]) -> None:
        self.__name__ = self.__qualname__ = name
        self._saved = saved
        self._names = names
        self._defaults = defaults
        self._run = _function(saved)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {*self._names[: len(args)], *kwargs}
        missing = {name: value for name, value in self._defaults.items() if name not in given}
        return self._run(*args, **missing, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return SentFunction, (self.__name__, self._saved, self._names, self._defaults)


def reduce_function(function: Any) -> tuple[Any, ...]:
    """How pickle takes a `torch.jit.ScriptFunction` apart."""
    python = getattr(function, "_torchdynamo_inline", None)  # what it was made from
    if python is not None and importable(python, function):
        return _named, (python.__module__, python.__qualname__)
    arguments = function.schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    names = tuple(argument.name for argument in arguments)
    return SentFunction, (function.name, function.save_to_buffer(), names, defaults)


def reduce_module(module: torch.jit.ScriptModule, route: Route) -> tuple[Any, ...]:
    """How pickle takes a module apart. SerializationError where its tensors have no way on this route."""
    used = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(used) > 1:
        raise SerializationError(
            f"a script module with tensors on {', '.join(sorted(map(str, used)))} cannot be sent: move it to one device"
        )
    target = route.target(used.pop()) if used else None
    saved = module.save_to_buffer()  # what torch.jit.save does, but that one warns of itself
    return _module, (pickle.PickleBuffer(saved), target)


def _named(module: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ModuleNotFoundError) as error:
        raise MissingCodeError.about(error) from error


@functools.lru_cache(_LOADED)
def _function(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved), map_location=CPU)  # type: ignore[no-untyped-call]


def _module(saved: Any, target: str | None) -> Any:
    device = CPU if target is None else here(target)
    return torch.jit.load(io.BytesIO(saved), map_location=device)  # type: ignore[no-untyped-call]
