"""Who waits for whom, over the members of a world: following calls from one to the next, and finding circles.

A call waits for others when the thread that runs it does, or when the value that it asks for is not made yet. What a
member says of its calls is true when it says it, and a call that waits goes on waiting until what it waits for ends:
so a circle that is found twice, the same both times, never ends by itself (deadlines aside).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Call(NamedTuple):
    """One call of a world: who made it, and its number there."""

    caller: int
    number: int


class Need(NamedTuple):
    """A call that somebody waits for, and the member that is to answer it."""

    call: Call
    at: int


class Fact(NamedTuple):
    """What the member `at` says of a call that it is to answer. `needs` are what it waits for; all must end first.

    `places` are lines of the user's program on the stack of its thread, if it has one, the innermost first.
    """

    call: Call
    at: int
    label: str
    state: str
    seconds: float
    needs: tuple[Need, ...]
    places: tuple[str, ...]


class Inquiry:
    """Follows calls from member to member: ask what `questions` says, until it says nothing."""

    def __init__(self, needs: Iterable[Need]) -> None:
        self.facts: dict[Call, Fact] = {}
        self._open = {need.call: need.at for need in needs}
        self._asked: set[Call] = set()

    def questions(self) -> dict[int, list[Call]]:
        """Calls to ask about now, by the member to ask. Each is asked once."""
        asked: dict[int, list[Call]] = {}
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
