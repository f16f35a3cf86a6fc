"""Sources of code that no file of this host has: those of cells, and of a program that runs on another host.

A sender takes a source with `code_source`, a receiver keeps it with `keep_source`.

Guarantees
- A kept source is found by `linecache`, and so by tracebacks, `inspect`, TorchScript and debuggers. A source that this
  process has by itself, or in a file, is never replaced.
- `cell_name` is IPython's name of a cell, `Cell In[3]`: of this process's own cells and of those whose source was kept.
"""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

_FRAME = re.compile(r'^([ |+-]*)File "([^"\n]+)", line ', re.MULTILINE)
_kept: dict[str, str | None] = {}  # file → name of the cell


class CodeSource(NamedTuple):
    """The text that a code object was compiled from. `cell`: None if that is no cell."""

    cell: str | None
    text: str


def code_source(file: str) -> CodeSource | None:
    """Return the source of a cell or of the program, by the file name in its code objects. None for a module's: the
    receiver imports the module, so it has the file."""
    entry = linecache.cache.get(file)
    is_cell = entry is not None and len(entry) == 4 and entry[1] is None  # it has no time of change: there is no file
    if not is_cell and file != getattr(sys.modules.get("__main__"), "__file__", None):
        return None
    text = "".join(linecache.getlines(file))
    return CodeSource(cell_name(file), text) if text else None


def keep_source(file: str, source: CodeSource) -> None:
    """Keep a source that has arrived under the file name in its code objects."""
    if (file in linecache.cache and file not in _kept) or Path(file).exists():
        return
    _kept[file] = source.cell
    linecache.cache[file] = len(source.text), None, source.text.splitlines(True), file


def kept_name(file: str) -> str | None:
    """Return the name of a cell of another process."""
    return _kept.get(file)


def ipython_shell() -> Any:
    """Return IPython's shell in this process; None if there is none, as in a script."""
    find: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)  # absent while another thread imports it
    return None if find is None else find()


def cell_name(file: str) -> str | None:
    """Return IPython's name of the cell that this file name stands for; None if it is no known cell."""
    shell = ipython_shell()
    named = None if shell is None else shell.compile.format_code_name(file)
    return " ".join(named) if named else kept_name(file)


def with_cell_names(text: str) -> str:
    """Return a traceback with the names of cells in place of their file names."""
    return _FRAME.sub(_rename_cell, text)


def _rename_cell(found: re.Match[str]) -> str:
    name = cell_name(found[2])
    return found[0] if name is None else f"{found[1]}{name}, line "
