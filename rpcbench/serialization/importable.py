"""The identity of functions and classes: by name if they can be imported, else by a fingerprint of their content.

A fingerprint covers code, constants, defaults, closures, bases and members, but neither file names nor line numbers:
a cell that runs twice gives the same fingerprint, a changed cell another one. Of objects that are neither code nor
plain data it covers the type only.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import sys
from collections.abc import Iterable, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None), type(Ellipsis)})
_INCIDENTAL = frozenset(  # members without meaning, or left by pickling itself
    {"__dict__", "__weakref__", "__slotnames__", "__firstlineno__", "__static_attributes__", "_abc_impl"}
)


def is_importable(value: Any, made: Any = None) -> bool:
    """Return whether a module other than `__main__` has this function or class, or `made` from it, under its name."""
    module = sys.modules.get(value.__module__)
    if module is None or module is sys.modules.get("__main__"):
        return False
    return is_loaded(value, made)


def is_loaded(value: Any, made: Any = None) -> bool:
    """Return whether its module, of any name, has this function or class, or `made` from it, under its name."""
    return _find_attribute(sys.modules.get(value.__module__), value.__qualname__) is (value if made is None else made)


def find_in_main(name: str) -> Any:
    """Return the object that this process's `__main__` itself has under a qualified name; None if there is none."""
    first, _, rest = name.partition(".")
    found = vars(sys.modules["__main__"]).get(first)
    return _find_attribute(found, rest) if rest else found


def module_path(module: ModuleType) -> tuple[str, str] | None:
    """Return an imported module and the path from there to a module that no import finds, but an attribute does, such
    as `torch._C._functions`. None for any other module."""
    name, path = module.__name__, ""
    while "." in name:
        name, _, last = name.rpartition(".")
        path = f"{last}.{path}" if path else last
        if name in sys.modules:
            return (name, path) if _find_attribute(sys.modules[name], path) is module else None
    return None


def _find_attribute(holder: Any, name: str) -> Any:
    for part in name.split("."):
        holder = getattr(holder, part, None)
    return holder


def load_packages_of(module: str) -> None:
    """Import the packages around a module that is not loaded yet, outermost first."""
    if module in sys.modules:
        return
    # An import locks the module first and then its package, but a package that imports its own modules locks in the
    # reverse order: two threads could deadlock.
    for end in (i for i, letter in enumerate(module) if letter == "."):
        importlib.import_module(module[:end])


def content_fingerprint(value: Any) -> bytes:
    """Return 16 bytes that are equal, in any process, for functions or classes of equal content."""
    hasher = _StructureHash()
    hasher.feed_value(value)
    return hasher.digest()


class _StructureHash:
    """A hash of the structure of a value. A repeated object is hashed as a back reference, so cycles end."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._seen: dict[int, tuple[int, Any]] = {}  # id -> (number, object): keeps it alive, as ids are reused

    def digest(self) -> bytes:
        return self._hash.digest()

    def feed_value(self, value: Any) -> None:
        kind = type(value)
        if kind in _ATOMS:
            self._hash_words(kind.__name__, repr(value))
        elif id(value) in self._seen:
            self._hash_words("again", str(self._seen[id(value)][0]))
        else:
            self._seen[id(value)] = len(self._seen), value
            parts = list(_parts_of_value(value))
            # with the count, different structures cannot hash alike
            self._hash_words(kind.__qualname__, str(len(parts)))
            for part in parts:
                self.feed_value(part)

    def _hash_words(self, *words: str) -> None:
        self._hash.update("\0".join((*words, "")).encode("utf-8", "backslashreplace"))


def _parts_of_value(value: Any) -> Iterable[Any]:
    match value:
        case tuple() | list():
            return value
        case dict():
            return [part for item in value.items() for part in item]
        case set() | frozenset():
            return sorted(content_fingerprint(item) for item in value)  # the order of a set differs between processes
        case CodeType():
            return _code_parts(value)
        case FunctionType():
            return _module_and_name(value) if is_importable(value) else _function_parts(value)
        case type():
            return _module_and_name(value) if is_importable(value) else _class_parts(value)
        case classmethod() | staticmethod():
            return (value.__func__,)
        case property():
            return value.fget, value.fset, value.fdel
        case CellType():
            return _cell_parts(value)
        case ModuleType():
            return (value.__name__,)
    return _module_and_name(type(value)) if not hasattr(value, "__qualname__") else _module_and_name(value)


def _module_and_name(value: Any) -> tuple[str, str]:
    return str(getattr(value, "__module__", "")), str(value.__qualname__)


def _code_parts(code: CodeType) -> tuple[Any, ...]:
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, code.co_exceptiontable, code.co_consts, names, counts


def _function_parts(function: FunctionType) -> tuple[Any, ...]:
    defaults = function.__defaults__, function.__kwdefaults__
    return function.__code__, defaults, function.__closure__, function.__annotations__, vars(function)


def _class_parts(kind: type) -> list[Any]:
    members = {name: member for name, member in sorted(vars(kind).items()) if name not in _INCIDENTAL}
    if isinstance(kind, enum.EnumMeta):  # without the combinations of flags that were used, which Flag caches there
        named: Mapping[str, Any] = kind.__members__
        members["_value2member_map_"] = {name: member.value for name, member in named.items()}
    if members.get("__init__") is object.__init__:  # set by the first instance of a subclass of a Protocol
        del members["__init__"]
    return [kind.__qualname__, kind.__bases__, type(kind), members]


def _cell_parts(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # the cell is still empty
        return ()
