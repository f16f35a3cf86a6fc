"""Functions and classes by value: those of `__main__`, lambdas, closures and TorchScript.

cloudpickle reduces and rebuilds functions and classes; this module decides which object each becomes on arrival.

Guarantees
- An equal function or class (see `is_importable`) of the receiver's own `__main__` is used instead of a copy.
- A class keeps its identity: in a process the same version is one class, whatever its messages came by, and instances
  that return to the process that defined it are instances of its own class. A changed cell makes a new version.
- A copy follows the members of its original; the receiver's own code is never modified.
- A copy is found in the receiver's `__main__` by code that sends it on by name (`main_module`). Its source is sent once
  to each worker (`base.sources`).
- A lock among the globals of a function of `__main__` is not sent: the receiver's own global of that name is used.
- A TorchScript function of a module is sent by name; one of a notebook or a closure arrives as a `SentFunction`, once.
  A ScriptModule arrives as a new one each time; its file has its tensors, all on the CPU or on one mapped device.

By-reference slots (`tensor_slot`, …) are the names by which a payload refers to parts of its message outside of the
pickle. The unpickler replaces each by a method that has the message's tables.
"""

from __future__ import annotations

import enum
import functools
import importlib
import io
import operator
import os
import pickle
import sys
import threading
import typing
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import torch

from rpcbench.base.errors import SerializationError
from rpcbench.base.sources import CodeSource, keep_source
from rpcbench.serialization.importable import (
    content_fingerprint,
    find_in_main,
    is_importable,
    load_packages_of,
    module_path,
)
from rpcbench.serialization.main_module import put_copy
from rpcbench.serialization.tensor_types import CPU, Route, local_device


def tensor_slot(index: int) -> NoReturn:
    """Return tensor number `index` of the message's table."""
    _refuse_outside()


def subclass_slot(index: int, kind: type, state: Any) -> NoReturn:
    """Return tensor number `index` as an instance of `kind`, with its state."""
    _refuse_outside()


def external_slot(*name: int | str) -> NoReturn:
    """Return the external of that name: an object of another layer, such as an RRef."""
    _refuse_outside()


def make_slot(name: str, version: bytes, build: Any, args: tuple[Any, ...]) -> NoReturn:
    """Return a function or class that was sent by value, or the receiver's own version of it."""
    _refuse_outside()


def fill_slot(made: Any, state: tuple[Any, Any]) -> NoReturn:
    """Set the members of an object that `make_slot` has made."""
    _refuse_outside()


def _refuse_outside() -> NoReturn:  # a plain `pickle.loads` gets the functions above instead of the unpickler's methods
    raise SerializationError("this pickle is part of an rpcbench message: only its codec can read it")


SLOTS = frozenset(slot.__name__ for slot in (tensor_slot, subclass_slot, external_slot, make_slot, fill_slot))
"""The names of this module that the unpickler replaces."""


class MissingCodeError(SerializationError, AttributeError):
    """A function or class was sent by name, and the receiver does not have it. Both sides need the same modules."""

    @classmethod
    def from_error(cls, error: Exception) -> MissingCodeError:
        """Return the error for a look-up that failed."""
        remedy = ""
        if isinstance(error, ModuleNotFoundError) and error.name:
            remedy = (
                " Workers have the import path that the notebook had when it started them: if the module's folder came "
                f"to sys.path later, cluster.reload({error.name!r}) loads the module on all workers."
            )
        return cls(
            f"{error}. The RPC pickler does not serialize the code of what can be imported, only its name: make sure "
            f"that functions and classes are defined in the same modules on caller and callee.{remedy}"
        )


class _Version(NamedTuple):
    """The identity of a function or class that is sent by value."""

    name: str  # qualified, in `__main__`; '' if it is not found there
    mark: bytes  # a fingerprint if it has a name, else random


