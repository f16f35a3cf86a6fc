"""The IPython shell in which a worker runs cells: magics, `await`, rich display and tracebacks as in a notebook.

`CellShell` runs a cell on every kind of worker; `WorkerShell` is the shell of a process worker. Its namespace is the
worker's `__main__`, so a call by reference finds the functions that cells define. Displays and results go to the output
stream as mime bundles (JSON text); the traceback of a failed cell is in its outcome.

Completion and inspection (Tab, Shift-Tab) use the names of this shell, on a pool thread, also while a cell runs, one
request at a time. They use IPython's completer, which looks at live objects, without jedi, which is not thread-safe.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from rpcbench.base.errors import count_noun
from rpcbench.base.rebuild import add_note
from rpcbench.base.sources import kept_name
from rpcbench.cells.output import OutputStream, json_with_bytes
from rpcbench.cells.tracebacks import fold_causes, fold_torch, limit_colours, user_frames
from rpcbench.runtime import gpus
from rpcbench.runtime.current import current_agent

if TYPE_CHECKING:
    from IPython.core.completer import IPCompleter

    from rpcbench.runtime.agent import Agent

_PATIENCE = 0.5  # seconds that a request waits for the one before it; its client has given up by then
_TYPES, _PARTS = "_jupyter_types_experimental", ("start", "end", "text", "type", "signature")

Reply = dict[str, Any]
"""Jupyter's `complete_reply` or `inspect_reply`. Offsets count characters of the code in the request."""


def complete_code(code: str, cursor: int) -> Reply | None:
    """Return completions at the cursor, or None if no cell has run yet. Called through RPC."""
    with current_agent().part(Names).exclusive_access() as names:
        return names.complete_code(code, cursor) if names else None


def inspect_name(code: str, cursor: int, detail: int) -> Reply | None:
    """Describe the name at the cursor, with its source if `detail` is 1; None as in `complete_code`."""
    with current_agent().part(Names).exclusive_access() as names:
        return names.inspect_name(code, cursor, detail) if names else None


class Names:
    """Completion and inspection in the shell of this process."""

    def __init__(self, _agent: Agent) -> None:
        self._lock = threading.Lock()  # one request at a time: the completer keeps state
        self._shell_and_completer: tuple[InteractiveShell, IPCompleter] | None = None

    @contextlib.contextmanager
    def exclusive_access(self) -> Iterator[Names | None]:
        """Yield self once no other request runs, or None if there is no shell. Raises TimeoutError after a while."""
        if not self._lock.acquire(timeout=_PATIENCE):
            raise TimeoutError("this worker still works on another completion request")
        try:
            yield self if self._prepare_completer() else None
        finally:
            self._lock.release()

    def _prepare_completer(self) -> bool:
        from IPython.core.completer import IPCompleter

        if self._shell_and_completer is None and InteractiveShell.initialized():
            shell = InteractiveShell.instance()
            # Never left: two threads that leave it at once could remove `get_ipython` from one that still runs.
            shell.builtin_trap.__enter__()
            spaces: dict[str, Any] = {"namespace": shell.user_ns, "global_namespace": shell.user_global_ns}
            completer = cast(Any, IPCompleter)(shell=shell, **spaces, parent=shell, use_jedi=False)
            completer.custom_completers = shell.Completer.custom_completers
            self._shell_and_completer = shell, completer
        return self._shell_and_completer is not None

    def complete_code(self, code: str, cursor: int) -> Reply:
        from IPython.core.completer import provisionalcompleter, rectify_completions

        assert self._shell_and_completer is not None
        with provisionalcompleter():
            found = list(rectify_completions(code, self._shell_and_completer[1].completions(code, cursor)))
        types = _without_dots([{part: getattr(completion, part) for part in _PARTS} for completion in found])
        return {
            "status": "ok",
            "matches": [match["text"] for match in types],
            "cursor_start": types[0]["start"] if types else cursor,
            "cursor_end": types[0]["end"] if types else cursor,
            "metadata": {_TYPES: types},
        }

    def inspect_name(self, code: str, cursor: int, detail: int) -> Reply:
        from IPython.utils.tokenutil import token_at_cursor

        assert self._shell_and_completer is not None
        try:
            name = token_at_cursor(code, cursor)
            data = cast(Any, self._shell_and_completer[0]).object_inspect_mime(name, detail_level=detail)
        except KeyError:
            return {"status": "ok", "found": False, "data": {}, "metadata": {}}
        return {"status": "ok", "found": True, "data": {"text/plain": data["text/plain"]}, "metadata": {}}


