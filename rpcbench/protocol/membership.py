"""Who is in the world. One member leads: it alone changes it and publishes a numbered view; the others ask and follow.

    joining ── View that names me ──> in ── Ready(leaving) ──> left
                                       └── connection ends ──> lost

A world with `world_size` is closed: it is complete when so many are in, a join without a size (or with another) is
refused, and it stops when all are ready. A world without is open: members come and go.

Who founds the world leads it, and it is over when its leader goes, with one exception: an open world of processes that
come by themselves (not launched by member 0) outlives a leader that says goodbye. That one names its heir, by a rule
that every view answers, in the last view that it publishes, and the views from then on are the heir's; so their numbers
order leaders as well. What a member has asked the old one, and the view does not show, it asks the new one. What the
heir is asked before it has seen that view waits for it. A leader that dies has named nobody, and the world ends.

A process that starts again under the same id has a higher incarnation. Where member 0 launches the others, its
predecessor is gone by that; elsewhere nobody takes the place of a member that lives.

The failure detector judges which peers on other hosts are alive by what is heard of them: any bytes are a sign of life.
A peer that says nothing is suspect after a while, and lost after a little more; but as long as its host acknowledges
what it is sent, its process is there, if stopped or too busy to answer, and gets more time. A process that was stopped
itself must not blame the others: a tick that comes late makes all peers fresh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rpcbench.protocol.effects import Complete, Effects, Gone, HandedOver, Joined, Leads, Rejected, Watch
from rpcbench.protocol.rrefs import Outbox
from rpcbench.wire.messages import Join, Loss, Member, Past, Ready, Refused, Report, View


class DepartedMembers(dict[int, Gone]):
    def find(self, key: int | str) -> Gone | None:
        """The latest under an id or a name."""
        if isinstance(key, int):
            return self.get(key)
        return next((gone for gone in self.values() if gone.member.name == key), None)


_MIXED = "RPC group mixes statically and dynamically initialized members which is not supported."  # torch's words


def misfit(source: int, member: Member, asked: int | None, size: int | None, there: Mapping[int, Member]) -> str | None:
    """Why this member, who `asked` for a world of some size, is not one of a world of `size`; None where it may be."""
    if source != member.id:
        return f"worker {source} asks for id {member.id}"
    if asked != size:
        mixed = "" if size is not None and asked is not None else f"{_MIXED} "
        return f"{mixed}this world is {_kind(size)}, but {member.name} asks to join one that is {_kind(asked)}"
    if size is not None and not 0 <= member.id < size:
        return f"id {member.id} of {member.name} does not fit a world of {size}"
    if any(other.name == member.name for other in there.values()):
        return f"worker name {member.name} is not unique: another worker has it already"
    if member.id in there:
        return f"id {member.id} of {member.name} is not unique: {there[member.id].name} has it already"
    return None


def _kind(world_size: int | None) -> str:
    return "open (world_size=None)" if world_size is None else f"closed (world_size={world_size})"


SILENT = "nothing was heard of it"
_LATE = 1.0
"""Seconds by which a tick may be late before this process counts as stopped meanwhile."""


class Sound(NamedTuple):
    """Of one peer: bytes it has sent so far, and seconds since its host acknowledged anything (None: not known)."""

    heard: int
    acknowledged: float | None


class Verdict(NamedTuple):
    """What has changed about a peer: "suspect", "recovered" or "lost"."""

    peer: int
    kind: str
    reason: str


class _Peer:
    def __init__(self, heard: int, now: float) -> None:
        self.heard = heard
        self.since = now
        self.suspect = False


class FailureDetector:
    """Seconds of silence until a peer is suspect, until it is lost, and until it is lost though its host answers."""

    def __init__(self, suspect: float, lost: float, stuck: float) -> None:
        self._suspect, self._lost, self._stuck = suspect, lost, stuck
        self.period = min(suspect, lost) / 6
        self._next: float | None = None
        self._peers: dict[int, _Peer] = {}

    def tick(self, now: float, sounds: Mapping[int, Sound]) -> list[Verdict]:
        """A period has passed; `sounds` are those of all peers there are."""
        if self._next is not None and now > self._next + _LATE:
            for peer in self._peers.values():
                peer.since = now
        self._next = now + self.period
        self._peers = {id_: self._peers.get(id_) or _Peer(-1, now) for id_ in sounds}
        verdicts = [self._judge(id_, self._peers[id_], sound, now) for id_, sound in sounds.items()]
        return [verdict for verdict in verdicts if verdict is not None]

    def _judge(self, id_: int, peer: _Peer, sound: Sound, now: float) -> Verdict | None:
        if sound.heard != peer.heard:
            peer.heard, peer.since = sound.heard, now
            recovered, peer.suspect = peer.suspect, False
            return Verdict(id_, "recovered", "it is heard again") if recovered else None
        silent = now - peer.since
        answers = sound.acknowledged is not None and sound.acknowledged < self._lost
        if silent >= (self._stuck if answers else self._lost):
            return Verdict(id_, "lost", f"{SILENT} for {silent:.1f} s")
        if silent >= self._suspect and not peer.suspect:
            peer.suspect = True
            return Verdict(id_, "suspect", f"{SILENT} for {silent:.1f} s")
        return None


Outcome = tuple[Effects, Outbox]
REQUESTS = (Join, Ready, Report)
"""What is said to who leads."""


class Membership:
    def __init__(self, me: Member, world_size: int | None, launched: bool = True) -> None:
        """`launched`: member 0 starts the others, and the world ends with it."""
        self.me = me
        self.world_size = world_size
        self.launched = launched
        self.leader = 0
        self.members: dict[int, Member] = {}
        self.epoch = 0
        self.closing = self.ended = self.leaving = False
        self._complete = self._closed = False  # told already
        self._turned_away: dict[int, str] = {}  # by id, and why: a closed world waits for them in vain
        self._ready: set[int] = set()
        self.past: dict[int, int] = {}  # incarnations of the latest members under ids that have none now
        self._born: dict[int, int] = {}  # the latest incarnations that this leader has given out
        self._lost: dict[int, str] = {}
        self._reported: dict[int, Report] = {}  # what the leader was told of members that are still in the view
        self._early: list[tuple[int, Any]] = []  # said to this member as the leader, before it knew that it is
        self._answers: dict[type[Any], Callable[[int, Any], Outcome]] = {
            Join: self.on_join,
            Ready: self.on_ready,
            Report: lambda source, message: self.on_report(message),
        }

    @property
    def leads(self) -> bool:
        return self.leader == self.me.id

    @property
    def outlives_leaders(self) -> bool:
        return self.world_size is None and not self.launched

    def found_at(self, host: str, address: str, remote: str) -> None:
        """Where others find this member; known only when it listens."""
        self.me = self.me._replace(host=host, address=address, remote=remote)

    def find(self, key: int | str) -> Member | None:
        """A member by id or name."""
        if isinstance(key, int):
            return self.members.get(key)
        return next((member for member in self.members.values() if member.name == key), None)

    def start(self, leader: int = 0) -> Outcome:
        """Found the world (where this process is to lead it), or ask to be let in."""
        self.leader = leader
        if self.leads:
            return self._change(lambda: self.members.update({self.me.id: self.me}))
        return [], [(leader, Join(self.me, self.world_size))]

    def may_say(self, source: int, message: Any) -> bool:
        """Whether such words come from, or to, who leads. Where that changes, nobody can tell for sure."""
        if self.outlives_leaders:
            return True
        return self.leads if isinstance(message, REQUESTS) else source == self.leader

    # -- the leader
    def asked(self, source: int, message: Any) -> Outcome:
        """Something that only the leader can answer."""
        if self.leads:
            return self._answers[type(message)](source, message)
        if isinstance(message, Join):
            return [], [(source, Refused(f"{self.me.name} does not lead this world", True))]
        if not self.leaving:  # it will: its sender has seen the view that says so
            self._early.append((source, message))
        return [], []

    def taken(self, worker: int) -> str | None:
        """Why a process that comes by itself cannot have this id; None where it can."""
        member = self.members.get(worker) if not self.launched else None
        return f"rank {worker} is not unique: {member.name} has it already" if member else None

    def life_for(self, worker: int) -> int:
        """An incarnation that no process of this world has had under this id."""
        member = self.members.get(worker)
        latest = max(self.past.get(worker, -1), self._born.get(worker, -1), member.incarnation if member else -1)
        self._born[worker] = latest + 1
        return latest + 1

    def on_join(self, source: int, message: Join) -> Outcome:
        effects: Effects = []
        outbox: Outbox = []
        if self._takes_the_place_of_another(source, message.member):
            effects, outbox = self.lost(source, "it was started again")
        refused = self._objection(source, message)
        if refused:
            more, out = self._refuse(source, refused)
            return effects + more, outbox + out
        self._lost.pop(source, None)
        self.past.pop(source, None)
        self._turned_away.pop(source, None)
        more, out = self._change(lambda: self.members.update({source: message.member}))
        return effects + more, outbox + out + self._give_up()

    def _takes_the_place_of_another(self, source: int, member: Member) -> bool:
        before = self.members.get(source) if self.launched and source == member.id else None
        return before is not None and member.incarnation > before.incarnation

    def _refuse(self, source: int, refused: Refused) -> Outcome:
        if self.world_size is not None and source not in self.members and source < self.world_size:
            self._turned_away[source] = refused.reason
        return [], [(source, refused), *self._give_up()]

    def _give_up(self) -> Outbox:
        """When all have come, and some were turned away, the world cannot be complete: its members are told why."""
        came = len(self.members) + len(self._turned_away)
        if self.world_size is None or self._complete or not self._turned_away or came < self.world_size:
            return []
        reason = next(iter(self._turned_away.values()))
        return [(to, Refused(reason)) for to in [*self._others(), self.me.id]]  # itself last: it ends by it

    def _objection(self, source: int, message: Join) -> Refused | None:
        if self.closing:
            return Refused("this world is about to end", self.outlives_leaders)
        if message.member.incarnation <= self.past.get(message.member.id, -1):
            return Refused(f"another process has been {message.member.name} since this one asked", True)
        reason = misfit(source, message.member, message.world_size, self.world_size, self.members)
        return Refused(reason) if reason else None

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

    def _hand_over(self) -> Outcome:
        """Go, and let another member lead if the world is to go on, and there is one."""
        heir = self._heir() if self.outlives_leaders else None
        if heir is None:
            return self._change(self._close)
        self.leader = heir.id
        self.past |= {id_: life for id_, life in self._born.items() if id_ not in self.members}  # or about to come
        self.past[self.me.id] = self.me.incarnation
        effects, outbox = self._change(lambda: self.members.pop(self.me.id))
        return [HandedOver(heir, self.epoch), *effects, *self._over()], outbox

    def _heir(self) -> Member | None:
        """The lowest id on this host, where newcomers look for the world; or else of all."""
        others = self._others().values()
        near = [member for member in others if member.host == self.me.host]
        return min(near or others, key=lambda member: member.id, default=None)

    def _others(self) -> dict[int, Member]:
        return {id_: member for id_, member in self.members.items() if id_ != self.me.id}

    def _change(self, change: Callable[[], object]) -> Outcome:
        """Change the members, publish the new view. Who was launched ends when it is told to, and need not hear who
        goes before it; others may still call each other."""
        before, told = dict(self.members), self.closing and self.launched
        change()
        self.epoch += 1
        lost = tuple(Loss(*entry) for entry in self._lost.items())
        past = tuple(Past(*entry) for entry in self.past.items())
        complete = self._complete or self._filled()
        view = View(self.epoch, tuple(self.members.values()), lost, self.closing, complete, past, self.leader)
        return self._compare(before, view.complete), [(to, view) for to in self._others() if not told]

    # -- everyone
    def ready(self, leaving: bool) -> Outcome:
        """This member has nothing more to do; or it goes, and is out when who leads ends their connection."""
        self.leaving = leaving
        if not self.leads:
            return [], [(self.leader, Ready(leaving))]
        return self._hand_over() if leaving else self.on_ready(self.me.id, Ready(False))

    def lost(self, worker: int, reason: str) -> Outcome:
        """A connection to a member has ended without a word."""
        member = self.members.get(worker)
        if self.closing:
            return [], []
        if worker == self.leader and not self.leads:
            return self._world_ended(reason)
        if member is None:
            return [], []
        if not self.leads:
            report = self._reported[worker] = Report(worker, member.incarnation, reason)
            return [], [] if self.leaving else [(self.leader, report)]
        self._lost[worker] = reason
        return self._remove(worker)

    def never(self, worker: int, incarnation: int) -> None:
        """A process is gone that is no member, and will be none: what it asked may still be on its way."""
        self.past[worker] = max(incarnation, self.past.get(worker, -1))

    def _world_ended(self, reason: str) -> Outcome:
        """Who led it is gone without a word; or has let this member go, as that has asked."""
        if self.leaving:
            return self._over(), []
        before, self.members, self.ended = self.members, {}, True
        if not before and self.outlives_leaders:
            return [Rejected(f"the one it has asked is gone: {reason}", True)], []
        self._lost = {self.leader: reason}
        led = before[self.leader].name if self.leader in before else f"worker {self.leader}"
        effects: Effects = [
            Gone(member, True, reason if id_ == self.leader else f"its world ended with {led}, which led it: {reason}")
            for id_, member in before.items()
            if id_ != self.me.id
        ]
        if not self._complete:
            effects.append(Rejected(f"member {self.leader} went before the world was complete: {reason}"))
        return [*effects, *self._over()], []

    def on_view(self, view: View) -> Outcome:
        if view.epoch <= self.epoch:
            return [], []
        before, led_before = self.members, self.leader
        self.epoch, self.closing, self.leader = view.epoch, view.closing, view.leader
        self.members = {member.id: member for member in view.members}
        self._lost, self.past = dict(view.lost), dict(view.past)
        self._reported = {id_: report for id_, report in self._reported.items() if self._is_in(report)}
        effects = self._compare(before, view.complete)
        more, outbox = self._follow() if self.leader != led_before else ([], [])
        return effects + more, outbox

    def lost_silently(self) -> list[tuple[Member, str]]:
        """Members that the view still names, though this one has reported their loss; and why they were lost."""
        return [(self.members[id_], report.reason) for id_, report in self._reported.items() if self._is_in(report)]

    def _is_in(self, report: Report) -> bool:
        member = self.members.get(report.id)
        return member is not None and member.incarnation == report.incarnation

    def _follow(self) -> Outcome:
        """Another leads: what the one before was asked in vain it is asked again. Perhaps it is this one."""
        reports = [*self._reported.values()]
        if not self.leads:
            goodbye = [Ready(True)] if self.leaving else []
            return [Watch(self.members[self.leader])], [(self.leader, request) for request in [*reports, *goodbye]]
        effects: Effects = [Leads(self.epoch), *map(Watch, self._others().values())]
        outbox: Outbox = []
        early, self._early = self._early, []
        for source, request in [(self.me.id, report) for report in reports] + early:
            more, out = self.asked(source, request)
            effects, outbox = effects + more, outbox + out
        if self.leaving:
            more, out = self._hand_over()
            effects, outbox = effects + more, outbox + out
        return effects, outbox

    def on_refused(self, message: Refused) -> Effects:
        return [Rejected(message.reason, message.again)]

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
        return effects + self._over() if self.closing else effects

    def _over(self) -> Effects:
        effects: Effects = [] if self._closed else [Complete(True)]
        self._closed = True
        return effects

    def _filled(self) -> bool:
        return self.world_size is None or len(self.members) >= self.world_size
