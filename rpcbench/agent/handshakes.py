"""Who this member is, in each of its handshakes.

They are numbered, so that a dialler without a connection can say which of those of before have ended, whatever they
look like from the other side; but never one that is about to stand.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from rpcbench.transport.handshake import NEWCOMER, Identity


class Handshakes:
    def __init__(self, me: Identity) -> None:
        self.me = me
        self._lock = threading.Lock()
        self._serials = itertools.count(1)
        self._opening: set[int] = set()

    @contextlib.contextmanager
    def one(self, afresh: Callable[[], bool] = lambda: False) -> Iterator[Identity]:
        """What this member is called in one handshake. `afresh`: whether it has no connection to that peer now."""
        with self._lock:
            serial = next(self._serials)
            base = min(self._opening, default=serial)
            self._opening.add(serial)
        try:
            yield replace(self.me, serial=serial, base=base if afresh() else 0)
        finally:
            with self._lock:
                self._opening.remove(serial)

    def met(self, leader: Identity) -> None:
        """The world that this process asks to join is the one it has found."""
        if self.me.epoch == NEWCOMER:
            self.me = replace(self.me, epoch=leader.epoch)
