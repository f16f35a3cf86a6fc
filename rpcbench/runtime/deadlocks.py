"""Explains who waits for whom, and ends waits that go round in a circle.

A thread that has waited for a second says so; then the calls that it waits for are followed from member to member, by
notices. While nobody waits that long, nothing happens at all. A circle that is seen twice is ended: one of its waits
raises DeadlockError, and the others end with the calls that fail of it. A wait of `patience` seconds is told of in
the log, once, with what it waits for.

What threads do is read from their stacks: the call that each runs, the future that it waits for. Nothing is written
down for it while threads work.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from rpcbench.base.errors import DeadlockError
from rpcbench.base.futures import Future
from rpcbench.base.ids import Id
from rpcbench.protocol.calls import CallKey, Fact, Inquiry, Need
from rpcbench.protocol.node import Node
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import creation_sites
from rpcbench.runtime.interrupts import uninterrupted
from rpcbench.runtime.server import serve

_MOST = 12


class Doing(NamedTuple):
    """One thread. `serving`: the agent whose call it runs, the caller and the number; `places`: innermost first."""

    thread: int
    name: str
    serving: tuple[object, int, int] | None
    future: Future[Any] | None
    places: tuple[str, ...]


def threads() -> list[Doing]:
    """All threads of this process as they are now."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [_doing(ident, names.get(ident, str(ident)), stack) for ident, stack in _stacks().items()]


def _stacks() -> dict[int, list[FrameType]]:
    """The frames of each thread, innermost first.

    Python lists threads under a lock of its own, which whoever begins or ends one waits for, and lets nobody run
    meanwhile; and it makes a frame's object when that is first asked for, of what must not have ended by then. So no
    garbage collection may come between: it runs Python code, which lets others run.
    """
    with _listing:
        collects = gc.isenabled()
        gc.disable()
        try:
            return {ident: list(_outwards(frame)) for ident, frame in sys._current_frames().items()}
        finally:
            if collects:
                gc.enable()


