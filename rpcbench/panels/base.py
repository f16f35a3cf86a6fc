"""The base of all panels: a view that browsers update by deltas, and the code that draws it.

Rules
- `state` always holds the whole present view, for browsers that open later. A change travels as a small custom message
  (`{"kind": "delta", "version", "delta"}`). A browser that finds a gap in the versions waits for the next whole state.
- Messages of a browser also arrive while a cell runs, on another thread than the main one, if the front end uses
  subshells (JupyterLab does).
- The drawing code is the lists of columns, as JSON, `strings.js`, `menu.js` and `common.js` joined with the panel's own
  files: one module, no build step, no request to any host.

`PanelFeed` has the thread that keeps open panels up to date.
- It shows a viewer the world after a change, at most once per `period`, and never on the kernel's event loop, which
  does not run while a cell runs. It uses 1/120 of a core where that allows four looks per second, and at most 1/5,
  unless this makes it rest for longer than `most_rest` seconds.
- While nothing changes the thread wakes once per `beat` seconds, and says that the pictures are true. A browser that
  hears nothing for longer shows the age of its picture. With no viewer the thread ends, and no source is subscribed.
- A viewer with browsers that are behind (`backpressure`) is sent nothing until they have caught up. Each message has
  the time of its picture, so a page that is late says so.
- A browser that missed a message asks for the whole state after a few seconds, and in any case is correct again within
  `heal` seconds of a change: viewers send whole states then, which may be large.
- After `close` returns, nothing more is sent. A viewer that fails is closed with its error; the others continue.

A displayed panel has a second output, a still picture of it, for readers of the saved notebook, who have no kernel.
- The still is brought up to date at the end of each cell, and of the cluster. A live panel hides it, and it hides the
  error that stands where a widget has no kernel (both by CSS).
- Its text stays the same, so that stored outputs can be compared; its size is bounded.
"""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import anywidget
import traitlets
from IPython.core.getipython import get_ipython

from rpcbench.base.charts import shorten_words
from rpcbench.base.conditions import Condition
from rpcbench.cells.display import OutputDisplay
from rpcbench.cells.widgets import receive_on_named_subshell
from rpcbench.launch.base_cluster import BaseCluster, running_clusters
from rpcbench.panels.backpressure import Backpressure
from rpcbench.runtime.agent import Agent
from rpcbench.simulation.simulated_world import SimulatedWorld
from rpcbench.telemetry import collector, trace
from rpcbench.telemetry.collector import LIVE, SIMULATED, Phase
from rpcbench.telemetry.panel_json import panel_document
from rpcbench.telemetry.recording import Still
from rpcbench.telemetry.summary import LINES, summarize_view
from rpcbench.telemetry.svg import Snapshot
from rpcbench.telemetry.views import View, World, diff_views

logger = logging.getLogger(__name__)
# Ratios of pause to work: views are computed in the process that runs the user's cells, and must not slow these down.
_REST, _LONG_REST = 5, 120
_CALM = 0.25
"""Seconds between two looks up to which a user sees no delay; `_LONG_REST` applies below, `_REST` above."""


