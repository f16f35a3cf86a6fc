"""A world that stands still, as a source for panels: what was traced, or kept."""

from __future__ import annotations

from collections.abc import Callable

from rpcbench.telemetry.views import World


class Still:
    """A source whose world never changes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Nothing will come."""
        return lambda: None

    def world(self) -> World:
        """Always the same."""
        return self._world
