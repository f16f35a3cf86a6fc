"""The node under its one lock: feed an event, let go, then carry out the effects. Ctrl-C comes before or after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from rpcbench.base.conditions import Flag
from rpcbench.protocol.effects import Effect, Effects, Send
from rpcbench.protocol.node import Node
from rpcbench.runtime.interrupts import interruptible, uninterrupted
from rpcbench.wire.messages import Call, Create, Fetch, Result

P = ParamSpec("P")
T = TypeVar("T")
Perform = Callable[[Effect, bool], None]
"""(effect, may_wait): carry one effect out; may_wait says whether a write may hold this thread up."""


class LockedNode:
    def __init__(self, node: Node, perform: Perform) -> None:
        self._node = node
        self._perform = perform
        self._lock = threading.Lock()

    def feed(self, event: Callable[[Node], Effects], may_wait: bool = False) -> None:
        """An event, and all that follows from it. `event` must not run user code, pickle, or do I/O."""
        if interruptible():
            with uninterrupted:
                self._feed(event, may_wait)
        else:  # quicker than a block that changes nothing
            self._feed(event, may_wait)

    def _feed(self, event: Callable[[Node], Effects], may_wait: bool) -> None:
        with self._lock:
            effects = event(self._node)
        perform = self._perform
        for effect in effects:
            perform(effect, may_wait)

    def ask(self, question: Callable[Concatenate[Node, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Look something up, or change what has no effects."""
        with self._lock:
            return question(self._node, *args, **kwargs)

    # -- the fast path, see `protocol.node`
    def call(self, to: int, message: Call | Create | Fetch, now: float, timeout: float | None) -> Send | None:
        with self._lock:
            return self._node.fast_call(to, message, now, timeout)

    def take(self, source: int, seq: int, message: Call | Fetch, now: float) -> bool:
        with self._lock:
            return self._node.fast_take(source, seq, message, now)

    def answer(self, to: int, result: Result) -> Send | None:
        with self._lock:
            return self._node.fast_answer(to, result)

    def resolve(self, source: int, seq: int, result: Result) -> bool:
        with self._lock:
            return self._node.fast_resolve(source, seq, result)

    def flush(self, seconds: float) -> None:
        """Wait until the others have what was sent, so many seconds at most: nobody sends it again once we stop."""
        arrived = Flag()
        self.feed(lambda node: node.flush(arrived.set))
        arrived.wait(seconds)
