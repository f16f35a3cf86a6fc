"""What Tab and Shift-Tab ask of a worker: completions and descriptions of the names that it has.

Rules
- The answer comes from the shell that runs the cells of this process, on a thread of the pool: also while a cell runs.
- jedi is not used: it is not made for threads. IPython's own completer looks at the living objects.
- One question at a time; one that cannot begin soon is given up, as its asker has gone on by then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

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
