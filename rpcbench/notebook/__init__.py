"""Floor 8: the notebook: magics and what they show; and two helpers of all magics.

A magic whose line asks for help (`%cluster help`, `%%remote --help`) shows what it takes instead of running. Where a
part of Jupyter is missing that only some features need, the error says how to get it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from IPython.core.error import UsageError


@contextlib.contextmanager
def require_extra(what: str, *packages: str) -> Iterator[None]:
    """For imports: UsageError where one of these packages is not installed. What else cannot be imported is a bug."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        raise UsageError(f"{what} needs {error.name}: pip install {' '.join(packages)}") from None


M = TypeVar("M", bound=Callable[..., Any])
_ALONE = ("help", "-h", "?")


def with_help(magic: M) -> M:
    """A magic that shows its docstring where its line is `help`, or has the word `--help`."""

    @functools.wraps(magic)
    def run(self: Any, line: str = "", *rest: Any, **more: Any) -> Any:
        if line.strip() in _ALONE or "--help" in line.split():
            sys.stdout.write(f"{inspect.getdoc(magic)}\n")
            return None
        return magic(self, line, *rest, **more)

    return cast(M, run)
