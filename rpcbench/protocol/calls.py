"""Calls made and served by one member: each gets exactly one answer.

    caller   started → (answered | expired | cancelled | lost): the first of these counts, later ones are ignored
    callee   arrived → held (its RRefs are not all confirmed) → queued → running → answered

A call is never repeated, and runs at most once. If its caller has left, or no longer waits, a held or queued call is
dropped; a running call runs to its end, and may ask whether its caller still waits.

A call waits for others if its thread does, or if the value that it fetches does not exist yet. An `Inquiry` follows
these waits over the members of a world, and finds cycles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rpcbench.base.errors import CallCancelled, RpcError, RpcTimeoutError, WorkerLostError, mark_never_ran
from rpcbench.base.ids import Id, Note, Row, Table, make_row
from rpcbench.protocol.effects import Effects, Enqueue, Outcome, Reject, Resolve
from rpcbench.wire.messages import Call, Cancel, Create, Failure, Fetch, Result


class CallKey(NamedTuple):
    """The identity of a call: the member that made it, and its number on that member."""

    caller: int
    number: int


class Need(NamedTuple):
    """A call that is waited for, and the member that serves it."""

    call: CallKey
    at: int


class Fact(NamedTuple):
    """A report by the member `at` of a call that it serves."""

    call: CallKey
    at: int
    label: str
    state: str  # held, queued or begun
    seconds: float  # since it arrived
    needs: tuple[Need, ...]  # the calls that it waits for: all of them must end first
    places: tuple[str, ...]  # lines of the user's program on its thread's stack, the innermost first


class Inquiry:
    """A search for cycles of waiting calls over several members: ask `next_questions` until there are none."""

    # A report is true when it is made, and a waiting call waits until the calls that it needs end. So a cycle that is
    # found twice, the same both times, is a deadlock (apart from deadlines).

    def __init__(self, needs: Iterable[Need]) -> None:
        self.facts: dict[CallKey, Fact] = {}
        self._open = {need.call: need.at for need in needs}
        self._queried_calls: set[CallKey] = set()

    def next_questions(self) -> dict[int, list[CallKey]]:
        """Return the calls to ask about now, by member. Each call is asked about once."""
        calls_by_member: dict[int, list[CallKey]] = {}
        for call, at in self._open.items():
            calls_by_member.setdefault(at, []).append(call)
        self._queried_calls |= self._open.keys()
        self._open = {}
        return calls_by_member

    def add_facts(self, facts: Iterable[Fact]) -> None:
        """Take a member's reports. Calls that it does not report have ended, or have not arrived there yet."""
        for fact in facts:
            self.facts[fact.call] = fact
            for need in fact.needs:
                if need.call not in self._queried_calls:
                    self._open[need.call] = need.at

    def find_cycle(self) -> list[Fact]:
        """Return calls that each wait for the next, and the last for the first; empty if there are none."""
        stuck = set(self.facts)
        # Remove calls that wait for no stuck call, again and again: the remaining calls are in cycles or wait for one.
        while free := {call for call in stuck if not any(need.call in stuck for need in self.facts[call].needs)}:
            stuck -= free
        if not stuck:
            return []
        path = [min(stuck)]
        while (ahead := next(need.call for need in self.facts[path[-1]].needs if need.call in stuck)) not in path:
            path.append(ahead)
        calls = path[path.index(ahead) :]
        first = calls.index(min(calls))  # the same cycle begins with the same call on every member
        return [self.facts[call] for call in calls[first:] + calls[:first]]


@dataclass(slots=True)
class OutgoingCall:
    """A call made here that has no answer yet."""

    to: int
    label: str
    since: float
    timeout: float | None


Request = Call | Create | Fetch


@dataclass(slots=True)
class Serving:
    """A call that this member serves."""

    message: Request | None  # None from the moment it begins to run
    label: str
    makes: Id | None  # the value that it creates
    fetched_rref: Id | None  # the value that it fetches
    since: float  # time of arrival
    until: float | None  # the caller's deadline, by this member's clock
    unwanted: bool = False  # it runs, but its caller no longer waits


