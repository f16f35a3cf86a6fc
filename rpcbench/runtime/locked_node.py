"""The node under its one lock: feed an event, release the lock, carry out the effects. Ctrl-C comes before or after.
The parts of an agent register the functions that carry out effects, so a new effect changes only its own part.

`with uninterrupted:` defers Ctrl-C while the main thread does a step that must be done as a whole or not at all. Python
raises KeyboardInterrupt between any two bytecodes of the main thread: between the numbering of a message and its
sending, or in the middle of a write. In the block it is deferred, and raised at the end. Rules
- The block never waits for another thread. Should it hang all the same, a second Ctrl-C, a second later, ends it.
- It costs two microseconds on the main thread; other threads never get the exception, and are not affected.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from _signal import getsignal as _getsignal  # type: ignore[import-not-found]  # `signal`'s take ten times as long,
from _signal import signal as _signal_  # because they make enums
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

from rpcbench.base.conditions import Event
from rpcbench.base.errors import ProtocolError
from rpcbench.protocol.effects import Effect, Effects, Send
from rpcbench.protocol.node import Node
from rpcbench.wire.messages import Call, Create, Fetch, Result

_PATIENCE = 1.0  # seconds
_SIGINT, _SIG_IGN = int(signal.SIGINT), int(signal.SIG_IGN)


class _Uninterrupted:
    """The block. Only the main thread changes it, and no signal interrupts that while its handler is set."""

    def __init__(self) -> None:
        self.main: int | None = None  # the thread that Ctrl-C can interrupt
        self.depth = 0  # of nested blocks
        self._before: Any = None  # handler outside the block
        self._keeps = self._handle_interrupt  # bound once, which saves time in each block
        self._kept: tuple[int, FrameType | None] | None = None  # the deferred signal
        self._since = 0.0

    def __enter__(self) -> None:
        if get_ident() != self.main:
            return
        if not self.depth:
            before = _getsignal(_SIGINT)
            if before is None or before == _SIG_IGN:
                return  # no handler of Python's, so nothing would raise
            self._before, self._kept = before, None  # first: from the next line on a Ctrl-C may be deferred
            _signal_(_SIGINT, self._keeps)
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        if self.depth and get_ident() == self.main:
            self.depth -= 1
            if not self.depth:
                _signal_(_SIGINT, self._before)
                if self._kept is not None:
                    _call_handler(self._before, *self._kept)

    def _handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._kept is None:
            self._kept, self._since = (number, frame), time.monotonic()
        elif time.monotonic() - self._since > _PATIENCE:
            self._kept = None
            _call_handler(self._before, number, frame)


def _call_handler(handler: Callable[[int, FrameType | None], Any] | int, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    else:
        signal.raise_signal(signal.SIGINT)


def is_main_thread() -> bool:
    return get_ident() == uninterrupted.main


def is_interruptible() -> bool:
    """Return whether Ctrl-C may be raised on this thread now."""
    held = uninterrupted
    return not held.depth and get_ident() == held.main


def _find_main_thread() -> None:
    uninterrupted.main = threading.main_thread().ident


uninterrupted = _Uninterrupted()
_find_main_thread()
os.register_at_fork(after_in_child=_find_main_thread)  # the thread that forks is the child's main thread


P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E")


class EffectTable:
    """Carries out effects: each part of an agent registers the functions for its own kinds. `send` sends a message."""

    def __init__(self, send: Callable[[Send, bool], None]) -> None:
        self._send = send
        self._handlers: dict[type[Any], Callable[[Any], object]] = {}

    def register(self, kind: type[E], handler: Callable[[E], object]) -> None:
        """Have `handler` carry out the effects of this kind. They come after the node's lock is released, and may come
        on any thread."""
        assert kind not in self._handlers, f"two parts of one agent carry out {kind.__name__}"
        self._handlers[kind] = handler

    def perform(self, effect: Effect, may_wait: bool) -> None:
        """Carry out one effect; may_wait: a write may block this thread."""
        if type(effect) is Send:
            self._send(effect, may_wait)
        elif (handler := self._handlers.get(type(effect))) is not None:
            handler(effect)
        else:
            raise ProtocolError(f"no part of this agent carries out {effect!r}: the feature that needs it is missing")


class LockedNode:
    """`perform(effect, may_wait)` carries one effect out; may_wait: a write may block this thread."""

    def __init__(self, node: Node, perform: Callable[[Effect, bool], None]) -> None:
        self._node = node
        self._perform = perform
        self._lock = threading.Lock()

    def feed_event(self, event: Callable[[Node], Effects], may_wait: bool = False) -> None:
        """Feed an event, and carry out its effects. `event` must not run user code, pickle, or do I/O."""
        if is_interruptible():
            with uninterrupted:
                self._apply_event(event, may_wait)
        else:  # saves the time of a block without effect
            self._apply_event(event, may_wait)

    def _apply_event(self, event: Callable[[Node], Effects], may_wait: bool) -> None:
        with self._lock:  # not held below: effects do I/O, and may feed the node again
            effects = event(self._node)
        perform = self._perform
        for effect in effects:
            perform(effect, may_wait)

    def read_node(self, question: Callable[Concatenate[Node, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Read the node's state, or change it in a way that has no effects."""
        with self._lock:
            return question(self._node, *args, **kwargs)

    # -- the fast path, see `protocol.node`
    def begin_call(self, to: int, message: Call | Create | Fetch, now: float, timeout: float | None) -> Send | None:
        with self._lock:
            return self._node.fast_call(to, message, now, timeout)

    def accept_request(self, source: int, seq: int, message: Call | Fetch, now: float) -> bool:
        with self._lock:
            return self._node.fast_take(source, seq, message, now)

    def number_reply(self, to: int, result: Result) -> Send | None:
        with self._lock:
            return self._node.fast_answer(to, result)

    def accept_reply(self, source: int, seq: int, result: Result) -> bool:
        with self._lock:
            return self._node.fast_resolve(source, seq, result)

    def flush_messages(self, seconds: float) -> None:
        """Wait at most `seconds` until peers have received all messages: after the end none is sent again."""
        arrived = Event()
        self.feed_event(lambda node: node.request_flush(arrived.set))
        arrived.wait(seconds)
