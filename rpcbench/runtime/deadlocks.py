"""Reports which threads wait for which calls, and ends waits that form a cycle.

Guarantees
- Nothing runs until a thread has waited for a second; then its calls are followed from member to member, by notices.
- A cycle that is seen twice is ended: one wait raises DeadlockError, the others end with the calls that fail of it.
- A wait of `patience` seconds is logged once, with the calls that it waits for.
- Working threads record nothing for this: their calls and futures are read from their stacks.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import queue
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

from rpcbench.base.errors import DeadlockError
from rpcbench.base.futures import Future
from rpcbench.base.ids import Id, Row
from rpcbench.protocol.calls import CallKey, Fact, Inquiry, Need
from rpcbench.protocol.node import Node
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import CreationSite, creation_sites
from rpcbench.runtime.locked_node import uninterrupted
from rpcbench.runtime.server import serve_request

_MOST = 12  # lines of a stack


class ThreadState(NamedTuple):
    """One thread. `serving`: (agent, caller, number) of the call that it runs."""

    thread: int
    name: str
    serving: tuple[object, int, int] | None
    future: Future[Any] | None  # the one that it waits for
    places: tuple[str, ...]  # lines of the user's program, innermost first; of libraries if there are none


def thread_states() -> list[ThreadState]:
    """Return the current state of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [_thread_state(ident, names.get(ident, str(ident)), stack) for ident, stack in _frames_by_thread().items()]


def _frames_by_thread() -> dict[int, list[FrameType]]:
    """Return the frames of each thread, innermost first."""
    # Python lists threads under a lock of its own, for which any thread that begins or ends waits while no other runs.
    # A frame's object is made when it is first asked for, from data that must not have ended by then. So no garbage
    # collection may come in between: it runs Python code, which lets other threads run.
    with _listing:
        collects = gc.isenabled()
        gc.disable()
        try:
            return {ident: [f for f, _ in walk_stack(frame)] for ident, frame in sys._current_frames().items()}
        finally:
            if collects:
                gc.enable()


_listing = threading.Lock()  # one at a time, as each switches the garbage collector off


def _thread_state(ident: int, name: str, stack: list[FrameType]) -> ThreadState:
    future: Future[Any] | None = None
    for frame in stack:
        if frame.f_code is Future.wait.__code__ and future is None:
            future = frame.f_locals["self"]
        if frame.f_code is serve_request.__code__:  # the innermost call: a waiting thread may receive and run others
            held = frame.f_locals
            serving = held["agent"], held["source"], held["message"].call
            return ThreadState(ident, name, serving, future, _places_of_frame(stack[0]))
    return ThreadState(ident, name, None, future, () if _is_library_wait(stack) else _places_of_frame(stack[0]))


def _is_library_wait(stack: Sequence[FrameType]) -> bool:
    """Return whether this is a thread of an installed library, without a line of the user, that waits for something to
    do, as the monitor of a progress bar does."""
    files = [frame.f_code.co_filename for frame in stack]
    begun = files[-1].startswith(STDLIB)  # by `threading`, and not by a program
    libraries = all(file.startswith(STDLIB) or not _PACKAGES.isdisjoint(Path(file).parts) for file in files)
    return begun and libraries and stack[0].f_code.co_name in _WAITS and files[0].startswith(STDLIB)


def _places_of_frame(frame: FrameType) -> tuple[str, ...]:
    sites = [site for site, _ in zip(creation_sites(frame), range(_MOST), strict=False)]
    if all(is_idle(site.code.co_filename) for site in sites):  # a thread of this package, or inside torch
        inside = (f for f, _ in walk_stack(frame) if not is_idle(f.f_code.co_filename))
        return tuple(str(CreationSite(f.f_code, f.f_lasti)) for f, _ in zip(inside, range(_MOST), strict=False))
    places = [str(site) for site in sites]
    outermost = max((n for n, place in enumerate(places) if place.startswith("Cell ")), default=_MOST)
    return tuple(places[: outermost + 1])  # without IPython's functions, which run the cell