class Calls:
    """Calls made from here and calls served here."""

    def __init__(self) -> None:
        self.note: Note | None = None  # set only while an observer listens
        self.outgoing: dict[int, OutgoingCall] = {}
        self.serving: dict[tuple[int, int], Serving] = {}
        self._held: dict[tuple[int, int], set[Id]] = {}  # (caller, number) → forks that are not confirmed yet

    # -- caller
    def start_call(self, call: int, to: int, label: str, now: float, timeout: float | None) -> None:
        self.outgoing[call] = OutgoingCall(to, label, now, timeout)
        if self.note is not None:
            self._report_call("CallStarted", call)

    def reply_received(self, source: int, answer: Result | Failure) -> Effects:
        return [Resolve(answer.call, source, answer)] if self.pop_outgoing(answer.call) else []

    def give_up_call(self, call: int, error_of: Callable[[OutgoingCall], RpcError]) -> Outcome:
        """Fail a call that still waits, and cancel it at the callee."""
        waiting = self.pop_outgoing(call)
        return ([], []) if waiting is None else ([Reject(call, error_of(waiting))], [(waiting.to, Cancel(call))])

    def call_expired(self, call: int, name: Callable[[int], str]) -> Outcome:
        hint = "It may still be running there; pass timeout= for a longer one."
        return self.give_up_call(
            call, lambda it: RpcTimeoutError(_timeout_text(it.label, name(it.to), it.timeout, hint))
        )

    def cancel_call(self, call: int) -> Outcome:
        return self.give_up_call(call, lambda it: CallCancelled(f"{it.label} was cancelled by its caller"))

    def fail_call(self, call: int, error: Exception) -> Effects:
        return [Reject(call, error)] if self.pop_outgoing(call) else []

    # -- callee
    def request_arrived(self, source: int, message: Request, pending: set[Id], now: float) -> Effects:
        key = (source, message.call)
        label = "to_here" if isinstance(message, Fetch) else message.label
        makes = message.rref if isinstance(message, Create) else None
        fetched_rref = message.rref if isinstance(message, Fetch) else None
        until = None if message.budget is None else now + message.budget
        self.serving[key] = Serving(message, label, makes, fetched_rref, now, until)
        if pending:
            self._held[key] = pending
            return []
        return [Enqueue(*key)]

    def take_request(self, source: int, message: Call | Fetch, now: float) -> None:
        """Do as `request_arrived`, then `begin_call` at once: the fast path."""
        if type(message) is Fetch:
            label, fetched_rref = "to_here", message.rref
        else:
            label, fetched_rref = message.label, None  # type: ignore[union-attr]
        until = None if message.budget is None else now + message.budget
        self.serving[source, message.call] = Serving(None, label, None, fetched_rref, now, until)

    def fork_confirmed(self, fork: Id) -> Effects:
        """Enqueue held calls that waited for this fork: its owner has confirmed it, or is lost."""
        effects: Effects = []
        for key in [key for key, pending in self._held.items() if fork in pending]:
            self._held[key].discard(fork)
            if not self._held[key]:
                del self._held[key]
                effects.append(Enqueue(*key))
        return effects

    def begin_call(self, source: int, call: int, now: float) -> tuple[Request | None, bool]:
        """Begin a queued call; return its message, None if it was dropped, and whether it may run."""
        entry = self.serving.get((source, call))
        if entry is None:
            return None, False
        message, entry.message = entry.message, None
        assert message is not None, "a call that was enqueued twice"
        if entry.until is not None and now > entry.until:  # it was queued past its caller's deadline
            del self.serving[source, call]
            return message, False
        return message, True

    def cancel_requested(self, source: int, call: int) -> Request | None:
        """Drop a call that has not begun to run and return its message; mark a running one as unwanted."""
        key = (source, call)
        entry = self.serving.get(key)
        if entry is None:
            return None
        if entry.message is None:
            entry.unwanted = True
            return None
        self._held.pop(key, None)
        return self.serving.pop(key).message

    def call_state(self, source: int, call: int) -> str:
        """Return the state of a call that is served here: held, queued or begun."""
        return "held" if (source, call) in self._held else "queued" if self.serving[source, call].message else "begun"

    def is_wanted(self, source: int, call: int) -> bool:
        """Return whether the caller of a running call still waits for it."""
        entry = self.serving.get((source, call))
        return entry is not None and not entry.unwanted

    def finish_serving(self, source: int, call: int) -> bool:
        """End a call that has run; return whether its caller may still wait for the answer."""
        return self.serving.pop((source, call), None) is not None

    # -- both
    def worker_lost(self, worker: int, name: str, reason: str) -> tuple[Effects, list[Request]]:
        """Fail calls to a lost worker; return the calls from it that had not begun to run, and are dropped."""
        effects: Effects = []
        for call, waiting in list(self.outgoing.items()):
            if waiting.to == worker:
                error = WorkerLostError(f"{name} was lost before {waiting.label} had finished: {reason}")
                effects += self.fail_call(call, error)
        keys = [key for key in self.serving if key[0] == worker]
        for key in keys:
            self._held.pop(key, None)
        return effects, [message for key in keys if (message := self.serving.pop(key).message) is not None]

    def calls_table(self) -> Table:
        return {str(call): _call_row(call, waiting) for call, waiting in self.outgoing.items()}

    def check_calls(self) -> None:
        assert self._held.keys() <= self.serving.keys(), "a held call without an entry in serving"
        assert all(self._held.values()), "a held call that waits for nothing"

    def pop_outgoing(self, call: int) -> OutgoingCall | None:
        """Remove and return a call made here, if it still waits."""
        waiting = self.outgoing.pop(call, None)
        if waiting is not None and self.note is not None:
            self._report_call("CallEnded", call)
        return waiting

    def _report_call(self, kind: str, call: int) -> None:
        if self.note is not None:
            self.note(kind, "calls", str(call), partial(make_row, self.outgoing, call, _call_row))


def _call_row(call: int, waiting: OutgoingCall) -> Row:
    return {"call": call, "to": waiting.to, "label": waiting.label, "since": waiting.since}


def not_sent_error(label: str, name: str, seconds: float) -> RpcTimeoutError:
    """Return the error of a call that backpressure held back until its deadline: its receiver reads too slowly."""
    why = f"It has not been sent: {name} is far behind in reading earlier messages."
    return mark_never_ran(RpcTimeoutError(_timeout_text(label, name, seconds, why)))


def _timeout_text(label: str, name: str, seconds: float | None, why: str) -> str:
    ms = round((seconds or 0) * 1000)
    return f"RPC ran for more than set timeout ({ms} ms) and will now be marked with an error: {label} on {name}. {why}"
