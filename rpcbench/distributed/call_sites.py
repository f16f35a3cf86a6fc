"""The module or line that asks for a collective of torch, for the table "collectives".

Guarantees
- A look walks the Python stack of this thread, without a text: that is made only when a row is shown. The modules of a
  model are walked once, and no code of theirs runs.
- FSDP's collectives name the part of the model, those of DistributedDataParallel and of other backward passes, which
  no line of the program calls, say so. All others name the innermost line outside torch, and within a forward pass the
  path of the module. If that line is of an installed library, the innermost line of the program stands beside it.
- No tensor or module is kept alive longer than its call.
"""

from __future__ import annotations

import os
import sys
import weakref
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rpcbench.runtime.handles import CreationSite, is_user_file

_FSDP = "_fsdp_param_group.py"
_DDP = "nn/parallel/distributed.py"
_CALL = "nn/modules/module.py", "_wrapped_call_impl"  # file and name of the function that calls a module
_OWN_FRAMES = 2  # of this function's callers, which belong to the kernel
_LIBRARIES = "/site-packages/", "/dist-packages/", f"{Path(os.__file__).parent}/"


class CallSite(NamedTuple):
    """The place of a call: what asked, and the lines, where there are any: of what called torch, and of the program."""

    asker: str
    line: CreationSite | None
    program: CreationSite | None = None  # where `line` is of a library

    def __str__(self) -> str:
        """Return `FSDP layers.0`, `layers.0.up, train.py:12`, or `accelerator.py:99, train.py:12`."""
        lines = [each.short_place for each in (self.line, self.program) if each is not None]
        return ", ".join(filter(None, (self.asker, *lines)))


def calling_site() -> CallSite:
    """Return the place at which this thread calls torch."""
    frame: FrameType | None = sys._getframe(_OWN_FRAMES)
    asker, line, program = "", None, None
    modules: list[Any] = []  # that are being called, innermost first
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            place = CreationSite(frame.f_code, frame.f_lasti)
            line, program = line or place, program or (None if _is_of_library(file) else place)
        elif line is None and (kind := _asker_in(file)):
            if kind == "FSDP" and (name := _name_of_unit(frame)) is not None:
                return CallSite(f"FSDP {name}".rstrip(), None)
            asker = asker or kind
        if frame.f_code.co_name == _CALL[1] and file.endswith(_CALL[0]):
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    if modules and not asker:
        asker = _PATHS.module_path(modules[-1], modules[0])
    if line is None:
        return CallSite(asker or "backward", None)
    return CallSite(asker, line, None if program == line else program)


class ModulePaths:
    """The paths of modules within the outermost ones; each of these is walked again only for a module that is new."""

    def __init__(self) -> None:
        # By id, as a class may define its own equality: weak references to the module and the root, and the path.
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], str]] = {}

    def module_path(self, root: Any, module: Any) -> str:
        """Return the path, as `layers.0.up`; "" for the root itself and for a module that is not within it."""
        if (known := self._known_path(root, module)) is None:
            self._collect_paths(root)
            known = self._known_path(root, module)
        return known or ""

    def _known_path(self, root: Any, module: Any) -> str | None:
        there, of, path = self._known.get(id(module), (lambda: None, lambda: None, ""))
        return path if there() is module and of() is root else None

    def _collect_paths(self, root: Any) -> None:
        known = {number: each for number, each in self._known.items() if each[0]() is not None}  # others were freed
        ahead, seen = [("", root)], set[int]()
        while ahead:
            path, module = ahead.pop()
            if id(module) in seen:
                continue  # it has several paths
            seen.add(id(module))
            known[id(module)] = weakref.ref(module), weakref.ref(root), path
            inner = module.__dict__.get("_modules", {}).items()
            ahead += [(f"{path}.{name}".lstrip("."), each) for name, each in inner if each is not None]
        self._known = known


_PATHS = ModulePaths()


@lru_cache(maxsize=4096)
def _is_of_library(file: str) -> bool:
    return any(part in file for part in _LIBRARIES)


@lru_cache(maxsize=4096)
def _asker_in(file: str) -> str:
    if file.endswith(_FSDP):
        return "FSDP"
    return "DistributedDataParallel" if file.endswith(_DDP) else ""


def _name_of_unit(frame: FrameType) -> str | None:
    """Return the path of the module that a group of FSDP's parameters belongs to; empty for the root."""
    group = frame.f_locals.get("self")
    return None if group is None else str(getattr(group, "_module_fqn", None) or "")
