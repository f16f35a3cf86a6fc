"""Floor 9: magics and their displays in a notebook, and five helpers of all magics.

A magic whose line requests help (`%cluster help`, `%%remote --help`) shows its usage instead of running. The error
about a missing optional package gives the command that installs it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from IPython.core.error import UsageError

M = TypeVar("M", bound=Callable[..., Any])
_ALONE = ("help", "-h", "?")  # help only as the whole line: elsewhere they may be arguments


@contextlib.contextmanager
def require_extra(what: str, *packages: str) -> Iterator[None]:
    """Raise UsageError if an import inside finds that one of `packages` is not installed. `what` is the feature."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:  # a bug: raised unchanged
            raise
        raise UsageError(f"{what} needs {error.name}: pip install {' '.join(packages)}") from None


def admit_widgets() -> None:
    """Have Colab show widgets that are not its own, as panels are. Elsewhere do nothing."""
    try:
        output: Any = importlib.import_module("google.colab.output")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("google"):  # Colab's own bug: raised unchanged
            raise
    else:
        output.enable_custom_widget_manager()


def warn_on_stderr(text: str) -> None:
    """Write a line to stderr. It appears above the output that follows."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()  # a kernel sends each stream at times of its own


def panel_names(of_results: bool = False) -> list[str]:
    """Return the names of panels that follow a cluster, and on request of those that show a result alone; none if
    widgets are not installed."""
    try:
        from rpcbench.panels import ALL_PANELS, PANELS  # here: widgets take a moment to load
    except ModuleNotFoundError:
        return []
    return list(ALL_PANELS if of_results else PANELS)


def is_help(line: str) -> bool:
    """Return whether the line of a magic requests help."""
    return line.strip() in _ALONE or "--help" in line.split()


def with_help(magic: M) -> M:
    """Decorate a magic to show its docstring if its line is `help`, or has the word `--help`."""

    @functools.wraps(magic)
    def run_magic(self: Any, line: str = "", *rest: Any, **more: Any) -> Any:
        if is_help(line):
            sys.stdout.write(f"{inspect.getdoc(magic)}\n")
            return None
        return magic(self, line, *rest, **more)

    return cast(M, run_magic)
