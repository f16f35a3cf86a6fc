"""A network that misbehaves: a link that loses, delays, repeats, holds and refuses what one member sends.

    faults = Faults(seed=7, drop=0.1, duplicate=0.1, delay=0.02)   # each message takes its chances
    faults.drop("ForkRequest", times=2)                            # or: each of these is lost twice
    faults.hold("UserDelete", to=2)                                # or: these stay here until `release`

Give it to `start_agent` or to the options of `rpcbench.testing`, or call `install` in a worker that runs already. It
disturbs what its own member sends; to cut two members off from each other, cut both. `history` tells what was sent and
received, and what became of it.

The same seed gives the same message the same fate, in whatever order threads get here. Nothing of it is visible to
programs but time, and the errors that a lossy network really brings.

On all members of a world at once, for drills: what a program says is lost, late or said twice; cells, output and panels
are not.

    drill = Drill.on(drop=0.1, delay=0.05, seed=7)
    ...
    drill.off()

A program's messages are those of calls, RRefs and backward passes. All else is what a notebook needs to go on:
membership, acknowledgements, cells and their output, telemetry, stepping itself. Members that come later are disturbed,
too.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from rpcbench.base.conditions import Changes
from rpcbench.base.errors import ConnectionLostError, RpcError
from rpcbench.base.ids import OWN, Id
from rpcbench.protocol.delivery import count_of
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import WorkerInfo
from rpcbench.transport.base import Link
from rpcbench.wire import messages as m
from rpcbench.wire.messages import KINDS, Body, Message


def message_line(value: Any) -> str:
    """A message, or a part of one: its kind and its fields, without the data of users."""
    if not isinstance(value, tuple) or isinstance(value, Id):
        return str(value)
    name = type(value).__name__ if hasattr(value, "_fields") else ""
    return f"{name}({', '.join(message_line(field) for field in value if not isinstance(field, Body))})"


PROGRAM: dict[str, type[Any]] = {
    message_kind.__name__: message_kind
    for message_kind in (
        m.Call, m.Create, m.Uncreated, m.Fetch, m.Result, m.Failure, m.Cancel,
        m.ForkRequest, m.ForkAccept, m.ChildAccept, m.UserDelete,
        m.Discover, m.Discovered, m.Gradients, m.Settled, m.WalkFailed, m.ReleaseContext, m.Attending, m.Parcel,
    )
}  # fmt: skip
"""Kinds of messages that programs cause, by name."""
_KINDS = frozenset(PROGRAM.values())
_IDS = ("rref", "fork", "context", "call", "message")


def of_program(message: m.Message) -> bool:
    """Whether it is no word of the bench's own."""
    return type(message) in _KINDS and not getattr(message, "call", 0) & OWN


def message_ids(message: m.Message) -> dict[str, str]:
    """What a message is about: the RRef, fork, autograd context, call, and number in its context, as text."""
    found = {name: str(getattr(message, name)) for name in _IDS if hasattr(message, name)}
    scope = getattr(message, "scope", None)
    if scope is not None:
        found |= {"context": str(scope.context), "message": str(scope.message)}
    forks = getattr(message, "forks", ())
    if forks:
        found["shares"] = ", ".join(str(fork.rref) for fork in forks)
    return found


_Job = tuple[float, int, Callable[[], None]]
"""When, in which order, what."""


class DelayQueue:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes = Changes()
        self._jobs: list[_Job] = []
        self._order = count()
        self._running = False

    def after(self, seconds: float, job: Callable[[], None]) -> None:
        """Run `job` when so much time has passed. It must not raise."""
        with self._lock:
            heapq.heappush(self._jobs, (time.monotonic() + seconds, next(self._order), job))
            running, self._running = self._running, True
        if running:
            self._changes.tell()
        else:
            threading.Thread(target=self._run, name="rpcbench-testing-later", daemon=True).start()

    def clear(self) -> None:
        """What still waits is forgotten."""
        with self._lock:
            self._jobs.clear()
        self._changes.tell()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Callable[[], None] | None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return None
                first = self._jobs[0]
                if first[0] <= time.monotonic():
                    return heapq.heappop(self._jobs)[2]
            self._changes.wait_for(partial(self._has_gone, first), first[0] - time.monotonic())

    def _has_gone(self, first: _Job) -> bool:
        """Whether this is not the first any more."""
        with self._lock:
            return self._jobs[:1] != [first]


Which = str | Callable[[Message], bool]
"""The name of a kind of message, as `rpcbench.wire.messages` has it, or whether a message is meant."""
_NAMES = frozenset(kind.__name__ for kind in KINDS)
_REMEMBERED = 10_000


@dataclass(slots=True)
class Rule:
    """What becomes of some messages: lost or refused the first `times` times, late by `seconds`, or held."""

    which: Which
    to: int | None
    times: int = 0
    refused: bool = False
    seconds: float = 0.0
    held: bool = False

    def means(self, to: int, message: Message) -> bool:
        if self.to is not None and self.to != to:
            return False
        return type(message).__name__ == self.which if isinstance(self.which, str) else self.which(message)


