"""Where in a user's program something was made: remembered in a microsecond, put into words when asked for.

A site keeps no frame alive, only code: what a function held in its variables may go.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

# The runtime, what it works through, and where the chain of a pool thread begins.
_NOT_THE_USER = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), threading.__file__)


class Site(NamedTuple):
    """A place in a code object; `at` counts bytes of code, and is turned into a line only where it is shown."""

    code: CodeType
    at: int

    @property
    def line(self) -> int:
        spans = self.code.co_lines()
        return next((line for begin, end, line in spans if begin <= self.at < end and line), self.code.co_firstlineno)

    def __str__(self) -> str:
        """`train.py:12 in main: rref = remote(...)`; for a cell `Cell In[3], line 2: …`."""
        file, line = self.code.co_filename, self.line
        inside = "" if self.code.co_name == "<module>" else f" in {self.code.co_name}"
        text = linecache.getline(file, line).strip()
        return f"{_cell(file, line) or f'{file}:{line}'}{inside}{f': {text}' if text else ''}"


def here() -> Site | None:
    """The innermost place of this thread that is in the user's program; None where the runtime works on its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else Site(frame.f_code, frame.f_lasti)


def sites(frame: FrameType | None) -> Iterator[Site]:
    """The user's places on a stack, the innermost first."""
    while frame is not None:
        if _is_the_users(frame.f_code.co_filename):
            yield Site(frame.f_code, frame.f_lasti)
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _is_the_users(file: str) -> bool:
    return not file.startswith(_NOT_THE_USER)


def _cell(file: str, line: int) -> str | None:
    """How IPython, where it runs, calls the cell that this file stands for."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = shell.compile.format_code_name(file) if shell is not None else None
    return f"{named[0]} {named[1]}, line {line}" if named else None