def _without_dots(matches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return attributes without the leading dot, as jedi returns them and front ends expect them."""
    if not all(match["text"].startswith(".") for match in matches):
        return matches
    return [{**match, "start": match["start"] + 1, "text": match["text"][1:]} for match in matches]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a cell: the requested values, or an error."""

    values: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    traceback: tuple[str, ...] = ()  # rendered lines, with ANSI colours
    number: int | None = None  # of the prompt


class NamedCompiler(CachingCompiler):
    """A compiler that names this worker's cells in tracebacks: `Cell worker1[3], line 2`."""

    worker = ""

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        if name in self._filename_map:
            return "Cell", f"{self.worker}[{self._filename_map[name]}]"
        kept = kept_name(name)  # of a cell of the notebook, whose function was sent here
        return tuple(kept.split(" ", 1)) if kept else None  # type: ignore[return-value]


class WorkerDisplay(DisplayPublisher):
    """`display()`, its updates and `clear_output()` on a worker."""

    output_stream: OutputStream

    def publish(
        self,
        data: Any,
        metadata: Any = None,
        source: Any = None,
        *,
        transient: Any = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        self._validate_data(data, metadata)  # type: ignore[no-untyped-call]
        bundle = {"data": data, "metadata": metadata or {}, "transient": transient or {}}
        self.output_stream.send_item("update" if update else "display", _encode_bundle(bundle))

    def clear_output(self, wait: bool = False) -> None:
        self.output_stream.send_item("clear", json.dumps(bool(wait)))


class ResultHook(DisplayHook):
    """The display of the value of a cell's last expression."""

    output_stream: OutputStream
    held_back = False  # the client wants the value itself instead

    def write_output_prompt(self) -> None:
        pass

    def finish_displayhook(self) -> None:
        self._is_active = False

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        if not self.held_back:
            self.output_stream.send_item("result", _encode_bundle({"data": format_dict, "metadata": md_dict or {}}))


class CellShell(InteractiveShell):
    """IPython's shell while it runs a cell of the notebook. One per process, like `get_ipython()` and `__main__`."""

    compile: NamedCompiler
    display_pub: WorkerDisplay
    displayhook: ResultHook
    _left_out = 0  # frames of torch, in the traceback that is rendered now
    _shown: tuple[BaseException, tuple[str, ...]] | None = None  # the last error that was rendered, and its lines

    async def execute_worker_cell(self, code: str, push: dict[str, Any], want: tuple[str, ...], value: bool) -> Outcome:
        """Set the variables in `push`, run a cell, and return those in `want`; the arguments are as in `Cell`."""
        self._shown = None
        self.user_ns.update(push)
        self.displayhook.held_back = value
        number = self.execution_count
        result = await self._execute_cell(code)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            return Outcome(error=error, traceback=self._traceback_lines(error), number=number)
        missing = [name for name in want if name not in self.user_ns]
        if missing:
            error = NameError(f"{self.compile.worker} has no variable {missing[0]!r} to bring back")
            return Outcome(error=error, traceback=self._traceback_lines(error), number=number)
        values = {name: self.user_ns[name] for name in want}
        return Outcome({**values, "": result.result} if value else values, number=number)

    async def _execute_cell(self, code: str) -> Any:
        """Run a cell and return IPython's result. An `await` in it runs on a loop of its own."""
        return self.run_cell(code, store_history=True)  # type: ignore[no-untyped-call]

    def _traceback_lines(self, error: BaseException) -> tuple[str, ...]:
        if isinstance(error, UsageError):
            return ()  # the client's IPython shows these in its own way
        if self._shown is not None and self._shown[0] is error:
            return self._shown[1]
        return tuple(self.InteractiveTB.get_exception_only(type(error), error))  # type: ignore[no-untyped-call]

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Like IPython's, without this package's frames."""
        kind, error, frames = cast(Any, exc_tuple or sys.exc_info())
        gpus.explain(error, self.compile.worker)
        frames = user_frames(frames)
        if isinstance(error, BaseExceptionGroup):  # IPython would print its lines instead of passing them on
            below = frames and frames.tb_next  # the topmost frame is IPython's
            text = "".join(traceback.format_exception(kind, error, below))
            self._showtraceback(type(error), error, text.splitlines())
        else:
            folded, left_out = fold_torch(frames)
            with limit_colours(self.InteractiveTB), fold_causes(error) as more:
                self._left_out = left_out + more
                super().showtraceback((kind, error, folded), *args, **kwargs)
            sys.last_traceback = frames  # for `%debug`, which shows all

    def _format_exception_for_storage(self, exception: BaseException, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what IPython's history keeps of an error: a second rendering would take as long as the first one."""
        if self._shown is None or self._shown[0] is not exception:
            kept: dict[str, Any] = super()._format_exception_for_storage(exception, *args, **kwargs)  # type: ignore[no-untyped-call]
            return kept
        return {"ename": type(exception).__name__, "evalue": str(exception), "traceback": list(self._shown[1])}

    def _showtraceback(self, etype: Any, evalue: BaseException, stb: list[str]) -> None:
        """Keep the traceback of the cell's own error; print one of `%tb` or of a callback."""
        if self._left_out:
            frames = count_noun(self._left_out, "frame")
            stb = [*stb, f"{frames} of torch left out: %debug {self.compile.worker}, then w, shows all."]
        running = self.displayhook.exec_result
        own = running is None or running.error_in_exec is evalue
        if own and threading.current_thread() is threading.main_thread():
            self._shown = evalue, tuple(stb)
        else:
            InteractiveShell._showtraceback(self, etype, evalue, stb)

    def show_usage_error(self, exc: BaseException) -> None:
        """Show nothing here: the client shows the error."""

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: a worker has no window that needs an event loop, and inline figures need none."""

    def ask_exit(self) -> None:
        raise RuntimeError("exit() does not end a worker: use cluster.restart(name), or %cluster stop")


_NO_LOOP = "no running event loop"  # asyncio's words
_LOOP_HINT = (
    "a process worker has an event loop only while a cell awaits: write `await asyncio.sleep(0)` in this cell, and "
    "await its tasks. A kernel worker has one that goes on between cells: %cluster start 2 --kind kernel"
)


class WorkerShell(CellShell):
    """The shell of a process worker, without a terminal."""

    compiler_class = Type(NamedCompiler)
    display_pub_class = Type(WorkerDisplay)
    displayhook_class = Type(ResultHook)

    @classmethod
    def start_worker_shell(cls, worker: str, output_stream: OutputStream) -> WorkerShell:
        """Make the shell of this process; `worker` is the name that tracebacks show."""
        config = Config()
        config.HistoryManager.enabled = False  # no history database: all workers would share its file
        warnings.filterwarnings("ignore", "To exit: use")  # IPython's, when a cell raises SystemExit
        shell: WorkerShell = cls.instance(config=config, user_module=sys.modules["__main__"])
        vars(sys).pop("ps1", None)  # IPython's prompt: libraries, as Lightning, take it for one of a person
        shell.compile.worker = worker
        shell.display_pub.output_stream = output_stream
        shell.displayhook.output_stream = output_stream
        return shell

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        error = exc_tuple[1] if exc_tuple else sys.exception()
        if isinstance(error, RuntimeError) and str(error) == _NO_LOOP:
            add_note(error, _LOOP_HINT)
        super().showtraceback(exc_tuple, *args, **kwargs)


def _encode_bundle(bundle: dict[str, Any]) -> str:
    """Return a mime bundle as JSON, as in a notebook file."""
    return json_with_bytes(bundle, "a display holds a {}, which cannot be shown in a notebook")
