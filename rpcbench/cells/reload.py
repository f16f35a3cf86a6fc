"""Reloads a user's modules in all processes of a cluster. The source text is sent, so a worker needs no file.

A module that is loaded already runs again in its own namespace, as in `importlib.reload`: code that accesses it through
the module sees the new names; names that were imported from it keep their old values. A syntax error, or a module that
fails here, changes nothing on any worker.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple


class ModuleSource(NamedTuple):
    """The source of a module."""

    name: str
    text: str
    file: str  # path on this host, for tracebacks
    package: bool


def read_source(module: str | ModuleType) -> ModuleSource:
    """Read the source of a module from its file. Raises ModuleNotFoundError, or ImportError if it has no source."""
    name = module if isinstance(module, str) else module.__name__
    spec = None if name in ("", "__main__") else _find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"there is no module {name!r} here", name=name)
    text = spec.loader.get_source(name) if isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if text is None or spec.origin is None:
        raise ImportError(f"{name} is not written in Python, or not in a file: it cannot be reloaded", name=name)
    return ModuleSource(name, text, spec.origin, spec.submodule_search_locations is not None)


def _find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find the module's file now; the spec of a loaded module has only the file that it was loaded from."""
    importlib.invalidate_caches()  # the file may have been written just now
    package = name.rpartition(".")[0]
    path = importlib.import_module(package).__path__ if package else None
    return importlib.machinery.PathFinder.find_spec(name, path) or importlib.util.find_spec(name)


def execute_sources(sources: Sequence[ModuleSource]) -> None:
    """Run these modules in this process, in this order; load those that are not loaded yet."""
    for source in sources:
        parent = importlib.import_module(source.name.rpartition(".")[0]) if "." in source.name else None
        spec = importlib.util.spec_from_loader(source.name, _Text(source), origin=source.file)
        assert spec is not None and spec.loader is not None
        spec.has_location = True
        if source.package:  # where its submodules are, on hosts that have them
            spec.submodule_search_locations = [str(Path(source.file).parent)]
        module = sys.modules.get(source.name)
        if module is None:
            _load_module(spec)
        else:
            spec.loader.exec_module(module)
            module.__spec__, module.__loader__ = spec, spec.loader  # tracebacks find its text through these
        if parent is not None:  # as the import system does for a submodule
            setattr(parent, source.name.rpartition(".")[2], sys.modules[source.name])


def _load_module(spec: importlib.machinery.ModuleSpec) -> None:
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:  # a failed import leaves no module behind
        del sys.modules[spec.name]
        raise


class _Text(importlib.abc.InspectLoader):
    """A loader of a module from its text."""

    def __init__(self, source: ModuleSource) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source.text

    def is_package(self, fullname: str) -> bool:
        return self._source.package

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self._source.text, self._source.file, "exec", dont_inherit=True)
        return code
