"""The caller's side of calls: how a request goes out, what waits for its reply, and who receives that.

A request goes out whole, whatever Ctrl-C does. The thread that waits for the reply receives it itself, where it has
nothing else to do and no other thread reads the connection (see `receiver`); else the receive loop resolves the future.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rpcbench.base.conditions import Changes
from rpcbench.base.errors import NOT_INITIALIZED
from rpcbench.base.futures import Answer, Future, HelpAlong, Kept, Later, Waits
from rpcbench.base.ids import OWN, Counter
from rpcbench.protocol import effects as fx
from rpcbench.protocol.calls import not_sent
from rpcbench.protocol.node import Node
from rpcbench.runtime.connections import ConnectionManager
from rpcbench.runtime.handles import CreationSite
from rpcbench.runtime.interceptors import Interceptors
from rpcbench.runtime.interrupts import uninterrupted
from rpcbench.runtime.locked_node import LockedNode
from rpcbench.runtime.pool import LONG, Worker
from rpcbench.runtime.timers import Deadlines, MaintenanceThread
from rpcbench.wire.messages import Call, Create, Fetch

_LEAST_SECONDS = 0.0001  # that a call has left which has waited for room


def waited_for(begin: Callable[[], Future[Any]]) -> Any:
    """What a call returns. Ctrl-C gives it up, and comes before or after `begin`, not within."""
    future: Future[Any] | None = None
    try:
        with uninterrupted:
            future = begin()
        return future.wait()
    except KeyboardInterrupt:
        if future is not None:
            future.cancel()
        raise


class PendingCalls:
    """Calls of this member that wait for their replies; each is resolved once. And their deadlines.

    `first`: the number of the first call. It differs between incarnations, as a call may outlive its caller.
    """

    def __init__(
        self, first: int, later: Later, cancel: Callable[[int], None], on_long: Callable[[float], object]
    ) -> None:
        self.deadlines = Deadlines()
        self._later, self._cancel, self._on_long = later, cancel, on_long
        self._numbers, self._own_numbers = Counter(first), Counter(first | OWN)
        self._idle = Changes()
        self._calls: dict[int, Future[Any]] = {}

    def number(self, own: bool = False) -> int:
        """A new call's, which tells whether it is the bench's `own`."""
        return self._own_numbers.next() if own else self._numbers.next()

    def promise(
        self,
        number: int,
        receive: HelpAlong | None = None,
        keeps: Sequence[Kept] = (),
        site: CreationSite | None = None,
    ) -> Future[Any]:
        """The future of a call. `receive`: see `Future.help_along`; `keeps`: what the call needs until its reply.
        `site`: where the call was made, unless that thread opens the answer itself."""
        future: Future[Any] = Future(on_cancel=partial(self._cancel, number), on_long=self._on_long, help_along=receive)
        future.keeps, future.site = keeps, site
        self._calls[number] = future
        return future

    def finish(self, number: int, answer: Answer, lazy: bool = True) -> None:
        """The reply has come, or there will be none and `answer` raises why. Not `lazy`: it is to be opened even if
        nobody asks for it."""
        self.deadlines.clear(number)
        call = self._calls.pop(number, None)
        if not self._calls:
            self._idle.tell()
        if call is None:
            return
        keeps, call.keeps = call.keeps, ()
        call.deliver(answer, self._later, lazy)
        for kept in keeps:
            kept.let_go()

    def asked(self, number: int) -> Future[Any] | None:
        """What waits for the reply to a call."""
        return self._calls.get(number)

    def keeping(self, kept: Kept) -> bool:
        """Whether any call that waits keeps this."""
        return any(one is kept for call in list(self._calls.values()) for one in call.keeps)

    def due(self) -> bool:
        """Whether any call waits."""
        return bool(self._calls)

    def fail(self, number: int, error: Exception) -> None:
        def answer() -> None:
            raise error

        self.finish(number, answer)

    def fail_all(self, error: Exception) -> None:
        for number in list(self._calls):
            self.fail(number, error)

    def number_of(self, future: Future[Any]) -> int | None:
        """The call that this is the future of, while it waits."""
        return next((number for number, other in self._calls.copy().items() if other is future), None)

    def settle(self, timeout: float | None) -> int:
        """Wait until no call waits, `timeout` seconds at most; how many still do."""
        self._idle.wait_for(lambda: not self._calls, timeout)
        return len(self._calls)


class RequestSender:
    """Sends the requests of one agent. `send` carries a numbered message out; `running`: whether the agent does."""

    def __init__(
        self,
        machine: LockedNode,
        peers: ConnectionManager,
        keeper: MaintenanceThread,
        links: Interceptors,
        send: Callable[[fx.Send, bool], None],
        running: Callable[[], bool],
    ) -> None:
        self._machine, self._keeper, self._links = machine, keeper, links
        self._find = peers.find
        self._send, self._running = send, running

    def await_room(self, to: int, label: str, seconds: float | None) -> float | None:
        """Backpressure: wait, before a call, while its receiver is far behind: how many seconds the call has then.

        RpcTimeoutError where none are left; nothing has been sent then. No request waits later than here, so what
        follows can be uninterrupted.
        """
        if (connection := self._find(to)) is None or not connection.full:
            return seconds
        began = time.monotonic()
        if not connection.await_room(seconds):
            raise not_sent(label, self._machine.ask(lambda node: node.name(to)), seconds or 0.0)
        return seconds and max(_LEAST_SECONDS, seconds - (time.monotonic() - began))

    def send(self, to: int, message: Call | Create | Fetch, seconds: float | None) -> None:
        """Send a request that is pending already. RuntimeError where the agent does not run any more."""
        if not self._running():  # looked at now: an agent that stops fails all calls that are pending then
            raise RuntimeError(NOT_INITIALIZED)
        now = self._links.clock()
        plain = isinstance(message, Fetch) or not message.forks
        numbered = self._machine.call(to, message, now, seconds) if plain else None
        if numbered is None:
            self._at_length(to, message, now, seconds)
        else:
            self._keeper.wake_in(message.call, now, seconds)
            self._send(numbered, False)

    def _at_length(self, to: int, message: Call | Create | Fetch, now: float, seconds: float | None) -> None:
        """Of a request that changes more than the tables of calls (see `protocol.node`)."""

        def begin(node: Node) -> fx.Effects:  # a deadline that passes before the call is known would be missed
            self._keeper.wake_in(message.call, now, seconds)
            return node.call(to, message, now, seconds)

        self._machine.feed(begin)

    # -- threads that wait
    def receive_until(self, to: int, waiting: Waits, quiet: float = LONG) -> None:
        """On a thread that waits for a member, and has nothing else to do: see `Receiver`."""
        connection = self._find(to)
        if connection is not None and connection.receiver is not None:
            connection.receiver.receive_until(waiting, quiet)

    def receive_in_place(self, to: int, waiting: Waits) -> None:
        """As `receive_until`, on any thread: not where others would have to do its work meanwhile."""
        thread = threading.current_thread()
        if not isinstance(thread, Worker) or thread.may_wait():
            self.receive_until(to, waiting)
