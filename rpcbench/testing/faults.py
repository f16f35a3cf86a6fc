"""Simulated network faults: a link that loses, delays, duplicates, holds and refuses the messages that a member sends.

    faults = Faults(seed=7, drop=0.1, duplicate=0.1, delay=0.02)   # at random, for each message
    faults.drop("ForkRequest", times=2)                            # or: each ForkRequest is lost twice
    faults.hold("UserDelete", to=2)                                # or: these stay here until `release`
    drill = Drill.on(drop=0.1, delay=0.05, seed=7)                 # or: at all members of a world, until `drill.off()`

Rules
- Pass `Faults` to `start_agent` or to the options of `rpcbench.testing`, or call `install` in a running worker. It
  affects only the messages that its own member sends; to cut two members off from each other, cut both.
- The same seed gives the same message the same faults, in any order of threads. Programs notice nothing but time, and
  the errors that a lossy network causes.
- A `Drill` affects only messages of the program: calls, RRefs and backward passes. Membership, acknowledgements, cells
  and their output, telemetry and the stepper go on undisturbed. Members that join later are affected, too.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from rpcbench.base.conditions import Condition
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
    """Return a message, or a part of one, as text: its kind and its fields, without the data of users."""
    if not isinstance(value, tuple) or isinstance(value, Id):
        return str(value)
    name = type(value).__name__ if hasattr(value, "_fields") else ""
    return f"{name}({', '.join(message_line(field) for field in value if not isinstance(field, Body))})"


PROGRAM: dict[str, type[Any]] = {
    message_kind.__name__: message_kind
    for message_kind in (
        m.Call, m.Create, m.CreateFailed, m.Fetch, m.Result, m.Failure, m.Cancel,
        m.ForkRequest, m.ForkAccept, m.ChildAccept, m.UserDelete,
        m.Discover, m.Discovered, m.Gradients, m.Settled, m.BackwardFailed, m.ReleaseContext,
        m.ContextParticipant, m.Parcel,
    )
}  # fmt: skip
"""Kinds of messages that programs cause, by name."""
_KINDS = frozenset(PROGRAM.values())
_LABEL = "the change of faults"  # of calls, in errors
_IDS = ("rref", "fork", "context", "call", "message")  # fields of messages that identify their subject


def is_of_program(message: m.Message) -> bool:
    """Return whether a program caused the message, not the runtime itself."""
    return type(message) in _KINDS and not getattr(message, "call", 0) & OWN  # OWN marks calls of the runtime


def message_ids(message: m.Message) -> dict[str, str]:
    """Return the subject of a message: RRef, fork, autograd context, call, and number in its context, as text."""
    found = {name: str(getattr(message, name)) for name in _IDS if hasattr(message, name)}
    scope = getattr(message, "scope", None)
    if scope is not None:
        found |= {"context": str(scope.context), "message": str(scope.message)}
    forks = getattr(message, "forks", ())
    if forks:
        found["shares"] = ", ".join(str(fork.rref) for fork in forks)
    return found


_Job = tuple[float, int, Callable[[], None]]
"""(monotonic seconds, number, job): the number keeps jobs of the same time in order, and functions uncompared."""


class DelayQueue:
    """A queue of jobs that run at their time, on a thread that exists only while jobs wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes = Condition()  # wakes the thread when another job has become the first
        self._jobs: list[_Job] = []  # a heap
        self._order = count()
        self._running = False  # there is a thread; changed under the lock, so that it does not end with a job left

    def run_after(self, seconds: float, job: Callable[[], None]) -> None:
        """Run `job` in `seconds`. It must not raise."""
        with self._lock:
            heapq.heappush(self._jobs, (time.monotonic() + seconds, next(self._order), job))
            running, self._running = self._running, True
        if running:
            self._changes.notify_all()
        else:
            threading.Thread(target=self._run_jobs, name="rpcbench-testing-later", daemon=True).start()

    def clear(self) -> None:
        """Discard the jobs that wait."""
        with self._lock:
            self._jobs.clear()
        self._changes.notify_all()

    def _run_jobs(self) -> None:
        while (job := self._wait_for_job()) is not None:
            job()

    def _wait_for_job(self) -> Callable[[], None] | None:
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
        with self._lock:
            return self._jobs[:1] != [first]