def _outwards(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


_listing = threading.Lock()


def _doing(ident: int, name: str, stack: list[FrameType]) -> Doing:
    future: Future[Any] | None = None
    for frame in stack:
        if frame.f_code is Future.wait.__code__ and future is None:
            future = frame.f_locals["self"]
        if frame.f_code is serve.__code__:
            held = frame.f_locals
            return Doing(ident, name, (held["agent"], held["source"], held["message"].call), future, _places(stack[0]))
    return Doing(ident, name, None, future, _places(stack[0]))


def _places(frame: FrameType) -> tuple[str, ...]:
    return tuple(str(site) for site, _ in zip(creation_sites(frame), range(_MOST), strict=False))


Name = Callable[[int], str]


class OtherWait(NamedTuple):
    """A thread that runs no call and waits for some: the main thread, as a rule."""

    thread: str
    needs: tuple[Need, ...]
    places: tuple[str, ...]


Answer = tuple[list[Fact], list[OtherWait]]
"""What one member says: of calls that it is to answer, and of its other threads that wait."""


class DeadlockReport(str):
    """A text that shows itself as it is, also as the value of a cell."""

    __slots__ = ()
    __repr__ = str.__str__


def round_trip(circle: Sequence[Fact], name: Name) -> str:
    """A circle of waits in one line."""
    steps = [f"{fact.label} on {name(fact.at)}" for fact in circle]
    return f"calls wait for each other in a circle: {' → '.join([*steps, steps[0]])}"


def wait_story(needs: Iterable[Need], facts: Mapping[CallKey, Fact], name: Name) -> list[str]:
    """What somebody waits for, and what that waits for, one line each."""
    return _wait_story(needs, facts, name, set(), "  ")


def _wait_story(
    needs: Iterable[Need], facts: Mapping[CallKey, Fact], name: Name, told: set[CallKey], indent: str
) -> list[str]:
    lines = []
    for call, at in needs:
        fact = facts.get(call)
        if fact is None:
            lines.append(f"{indent}for an answer of {name(at)}, which knows of no such call (any more), or is silent")
            continue
        again = call in told
        told.add(call)
        lines.append(f"{indent}for {fact.label} on {name(at)}, {_state(fact)}{' (see above)' if again else ''}")
        lines += [] if again else _wait_story(fact.needs, facts, name, told, indent + "  ")
    return lines


def _state(fact: Fact) -> str:
    time = f"{fact.seconds:.0f} s" if fact.seconds >= 1 else "less than 1 s"
    words = {
        "held": f"which waits {time} for the owners of its RRefs to know of them",
        "queued": f"which waits {time} for a thread: all are busy",
        "runs": f"which has run {time}",
        "waits": f"which has run {time} and waits",
        "asks": f"which waits {time} for a value that is not made yet",
    }[fact.state]
    return f"{words}, at {fact.places[0]}" if fact.places else words


def deadlock_report(members: Sequence[tuple[int, str]], found: Mapping[int, Answer]) -> str:
    """A whole world: `members` by id and name, and what those say that answered."""
    names = dict(members)
    facts = {fact.call: fact for said, _ in found.values() for fact in said}
    inquiry = Inquiry([])
    inquiry.answer(facts.values())
    lines = []
    for id_, member in members:
        lines += _member(member, found.get(id_), facts, lambda at: names.get(at, f"worker {at}"))
    if circle := inquiry.circle():
        lines.append(round_trip(circle, lambda at: names.get(at, f"worker {at}")))
    return "\n".join(lines)


def _member(name: str, answer: Answer | None, facts: Mapping[CallKey, Fact], names: Name) -> list[str]:
    if answer is None:
        return [f"{name} gives no answer: it is stopped, or busy in code that lets no other thread run"]
    said, others = answer
    if not said and not others:
        return [f"{name}: nothing to do, and nobody waits"]
    lines = [f"{name}:"]
    for other in others:
        lines += [f"  {other.thread} waits", *_indented(wait_story(other.needs, facts, names)), *_stack(other.places)]
    for fact in said:
        lines.append(f"  {fact.label}, a call of {names(fact.call.caller)}, {_state(fact)}")
        lines += [*_indented(wait_story(fact.needs, facts, names)), *_stack(fact.places[1:])]
    return lines


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _stack(places: Iterable[str]) -> list[str]:
    return [f"      {place}" for place in places]


ASK, TOLD, BREAK = "waits.ask", "waits.told", "waits.break"
_ANSWER_SECONDS = 1.0
_PATIENCE = 30.0
_log = logging.getLogger("rpcbench")


class Watchdog:
    """`patience` in seconds, from RPCBENCH_STALL_SECONDS, 30 by default; 0 tells of no wait."""

    def __init__(self, agent: Agent) -> None:
        self.patience = float(os.environ.get("RPCBENCH_STALL_SECONDS", _PATIENCE))
        self._agent = agent
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[tuple[int, Any]]] = {}
        self._lock = threading.Lock()
        self._probing = False
        self._overdue: dict[int, float] = {}  # thread → seconds
        self._told: set[CallKey] = set()
        agent.on_long_wait = self._long_wait
        agent.on_notice(ASK, self._asked)
        agent.on_notice(TOLD, self._heard)
        agent.on_notice(BREAK, self._break)

    def explain(self) -> DeadlockReport:
        """Who waits for whom now, in the whole world, with the stacks of their threads. Takes a second at most."""
        members = self._agent.members()
        found = self.ask({info.id: None for info in members})
        return DeadlockReport(deadlock_report([(info.id, info.name) for info in members], found))

    # -- looking for circles
    def _long_wait(self, seconds: float) -> None:
        """By a thread that waits."""
        with uninterrupted:
            with self._lock:
                if self.patience and seconds >= self.patience:
                    self._overdue[threading.get_ident()] = seconds
                if self._probing:
                    return
                self._probing = True
            self._agent.submit(self._probe)

    def _probe(self) -> None:
        try:
            waits = [doing for doing in threads() if doing.future is not None]
            inquiry = self._follow(waits)
            circle = inquiry.circle()
            if circle and _same(circle, self._follow(waits).circle()):
                self._end(circle)
            self._tell(waits, inquiry)
        finally:
            with self._lock:
                self._probing = False

    def _follow(self, waits: Iterable[Doing]) -> Inquiry:
        inquiry = Inquiry([need for doing in waits for need in self._needs(doing.future)])
        while asked := inquiry.questions():
            for facts, _ in self.ask({at: [tuple(call) for call in calls] for at, calls in asked.items()}).values():
                inquiry.answer(facts)
        return inquiry

    def _end(self, circle: list[Fact]) -> None:
        """Everybody who finds the circle chooses the same wait of it; the first one ends it."""
        text = round_trip(circle, self._agent.roster.name)
        at = next(index for index, fact in enumerate(circle) if fact.state == "waits")
        victim, need = circle[at], circle[(at + 1) % len(circle)]
        self._agent.notify(victim.at, BREAK, [victim.call, need.call, text])

    def _break(self, source: int, data: list[Any]) -> None:
        call, need, text = CallKey(*data[0]), CallKey(*data[1]), data[2]
        for doing in threads():
            waits = doing.serving == (self._agent, *call) and need in [n.call for n in self._needs(doing.future)]
            if waits and doing.future is not None:
                doing.future.break_wait(doing.thread, DeadlockError(text))

    # -- asking
    def ask(self, questions: dict[int, Any]) -> dict[int, Answer]:
        """Ask members of calls (None: of all they know). Facts and threads that run no call and wait, by member."""
        number, answers = next(self._numbers), queue.SimpleQueue[tuple[int, Any]]()
        self._answers[number] = answers
        found: dict[int, Answer] = {}
        try:
            for member, calls in questions.items():
                self._agent.notify(member, ASK, [number, calls])
            until = self._agent.clock() + _ANSWER_SECONDS
            while len(found) < len(questions):
                member, (facts, others) = answers.get(timeout=max(0.0, until - self._agent.clock()))
                found[member] = [_fact(fact) for fact in facts], [_other(other) for other in others]
        except queue.Empty:
            pass  # who gives no answer is stopped, or stuck in code that lets no thread run
        finally:
            del self._answers[number]
        return found

    def _heard(self, source: int, data: list[Any]) -> None:
        answers = self._answers.get(data[0])
        if answers is not None:
            answers.put((source, data[1:]))

    def _asked(self, source: int, data: list[Any]) -> None:
        number, about = data
        everybody = threads()
        running = {doing.serving[1:]: doing for doing in everybody if doing.serving and doing.serving[0] is self._agent}
        whole = about is None
        if whole:
            about = self._agent.machine.ask(lambda node: list(node.calls.serving))
        facts = [fact for call in about if (fact := self._describe(call[0], call[1], running.get(tuple(call))))]
        others = [
            [doing.name, needs, doing.places]
            for doing in everybody
            if whole and doing.serving is None and (needs := self._needs(doing.future))
        ]
        self._agent.notify(source, TOLD, [number, facts, others])

    def _describe(self, source: int, number: int, doing: Doing | None) -> Fact | None:
        """What there is to say of a call that is served here; None if there is none such."""

        def look(node: Node) -> tuple[str, str, float, Id | None] | None:
            entry = node.calls.serving.get((source, number))
            return None if entry is None else (entry.label, node.calls.state(source, number), entry.since, entry.asks)

        found = self._agent.machine.ask(look)
        if found is None:
            return None
        label, state, since, asks = found
        needs = self._makers(asks) if asks is not None else self._needs(doing.future if doing else None)
        if state == "begun":
            state = "runs" if not needs else "asks" if doing is None else "waits"
        places = doing.places if doing else ()
        return Fact(CallKey(source, number), self._agent.id, label, state, self._agent.clock() - since, needs, places)

    # -- what a future waits for
    def _needs(self, future: Future[Any] | None) -> tuple[Need, ...]:
        origins = [] if future is None else future.origins()
        return tuple(need for origin in origins for need in self._needs_of(origin))

    def _needs_of(self, origin: Future[Any]) -> tuple[Need, ...]:
        number = self._agent.pending.number_of(origin)
        if number is None:
            rref = self._agent.values.rref_of(origin)
            return () if rref is None else self._makers(rref)
        waiting = self._agent.machine.ask(lambda node: node.calls.outgoing.get(number))
        return () if waiting is None else (Need(CallKey(self._agent.id, number), waiting.to),)

    def _makers(self, rref: Id) -> tuple[Need, ...]:
        """The call that is to make a value of this member, if it has come."""

        def look(node: Node) -> tuple[Need, ...]:
            serving = node.calls.serving.items()
            return tuple(Need(CallKey(*key), node.me) for key, entry in serving if entry.makes == rref)

        return self._agent.machine.ask(look)

    # -- telling
    def _tell(self, waits: list[Doing], inquiry: Inquiry) -> None:
        with self._lock:
            overdue, self._overdue = self._overdue, {}
        every = [(doing, self._needs(doing.future)) for doing in waits]
        self._told &= {need.call for _, needs in every for need in needs}
        for doing, needs in every:
            fresh = {need.call for need in needs} - self._told
            if doing.thread in overdue and fresh:
                self._told |= fresh
                lines = "\n".join(wait_story(needs, inquiry.facts, self._agent.roster.name))
                _log.warning("%s has waited %.0f s\n%s", self._agent.name, overdue[doing.thread], lines)


def explain() -> DeadlockReport:
    """Who waits for whom now, on all workers, with stacks. RuntimeError where this process is in no world."""
    return current.current().part(Watchdog).explain()


def _other(data: list[Any]) -> OtherWait:
    thread, needs, places = data
    return OtherWait(thread, _read(needs), tuple(places))


def _read(needs: list[Any]) -> tuple[Need, ...]:
    return tuple(Need(CallKey(*call), at) for call, at in needs)


def _fact(data: list[Any]) -> Fact:
    call, at, label, state, seconds, needs, places = data
    return Fact(CallKey(*call), at, label, state, seconds, _read(needs), tuple(places))


def _same(one: list[Fact], other: list[Fact]) -> bool:
    return [fact.call for fact in one] == [fact.call for fact in other]
