"""How errors of remote cells look in a notebook: the lines of the remote cell, not those of the machinery here.

An error keeps its type. IPython asks an exception for `_render_traceback_`; that is where the worker's own rendering
goes. Elsewhere (a script, a test) the remote traceback is the error's `__cause__`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

from rpcbench.base.errors import RpcError, RpcTimeoutError, WorkerLostError
from rpcbench.base.rebuild import add_note, set_field
from rpcbench.cells.targets import TargetError

E = TypeVar("E", bound=BaseException)
_HIDDEN = (str(Path(__file__).parent.parent) + os.sep, contextlib.__file__)
"""This package, and what stands between two frames of it where one is a context manager."""


class Failed(NamedTuple):
    """What went wrong on one worker. `lines`: the traceback as rendered there, empty if the cell did not raise it.

    `stopped` says that the cell ended by a KeyboardInterrupt, which no call carries as itself.
    """

    worker: str
    error: Exception
    lines: list[str]
    stopped: bool


@dataclass(frozen=True, slots=True)
class _Rendering:
    """`error._render_traceback_()`, in a form that can be pickled along with the error."""

    lines: list[str]

    def __call__(self) -> list[str]:
        return self.lines


def of_user(frames: TracebackType | None) -> TracebackType | None:
    """A copy of a traceback without the frames that say nothing to a user."""
    kept = []
    while frames is not None:
        if not frames.tb_frame.f_code.co_filename.startswith(_HIDDEN):
            kept.append(frames)
        frames = frames.tb_next
    copy = None
    for frame in reversed(kept):
        # An interrupt may meet an instruction that belongs to no line, which neither this nor IPython could show.
        line = cast(int | None, frame.tb_lineno) or frame.tb_frame.f_code.co_firstlineno
        copy = TracebackType(copy, frame.tb_frame, frame.tb_lasti, line)
    return copy


def shown_as(error: E, lines: list[str]) -> E:
    """The error, to be shown as these lines; IPython has its own way for its UsageError."""
    set_field(error, "_render_traceback_", _Rendering(lines))
    return error


def raised(failures: list[Failed], shell: Any) -> BaseException:
    """The error to raise for a cell that failed on these workers: the first one's, shown with all their tracebacks.

    `shell` is the one that will show it; None in a script.
    """
    first = failures[0]
    if first.stopped:
        return interrupted(failures, [])
    for other in failures[1:]:
        add_note(first.error, f"also on {other.worker}: {message(other.error)}")
    lines = _story(failures)
    if shell is not None and isinstance(first.error, SyntaxError | BaseExceptionGroup):
        _show_next(shell, first.error, lines)
    return shown_as(first.error, lines)


def _show_next(shell: Any, error: BaseException, lines: list[str]) -> None:
    """IPython asks these for no rendering: stand in for it when it next shows an error, and go."""
    own = shell.showtraceback

    def show(*args: Any, **kwargs: Any) -> None:
        shell.showtraceback = own
        if sys.exception() is error:
            shell._showtraceback(type(error), error, lines)
        else:
            own(*args, **kwargs)

    shell.showtraceback = show


def interrupted(failures: list[Failed], busy: list[str]) -> KeyboardInterrupt:
    """What Ctrl-C raises: shows where the cell stood on each worker, and which of them still run it."""
    if busy:
        text = f"the cell still runs on {', '.join(busy)}; cluster.restart({busy[0]!r}) would end it"
    else:
        text = "the cell was interrupted"
    lines = _story(failures) if failures else []
    return shown_as(KeyboardInterrupt(text), [*lines, f"KeyboardInterrupt: {text}"] if busy or not lines else lines)


def timed_out(seconds: float, failures: list[Failed], busy: list[str]) -> RpcTimeoutError:
    """What a cell ends in that took longer than it was given, shown where it stood and who still runs it."""
    text = f"the cell ran for more than {seconds:g} s and was interrupted"
    if busy:
        text += f"; it still runs on {', '.join(busy)}, where cluster.restart({busy[0]!r}) would end it"
    lines = _story(failures) if failures else []
    return shown_as(RpcTimeoutError(text), [*lines, f"RpcTimeoutError: {text}"])


def lost(error: WorkerLostError, worker: str, remedy: str = "") -> WorkerLostError:
    """The same error with what has gone with the worker, and what to do: `remedy`, where it is not restarted alone.

    A cell may itself have lost another one.
    """
    if not str(error).startswith(f"{worker} "):
        return error
    again = f"cluster.restart({worker!r}) starts it again; with replay=True it runs its cells again, too"
    gone = "Its variables are lost, and the values of RRefs that it owned."
    told = WorkerLostError(f"{error}\n{gone} {remedy or again}.")
    told.maybe_executed, told.__cause__ = error.maybe_executed, error.__cause__
    return told


@contextlib.contextmanager
def short() -> Iterator[None]:
    """Errors about workers that are raised inside are shown without a traceback: its frames are ours. Words that mean
    no worker are a mistake in the line of a magic."""
    try:
        yield
    except TargetError as error:
        from IPython.core.error import UsageError

        raise UsageError(str(error)) from None
    except (RpcError, RuntimeError) as error:
        if hasattr(error, "_render_traceback_"):
            raise
        raise shown_as(error, [message(error)]) from None


def _story(failures: list[Failed]) -> list[str]:
    """All tracebacks under the names of their workers; the same error elsewhere takes one line."""
    if len(failures) == 1:
        return failures[0].lines or [message(failures[0].error)]
    lines, seen = [], set()
    for failed in failures:
        said = message(failed.error)
        if said in seen or not failed.lines:
            lines.append(f"[{failed.worker}] {said}")
        else:
            lines += [f"[{failed.worker}]", *failed.lines]
        seen.add(said)
    return lines


def message(error: BaseException | None) -> str:
    """Its class and what it says, as the last line of a traceback."""
    return f"{type(error).__name__}: {error}"
