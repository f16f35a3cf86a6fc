"""`%cluster help`, `%%remote --help`: a magic whose line asks for help shows what it takes instead of running."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

M = TypeVar("M", bound=Callable[..., Any])
_ALONE = ("help", "-h", "?")


def helps(magic: M) -> M:
    """A magic that shows its docstring where its line is `help`, or has the word `--help`."""

    @functools.wraps(magic)
    def run(self: Any, line: str = "", *rest: Any, **more: Any) -> Any:
        if line.strip() in _ALONE or "--help" in line.split():
            sys.stdout.write(f"{inspect.getdoc(magic)}\n")
            return None
        return magic(self, line, *rest, **more)

    return cast(M, run)
