"""The functions of the user's own modules that a function by value uses: another process may have older ones.

A function of a notebook travels with its code, and a module that it uses travels by its name alone. Where the module's
file was edited in between, the same call computes other things on another worker.

Guarantees
- Found are functions, methods and functions of modules among the globals and the closure, also of captured functions
  and classes. Installed packages and Python's own modules are left out: nobody edits them in the middle of their work.
- No code of the user runs, and the number of steps is bounded.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import sysconfig
import weakref
from collections.abc import Iterator, Set
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rpcbench.serialization.diagnostics import used_names
from rpcbench.serialization.importable import is_importable

_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MOST = 1000  # functions that are looked at


def module_functions(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the functions of the user's own modules that a function by value may call, each once."""
    seen, ahead = {function}, [function]
    while ahead and len(seen) < _MOST:
        for used in itertools.islice(_used_by(ahead.pop()), _MOST):
            if used in seen:
                continue
            seen.add(used)
            if not is_importable(used):
                ahead.append(used)
            elif _is_own(used.__module__):
                yield used


def _used_by(function: FunctionType) -> Iterator[FunctionType]:
    names = _names_in(function.__code__)
    here = function.__globals__
    for name in names & here.keys():
        yield from _functions_of(here[name], names)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is still empty
            yield from _functions_of(cell.cell_contents, names)


def _functions_of(part: Any, names: Set[str]) -> Iterator[FunctionType]:
    """Yield the functions of an object; those of a module that one of these names means."""
    if isinstance(part, FunctionType):
        yield part
    elif isinstance(part, type):
        if _is_own(part.__module__) or not is_importable(part):
            members = [getattr(each, "__func__", each) for each in vars(part).values()]
            yield from (each for each in members if isinstance(each, FunctionType))
    elif isinstance(part, ModuleType) and _is_own(part.__name__):
        for name in names & vars(part).keys():
            yield from _functions_of(vars(part)[name], names - {name})


_names: weakref.WeakKeyDictionary[CodeType, frozenset[str]] = weakref.WeakKeyDictionary()


def _names_in(code: CodeType) -> frozenset[str]:
    if (known := _names.get(code)) is None:
        known = _names[code] = frozenset(used_names(code))
    return known


@functools.lru_cache(4096)
def _is_own(module: str) -> bool:
    """Return whether a module is a file of the user's. A module by one name is assumed to stay where it is."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and not file.startswith(_INSTALLED)
