"""The options of modules and optimizers, as words that two runs can compare.

Guarantees
- An option is a number, a word, a function's name, or a tuple of these, under a name that is not private.
- Options that change no result, as `inplace` or `foreach`, are left out.
- A class is an option where it is one of torch's: a program may well have a class of its own on the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

Options = dict[str, str]
"""Name → value, as Python writes it."""

_WITHOUT_EFFECT = frozenset(
    ("inplace", "device", "foreach", "fused", "capturable", "differentiable", "initial_lr", "decoupled_weight_decay")
)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def read_module_options(module: nn.Module) -> Options:
    """Return the options of a module itself, and of none inside of it."""
    return _read_class(module, "torch.nn.") | _read_values(vars(module))


def read_optimizer_options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Options:
    """Return the options of a group of parameters."""
    return _read_class(optimizer, "torch.optim.") | _read_values(group)


def _read_class(value: object, package: str) -> Options:
    kind = type(value)
    return {"class": kind.__name__} if f"{kind.__module__}.".startswith(package) else {}


def _read_values(values: Mapping[str, Any]) -> Options:
    words = {name: _write_value(value) for name, value in values.items() if _may_be_option(name)}
    return {name: word for name, word in words.items() if word is not None}


def _may_be_option(name: str) -> bool:
    return not name.startswith("_") and name not in _WITHOUT_EFFECT


def _write_value(value: object) -> str | None:
    """Return an option as Python writes it; None for anything else."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:  # a rate that is a tensor
        return repr(float(value))
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return value.__name__
    if isinstance(value, tuple):
        words = [_write_value(each) for each in value]
        return None if None in words else f"({', '.join(map(str, words))})"
    return None
