"""A network that misbehaves: a link that loses, delays, repeats, holds and refuses what one member sends.

    faults = Faults(seed=7, drop=0.1, duplicate=0.1, delay=0.02)   # each message takes its chances
    faults.drop("ForkRequest", times=2)                            # or: each of these is lost twice
    faults.hold("UserDelete", to=2)                                # or: these stay here until `release`

Give it to `start_agent` or to the options of `rpcbench.testing`, or call `install` in a worker that runs already. It
disturbs what its own member sends; to cut two members off from each other, cut both. `history` tells what was sent and
received, and what became of it.

The same seed gives the same message the same fate, in whatever order threads get here. Nothing of it is visible to
programs but time, and the errors that a lossy network really brings.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rpcbench.base.errors import ConnectionLostError, RpcError
from rpcbench.protocol.delivery import count_of
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.testing.later import Later
from rpcbench.testing.story import line
from rpcbench.transport.base import Link
from rpcbench.wire.messages import KINDS, Message

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
        self._later = Later()

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
            return [line(message) for _, _, message in self._held]

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
        told = f"{time.monotonic() - self._began:9.4f}  {where} #{count_of(seq)} {line(message)}"
        self._history.append(f"{told}: {what}" if what else told)


def install(faults: Faults, agent: Agent | None = None) -> Faults:
    """Disturb what a running agent sends from now on; by default, the agent of this process."""
    (agent or current.current()).links.use(faults)
    return faults
