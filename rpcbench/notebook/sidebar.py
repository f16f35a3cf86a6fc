"""The kernel's side of the JupyterLab extension: the comm target `rpcbench`.

Rules
- A page opens one comm per request, with `{"do": …}`. A "watch" receives the present state and then each change. A
  "panel" receives a widget to draw, and stays open as long as its tab. Any other comm is closed with its result:
  `{"text"}`, or `{"error"}` in words for the user.
- Pages send on a subshell, so requests also arrive while a cell runs. Each request runs on a thread of its own.
- Pages are told as soon as it is served: a page's own question would wait until all cells of a "Run All" have ended.
- Actions on workers go through `launch.actions`, like those of a panel's buttons, so all pages see the running ones.

`SidebarWatchers` are the pages that watch a notebook's clusters, and the thread that sends them changes.
- A page receives the present state first, and then each change: at most one per `period`, or at once after
  `state_changed()`; never on the kernel's event loop, which does not run while a cell runs.
- While no page watches there is no thread. A page that has left without closing its comm is dropped once its lease of
  `lease` seconds, which it renews by "stay", has expired. After `close` nothing more is sent.
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
from typing import Any

import comm
from comm.base_comm import BaseComm
from IPython.core.error import UsageError

from rpcbench.base.conditions import Condition
from rpcbench.base.errors import count_noun
from rpcbench.cells.widgets import receive_on_named_subshell
from rpcbench.launch.actions import ALL, Actions
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.launch.cluster import Progress
from rpcbench.notebook import panel_names, require_extra
from rpcbench.notebook.cluster_magic import (
    NONE_RUNS,
    ClusterState,
    ClusterSummary,
    Commands,
    StartReports,
    restart_report,
    running,
    sentence,
    warn_of_resources,
)
from rpcbench.notebook.fault_magics import Modes
from rpcbench.runtime.current import use_agent

logger = logging.getLogger(__name__)

PageState = dict[str, Any]


@dataclass(slots=True)
class _Watcher:
    page: BaseComm
    renewed_at: float = field(default_factory=time.monotonic)  # when it renewed its lease
    last_sent_state: PageState | None = None  # the last state that was sent


class SidebarWatchers:
    """The pages that watch. `look()` returns the present state, a dict that is never changed later."""

    def __init__(self, look: Callable[[], PageState], period: float = 1.0, lease: float = 150.0) -> None:
        self._look = look
        self._period = period
        self._lease = lease
        self._lock = threading.Lock()
        self._changes = Condition()
        self._stale = False  # look again without waiting for the period
        self._watching: dict[str, _Watcher] = {}  # by comm id
        self._thread: threading.Thread | None = None  # set and cleared with the lock, so there is at most one

    def add_page(self, page: BaseComm) -> None:
        """Send a page the present state now, and changes later."""
        with self._lock:
            self._watching[page.comm_id] = _Watcher(page)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch_loop, name="rpcbench-sidebar", daemon=True)
                self._thread.start()
        self.state_changed()

    def renew_lease(self, comm_id: str) -> bool:
        """Renew a page's lease; return False if it has expired."""
        with self._lock:
            watcher = self._watching.get(comm_id)
            if watcher is not None:
                watcher.renewed_at = time.monotonic()
            return watcher is not None

    def remove_page(self, comm_id: str) -> None:
        """Drop a page that has closed its comm."""
        with self._lock:
            self._watching.pop(comm_id, None)
        self.state_changed()

    def state_changed(self) -> None:
        """Look again now. From any thread."""
        self._stale = True
        self._changes.notify_all()

    def close(self) -> None:
        """Drop all pages and close their comms."""
        with self._lock:
            left, self._watching = list(self._watching.values()), {}
            thread = self._thread
        self.state_changed()
        if thread is not None and thread is not threading.current_thread():
            thread.join()  # so that no state is sent after a page's comm is closed
        for watcher in left:
            watcher.page.close({})

    def _watch_loop(self) -> None:
        while watching := self._drop_expired():
            self._stale = False  # before the look: a change during it causes another one
            state = self._read_state()
            for watcher in watching:
                if watcher.last_sent_state == state:
                    continue
                watcher.last_sent_state = state
                try:
                    watcher.page.send(state)
                except Exception:
                    logger.exception("the state of the clusters could not be sent to a page")
                    self.remove_page(watcher.page.comm_id)
            self._changes.wait_for(lambda: self._stale, self._period)

    def _drop_expired(self) -> list[_Watcher]:
        """Drop expired pages and return the others; if there are none, the thread ends."""
        oldest = time.monotonic() - self._lease
        with self._lock:
            late = [key for key, watcher in self._watching.items() if watcher.renewed_at < oldest]
            gone = [self._watching.pop(key) for key in late]
            watching = list(self._watching.values())
            if not watching:  # under the lock: a page that is added now starts another thread
                self._thread = None
        for watcher in gone:
            watcher.page.close({})
        return watching

    def _read_state(self) -> PageState:
        try:
            return self._look()
        except Exception as error:  # shown in the page: a failed look must not end the thread
            logger.exception("the state of the clusters could not be read")
            return {"problem": f"{type(error).__name__}: {error}"}


