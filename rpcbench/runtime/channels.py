"""One-way messages to listeners on a channel: notices, and parcels, which carry values.

Guarantees
- Notices of one channel are handled one at a time, in order of arrival.
- A listener hears of parcels on the thread that reads them, in order, and of those that will not come: it must not wait
  there, nor open any.
- Nothing is unpacked, and no tensor made, before a parcel is opened; one that is never opened costs nothing more.
- In an autograd context a parcel is a recorded send and recv. But it cuts the graph: a backward pass ends at its
  tensors, and their gradients go back in a parcel, if at all.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgpack
import torch

from rpcbench.protocol.effects import Came, Undelivered
from rpcbench.runtime.locked_node import LockedNode
from rpcbench.runtime.pool import Job
from rpcbench.runtime.values import ObjectStore
from rpcbench.wire.messages import Body, Parcel, Scope

NoticeHandler = Callable[[int, Any], object]
"""(id of the sender, data): runs on a pool thread."""


class Channels:
    def __init__(self, spawn: Callable[[Job], None]) -> None:
        self._spawn = spawn
        self._channels: dict[str, _Channel] = {}

    def listen(self, channel: str, handler: NoticeHandler) -> None:
        self._channels[channel] = _Channel(handler, self._spawn)

    def heard(self, source: int, channel: str, data: bytes) -> None:
        """A notice has come; nobody listening is no error."""
        listener = self._channels.get(channel)
        if listener is not None:
            listener.put(source, data)


class _Channel:
    def __init__(self, handler: NoticeHandler, spawn: Callable[[Job], None]) -> None:
        self._handler = handler
        self._spawn = spawn
        self._lock = threading.Lock()
        self._waiting: collections.deque[tuple[int, bytes]] = collections.deque()
        self._busy = False

    def put(self, source: int, data: bytes) -> None:
        with self._lock:
            self._waiting.append((source, data))
            if self._busy:
                return
            self._busy = True
        self._spawn(self._drain)

    def _drain(self) -> None:
        while (notice := self._next()) is not None:
            source, data = notice
            try:
                self._handler(source, msgpack.unpackb(data))
            except BaseException:
                self._spawn(self._drain)  # the next notices are not to blame; the pool reports the error
                raise

    def _next(self) -> tuple[int, bytes] | None:
        with self._lock:
            if not self._waiting:
                self._busy = False
                return None
            return self._waiting.popleft()


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

    def __init__(self, values: ObjectStore, machine: LockedNode) -> None:
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
