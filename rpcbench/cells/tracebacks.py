"""Renders errors of remote cells in a notebook: with the lines of the remote cell, without this package's frames.

An error keeps its type. IPython renders an exception by its `_render_traceback_`, which returns the worker's rendering.
Elsewhere (a script, a test) the remote traceback is the error's `__cause__`.

Three frames of torch or more in a row are left out, with a line that says how to see them: `fold_torch`. Where a worker
was lost, each error of torch's communication on another worker is one line.

The code of a traceback is coloured up to a number of lines: IPython colours the whole function of each frame, and of an
import the whole module, which on a busy machine takes minutes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

from rpcbench.base.errors import RpcError, RpcTimeoutError, WorkerLostError
from rpcbench.base.rebuild import add_note, set_field
from rpcbench.cells.targets import TargetError

E = TypeVar("E", bound=BaseException)
_HIDDEN = (str(Path(__file__).parent.parent) + os.sep, contextlib.__file__)
"""Prefixes of files whose frames are hidden: this package, and contextlib, whose frames lie between ours."""


_LEAST_FOLDED = 3  # frames of torch in a row
_MOST_COLOURED = 1000  # lines of code in one traceback, which take an eighth of a second


class Failed(NamedTuple):
    """The failure of a cell on one worker."""

    worker: str
    error: Exception
    lines: list[str]  # the traceback as rendered there; empty if the cell did not raise the error
    stopped: bool  # the cell ended by a KeyboardInterrupt, which no call carries as itself


def user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Copy a traceback without the frames of `_HIDDEN` files."""
    kept = []
    while frames is not None:
        if not frames.tb_frame.f_code.co_filename.startswith(_HIDDEN):
            kept.append(frames)
        frames = frames.tb_next
    return _join_frames(kept)


def _join_frames(kept: list[TracebackType]) -> TracebackType | None:
    copy = None
    for frame in reversed(kept):
        # An interrupt may hit an instruction without a line number, which neither this copy nor IPython accepts.
        line = cast(int | None, frame.tb_lineno) or -1  # early releases of Python 3.11 say -1 themselves
        line = line if line > 0 else frame.tb_frame.f_code.co_firstlineno
        copy = TracebackType(copy, frame.tb_frame, frame.tb_lasti, line)
    return copy


@functools.cache
def _torch_prefix() -> str:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None, "rpcbench needs it"
    return str(Path(found.origin).parent) + os.sep


def _is_of_torch(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_torch_prefix())


def fold_torch(frames: TracebackType | None) -> tuple[TracebackType | None, int]:
    """Copy a traceback without long runs of torch's frames; return also how many are left out."""
    kept: list[TracebackType] = []
    left_out = 0
    every = list(_iterate_frames(frames))
    for is_torch, run in itertools.groupby(every, _is_of_torch):
        found = list(run)
        if is_torch and len(found) >= _LEAST_FOLDED and len(found) < len(every):
            left_out += len(found)
        else:
            kept += found
    return _join_frames(kept), left_out


def _iterate_frames(frames: TracebackType | None) -> Iterator[TracebackType]:
    while frames is not None:
        yield frames
        frames = frames.tb_next


@contextlib.contextmanager
def fold_causes(error: BaseException) -> Iterator[int]:
    """Leave out frames of this package and of torch also in the errors that led to this one, meanwhile; yield how many
    of torch."""
    causes: list[tuple[BaseException, TracebackType | None]] = []
    at = _cause_of(error)
    while at is not None and all(at is not one for one, _ in causes) and at is not error:
        causes.append((at, at.__traceback__))
        at = _cause_of(at)
    left_out = 0
    for one, whole in causes:
        one.__traceback__, count = fold_torch(user_frames(whole))
        left_out += count
    try:
        yield left_out
    finally:
        for one, whole in causes:
            one.__traceback__ = whole


