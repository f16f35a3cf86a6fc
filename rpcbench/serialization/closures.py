"""Functions and classes by value: what `__main__`, lambdas, closures and TorchScript need to reach another process.

cloudpickle takes functions and classes apart and builds them; this module decides which object they become on arrival.

Guarantees
- A function or class of the receiver's own `__main__` that says the same (see `importable`) is used instead of a copy.
- A class keeps its identity: the same version is one class in all messages, and instances that come back to the
  process which defined it are instances of its own class. Running a changed cell makes a new version.
- A copy follows the members of the class it was sent from; the receiver's own code is never written to.
- A lock that a function finds in `__main__` stays there: on arrival it is the receiver's own global of that name.
- A TorchScript function of a module goes by name, as any other; one of a notebook or a closure arrives as a
  `SentFunction`, once. A ScriptModule arrives as a new one each time; its tensors travel in its own file, all on the
  CPU or all on one device that has a route.

By-reference slots (`tensor_slot`, `external_slot`, …) are the names that a payload uses for what its message carries
beside it. Each stands in for a method of the unpickler that has the message's tables.
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
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch

from rpcbench.base.errors import SerializationError
from rpcbench.serialization.importable import fingerprint, importable, in_main
from rpcbench.serialization.tensor_types import CPU, Route, here


def tensor_slot(index: int) -> NoReturn:
    """Tensor number `index` of the message's table."""
    _outside()


def subclass_slot(index: int, kind: type, state: Any) -> NoReturn:
    """Tensor number `index` as an instance of `kind`, with its state."""
    _outside()


def external_slot(*name: int | str) -> NoReturn:
    """The external of that name: something that another floor keeps, such as an RRef."""
    _outside()


def make_slot(name: str, version: bytes, build: Any, args: tuple[Any, ...]) -> NoReturn:
    """A function or class that travels by value, or the one that is known here for it."""
    _outside()


def fill_slot(made: Any, state: tuple[Any, Any]) -> NoReturn:
    """Completes what `make_slot` has made."""
    _outside()


def _outside() -> NoReturn:
    raise SerializationError("this pickle is part of an rpcbench message: only its codec can read it")


SLOTS = frozenset(slot.__name__ for slot in (tensor_slot, subclass_slot, external_slot, make_slot, fill_slot))
"""The only names of this module that a payload resolves to the tables of its message."""


class MissingCodeError(SerializationError, AttributeError):
    """A function or class that travels by name, and that the receiver does not have.

    Source: raised on the callee; the cure is to have the same modules on both sides.
    """

    @classmethod
    def about(cls, error: Exception) -> MissingCodeError:
        """The error for a look-up that failed."""
        return cls(
            f"{error}. The RPC pickler does not serialize the code of what can be imported, only its name: make sure "
            "that functions and classes are defined in the same modules on caller and callee."
        )


class _Version(NamedTuple):
    """`name`: where in `__main__` it was defined, or ''. `mark`: a fingerprint if it has a name, else random."""

    name: str
    mark: bytes