Which = str | Callable[[Message], bool]
"""Selects messages: the name of a kind in `rpcbench.wire.messages`, or a function that returns True for them."""
_NAMES = frozenset(kind.__name__ for kind in KINDS)
_REMEMBERED = 10_000  # lines of `history`, and messages that may be sent again


def _forget_oldest(messages: dict[tuple[int, int], int]) -> None:
    if len(messages) > _REMEMBERED:
        del messages[next(iter(messages))]  # it was acknowledged long ago


@dataclass(slots=True)
class Rule:
    """The fault of some messages: lost or refused the first `times` times, late by `seconds`, or held."""

    which: Which
    to: int | None  # id of the receiver; None: any
    times: int = 0  # attempts to send a message that fail
    refused: bool = False  # fail with an error at the sender, instead of silently
    seconds: float = 0.0
    held: bool = False

    def is_meant(self, to: int, message: Message) -> bool:
        if self.to is not None and self.to != to:
            return False
        return type(message).__name__ == self.which if isinstance(self.which, str) else self.which(message)


class Faults(Link):
    """A link that injects faults into the messages that its member sends.

    Args:
        seed: Of the random faults.
        drop: The share of messages that are lost, 0 to 1.
        duplicate: The share of messages that are sent twice, 0 to 1.
        delay: The longest random delay of a message, in seconds.
        retry_seconds: Time without an acknowledgement after which a message is retransmitted.

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

    lossy = True  # so the protocol retransmits messages that are not acknowledged

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
        self._lock = threading.Lock()  # guards the fields below; not held while a message is sent
        self._rules: list[Rule] = []  # in the order of their definition; the first one that loses or holds decides
        self._cut: set[int] = set()  # ids of members that receive nothing
        self._held: list[tuple[int, int, Message]] = []  # receiver, sequence number, message
        self._tries: Counter[tuple[int, int]] = Counter()  # by receiver and sequence number, for the latest messages
        self._history: deque[str] = deque(maxlen=_REMEMBERED)
        self._began = time.monotonic()
        self._later = DelayQueue()

    # -- rules
    def drop(self, which: Which, to: int | None = None, times: int = 1) -> None:
        """Lose messages.

        Args:
            which: The name of a kind of message, or a function that returns True for the messages meant.
            to: Only messages to the member with this id; None: to all.
            times: Each message is lost the first `times` times that it is sent.

        Raises:
            ValueError: No kind has this name.
        """
        self._add_rule(Rule(which, to, times))

    def refuse(self, which: Which, to: int | None = None, times: int = 1) -> None:
        """Fail to send messages, with an error at the sender. For the arguments see `drop`."""
        self._add_rule(Rule(which, to, times, refused=True))

    def delay(self, which: Which, seconds: float, to: int | None = None) -> None:
        """Deliver messages `seconds` later. For the other arguments see `drop`."""
        self._add_rule(Rule(which, to, seconds=seconds))

    def hold(self, which: Which, to: int | None = None) -> None:
        """Keep messages here until `release`. For the arguments see `drop`."""
        self._add_rule(Rule(which, to, held=True))

    def cut(self, to: int) -> None:
        """Lose all messages to this member until `heal`."""
        with self._lock:
            self._cut.add(to)

    def release(self) -> None:
        """Send the messages that are held, in order, and hold none any more."""
        with self._lock:
            self._rules = [rule for rule in self._rules if not rule.held]
            held, self._held = self._held, []
        for message in held:
            self._send_late(*message)

    def heal(self) -> None:
        """Remove all faults, and send the messages that are held."""
        with self._lock:
            self._rules.clear()
            self._cut.clear()
            self._shares, self._longest = (0.0, 0.0), 0.0
        self.release()

    # -- history
    @property
    def history(self) -> list[str]:
        """A line for each message sent and received, with its faults; the oldest first, the last 10,000."""
        with self._lock:
            return list(self._history)

    @property
    def held(self) -> list[str]:
        """The messages that are held, as lines."""
        with self._lock:
            return [message_line(message) for _, _, message in self._held]

    # -- the link
    def handle_outgoing(self, to: int, seq: int, message: Message, may_wait: bool) -> None:
        with self._lock:
            fates, what = self._decide_fate(to, seq, message)
            self._record_message(f"to {to}", seq, message, what)
        if what == "refused":  # False: the message was not sent, so the caller may send it again
            raise ConnectionLostError(f"{type(message).__name__} to worker {to} was refused on purpose", False)
        for seconds in fates:
            if seconds:
                self._later.run_after(seconds, lambda: self._send_late(to, seq, message))
            else:
                super().handle_outgoing(to, seq, message, may_wait)

    def handle_incoming(self, source: int, seq: int, message: Message) -> None:
        with self._lock:
            self._record_message(f"from {source}", seq, message, "")
        super().handle_incoming(source, seq, message)

    def release_resources(self) -> None:
        self._later.clear()  # the agent has stopped: nothing could be sent

    # -- inside
    def _add_rule(self, rule: Rule) -> None:
        if isinstance(rule.which, str) and rule.which not in _NAMES:
            raise ValueError(f"unknown kind of message {rule.which!r}; use one of: {', '.join(sorted(_NAMES))}")
        with self._lock:
            self._rules.append(rule)

    def _decide_fate(self, to: int, seq: int, message: Message) -> tuple[list[float], str]:
        """Return the delay in seconds of each copy to send (none: lost), and the fault's name for the history."""
        if to in self._cut:
            return [], "lost: cut off"
        turn = self._tries[to, seq] = self._tries[to, seq] + 1
        _forget_oldest(self._tries)
        late = 0.0
        for rule in self._rules:
            if rule.is_meant(to, message):
                if rule.held:
                    self._held.append((to, seq, message))
                    return [], "held"
                if turn <= rule.times:
                    return [], "refused" if rule.refused else "lost"
                late += rule.seconds
        return self._random_faults(self._random_of(to, seq, turn), late)

    def _random_of(self, to: int, seq: int, turn: int) -> random.Random:
        return random.Random(f"{self._seed} {to} {seq} {turn}")  # a shared one would depend on the order of threads

    def _random_faults(self, chances: random.Random, late: float) -> tuple[list[float], str]:
        drop, duplicate = self._shares
        if chances.random() < drop:
            return [], "lost"
        copies = 2 if chances.random() < duplicate else 1
        fates = [late + chances.uniform(0, self._longest) for _ in range(copies)]
        return fates, ", ".join(["twice"] * (copies - 1) + ["late"] * any(fates))

    def _send_late(self, to: int, seq: int, message: Message) -> None:
        with contextlib.suppress(RpcError):  # the sender has returned long ago; the protocol handles lost peers
            super().handle_outgoing(to, seq, message, False)

    def _record_message(self, where: str, seq: int, message: Message, what: str) -> None:
        line = f"{time.monotonic() - self._began:9.4f}  {where} #{count_of(seq)} {message_line(message)}"
        self._history.append(f"{line}: {what}" if what else line)


