"""What the JupyterLab extension asks of a kernel: the comm target `rpcbench`.

Rules
- A page opens one comm for each thing that it wants, with `{"do": …}`. Of "watch" it hears the present state and then
  each change; "panel" answers with what to draw, and stays open as long as its tab. Any other is closed with what came
  of it: `{"text"}`, or `{"error"}` in words for the user.
- Pages ask on a subshell, so while a cell runs, too. Nothing is done on the thread that hears: each deed has its own,
  and those that change workers wait for one another. An interrupt waits for none.
- What a page can do here is what `%cluster` and `%panel` do; the sentences are theirs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import comm
from IPython.core.error import UsageError

from rpcbench.agent import current
from rpcbench.launch.cluster import Cluster, Progress
from rpcbench.launch.mirrors import heard_where_asked
from rpcbench.notebook.commands import NONE_RUNS, Commands, Voice, running
from rpcbench.notebook.needs import needs
from rpcbench.notebook.standing import Standing, State
from rpcbench.notebook.watchers import Watchers

logger = logging.getLogger(__name__)

TARGET = "rpcbench"
SPEAKS = 1
"""The version of these words; a page of another one says so instead of guessing."""
_PLAIN = ("restart", "stop", "use")


class Sidebar:
    """Answers the pages of one kernel, from when it is made until `close`. `auto()`: the targets of `%autoremote`."""

    def __init__(self, commands: Commands, auto: Callable[[], str]) -> None:
        self._commands = commands
        self._auto = auto
        self._standing = Standing()
        self._watchers = Watchers(self.state)
        self._known: weakref.WeakSet[Cluster] = weakref.WeakSet()
        self._changing = threading.Lock()
        self._doing: dict[int, str] = {}
        self._numbers = itertools.count()
        self._panels: dict[str, Any] = {}
        comm.get_comm_manager().register_target(TARGET, self.opened)

    def close(self) -> None:
        """Answer no more; pages that watch are told."""
        comm.get_comm_manager().unregister_target(TARGET, self.opened)
        self._watchers.close()
        for comm_id in list(self._panels):
            self._shut(comm_id)

    def state(self) -> State:
        """What pages that watch see."""
        clusters, chosen = self._commands.present(), running()
        for one in [one for one in clusters.values() if one not in self._known]:
            self._known.add(one)
            one.agent.on_member(lambda *_: self._watchers.changed())
        return {
            "speaks": SPEAKS,
            "clusters": self._standing.at(clusters, chosen),
            "auto": self._auto(),
            "doing": list(self._doing.values()),
            "panels": _panels(),
        }

    def opened(self, page: Any, message: dict[str, Any]) -> None:
        """A page wants something. On the thread of its subshell."""
        heard_where_asked(page)
        match message["content"]["data"]:
            case {"do": "watch"}:
                page.on_close(lambda _: self._watchers.remove(page.comm_id))
                self._watchers.add(page)
            case {"do": "stay", "watch": str(watch)}:
                page.close({"there": self._watchers.stay(watch)})
            case {"do": "panel", "name": str(name)}:
                page.on_close(lambda _: self._shut(page.comm_id))
                self._beside(page, functools.partial(self._open, page, name))
            case asked:
                self._beside(page, functools.partial(self._answer, page, asked))

    # -- deeds, each on a thread of its own
    def _beside(self, page: Any, deed: Callable[[], object]) -> None:
        def attempt() -> None:
            try:
                deed()
            except Exception as error:  # noqa: BLE001  (whatever it is, the page has asked and must hear of it)
                page.close({"error": _words(error)})
            self._watchers.changed()

        threading.Thread(target=attempt, name="rpcbench-deed", daemon=True).start()

    def _answer(self, page: Any, asked: dict[str, Any]) -> None:
        warnings: list[str] = []
        text = self._do(asked, warnings.append)
        page.close({"text": "\n".join([*warnings, text])})

    def _do(self, asked: dict[str, Any], warn: Callable[[str], object]) -> str:
        match asked:
            case {"do": "start", "size": int(size)} if size > 0:
                with self._told(f"Starting {_count(size)}") as told:
                    return self._commands.start(size, voice=Voice(told, warn))
            case {"do": "scale", "of": str(name), "size": int(size)} if size > 0:
                with self._told(f"Making it {_count(size)}") as told, self._of(name):
                    return self._commands.scale(size, Voice(told, warn))
            case {"do": "interrupt", "of": str(name), "words": [*words]}:
                with self._of(name):
                    return self._run("interrupt", words)
            case {"do": str(action), "of": str(name), "words": [*words]} if action in _PLAIN:
                with self._told(" ".join([f"%cluster {action}", *map(str, words)])), self._of(name):
                    return self._run(action, words)
        raise UsageError(f"this kernel's rpcbench knows no {asked.get('do')!r}: the page's is another version")

    def _run(self, action: str, words: Sequence[Any]) -> str:
        return str(self._commands.by_name[action]([str(word) for word in words]))

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[Callable[[int], Progress]]:
        """One change after the other; meanwhile pages see that it is done, and how far it is."""
        number = next(self._numbers)

        def say(text: str) -> None:
            self._doing[number] = text
            self._watchers.changed()

        try:
            say(f"{what} …")
            with self._changing:
                yield lambda of: lambda serve, _: say(f"{what}: {serve} of {of} serve")
        finally:
            del self._doing[number]

    def _of(self, name: str) -> contextlib.AbstractContextManager[None]:
        """What is done inside is done to the cluster of that name, whichever is the current one."""
        found = self._commands.present().get(name)
        if found is None:
            raise UsageError(f"no cluster {name} runs" if self._commands.present() else NONE_RUNS)
        return current.using(found.agent)

    # -- panels
    def _open(self, page: Any, name: str) -> None:
        with needs("a panel", "ipywidgets", "anywidget"):
            from rpcbench.panels import panel

        self._panels[page.comm_id] = made = panel(name)
        data, *_ = made._repr_mimebundle_() or ({},)
        page.send({"bundle": data})

    def _shut(self, comm_id: str) -> None:
        made = self._panels.pop(comm_id, None)
        if made is not None:
            made.close()


def _panels() -> list[str]:
    """Names of those that can be opened; none where widgets are not installed."""
    try:
        from rpcbench.panels import PANELS
    except ModuleNotFoundError:
        return []
    return list(PANELS)


def _count(size: int) -> str:
    return f"{size} worker{'s' if size != 1 else ''}"


def _words(error: Exception) -> str:
    """An error in words for the user: a mistake needs no name."""
    return str(error) if isinstance(error, UsageError | ValueError) else f"{type(error).__name__}: {error}"
