"""Who waits for whom, in words: a chain of waits, a circle of them, and a whole world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rpcbench.protocol.calls import CallKey, Fact, Inquiry, Need

Name = Callable[[int], str]


class OtherWait(NamedTuple):
    """A thread that runs no call and waits for some: the main thread, as a rule."""

    thread: str
    needs: tuple[Need, ...]
    places: tuple[str, ...]


Answer = tuple[list[Fact], list[OtherWait]]
"""What one member says: of calls that it is to answer, and of its other threads that wait."""


class Explanation(str):
    """A text that shows itself as it is, also as the value of a cell."""

    __slots__ = ()
    __repr__ = str.__str__


def round_trip(circle: Sequence[Fact], name: Name) -> str:
    """A circle of waits in one line."""
    steps = [f"{fact.label} on {name(fact.at)}" for fact in circle]
    return f"calls wait for each other in a circle: {' → '.join([*steps, steps[0]])}"


def story(needs: Iterable[Need], facts: Mapping[CallKey, Fact], name: Name) -> list[str]:
    """What somebody waits for, and what that waits for, one line each."""
    return _story(needs, facts, name, set(), "  ")


def _story(
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
        lines += [] if again else _story(fact.needs, facts, name, told, indent + "  ")
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


def report(members: Sequence[tuple[int, str]], found: Mapping[int, Answer]) -> str:
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
        lines += [f"  {other.thread} waits", *_indented(story(other.needs, facts, names)), *_stack(other.places)]
    for fact in said:
        lines.append(f"  {fact.label}, a call of {names(fact.call.caller)}, {_state(fact)}")
        lines += [*_indented(story(fact.needs, facts, names)), *_stack(fact.places[1:])]
    return lines


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _stack(places: Iterable[str]) -> list[str]:
    return [f"      {place}" for place in places]