def install(faults: Faults, agent: Agent | None = None) -> Faults:
    """Inject faults into the messages that a running agent sends from now on, and return `faults`.

    Args:
        faults: Replaces any other link of the agent.
        agent: By default the agent of this process.
    """
    (agent or current.current_agent()).links.interceptors.replace_links(faults)
    return faults


class Settings(NamedTuple):
    """The faults of a drill."""

    drop: float = 0.0  # share of messages that are lost, 0 to 1
    duplicate: float = 0.0  # share of messages that are sent twice, 0 to 1
    delay: float = 0.0  # the longest delay, in seconds
    seed: int = 0


class DrillFaults(Faults):
    """The faults of one member during a drill; they affect messages of the program only."""

    def __init__(self, me: int, settings: Settings) -> None:
        super().__init__(settings.seed, settings.drop, settings.duplicate, settings.delay)
        self._me = me
        self._numbers: dict[tuple[int, int], int] = {}  # by receiver and sequence number: see `_random_of`
        self._sent: Counter[int] = Counter()  # by receiver: messages of the program
        self._counts: Counter[str] = Counter()  # of faults, and of messages sent

    def handle_outgoing(self, to: int, seq: int, message: Message, may_wait: bool) -> None:
        if is_of_program(message) and to != self._me:
            super().handle_outgoing(to, seq, message, may_wait)
        else:
            Link.handle_outgoing(self, to, seq, message, may_wait)

    def handle_incoming(self, source: int, seq: int, message: Message) -> None:
        Link.handle_incoming(self, source, seq, message)  # not in the history: `message_counts` is of messages sent

    def message_counts(self) -> dict[str, int]:
        """Return how many messages were sent, lost, late and sent twice."""
        return {what: self._counts[what] for what in ("sent", "lost", "late", "twice")}

    def _record_message(self, where: str, seq: int, message: Message, what: str) -> None:
        self._counts.update(["sent", *what.split(", ")])
        super()._record_message(where, seq, message, what)

    def _random_of(self, to: int, seq: int, turn: int) -> random.Random:
        # Messages of the runtime use sequence numbers, too, and their number varies: only the program's are counted.
        if (to, seq) not in self._numbers:
            self._numbers[to, seq] = self._sent[to]
            self._sent[to] += 1
            _forget_oldest(self._numbers)
        return random.Random(f"{self._seed} {self._me} {to} {self._numbers[to, seq]} {turn}")


