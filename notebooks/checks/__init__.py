"""The parts of which the checks of the lessons are made: a check tries an answer and says what is wrong with it.

A check prints a word of praise, or raises `NotYet`. It says what went wrong, not how to mend it; the ways out are
`check.hint()`, two steps for each exercise, and `check.solution()`. A right answer passes on a slow machine too: a
check waits for what should happen, and measures no time.

`@exercise(first hint, second hint)` stands above each check. The solutions lie in `solutions/`, one file for each
module of checks; exercises that are solved are kept in `progress.json` beside the lessons, for the start page.
"""

from __future__ import annotations

import contextlib
import functools
import json
import linecache
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
HERE = Path(__file__).parent
PROGRESS = os.environ.get("RPCBENCH_PROGRESS", str(HERE.parent / "progress.json"))  # empty: is not kept
EMPTY = "The function returns nothing so far. Replace the three dots."


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
    require(value is not None and value is not ..., EMPTY)
    return value  # type: ignore[return-value]


@contextlib.contextmanager
def trying(where: str = "It") -> Iterator[None]:
    """Around an answer that runs: an error of its own becomes a hint, with the line of the answer that raised it."""
    try:
        yield
    except NotYet:
        raise
    except Exception as error:  # noqa: BLE001  (whatever it is, the learner is told)
        text = str(error).strip().partition("\n")[0]
        told = f"{where} raised {type(error).__name__}{f': {text}' if text else ''}"
        line = _own_line(error.__traceback__)
        raise NotYet(f"{told}, in your line `{line}`." if line else told) from None


def _own_line(traceback: TracebackType | None) -> str:
    """The innermost line of a cell that the error passed through; empty if there is none."""
    line = ""
    while traceback is not None:
        code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_globals
        if names.get("__name__") == "__main__":
            line = linecache.getline(code.co_filename, traceback.tb_lineno).strip() or line
        traceback = traceback.tb_next
    return line


def right(praise: str) -> None:
    print(f"Right. {praise}")


def shown(value: Any) -> str:
    """A value in a hint."""
    text = repr(value)
    return text if len(text) < 100 else f"{text[:97]}..."


# -- exercises, hints, solutions
_hints: dict[tuple[str, str], tuple[str, str]] = {}  # of each exercise: (module, name)
_given: dict[tuple[str, str], int] = {}  # hints given so far
_last: list[tuple[str, str]] = []  # the exercise that was tried last


def exercise(first: str = "", second: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function the check of the exercise of its name, with two hints: where to look, and how to begin.

    A question of the exam has none.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        key = (check.__module__.rpartition(".")[2], check.__name__)
        _hints[key] = (first, second)

        @functools.wraps(check)
        def tried(*answers: Any) -> None:
            _last[:] = [key]
            check(*answers)
            _solved(*key)

        return tried

    return decorate


def hint(name: str | None = None) -> None:
    """Print the next of the two hints of an exercise, by default of the one that was checked last."""
    key = _exercise(name)
    require(any(_hints[key]), "There are no hints in an exam.")
    step = min(_given.get(key, 0), 1)
    _given[key] = step + 1
    print(f"Hint {step + 1} of 2: {_hints[key][step]}")


def solution(name: str | None = None) -> None:
    """Print a solution of an exercise, by default of the one that was checked last."""
    module, name = _exercise(name)
    require(any(_hints[module, name]), "There are no solutions in an exam.")
    print(solutions(module)[name])


def solutions(module: str) -> dict[str, str]:
    """The solutions to the exercises of a module of checks, by name."""
    parts = re.split(r"^# %% (\w+)\n", (HERE / "solutions" / f"{module}.py").read_text(), flags=re.MULTILINE)
    return {name: code.strip() for name, code in zip(parts[1::2], parts[2::2], strict=True)}


def _exercise(name: str | None) -> tuple[str, str]:
    if name is None:
        require(_last, "No exercise was checked yet. Give its name: the word after `check.` in its cell.")
        return _last[0]
    found = [key for key in _hints if key[1] == name and (not _last or key[0] == _last[0][0])]
    known = ", ".join(sorted(key[1] for key in _hints))
    require(found, f"There is no exercise {name!r} here; there are: {known}.")
    return found[0]


def _solved(module: str, name: str) -> None:
    """Keep it for the start page. Where the lessons are not the reader's to change, nothing is kept."""
    path = Path(PROGRESS)
    if not PROGRESS or not os.access(path if path.exists() else path.parent, os.W_OK):
        return
    kept = json.loads(path.read_text()) if path.exists() else {}
    if name not in kept.get(module, ()):
        kept[module] = sorted([*kept.get(module, ()), name])
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(kept, indent=1))
        new.replace(path)