class CodeCache:
    """The functions and classes by value of one process, for any number of threads."""

    def __init__(self) -> None:
        # Weak, so that no version outlives the code of a cell that was run again.
        self._versions: weakref.WeakKeyDictionary[Any, _Version] = weakref.WeakKeyDictionary()
        self._classes: weakref.WeakValueDictionary[bytes, type] = weakref.WeakValueDictionary()  # by mark
        self._copies: weakref.WeakSet[Any] = weakref.WeakSet()  # received; all others are this process's own

    def tag_reduction(self, value: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Change cloudpickle's reduction of `value` so that the receiver's CodeCache decides on the object."""
        version = self._version_of_code(value)
        if version is None:
            return reduced
        build, args, state, items, pairs, fill = reduced
        if isinstance(value, type):
            args = _class_skeleton(value, args)
        return make_slot, (version.name, version.mark, build, args), (fill, state), items, pairs, fill_slot

    def make_slot(self, name: str, mark: bytes, build: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return this process's own version of the code, a copy made before, or a new copy without members."""
        known = self._find_own_code(name, mark) or self._classes.get(mark)
        made = build(*args) if known is None else known
        if known is None:
            self._versions[made] = _Version(name, mark)
            self._copies.add(made)
            # `setdefault`, as another thread may have made the class at the same moment.
            made = self._classes.setdefault(mark, made) if isinstance(made, type) else made
        if name and made in self._copies:
            put_copy(name, made)
        return made

    def fill_slot(self, made: Any, state: tuple[Callable[[Any, Any], object], Any]) -> None:
        """Set the members of a copy, again with every message, so that it follows its original."""
        if made in self._copies:  # never for this process's own code
            setter, members = state
            setter(made, members)

    def _find_own_code(self, name: str, mark: bytes) -> Any:
        own = _code_in_main(name) if name else None
        if not isinstance(own, FunctionType | type):
            return None
        version = self._version_of_code(own)
        return own if version is not None and version.mark == mark else None

    def _version_of_code(self, value: Any) -> _Version | None:
        """Return the version of a function or class at its first use; None for a function that is not in `__main__`."""
        version = self._versions.get(value)
        if version is not None:
            return version
        name = value.__qualname__
        if sys.modules.get(value.__module__) is sys.modules.get("__main__") and _code_in_main(name) is value:
            version = _Version(name, content_fingerprint(value))
        elif isinstance(value, type):
            version = _Version("", os.urandom(16))
        else:
            return None
        version = self._versions.setdefault(value, version)  # another thread may have been first
        if isinstance(value, type):
            self._classes[version.mark] = value
        return version


def _code_in_main(name: str) -> Any:
    """Return the object of `__main__` under this name, of a class method its function."""
    found = find_in_main(name)
    return found.__func__ if isinstance(found, MethodType) else found


HERE = CodeCache()
"""That of this process."""

_LOCKS = {
    type(threading.Lock()): "Lock", type(threading.RLock()): "RLock", threading.Barrier: "Barrier",
    threading.Condition: "Condition", threading.Event: "Event", threading.Semaphore: "Semaphore",
    threading.local: "local",
}  # fmt: skip
"""The classes of locks, and of other objects of one process, with their names in `threading`."""


class _MainGlobal:
    """A reference to a global of `__main__`, which arrives as the receiver's own."""

    def __init__(self, name: str, kind: str) -> None:
        self._parts = name, kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _main_global, self._parts


def _main_global(name: str, kind: str) -> Any:
    found = find_in_main(name)
    if found is None:
        raise MissingCodeError(
            f"a function uses the global {name!r} of __main__, a threading.{kind}, which cannot be sent, and __main__ "
            f"here has no {name!r}: define it on this worker, too"
        )
    return found


def make_code(args: tuple[Any, ...], file: str, cell: str | None, text: str) -> CodeType:
    """Make a code object by the arguments of its class, and keep the source of its file."""
    keep_source(file, CodeSource(cell, text))
    return CodeType(*args)


def replace_locks(function: FunctionType, reduced: tuple[Any, ...]) -> None:
    """Replace the locks of `__main__` among the globals of a reduced function by references. Programs such as a
    parameter server guard a global by a lock beside it, and call the function that uses both."""
    if function.__globals__ is not vars(sys.modules["__main__"]):
        return
    kept = reduced[2][1]["__globals__"]
    kept.update({name: _MainGlobal(name, kind) for name, part in kept.items() if (kind := _lock_kind(part))})


def _lock_kind(part: object) -> str | None:
    return next((name for kind, name in _LOCKS.items() if isinstance(part, kind)), None)


def _class_skeleton(kind: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return cloudpickle's arguments for an empty class, plus slots and qualified name, which it leaves out, minus its
    tracking."""
    *front, _, extra = args  # the tracking id is process-wide: it would give the members of a copy to the original
    if typing.NamedTuple in vars(kind).get("__orig_bases__", ()):
        front[2] = kind.__bases__  # typing.NamedTuple as a base would make another class, whose members cannot be set
        front[3] = front[3] | {"__orig_bases__": kind.__orig_bases__}  # type: ignore[attr-defined]
    if not isinstance(kind, enum.EnumMeta):
        left_out = {name: vars(kind)[name] for name in ("__slots__",) if name in vars(kind)}
        front[3] = front[3] | left_out | {"__qualname__": kind.__qualname__}
    return *front, None, extra


def reduce_method(method: MethodType) -> Any:
    """Reduce a bound method: by its name, but for a class by value, whose members may arrive after the method."""
    holder = method.__self__
    if is_importable(holder if isinstance(holder, type) else type(holder)):
        return NotImplemented
    return MethodType, (method.__func__, holder)


def reduce_python_module(module: ModuleType) -> Any:
    """Reduce a module: by its name, or by its path from a module that can be imported; else by value."""
    if module.__name__ in sys.modules:
        return _module_named, (module.__name__,)
    if path := module_path(module):
        return _find_named, path
    return cloudpickle.Pickler.dispatch_table[ModuleType](module)


def reduce_lru_cache(value: Any) -> Any:
    """Reduce a `functools.lru_cache` to its function and settings, without its content."""
    if is_importable(value):
        return NotImplemented
    settings = value.cache_parameters()
    return _make_cached, (value.__wrapped__, settings["maxsize"], settings["typed"])


def reduce_cached_property(value: functools.cached_property[Any]) -> Any:
    """Reduce a `functools.cached_property`, which has a lock in Python 3.11."""
    return _cached_property, (value.func, value.attrname)


def _cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def reduce_new_type(value: Any) -> Any:
    """Reduce a `typing.NewType`, by name if it can be imported."""
    if is_importable(value):
        return value.__qualname__
    return _new_type, (value.__qualname__, value.__module__, value.__supertype__)


def _new_type(name: str, module: str, kind: Any) -> Any:
    own = find_in_main(name)
    if isinstance(own, typing.NewType) and own.__supertype__ is kind:
        return own
    made: Any = typing.NewType(name, kind)  # type: ignore[misc]
    made.__module__ = module
    return made


# All wrappers that singledispatch makes have the same code object.
_DISPATCHER = functools.singledispatch(lambda x: x).__code__  # type: ignore[attr-defined]


def is_dispatcher(value: FunctionType) -> bool:
    """Return whether a function was made by `functools.singledispatch`."""
    return value.__code__ is _DISPATCHER


def reduce_dispatcher(value: Any) -> Any:
    """Reduce a dispatcher to its functions by class."""
    # They are state, not arguments: a function may call the dispatcher, which must exist first.
    return _make_dispatcher, (), list(value.registry.items()), None, None, _register_functions


def _make_dispatcher() -> Any:
    return functools.singledispatch(lambda *_: None)


def _register_functions(dispatcher: Any, functions: list[tuple[type, Callable[..., Any]]]) -> None:
    for kind, function in functions:
        dispatcher.register(kind, function)
        if kind is object:  # the default implementation: its name and docstring are the dispatcher's
            functools.update_wrapper(dispatcher, function)


def _make_cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


_LOADED = 64  # functions that are kept; each takes a few milliseconds to load


class SentFunction:
    """A TorchScript function from another process, to be called as the original. torch saves neither its default
    arguments nor its class to a file, so they are kept beside the file."""

    def __init__(self, name: str, saved: bytes, names: tuple[str, ...], defaults: dict[str, Any]) -> None:
        self.__name__ = self.__qualname__ = name
        self._saved = saved
        self._names = names
        self._defaults = defaults
        self._run = _load_function(saved)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {*self._names[: len(args)], *kwargs}
        missing = {name: value for name, value in self._defaults.items() if name not in given}
        return self._run(*args, **missing, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return SentFunction, (self.__name__, self._saved, self._names, self._defaults)


def reduce_function(function: Any) -> tuple[Any, ...]:
    """Reduce a `torch.jit.ScriptFunction`, by name if it can be imported."""
    python = getattr(function, "_torchdynamo_inline", None)  # the Python function that it was compiled from
    if python is not None and is_importable(python, function):
        return _find_named, (python.__module__, python.__qualname__)
    arguments = function.schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    names = tuple(a.name for a in arguments)
    return SentFunction, (function.name, function.save_to_buffer(), names, defaults)


def reduce_module(module: torch.jit.ScriptModule, route: Route) -> tuple[Any, ...]:
    """Reduce a ScriptModule. SerializationError if its tensors are on several devices, or on one without a route."""
    used = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(used) > 1:
        raise SerializationError(
            f"a script module with tensors on {', '.join(sorted(map(str, used)))} cannot be sent: move it to one device"
        )
    target = route.target_device(used.pop()) if used else None
    saved = module.save_to_buffer()  # as torch.jit.save, but without its warning
    return _load_module, (pickle.PickleBuffer(saved), target)


def _module_named(name: str) -> ModuleType:
    try:
        load_packages_of(name)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingCodeError.from_error(error) from error


def _find_named(module: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ModuleNotFoundError) as error:
        raise MissingCodeError.from_error(error) from error


@functools.lru_cache(_LOADED)
def _load_function(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved), map_location=CPU)  # type: ignore[no-untyped-call]


def _load_module(saved: Any, target: str | None) -> Any:
    device = CPU if target is None else local_device(target)
    return torch.jit.load(io.BytesIO(saved), map_location=device)  # type: ignore[no-untyped-call]
