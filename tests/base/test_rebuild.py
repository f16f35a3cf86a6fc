"""Exceptions are rebuilt as they were, without their `__init__`, and shortened ones keep their type."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from rpcbench.base import rebuild
from rpcbench.base.errors import ConnectionLostError, StageLostError


class KeywordsOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Slotted(OSError):
    __slots__ = ("__hidden", "unset", "where")

    def __init__(self, where: str | None) -> None:
        super().__init__(5, "broken", "a file")
        self.where, self.__hidden = where, 7

    def hidden(self) -> int:
        return self.__hidden


class Diamond(ValueError, OSError):
    def __new__(cls, *, text: str) -> Diamond:
        return OSError.__new__(cls, 5, text)

    def __init__(self, *, text: str) -> None:
        OSError.__init__(self, 5, text)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Stateful(Exception):
    def __setstate__(self, state: dict[str, Any] | None) -> None:
        self.restored = state


class KeywordsGroup(ExceptionGroup[Exception]):
    def __new__(cls, *, inner: list[Exception]) -> KeywordsGroup:
        return super().__new__(cls, "several", inner)

    def __init__(self, *, inner: list[Exception]) -> None:
        self.count = len(inner)


def fails(code: str) -> Exception:
    with pytest.raises(Exception) as caught:
        exec(code, {})
    return caught.value


def through_pickle(error: Exception) -> Exception:
    """Send an error as the codec does."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return rebuild.reduce_error(value) if isinstance(value, BaseException) else NotImplemented

    stream = io.BytesIO()
    Pickler(stream, 5).dump(error)
    made: Exception = pickle.loads(stream.getvalue())
    return made


ERRORS = [
    KeywordsOnly(code=7), Slotted("here"), Slotted(None), Diamond(text="both"), Frozen(7),
    KeywordsGroup(inner=[KeywordsOnly(code=1), ValueError("x")]), ExceptionGroup("g", [KeyError("k")]),
    ConnectionLostError("text", False), StageLostError("text", {"worker1": "in B3"}, (1,), {1: (2, 3)}),
    FileNotFoundError(2, "none", "a", None, "b"), BlockingIOError(11, "later", 5), OSError("one argument"),
    ImportError("no", name="a", path="b"), StopIteration(4), KeyError("k"),
    UnicodeEncodeError("ascii", "é", 0, 1, "no"),
    fails("b'\\xff'.decode()"), fails("1 +"), fails("unknown_name"), fails("{}[1]"), fails("import no_such_module"),
]  # fmt: skip


@pytest.mark.parametrize("way", [through_pickle, rebuild.copy_error])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_rebuilt_as_it_was(error: Exception, way: Any) -> None:
    rebuild.add_note(error, "a note")
    made = way(error)
    assert made.__notes__[-1] == "a note"
    assert made is not error and type(made) is type(error)
    assert (str(made), repr(made), made.args if way is rebuild.copy_error else len(made.args)) == (
        str(error), repr(error), error.args if way is rebuild.copy_error else len(error.args),
    )  # fmt: skip
    assert {name: repr(value) for name, value in vars(made).items()} == {
        name: repr(value) for name, value in vars(error).items()
    }
    for name in ("errno", "strerror", "filename", "filename2", "name", "path", "value", "reason", "lineno", "where"):
        assert getattr(made, name, None) == getattr(error, name, None)
    if isinstance(error, BlockingIOError):
        assert made.characters_written == 5
    if isinstance(error, Slotted):
        assert made.hidden() == 7 and not hasattr(made, "unset")


def test_a_copied_attribute_error_keeps_its_name_and_drops_its_object() -> None:
    error = fails("'a text'.missing")
    assert isinstance(error, AttributeError) and error.obj == "a text"
    made = rebuild.copy_error(error)
    assert (made.name, made.obj) == ("missing", None)


def test_a_class_with_its_own_pickling_keeps_it() -> None:
    class Own(Exception):
        def __reduce__(self) -> Any:
            return ValueError, ("instead",)

    assert rebuild.reduce_error(Own()) is None
    stateful = Stateful("x")
    stateful.extra = 1  # type: ignore[attr-defined]
    made = rebuild.copy_error(stateful)
    assert vars(made) == {"restored": {"extra": 1}} and made.args == ("x",)


def test_a_class_that_is_no_exception_is_refused() -> None:
    with pytest.raises(TypeError, match="is not a class of exceptions"):
        rebuild.rebuild_error(dict)  # type: ignore[type-var]


def test_a_shortened_error_keeps_its_type_and_its_inner_errors() -> None:
    error = KeywordsGroup(inner=[KeywordsOnly(code=1), fails("b'\\xff'.decode()")])
    error.add_note("a note")
    made = rebuild.shorten_error(error, lambda part: part if isinstance(part, int | bytes) else f"<{part}>")
    assert isinstance(made, KeywordsGroup) and made.message == "<several>" and made.count == 2
    assert made.__notes__ == ["<a note>"]
    first, second = made.exceptions
    assert isinstance(first, KeywordsOnly) and (first.args, first.code) == (("<code 1>",), 1)
    assert isinstance(second, UnicodeDecodeError) and second.object == b"\xff"


def test_a_text_is_cut_to_the_bound() -> None:
    short, long = "x" * rebuild.MOST_TEXT, "x" * rebuild.MOST_TEXT + "y" * 100
    assert rebuild.cut_text(short) is short
    assert "[100 characters are left out here]" in rebuild.cut_text(long)
    assert len(rebuild.cut_text(long * 3)) < rebuild.MOST_TEXT + 100 and rebuild.cut_text(long).endswith("y")
    told = rebuild.format_traceback(ValueError(long))
    assert told.startswith("ValueError: x") and len(told) < rebuild.MOST_TEXT + 100


def test_an_error_in_a_repr_is_named_in_its_place() -> None:
    class Mute(Exception):
        def __repr__(self) -> str:
            raise ValueError("no words")

    assert rebuild.format_value(Mute()) == "<Mute, whose representation raises ValueError>"
