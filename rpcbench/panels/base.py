"""What all panels share: a view that browsers follow by deltas, and the code they draw it with.

Rules
- `state` always holds the whole present view, so a browser that opens later gets it with the widget's own state; a
  change of it travels as a small custom message (`{"kind": "delta", "version", "delta"}`), never whole.
- Versions count by one. A browser that finds a gap waits for the next whole state, which the publisher sends.
- What a browser says is heard while a cell runs, too, where the front end uses subshells (JupyterLab does): on a thread
  that is not the main one.
- The drawing code is `common.js` and the panel's own files, joined here: browsers load one module, and there is no
  build step and no request to any other host.

The publisher is the thread that keeps open panels up to date.
- A viewer is shown the world at most once per `period`, only after a change, and never on the kernel's event loop
  (which starves while a cell runs); where that takes its time, more seldom: a 120th of a core at most, as long as that
  means four looks a second, and a fifth of a core in any case.
- While nothing changes the thread sleeps on a condition; with no viewer open it ends and nothing is subscribed.
- A browser that missed a message (one that opened late, a broken connection) is right again within `heal` seconds:
  after changes each viewer also sends its whole state at that pace.
- After `close` returns, nothing more is sent. A viewer that fails is closed and says why; the others go on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import anywidget
import traitlets

from rpcbench.base.conditions import Changes
from rpcbench.cells.widgets import heard_where_asked
from rpcbench.telemetry import collector, trace
from rpcbench.telemetry.recording import Still
from rpcbench.telemetry.summary import text
from rpcbench.telemetry.svg import Snapshot
from rpcbench.telemetry.views import View, World, diff

logger = logging.getLogger(__name__)
# Pauses to work: views are made in the process that runs the user's cells.
_REST, _LONG_REST = 5, 120
_CALM = 0.25
"""Seconds between two looks that still are no delay: for them a view rests long, for more only as long as it must."""


class Source(Protocol):
    """Where worlds come from. `wake` is called from any thread, once the change can be seen in `world()`."""

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after each change, until the returned function is called."""

    def world(self) -> World:
        """The present state, in dicts that nobody changes later; rows may be shared."""


@runtime_checkable
class Settles(Protocol):
    """A source that has to be told by others."""

    def settle(self) -> bool:
        """Wait until all have told what they had to tell; False if not all did in time."""


class Viewer(Protocol):
    """Something that draws a world: a panel."""

    def show(self, world: World) -> bool:
        """Send what changed; False if nothing did."""

    def send_whole(self) -> None:
        """Send everything again, for browsers that missed something."""

    def fail(self, error: Exception) -> None:
        """Say why no more will come."""


@dataclass(slots=True, eq=False)
class _Entry:
    viewer: Viewer
    source: Source
    unsubscribe: Callable[[], None] = field(init=False)
    stale: bool = True
    whole_at: float = math.inf


