"""Values of programs as trees of tensors: tuples, lists, dicts, named tuples, dataclasses. Anything else is left alone.

Guarantees
- A tensor's path is the Python that reads it: `[0]`, `['logits']`, `.logits`; empty for the value itself.
- A tree that is mapped has the types of the original.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[str, Tensor], Tensor], value: Any, path: str = "") -> Any:
    """Return the value with `function(path, tensor)` in place of each tensor. The value itself is not changed."""
    if isinstance(value, Tensor):
        return function(path, value)
    if isinstance(value, Mapping):
        found = {key: map_tensors(function, each, f"{path}[{key!r}]") for key, each in value.items()}
        return found if type(value) is dict else _rebuild_mapping(value, found)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(
            *(map_tensors(function, each, f"{path}.{name}") for name, each in zip(value._fields, value, strict=True))
        )
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, each, f"{path}[{n}]") for n, each in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if each.init]
        return dataclasses.replace(
            value, **{name: map_tensors(function, getattr(value, name), f"{path}.{name}") for name in names}
        )
    return value


def _rebuild_mapping(value: Mapping[Any, Any], found: dict[Any, Any]) -> Any:
    return type(value)(**found) if dataclasses.is_dataclass(value) else type(value)(found)  # type: ignore[call-arg]
