"""How a question goes out: whole, whatever Ctrl-C does; and who waits for the answer may read it.

A thread that is going to wait at once for what it asks reads the connection from before it asks, see `Reading.ask`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rpcbench.agent.interrupts import on_main_thread, uninterrupted
from rpcbench.agent.keeper import Keeper
from rpcbench.agent.machine import Machine
from rpcbench.agent.monitor import LONG
from rpcbench.agent.peers import Peers
from rpcbench.agent.pool import Worker
from rpcbench.agent.reading import PATIENCE
from rpcbench.protocol import effects as fx
from rpcbench.protocol.node import Node
from rpcbench.wire.messages import Call, Create, Fetch
from rpcbench.words.errors import NOT_INITIALIZED
from rpcbench.words.futures import Future, Waits


class Asking:
    """Of one agent."""

    def __init__(
        self,
        machine: Machine,
        peers: Peers,
        keeper: Keeper,
        clock: Callable[[], float],
        running: Callable[[], bool],
    ) -> None:
        self._machine = machine
        self._peers = peers
        self._keeper = keeper
        self._clock = clock
        self._running = running

    def whole(self, to: int) -> AbstractContextManager[None]:
        """Around a call that Ctrl-C may not cut in two; so on the main thread all waiting comes before."""
        if on_main_thread():
            self._peers.await_room(to)
        return uninterrupted

    def begin(
        self, to: int, message: Call | Create | Fetch, seconds: float | None, asks: Future[Any] | None = None
    ) -> None:
        """Send it. `asks`: what this thread waits for next. It reads that itself, unless it has other work to leave."""
        if not self._running():
            raise RuntimeError(NOT_INITIALIZED)
        now = self._clock()

        def begin(node: Node) -> fx.Effects:  # a deadline that passes before the call is known would be missed
            self._keeper.wake_in(message.call, now, seconds)
            return node.call(to, message, now, seconds)

        if asks is None or isinstance(threading.current_thread(), Worker):
            self._machine.feed(begin, may_wait=not on_main_thread())
        else:
            asks.attend(lambda waiting: self._peers.ask(to, lambda: self._machine.feed(begin), waiting))

    def read_while(self, waiting: Waits, to: int, free: bool = False) -> None:
        """Of a thread that waits for words of a member: unless it has other work to leave, it may read them itself.

        `free`: it has left that (see `blocked`), and waits for nothing that could not wait a tenth of a second.
        """
        if free or not isinstance(threading.current_thread(), Worker):
            self._peers.read_while(to, waiting, PATIENCE if free else LONG)
