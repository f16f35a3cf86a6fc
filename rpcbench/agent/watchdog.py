"""Explains who waits for whom, and ends waits that go round in a circle.

A thread that has waited for a second says so; then the calls that it waits for are followed from member to member, by
notices. While nobody waits that long, nothing happens at all. A circle that is seen twice is ended: one of its waits
raises DeadlockError, and the others end with the calls that fail of it. A wait of `patience` seconds is told of in
the log, once, with what it waits for.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections.abc import Iterable
from typing import Any

from rpcbench.agent import current
from rpcbench.agent.core import Agent
from rpcbench.agent.explain import Answer, Explanation, OtherWait, report, round_trip, story
from rpcbench.agent.interrupts import uninterrupted
from rpcbench.agent.stacks import Doing, threads
from rpcbench.base.errors import DeadlockError
from rpcbench.base.futures import Future
from rpcbench.base.ids import Id
from rpcbench.protocol.calls import CallKey, Fact, Inquiry, Need
from rpcbench.protocol.node import Node

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

    def explain(self) -> Explanation:
        """Who waits for whom now, in the whole world, with the stacks of their threads. Takes a second at most."""
        members = self._agent.members()
        found = self.ask({info.id: None for info in members})
        return Explanation(report([(info.id, info.name) for info in members], found))

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
                lines = "\n".join(story(needs, inquiry.facts, self._agent.roster.name))
                _log.warning("%s has waited %.0f s\n%s", self._agent.name, overdue[doing.thread], lines)


def explain() -> Explanation:
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
