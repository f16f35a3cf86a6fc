"""Rebuilding, copying and shortening of exceptions without their `__init__`, which may need more than `args`.

The state of an exception is its class, its `args`, its attributes, and its fields: the values that C classes
(`OSError.errno`) and `__slots__` keep outside of `__dict__`. A class with its own `__reduce__` is pickled by that.

Guarantees
- No `__init__` and no `__new__` of a user's class runs, and no `__setattr__`, which raises in a frozen dataclass.
- A shortened error keeps its type; each text in it has at most `MOST_TEXT` characters.
"""

from __future__ import annotations

import copy
import copyreg
import traceback
from collections.abc import Callable
from types import MemberDescriptorType
from typing import Any, TypeVar

from rpcbench.base.sources import with_cell_names

E = TypeVar("E", bound=BaseException)
MOST_TEXT = 1 << 20
"""The most characters of a text, a representation or a traceback that are sent with an error."""
_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was made at run time, not one of the interpreter
_State = tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]  # args, attributes, fields


def reduce_error(error: BaseException) -> tuple[Any, ...] | None:
    """Return a value for `__reduce__` of an error; None if its class has its own way of pickling."""
    kind = type(error)
    owner = next(base for base in kind.__mro__ if "__reduce__" in vars(base))
    own = owner.__module__ != "builtins" or kind.__reduce_ex__ is not object.__reduce_ex__
    if own or kind in copyreg.dispatch_table:
        return None
    args = (error.message, error.exceptions) if isinstance(error, BaseExceptionGroup) else error.args
    return rebuild_error, (kind, *args), (error.args, vars(error), _fields_of_error(error)), None, None, restore_state


def rebuild_error(kind: type[E], *args: Any) -> E:
    """Make an instance by the `__new__` of the C class below `kind`. TypeError if `kind` is no exception class."""
    # A peer names the class in a pickle, so it must not make instances of any other class.
    if not issubclass(kind, BaseException):
        raise TypeError(f"{kind!r} is not a class of exceptions")
    base: Any = kind
    while base.__flags__ & _AT_RUN_TIME:
        base = base.__base__
    made: E = base.__new__(kind, *args)
    return made


def restore_state(error: BaseException, state: _State) -> None:
    """Give a new instance the state of another one."""
    args, attributes, fields = state
    set_field(error, "args", args)
    if attributes and type(error).__setstate__ is not BaseException.__setstate__:
        error.__setstate__(attributes)
    else:
        vars(error).update(attributes)
    for name, value in fields.items():
        set_field(error, name, value)


def set_field(error: BaseException, name: str, value: object) -> None:
    """Do as `setattr`, also for a class that forbids it."""
    BaseException.__setattr__(error, name, value)


def add_note(error: BaseException, note: str) -> None:
    """Do as `error.add_note`, also for a class that forbids `setattr`."""
    set_field(error, "__notes__", [*getattr(error, "__notes__", ()), note])


def copy_error(error: E) -> E:
    """Return a shallow copy, without traceback, cause and context. Errors of a user's copy method propagate."""
    parts = reduce_error(error)
    if parts is None:
        return copy.copy(error)
    made: E = rebuild_error(*parts[1])
    restore_state(made, parts[2])
    return made


def shorten_error(error: BaseException, short: Callable[[Any], Any]) -> BaseException:
    """Return a copy with `short` applied to all arguments, attributes and fields, also of errors inside a group."""
    args = tuple(map(short, error.args))
    if isinstance(error, BaseExceptionGroup):
        args = short(error.message), [shorten_error(inner, short) for inner in error.exceptions]
    attributes = {name: short(value) for name, value in vars(error).items() if name != "__notes__"}
    if isinstance(notes := getattr(error, "__notes__", None), list):
        attributes["__notes__"] = [short(note) for note in notes]
    made = rebuild_error(type(error), *args)
    restore_state(made, (args, attributes, {name: short(value) for name, value in _fields_of_error(error).items()}))
    return made


def cut_text(text: str) -> str:
    """Return a text without its middle if it has more than `MOST_TEXT` characters."""
    left_out = len(text) - MOST_TEXT
    half = MOST_TEXT // 2
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters are left out here]\n{text[-half:]}"


def format_value(value: object, say: Callable[[Any], str] = repr) -> str:
    """Return `say(value)`, cut. A failing `__repr__` or `__str__` must not hide the error that the value belongs to."""
    try:
        return cut_text(say(value))
    except Exception as error:  # noqa: BLE001  (a user's method)
        return f"<{type(value).__name__}, whose representation raises {type(error).__name__}>"


def format_traceback(error: BaseException) -> str:
    """Return the traceback with causes and notes, cut. Cells have their names in it."""
    return with_cell_names(cut_text("".join(traceback.format_exception(error))))


def _fields_of_error(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    members = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    return {
        name: getattr(error, name)
        for name, member in members.items()
        if isinstance(member, MemberDescriptorType) and _is_field(member, error)
    }


def _is_field(member: MemberDescriptorType, error: BaseException) -> bool:
    """Return whether a field is set, and is to be sent along."""
    owner = member.__objclass__
    # The object of an AttributeError may be a whole model.
    if owner in (BaseException, BaseExceptionGroup) or (owner is AttributeError and member.__name__ == "obj"):
        return False
    try:
        value = member.__get__(error)
    except AttributeError:  # an empty slot
        return False
    return value is not None or bool(owner.__flags__ & _AT_RUN_TIME)  # C classes have None for a field without a value
