"""Finds RRefs that leaked.

Leaks are of two kinds: values owned here that other members use, and references held here to values of other members,
each with its creation site in this process. A member that leaves the world in good order releases the second kind
itself; the values of the first kind that are then left have leaked.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from rpcbench.base.ids import Id
from rpcbench.protocol.node import Node
from rpcbench.protocol.rrefs import Owned
from rpcbench.runtime.agent import Agent


class Leak(NamedTuple):
    """One RRef that is alive: a reference held here (`held`), or a value of this member with its `holders`. `site`: the
    line or cell of this process that created it; empty if a message of another member did."""

    rref: Id
    forks: tuple[Id, ...]  # references: of `holders`, index for index, or the one held here
    owner: str
    holders: tuple[str, ...]
    type: str  # of the value, "" if not known
    site: str
    held: bool

    def __str__(self) -> str:
        made = f"made at {self.site}" if self.site else "which came in a message"
        if self.held:
            return f"RRef {self.rref} of {self.type or 'a value'} on {self.owner}, held by {self.holders[0]}, {made}"
        users = ", ".join(dict.fromkeys(self.holders))
        return f"RRef {self.rref} of {self.type or 'a value'}, owned by {self.owner}, used by {users}, {made}"


def find_leaks(agent: Agent) -> list[Leak]:
    """Return all RRefs alive here that another member shares, values owned here first."""
    return _owned_leaks(agent) + _held_leaks(agent)


def count_rrefs(agent: Agent) -> Counter[str]:
    """Return how many values of each other member the RRefs here refer to, by its name. Without asking any member."""
    pairs = agent.machine.read_node(lambda node: {(u.owner, u.rref) for u in node.rrefs.users.values()})
    return Counter(agent.links.members.member_name(owner) for owner, _ in pairs if owner != agent.id)


def _owned_leaks(agent: Agent) -> list[Leak]:
    names = agent.links.members.member_name

    def rows(node: Node) -> list[tuple[Id, Owned, dict[Id, int]]]:
        return [(rref, owned, dict(owned.forks)) for rref, owned in node.rrefs.owned.items()]

    found = []
    for rref, owned, forks in agent.machine.read_node(rows):
        site = agent.calls.values.creation_site_of(rref)
        holders = tuple(names(holder) for holder in forks.values())
        found.append(Leak(rref, tuple(forks), agent.name, holders, owned.type, str(site or ""), False))
    return found


def _held_leaks(agent: Agent) -> list[Leak]:
    users = agent.machine.read_node(lambda node: {f: u for f, u in node.rrefs.users.items() if u.owner != agent.id})
    found = []
    for handle in filter(None, [hold() for hold in list(agent.holds)]):  # weak references: some may be dead
        fork = handle._fork
        user = users.get(fork) if fork is not None else None
        if fork is not None and user is not None and not handle._released:  # the owner may not know of it yet
            owner, site = agent.links.members.member_name(user.owner), str(handle._site or "")
            found.append(Leak(handle._rref, (fork,), owner, (agent.name,), user.type, site, True))
    return found
