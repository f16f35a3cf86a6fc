"""How a question goes out: whole, whatever Ctrl-C does; and who waits for the answer may read it.

A thread that is going to wait at once says so before it asks, see `Reading.expect`.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rpcbench.agent.keeper import Keeper
from rpcbench.agent.links import Links
from rpcbench.agent.machine import Machine
from rpcbench.agent.monitor import LONG
from rpcbench.agent.peers import Peers
from rpcbench.agent.pool import Worker
from rpcbench.agent.reading import PATIENCE
from rpcbench.agent.turns import Turn
from rpcbench.agent.waiting import Waiting
from rpcbench.protocol import effects as fx
from rpcbench.protocol.calls import not_sent
from rpcbench.protocol.node import Node
from rpcbench.transport.bells import Ear
from rpcbench.transport.stream import Reads
from rpcbench.wire.body import Body
from rpcbench.wire.messages import Call, Create, Fetch
from rpcbench.words.errors import NOT_INITIALIZED
from rpcbench.words.futures import Future, Kept, Waits

_SOON = 0.0001
"""Seconds after which who waits for a call has done something else before."""
_OFTEN = 3
_SMALL = 2 << 20
"""Bytes that are copied in about a tenth of the time that a token may lie on the table."""
_PAUSE = 16
"""So many calls were waited for soon, and so many more are to be after one that was not."""


class _Habit:
    """Whether calls of one member are waited for soon by programs that do not say so before: from what they have done.

    What counts is the time that a program takes for itself, from a call, or several, to the wait for one of them.
    """

    __slots__ = ("_away", "_since", "_times", "left")

    def __init__(self) -> None:
        self._times = 0
        self.left = False  # a call that nobody has said anything of, or waited for
        self._since = 0.0  # since when the program does something else
        self._away = 0.0  # for so long it has since the first such call

    def begins(self, now: float, waits: bool) -> bool:
        """A call is about to go out; whether it is likely to be waited for soon. `waits`: it is."""
        if self.left:
            self._away += now - self._since
            if self._away > _SOON:
                self._times, self.left = -_PAUSE, False
        if not (waits or self.left):
            self.left, self._away = True, 0.0
        return waits or self._times >= _OFTEN

    def asks(self, now: float) -> None:
        """One goes out whose caller waits for nothing else."""
        if self.left:
            self._away += now - self._since
            self._times, self.left = self._times + 1 if self._away <= _SOON else -_PAUSE, False

    def begun(self, now: float) -> None:
        """It has gone out."""
        self._since = now

    def waits(self, now: float) -> None:
        """A thread waits for one."""
        if self.left:
            self._times = self._times + 1 if self._away + now - self._since <= _SOON else 0
            self.left = False


def _never() -> bool:
    return False


def _may_wait() -> bool:
    """Whether this thread may wait for a moment as it is; else it has something to leave to others before."""
    thread = threading.current_thread()
    return not isinstance(thread, Worker) or thread.may_wait()


def _is_small(body: Body) -> bool:
    """Whether it goes out in a moment: what takes its time to copy keeps nobody from reading meanwhile."""
    return not body.buffers or sum([memoryview(buffer).nbytes for buffer in body.buffers]) <= _SMALL


class Asking:
    """Of one agent."""

    def __init__(
        self,
        machine: Machine,
        peers: Peers,
        keeper: Keeper,
        links: Links,
        waiting: Waiting,
        send: Callable[[fx.Send, bool], None],
        running: Callable[[], bool],
    ) -> None:
        self._waiting = waiting
        self._send = send
        self._machine = machine
        self._find = peers.find
        self._keeper = keeper
        self._links = links
        self._running = running
        self._habits: collections.defaultdict[int, _Habit] = collections.defaultdict(_Habit)

    def await_room(self, to: int, label: str, seconds: float | None) -> float | None:
        """Wait, before a call, while its receiver is far behind: how many seconds the call has then. RpcTimeoutError
        where none are left; nothing has been sent then. All waiting is here, so what follows can be uninterrupted."""
        if (connection := self._find(to)) is None or not connection.full:
            return seconds
        began = time.monotonic()
        if not connection.await_room(seconds):
            raise not_sent(label, self._machine.ask(lambda node: node.name(to)), seconds or 0.0)
        return seconds and max(_SOON, seconds - (time.monotonic() - began))

    def ask(self, to: int, message: Call | Fetch, seconds: float | None, keeps: Sequence[Kept]) -> Future[Any] | Turn:
        """Send a call whose caller is going to wait for the answer at once; by a thread that is not interrupted.

        `keeps`: what the call needs until then.
        """
        if isinstance(message, Fetch) or (not message.forks and _is_small(message.body)):
            reading = self._claimed(to)
            if reading is not None:
                turn = self._waiting.turn(message.call, partial(self._future, to), keeps)
                if self._in_turn(reading, turn, to, message, seconds):
                    return turn
        future = self._waiting.promise(message.call, partial(self.help_along, to), keeps)
        self.begin(to, message, seconds, waits=True)
        return future

    def _future(self, to: int, number: int) -> Future[Any]:
        return self._waiting.future(number, partial(self.help_along, to))

    def _in_turn(self, reading: Reads, turn: Turn, to: int, message: Call | Fetch, seconds: float | None) -> bool:
        """The short way: this thread keeps the token of the connection from the question to the answer. False where
        nothing has been done."""
        sent = None
        try:
            now = self._links.clock()
            if self._running():  # looked at now: an agent that stops ends all turns that it knows of
                sent = self._machine.call(to, message, now, seconds)
            if sent is not None:
                self._keeper.wake_in(message.call, now, seconds)
                self._send(sent, False)
        finally:
            reading.lead(_never if sent is None else turn.waits)
        return sent is not None

    def _claimed(self, to: int) -> Reads | None:
        """The connection, if this thread has its token now."""
        connection, habit = self._find(to), self._habits.get(to)
        if connection is None or (reading := connection.reading) is None or connection.full:
            return None
        if not _may_wait() or not reading.claim():
            return None
        if habit is not None and habit.left:
            habit.asks(time.monotonic())
        return reading

    def begin(self, to: int, message: Call | Create | Fetch, seconds: float | None, waits: bool = False) -> None:
        """Send it. `waits`: this thread waits for the answer at once."""
        if not self._running():
            raise RuntimeError(NOT_INITIALIZED)
        habit = self._habits[to]
        if habit.begins(time.monotonic(), waits) and type(message) is not Create:
            self.expect(to)
        if (not isinstance(message, Fetch) and message.forks) or not self._briefly(to, message, seconds):
            self._at_length(to, message, seconds)
        habit.begun(time.monotonic())

    def _briefly(self, to: int, message: Call | Create | Fetch, seconds: float | None) -> bool:
        """The short way; False where nothing has been done."""
        now = self._links.clock()
        sent = self._machine.call(to, message, now, seconds)
        if sent is None:
            return False
        self._keeper.wake_in(message.call, now, seconds)
        self._send(sent, False)
        return True

    def _at_length(self, to: int, message: Call | Create | Fetch, seconds: float | None) -> None:
        now = self._links.clock()

        def begin(node: Node) -> fx.Effects:  # a deadline that passes before the call is known would be missed
            self._keeper.wake_in(message.call, now, seconds)
            return node.call(to, message, now, seconds)

        self._machine.feed(begin)

    def expect(self, to: int) -> None:
        """Of a thread that is about to send a member something, and to wait for the answer: unless it has other work to
        leave first, it is to read that itself."""
        if _may_wait() and (reading := self._reading(to)) is not None:
            reading.expect()

    def help_along(self, to: int, waiting: Waits) -> None:
        """Of a thread that waits for an answer."""
        self._habits[to].waits(time.monotonic())
        if (reading := self._reading(to)) is not None:
            reading.read_while(waiting, LONG)

    def read_while(self, waiting: Waits, to: int, free: bool = False, ear: Ear | None = None) -> None:
        """Of a thread that waits for words of a member: unless it has other work to leave, it may read them itself.

        `free`: it has left that (see `blocked`), waits for nothing that could not wait a tenth of a second, and will be
        back for more (see `keep`), unless that comes by a lane: then `ear` is where its bell is heard.
        """
        if not (free or _may_wait()):
            return
        if (reading := self._reading(to)) is not None:
            reading.read_while(waiting, PATIENCE if free else LONG, back=free and ear is None, ear=ear)

    def keep(self, to: int) -> None:
        """Of a thread that has had what it waited for from a member, and will soon wait for more: until then nobody
        else is woken by what comes from there, but where that takes its time."""
        if (reading := self._reading(to)) is not None:
            reading.keep()

    def leave(self, to: int) -> None:
        """Of a thread that has said so, and waits for something now that others have to read."""
        if (reading := self._reading(to)) is not None:
            reading.hand_over()

    def _reading(self, to: int) -> Reads | None:
        connection = self._find(to)
        return None if connection is None else connection.reading
