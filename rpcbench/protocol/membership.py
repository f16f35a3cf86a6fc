"""Who is in the world. Member 0 alone changes it and publishes a numbered view; the others report and follow.

    joining ── View that names me ──> in ── Ready(leaving) ──> left
                                       └── connection ends ──> lost

A world with `world_size` is closed: it is complete when so many are in, a join without a size (or with another) is
refused, and it stops when all are ready. A world without is open: members come and go. If member 0 goes, the world
ends. A process that starts again under the same id has a higher incarnation: its predecessor is gone first.
"""

from __future__ import annotations

from collections.abc import Callable

from rpcbench.protocol.effects import Complete, Effects, Gone, Joined, Rejected
from rpcbench.protocol.rrefs import Outbox
from rpcbench.wire.messages import Join, Loss, Member, Past, Ready, Refused, Report, View

LEADER = 0
Outcome = tuple[Effects, Outbox]


class Membership:
    def __init__(self, me: Member, world_size: int | None) -> None:
        self.me = me
        self.world_size = world_size
        self.members: dict[int, Member] = {}
        self.epoch = 0
        self.closing = self.ended = False
        self._complete = self._closed = False  # told already
        self._turned_away: dict[int, str] = {}  # by id, and why: a closed world waits for them in vain
        self._ready: set[int] = set()
        self.past: dict[int, int] = {}  # incarnations of the latest members under ids that have none now
        self._lost: dict[int, str] = {}

    @property
    def leads(self) -> bool:
        return self.me.id == LEADER

    def found_at(self, host: str, address: str, remote: str) -> None:
        """Where others find this member; known only when it listens."""
        self.me = self.me._replace(host=host, address=address, remote=remote)

    def find(self, key: int | str) -> Member | None:
        """A member by id or name."""
        if isinstance(key, int):
            return self.members.get(key)
        return next((member for member in self.members.values() if member.name == key), None)

    def start(self) -> Outcome:
        """Found the world, or ask to be let in."""
        if self.leads:
            return self._change(lambda: self.members.update({LEADER: self.me}))
        return [], [(LEADER, Join(self.me, self.world_size))]

    # -- member 0
    def on_join(self, source: int, message: Join) -> Outcome:
        before = self.members.get(source)
        effects: Effects = []
        outbox: Outbox = []
        if before is not None and source == message.member.id and message.member.incarnation > before.incarnation:
            effects, outbox = self.lost(source, "it was started again")
        reason = self._objection(source, message)
        if reason:
            more, out = self._refuse(source, reason)
            return effects + more, outbox + out
        self._lost.pop(source, None)
        self.past.pop(source, None)
        self._turned_away.pop(source, None)
        more, out = self._change(lambda: self.members.update({source: message.member}))
        return effects + more, outbox + out + self._give_up()

    def _refuse(self, source: int, reason: str) -> Outcome:
        if self.world_size is not None and source not in self.members and source < self.world_size:
            self._turned_away[source] = reason
        return [], [(source, Refused(reason)), *self._give_up()]

    def _give_up(self) -> Outbox:
        """When all have come, and some were turned away, the world cannot be complete: its members are told why."""
        came = len(self.members) + len(self._turned_away)
        if self.world_size is None or self._complete or not self._turned_away or came < self.world_size:
            return []
        reason = next(iter(self._turned_away.values()))
        others = [member for member in self.members if member != LEADER]
        return [(to, Refused(reason)) for to in [*others, LEADER]]  # itself last: it ends by it

    def _objection(self, source: int, message: Join) -> str | None:
        member, size = message.member, self.world_size
        if source != member.id:
            return f"worker {source} asks for id {member.id}"
        if self.closing:
            return "this world is about to end"
        if message.world_size != size:
            asked = _kind(message.world_size)
            return f"this world is {_kind(size)}, but {member.name} asks to join one that is {asked}"
        if size is not None and not 0 <= member.id < size:
            return f"id {member.id} of {member.name} does not fit a world of {size}"
        if any(other.name == member.name for other in self.members.values()):
            return f"worker name {member.name} is not unique: another worker has it already"
        if member.id in self.members:
            return f"id {member.id} of {member.name} is not unique: {self.members[member.id].name} has it already"
        return None

    def on_ready(self, source: int, message: Ready) -> Outcome:
        if source not in self.members:
            return [], []
        if message.leaving:
            return self._remove(source)
        self._ready.add(source)
        return self._close_if_ready()

    def on_report(self, message: Report) -> Outcome:
        member = self.members.get(message.id)
        if member is None or member.incarnation != message.incarnation:
            return [], []
        return self.lost(message.id, message.reason)

    def ready(self, leaving: bool) -> Outcome:
        """This member has nothing more to do (or goes at once)."""
        if not self.leads:
            return [], [(LEADER, Ready(leaving))]
        if leaving:
            return self._change(self._close)
        return self.on_ready(LEADER, Ready(False))

    def _close_if_ready(self) -> Outcome:
        if self._ready >= self.members.keys() and not self.closing:
            return self._change(self._close)
        return [], []

    def _remove(self, worker: int) -> Outcome:
        """Perhaps the others only waited for this one."""
        self._ready.discard(worker)
        self.past[worker] = self.members[worker].incarnation
        effects, outbox = self._change(lambda: self.members.pop(worker))
        more, out = self._close_if_ready()
        return effects + more, outbox + out

    def _close(self) -> None:
        self.closing = True

    def _change(self, change: Callable[[], object]) -> Outcome:
        """Change the members, publish the new view."""
        before = dict(self.members)
        change()
        self.epoch += 1
        lost = tuple(Loss(*entry) for entry in self._lost.items())
        past = tuple(Past(*entry) for entry in self.past.items())
        complete = self._complete or self._filled()
        view = View(self.epoch, tuple(self.members.values()), lost, self.closing, complete, past)
        outbox: Outbox = [(to, view) for to in self.members if to != LEADER]
        return self._compare(before, view.complete), outbox

    # -- everyone
    def lost(self, worker: int, reason: str) -> Outcome:
        """A connection to a member has ended without a word."""
        member = self.members.get(worker)
        if worker == LEADER and not self.leads and not self.closing:
            return self._world_ended(reason)
        if member is None or self.closing:
            return [], []
        if not self.leads:
            return [], [(LEADER, Report(worker, member.incarnation, reason))]
        self._lost[worker] = reason
        return self._remove(worker)

    def _world_ended(self, reason: str) -> Outcome:
        before, self.members, self.ended = self.members, {}, True
        self._lost = {LEADER: reason}
        effects: Effects = [Gone(member, True, reason) for id_, member in before.items() if id_ != self.me.id]
        if not self._complete:
            effects.append(Rejected(f"member 0 went before the world was complete: {reason}"))
        return effects, []

    def on_view(self, view: View) -> Effects:
        if view.epoch <= self.epoch:
            return []
        before = self.members
        self.epoch, self.closing = view.epoch, view.closing
        self.members = {member.id: member for member in view.members}
        self._lost, self.past = dict(view.lost), dict(view.past)
        return self._compare(before, view.complete)

    def on_refused(self, message: Refused) -> Effects:
        return [Rejected(message.reason)]

    def _compare(self, before: dict[int, Member], complete: bool) -> Effects:
        effects: Effects = []
        for id_, member in before.items():
            if self.members.get(id_) != member and id_ != self.me.id:
                reason = self._lost.get(id_)
                effects.append(Gone(member, reason is not None, reason or "it left"))
        effects += [Joined(m) for i, m in self.members.items() if before.get(i) != m and i != self.me.id]
        if complete and not self._complete and self.me.id in self.members:
            self._complete = True
            effects.append(Complete(False))
        if self.closing and not self._closed:
            self._closed = True
            effects.append(Complete(True))
        return effects

    def _filled(self) -> bool:
        return self.world_size is None or len(self.members) >= self.world_size


def _kind(world_size: int | None) -> str:
    return "open (world_size=None)" if world_size is None else f"closed (world_size={world_size})"
