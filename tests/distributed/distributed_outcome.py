"""How a call ends, in words: a value that travels from a worker to the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The words of the error that a call ends with; empty where there is none."""
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""
