"""The IPython shell in which a worker runs cells: magics, `await`, rich display and tracebacks as in a notebook.

`CellShell` is how a cell runs on every kind of worker, `WorkerShell` the shell of a process that has no other. Its
namespace is the worker's `__main__`, so a function that a cell defines is the one that a call by reference finds.
Nothing is printed on the terminal: displays and results go to the outbox as mime bundles (JSON text), the traceback
of a failed cell comes back in its outcome.

Tab and Shift-Tab are answered from the shell that runs the cells of this process, on a thread of the pool: also while a
cell runs. jedi is not used: it is not made for threads. IPython's own completer looks at the living objects. One
question at a time; one that cannot begin soon is given up, as its asker has gone on by then.
"""

from __future__ import annotations

import base64
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

from rpcbench.cells.output import OutputStream
from rpcbench.cells.tracebacks import of_user
from rpcbench.runtime.current import current

if TYPE_CHECKING:
    from IPython.core.completer import IPCompleter
    from IPython.core.interactiveshell import InteractiveShell

    from rpcbench.runtime.agent import Agent


_PATIENCE = 0.5
_TYPES, _PARTS = "_jupyter_types_experimental", ("start", "end", "text", "type", "signature")

Reply = dict[str, Any]
"""As Jupyter's `complete_reply` and `inspect_reply`: offsets count characters of the code that was sent along."""


def complete(code: str, cursor: int) -> Reply | None:
    """On a worker, through a call: what may stand at the cursor. None where no cell has run yet."""
    with current().part(Names).free() as names:
        return names.complete(code, cursor) if names else None


def inspect(code: str, cursor: int, detail: int) -> Reply | None:
    """As `complete`: what the name at the cursor is; `detail` 1 shows its source, too."""
    with current().part(Names).free() as names:
        return names.inspect(code, cursor, detail) if names else None


class Names:
    """The names of the shell of this process."""

    def __init__(self, _agent: Agent) -> None:
        self._lock = threading.Lock()
        self._made: tuple[InteractiveShell, IPCompleter] | None = None

    @contextlib.contextmanager
    def free(self) -> Iterator[Names | None]:
        """Itself once nobody else asks; None where there is no shell. TimeoutError where it takes too long."""
        if not self._lock.acquire(timeout=_PATIENCE):
            raise TimeoutError("this worker still looks for the answer to another question")
        try:
            yield self if self._ready() else None
        finally:
            self._lock.release()

    def _ready(self) -> bool:
        from IPython.core.completer import IPCompleter
        from IPython.core.interactiveshell import InteractiveShell

        if self._made is None and InteractiveShell.initialized():
            shell = InteractiveShell.instance()
            # For good: two threads that leave it at once could take `get_ipython` from the one that still runs.
            shell.builtin_trap.__enter__()
            spaces: dict[str, Any] = {"namespace": shell.user_ns, "global_namespace": shell.user_global_ns}
            completer = cast(Any, IPCompleter)(shell=shell, **spaces, parent=shell, use_jedi=False)
            completer.custom_completers = shell.Completer.custom_completers
            self._made = shell, completer
        return self._made is not None

    def complete(self, code: str, cursor: int) -> Reply:
        from IPython.core.completer import provisionalcompleter, rectify_completions

        assert self._made is not None
        with provisionalcompleter():
            found = list(rectify_completions(code, self._made[1].completions(code, cursor)))
        types = _without_dots([{part: getattr(completion, part) for part in _PARTS} for completion in found])
        return {
            "status": "ok",
            "matches": [match["text"] for match in types],
            "cursor_start": types[0]["start"] if types else cursor,
            "cursor_end": types[0]["end"] if types else cursor,
            "metadata": {_TYPES: types},
        }

    def inspect(self, code: str, cursor: int, detail: int) -> Reply:
        from IPython.utils.tokenutil import token_at_cursor

        assert self._made is not None
        try:
            name = token_at_cursor(code, cursor)
            data = cast(Any, self._made[0]).object_inspect_mime(name, detail_level=detail)
        except KeyError:
            return {"status": "ok", "found": False, "data": {}, "metadata": {}}
        return {"status": "ok", "found": True, "data": {"text/plain": data["text/plain"]}, "metadata": {}}


