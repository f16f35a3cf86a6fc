"""What the JupyterLab extension asks of a kernel: the comm target `rpcbench`.

Rules
- A page opens one comm for each thing that it wants, with `{"do": …}`. Of "watch" it hears the present state and then
  each change; "panel" answers with what to draw, and stays open as long as its tab. Any other is closed with what came
  of it: `{"text"}`, or `{"error"}` in words for the user.
- Pages ask on a subshell, so while a cell runs, too. Nothing is done on the thread that hears: each deed has its own.
- What is done to workers goes through `launch.actions`, as what a panel's buttons do: what runs, all pages see. The
  sentences are those of `%cluster`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import comm
from IPython.core.error import UsageError

from rpcbench.base.errors import counted
from rpcbench.launch.actions import ALL, Actions
from rpcbench.launch.cluster import Progress
from rpcbench.launch.mirrors import heard_where_asked
from rpcbench.launch.workforce import Workforce
from rpcbench.notebook.commands import Commands, Voice, running, warn_of_room
from rpcbench.notebook.needs import needs
from rpcbench.notebook.sentences import NONE_RUNS, interrupted, restarted, sentence
from rpcbench.notebook.standing import Standing, State
from rpcbench.notebook.watchers import Watchers

logger = logging.getLogger(__name__)

TARGET = "rpcbench"
SPEAKS = 2
"""The version of these words; a page of another one says so instead of guessing."""


class Sidebar:
    """Answers the pages of one kernel, from when it is made until `close`. `auto()`: the targets of `%autoremote`."""

    def __init__(self, commands: Commands, auto: Callable[[], str]) -> None:
        self._commands = commands
        self._auto = auto
        self._standing = Standing()
        self._watchers = Watchers(self.state)
        self._known: weakref.WeakSet[Workforce] = weakref.WeakSet()
        self._alone = threading.Lock()  # of two that start a cluster, the second finds that of the first
        self._starting = ""
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
            "doing": [*filter(None, [self._starting]), *(what for one in clusters.values() for what in _doing(one))],
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
                with self._told(f"Starting {counted(size, 'worker')}") as told:
                    return self._commands.start(size, voice=Voice(told, warn))
            case {"do": "use", "of": str(name)}:
                return str(self._commands.by_name["use"]([name]))
            case {"do": "act", "of": str(name), "action": str(action), "target": str(target)}:
                return self._act(self._found(name), action, target, warn)
        raise UsageError(f"this kernel's rpcbench knows no {asked.get('do')!r}: the page's is another version")

    def _act(self, found: Workforce, action: str, target: str, warn: Callable[[str], object]) -> str:
        names = found.workers if target == ALL else [target]
        if action == "scale" and int(target) > len(found.workers):
            warn_of_room(int(target), found.kind, warn)
        done = found.agent.part(Actions).begin(action, target)
        self._watchers.changed()
        done.result()
        match action:
            case "scale":
                return sentence(found)
            case "stop":
                return self._commands.stopped(found)
        return restarted(names) if action == "restart" else interrupted(names)

    def _found(self, name: str) -> Workforce:
        there = self._commands.present()
        if name not in there:
            raise UsageError(f"no cluster {name} runs" if there else NONE_RUNS)
        return there[name]

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[Callable[[int], Progress]]:
        """Meanwhile pages see that it is done, and how far it is."""

        def say(text: str) -> None:
            self._starting = text
            self._watchers.changed()

        with self._alone:
            try:
                say(f"{what} …")
                yield lambda of: lambda serve, _: say(f"{what}: {serve} of {of} serve")
            finally:
                self._starting = ""

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


def _doing(one: Workforce) -> list[str]:
    """What is being done to its workers, whoever asked for it."""
    rows = one.agent.part(Actions).table().values()
    return [f"%cluster {row['action']} {row['target']} …" for row in rows if row["state"] == "runs"]


def _words(error: Exception) -> str:
    """An error in words for the user: a mistake needs no name."""
    return str(error) if isinstance(error, UsageError | ValueError) else f"{type(error).__name__}: {error}"