class Publisher:
    """Shows worlds to the open viewers, from one thread that lives while there are any."""

    def __init__(self, period: float = 0.15, heal: float = 5.0) -> None:
        self._period = period
        self._heal = heal
        self._lock = threading.Lock()
        self._changes = Changes()
        self._closed = Changes()  # apart from changes, which do not wake the thread while it rests
        self._entries: dict[int, _Entry] = {}
        self._pushing: Viewer | None = None
        self._thread: threading.Thread | None = None

    def open(self, viewer: Viewer, source: Source) -> None:
        """Show `viewer` the source's world now, and again after each change. Harmless if it is open already."""
        entry = _Entry(viewer, source)
        entry.unsubscribe = source.subscribe(partial(self._wake, entry))
        with self._lock:
            new = id(viewer) not in self._entries
            if new:
                self._entries[id(viewer)] = entry
                self._start()
        if not new:
            entry.unsubscribe()
        self._changes.tell()

    def close(self, viewer: Viewer) -> None:
        """Stop showing: no message is sent after this, and the source is told. Harmless if it is closed already."""
        with self._lock:
            entry = self._entries.pop(id(viewer), None)
        self._changes.tell()
        self._closed.tell()
        if threading.current_thread() is not self._thread:
            self._changes.wait_for(lambda: self._pushing is not viewer)
        if entry is not None:
            entry.unsubscribe()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rpcbench-panels", daemon=True)
            self._thread.start()

    def _wake(self, entry: _Entry) -> None:
        if entry.stale:  # `_next` clears it before the world is read: this change will be seen
            return
        entry.stale = True
        self._changes.tell()

    def _run(self) -> None:
        while due := self._next():
            began = time.monotonic()
            self._push(due)
            pause = self._pause(time.monotonic() - began)
            self._closed.wait_for(lambda: not self._entries, began + pause - time.monotonic())

    def _pause(self, took: float) -> float:
        """Seconds from one look to the next."""
        return max(self._period, min(_LONG_REST * took, _CALM), _REST * took)

    def _next(self) -> list[tuple[_Entry, bool]]:
        """Wait for entries with something to send, each with whether its world changed; none when no viewer is left."""
        while True:
            with self._lock:
                entries = list(self._entries.values())
                if not entries:
                    self._thread = None
                    return []
            now = time.monotonic()
            due = [(entry, entry.stale) for entry in entries if entry.stale or entry.whole_at <= now]
            if due:
                for entry, _ in due:
                    entry.stale = False
                return due
            first = min(entry.whole_at for entry in entries)
            self._changes.wait_for(partial(self._differs, entries), None if first == math.inf else first - now)

    def _differs(self, entries: list[_Entry]) -> bool:
        """Whether there is something to do since these were looked at."""
        with self._lock:
            return list(self._entries.values()) != entries or any(entry.stale for entry in entries)

    def _push(self, due: list[tuple[_Entry, bool]]) -> None:
        worlds: dict[int, World] = {}
        for entry, changed in due:
            with self._turn(entry) as is_open:
                if is_open:
                    self._try(entry, changed, worlds)

    def _try(self, entry: _Entry, changed: bool, worlds: dict[int, World]) -> None:
        try:
            if changed:
                self._show(entry, worlds)
            if entry.whole_at <= time.monotonic():
                entry.whole_at = math.inf
                entry.viewer.send_whole()
        except Exception as error:  # noqa: BLE001  whatever a source or a view raises, the other panels go on
            self._give_up(entry, error)

    def _show(self, entry: _Entry, worlds: dict[int, World]) -> None:
        """Show one viewer the world; one look at a source serves all its viewers."""
        source = entry.source
        if id(source) not in worlds:
            worlds[id(source)] = source.world()
        if entry.viewer.show(worlds[id(source)]):
            entry.whole_at = min(entry.whole_at, time.monotonic() + self._heal)

    @contextlib.contextmanager
    def _turn(self, entry: _Entry) -> Iterator[bool]:
        """Marks whose turn it is, so that `close` can wait for its end. False if it was closed meanwhile."""
        with self._lock:
            is_open = self._entries.get(id(entry.viewer)) is entry
            self._pushing = entry.viewer if is_open else None
        try:
            yield is_open
        finally:
            self._pushing = None
            self._changes.tell()

    def _give_up(self, entry: _Entry, error: Exception) -> None:
        logger.warning("a panel stopped", exc_info=error)
        for last in (partial(self.close, entry.viewer), partial(entry.viewer.fail, error)):
            try:
                last()
            except Exception:
                logger.exception("a panel that stopped could not be closed")


_HERE = Path(__file__).parent
SESSION = Publisher()  # one per process, as all widgets of a kernel share one way out


def piece(name: str, suffix: str) -> str:
    """The text of one file."""
    return (_HERE / f"{name}{suffix}").read_text(encoding="utf-8")