def _cause_of(error: BaseException) -> BaseException | None:
    """Return the error that is shown above this one."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@contextlib.contextmanager
def limit_colours(formatter: Any) -> Iterator[None]:
    """Have a traceback formatter of IPython colour at most `_MOST_COLOURED` lines meanwhile; other code stays plain."""
    whole = formatter.__class__
    formatter.__class__ = _make_limited_class(whole)
    formatter.colours_left = _MOST_COLOURED
    try:
        yield
    finally:
        formatter.__class__ = whole


@functools.cache
def _make_limited_class(kind: type[Any]) -> type[Any]:
    class Limited(kind):  # type: ignore[misc]  # only known at run time: a kernel has its own
        plain = False  # the frame that is formatted now

        @property
        def has_colors(self) -> bool:
            return not self.plain and bool(super().has_colors)

        def format_record(self, record: Any) -> Any:
            lines = _lines_to_colour(record)
            self.plain = lines > self.colours_left
            if not self.plain:
                self.colours_left -= lines
            try:
                return super().format_record(record)
            finally:
                self.plain = False

    return Limited


def _lines_to_colour(record: Any) -> int:
    """Return the number of lines of the function or module that a frame of IPython runs."""
    found = getattr(record, "_sd", None)  # None where IPython itself shows the frame in its quick way
    scope = getattr(found, "scope", None)
    if found is None or scope is None:
        return 0
    return len(found.source.lines) if isinstance(scope, ast.Module) else scope.end_lineno - scope.lineno + 1


def with_rendering(error: E, lines: list[str]) -> E:
    """Make IPython show the error as these lines, and return it. IPython ignores them for a UsageError."""
    set_field(error, "_render_traceback_", functools.partial(list, lines))  # pickled along with the error
    return error


def combined_error(failures: list[Failed], shell: Any) -> BaseException:
    """Return the first worker's error, to be shown by `shell` (None in a script) with the tracebacks of all workers.

    The loss of a worker comes before the errors that workers raise: a connection may have ended with that one.
    """
    failures = sorted(failures, key=lambda failed: bool(failed.lines) or not isinstance(failed.error, WorkerLostError))
    first = failures[0]
    if first.stopped:
        return interrupt_error(failures, [])
    for other in failures[1:]:
        add_note(first.error, f"also on {other.worker}: {error_message(other.error)}")
    lines = _joined_tracebacks(failures)
    if shell is not None and isinstance(first.error, SyntaxError | BaseExceptionGroup):
        _show_next(shell, first.error, lines)
    return with_rendering(first.error, lines)


def _show_next(shell: Any, error: BaseException, lines: list[str]) -> None:
    """Show an error as these lines, of a type for which IPython ignores `_render_traceback_`."""
    # Replaces `showtraceback` for one call: the error is shown right after it is raised.
    own = shell.showtraceback

    def show(*args: Any, **kwargs: Any) -> None:
        shell.showtraceback = own
        if sys.exception() is error:
            shell._showtraceback(type(error), error, lines)
        else:
            own(*args, **kwargs)

    shell.showtraceback = show


def interrupt_error(failures: list[Failed], busy: list[str]) -> KeyboardInterrupt:
    """Return the error that Ctrl-C raises, shown with the cell's traceback on each worker and those that still run."""
    text = f"the cell {_not_ended(busy)}" if busy else "the cell was interrupted"
    lines = _joined_tracebacks(failures)
    last = [f"KeyboardInterrupt: {text}"] if busy or not lines else []
    return with_rendering(KeyboardInterrupt(text), [*lines, *last])


def timeout_error(seconds: float, failures: list[Failed], busy: list[str]) -> RpcTimeoutError:
    """Return the error of a cell that passed its deadline, shown like that of `interrupt_error`."""
    text = f"the cell ran for more than {seconds:g} s and was interrupted"
    if busy:
        text += f"; it {_not_ended(busy)}"
    return with_rendering(RpcTimeoutError(text), [*_joined_tracebacks(failures), f"RpcTimeoutError: {text}"])


def _not_ended(busy: list[str]) -> str:
    # This is the last word in the notebook, and a cell may end a moment later.
    still = f"had not ended yet on {', '.join(busy)}: `%cluster status` says whether it still runs"
    return f"{still}, and only then cluster.restart({busy[0]!r}) would end it"


def worker_lost_error(error: WorkerLostError, worker: str, remedy: str = "") -> WorkerLostError:
    """Add the consequences to an error, and advice: `remedy` if it is given, else to restart the worker."""
    # The error may be that of a cell which itself lost another worker.
    if not str(error).startswith(f"{worker} "):
        return error
    again = f"cluster.restart({worker!r}) starts it again; with replay=True it runs its cells again, too"
    gone = "Its variables are lost, and the values of RRefs that it owned."
    advised_error = WorkerLostError(f"{error}\n{gone} {remedy or again}.")
    advised_error.maybe_executed, advised_error.__cause__ = error.maybe_executed, error.__cause__
    return advised_error


@contextlib.contextmanager
def short_tracebacks() -> Iterator[None]:
    """Show errors about workers that are raised inside without a traceback, which would have only our frames."""
    try:
        yield
    except TargetError as error:  # a mistake in the line of a magic
        from IPython.core.error import UsageError

        raise UsageError(str(error)) from None
    except (RpcError, RuntimeError) as error:
        if hasattr(error, "_render_traceback_"):
            raise  # a cell's own error, already rendered
        raise with_rendering(error, [error_message(error)]) from None


def _joined_tracebacks(failures: list[Failed]) -> list[str]:
    """Join the tracebacks under the names of their workers; repeat an equal error in one line only."""
    if len(failures) == 1:
        return failures[0].lines or [error_message(failures[0].error)]
    lines, seen = [], set()
    is_loss = bool(failures) and isinstance(failures[0].error, WorkerLostError)
    for failed in failures:
        said = error_message(failed.error)
        if is_loss and _is_of_communication(failed.error):
            kind = type(failed.error).__name__
            lines.append(f"[{failed.worker}] {kind} in a collective, too: %debug {failed.worker} shows where.")
        elif said in seen or not failed.lines:
            lines.append(f"[{failed.worker}] {said}")
        else:
            lines += [f"[{failed.worker}]", *failed.lines]
        seen.add(said)
    return lines


def _is_of_communication(error: Exception) -> bool:
    """Return whether torch's process group has failed; gloo's errors have no class of their own."""
    return type(error).__module__ == "torch.distributed" or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def error_message(error: BaseException | None) -> str:
    """Return the error's class and text, like the last line of a traceback."""
    return f"{type(error).__name__}: {error}"