STDLIB = sysconfig.get_path("stdlib") + os.sep
_IDLE = STDLIB, f"{Path(__file__).parents[1]}{os.sep}", "<frozen "
_PACKAGES = {"site-packages", "dist-packages"}
_WAITS = {"wait", "get", "select", "accept", "join", "poll"}  # of the standard library
_KERNEL = {"ipykernel", "ipykernel_launcher.py", "IPython", "tornado", "traitlets", "zmq"}  # Jupyter's, for its threads


@lru_cache(maxsize=4096)
def is_idle(file: str) -> bool:
    """Return whether a thread with lines in such files only does nothing for the user: of Python, this package, and a
    Jupyter kernel."""
    return file.startswith(_IDLE) or not _KERNEL.isdisjoint(Path(file).parts)


Name = Callable[[int], str]


class OtherWait(NamedTuple):
    """A thread that waits for calls and runs none: as a rule, the main thread."""

    thread: str
    needs: tuple[Need, ...]
    places: tuple[str, ...]


Answer = tuple[list[Fact], list[OtherWait]]
"""The reply of one member: the calls that it serves, and its other threads that wait."""


class DeadlockReport(str):
    """A report. Its repr is its text, so that a cell shows it line by line."""

    __slots__ = ()
    __repr__ = str.__str__


def describe_cycle(circle: Sequence[Fact], name: Name) -> str:
    steps = [f"{fact.label} on {name(fact.at)}" for fact in circle]
    return f"calls wait for each other in a circle: {' → '.join([*steps, steps[0]])}"


def describe_waits(
    needs: Iterable[Need],
    facts: Mapping[CallKey, Fact],
    name: Name,
    pad: str = "  ",
    described: set[CallKey] | None = None,
) -> list[str]:
    """Describe the calls that a thread waits for, and the calls that those wait for, one line each."""
    described, lines = set() if described is None else described, []
    for call, at in needs:
        fact = facts.get(call)
        if fact is None:
            lines.append(f"{pad}for a reply of {name(at)}, which has no such call (any more), or does not respond")
            continue
        again = call in described  # in a cycle, or reached by two ways: shown once
        described.add(call)
        lines.append(f"{pad}for {fact.label} on {name(at)}, {_describe_state(fact)}{' (see above)' if again else ''}")
        lines += [] if again else describe_waits(fact.needs, facts, name, pad + "  ", described)
    return lines


def _describe_state(fact: Fact) -> str:
    time = f"{fact.seconds:.0f} s" if fact.seconds >= 1 else "less than 1 s"
    words = {
        "held": f"which waits {time} until the owners of its RRefs have confirmed them",
        "queued": f"which waits {time} for a thread: all are busy",
        "runs": f"which has run {time}",
        "waits": f"which has run {time} and waits",
        "asks": f"which waits {time} for a value that is not made yet",
    }[fact.state]
    return f"{words}, at {fact.places[0]}" if fact.places else words


def deadlock_report(members: Sequence[tuple[int, str]], found: Mapping[int, Answer], only: str = "") -> str:
    """Describe the waits of a world, or of `only` one member: `members` by id and name, `found` with their replies."""
    names = dict(members)
    facts = {fact.call: fact for said, _ in found.values() for fact in said}
    inquiry = Inquiry([])
    inquiry.add_facts(facts.values())
    lines = []
    for id_, member in members:
        if only not in ("", member):
            continue
        lines += _describe_member(member, found.get(id_), facts, lambda at: names.get(at, f"worker {at}"))
    if not only and (circle := inquiry.find_cycle()):
        lines.append(describe_cycle(circle, lambda at: names.get(at, f"worker {at}")))
    return "\n".join(lines)


def _describe_member(name: str, answer: Answer | None, facts: Mapping[CallKey, Fact], names: Name) -> list[str]:
    if answer is None:
        return [f"{name} does not respond: it is stopped, or busy in code that lets no other thread run"]
    said, others = answer
    if not said and not others:
        return [f"{name}: nothing to do, and no thread waits"]
    lines = [f"{name}:"]
    for other in others:
        lines.append(f"  {other.thread} {'waits' if other.needs else 'runs'}")
        lines += [*describe_waits(other.needs, facts, names, "    "), *_format_stack(other.places)]
    for fact in said:
        lines.append(f"  {fact.label}, a call of {names(fact.call.caller)}, {_describe_state(fact)}")
        lines += [*describe_waits(fact.needs, facts, names, "    "), *_format_stack(fact.places[1:])]
    return lines


