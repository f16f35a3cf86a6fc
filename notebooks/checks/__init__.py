"""The parts of which the checks of the lessons are made: a check tries an answer and says what is wrong with it.

A check prints a word of praise, or raises `NotYet`. It says what went wrong, not how to mend it; the ways out are
`check.hint()`, two steps for each exercise, and `check.solution()`. A right answer passes on a slow machine too: a
check waits for what should happen, and measures no time.

`read` takes what is returned for what it is: a tensor of one element is a number, a tuple is a sequence, as a list is.
`differ` writes two values so that their difference is seen. `returned` tells an empty answer from one without `return`.

`@exercise(first hint, second hint)` stands above each check. The solutions lie in `solutions/`, one file for each
module of checks; exercises that are solved are kept in `progress.json` beside the lessons, for the start page.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import linecache
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
HERE = Path(__file__).parent
PROGRESS = os.environ.get("RPCBENCH_PROGRESS", str(HERE.parent / "progress.json"))  # empty: is not kept
DOTS = "Replace the three dots."
NUMBERS = (int, float, bool)
EMPTY = f"The function returns nothing so far. {DOTS}"


class NotYet(Exception):
    """An answer that is not right yet. A notebook shows the hint alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"Not yet. {self}"]


def require(true: object, hint: str) -> None:
    """Raise the hint, unless `true`."""
    if not true:
        raise NotYet(hint)


# -- values that an answer has returned
def returned(value: T | None, function: Any = None) -> T:
    """The value, unless the answer is still empty, or ends without `return`. `function`: one that the answer made."""
    require(value is not ..., EMPTY)
    if value is None:
        raise NotYet(_why_nothing([function] if function else _answers))
    return value  # type: ignore[return-value]


def dots_left() -> str:
    """ " Replace the three dots.", if they still stand in the answer; for the end of a hint."""
    return f" {DOTS}" if any(_has_dots(tree) for tree in map(_tree_of, _answers) if tree) else ""


def reads_attribute(answer: Any, name: str) -> bool:
    """Whether the answer itself reads an attribute of this name, such as `weight.grad`."""
    tree = _tree_of(answer)
    return tree is not None and any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(tree))


def _why_nothing(answers: Iterable[Any]) -> str:
    trees = [tree for tree in map(_tree_of, answers) if tree is not None]
    if any(map(_has_dots, trees)):
        return EMPTY
    if trees and not any(_has_return(tree) for tree in trees):
        return "It has no `return`, so it returns None, whatever it has computed. Let it end with `return`."
    return "It returned None here. Does each way through it end with `return`, and with a value after it?"


