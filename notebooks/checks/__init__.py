"""What the check cells of the lessons call: it tries an answer, and says what is wrong with it, not how to mend it.

A check returns quietly, with a word of praise, or raises. A right answer passes on a slow machine too: a check waits
for what should happen, and measures no time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class NotYet(Exception):
    """An answer that is not right yet. A notebook shows the hint alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"Not yet. {self}"]


def require(true: object, hint: str) -> None:
    """Raise the hint, unless `true`."""
    if not true:
        raise NotYet(hint)


def returned(value: T | None) -> T:
    """The value, unless the answer is still empty."""
    require(value is not None and value is not ..., "The function returns nothing so far. Replace the three dots.")
    return value  # type: ignore[return-value]


@contextlib.contextmanager
def trying(where: str = "It") -> Iterator[None]:
    """Around an answer that runs: an error of its own becomes a hint."""
    try:
        yield
    except NotYet:
        raise
    except Exception as error:  # noqa: BLE001  (whatever it is, the learner is told)
        text = str(error).strip().partition("\n")[0]
        raise NotYet(f"{where} raised {type(error).__name__}{f': {text}' if text else ''}") from None


def on_threads(count: int, part: Callable[[int], object], failed: Callable[[], object] = lambda: None) -> None:
    """Run `part(0)` to `part(count - 1)` at once, each on a thread. Raises the first NotYet of any of them; `failed` is
    called after each, to free the others."""
    hints: list[NotYet] = []

    def one(number: int) -> None:
        try:
            part(number)
        except NotYet as hint:
            hints.append(hint)  # before the others are freed, which then have hints of their own
            failed()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if hints:
        raise hints[0]


def right(praise: str) -> None:
    print(f"Right. {praise}")


def shown(value: Any) -> str:
    """A value in a hint."""
    text = repr(value)
    return text if len(text) < 100 else f"{text[:97]}..."
