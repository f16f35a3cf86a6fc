"""The caller's side of calls: how a request goes out, what waits for its reply, and who receives that.

A request goes out whole, whatever Ctrl-C does. The thread that waits for the reply receives it itself where no other
thread reads the connection (see `receiver`); else the receive loop resolves what waits:

    rpc_async, remote   a `Future`, made at once
    rpc_sync, to_here   a `SyncCall`: a future is made of it only where the reply takes its time
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from rpcbench.agent import sites
from rpcbench.agent.deadlines import Deadlines
from rpcbench.agent.interrupts import uninterrupted
from rpcbench.agent.keeper import Keeper
from rpcbench.agent.links import Links
from rpcbench.agent.machine import Machine
from rpcbench.agent.monitor import LONG
from rpcbench.agent.peers import Peers
from rpcbench.agent.pool import Worker
from rpcbench.agent.sites import Site
from rpcbench.protocol import effects as fx
from rpcbench.protocol.calls import not_sent
from rpcbench.protocol.node import Node
from rpcbench.transport.stream import Receives
from rpcbench.wire.messages import Call, Create, Fetch
from rpcbench.words.changes import Changes
from rpcbench.words.config import UNSET_TIMEOUT
from rpcbench.words.errors import NOT_INITIALIZED
from rpcbench.words.futures import Answer, Future, HelpAlong, Kept, Later, Waits
from rpcbench.words.ids import OWN, Counter

_LEAST_SECONDS = 0.0001
"""What a call has left that has waited for room, at least."""


class SyncCall:
    """A call whose caller does nothing but wait for the reply.

    `receive` takes part in receiving it, for as long as the caller waits; `make(number)` makes the future.
    """

    __slots__ = ("_delivered", "_future", "_make", "_number", "_receive", "keeps")

    def __init__(
        self, number: int, receive: HelpAlong, make: Callable[[int], Future[Any]], keeps: Sequence[Kept]
    ) -> None:
        self.keeps = keeps
        self._number, self._receive, self._make = number, receive, make
        self._future: Future[Any] | None = None
        self._delivered: tuple[Answer, Later, bool] | None = None

    # Each of these two stores its own part before it looks for the other's: the second one brings them together.
    def deliver(self, answer: Answer, later: Later, lazy: bool = False) -> None:
        """See `Future.deliver`."""
        self._delivered = answer, later, lazy
        if self._future is not None:
            self._future.deliver(answer, later, lazy)

    def future(self) -> Future[Any]:
        """By the thread whose call it is."""
        if self._future is None:
            self._future = self._make(self._number)
            if self._delivered is not None:
                self._future.deliver(*self._delivered)
        return self._future

    def follows(self, future: Future[Any]) -> bool:
        """Whether this is its future."""
        return self._future is future

    @property
    def site(self) -> Site | None:
        """See `Future.site`. None where the thread whose call it is opens the answer itself."""
        return None if self._future is None else self._future.site

    def waits(self) -> bool:
        """Whether there is no reply yet."""
        return self._delivered is None

    def wait(self) -> Any:
        """What the reply says, or its error raised."""
        if self._delivered is None:
            self._receive(self.waits)
        if self._delivered is None:
            return self.future().wait()
        try:
            return self._delivered[0]()
        except Exception as error:  # noqa: BLE001  (whatever the call raised)
            raise error.with_traceback(None)  # noqa: B904  (its cause is what the callee has said)

    def cancel(self) -> bool:
        """See `Future.cancel`."""
        return self.future().cancel()


def waited_for(begin: Callable[[], SyncCall]) -> Any:
    """What a call returns. Ctrl-C gives it up, and comes before or after `begin`, not within."""
    call: SyncCall | None = None
    try:
        with uninterrupted:
            call = begin()
        return call.wait()
    except KeyboardInterrupt:
        if call is not None:
            call.cancel()
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
        self._calls: dict[int, Future[Any] | SyncCall] = {}

    def number(self, own: bool = False) -> int:
        """A new call's, which tells whether it is the bench's `own`."""
        return self._own_numbers.next() if own else self._numbers.next()

    def promise(self, number: int, receive: HelpAlong | None = None, keeps: Sequence[Kept] = ()) -> Future[Any]:
        """The future of a call. `receive`: see `Future.help_along`; `keeps`: what the call needs until its reply."""
        future = self._calls[number] = self._future(receive, number)
        future.keeps = keeps
        return future

    def sync_call(self, number: int, receive: HelpAlong, in_place: HelpAlong, keeps: Sequence[Kept]) -> SyncCall:
        """As `promise`, for a call whose caller does nothing but wait. `in_place`: as `receive`, before there is a
        future."""
        call = self._calls[number] = SyncCall(number, in_place, partial(self._future, receive), keeps)
        return call

    def _future(self, receive: HelpAlong | None, number: int) -> Future[Any]:
        future: Future[Any] = Future(on_cancel=partial(self._cancel, number), on_long=self._on_long, help_along=receive)
        future.site = sites.here()
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
        keeps = call.keeps
        if keeps:
            call.keeps = ()
        call.deliver(answer, self._later, lazy)
        for kept in keeps:
            kept.let_go()

    def asked(self, number: int) -> Future[Any] | SyncCall | None:
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
        return next((number for number, other in self._calls.copy().items() if other.follows(future)), None)

    def settle(self, timeout: float | None) -> int:
        """Wait until no call waits, `timeout` seconds at most; how many still do."""
        self._idle.wait_for(lambda: not self._calls, timeout)
        return len(self._calls)


class RequestSender:
    """Sends the requests of one agent. `send` carries a numbered message out; `running`: whether the agent does."""

    def __init__(
        self,
        machine: Machine,
        peers: Peers,
        keeper: Keeper,
        links: Links,
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
        """Of a request that changes more than the tables of calls (see `protocol.short`)."""

        def begin(node: Node) -> fx.Effects:  # a deadline that passes before the call is known would be missed
            self._keeper.wake_in(message.call, now, seconds)
            return node.call(to, message, now, seconds)

        self._machine.feed(begin)

    # -- threads that wait
    def receive_until(self, to: int, waiting: Waits, quiet: float = LONG) -> None:
        """On a thread that waits for a member, and has left all else that it had to do: see `Receiver`."""
        if (receiver := self._receiver(to)) is not None:
            receiver.receive_until(waiting, quiet)

    def receive_in_place(self, to: int, waiting: Waits) -> None:
        """As `receive_until`, on any thread: not where it has other work to leave first."""
        thread = threading.current_thread()
        if not isinstance(thread, Worker) or thread.may_wait():
            self.receive_until(to, waiting)

    def _receiver(self, to: int) -> Receives | None:
        connection = self._find(to)
        return None if connection is None else connection.receiver


def label_of(function: Any) -> str:
    """A short name for a function, for errors and pictures."""
    if type(function) is FunctionType:
        return function.__qualname__
    if type(function) is BuiltinFunctionType:  # what torch's __qualname__ says is a class that nobody knows
        return f"torch.{function.__name__}" if function.__module__ == "torch" else function.__qualname__
    if isinstance(function, torch.jit.ScriptFunction):
        return str(function.name)  # what its __qualname__ says is its class
    names = (getattr(function, attribute, None) for attribute in ("__qualname__", "__name__", "original_name"))
    return next((name for name in names if name and isinstance(name, str)), type(function).__name__)


def arguments_of(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of a call; None for none. TypeError for what cannot be any: a forgotten comma."""
    if args is not None and not isinstance(args, tuple | list):
        raise TypeError(f"args is a tuple or list of arguments, not {_a(args)}; for one argument write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"kwargs is a dict of named arguments, not {_a(kwargs)}")
    return tuple(args or ()), kwargs or {}


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def seconds_of(timeout: float, default: float) -> float | None:
    """A timeout as torch counts it: -1 the default, 0 none. ValueError for another negative number."""
    if timeout == UNSET_TIMEOUT:
        timeout = default
    if timeout < 0:
        raise ValueError(f"a timeout is a number of seconds, 0 for none, or -1 for the default; not {timeout}")
    return timeout or None
