"""What panels, reprs and errors call a value: its class, or what somebody who knows the class says; tensors' layouts;
functions.

A class of ours registers from its own floor; nobody here imports it. Its values must answer at once, as torch's own
tensors do: they are asked while they become values of RRefs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

_WORDS: dict[type, Callable[[Any], str]] = {}


def describe(kind: type, words: Callable[[Any], str]) -> None:
    """Have `words(value)` say what a tensor of exactly this class is: `Tensor (N=32, C=3)`, a class before a space."""
    _WORDS[kind] = words


def is_described(kind: type) -> bool:
    return kind in _WORDS


def type_of(value: object) -> str:
    """As `list`, or `Tensor (N=32, C=3)`."""
    words = _WORDS.get(type(value))
    return type(value).__name__ if words is None else words(value)


def layout_of(tensor: torch.Tensor) -> str:
    """As `float32[4, 2]`, or `float32[N=4, C=2]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{shape_of(tensor)}"


def shape_of(tensor: torch.Tensor) -> str:
    """As `[4, 2]`; where dimensions have names, of `rpcbench.named`, as `[N=4, C=2]`."""
    names = getattr(tensor, "_dim_names", None) if is_described(type(tensor)) else None  # a user's class is not asked
    names = names or (None,) * tensor.dim()
    sizes = [f"{name}={size}" if name else f"{size}" for name, size in zip(names, tensor.shape, strict=True)]
    return f"[{', '.join(sizes)}]"


def class_of(type_: str) -> str:
    """Of what `type_of` says, the class alone."""
    return type_.partition(" ")[0]


def label_of(function: Any) -> str:
    """A short name for a function, for errors and pictures."""
    if type(function) is FunctionType:
        return function.__qualname__
    if type(function) is BuiltinFunctionType:  # what torch's __qualname__ says is a class that nobody knows
        return f"torch.{function.__name__}" if function.__module__ == "torch" else function.__qualname__
    if isinstance(function, torch.jit.ScriptFunction):
        return str(function.name)  # what its __qualname__ says is its class
    names = (getattr(function, attribute, None) for attribute in ("__qualname__", "__name__", "original_name"))
    return next((name for name in names if name and isinstance(name, str)), type(function).__name__)
