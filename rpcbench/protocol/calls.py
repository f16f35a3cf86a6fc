"""Calls: each gets exactly one answer.

    caller   started → (answered | expired | cancelled | lost): the first one counts, later ones are ignored
    callee   arrived → held (its RRefs are not all confirmed) → queued → running → answered

A call is never repeated, and runs at most once. A call whose caller has gone, or no longer waits, is dropped while
it is held or queued; once it runs it runs to its end, and may ask whether anybody still wants it.

A call waits for others when the thread that runs it does, or when the value that it asks for is not made yet. An
`Inquiry` follows calls from one to the next over the members of a world, and finds circles. What a member says of its
calls is true when it says it, and a call that waits goes on waiting until what it waits for ends: so a circle that is
found twice, the same both times, never ends by itself (deadlines aside).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from rpcbench.base.errors import CallCancelled, RpcTimeoutError, WorkerLostError, never_ran
from rpcbench.base.events import Note, Row, Table
from rpcbench.base.ids import Id
from rpcbench.protocol.effects import Effects, Enqueue, Reject, Resolve
from rpcbench.wire.messages import Call, Create, Failure, Fetch, Result


class CallKey(NamedTuple):
    """One call of a world: who made it, and its number there."""

    caller: int
    number: int


class Need(NamedTuple):
    """A call that somebody waits for, and the member that is to answer it."""

    call: CallKey
    at: int


class Fact(NamedTuple):
    """What the member `at` says of a call that it is to answer. `needs` are what it waits for; all must end first.

    `places` are lines of the user's program on the stack of its thread, if it has one, the innermost first.
    """

    call: CallKey
    at: int
    label: str
    state: str
    seconds: float
    needs: tuple[Need, ...]
    places: tuple[str, ...]


class Inquiry:
    """Follows calls from member to member: ask what `questions` says, until it says nothing."""

    def __init__(self, needs: Iterable[Need]) -> None:
        self.facts: dict[CallKey, Fact] = {}
        self._open = {need.call: need.at for need in needs}
        self._asked: set[CallKey] = set()

    def questions(self) -> dict[int, list[CallKey]]:
        """Calls to ask about now, by the member to ask. Each is asked once."""
        asked: dict[int, list[CallKey]] = {}
        for call, at in self._open.items():
            asked.setdefault(at, []).append(call)
        self._asked |= self._open.keys()
        self._open = {}
        return asked

    def answer(self, facts: Iterable[Fact]) -> None:
        """What a member says. Calls that it says nothing of have ended, or have not come to it yet."""
        for fact in facts:
            self.facts[fact.call] = fact
            for need in fact.needs:
                if need.call not in self._asked:
                    self._open[need.call] = need.at

    def circle(self) -> list[Fact]:
        """Calls of which each waits for the next, and the last for the first; empty if there are none.

        The same circle begins with the same call, whoever asks.
        """
        stuck = set(self.facts)
        while free := {call for call in stuck if not any(need.call in stuck for need in self.facts[call].needs)}:
            stuck -= free
        if not stuck:
            return []
        path = [min(stuck)]
        while (ahead := next(need.call for need in self.facts[path[-1]].needs if need.call in stuck)) not in path:
            path.append(ahead)
        calls = path[path.index(ahead) :]
        first = calls.index(min(calls))
        return [self.facts[call] for call in calls[first:] + calls[:first]]


@dataclass(slots=True)
class Outgoing:
    """A call of ours that waits for its answer."""

    to: int
    label: str
    since: float
    timeout: float | None


Request = Call | Create | Fetch


@dataclass(slots=True)
class Serving:
    """A call that is to be answered from here. `message` until it begins to run, None from then on."""

    message: Request | None
    label: str
    makes: Id | None  # the value that it is to make
    asks: Id | None  # the value that it asks for
    since: float
    until: float | None  # its caller waits no longer than that
    unwanted: bool = False  # it runs, but its caller no longer waits


class Calls:
    """Calls made from here and calls served here."""

    def __init__(self) -> None:
        self.note: Note | None = None
        self.outgoing: dict[int, Outgoing] = {}
        self.serving: dict[tuple[int, int], Serving] = {}
        self._held: dict[tuple[int, int], set[Id]] = {}

    # -- caller
    def start(self, call: int, to: int, label: str, now: float, timeout: float | None) -> None:
        self.outgoing[call] = Outgoing(to, label, now, timeout)
        if self.note is not None:
            self._tell("CallStarted", call)

    def answered(self, source: int, answer: Result | Failure) -> Effects:
        return [Resolve(answer.call, source, answer)] if self.ended(answer.call) else []

    def expired(self, call: int, name: str) -> Effects:
        waiting = self.ended(call)
        if waiting is None:
            return []
        hint = "It may still be running there; pass timeout= for a longer one."
        return [Reject(call, RpcTimeoutError(_late(waiting.label, name, waiting.timeout, hint)))]

    def cancelled(self, call: int) -> tuple[Effects, int | None]:
        waiting = self.ended(call)
        if waiting is None:
            return [], None
        return [Reject(call, CallCancelled(f"{waiting.label} was cancelled by its caller"))], waiting.to

    def failed(self, call: int, error: Exception) -> Effects:
        return [Reject(call, error)] if self.ended(call) else []

    # -- callee
    def arrived(self, source: int, message: Request, pending: set[Id], now: float) -> Effects:
        key = (source, message.call)
        label = "to_here" if isinstance(message, Fetch) else message.label
        makes = message.rref if isinstance(message, Create) else None
        asks = message.rref if isinstance(message, Fetch) else None
        until = None if message.budget is None else now + message.budget
        self.serving[key] = Serving(message, label, makes, asks, now, until)
        if pending:
            self._held[key] = pending
            return []
        return [Enqueue(*key)]

    def taken(self, source: int, message: Call | Fetch, now: float) -> None:
        """As `arrived`, and `begin` at once."""
        if type(message) is Fetch:
            label, asks = "to_here", message.rref
        else:
            label, asks = message.label, None  # type: ignore[union-attr]
        until = None if message.budget is None else now + message.budget
        self.serving[source, message.call] = Serving(None, label, None, asks, now, until)

    def confirmed(self, fork: Id) -> Effects:
        """An RRef that held calls wait for is known to its owner, or never will be."""
        effects: Effects = []
        for key in [key for key, pending in self._held.items() if fork in pending]:
            self._held[key].discard(fork)
            if not self._held[key]:
                del self._held[key]
                effects.append(Enqueue(*key))
        return effects

    def begin(self, source: int, call: int, now: float) -> tuple[Request | None, bool]:
        """There is a thread for a queued call: its message, None if it was dropped; and whether it may run.

        A call that has waited here for longer than its caller does may not, and is gone.
        """
        entry = self.serving.get((source, call))
        if entry is None:
            return None, False
        message, entry.message = entry.message, None
        assert message is not None, "a call that was enqueued twice"
        if entry.until is not None and now > entry.until:
            del self.serving[source, call]
            return message, False
        return message, True

    def cancel_asked(self, source: int, call: int) -> Request | None:
        """The message, if it had not begun to run: it never will."""
        key = (source, call)
        entry = self.serving.get(key)
        if entry is None:
            return None
        if entry.message is None:
            entry.unwanted = True
            return None
        self._held.pop(key, None)
        return self.serving.pop(key).message

    def state(self, source: int, call: int) -> str:
        """How far a call that is served here has come: held, queued or begun."""
        return "held" if (source, call) in self._held else "queued" if self.serving[source, call].message else "begun"

    def wanted(self, source: int, call: int) -> bool:
        """Whether the caller of a call that runs here still waits for it."""
        entry = self.serving.get((source, call))
        return entry is not None and not entry.unwanted

    def served(self, source: int, call: int) -> bool:
        """The function has returned; True if the caller may still want the answer."""
        return self.serving.pop((source, call), None) is not None

    # -- both
    def lost(self, worker: int, name: str, reason: str) -> tuple[Effects, list[Request]]:
        """Fail calls to the lost worker; return those from it that have not begun to run, and never will."""
        effects: Effects = []
        for call, waiting in list(self.outgoing.items()):
            if waiting.to == worker:
                error = WorkerLostError(f"{name} was lost while it had {waiting.label} to do: {reason}")
                effects += self.failed(call, error)
        keys = [key for key in self.serving if key[0] == worker]
        for key in keys:
            self._held.pop(key, None)
        return effects, [message for key in keys if (message := self.serving.pop(key).message) is not None]

    def table(self) -> Table:
        return {str(call): _row(call, waiting) for call, waiting in self.outgoing.items()}

    def check(self) -> None:
        """Raise if the tables contradict each other."""
        assert self._held.keys() <= self.serving.keys(), "a held call that nobody serves"
        assert all(self._held.values()), "a held call that waits for nothing"

    def ended(self, call: int) -> Outgoing | None:
        """The call, if it has waited until now."""
        waiting = self.outgoing.pop(call, None)
        if waiting is not None and self.note is not None:
            self._tell("CallEnded", call)
        return waiting

    def _tell(self, kind: str, call: int) -> None:
        if self.note is not None:
            self.note(kind, "calls", str(call), partial(self._row, call))

    def _row(self, call: int) -> Row | None:
        waiting = self.outgoing.get(call)
        return _row(call, waiting) if waiting else None


def _row(call: int, waiting: Outgoing) -> Row:
    row: dict[str, Any] = {"call": call, "to": waiting.to, "label": waiting.label, "since": waiting.since}
    return row


def not_sent(label: str, name: str, seconds: float) -> RpcTimeoutError:
    """Of a call that has waited for room as long as it may: its receiver reads nothing, or not as fast as all send."""
    why = f"It has not been sent: {name} is far behind in reading what was sent to it before."
    return never_ran(RpcTimeoutError(_late(label, name, seconds, why)))


def _late(label: str, name: str, seconds: float | None, why: str) -> str:
    ms = round((seconds or 0) * 1000)
    return f"RPC ran for more than set timeout ({ms} ms) and will now be marked with an error: {label} on {name}. {why}"