class DrillMember:
    """The part of each member that injects the faults of a drill."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._link: DrillFaults | None = None

    def begin_drill(self, settings: Settings) -> None:
        self.end_drill()
        self._link = DrillFaults(self._agent.id, settings)
        self._agent.links.interceptors.add_link(self._link)

    def end_drill(self) -> dict[str, int]:
        """Let all messages pass, and return the counts. Messages that are late are sent at their time."""
        link, self._link = self._link, None
        if link is None:
            return {}
        self._agent.links.interceptors.remove_link(link)
        return link.message_counts()


class Drill:
    """The drill of an agent's world: faults at all members at once. Started by `on`."""

    def __init__(self, agent: Agent) -> None:
        self.settings: Settings | None = None  # None while no drill is on
        self._agent = agent
        agent.on_member(self._member_changed)

    @classmethod
    def of(cls, agent: Agent | None = None) -> Drill:
        """Return the drill of this agent's world, by default of the current agent's."""
        return (agent or current.current_agent()).part(cls)

    @classmethod
    def on(
        cls, *, drop: float = 0.0, duplicate: float = 0.0, delay: float = 0.0, seed: int = 0, agent: Agent | None = None
    ) -> Drill:
        """Inject faults at all members from now on, in place of those of an earlier drill.

        Args:
            drop: The share of messages that are lost, 0 to 1.
            duplicate: The share of messages that are sent twice, 0 to 1.
            delay: The longest delay, in seconds.
            seed: Of the random faults.
            agent: A member of the world; by default the current agent.
        """
        drill = cls.of(agent)
        drill.settings = Settings(drop, duplicate, delay, seed)
        for member in drill._agent.members():
            drill._begin_on_member(member.id, drill.settings)
        return drill

    def off(self) -> dict[str, int]:
        """Let all messages pass, and return how many all members sent, and how many were lost, late and sent twice."""
        self.settings = None
        total: Counter[str] = Counter()
        call = partial(self._agent.call, timeout=0, label=_LABEL, own=True)
        futures = [call(member.id, end_drill_here) for member in self._agent.members()]
        for future in futures:
            with contextlib.suppress(RpcError):  # the member has left meanwhile
                total.update(future.wait())
        return dict(total)

    def _begin_on_member(self, member: int, settings: Settings) -> None:
        self._agent.call(member, begin_drill_here, (settings,), timeout=0, label=_LABEL, own=True).wait()
        if self.settings is None:  # ended meanwhile: `off` may have told the member before it began
            self._agent.call(member, end_drill_here, timeout=0, label=_LABEL, own=True).wait()

    def _member_changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        if kind == "joined" and (settings := self.settings) is not None:
            with contextlib.suppress(RpcError):  # the member has left again
                self._begin_on_member(who.id, settings)


def begin_drill_here(settings: Settings) -> None:
    """Begin a drill at this member. Called on each member by `Drill`."""
    current.current_agent().part(DrillMember).begin_drill(settings)


def end_drill_here() -> dict[str, int]:
    """End the drill at this member. Called on each member by `Drill`."""
    return current.current_agent().part(DrillMember).end_drill()
