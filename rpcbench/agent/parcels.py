"""Parcels: values that go one way, to whoever listens on a channel, and are opened by the thread that needs them.

Guarantees
- A listener hears of parcels on the thread that reads them, in order, and of those that will not come: it must not wait
  there, nor open any.
- Nothing is unpacked, and no tensor made, before a parcel is opened; one that is never opened costs nothing more.
- In an autograd context a parcel is a recorded send and recv. But it cuts the graph: a backward pass ends at its
  tensors, and their gradients go back in a parcel, if at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from rpcbench.agent.machine import Machine
from rpcbench.agent.values import Values
from rpcbench.protocol.effects import Came, Undelivered
from rpcbench.wire.messages import Body, Parcel, Scope

_new = tuple.__new__  # a step less than the class itself takes
Place = tuple[int, ...]
Opened = Callable[[], Any]
"""Gives the values, once."""


class Listener(Protocol):
    """Who listens on a channel."""

    def came(self, place: Place, values: Opened) -> None:
        """A parcel is here."""

    def undelivered(self, place: Place, error: Exception) -> None:
        """One that was sent from here will not come."""


class Parcels:
    """Of one agent."""

    def __init__(self, values: Values, machine: Machine) -> None:
        self._values = values
        self._machine = machine
        self._listeners: dict[str, Listener] = {}

    def listen(self, channel: str, listener: Listener) -> None:
        self._listeners[channel] = listener

    def deaf(self, channel: str, listener: Listener) -> None:
        """This one listens there no more: what comes is dropped."""
        if self._listeners.get(channel) is listener:
            del self._listeners[channel]

    def channels(self) -> list[str]:
        """Those that somebody listens on."""
        return list(self._listeners)

    def post(self, to: int, channel: str, place: Place, label: str, values: Any) -> None:
        """Values to whoever listens on `channel` there. Waits while `to` is far behind in reading.

        Where they do not arrive, who listens on that channel here is told, unless `to` is gone: of that the world is
        told. SerializationError for values that cannot travel so: RRefs only travel in calls.
        """
        kept = self._values
        body, tensors = kept.codec.encode(values, None, label, kept.routes.to(to, False))
        scope = None if kept.recorder is None else kept.recorder.cut(tensors, to, label)
        parcel = _new(Parcel, (channel, place, label, scope, body))
        self._machine.feed(lambda node: node.send(to, parcel), may_wait=True)

    def came(self, effect: Came) -> None:
        parcel = effect.parcel
        listener = self._listeners.get(parcel.channel)
        if listener is not None:
            listener.came(parcel.place, partial(self._open, effect.source, parcel.scope, parcel.body))

    def _open(self, source: int, scope: Scope | None, body: Body) -> Any:
        recorder = self._values.recorder
        if scope is None or recorder is None:
            return self._values.codec.decode(body)

        def adopt(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            recorder.cut_off(scope, tensors, source)
            return tensors

        return self._values.codec.decode(body, None, adopt)

    def undelivered(self, effect: Undelivered) -> None:
        listener = self._listeners.get(effect.parcel.channel)
        if listener is not None:
            listener.undelivered(effect.parcel.place, effect.error)
