"""A message as one line that people can read."""

from __future__ import annotations

from typing import Any

from rpcbench.base.ids import Id
from rpcbench.wire.messages import Body


def line(value: Any) -> str:
    """A message, or a part of one: its kind and its fields, without the data of users."""
    if not isinstance(value, tuple) or isinstance(value, Id):
        return str(value)
    name = type(value).__name__ if hasattr(value, "_fields") else ""
    return f"{name}({', '.join(line(field) for field in value if not isinstance(field, Body))})"
