"""The pages that watch a notebook's clusters, and the thread that tells them of changes.

Guarantees
- A page hears the present state when it comes, and again after each change, at most once a `period`, or at once after
  `changed()`; never on the kernel's event loop, which starves while a cell runs.
- While nobody watches there is no thread, and nobody looks. A page that has gone without a word is forgotten `lease`
  seconds after it was last heard of.
- After `close` nothing more is said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rpcbench.base.conditions import Changes

logger = logging.getLogger(__name__)

State = dict[str, Any]


class Page(Protocol):
    """The comm of one page."""

    comm_id: str

    def send(self, data: State) -> object: ...
    def close(self, data: State) -> object: ...


@dataclass(slots=True)
class _Watcher:
    page: Page
    heard: float = field(default_factory=time.monotonic)
    told: State | None = None


class Watchers:
    """`look()` gives the present state, a dict that nobody changes later."""

    def __init__(self, look: Callable[[], State], period: float = 1.0, lease: float = 150.0) -> None:
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

    def _state(self) -> State:
        try:
            return self._look()
        except Exception as error:
            logger.exception("the clusters could not be looked at")
            return {"problem": f"{type(error).__name__}: {error}"}

    def _tell(self, watcher: _Watcher, state: State) -> None:
        try:
            watcher.page.send(state)
        except Exception:
            logger.exception("a page could not be told of the clusters")
            self.remove(watcher.page.comm_id)