def _tree_of(answer: Any) -> ast.Module | None:
    """The syntax of an answer; None without a known source, as for a number."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(answer)))
    except (OSError, TypeError, SyntaxError):
        return None


def _has_dots(tree: ast.AST) -> bool:
    """Whether a statement of three dots is left."""
    return any(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...
        for node in ast.walk(tree)
    )


def _has_return(tree: ast.Module) -> bool:
    """Whether a function returns something, those within it aside; of a lambda or a class it is taken for granted."""
    todo: list[ast.AST] = list(tree.body[0].body) if isinstance(tree.body[0], ast.FunctionDef) else [ast.Return()]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Return):
            return True
        within = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef)
        todo += [] if within else ast.iter_child_nodes(node)
    return False


def read(value: Any, kind: Any, wanted: str) -> Any:
    """The answer as a value of a kind; if it is none, the hint "`wanted`, not ...".

    A kind is a type, `float` for any number; `[kind]`, a list from a sequence of any length; `(kind, kind)`, a tuple
    from one of this length; `{kind}`, a list where order does not count. A tensor of one element and a number of numpy
    are numbers. Tuples, ranges, vectors and iterators are sequences, and where order does not count sets, too.
    """
    value = returned(value)
    if isinstance(value, Iterator):
        with trying("What it returns"):
            value = list(value)
    try:
        return _read(value, kind)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements is no number
        raise NotYet(f"{wanted}, not {shown(value)}.") from None


def _read(value: Any, kind: Any) -> Any:
    if isinstance(kind, tuple):
        return tuple(_read(*pair) for pair in zip(_items(value, kind), kind, strict=True))
    if isinstance(kind, list | set):
        (each,) = kind
        return [_read(item, each) for item in _items(value, kind)]
    if kind in NUMBERS:
        return _number(value, kind)
    if not isinstance(value, kind):
        raise TypeError
    return value


def _items(value: Any, kind: Any) -> list[Any]:
    ordered, plain = not isinstance(kind, set), all(each in NUMBERS for each in kind if isinstance(each, type))
    if isinstance(value, str | bytes | Mapping) or (ordered and isinstance(value, Set)):
        raise TypeError
    if hasattr(value, "dtype") and not plain:  # a tensor is a sequence of numbers, or of rows, but not of tensors
        raise TypeError
    return list(value)


def _number(value: Any, kind: type) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, Integral if kind is int else Real):
        raise TypeError
    return value if isinstance(value, int | float) else kind(value)


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


def name_slip(found: float, slips: Mapping[str, float], within: float = 1e-3, off: float = 0.0) -> str:
    """Return the sentence on the mistake that gives this number, for the end of a hint; empty if none does.

    `within` is a share of the number, `off` a distance."""
    return next((f" {said}" for said, slip in slips.items() if abs(found - slip) <= max(within * abs(slip), off)), "")


def differ(wanted: Any, found: Any, between: str = ", not ", digits: int = 4, unit: str = "") -> str:
    """Two numbers, or tensors or lists of them, that differ: "2, not 3".

    If they print alike they get more digits, and a note to how many digits they agree, with the dtypes if these differ.
    """
    for more in range(digits, 18):
        one, other = (_written(value, more) for value in (wanted, found))
        if one != other:
            break
    kinds = [str(getattr(value, "dtype", "")).removeprefix("torch.") for value in (wanted, found)]
    alike = f"the same to {max(1, _agree(wanted, found))} digits" if one != other else "equal as numbers"
    notes = [alike] if more > digits else []
    notes += [f"yours is {kinds[1]}, and {kinds[0]} is wanted"] if notes and all(kinds) and kinds[0] != kinds[1] else []
    return f"{one}{unit}{between}{other}{unit}" + (f" ({'; '.join(notes)})" if notes else "")


def _written(value: Any, digits: int) -> str:
    text = ", ".join(f"{number:.{digits}g}" for number in _numbers(value))
    return f"[{text}]" if isinstance(value, list | tuple) else text


def _numbers(value: Any) -> list[float]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [number for each in value for number in _numbers(each)] if isinstance(value, list | tuple) else [value]


def _agree(wanted: Any, found: Any) -> int:
    """To how many digits the numbers agree, as seen from the largest one."""
    pairs = list(zip(_numbers(wanted), _numbers(found), strict=False))
    apart, size = (max(map(abs, numbers), default=0) for numbers in ([a - b for a, b in pairs], [a for a, _ in pairs]))
    return math.floor(-math.log10(apart / size)) if apart and size and math.isfinite(apart / size) else 17


# -- exercises, hints, solutions
_hints: dict[tuple[str, str], tuple[str, str]] = {}  # of each exercise: (module, name)
_given: dict[tuple[str, str], int] = {}  # hints given so far
_last: list[tuple[str, str]] = []  # the exercise that was tried last
_answers: list[Any] = []  # that are tried, or were tried last


def exercise(first: str = "", second: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function the check of the exercise of its name, with two hints: where to look, and how to begin.

    A question of the exam has none.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        key = (check.__module__.rpartition(".")[2], check.__name__)
        _hints[key] = (first, second)

        @functools.wraps(check)
        def tried(*answers: Any) -> None:
            _last[:], _answers[:] = [key], answers
            check(*answers)
            _solved(*key)

        return tried

    return decorate


def hint(name: str | None = None) -> None:
    """Print the next of the two hints of an exercise, by default of the one that was checked last; then the way on."""
    key = _exercise(name)
    require(any(_hints[key]), "There are no hints in an exam.")
    step = min(_given.get(key, 0), 2)
    _given[key] = step + 1
    print(
        f"Hint {step + 1} of 2: {_hints[key][step]}" if step < 2 else
        f"Both hints were given; the second one: {_hints[key][1]} `check.solution()` comes next."
    )  # fmt: skip


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