class Faults(Link):
    """`drop` and `duplicate` are shares of all messages, 0 to 1; `delay` is the longest time one may take, in seconds.

    `retry_seconds`: after how long a message that is not acknowledged goes again.

    >>> from rpcbench.testing import Faults, install
    >>> faults = install(Faults(seed=7, delay=0.01))
    >>> faults.drop("Call")
    >>> rpc.rpc_sync("worker1", abs, (-1,), timeout=0.5)
    Traceback (most recent call last):
    rpcbench.base.errors.RpcTimeoutError: RPC ran for more than set timeout (500 ms)...
    >>> any("Call" in line and "lost" in line for line in faults.history)
    True
    >>> faults.heal()
    """

    lossy = True

    def __init__(
        self,
        seed: int = 0,
        drop: float = 0.0,
        duplicate: float = 0.0,
        delay: float = 0.0,
        retry_seconds: float = Link.retry_seconds,
    ) -> None:
        super().__init__()
        self.retry_seconds = retry_seconds
        self._seed, self._shares, self._longest = seed, (drop, duplicate), delay
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._cut: set[int] = set()
        self._held: list[tuple[int, int, Message]] = []
        self._tries: collections.Counter[tuple[int, int]] = collections.Counter()
        self._history: collections.deque[str] = collections.deque(maxlen=_REMEMBERED)
        self._began = time.monotonic()
        self._later = DelayQueue()

    # -- what to do
    def drop(self, which: Which, to: int | None = None, times: int = 1) -> None:
        """Lose such messages: each of them the first `times` times it is sent."""
        self._add(Rule(which, to, times))

    def refuse(self, which: Which, to: int | None = None, times: int = 1) -> None:
        """Fail to send such messages, so that the sender knows: each of them the first `times` times."""
        self._add(Rule(which, to, times, refused=True))

    def delay(self, which: Which, seconds: float, to: int | None = None) -> None:
        """Let such messages take that long."""
        self._add(Rule(which, to, seconds=seconds))

    def hold(self, which: Which, to: int | None = None) -> None:
        """Keep such messages here until `release`."""
        self._add(Rule(which, to, held=True))

    def cut(self, to: int) -> None:
        """Lose everything to this member until `heal`."""
        with self._lock:
            self._cut.add(to)

    def release(self) -> None:
        """Hold nothing any more, and let go what is held, in order."""
        with self._lock:
            self._rules = [rule for rule in self._rules if not rule.held]
            held, self._held = self._held, []
        for message in held:
            self._late(*message)

    def heal(self) -> None:
        """From now on all messages pass; those that are held go out."""
        with self._lock:
            self._rules.clear()
            self._cut.clear()
            self._shares, self._longest = (0.0, 0.0), 0.0
        self.release()

    # -- what happened
    @property
    def history(self) -> list[str]:
        """One line for each message sent and received, the oldest first."""
        with self._lock:
            return list(self._history)

    @property
    def held(self) -> list[str]:
        """The messages that are held, as lines."""
        with self._lock:
            return [message_line(message) for _, _, message in self._held]

    # -- the link
    def outgoing(self, to: int, seq: int, message: Message, may_wait: bool) -> None:
        with self._lock:
            fates, what = self._fates(to, seq, message)
            self._tell(f"to {to}", seq, message, what)
        if what == "refused":
            raise ConnectionLostError(f"{type(message).__name__} to worker {to} was refused on purpose", False)
        for seconds in fates:
            if seconds:
                self._later.after(seconds, lambda: self._late(to, seq, message))
            else:
                super().outgoing(to, seq, message, may_wait)

    def incoming(self, source: int, seq: int, message: Message) -> None:
        with self._lock:
            self._tell(f"from {source}", seq, message, "")
        super().incoming(source, seq, message)

    def closed(self) -> None:
        self._later.clear()

    # -- inside
    def _add(self, rule: Rule) -> None:
        if isinstance(rule.which, str) and rule.which not in _NAMES:
            raise ValueError(f"there is no message {rule.which!r}; there are: {', '.join(sorted(_NAMES))}")
        with self._lock:
            self._rules.append(rule)

    def _fates(self, to: int, seq: int, message: Message) -> tuple[list[float], str]:
        """When copies of a message go out, in seconds from now, and what to call that."""
        if to in self._cut:
            return [], "lost: cut off"
        turn = self._tries[to, seq] = self._tries[to, seq] + 1
        late = 0.0
        for rule in self._rules:
            if rule.means(to, message):
                if rule.held:
                    self._held.append((to, seq, message))
                    return [], "held"
                if turn <= rule.times:
                    return [], "refused" if rule.refused else "lost"
                late += rule.seconds
        return self._chance(self._dice(to, seq, turn), late)

    def _dice(self, to: int, seq: int, turn: int) -> random.Random:
        """What decides on the fate of a message that is sent for the `turn`-th time."""
        return random.Random(f"{self._seed} {to} {seq} {turn}")

    def _chance(self, chances: random.Random, late: float) -> tuple[list[float], str]:
        drop, duplicate = self._shares
        if chances.random() < drop:
            return [], "lost"
        copies = 2 if chances.random() < duplicate else 1
        fates = [late + chances.uniform(0, self._longest) for _ in range(copies)]
        return fates, ", ".join(["twice"] * (copies - 1) + ["late"] * any(fates))

    def _late(self, to: int, seq: int, message: Message) -> None:
        with contextlib.suppress(RpcError):  # nobody waits for the news; what is lost is seen to
            super().outgoing(to, seq, message, False)

    def _tell(self, where: str, seq: int, message: Message, what: str) -> None:
        told = f"{time.monotonic() - self._began:9.4f}  {where} #{count_of(seq)} {message_line(message)}"
        self._history.append(f"{told}: {what}" if what else told)


