"""The step panel: the messages that a stepper holds, and buttons to release them in any order."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from rpcbench.base.errors import RpcError
from rpcbench.panels.base import Panel, PanelFeed
from rpcbench.telemetry.collector import LIVE, Phase
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.message_views import describe_message, family_of
from rpcbench.telemetry.views import View, World

logger = logging.getLogger(__name__)


class Steps(Protocol):
    """The part of a stepper that the panel uses; see `rpcbench.testing.Stepper`."""

    delivered: int
    dropped: int
    passed: float

    @property
    def is_on(self) -> bool: ...
    @property
    def held(self) -> list[Any]: ...
    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]: ...
    def deliver(self, n: int | None = None) -> object: ...
    def drop(self, n: int | None = None) -> object: ...
    def delay(self, n: int | None = None) -> object: ...
    def go(self) -> None: ...
    def pass_time(self, seconds: float) -> None: ...
    def submit(self, job: Callable[[], object]) -> None: ...


class _StepperSource:
    """A stepper as a source of worlds: each message under its number, the stepper itself under 0."""

    def __init__(self, stepper: Steps) -> None:
        self._stepper = stepper
        self._last_phase = LIVE
        self.subscribe = stepper.subscribe

    @property
    def phase(self) -> Phase:
        if self._last_phase is LIVE and not self._stepper.is_on:
            self._last_phase = Phase("stopped", time.time())
        return self._last_phase

    def world(self) -> World:
        stepper, held = self._stepper, self._stepper.held
        counts = {"delivered": stepper.delivered, "dropped": stepper.dropped, "passed": round(stepper.passed, 3)}
        state = {"on": stepper.is_on, **counts}
        return {0: {**state, "order": [row.n for row in held]}, **{row.n: row._asdict() for row in held}}


def step_view(world: World) -> View:
    """Return the view of held messages: the sections stepper (one row) and held."""
    # A row of held has n, sender, to, kind, `words` that describe the message, and `about`: its kind and ids as text.
    none = {"on": True, "delivered": 0, "dropped": 0, "passed": 0.0, "order": []}
    return {"stepper": {"0": world.get(0, none)}, "held": {str(n): _make_row(one) for n, one in world.items() if n}}


def _make_row(one: dict[str, Any]) -> dict[str, Any]:
    about = " · ".join([one["kind"], *(f"{name} {value}" for name, value in one["ids"].items())])
    rref = f"RRef {one['ids']['rref']}" if "rref" in one["ids"] and one["label"] in ("", "to_here") else ""
    words = describe_message(one["kind"], rref or one["label"])
    return {name: one[name] for name in ("n", "sender", "to", "kind")} | {
        "words": words, "family": family_of(one["kind"], words), "about": about,
    }  # fmt: skip


class StepPanel(Panel):
    """A panel of a stepper. Like those of any widget, its buttons work while no cell runs in the notebook."""

    look = staticmethod(step_view)
    sentence = "Held messages, live while this notebook's kernel runs. Run the cell to step through them."
    _esm = panel_script("step")
    _css = panel_styles("step")

    def __init__(self, stepper: Steps, **how: PanelFeed) -> None:
        self._stepper = stepper
        super().__init__(_StepperSource(stepper), **how)

    def _message_received(self, _: Any, content: dict[str, Any], buffers: Any) -> None:
        stepper = self._stepper
        match content:
            case {"kind": "deliver" | "drop" | "delay" as deed, "n": int() | None as n}:
                self._run_on_stepper(lambda: getattr(stepper, deed)(n))
            case {"kind": "go"}:
                self._run_on_stepper(stepper.go)
            case {"kind": "time", "seconds": int() | float() as seconds}:
                self._run_on_stepper(lambda: stepper.pass_time(min(seconds, 60.0)))
            case _:
                super()._message_received(_, content, buffers)

    def _run_on_stepper(self, deed: Callable[[], object]) -> None:
        """Run an action of a button on the stepper's thread, so that a stuck member does not block the notebook."""

        def obey() -> None:
            with contextlib.suppress(ValueError):  # the message was released after the click
                try:
                    deed()
                except RpcError as error:
                    logger.warning("a click had no effect: %s", error)

        self._stepper.submit(obey)
