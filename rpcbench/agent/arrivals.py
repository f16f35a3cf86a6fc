"""Each message that arrives goes to the machine, and each reply to the call that waits for it.

Calls, fetches and results that bring no RRefs take the short way, where there is one (see `protocol.node`). A call
that finds room then begins at once, on the thread that runs the receive loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rpcbench.agent import serve
from rpcbench.agent.interrupts import interruptible
from rpcbench.agent.links import Links
from rpcbench.agent.machine import Machine
from rpcbench.agent.pool import CountedCall, Pool
from rpcbench.agent.requests import PendingCalls
from rpcbench.agent.roster import Roster
from rpcbench.base.conditions import Flag
from rpcbench.base.futures import Future
from rpcbench.wire import messages as m


class Receiving(serve.Server, Protocol):
    """What this needs of an agent."""

    links: Links
    machine: Machine
    roster: Roster
    pending: PendingCalls
    ready: Flag


class Arrivals:
    """`run` runs a call, on this thread."""

    def __init__(self, agent: Receiving, pool: Pool) -> None:
        self.run: Callable[[int, Any], object] = partial(serve.serve, agent)
        self._agent = agent
        self._pool = pool

    def deliver(self, source: int, seq: int, message: m.Message) -> None:
        """A message has come."""
        kind = type(message)
        if kind is m.Result:
            if self._settle(source, seq, message):
                return
        elif kind is m.Fetch or (kind is m.Call and not message.forks):
            if self._take(source, seq, message):
                return
        elif kind is m.Report:  # whoever knows why may have to wait for the exit status
            self._pool.spawn(lambda: self._handle(source, seq, self._agent.roster.explained(message)))
            return
        self._handle(source, seq, message)

    def _handle(self, source: int, seq: int, message: m.Message) -> None:
        now = self._agent.links.clock()
        self._agent.machine.feed(lambda node: node.handle(source, seq, message, now))

    def answered(self, source: int, answer: m.Result | m.Failure) -> None:
        """A call that waits has its answer."""
        if isinstance(answer, m.Result):
            # What it brings besides values must reach the protocol, whether anybody asks for the values or not.
            lazy = not answer.forks and answer.scope is None
            asked = self._agent.pending.asked(answer.call) if answer.forks else None
            self._agent.pending.finish(answer.call, partial(self._open, source, answer, asked), lazy)
        else:
            name = self._agent.roster.name
            failure = answer
            self._agent.pending.finish(failure.call, lambda: serve.reraise(self._agent, name(source), failure))

    def _open(self, source: int, answer: m.Result, asked: Future[Any] | None) -> Any:
        if not answer.body.payload:
            return None
        site = None if asked is None else asked.site
        return self._agent.values.unpack(source, answer.body, answer.forks, answer.scope, True, site)

    # -- the short way; False where nothing has been done, as where Ctrl-C could come between two steps
    def _take(self, source: int, seq: int, message: m.Call | m.Fetch) -> bool:
        if not self._agent.ready.is_set():  # the caller knew the world sooner than we do
            return False
        loop = self._pool.let_in()
        if loop is None:
            return False
        taken = self._agent.machine.take(source, seq, message, self._agent.links.clock())
        if taken:
            loop.calls.append(CountedCall(self.run, source, message))
        else:
            self._pool.end()
        return taken

    def _settle(self, source: int, seq: int, result: m.Result) -> bool:
        if result.forks or interruptible() or not self._agent.machine.resolve(source, seq, result):
            return False
        self.answered(source, result)
        return True
