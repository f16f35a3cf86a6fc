"""Notices: one-way words to whoever listens on a channel, one at a time for each channel, in order of arrival."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import msgpack

from rpcbench.agent.pool import Job

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
