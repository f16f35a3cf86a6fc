"""What other code expects of functions and classes of `__main__` that came by value: to find them by their names, and
the types that their annotations name.

pickle, `torch.save`, multiprocessing and torch's own object collectives send a function or class of `__main__` by its
name. `typing.get_type_hints`, and the libraries that use it, look up annotations that are text, as `from __future__
import annotations` makes all of them: those of a function in its globals, those of a class in its module.

Guarantees
- A copy is an attribute of the module `__main__`, but no entry of its namespace: cells neither see nor list it, and
  what `__main__` itself defines comes first. Every pickler still sends the module itself by its name.
- The latest copy of a name counts, as in a notebook the latest cell does. No copy is kept alive by its name.
- A function takes what its annotations name along among its globals; those of a class arrive as the types themselves.
  Only classes, modules and types of `typing` are sent for an annotation. One that names anything else stays text.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
import typing
import weakref
from types import FunctionType, GenericAlias, ModuleType, UnionType
from typing import Any, SupportsIndex

_MAIN = "__main__"
_copies: weakref.WeakKeyDictionary[ModuleType, weakref.WeakValueDictionary[str, Any]] = weakref.WeakKeyDictionary()


class MainModule(ModuleType):
    """The class of a `__main__` with copies of another process's functions and classes."""

    def __getattr__(self, name: str) -> Any:
        copy = _copies[self].get(name)
        if copy is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return copy

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple[Any, ...]:
        """Reduce the module to its name, for every pickler: they know a module by its exact class, and not this one."""
        return importlib.import_module, (self.__name__,)


def put_copy(name: str, copy: Any) -> None:
    """Make `__main__` find a copy of another process's function or class under its name there."""
    main = sys.modules[_MAIN]
    if type(main) is ModuleType:
        _copies.setdefault(main, weakref.WeakValueDictionary())
        main.__class__ = MainModule
    if type(main) is MainModule and "." not in name:  # an inner class is found through its outer one
        _copies[main][name] = copy


def annotated_globals(function: FunctionType) -> dict[str, Any]:
    """Return the globals of a function of `__main__`, here or elsewhere, that its annotations name."""
    here = function.__globals__
    if here.get("__name__") != _MAIN:
        return {}
    texts = [text for text in function.__annotations__.values() if isinstance(text, str)]
    names = [name for text in texts for name in _names_in(text)]
    return {name: here[name] for name in names if name in here and _is_for_types(here[name])}


def resolve_annotations(kind: type, annotations: dict[str, Any]) -> dict[str, Any]:
    """Return the annotations of a class of `__main__`, with types for those that are text."""
    if kind.__module__ != _MAIN:
        return annotations
    here, inside = vars(sys.modules[_MAIN]), dict(vars(kind))
    texts = {name: text for name, text in annotations.items() if isinstance(text, str)}
    return annotations | {name: _resolve_annotation(text, here, inside) for name, text in texts.items()}


def _resolve_annotation(text: str, here: dict[str, Any], inside: dict[str, Any]) -> Any:
    """Return the type that an annotation stands for here, or else inside its class; the text if it stands for none."""
    names = _names_in(text)
    if not all(_is_for_types(here[name]) for name in names if name in here):
        return text
    holder = type("holder", (), {"__annotations__": {"_": text}})
    try:
        return typing.get_type_hints(holder, inside, here, include_extras=True)["_"]  # the latter namespace first
    except Exception:  # noqa: BLE001  (any text may be an annotation, and the user's classes run for `Kind[...]`)
        return text


@functools.lru_cache(4096)
def _names_in(text: str) -> tuple[str, ...]:
    """Return the names in an annotation, and in the texts inside it; none for a text in words."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError):
        return ()
    inner = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return *names, *(name for each in inner for name in _names_in(each))


def _is_for_types(value: object) -> bool:
    return isinstance(value, type | ModuleType | GenericAlias | UnionType) or type(value).__module__ == "typing"