def _format_stack(places: Iterable[str]) -> list[str]:
    return [f"      {place}" for place in places]


def list_waits(members: Mapping[int, str], found: Mapping[int, Answer]) -> list[Row]:
    """Return the waits of a world as rows. Of a thread that serves no call, `call` and `caller` are "", and `seconds`
    is None; of a call, `thread` is "". `needs`: the calls that it waits for, `on` which member each; `call` is "" there
    where that member reports no such call."""
    facts = {fact.call: fact for said, _ in found.values() for fact in said}

    def row(at: int, state: str, needs: Iterable[Need], places: Iterable[str], **about: Any) -> Row:
        calls = [(facts.get(need.call), need.at) for need in needs]
        named = [{"call": fact.label if fact else "", "on": members.get(on, f"worker {on}")} for fact, on in calls]
        other = {"thread": "", "call": "", "caller": "", "seconds": None}
        return {"member": members[at], "state": state, **other, **about, "needs": named, "places": list(places)}

    rows = []
    for at, (said, others) in sorted(found.items()):
        for other in others:
            rows.append(row(at, "waits" if other.needs else "runs", other.needs, other.places, thread=other.thread))
        for fact in said:
            caller = members.get(fact.call.caller, f"worker {fact.call.caller}")
            about = {"call": fact.label, "caller": caller, "seconds": round(fact.seconds, 3)}
            rows.append(row(at, fact.state, fact.needs, fact.places, **about))
    return rows


ASK, TOLD, BREAK = "waits.ask", "waits.told", "waits.break"  # channels
_THREADS = "threads"  # a question about all calls, and all threads of the user's program, also those that wait for none
_ANSWER_SECONDS = 1.0
_PATIENCE = 30.0
_log = logging.getLogger("rpcbench")


