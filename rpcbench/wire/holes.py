"""Names that a payload uses for what its message carries beside it.

Each stands in for a method of the unpickler that has the message's tables; called outside a message it has nothing to
answer with.
"""

from __future__ import annotations

from typing import Any, NoReturn

from rpcbench.base.errors import SerializationError


def tensor(index: int) -> NoReturn:
    """Tensor number `index` of the message's table."""
    _outside()


def dressed(index: int, kind: type, state: Any) -> NoReturn:
    """Tensor number `index` as an instance of `kind`, with its state."""
    _outside()


def external(*name: int | str) -> NoReturn:
    """The external of that name: something that another floor keeps, such as an RRef."""
    _outside()


def make(name: str, version: bytes, build: Any, args: tuple[Any, ...]) -> NoReturn:
    """A function or class that travels by value, or the one that is known here for it."""
    _outside()


def fill(made: Any, state: tuple[Any, Any]) -> NoReturn:
    """Completes what `make` has made."""
    _outside()


def _outside() -> NoReturn:
    raise SerializationError("this pickle is part of an rpcbench message: only its codec can read it")
