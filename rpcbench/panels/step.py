"""The step panel: the messages that a stepper holds, and buttons to let them go, in whatever order."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from rpcbench.base.errors import RpcError
from rpcbench.panels.base import Panel, Publisher, asset
from rpcbench.telemetry.views import View, World

logger = logging.getLogger(__name__)


class Steps(Protocol):
    """What a panel needs of a stepper; see `rpcbench.testing.Stepper`."""

    delivered: int
    dropped: int

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


class _Source:
    """A stepper as a source of worlds: under each number a message, under 0 the stepper itself."""

    def __init__(self, stepper: Steps) -> None:
        self._stepper = stepper
        self.subscribe = stepper.subscribe

    def world(self) -> World:
        stepper, held = self._stepper, self._stepper.held
        state = {"on": stepper.is_on, "delivered": stepper.delivered, "dropped": stepper.dropped}
        return {0: {**state, "order": [row.n for row in held]}, **{row.n: row._asdict() for row in held}}


def step_view(world: World) -> View:
    """What is held. Sections: stepper (one row), held: n, sender, to, kind, label, and `about`, ids as text."""
    none = {"on": True, "delivered": 0, "dropped": 0, "order": []}
    return {"stepper": {"0": world.get(0, none)}, "held": {str(n): _row(one) for n, one in world.items() if n}}


def _row(one: dict[str, Any]) -> dict[str, Any]:
    about = " · ".join(f"{name} {value}" for name, value in one["ids"].items())
    return {name: one[name] for name in ("n", "sender", "to", "kind", "label")} | {"about": about}


class StepPanel(Panel):
    """Follows a stepper. Its buttons work while no cell runs in the notebook, as every widget's."""

    look = staticmethod(step_view)
    sentence = "Held messages, live while this notebook's kernel runs. Run the cell to step through them."
    _esm = asset("step", ".js")
    _css = asset("step", ".css")

    def __init__(self, stepper: Steps, **how: Publisher) -> None:
        self._stepper = stepper
        super().__init__(_Source(stepper), **how)

    def _heard(self, _: Any, content: dict[str, Any], buffers: Any) -> None:
        stepper = self._stepper
        match content:
            case {"kind": "deliver" | "drop" | "delay" as deed, "n": int() | None as n}:
                self._do(lambda: getattr(stepper, deed)(n))
            case {"kind": "go"}:
                self._do(stepper.go)
            case {"kind": "time", "seconds": int() | float() as seconds}:
                self._do(lambda: stepper.pass_time(min(seconds, 60.0)))
            case _:
                super()._heard(_, content, buffers)

    def _do(self, deed: Callable[[], object]) -> None:
        """Not on this thread: a member that is stuck must not hold the notebook up."""

        def obey() -> None:
            with contextlib.suppress(ValueError):  # it has gone since the click
                try:
                    deed()
                except RpcError as error:
                    logger.warning("a click had no effect: %s", error)

        self._stepper.submit(obey)

    def __str__(self) -> str:
        return str(self._stepper)