class Watchdog:
    """Follows long waits. `patience`: seconds, from RPCBENCH_STALL_SECONDS (30 by default); 0 logs no wait."""

    def __init__(self, agent: Agent) -> None:
        self.patience = float(os.environ.get("RPCBENCH_STALL_SECONDS", _PATIENCE))
        self._agent = agent
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[tuple[int, Any]]] = {}  # question → replies
        self._lock = threading.Lock()  # guards the three below
        self._probing = False  # one search at a time
        self._overdue: dict[int, float] = {}  # thread → seconds, to be logged
        self._reported_calls: set[CallKey] = set()  # calls with a logged wait
        agent.hooks.on_long_wait.append(self._long_wait)
        agent.on_notice(ASK, self._question_received)
        agent.on_notice(TOLD, self._reply_received)
        agent.on_notice(BREAK, self._break_requested)

    def report_deadlocks(self) -> DeadlockReport:
        """Report the current waits of the whole world, with the stacks of their threads. Takes at most a second."""
        members = self._agent.members()
        found = self.ask_members({info.id: None for info in members})
        return DeadlockReport(deadlock_report([(info.id, info.name) for info in members], found))

    def thread_stacks(self, names: Sequence[str]) -> dict[str, str]:
        """Report where the threads of members are, waiting or not, with their stacks, by name; a member that does not
        reply within a second is left out."""
        members = [(info.id, info.name) for info in self._agent.members()]
        chosen = {self._agent.member(name).id: name for name in names}
        found = self.ask_members({id_: _THREADS if id_ in chosen else None for id_, _ in members})
        return {name: deadlock_report(members, found, name) for id_, name in chosen.items() if id_ in found}

    def read_waits(self) -> tuple[list[Row], str]:
        """Return a row for each thread of the user's program on any member, and each call that is served, see
        `list_waits`; and a sentence on calls that wait for each other in a circle, or ""."""
        members = {info.id: info.name for info in self._agent.members()}
        found = self.ask_members(dict.fromkeys(members, _THREADS))
        inquiry = Inquiry([])
        inquiry.add_facts(fact for said, _ in found.values() for fact in said)
        circle = inquiry.find_cycle()
        words = describe_cycle(circle, lambda at: members.get(at, f"worker {at}")) if circle else ""
        return list_waits(members, found), words

    def awaited_members(self) -> set[int]:
        """Return the other members, by id, that serve calls for which a thread of this process waits now."""
        if not self._agent.machine.read_node(lambda node: bool(node.calls.outgoing)):
            return set()  # the stacks of all threads need not be read
        frames = [
            frame for stack in _frames_by_thread().values() for frame in stack if frame.f_code is Future.wait.__code__
        ]
        needs = [need for frame in frames for need in self._needs_of_future(frame.f_locals["self"])]
        return {need.at for need in needs} - {self._agent.id}

    # -- looking for circles
    def _long_wait(self, seconds: float) -> None:
        """Start a search; called now and then by a thread that waits."""
        with uninterrupted:  # else Ctrl-C could leave `_probing` set for good
            with self._lock:
                if self.patience and seconds >= self.patience:
                    self._overdue[threading.get_ident()] = seconds
                if self._probing:
                    return
                self._probing = True
            self._agent.submit(self._probe_deadlock)

    def _probe_deadlock(self) -> None:
        try:
            waits = [doing for doing in thread_states() if doing.future is not None]
            inquiry = self._run_inquiry(waits)
            circle = inquiry.find_cycle()
            # one look may mix states of different moments
            again = self._run_inquiry(waits).find_cycle() if circle else []
            if circle and [fact.call for fact in circle] == [fact.call for fact in again]:
                self._break_cycle(circle)
            self._report_long_waits(waits, inquiry)
        finally:
            with self._lock:
                self._probing = False

    def _run_inquiry(self, waits: Iterable[ThreadState]) -> Inquiry:
        inquiry = Inquiry([need for doing in waits for need in self._needs_of_future(doing.future)])
        while questions := inquiry.next_questions():
            for facts, _ in self.ask_members(
                {at: [tuple(call) for call in calls] for at, calls in questions.items()}
            ).values():
                inquiry.add_facts(facts)
        return inquiry

    def _break_cycle(self, circle: list[Fact]) -> None:
        """Break one wait of a cycle. Every member that finds the cycle chooses the same wait."""
        text = describe_cycle(circle, self._agent.links.members.member_name)
        at = next(index for index, fact in enumerate(circle) if fact.state == "waits")
        victim, need = circle[at], circle[(at + 1) % len(circle)]
        self._agent.notify(victim.at, BREAK, [victim.call, need.call, text])

    def _break_requested(self, source: int, data: list[Any]) -> None:
        call, need, text = CallKey(*data[0]), CallKey(*data[1]), data[2]
        for doing in thread_states():
            waits = doing.serving == (self._agent, *call) and need in [
                n.call for n in self._needs_of_future(doing.future)
            ]
            if waits and doing.future is not None:
                doing.future.break_wait(doing.thread, DeadlockError(text))

    # -- asking
    def ask_members(self, questions: dict[int, Any]) -> dict[int, Answer]:
        """Ask members about calls (None: all; or `_THREADS`). Return facts and other waiting threads, by member."""
        number, answers = next(self._numbers), queue.SimpleQueue[tuple[int, Any]]()
        self._answers[number] = answers
        found: dict[int, Answer] = {}
        try:
            for member, calls in questions.items():
                self._agent.notify(member, ASK, [number, calls])
            until = self._agent.links.clock() + _ANSWER_SECONDS
            while len(found) < len(questions):
                member, (facts, others) = answers.get(timeout=max(0.0, until - self._agent.links.clock()))
                found[member] = [_decode_fact(fact) for fact in facts], [_decode_other_wait(other) for other in others]
        except queue.Empty:
            pass  # a silent member is stopped, or busy in code that lets no other thread run
        finally:
            del self._answers[number]
        return found

    def _reply_received(self, source: int, data: list[Any]) -> None:
        answers = self._answers.get(data[0])
        if answers is not None:
            answers.put((source, data[1:]))

    def _question_received(self, source: int, data: list[Any]) -> None:
        number, about = data
        everybody = thread_states()
        running = {doing.serving[1:]: doing for doing in everybody if doing.serving and doing.serving[0] is self._agent}
        threaded, whole = about == _THREADS, about in (None, _THREADS)
        if whole:
            about = self._agent.machine.read_node(lambda node: list(node.calls.serving))
        facts = [fact for call in about if (fact := self._describe_call(call[0], call[1], running.get(tuple(call))))]
        others = [
            [doing.name, needs, doing.places]
            for doing in everybody
            if whole
            and doing.serving is None
            and ((needs := self._needs_of_future(doing.future)) or (threaded and doing.places))
        ]
        self._agent.notify(source, TOLD, [number, facts, others])

    def _describe_call(self, source: int, number: int, doing: ThreadState | None) -> Fact | None:
        """Return the facts about a call that is served here; None if there is no such call."""

        def look(node: Node) -> tuple[str, str, float, Id | None] | None:
            entry = node.calls.serving.get((source, number))
            return (
                None
                if entry is None
                else (entry.label, node.calls.call_state(source, number), entry.since, entry.fetched_rref)
            )

        found = self._agent.machine.read_node(look)
        if found is None:
            return None
        label, state, since, fetched_rref = found
        needs = (
            self._creating_calls(fetched_rref)
            if fetched_rref is not None
            else self._needs_of_future(doing.future if doing else None)
        )
        if state == "begun":
            state = "runs" if not needs else "asks" if doing is None else "waits"
        places = doing.places if doing else ()
        age = self._agent.links.clock() - since
        return Fact(CallKey(source, number), self._agent.id, label, state, age, needs, places)

    # -- the calls behind a future
    def _needs_of_future(self, future: Future[Any] | None) -> tuple[Need, ...]:
        origins = [] if future is None else future.unfinished_origins()
        return tuple(need for origin in origins for need in self._needs_of(origin))

    def _needs_of(self, origin: Future[Any]) -> tuple[Need, ...]:
        number = self._agent.calls.pending.find_number(origin)
        if number is None:
            rref = self._agent.calls.values.find_rref(origin)
            return () if rref is None else self._creating_calls(rref)
        waiting = self._agent.machine.read_node(lambda node: node.calls.outgoing.get(number))
        return () if waiting is None else (Need(CallKey(self._agent.id, number), waiting.to),)

    def _creating_calls(self, rref: Id) -> tuple[Need, ...]:
        """Return the call that will make a value of this member, if it has arrived."""

        def look(node: Node) -> tuple[Need, ...]:
            serving = node.calls.serving.items()
            return tuple(Need(CallKey(*key), node.me) for key, entry in serving if entry.makes == rref)

        return self._agent.machine.read_node(look)

    # -- logging
    def _report_long_waits(self, waits: list[ThreadState], inquiry: Inquiry) -> None:
        with self._lock:
            overdue, self._overdue = self._overdue, {}
        every = [(doing, self._needs_of_future(doing.future)) for doing in waits]
        self._reported_calls &= {need.call for _, needs in every for need in needs}  # forget calls that have ended
        for doing, needs in every:
            fresh = {need.call for need in needs} - self._reported_calls
            if doing.thread in overdue and fresh:
                self._reported_calls |= fresh
                lines = "\n".join(describe_waits(needs, inquiry.facts, self._agent.links.members.member_name))
                _log.warning("%s has waited %.0f s\n%s", self._agent.name, overdue[doing.thread], lines)


def explain() -> DeadlockReport:
    """Report which threads wait for which calls, on all workers, with stacks; takes at most a second.

    Raises:
        RuntimeError: This process is in no world.
    """
    return current.current_agent().part(Watchdog).report_deadlocks()


def _decode_other_wait(data: list[Any]) -> OtherWait:
    thread, needs, places = data
    return OtherWait(thread, _decode_needs(needs), tuple(places))


def _decode_needs(needs: list[Any]) -> tuple[Need, ...]:
    return tuple(Need(CallKey(*call), at) for call, at in needs)


def _decode_fact(data: list[Any]) -> Fact:
    call, at, label, state, seconds, needs, places = data
    return Fact(CallKey(*call), at, label, state, seconds, _decode_needs(needs), tuple(places))
