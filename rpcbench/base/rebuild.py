"""Exceptions rebuilt without their `__init__`, which may want other arguments than `args` holds.

An exception is its class, its `args`, its attributes, and its fields: the values that C classes (`OSError.errno`) and
`__slots__` keep outside of `__dict__`. A class that says itself how it is pickled is left to that.

Guarantees
- No `__init__` and no `__new__` of a user's class runs; nor does its `__setattr__`, which a frozen dataclass forbids.
- A shortened error keeps its type; each text in it has at most `MOST_TEXT` characters.
"""

from __future__ import annotations

import copy
import copyreg
import traceback
from collections.abc import Callable
from types import MemberDescriptorType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)
MOST_TEXT = 1 << 20
"""Characters of a text, a representation or a traceback that go along with an error."""
_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE: not a class of the interpreter's own
_State = tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]


def reduced(error: BaseException) -> tuple[Any, ...] | None:
    """What `__reduce__` might say of an error; None where its class has a way of its own."""
    kind = type(error)
    owner = next(base for base in kind.__mro__ if "__reduce__" in vars(base))
    own = owner.__module__ != "builtins" or kind.__reduce_ex__ is not object.__reduce_ex__
    if own or kind in copyreg.dispatch_table:
        return None
    return remade, (kind, *_arguments(error)), (error.args, vars(error), _fields(error)), None, None, fill


def remade(kind: type[E], *args: Any) -> E:
    """An instance by the `__new__` of the C class below `kind`. TypeError for a class of anything but exceptions."""
    if not issubclass(kind, BaseException):
        raise TypeError(f"{kind!r} is no class of exceptions")
    base: Any = kind
    while base.__flags__ & _AT_RUN_TIME:
        base = base.__base__
    made: E = base.__new__(kind, *args)
    return made


def fill(error: BaseException, state: _State) -> None:
    """Give a new instance what another one holds."""
    args, attributes, fields = state
    set_field(error, "args", args)
    if attributes and type(error).__setstate__ is not BaseException.__setstate__:
        error.__setstate__(attributes)
    else:
        vars(error).update(attributes)
    for name, value in fields.items():
        set_field(error, name, value)


def set_field(error: BaseException, name: str, value: object) -> None:
    """As `setattr`, also on instances of a class that forbids it."""
    BaseException.__setattr__(error, name, value)


def add_note(error: BaseException, note: str) -> None:
    """As `error.add_note`, also on such instances."""
    set_field(error, "__notes__", [*getattr(error, "__notes__", ()), note])


def twin(error: E) -> E:
    """A shallow copy, without traceback, cause and context. Raises whatever a user's own way of copying raises."""
    parts = reduced(error)
    if parts is None:
        return copy.copy(error)
    made: E = remade(*parts[1])
    fill(made, parts[2])
    return made


def shortened(error: BaseException, short: Callable[[Any], Any]) -> BaseException:
    """A copy whose arguments, attributes and fields are what `short` makes of them, also of those inside a group."""
    args = tuple(map(short, error.args))
    if isinstance(error, BaseExceptionGroup):
        args = short(error.message), [shortened(inner, short) for inner in error.exceptions]
    attributes = {name: short(value) for name, value in vars(error).items() if name != "__notes__"}
    if isinstance(notes := getattr(error, "__notes__", None), list):
        attributes["__notes__"] = [short(note) for note in notes]
    made = remade(type(error), *args)
    fill(made, (args, attributes, {name: short(value) for name, value in _fields(error).items()}))
    return made


def cut(text: str) -> str:
    """A text without its middle, where it has more than `MOST_TEXT` characters."""
    left_out = len(text) - MOST_TEXT
    half = MOST_TEXT // 2
    return text if left_out <= 0 else f"{text[:half]}\n[{left_out} characters are left out here]\n{text[-half:]}"


def words(value: object, say: Callable[[Any], str] = repr) -> str:
    """`say(value)`, cut. A class whose `__repr__` or `__str__` raises must not hide the error that it is a part of."""
    try:
        return cut(say(value))
    except Exception as error:  # noqa: BLE001  (a user's method)
        return f"<{type(value).__name__}, whose representation raises {type(error).__name__}>"


def story(error: BaseException) -> str:
    """The traceback with causes and notes, cut."""
    return cut("".join(traceback.format_exception(error)))


def _arguments(error: BaseException) -> tuple[Any, ...]:
    return (error.message, error.exceptions) if isinstance(error, BaseExceptionGroup) else error.args


def _fields(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    members = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    return {
        name: getattr(error, name)
        for name, member in members.items()
        if isinstance(member, MemberDescriptorType) and _is_field(member, error)
    }


def _is_field(member: MemberDescriptorType, error: BaseException) -> bool:
    """Whether a field is set and goes along: not the object of an AttributeError, which may be a whole model."""
    owner = member.__objclass__
    if owner in (BaseException, BaseExceptionGroup) or (owner is AttributeError and member.__name__ == "obj"):
        return False
    try:
        value = member.__get__(error)
    except AttributeError:  # a slot that nothing was put into
        return False
    return value is not None or bool(owner.__flags__ & _AT_RUN_TIME)  # C classes have None for what is not set
