"""RRefs that are still alive, each with the place in the program where this process got hold of it.

Two kinds: values that this member owns and others use, and references held here to values of others. A member that
leaves the world in good order lets go of the second kind itself; what is left of the first kind then has leaked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rpcbench.agent.handles import Home
from rpcbench.agent.machine import Machine
from rpcbench.agent.roster import Roster
from rpcbench.agent.values import Values
from rpcbench.base.ids import Id
from rpcbench.protocol.node import Node
from rpcbench.protocol.rrefs import Owned


class Member(Home, Protocol):
    """What this needs of an agent."""

    @property
    def name(self) -> str: ...

    @property
    def machine(self) -> Machine: ...

    @property
    def roster(self) -> Roster: ...

    @property
    def values(self) -> Values: ...


class Leak(NamedTuple):
    """One RRef that is alive. `held`: a reference to another's value; else a value of this member, and its `holders`.

    `site` is the line, or the cell, of this process that made it; empty where a message of another member did.
    """

    rref: Id
    forks: tuple[Id, ...]
    owner: str
    holders: tuple[str, ...]
    type: str
    site: str
    held: bool

    def __str__(self) -> str:
        made = f"made at {self.site}" if self.site else "which came in a message"
        if self.held:
            return f"RRef {self.rref} of {self.type or 'a value'} on {self.owner}, held by {self.holders[0]}, {made}"
        users = ", ".join(dict.fromkeys(self.holders))
        return f"RRef {self.rref} of {self.type or 'a value'}, owned by {self.owner}, used by {users}, {made}"


def leaks(agent: Member) -> list[Leak]:
    """All RRefs alive here that another member is part of, values owned here first."""
    return _owned(agent) + _held(agent)


def _owned(agent: Member) -> list[Leak]:
    names = agent.roster.name

    def rows(node: Node) -> list[tuple[Id, Owned, dict[Id, int]]]:
        return [(rref, owned, dict(owned.forks)) for rref, owned in node.rrefs.owned.items()]

    found = []
    for rref, owned, forks in agent.machine.ask(rows):
        site = agent.values.site(rref)
        holders = tuple(names(holder) for holder in forks.values())
        found.append(Leak(rref, tuple(forks), agent.name, holders, owned.type, str(site or ""), False))
    return found


def _held(agent: Member) -> list[Leak]:
    users = agent.machine.ask(lambda node: {f: u for f, u in node.rrefs.users.items() if u.owner != agent.id})
    found = []
    for handle in filter(None, [hold() for hold in list(agent.holds)]):
        fork = handle._fork
        user = users.get(fork) if fork is not None else None
        if fork is not None and user is not None and not handle._released:  # the owner may not know yet
            owner, site = agent.roster.name(user.owner), str(handle._site or "")
            found.append(Leak(handle._rref, (fork,), owner, (agent.name,), user.type, site, True))
    return found


def report(found: Sequence[Leak]) -> str:
    """For people, one line for each."""
    return "\n".join(f"  {leak}" for leak in found)