def asset(name: str, suffix: str, *parts: str) -> str:
    """The text of `common`, of whatever parts a panel has besides, and of its own file, as one."""
    return "\n".join(piece(each, suffix) for each in ("common", *parts, name))


class Panel(anywidget.AnyWidget):
    """A live picture of one view. It follows its source from creation until `close()`, or until no browser shows it.

    `print(panel)` gives the present view as text.
    """

    look: ClassVar[staticmethod[[World], View]]
    sentence: ClassVar[str]

    state = traitlets.Dict().tag(sync=True)
    problem = traitlets.Unicode("").tag(sync=True)

    def __init__(self, source: Source, publisher: Publisher = SESSION, **traits: Any) -> None:
        world = source.world() if isinstance(source, Still) else {}  # the next cell may look before the publisher has
        super().__init__(state={"version": 0, "view": type(self).look(world)}, **traits)
        heard_where_asked(self.comm)
        self._source = source
        self._publisher = publisher
        self._eyes: set[str] = set()
        self.on_msg(self._heard)
        publisher.open(self, source)

    @classmethod
    def live(cls) -> Self:
        """A panel of the current cluster."""
        return cls(collector.current_collector())

    def show(self, world: World) -> bool:
        """Send browsers what changed since the last call; False if nothing did. Called by the publisher's thread."""
        view = type(self).look(world)
        delta = diff(self.state["view"], view)
        if not delta and self.state["version"]:
            return False
        version = self.state["version"] + 1
        self.state = {"version": version, "view": view}
        self.send({"kind": "delta", "version": version, "delta": delta})
        return True

    def send_whole(self) -> None:
        """Send browsers the whole view, for those that missed a message."""
        self.send_state("state")

    def fail(self, error: Exception) -> None:
        """Say in the picture why it stands still."""
        self.problem = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Remove the panel from all browsers and stop following. Harmless when called twice."""
        if self.comm is not None:  # also called by ipywidgets' finalizer, perhaps on a half-made panel
            self._publisher.close(self)
        super().close()

    def snapshot(self) -> Snapshot:
        """What the panel shows now, as a picture and text that need no kernel: for notebooks that are committed."""
        return Snapshot(type(self).look(self._settled()))

    def export(self, path: str | Path) -> Path:
        """Write what the panel's source holds now as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

        Messages are in it while a messages panel or a `%%trace` asks for them, and calls as far as theirs are.
        """
        return trace.save(self._settled(), path)

    def _settled(self) -> World:
        """What the source holds, with all that members have to tell by now; also where no browser shows the panel."""
        stop = self._source.subscribe(lambda: None)
        try:
            if isinstance(self._source, Settles):
                self._source.settle()
            return self._source.world()
        finally:
            stop()

    def notify_change(self, change: Any) -> None:
        """As every widget's, but a new `state` is not sent: its delta is."""
        if change["name"] == "state":
            traitlets.HasTraits.notify_change(self, change)
        else:
            super().notify_change(change)

    def _heard(self, _: Any, content: dict[str, Any], buffers: Any) -> None:
        """A browser began or ceased to show this panel; after the last one ceased, nobody is asked for news."""
        match content:
            case {"kind": "opened", "eye": str(eye)}:
                self._eyes.add(eye)
                self._publisher.open(self, self._source)
            case {"kind": "closed", "eye": str(eye)}:
                self._eyes.discard(eye)
                if not self._eyes:
                    self._publisher.close(self)
            case _:
                self.heard(content)

    def heard(self, content: dict[str, Any]) -> None:
        """A browser says something else: nothing that a panel without buttons would know."""

    @property
    def view(self) -> View:
        """What is drawn: `{section: {key: row}}`, as the functions of `rpcbench.telemetry` make it."""
        view: View = self.state["view"]
        return view

    def __str__(self) -> str:
        return text(self.view)

    def __repr__(self) -> str:
        return self.sentence