TARGET = "rpcbench"
ANNOUNCEMENT = "rpcbench-loaded"  # no front end has this comm, so those without the extension ignore its message
SPEAKS = 4
"""The version of this protocol. A page with another version shows that instead of guessing."""


class Sidebar:
    """Serves the pages of one kernel until `close`."""

    def __init__(self, commands: Commands, modes: Modes) -> None:
        self._commands = commands
        self._modes = modes
        self._summary = ClusterSummary()
        self._watchers = SidebarWatchers(self.sidebar_state)
        self._known: weakref.WeakSet[BaseCluster] = weakref.WeakSet()  # clusters with an observer of their members
        self._alone = threading.Lock()  # of two pages that start a cluster at once, the second finds the first one's
        self._starting = ""  # progress of a start, shown by all pages
        self._panels: dict[str, Any] = {}  # by comm id
        self._manager = comm.get_comm_manager()  # another one once ipykernel is loaded, in IPython without a kernel
        self._manager.register_target(TARGET, self.page_opened)
        _announce_target()

    def close(self) -> None:
        """Serve no more requests, and close the comms of watching pages."""
        self._manager.unregister_target(TARGET, self.page_opened)
        self._watchers.close()
        for comm_id in list(self._panels):
            self._close_panel(comm_id)

    def sidebar_state(self) -> ClusterState:
        """Return the state that watching pages show."""
        clusters, chosen = self._commands.running_clusters(), running()
        for one in [one for one in clusters.values() if one not in self._known]:
            self._known.add(one)
            one.agent.on_member(lambda *_: self._watchers.state_changed())
        return {
            "speaks": SPEAKS,
            "clusters": self._summary.summarize_clusters(clusters, chosen),
            "auto": self._modes.auto.targets,
            "modes": self._modes.active_modes(clusters),
            "doing": [
                *filter(None, [self._starting]),
                *(what for one in clusters.values() for what in _describe_actions(one)),
            ],
            "panels": panel_names(),
        }

    def page_opened(self, page: Any, message: dict[str, Any]) -> None:
        """Take a page's request. On the thread of its subshell."""
        receive_on_named_subshell(page)
        match message["content"]["data"]:
            case {"do": "watch"}:
                page.on_close(lambda _: self._watchers.remove_page(page.comm_id))
                self._watchers.add_page(page)
            case {"do": "stay", "watch": str(watch)}:
                page.close({"there": self._watchers.renew_lease(watch)})
            case {"do": "panel", "name": str(name), "of": str(of)}:
                page.on_close(lambda _: self._close_panel(page.comm_id))
                self._run_on_thread(page, functools.partial(self._open_panel, page, name, of))
            case asked:
                self._run_on_thread(page, functools.partial(self._answer_request, page, asked))

    # -- requests, each on a thread of its own
    def _run_on_thread(self, page: Any, deed: Callable[[], object]) -> None:
        def attempt() -> None:
            try:
                deed()
            except Exception as error:  # noqa: BLE001  (any error is the reply to the page)
                page.close({"error": _error_text(error)})
            self._watchers.state_changed()

        threading.Thread(target=attempt, name="rpcbench-deed", daemon=True).start()

    def _answer_request(self, page: Any, request: dict[str, Any]) -> None:
        warnings: list[str] = []
        text = self._serve_request(request, warnings.append)
        page.close({"text": "\n".join([*warnings, text])})

    def _serve_request(self, request: dict[str, Any], warn: Callable[[str], object]) -> str:
        match request:
            case {"do": "start", "size": int(size)} if size > 0:
                with self._show_progress(f"Starting {count_noun(size, 'worker')}") as report_progress:
                    voice = StartReports(report_progress, warn, warn)
                    return self._commands.start_cluster(size, name=request.get("name"), voice=voice)
            case {"do": "use", "of": str(name)}:
                return str(self._commands.run_action("use", [name]))
            case {"do": "end", "mode": str(mode), "of": str(name)}:
                return self._modes.end_mode(mode, functools.partial(self._find_cluster, name))
            case {"do": "act", "of": str(name), "action": str(action), "target": str(target)}:
                return self._run_action(self._find_cluster(name), action, target, warn)
        raise UsageError(
            f"this kernel's rpcbench has no {request.get('do')!r}: the page has another version of rpcbench"
        )

    def _run_action(self, found: BaseCluster, action: str, target: str, warn: Callable[[str], object]) -> str:
        names = found.workers if target == ALL else [target]
        if action == "scale" and int(target) > len(found.workers):
            warn_of_resources(int(target), found.kind, warn, warn)
        done = found.agent.part(Actions).begin_action(action, target)
        self._watchers.state_changed()  # pages show the action while it runs
        text = done.result()
        match action:
            case "scale":
                return sentence(found)
            case "stop":
                return self._commands.cluster_stopped(found)
        return restart_report(names) if action == "restart" else text

    def _find_cluster(self, name: str) -> BaseCluster:
        there = self._commands.running_clusters()
        if name not in there:
            raise UsageError(f"no cluster {name} runs" if there else NONE_RUNS)
        return there[name]

    @contextlib.contextmanager
    def _show_progress(self, what: str) -> Iterator[Callable[[int], Progress]]:
        """Show pages the progress of a start meanwhile; yield a function for `StartReports.progress`."""

        def say(text: str) -> None:
            self._starting = text
            self._watchers.state_changed()

        with self._alone:
            try:
                say(f"{what} …")
                yield lambda of: lambda serve, _: say(f"{what}: {serve} of {of} ready")
            finally:
                self._starting = ""

    # -- panels
    def _open_panel(self, page: Any, name: str, of: str) -> None:
        with require_extra("a panel", "ipywidgets", "anywidget"):
            from rpcbench.panels import panel

        with use_agent(self._find_cluster(of).agent):
            self._panels[page.comm_id] = made = panel(name)
        data, *_ = made._repr_mimebundle_() or ({},)
        page.send({"bundle": data})

    def _close_panel(self, comm_id: str) -> None:
        made = self._panels.pop(comm_id, None)
        if made is not None:
            made.browsers_left()
            made.close()


def _describe_actions(one: BaseCluster) -> list[str]:
    """Describe the running actions on a cluster's workers, of all pages and panels."""
    rows = one.agent.part(Actions).table().values()
    return [f"%cluster {row['action']} {row['target']} …" for row in rows if row["state"] == "runs"]


def _announce_target() -> None:
    """Tell all pages of this kernel that the target is served."""
    comm.create_comm(target_name=TARGET, comm_id=ANNOUNCEMENT, primary=False).send()


def _error_text(error: Exception) -> str:
    """Describe an error to the user, without its class if it is the user's mistake."""
    return str(error) if isinstance(error, UsageError | ValueError) else f"{type(error).__name__}: {error}"
