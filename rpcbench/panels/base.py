"""What all panels share: a view that browsers follow by deltas, and the code they draw it with.

Rules
- `state` always holds the whole present view, so a browser that opens later gets it with the widget's own state; a
  change of it travels as a small custom message (`{"kind": "delta", "version", "delta"}`), never whole.
- Versions count by one. A browser that finds a gap waits for the next whole state, which the publisher sends.
- What a browser says is heard while a cell runs, too, where the front end uses subshells (JupyterLab does): on a thread
  that is not the main one.
- The drawing code is `common.js` and the panel's own files, joined here: browsers load one module, and there is no
  build step and no request to any other host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import anywidget
import traitlets

from rpcbench.launch.mirrors import heard_where_asked
from rpcbench.panels.publisher import Publisher, Settles, Source
from rpcbench.telemetry import chrome, collect
from rpcbench.telemetry.still import Still
from rpcbench.telemetry.stills import Snapshot
from rpcbench.telemetry.summary import text
from rpcbench.telemetry.views import View, World, diff

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
        return cls(collect.current())

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
        return chrome.save(self._settled(), path)

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