@runtime_checkable
class Source(Protocol):
    """A source of worlds. One that does not stay live has a `phase`, as the collector has."""

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after each change, on any thread, once `world()` has it. Return a function that ends that."""

    def world(self) -> World:
        """Return the present state in dicts that are never changed later; rows may be shared."""


@dataclass(slots=True, eq=False)
class _Entry:
    viewer: Panel
    source: Source
    unsubscribe: Callable[[], None] = field(init=False)
    stale: bool = True  # the world has changed since the last look
    whole_at: float = math.inf  # when to send the whole state, in monotonic seconds
    beat_at: float = -math.inf  # when to say that nothing has changed; inf if the source is not live
    ready_at: float = -math.inf  # before this nothing is sent; inf while its browsers are behind

    @property
    def due_at(self) -> float:
        """When there is a change to look at, or a message to send."""
        return max(self.ready_at, -math.inf if self.stale else min(self.whole_at, self.beat_at))

    def begin_look(self) -> bool:
        """Return whether there is a change to look at. One that comes during this call is left to the next."""
        if not self.stale:
            return False
        self.stale = False
        return True


def _phase_of_source(source: Source) -> Phase:
    found: Phase = getattr(source, "phase", LIVE)
    return found


class PanelFeed:
    """The thread that shows worlds to open viewers; it exists while there are any."""

    def __init__(self, period: float = 0.15, heal: float = 60.0, most_rest: float = 2.0, beat: float = 1.0) -> None:
        self._period = period
        self._heal = heal
        self._most_rest = most_rest
        self._beat = beat
        self._lock = threading.Lock()
        self._changes = Condition()
        self._closed = Condition()  # apart from `_changes`, which must not wake the thread while it rests
        self._entries: dict[int, _Entry] = {}  # by id of the viewer
        self._pushing: Panel | None = None  # the viewer that is being shown, for `close` to wait for
        self._thread: threading.Thread | None = None

    def open_viewer(self, viewer: Panel, source: Source) -> None:
        """Show `viewer` the source's world now and after each change. Idempotent."""
        entry = _Entry(viewer, source)
        entry.unsubscribe = source.subscribe(partial(self._world_changed, entry))
        with self._lock:
            new = id(viewer) not in self._entries
            if new:
                self._entries[id(viewer)] = entry
                if self._thread is None:
                    self._thread = threading.Thread(target=self._feed_loop, name="rpcbench-panels", daemon=True)
                    self._thread.start()
        if not new:  # outside the lock, as this runs code of the source
            entry.unsubscribe()
        self._changes.notify_all()

    def request_whole_view(self, viewer: Panel) -> None:
        """Have the whole state sent soon, to a browser that opens the viewer, or that has heard nothing for a while."""
        with self._lock:
            entry = self._entries.get(id(viewer))
        if entry is not None:
            entry.whole_at = entry.ready_at = -math.inf
            self._changes.notify_all()

    def release_viewer(self, viewer: Panel) -> None:
        """Send a viewer messages again, as its browsers have caught up."""
        with self._lock:
            entry = self._entries.get(id(viewer))
        if entry is not None and entry.ready_at == math.inf:
            entry.ready_at = -math.inf
            self._changes.notify_all()

    def close_viewer(self, viewer: Panel) -> None:
        """Unsubscribe from the source; no message is sent once this returns. Idempotent."""
        with self._lock:
            entry = self._entries.pop(id(viewer), None)
        self._changes.notify_all()
        self._closed.notify_all()
        if threading.current_thread() is not self._thread:  # which closes viewers that fail, and cannot wait for itself
            self._changes.wait_for(lambda: self._pushing is not viewer)
        if entry is not None:
            entry.unsubscribe()

    def _world_changed(self, entry: _Entry) -> None:
        if entry.stale:  # `begin_look` clears it before the world is read, which so has this change
            return
        entry.stale = True
        self._changes.notify_all()

    def _feed_loop(self) -> None:
        while due := self._wait_for_due():
            began, work = time.monotonic(), time.thread_time()  # where others have the cores a look only lasts longer
            self._push_worlds(due)
            pause = self._pause_seconds(time.thread_time() - work)
            self._closed.wait_for(lambda: not self._entries, began + pause - time.monotonic())

    def _pause_seconds(self, look_seconds: float) -> float:
        """Return the seconds from one look to the next."""
        wished = max(min(_LONG_REST * look_seconds, _CALM), _REST * look_seconds)
        return max(self._period, min(wished, self._most_rest))

    def _wait_for_due(self) -> list[tuple[_Entry, bool]]:
        """Wait for entries that are due; return each with whether its world changed, or [] if no viewer is left."""
        while True:
            with self._lock:
                entries = list(self._entries.values())
                if not entries:
                    self._thread = None
                    return []
            now = time.monotonic()
            if due := [(entry, entry.begin_look()) for entry in entries if entry.due_at <= now]:
                return due
            first = min(entry.due_at for entry in entries)
            self._changes.wait_for(partial(self._has_changes, entries), None if first == math.inf else first - now)

    def _has_changes(self, entries: list[_Entry]) -> bool:
        """Return whether viewers were opened or closed, a world changed, or a browser asked for the whole state."""
        with self._lock:
            now = time.monotonic()
            return list(self._entries.values()) != entries or any(entry.due_at <= now for entry in entries)

    def _push_worlds(self, due: list[tuple[_Entry, bool]]) -> None:
        worlds: dict[int, World] = {}
        for entry, changed in due:
            with self._lock:
                if self._entries.get(id(entry.viewer)) is not entry:  # closed meanwhile
                    continue
                self._pushing = entry.viewer
            try:
                self._push_entry(entry, changed, worlds)
            except Exception as error:  # noqa: BLE001  (an error of a source or a view must not stop other panels)
                self._give_up(entry, error)
            finally:
                self._pushing = None
                self._changes.notify_all()

    def _push_entry(self, entry: _Entry, changed: bool, worlds: dict[int, World]) -> None:
        """Send one viewer's browsers the changes, the whole state if that is due, or that nothing has changed."""
        entry.viewer.name_cluster()
        if entry.viewer.is_behind:
            entry.ready_at, entry.stale = math.inf, entry.stale or changed
            return
        now = time.monotonic()
        has_sent = changed and self._show_entry(entry, worlds)
        if entry.whole_at <= now:
            entry.whole_at, has_sent = math.inf, True
            entry.viewer.send_whole_view()
        elif not has_sent and entry.beat_at <= now:  # not for each change of a source: these are many
            has_sent = True
            entry.viewer.send_beat()
        if has_sent:
            entry.ready_at = now + entry.viewer.rest_seconds
            entry.beat_at = now + self._beat if _phase_of_source(entry.source) == LIVE else math.inf

    def _show_entry(self, entry: _Entry, worlds: dict[int, World]) -> bool:
        """Show one viewer the world; one look at a source serves all its viewers. Return whether it had changed."""
        source = entry.source
        if id(source) not in worlds:
            worlds[id(source)] = source.world()
        if has_changed := entry.viewer.show_world(worlds[id(source)]):
            entry.whole_at = min(entry.whole_at, time.monotonic() + self._heal)
        return has_changed

    def _give_up(self, entry: _Entry, error: Exception) -> None:
        logger.warning("a panel stopped", exc_info=error)
        for last in (partial(self.close_viewer, entry.viewer), partial(entry.viewer.show_error, error)):
            try:
                last()
            except Exception:
                logger.exception("a panel that stopped could not be closed")


