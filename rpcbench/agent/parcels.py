"""Parcels: values that go one way, to whoever listens on a channel, and are opened by the thread that needs them.

Guarantees
- A listener hears of parcels on the thread that reads them, in order, and of those that will not come: it must not wait
  there, nor open any.
- Nothing is unpacked, and no tensor made, before a parcel is opened; one that is never opened costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rpcbench.agent.values import Values
from rpcbench.protocol.effects import Came, Undelivered
from rpcbench.wire.messages import Parcel
from rpcbench.words.errors import SerializationError

Place = tuple[int, ...]
Opened = Callable[[], Any]
"""Gives the values: once, in the autograd context that they belong to."""


class Listener(Protocol):
    """Who listens on a channel."""

    def came(self, place: Place, values: Opened) -> None:
        """A parcel is here."""

    def undelivered(self, place: Place, error: Exception) -> None:
        """One that was sent from here will not come."""


class Parcels:
    """Of one agent."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._listeners: dict[str, Listener] = {}

    def listen(self, channel: str, listener: Listener) -> None:
        self._listeners[channel] = listener

    def deaf(self, channel: str) -> None:
        """Nobody listens there any more: what comes is dropped."""
        self._listeners.pop(channel, None)

    def pack(self, to: int, channel: str, place: Place, label: str, values: Any) -> Parcel:
        """SerializationError for values that cannot travel, or that hold RRefs."""
        recorder = self._values.recorder
        context = None if recorder is None else recorder.current()
        body, forks, scope = self._values.pack(to, values, label, context, False)
        if forks:
            self._values.unshare(forks)
            raise SerializationError(f"{label} for {channel} holds an RRef, which only a call can take along")
        return Parcel(channel, place, label, scope, body)

    def came(self, effect: Came) -> None:
        parcel = effect.parcel
        listener = self._listeners.get(parcel.channel)
        if listener is not None:
            listener.came(parcel.place, partial(self._open, effect.source, parcel))

    def _open(self, source: int, parcel: Parcel) -> Any:
        return self._values.unpack(source, parcel.body, (), parcel.scope, False)

    def undelivered(self, effect: Undelivered) -> None:
        listener = self._listeners.get(effect.parcel.channel)
        if listener is not None:
            listener.undelivered(effect.parcel.place, effect.error)