def install(faults: Faults, agent: Agent | None = None) -> Faults:
    """Disturb what a running agent sends from now on; by default, the agent of this process."""
    (agent or current.current()).links.use(faults)
    return faults


class Settings(NamedTuple):
    """Shares of all messages that are lost and that come twice, 0 to 1; the longest delay in seconds; the seed."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    seed: int = 0


class Chaos(Faults):
    """The faults of one member, of the messages of programs only."""

    def __init__(self, me: int, settings: Settings) -> None:
        super().__init__(settings.seed, settings.drop, settings.duplicate, settings.delay)
        self._me = me
        self._numbers: dict[tuple[int, int], int] = {}
        self._sent: Counter[int] = Counter()

    def outgoing(self, to: int, seq: int, message: Message, may_wait: bool) -> None:
        if of_program(message) and to != self._me:
            super().outgoing(to, seq, message, may_wait)
        else:
            Link.outgoing(self, to, seq, message, may_wait)

    def incoming(self, source: int, seq: int, message: Message) -> None:
        Link.incoming(self, source, seq, message)

    def counts(self) -> dict[str, int]:
        """How many messages were sent, lost, late and said twice."""
        ends = [line.rpartition(": ")[2] for line in self.history]
        return {"sent": len(ends)} | {what: sum(what in end for end in ends) for what in ("lost", "late", "twice")}

    def _dice(self, to: int, seq: int, turn: int) -> random.Random:
        if (to, seq) not in self._numbers:
            self._numbers[to, seq] = self._sent[to]
            self._sent[to] += 1
        return random.Random(f"{self._seed} {self._me} {to} {self._numbers[to, seq]} {turn}")


class Disturbed:
    """What a drill has at each member."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._link: Chaos | None = None

    def begin(self, settings: Settings) -> None:
        self.end()
        self._link = Chaos(self._agent.id, settings)
        self._agent.links.add(self._link)

    def end(self) -> dict[str, int]:
        """From now on all passes, and what is late goes its way; the counts."""
        link, self._link = self._link, None
        if link is None:
            return {}
        self._agent.links.remove(link)
        return link.counts()


class Drill:
    """What is on in the world of one agent: `settings`, None where nothing is. Made by `on`."""

    def __init__(self, agent: Agent) -> None:
        self.settings: Settings | None = None
        self._agent = agent
        agent.on_member(self._changed)

    @classmethod
    def of(cls, agent: Agent | None = None) -> Drill:
        """That of the world of this agent, or of the current one."""
        return (agent or current.current()).part(cls)

    @classmethod
    def on(
        cls, *, drop: float = 0.0, duplicate: float = 0.0, delay: float = 0.0, seed: int = 0, agent: Agent | None = None
    ) -> Drill:
        """Disturb all members from now on, instead of what was on."""
        drill = cls.of(agent)
        drill.settings = Settings(drop, duplicate, delay, seed)
        for member in drill._agent.members():
            drill._begin(member.id)
        return drill

    def off(self) -> dict[str, int]:
        """All messages pass again; how many were sent, lost, late and said twice, over all members."""
        self.settings = None
        total: Counter[str] = Counter()
        asked = [self._agent.call(member.id, end, timeout=0, own=True) for member in self._agent.members()]
        for future in asked:
            with contextlib.suppress(RpcError):  # it has gone meanwhile
                total.update(future.wait())
        return dict(total)

    def _begin(self, member: int) -> None:
        self._agent.call(member, begin, (self.settings,), timeout=0, own=True).wait()

    def _changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        if kind == "joined" and self.settings is not None:
            with contextlib.suppress(RpcError):  # it has gone again
                self._begin(who.id)


def begin(settings: Settings) -> None:
    """Called on a member."""
    current.current().part(Disturbed).begin(settings)


def end() -> dict[str, int]:
    """Called on a member."""
    return current.current().part(Disturbed).end()