def find_simulated(given: object, make_members: Callable[[SimulatedWorld], World]) -> Source | None:
    """Return the source of a simulated world's step; None for anything else."""
    if not isinstance(given, SimulatedWorld):
        return None
    return Still(make_members(given), SIMULATED)


MOST_STILL_BYTES = 130_000
"""Size of a still picture in a notebook; a larger one is replaced by its text."""
SETTLE_SECONDS = 0.2
"""Limit of the wait for members' last reports at the end of a cell."""
READ_SECONDS = 1.0
"""Limit of that wait where a program reads the panel: a stopped worker sends none."""
_STILL_TEXT = "The last picture of the panel above, for readers without a kernel."
HIDE_ERROR = (
    "<style>.jp-OutputArea-child:not(:has(.rb-panel)):has(+ .jp-OutputArea-child .rb-instead){display:none}</style>"
)
"""In an element of class `rb-instead`: hides the output before it if no live panel is there, but an error."""


def still_output(picture: Snapshot, cluster: str = "") -> dict[str, str]:
    """Return the mime bundle of a still picture below a live panel; JupyterLab's extension shows its time."""
    about = f'data-panel="{picture.panel}" data-cluster="{escape(cluster)}" data-at="{time.time():.0f}"'
    shown = picture.html if len(picture.html) <= MOST_STILL_BYTES else f"<pre>{escape(picture.text)}</pre>"
    return {
        "text/plain": _STILL_TEXT,
        "text/html": f'<div class="rb-still rb-instead" {about} style="overflow:auto">{HIDE_ERROR}{shown}</div>',
    }