class CodeCache:
    """What one agent knows of code by value. May be used by any number of threads."""

    def __init__(self) -> None:
        self._versions: weakref.WeakKeyDictionary[Any, _Version] = weakref.WeakKeyDictionary()
        self._classes: weakref.WeakValueDictionary[bytes, type] = weakref.WeakValueDictionary()
        self._copies: weakref.WeakSet[Any] = weakref.WeakSet()

    def tag(self, value: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """cloudpickle's way to rebuild `value`, changed so that the receiver's CodeCache decides what it becomes."""
        version = self._version(value)
        if version is None:
            return reduced
        build, args, state, items, pairs, fill = reduced
        if isinstance(value, type):
            args = _skeleton(value, args)
        return make_slot, (version.name, version.mark, build, args), (fill, state), items, pairs, fill_slot

    def make(self, name: str, mark: bytes, build: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What this code is here: our own, a copy made before, or a new and empty copy."""
        known = self._own(name, mark) or self._classes.get(mark)
        if known is not None:
            return known
        made = build(*args)
        self._versions[made] = _Version(name, mark)
        self._copies.add(made)
        return self._classes.setdefault(mark, made) if isinstance(made, type) else made

    def fill(self, made: Any, state: tuple[Callable[[Any, Any], object], Any]) -> None:
        """Give a copy its members. They are set again with every message, so that a copy follows its original."""
        if made in self._copies:
            setter, members = state
            setter(made, members)

    def _own(self, name: str, mark: bytes) -> Any:
        own = in_main(name) if name else None
        if not isinstance(own, FunctionType | type):
            return None
        version = self._version(own)
        return own if version is not None and version.mark == mark else None

    def _version(self, value: Any) -> _Version | None:
        """The version of a function or class as it was first seen; None for a function without a place of its own."""
        version = self._versions.get(value)
        if version is not None:
            return version
        name = value.__qualname__
        if sys.modules.get(value.__module__) is sys.modules.get("__main__") and in_main(name) is value:
            version = _Version(name, fingerprint(value))
        elif isinstance(value, type):
            version = _Version("", os.urandom(16))
        else:
            return None
        self._versions[value] = version
        if isinstance(value, type):
            self._classes[version.mark] = value
        return version


_LOCKS = (
    type(threading.Lock()), type(threading.RLock()), threading.Barrier, threading.Condition, threading.Event,
    threading.Semaphore, threading.local,
)  # fmt: skip


class _MainGlobal:
    """Stands in a message for a global of `__main__`, and arrives as the receiver's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _main_global, (self._name,)


def _main_global(name: str) -> Any:
    found = in_main(name)
    if found is None:
        raise MissingCodeError(
            f"a function uses the global {name!r} of __main__, a lock, which cannot be sent, and __main__ here has no "
            f"{name!r}: define it on this worker, too"
        )
    return found


def leave_locks(function: FunctionType, reduced: tuple[Any, ...]) -> None:
    """Take the locks of `__main__` out of what cloudpickle has taken a function apart to: they guard what is there.

    Programs such as a parameter server guard a global by a lock beside it, and call the function that uses both.
    """
    if function.__globals__ is not vars(sys.modules["__main__"]):
        return
    kept = reduced[2][1]["__globals__"]
    kept.update({name: _MainGlobal(name) for name, part in kept.items() if isinstance(part, _LOCKS)})


def _skeleton(kind: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """cloudpickle's arguments for an empty class, with the slots that it leaves out, and without its own tracking:
    that one is shared by the whole process, and would give the members of a copy to the original."""
    *front, _, extra = args
    if typing.NamedTuple in vars(kind).get("__orig_bases__", ()):
        front[2] = kind.__bases__  # NamedTuple itself would make another class, and let nobody fill it
        front[3] = front[3] | {"__orig_bases__": kind.__orig_bases__}  # type: ignore[attr-defined]
    if "__slots__" in vars(kind) and not isinstance(kind, enum.EnumMeta):
        front[3] = front[3] | {"__slots__": vars(kind)["__slots__"]}
    return *front, None, extra


def reduce_cached(value: Any) -> Any:
    """A reducer for what `functools.lru_cache` makes: the function and its settings, not its contents."""
    if importable(value):
        return NotImplemented
    settings = value.cache_parameters()
    return _cached, (value.__wrapped__, settings["maxsize"], settings["typed"])


def reduce_cached_property(value: functools.cached_property[Any]) -> Any:
    """A reducer for `functools.cached_property`, which has a lock until Python 3.12."""
    return _cached_property, (value.func, value.attrname)


def _cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def reduce_new_type(value: Any) -> Any:
    """A reducer for `typing.NewType`, by name where the receiver has it."""
    if importable(value):
        return value.__qualname__
    return _new_type, (value.__qualname__, value.__module__, value.__supertype__)


def _new_type(name: str, module: str, kind: Any) -> Any:
    own = in_main(name)
    if isinstance(own, typing.NewType) and own.__supertype__ is kind:
        return own
    made: Any = typing.NewType(name, kind)  # type: ignore[misc]
    made.__module__ = module
    return made


_DISPATCHER = functools.singledispatch(lambda x: x).__code__  # type: ignore[attr-defined]


def is_dispatcher(value: FunctionType) -> bool:
    """Whether that is a function which `functools.singledispatch` has made."""
    return value.__code__ is _DISPATCHER


def reduce_dispatcher(value: Any) -> Any:
    """Its functions by class. They may call it, so it is made first and filled then."""
    return _dispatcher, (), list(value.registry.items()), None, None, _register


def _dispatcher() -> Any:
    return functools.singledispatch(lambda *_: None)


def _register(dispatcher: Any, functions: list[tuple[type, Callable[..., Any]]]) -> None:
    for kind, function in functions:
        dispatcher.register(kind, function)
        if kind is object:
            functools.update_wrapper(dispatcher, function)


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


_LOADED = 64  # functions that are kept; each takes a few milliseconds to load


class SentFunction:
    """A TorchScript function that came from another process: call it as the original.

    torch keeps neither its default arguments nor its class in a file, so this has them beside the file.
    """

    def __init__(self, name: str, saved: bytes, names: tuple[str, ...], defaults: dict[str, Any]) -> None:
        self.__name__ = self.__qualname__ = name
        self._saved = saved
        self._names = names
        self._defaults = defaults
        self._run = _function(saved)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {*self._names[: len(args)], *kwargs}
        missing = {name: value for name, value in self._defaults.items() if name not in given}
        return self._run(*args, **missing, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return SentFunction, (self.__name__, self._saved, self._names, self._defaults)


def reduce_function(function: Any) -> tuple[Any, ...]:
    """How pickle takes a `torch.jit.ScriptFunction` apart."""
    python = getattr(function, "_torchdynamo_inline", None)  # what it was made from
    if python is not None and importable(python, function):
        return _named, (python.__module__, python.__qualname__)
    arguments = function.schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    names = tuple(argument.name for argument in arguments)
    return SentFunction, (function.name, function.save_to_buffer(), names, defaults)


def reduce_module(module: torch.jit.ScriptModule, route: Route) -> tuple[Any, ...]:
    """How pickle takes a module apart. SerializationError where its tensors have no way on this route."""
    used = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(used) > 1:
        raise SerializationError(
            f"a script module with tensors on {', '.join(sorted(map(str, used)))} cannot be sent: move it to one device"
        )
    target = route.target(used.pop()) if used else None
    saved = module.save_to_buffer()  # what torch.jit.save does, but that one warns of itself
    return _module, (pickle.PickleBuffer(saved), target)


def _named(module: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ModuleNotFoundError) as error:
        raise MissingCodeError.about(error) from error


@functools.lru_cache(_LOADED)
def _function(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved), map_location=CPU)  # type: ignore[no-untyped-call]


def _module(saved: Any, target: str | None) -> Any:
    device = CPU if target is None else here(target)
    return torch.jit.load(io.BytesIO(saved), map_location=device)  # type: ignore[no-untyped-call]
