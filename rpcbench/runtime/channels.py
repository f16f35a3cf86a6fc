"""One-way messages to listeners on a channel: notices (plain data), and parcels (values).

Guarantees
- Notices of one channel are handled one at a time, in order of arrival.
- A listener is called for arrived and for undelivered parcels on the thread that reads them, in order; it must
  not block there, nor open any.
- A parcel is unpacked, and its tensors are made, only when it is opened; an unopened parcel costs nothing more.
- In an autograd context a parcel is a recorded send and recv, but it cuts the graph: a backward pass ends at its
  tensors, and their gradients return in another parcel, if at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec
import torch

from rpcbench.protocol.effects import DataReceived, NoticeReceived, Undelivered
from rpcbench.runtime.locked_node import EffectTable, LockedNode
from rpcbench.runtime.pool import Job
from rpcbench.runtime.values import ObjectStore
from rpcbench.transport.base import SerialQueue
from rpcbench.wire.messages import Body, Parcel, Scope, new_tuple

NoticeHandler = Callable[[int, Any], object]
"""(id of the sender, data): runs on a pool thread."""


class Channels:
    """The notices of one agent. `spawn` runs a job on a pool thread."""

    def __init__(self, effects: EffectTable, spawn: Callable[[Job], None]) -> None:
        self._spawn = spawn
        self._channels: dict[str, SerialQueue[tuple[int, bytes]]] = {}  # (sender, msgpack), by channel
        effects.register(NoticeReceived, self._queue_notice)

    def register_handler(self, channel: str, handler: NoticeHandler) -> None:
        """Listen on a channel: `handler` runs on a pool thread, one call at a time, in order of arrival."""
        self._channels[channel] = SerialQueue(
            lambda each: handler(each[0], msgspec.msgpack.decode(each[1])), self._spawn
        )

    def _queue_notice(self, effect: NoticeReceived) -> None:
        """Queue a notice that has arrived; a channel without a listener is no error."""
        if (listener := self._channels.get(effect.notice.channel)) is not None:
            listener.put((effect.source, effect.notice.data))


Place = tuple[int, ...]  # of a parcel within its channel; its meaning is the listener's
Opened = Callable[[], Any]
"""Unpacks and returns the values; to be called once."""


class ChannelHandler(Protocol):
    """A listener for the parcels of one channel."""

    def parcel_received(self, place: Place, values: Opened) -> None:
        """Take note of a parcel that has arrived."""

    def delivery_failed(self, place: Place, error: Exception) -> None:
        """Take note that a parcel sent from here will not arrive."""


class Parcels:
    """The parcels of one agent."""

    def __init__(self, values: ObjectStore, machine: LockedNode, effects: EffectTable) -> None:
        self._values = values
        self._machine = machine
        self._listeners: dict[str, ChannelHandler] = {}  # by channel
        effects.register(DataReceived, self._data_received)
        effects.register(Undelivered, self._data_undelivered)

    def add_listener(self, channel: str, listener: ChannelHandler) -> None:
        self._listeners[channel] = listener

    def remove_listener(self, channel: str, listener: ChannelHandler) -> None:
        """Remove a listener: parcels that arrive on the channel are dropped."""
        if self._listeners.get(channel) is listener:
            del self._listeners[channel]

    def open_channels(self) -> list[str]:
        """Return the channels that have a listener."""
        return list(self._listeners)

    def send_parcel(self, to: int, channel: str, place: Place, label: str, values: Any) -> None:
        """Send values to the listener of `channel` there. Block while `to` is far behind in reading (backpressure). If
        they do not arrive, the local listener of that channel is called, unless `to` has left the world, which is
        reported elsewhere. SerializationError for values that cannot travel in parcels: RRefs travel in calls only."""
        kept = self._values
        body, tensors = kept.codec.encode_value(values, None, label, kept.routes.route_to(to, False))
        scope = None if kept.recorder is None else kept.recorder.record_cut_send(tensors, to, label)
        parcel = new_tuple(Parcel, (channel, place, label, scope, body))
        self._machine.feed_event(lambda node: node.send_message(to, parcel), may_wait=True)

    def _data_received(self, effect: DataReceived) -> None:
        parcel = effect.parcel
        if (listener := self._listeners.get(parcel.channel)) is not None:
            listener.parcel_received(parcel.place, partial(self._decode_data, effect.source, parcel.scope, parcel.body))

    def _decode_data(self, source: int, scope: Scope | None, body: Body) -> Any:
        recorder = self._values.recorder
        if scope is None or recorder is None:
            return self._values.codec.decode_value(body)

        def adopt(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            recorder.record_cut_receive(scope, tensors, source)
            return tensors

        return self._values.codec.decode_value(body, None, adopt)

    def _data_undelivered(self, effect: Undelivered) -> None:
        if (listener := self._listeners.get(effect.parcel.channel)) is not None:
            listener.delivery_failed(effect.parcel.place, effect.error)