@dataclass(slots=True)
class _Displayed:
    """The output with the still of one panel."""

    handle: Any  # IPython's handle of the output
    view: View  # that it shows


class StillOutputs:
    """The stills of all displayed panels of a kernel. They change at the end of each cell, and of the cluster."""

    def __init__(self) -> None:
        self._displayed: dict[Panel, _Displayed] = {}
        self._shell: Any = None  # whose cells are followed

    def add_panel(self, panel: Panel, shell: Any) -> None:
        """Display the still of a panel in the cell that runs, and keep it up to date."""
        from IPython.display import DisplayHandle

        handle, view = DisplayHandle(), panel.latest_view()  # type: ignore[no-untyped-call]
        handle.display(still_output(Snapshot(view), panel.cluster), raw=True)  # type: ignore[no-untyped-call]
        self._displayed[panel] = _Displayed(handle, view)
        if self._shell is not shell:
            shell.events.register("post_run_cell", self.refresh_all)
            self._shell = shell

    def drop_panel(self, panel: Panel) -> None:
        """Leave the still of a panel as it is."""
        self._displayed.pop(panel, None)

    def refresh_all(self, *_: object) -> None:
        """Bring all stills up to date."""
        for panel in list(self._displayed):
            self.refresh_panel(panel)

    def refresh_panel(self, panel: Panel) -> None:
        """Bring the still of a panel up to date, if it has one. On any thread."""
        still = self._displayed.get(panel)
        try:
            if still is not None and (view := panel.latest_view()) != still.view:
                still.view = view
                still.handle.update(still_output(Snapshot(view), panel.cluster), raw=True)
        except Exception as error:  # shown once: an error of a view must not disturb all later cells
            logger.warning("the still picture of a panel stopped", exc_info=error)
            self.drop_panel(panel)


STILLS = StillOutputs()
SESSION = PanelFeed()  # one per process: all widgets of a kernel share one connection to the front end


