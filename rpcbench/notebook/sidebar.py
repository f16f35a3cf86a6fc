"""What the JupyterLab extension asks of a kernel: the comm target `rpcbench`.

Rules
- A page opens one comm for each thing that it wants, with `{"do": …}`. Of "watch" it hears the present state and then
  each change; "panel" answers with what to draw, and stays open as long as its tab. Any other is closed with what came
  of it: `{"text"}`, or `{"error"}` in words for the user.
- Pages ask on a subshell, so while a cell runs, too. Nothing is done on the thread that hears: each deed has its own.
- What is done to workers goes through `launch.actions`, as what a panel's buttons do: what runs, all pages see. The
  sentences are those of `%cluster`.

`Watchers` are the pages that watch a notebook's clusters, and the thread that tells them of changes.
- A page hears the present state when it comes, and again after each change, at most once a `period`, or at once after
  `changed()`; never on the kernel's event loop, which starves while a cell runs.
- While no page watches there is no thread. A page that has gone without a word is forgotten `lease` seconds after it
  was last heard of. After `close` nothing more is said.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import comm
from IPython.core.error import UsageError

from rpcbench.base.conditions import Changes
from rpcbench.base.errors import counted
from rpcbench.cells.widgets import heard_where_asked
from rpcbench.launch.actions import ALL, Actions
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.launch.cluster import Progress
from rpcbench.notebook import require_extra
from rpcbench.notebook.cluster_magic import (
    NONE_RUNS,
    ClusterState,
    ClusterSummary,
    Commands,
    Voice,
    interrupted,
    restarted,
    running,
    sentence,
    warn_of_room,
)

logger = logging.getLogger(__name__)

PageState = dict[str, Any]


class Page(Protocol):
    """The comm of one page."""

    comm_id: str

    def send(self, data: PageState) -> object: ...
    def close(self, data: PageState) -> object: ...


@dataclass(slots=True)
class _Watcher:
    page: Page
    heard: float = field(default_factory=time.monotonic)
    told: PageState | None = None


class Watchers:
    """`look()` gives the present state, a dict that nobody changes later."""

    def __init__(self, look: Callable[[], PageState], period: float = 1.0, lease: float = 150.0) -> None:
        self._look = look
        self._period = period
        self._lease = lease
        self._lock = threading.Lock()
        self._changes = Changes()
        self._stale = False
        self._watching: dict[str, _Watcher] = {}
        self._thread: threading.Thread | None = None

    def add(self, page: Page) -> None:
        """Tell it the present state, and go on."""
        with self._lock:
            self._watching[page.comm_id] = _Watcher(page)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rpcbench-sidebar", daemon=True)
                self._thread.start()
        self.changed()

    def stay(self, comm_id: str) -> bool:
        """That page is still there; False if it has been forgotten."""
        with self._lock:
            watcher = self._watching.get(comm_id)
            if watcher is not None:
                watcher.heard = time.monotonic()
            return watcher is not None

    def remove(self, comm_id: str) -> None:
        """That page has closed its comm."""
        with self._lock:
            self._watching.pop(comm_id, None)
        self.changed()

    def changed(self) -> None:
        """Look again now. From any thread."""
        self._stale = True
        self._changes.tell()

    def close(self) -> None:
        """Nobody watches any more; the pages are told."""
        with self._lock:
            left, self._watching = list(self._watching.values()), {}
            thread = self._thread
        self.changed()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        for watcher in left:
            watcher.page.close({})

    def _run(self) -> None:
        while watching := self._present():
            self._stale = False  # before the look: what changes meanwhile is seen next time
            state = self._state()
            for watcher in watching:
                if watcher.told != state:
                    watcher.told = state
                    self._tell(watcher, state)
            self._changes.wait_for(lambda: self._stale, self._period)

    def _present(self) -> list[_Watcher]:
        """Those that are still there; with the last one the thread goes."""
        oldest = time.monotonic() - self._lease
        with self._lock:
            late = [key for key, watcher in self._watching.items() if watcher.heard < oldest]
            gone = [self._watching.pop(key) for key in late]
            watching = list(self._watching.values())
            if not watching:
                self._thread = None
        for watcher in gone:
            watcher.page.close({})
        return watching

    def _state(self) -> PageState:
        try:
            return self._look()
        except Exception as error:
            logger.exception("the clusters could not be looked at")
            return {"problem": f"{type(error).__name__}: {error}"}

    def _tell(self, watcher: _Watcher, state: PageState) -> None:
        try:
            watcher.page.send(state)
        except Exception:
            logger.exception("a page could not be told of the clusters")
            self.remove(watcher.page.comm_id)


TARGET = "rpcbench"
SPEAKS = 2
"""The version of these words; a page of another one says so instead of guessing."""


class Sidebar:
    """Answers the pages of one kernel, from when it is made until `close`. `auto()`: the targets of `%autoremote`."""

    def __init__(self, commands: Commands, auto: Callable[[], str]) -> None:
        self._commands = commands
        self._auto = auto
        self._standing = ClusterSummary()
        self._watchers = Watchers(self.state)
        self._known: weakref.WeakSet[BaseCluster] = weakref.WeakSet()
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

    def state(self) -> ClusterState:
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

    def _act(self, found: BaseCluster, action: str, target: str, warn: Callable[[str], object]) -> str:
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

    def _found(self, name: str) -> BaseCluster:
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
        with require_extra("a panel", "ipywidgets", "anywidget"):
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


def _doing(one: BaseCluster) -> list[str]:
    """What is being done to its workers, whoever asked for it."""
    rows = one.agent.part(Actions).table().values()
    return [f"%cluster {row['action']} {row['target']} …" for row in rows if row["state"] == "runs"]


def _words(error: Exception) -> str:
    """An error in words for the user: a mistake needs no name."""
    return str(error) if isinstance(error, UsageError | ValueError) else f"{type(error).__name__}: {error}"