def _without_dots(matches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names of attributes as jedi gives them, and as front ends show them: without the dot before them."""
    if not all(match["text"].startswith(".") for match in matches):
        return matches
    return [{**match, "start": match["start"] + 1, "text": match["text"][1:]} for match in matches]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cell ended: the values that were asked for, or an error with its rendered traceback (ANSI lines)."""

    values: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    traceback: tuple[str, ...] = ()


class NamedCompiler(CachingCompiler):
    """Names cells in tracebacks after the worker: `Cell worker1[3], line 2`."""

    worker = ""

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        if name not in self._filename_map:
            return None
        return "Cell", f"{self.worker}[{self._filename_map[name]}]"


class Publisher(DisplayPublisher):
    """`display()`, its updates and `clear_output()` on a worker."""

    outbox: OutputStream

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
        self.outbox.show("update" if update else "display", _encoded(bundle))

    def clear_output(self, wait: bool = False) -> None:
        self.outbox.show("clear", json.dumps(bool(wait)))


class ResultHook(DisplayHook):
    """The value of a cell's last expression; held back when the asker wants it as a value."""

    outbox: OutputStream
    held_back = False

    def write_output_prompt(self) -> None:
        pass

    def finish_displayhook(self) -> None:
        self._is_active = False

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        if not self.held_back:
            self.outbox.show("result", _encoded({"data": format_dict, "metadata": md_dict or {}}))


class CellShell(InteractiveShell):
    """IPython's shell while it runs a cell of the notebook. One per process, as `get_ipython()` and `__main__` are."""

    compile: NamedCompiler
    display_pub: Publisher
    displayhook: ResultHook
    _shown: tuple[BaseException, tuple[str, ...]] | None = None

    async def run(self, code: str, push: dict[str, Any], want: tuple[str, ...], value: bool) -> Outcome:
        """Run a cell after setting the variables in `push`; bring back those in `want`.

        With `value`, the last expression is not shown but brought back, under the name "".
        """
        self._shown = None
        self.user_ns.update(push)
        self.displayhook.held_back = value
        result = await self._execute(code)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            return Outcome(error=error, traceback=self._rendered(error))
        missing = [name for name in want if name not in self.user_ns]
        if missing:
            error = NameError(f"{self.compile.worker} has no variable {missing[0]!r} to bring back")
            return Outcome(error=error, traceback=self._rendered(error))
        values = {name: self.user_ns[name] for name in want}
        return Outcome({**values, "": result.result} if value else values)

    async def _execute(self, code: str) -> Any:
        """IPython's result of a cell. What it awaits runs on a loop of its own."""
        return self.run_cell(code, store_history=True)  # type: ignore[no-untyped-call]

    def _rendered(self, error: BaseException) -> tuple[str, ...]:
        if isinstance(error, UsageError):
            return ()
        if self._shown is not None and self._shown[0] is error:
            return self._shown[1]
        return tuple(self.InteractiveTB.get_exception_only(type(error), error))  # type: ignore[no-untyped-call]

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """As IPython's, without frames of ours, and with the lines of a group handed over instead of printed."""
        kind, error, frames = cast(Any, exc_tuple or sys.exc_info())
        frames = of_user(frames)
        if isinstance(error, BaseExceptionGroup):
            below = frames and frames.tb_next  # the topmost frame is IPython's
            text = "".join(traceback.format_exception(kind, error, below))
            self._showtraceback(type(error), error, text.splitlines())
        else:
            super().showtraceback((kind, error, frames), *args, **kwargs)

    def _showtraceback(self, etype: Any, evalue: BaseException, stb: list[str]) -> None:
        """Keep the traceback of the cell's own error; print one that it asked to see, or of a callback."""
        running = self.displayhook.exec_result
        own = running is None or running.error_in_exec is evalue
        if own and threading.current_thread() is threading.main_thread():
            self._shown = evalue, tuple(stb)
        else:
            InteractiveShell._showtraceback(self, etype, evalue, stb)

    def show_usage_error(self, exc: BaseException) -> None:
        """The asker shows it."""

    def enable_gui(self, gui: Any = None) -> None:
        """A worker has no window to run an event loop for; inline figures need none."""

    def ask_exit(self) -> None:
        raise RuntimeError("exit() does not end a worker: use cluster.restart(name), or %cluster stop")


class WorkerShell(CellShell):
    """The shell of a process worker: without a terminal."""

    compiler_class = Type(NamedCompiler)
    display_pub_class = Type(Publisher)
    displayhook_class = Type(ResultHook)

    @classmethod
    def start(cls, worker: str, outbox: OutputStream) -> WorkerShell:
        """The shell of this process; `worker` is the name that tracebacks show."""
        config = Config()
        config.HistoryManager.enabled = False
        warnings.filterwarnings("ignore", "To exit: use")
        shell: WorkerShell = cls.instance(config=config, user_module=sys.modules["__main__"])
        shell.compile.worker = worker
        shell.display_pub.outbox = outbox
        shell.displayhook.outbox = outbox
        return shell


def _encoded(bundle: dict[str, Any]) -> str:
    """A mime bundle as JSON; bytes become base64 as in a notebook file. TypeError if a value is not JSON's."""
    return json.dumps(bundle, default=_base64)


def _base64(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    raise TypeError(f"a display holds a {type(value).__name__}, which cannot be shown in a notebook")