class Panel(anywidget.AnyWidget):
    """A live picture of one view. It follows its source from creation until `close()`, or until no browser shows it.

    `print(panel)` and `text()` give the present view as text, `json()` as data.
    """

    look: ClassVar[staticmethod[[World], View]]  # computes the view of a world
    sentence: ClassVar[str]  # shown instead of the widget without a kernel
    agent: Agent | None = None  # of the cluster that it follows, if it does
    wants: ClassVar[str] = "it shows the current cluster, and needs nothing more"  # what `rpcbench.panel` takes for it

    state = traitlets.Dict().tag(sync=True)  # {"version": number, "view": view}
    phase = traitlets.Dict().tag(sync=True)  # the fields of a `Phase`
    problem = traitlets.Unicode("").tag(sync=True)  # the error that has ended the updates
    cluster = traitlets.Unicode("").tag(sync=True)  # the name of its cluster, once this process has had several

    def __init__(self, source: Source, publisher: PanelFeed = SESSION, **traits: Any) -> None:
        world = source.world() if isinstance(source, Still) else {}  # the next cell may print it before the first look
        state = {"version": 0, "view": type(self).look(world)}
        super().__init__(state=state, phase=_phase_of_source(source)._asdict(), **traits)
        receive_on_named_subshell(self.comm)
        self._source = source
        self._publisher = publisher
        self._cell: OutputDisplay | None = None  # the output of the cell that displays it
        self._backpressure = Backpressure()
        self._open_views: set[str] = set()  # ids of the browsers' views that are open
        self.on_msg(self._message_received)
        publisher.open_viewer(self, source)

    @classmethod
    def for_current_cluster(cls) -> Self:
        """Make a panel of the current cluster."""
        return cls(collector.current_collector())

    @classmethod
    def find_source(cls, given: object) -> Source:
        """Return the source of what `rpcbench.panel` was given. TypeError if this kind of panel does not show that."""
        if isinstance(given, Source):
            return given
        raise cls.make_refusal(given)

    @classmethod
    def make_refusal(cls, given: object) -> TypeError:
        """Return the error of what this kind of panel does not show."""
        return TypeError(f"this panel does not show {shorten_words(repr(given), 60)}: {cls.wants}")

    def show_world(self, world: World) -> bool:
        """Send browsers the changes since the last call; return False if there are none. On the feed's thread."""
        phase = _phase_of_source(self._source)
        if phase.name == "stopped" and not world:  # nobody looked at the end of this world: the last picture stays
            world, view = {}, self.view
        else:
            view = type(self).look(world)
        self.phase = phase._asdict()
        if phase.name == "stopped":  # perhaps not by a cell
            STILLS.refresh_panel(self)
        delta = diff_views(self.state["view"], view)
        if not delta and self.state["version"]:  # version 0 was only the empty view of the constructor
            return False
        version = self.state["version"] + 1
        self.state = {"version": version, "view": view}
        self._backpressure.picture_sent(version)
        self.send({"kind": "delta", "version": version, "delta": delta, "at": time.time()})
        return True

    def follow_cluster(self, agent: Agent) -> None:
        """Take the cluster from its agent."""
        self.agent = agent
        self.name_cluster()

    def name_cluster(self) -> None:
        """Tell browsers which cluster this is, if there are several. Once told, the name stays."""
        owner = self.agent and self.agent.owner
        if isinstance(owner, BaseCluster) and len(running_clusters()) > 1:
            self.cluster = owner.label

    @property
    def is_behind(self) -> bool:
        """Whether its browsers have a queue of pictures before them, and so are sent none."""
        return self._backpressure.is_behind

    @property
    def rest_seconds(self) -> float:
        """Seconds from one picture to the next, so that its browsers have time for other things."""
        return self._backpressure.rest_seconds

    def send_whole_view(self) -> None:
        """Send browsers the whole view, for those that missed a message, and that it is the present one."""
        self.send_state("state")
        self.send_beat()  # a state has no time

    def send_beat(self) -> None:
        """Tell browsers that the picture of this version is that of the present world."""
        self.send({"kind": "beat", "version": self.state["version"], "at": time.time()})

    def show_error(self, error: Exception) -> None:
        """Show the error in the picture, which is updated no more."""
        self.problem = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Remove the panel from all browsers and unsubscribe. Idempotent."""
        if self.comm is not None:  # also called by ipywidgets' finalizer, perhaps on a half-constructed panel
            self._publisher.close_viewer(self)
            STILLS.drop_panel(self)
        super().close()

    def latest_view(self) -> View:
        """Return the view of what the source has now, once members have sent their reports; or the last one."""
        if settle := getattr(self._source, "settle", None):
            settle(SETTLE_SECONDS)
        world = self._source.world()
        return type(self).look(world) if world else self.view

    def snapshot(self) -> Snapshot:
        """Return the present view as a picture and text that need no kernel, for notebooks that are committed."""
        return Snapshot(type(self).look(self._collect_world()))

    def export(self, path: str | Path) -> Path:
        """Write the present state of the panel's source as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

        Messages, and the calls that they belong to, are in it only while a messages panel or a `%%trace` is open.
        """
        return trace.save_trace(self._collect_world(), path)

    def text(self, lines: int | None = LINES) -> str:
        """Return the present view as text, as `print(panel)` shows it.

        Args:
            lines: How many lines to show after the first; None: all. A last line counts those left out.
        """
        view_text = summarize_view(self._read_view()[0], lines)
        phase = _phase_of_source(self._source)
        if phase.name != "stopped":
            return view_text
        return f"Stopped at {time.strftime('%H:%M', time.localtime(phase.at))}. Before that:\n{view_text}"

    def json(self) -> dict[str, Any]:
        """Return the present view as a dict of plain values, for `json.dumps`: `["sections"]` has the rows.

        docs/api/panel-json.md has the fields, and what `version` promises. Times in rows are seconds of the clock that
        stood at 0 at `epoch`, unless the page says more. Of a stopped cluster it is the last view.
        """
        view, world = self._read_view()
        return panel_document(view, _phase_of_source(self._source), world)

    def _read_view(self) -> tuple[View, World]:
        """Return the view of what the source has now, with its world; the last view if that has ended unseen."""
        world = self._collect_world(READ_SECONDS)
        return type(self).look(world) if world else self.view, world

    def _collect_world(self, timeout: float = collector.SETTLE_SECONDS) -> World:
        """Return the source's world with all pending reports of members, even if no browser shows the panel."""
        # Subscribed for the time: a source without a subscriber does not collect.
        stop = self._source.subscribe(lambda: None)
        try:
            if settle := getattr(self._source, "settle", None):  # only of sources that wait for members' reports
                settle(timeout)
            return self._source.world()
        finally:
            stop()

    def notify_change(self, change: Any) -> None:
        """Like every widget's, but do not send a new `state`: its delta is sent instead."""
        if change["name"] == "state":
            traitlets.HasTraits.notify_change(self, change)
        else:
            super().notify_change(change)

    def _get_embed_state(self, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the state for a page that `ipywidgets.embed` writes: also defaults, as the panel's code is one."""
        embedded: dict[str, Any] = super()._get_embed_state(drop_defaults=False)
        return embedded

    def _message_received(self, _: Any, content: dict[str, Any], buffers: Any) -> None:
        """Count the browsers that show this panel, and unsubscribe after the last one closes it."""
        match content:
            case {"kind": "opened", "eye": str(eye)}:
                self._open_views.add(eye)
                self._backpressure.forget_sent()
                self._publisher.open_viewer(self, self._source)
                self._publisher.request_whole_view(self)
            case {"kind": "seen", "version": int(version), "milliseconds": int(drawing), "late": int(late)}:
                self._backpressure.picture_reported(version, drawing / 1e3, late / 1e3)
                self._publisher.release_viewer(self)
            case {"kind": "snapshot", "eye": str(eye), "page": bool(by_page)}:
                self._leave_snapshot(eye, by_page)
            case {"kind": "closed", "eye": str(eye)}:
                self._open_views.discard(eye)
                if not self._open_views:
                    self.browsers_left()
                    self._publisher.close_viewer(self)
            case _:
                self.message_received(content)

    def _leave_snapshot(self, eye: str, by_page: bool) -> None:
        """Leave the present picture below the panel's cell, or below the last one if it is in none."""
        made = Snapshot(self.view)
        if by_page:  # the browser's view `eye` adds it: a page that was loaded again would drop our output
            data = made._repr_mimebundle_()
            self.send({"kind": "snapshot", "eye": eye, "model": self.model_id, "data": data})
            return
        # Without a context of its own, output belongs to the cell that ran last.
        cell = self._cell or contextvars.Context().run(OutputDisplay, get_ipython())
        cell.display_bundle({"data": made._repr_mimebundle_(), "metadata": {}})

    def browsers_left(self) -> None:
        """Called where no browser shows the panel any more, before it unsubscribes: one may show it again soon."""

    def message_received(self, content: dict[str, Any]) -> None:
        """Handle another message of a browser; a panel without buttons has none."""

    @property
    def view(self) -> View:
        """The present view, `{section: {key: row}}`, as made by the functions of `rpcbench.telemetry`."""
        view: View = self.state["view"]
        return view

    def _ipython_display_(self) -> None:
        from IPython.display import display

        data, metadata = self._repr_mimebundle_() or ({"text/plain": repr(self)}, {})
        display(data, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]
        shell = get_ipython()
        if getattr(shell, "kernel", None) is not None:  # else it was printed
            self._cell = OutputDisplay(shell)
            STILLS.add_panel(self, shell)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return (self._source.words or str(self)) if isinstance(self._source, Still) else self.sentence
