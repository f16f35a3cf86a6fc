"""An open world of processes that join by themselves: any process may found it, lead it, leave it, or die, any time.

The place where agents look for the world is here a record with the id of the leader. A process asks the leader for an
incarnation and, a moment later, to join; if it is rejected for now, it starts again as another process. A leaving
process announces its departure, and ends its connections when the leader has ended theirs, or the others know the heir.

Checked when no events are left: no process waits; without deaths there is one world, and its members have the same
view; a member that has lost its leader saw a death; no member that announced its departure was reported as lost.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from simulation import Member, Packet, World

from rpcbench.protocol import effects as fx
from rpcbench.protocol.delivery import incarnations_of
from rpcbench.protocol.node import Node
from rpcbench.wire import messages as m

PAUSE = 5.0


class Comer(Member):
    """One process. `state`: joining, in, leaving, left, turned away, bereft."""

    world: Succession

    def __init__(self, world: World, id_: int, size: int | None, life: int) -> None:
        super().__init__(world, id_, size, life)
        self.node = Node(m.Member(id_, f"worker{id_}", life, ""), None, world.lossy, launched=False)
        self.told = self.node.all_tables()
        self.state = "joining"
        self.epoch = 0  # of the world that it has asked to join; members of another world reject it
        self.lost: list[m.Member] = []
        self.handlers |= {
            fx.Complete: self._complete,
            fx.MemberLeft: self._hang_up,
            fx.HandedOver: lambda effect: self.world.note(self, effect),
            fx.WatchMember: self._watch,
            fx.Rejected: self._rejected,
        }

    def _complete(self, effect: fx.Complete) -> None:
        if not effect.closing:
            self.state = "in" if self.state == "joining" else self.state
        elif self.node.members.ended:
            self.state = "bereft"
            self.world.bereft.append(self)
            self.world.stop(self)
        elif self.state == "leaving":
            self.feed(lambda: self.node.request_flush(lambda: self.soon(self._end)))

    def _end(self) -> None:
        if self.state == "leaving" and self.id not in self.world.dead:
            self.state = "left"
            self.world.stop(self)

    def _rejected(self, effect: fx.Rejected) -> None:
        assert effect.again or "is not unique" in effect.reason, effect.reason  # its predecessor has just died
        if self.state == "joining":
            self.state = "turned away"
            self.world.stop(self)
            self.world.within(PAUSE, -1, partial(self.world.come, self.id))

    def _watch(self, effect: fx.WatchMember) -> None:
        """Report a member that is already dead; later deaths are reported by `let_know`."""
        peer, gone = self.world.members[effect.member.id], effect.member
        if not self.world.is_there(peer) or (peer.epoch, peer.life) != (self.epoch, gone.incarnation):
            self.feed(lambda: self.node.member_lost(gone.id, gone.incarnation, "nobody answers"))

    def _hang_up(self, gone: fx.MemberLeft) -> None:
        """An agent ends its connections to a departed member, and that member sees them end."""
        if gone.lost:
            self.lost.append(gone.member)
        peer = self.world.members[gone.member.id]
        if (peer.epoch, peer.life) == (self.epoch, gone.member.incarnation) and self.world.is_there(peer):
            ended = partial(peer.node.member_lost, self.id, self.life, "it hung up")
            self.world.later(peer.id, partial(peer.feed, ended))

    def leave(self) -> None:
        if self.state == "in" and self.world.is_there(self):
            self.world.tell(f"{self.id} leaves")
            self.state = "leaving"
            self.feed(lambda: self.node.process_outcome(self.node.members.announce_ready(True)))

    def _obstacle(self, send: fx.Send) -> Any:
        return None if isinstance(send.message, m.Seen | m.Refused) else super()._obstacle(send)


class Succession(World):
    members: dict[int, Any]

    def __init__(self, seed: int, ids: int, lossy: bool = False) -> None:
        self.place: tuple[int, int, int] | None = None  # world, view and id
        self.goodbyes: set[tuple[int, int, int]] = set()
        self.killed: set[int] = set()
        self.bereft: list[Comer] = []
        self.founded = 0
        super().__init__(seed, Comer, 0, lossy)
        self.ids = range(ids)
        self.dead = set(self.ids)
        self.lives = dict.fromkeys(self.ids, -1)

    # -- where newcomers look
    def note(self, by: Comer, effect: fx.HandedOver) -> None:
        """Record the heir. Effects of two successive hand-overs may come in any order."""
        if self.place is not None and self.place[0] == by.epoch and self.place[1] < effect.epoch:
            self.tell(f"the world is found at {effect.heir.id}")
            self.place = (by.epoch, effect.epoch, effect.heir.id)

    def come(self, id_: int) -> None:
        """Start a process, unless one under its id is alive."""
        if id_ not in self.dead:
            return
        leader = self.members[self.place[2]] if self.place is not None and self.place[2] not in self.dead else None
        if leader is None:
            self.founded += 1
            self.place = (self.founded, 0, id_)
            self._begin(id_, 0, None)
        elif self._lets_in(leader, id_):
            life = leader.node.members.next_incarnation(id_)
            self.within(PAUSE, -1, partial(self._begin, id_, life, leader))
        else:
            self.within(PAUSE, -1, partial(self.come, id_))

    def _begin(self, id_: int, life: int, leader: Comer | None) -> None:
        if id_ not in self.dead:
            return
        if leader is not None and not (self.is_there(leader) and self._lets_in(leader, id_)):
            self.within(PAUSE, -1, partial(self.come, id_))
            return
        self.tell(f"{id_} comes, as incarnation {life}, to {leader.id if leader else 'found the world'}")
        self.dead.discard(id_)
        member = self.members[id_] = self.start(id_, life)
        member.epoch = leader.epoch if leader else self.founded
        member.feed(partial(member.node.start_node, *((leader.id, leader.life) if leader else (id_, life))))

    @staticmethod
    def _lets_in(leader: Comer, id_: int) -> bool:
        """Return whether the leader's handshake accepts a newcomer; a rejected one looks for the world again."""
        members = leader.node.members
        return members.is_leader and not members.closing and not members.id_refusal(id_)

    def is_there(self, member: Comer) -> bool:
        return self.members.get(member.id) is member and member.id not in self.dead

    def send(self, packet: Packet) -> None:
        epoch = self.members[packet.source].epoch
        self.later(-1, lambda: self._deliver(packet) if self.members[packet.to].epoch == epoch else None, packet)

    # -- ends
    def stop(self, member: Comer) -> None:
        """End the connections of a member; the messages that it has sent still arrive."""
        self.tell(f"{member.id} is out ({member.state})")
        if member.state == "left":
            self.goodbyes.add((member.epoch, member.id, member.life))
        if self.place is not None and self.place[2] == member.id:
            self.place = None
        self.dead.add(member.id)
        self.events = [e for e in self.events if e.packet is not None or e.actor != member.id]
        self.down = {pair: noticed for pair, noticed in self.down.items() if member.id not in pair}
        self.let_know(member)

    def cut(self, one: int, other: int) -> None:
        pair = self.members.get(one), self.members.get(other)
        if None not in pair and pair[0].epoch == pair[1].epoch:
            super().cut(one, other)

    def kill(self, worker: int) -> None:
        if worker not in self.dead:
            self.killed.add(worker)
            super().kill(worker)

    def let_know(self, gone: Any) -> None:
        for member in self.alive:
            if member.epoch == gone.epoch:
                self.later(member.id, partial(self._ended, member, gone))

    def _ended(self, member: Comer, gone: Comer) -> None:
        """Report the end of a connection; no message arrives on it afterwards."""
        self.events = [e for e in self.events if e.packet is None or not self._came_by(e.packet, gone, member)]
        member.feed(lambda: member.node.member_lost(gone.id, gone.life, "its connection ended"))

    @staticmethod
    def _came_by(packet: Packet, source: Comer, to: Comer) -> bool:
        return packet[:2] == (source.id, to.id) and incarnations_of(packet.seq)[0] == source.life

    # -- at the end
    def check_quiet(self) -> None:
        for member in self.alive:
            assert member.state == "in", f"{member.id} is still {member.state}"
        inside = self.alive
        for member in inside:
            members = member.node.members
            assert not members._reported or self.killed, f"{member.id} waits for {members._reported}"
            assert members.leader in members.members, f"{member.id} follows {members.leader}, which is not a member"
        if not self.killed:
            assert not self.bereft
            assert len({(member.node.members.epoch, member.node.members.leader) for member in inside}) <= 1
            for member in inside:
                assert not any((member.epoch, gone.id, gone.incarnation) in self.goodbyes for gone in member.lost)
                assert sorted(member.node.members.members) == sorted(other.id for other in inside)
                assert self.place is not None and self.place[2] == member.node.members.leader
