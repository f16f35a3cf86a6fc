"""What connections tell of their peers, as events of the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rpcbench.agent.links import Links
from rpcbench.agent.machine import Machine
from rpcbench.agent.roster import Roster
from rpcbench.protocol.membership import Membership, Verdict
from rpcbench.transport.handshake import Identity, Objection
from rpcbench.wire.encoding import unpack
from rpcbench.wire.framing import Frame


class Pairs:
    """`give_up` ends all connections to a member that is lost; messages come in through `links`."""

    def __init__(self, machine: Machine, roster: Roster, links: Links, host: str) -> None:
        self.give_up: Callable[[int, str], None] = lambda member, reason: None
        self._machine = machine
        self._roster = roster
        self._links = links
        self._host = host

    def arrived(self, peer: Identity, frame: Frame) -> None:
        seq, message = unpack(*frame)
        self._links.incoming(peer.id, seq, message)

    def ended(self, peer: Identity, reason: str) -> None:
        told = self._roster.explain(peer.name, reason)
        self._machine.feed(lambda node: node.lost(peer.id, peer.incarnation, told))

    def objection(self, newcomer: Identity) -> Objection | None:
        """None where this member leads a world that goes on, and has nobody under that id."""
        return self._machine.ask(lambda node: _objection(node.members, newcomer))

    def incarnation_for(self, newcomer: Identity) -> int:
        return self._machine.ask(lambda node: node.members.life_for(newcomer.id))

    def broken(self, peer: Identity, reason: str) -> None:
        self._machine.feed(lambda node: node.broken(peer.id, peer.incarnation, reason))

    def resumed(self, peer: Identity) -> None:
        self._machine.feed(lambda node: node.resume(peer.id, peer.incarnation))

    def ways(self, peer: Identity) -> Sequence[str]:
        """None for a process that is no member (any more), or once the world is about to end."""
        members = self._machine.ask(lambda node: {} if node.members.closing else dict(node.members.members))
        member = members.get(peer.id)
        return member.ways(self._host) if member is not None and member.incarnation == peer.incarnation else ()

    def judged(self, verdict: Verdict) -> None:
        """The heartbeat has changed its mind about a member."""
        if verdict.kind == "lost":
            self.give_up(verdict.peer, verdict.reason)
        else:
            self._roster.doubted(verdict.kind, verdict.peer, verdict.reason)


def _objection(members: Membership, newcomer: Identity) -> Objection | None:
    if not members.leads:
        return Objection(f"{members.me.name} does not lead this world", members.outlives_leaders)
    if members.closing:
        return Objection("this world is about to end", members.outlives_leaders)
    taken = members.taken(newcomer.id)
    return Objection(taken) if taken else None
