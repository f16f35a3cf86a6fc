"""Membership of a world: its leader alone changes it and publishes numbered views; the other members follow these.

A world with `world_size` is closed: it is complete when it has that many members, it refuses a join with another size
or none, and it stops when all members are ready. A world without one is open: members join and leave at any time.

The founder leads the world, which ends when its leader leaves. The one exception is an open world of processes that
member 0 has not launched: it outlives a leader that announces its departure. If a leader crashes, its world ends.

A process that starts again under the same id has a higher incarnation. If member 0 launches the others, the new
incarnation replaces the old one; in other worlds, a process cannot take the id of a live member.
"""

# How leadership passes on in an open world:
#     joining ── View that names me ──> member ── Ready(leaving) ──> left
#                                         └────── connection ends ──> lost
#
#     leader                         heir                              other members
#     View(epoch n, leader: heir) ─> Leads: publishes from n + 1 on    follow: repeat to the heir the requests that
#     leaves                         answers the requests it held      the view does not show as done
# The leader chooses its heir by a rule that every view determines. Epochs order the leaders, too, as each leader
# publishes a run of consecutive epochs. The heir holds back requests that arrive before it has seen the view.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rpcbench.protocol import effects as fx
from rpcbench.protocol.effects import Effects, Outbox, Outcome, join_outcomes
from rpcbench.wire.messages import Join, Loss, Member, Past, Ready, Refused, Report, View


class DepartedMembers(dict[int, fx.MemberLeft]):
    def find_departed(self, key: int | str) -> fx.MemberLeft | None:
        """Return the last member under an id or a name that has left."""
        if isinstance(key, int):
            return self.get(key)
        return next((gone for gone in self.values() if gone.member.name == key), None)


_MIXED = "RPC group mixes statically and dynamically initialized members which is not supported."  # torch's words


def join_error(
    source: int, member: Member, wanted_size: int | None, size: int | None, there: Mapping[int, Member]
) -> str | None:
    """Return why a member that wants a world of `wanted_size` may not join one of `size`; None if it may."""
    if source != member.id:
        return f"worker {source} asks for id {member.id}"
    if wanted_size != size:
        mixed = "" if size is not None and wanted_size is not None else f"{_MIXED} "
        return (
            f"{mixed}this world is {_describe_kind(size)}, but {member.name} asks to join one that is "
            f"{_describe_kind(wanted_size)}"
        )
    if size is not None and not 0 <= member.id < size:
        return f"id {member.id} of {member.name} does not fit a world of {size}"
    if any(other.name == member.name for other in there.values()):
        return f"worker name {member.name} is not unique: another worker has it already"
    if member.id in there:
        return f"id {member.id} of {member.name} is not unique: {there[member.id].name} has it already"
    return None


def _describe_kind(world_size: int | None) -> str:
    return "open (world_size=None)" if world_size is None else f"closed (world_size={world_size})"


SILENT = "nothing was received from it"
_LATE = 1.0  # seconds by which a tick may be late before this process counts as stopped meanwhile


class SignsOfLife(NamedTuple):
    """The signs of life of one peer."""

    bytes_received: int  # bytes received so far
    acknowledged: float | None  # seconds since the peer's host acknowledged data; None: not known


class Verdict(NamedTuple):
    """A change in the state of a peer."""

    peer: int
    kind: str  # "suspect", "recovered" or "lost"
    reason: str


@dataclass(slots=True)
class _PeerState:
    bytes_received: int  # bytes received so far
    since: float  # time of the last sign of life
    suspect: bool = False


class FailureDetector:
    """Decides which peers on other hosts are alive: any byte that is received from them is a sign of life."""

    def __init__(self, suspect: float, lost: float, stuck: float) -> None:
        # Seconds of silence until a peer is suspect, lost, and lost although its host still acknowledges data: then its
        # process exists, but is stopped or busy.
        self._suspect, self._lost, self._stuck = suspect, lost, stuck
        self.period = min(suspect, lost) / 6  # seconds between ticks: several heartbeats fit into the shortest limit
        self._next: float | None = None  # when the next tick is due
        self._peers: dict[int, _PeerState] = {}

    def judge_peers(self, now: float, sounds: Mapping[int, SignsOfLife]) -> list[Verdict]:
        """Judge all peers by their latest `sounds`, once each period."""
        # This process was stopped itself, so the silence may be its own: give all peers a fresh start.
        if self._next is not None and now > self._next + _LATE:
            for peer in self._peers.values():
                peer.since = now
        self._next = now + self.period
        self._peers = {id_: self._peers.get(id_) or _PeerState(-1, now) for id_ in sounds}
        verdicts = [self._judge_peer(id_, self._peers[id_], sound, now) for id_, sound in sounds.items()]
        return [verdict for verdict in verdicts if verdict is not None]

    def _judge_peer(self, id_: int, peer: _PeerState, sound: SignsOfLife, now: float) -> Verdict | None:
        if sound.bytes_received != peer.bytes_received:
            peer.bytes_received, peer.since = sound.bytes_received, now
            recovered, peer.suspect = peer.suspect, False
            return Verdict(id_, "recovered", "it responds again") if recovered else None
        silent = now - peer.since
        answers = sound.acknowledged is not None and sound.acknowledged < self._lost
        if silent >= (self._stuck if answers else self._lost):
            return Verdict(id_, "lost", f"{SILENT} for {silent:.1f} s")
        if silent >= self._suspect and not peer.suspect:
            peer.suspect = True
            return Verdict(id_, "suspect", f"{SILENT} for {silent:.1f} s")
        return None


REQUESTS = (Join, Ready, Report)
"""The messages that only the leader handles."""


class Membership:
    def __init__(self, me: Member, world_size: int | None, launched: bool = True) -> None:
        """`launched`: member 0 starts the others, and the world ends with it."""
        self.me = me
        self.world_size = world_size
        self.launched = launched
        self.leader = 0
        self.members: dict[int, Member] = {}
        self.epoch = 0  # number of the last view
        # The world stops when all are ready; it ended with its leader; this member has announced its departure.
        self.closing = self.ended = self.leaving = False
        self._complete = self._closed = False  # the `Complete` effect was emitted, of each kind
        self._refused: dict[int, str] = {}  # refused id → reason: a closed world cannot become complete
        self._ready: set[int] = set()
        self.past: dict[int, int] = {}  # id without a member → incarnation of its last one
        self._assigned_incarnations: dict[int, int] = {}  # id → the last incarnation that this leader has assigned
        self._lost: dict[int, str] = {}  # lost member → reason
        self._reported: dict[int, Report] = {}  # reports to the leader of members that the view still names
        self._early: list[tuple[int, Any]] = []  # requests that arrived before the view that makes this member leader
        self._answers: dict[type[Any], Callable[[int, Any], Outcome]] = {
            Join: self.on_join,
            Ready: self.on_ready,
            Report: lambda source, message: self.on_report(message),
        }

    @property
    def is_leader(self) -> bool:
        return self.leader == self.me.id

    @property
    def may_outlive_leaders(self) -> bool:
        return self.world_size is None and not self.launched

    def set_addresses(self, host: str, address: str, remote: str) -> None:
        """Set the addresses of this member, which exist only after it listens."""
        self.me = self.me._replace(host=host, address=address, remote=remote)

    def find_member(self, key: int | str) -> Member | None:
        """Return a member by id or name; None if there is none."""
        if isinstance(key, int):
            return self.members.get(key)
        return next((member for member in self.members.values() if member.name == key), None)

    def start_membership(self, leader: int = 0) -> Outcome:
        """Found the world if this process is to lead it; else ask the leader for admission."""
        self.leader = leader
        if self.is_leader:
            return self._change_members(lambda: self.members.update({self.me.id: self.me}))
        return [], [(leader, Join(self.me, self.world_size))]

    def may_send(self, source: int, message: Any) -> bool:
        """Return whether a message about members comes from the leader, or is sent to it."""
        if self.may_outlive_leaders:
            return True  # leadership moves, and the receiver may have an older view than the sender
        return self.is_leader if isinstance(message, REQUESTS) else source == self.leader

    # -- the leader
    def answer_request(self, source: int, message: Any) -> Outcome:
        """Answer a request to the leader."""
        if self.is_leader:
            return self._answers[type(message)](source, message)
        if isinstance(message, Join):
            return [], [(source, Refused(f"{self.me.name} does not lead this world", True))]
        if not self.leaving:  # this member will lead: the sender has seen a later view
            self._early.append((source, message))
        return [], []

    def id_refusal(self, worker: int) -> str | None:
        """Return the reason why a process that was not launched cannot have this id; None if it can."""
        member = self.members.get(worker) if not self.launched else None
        return f"rank {worker} is not unique: {member.name} has it already" if member else None

    def next_incarnation(self, worker: int) -> int:
        """Return an incarnation that no process of this world has had under this id."""
        member = self.members.get(worker)
        latest = max(
            self.past.get(worker, -1), self._assigned_incarnations.get(worker, -1), member.incarnation if member else -1
        )
        self._assigned_incarnations[worker] = latest + 1
        return latest + 1

    def on_join(self, source: int, message: Join) -> Outcome:
        outcomes: list[Outcome] = []
        member, before = message.member, self.members.get(source)
        if self.launched and source == member.id and before is not None and member.incarnation > before.incarnation:
            outcomes.append(self.member_lost(source, "it was started again"))
        refused = self._objection_to_join(source, message)
        if refused:
            if self.world_size is not None and source not in self.members and source < self.world_size:
                self._refused[source] = refused.reason
            return join_outcomes([*outcomes, ([], [(source, refused)]), ([], self._give_up())])
        for table in (self._lost, self.past, self._refused):
            table.pop(source, None)
        outcomes.append(self._change_members(lambda: self.members.update({source: member})))
        return join_outcomes([*outcomes, ([], self._give_up())])

    def _give_up(self) -> Outbox:
        """Refuse all members if the world cannot become complete: all have asked, and some were turned away."""
        arrivals = len(self.members) + len(self._refused)
        if self.world_size is None or self._complete or not self._refused or arrivals < self.world_size:
            return []
        reason = next(iter(self._refused.values()))
        return [
            (to, Refused(reason)) for to in [*self._other_members(), self.me.id]
        ]  # itself last: this ends the leader

    def _objection_to_join(self, source: int, message: Join) -> Refused | None:
        if self.closing:
            return Refused("this world is about to end", self.may_outlive_leaders)
        if message.member.incarnation <= self.past.get(message.member.id, -1):
            return Refused(f"another process has joined as {message.member.name} since this one asked", True)
        reason = join_error(source, message.member, message.world_size, self.world_size, self.members)
        return Refused(reason) if reason else None

    def on_ready(self, source: int, message: Ready) -> Outcome:
        if source not in self.members:
            return [], []
        if message.leaving:
            return self._remove_member(source)
        self._ready.add(source)
        return self._close_if_ready()

    def on_report(self, message: Report) -> Outcome:
        return self.member_lost(message.id, message.reason) if self._is_in(message) else ([], [])

    def _close_if_ready(self) -> Outcome:
        if self._ready >= self.members.keys() and not self.closing:
            return self._change_members(self._begin_closing)
        return [], []

    def _remove_member(self, worker: int) -> Outcome:
        """Remove a member, then close the world if the others waited only for it."""
        self._ready.discard(worker)
        self.past[worker] = self.members[worker].incarnation
        return join_outcomes([self._change_members(lambda: self.members.pop(worker)), self._close_if_ready()])

    def _begin_closing(self) -> None:
        self.closing = True

    def _hand_over(self) -> Outcome:
        """Leave, and make another member leader if the world goes on and there is one."""
        heir = self._choose_heir() if self.may_outlive_leaders else None
        if heir is None:
            return self._change_members(self._begin_closing)
        self.leader = heir.id
        # Incarnations assigned to processes that have not joined yet must not be assigned again by the heir.
        self.past |= {
            id_: incarnation for id_, incarnation in self._assigned_incarnations.items() if id_ not in self.members
        }
        self.past[self.me.id] = self.me.incarnation
        effects, outbox = self._change_members(lambda: self.members.pop(self.me.id))
        return [fx.HandedOver(heir, self.epoch), *effects, *self._finish_closing()], outbox

    def _choose_heir(self) -> Member | None:
        """Return the member with the lowest id on this host, because newcomers look for the world here; else of all."""
        others = self._other_members().values()
        near = [member for member in others if member.host == self.me.host]
        return min(near or others, key=lambda member: member.id, default=None)

    def _other_members(self) -> dict[int, Member]:
        return {id_: member for id_, member in self.members.items() if id_ != self.me.id}

    def _change_members(self, change: Callable[[], object]) -> Outcome:
        """Change the members and publish the new view."""
        # Launched members end on request: a closing world sends them no more views. Others may still call each other.
        before, end_on_request = dict(self.members), self.closing and self.launched
        change()
        self.epoch += 1
        lost = tuple(Loss(*entry) for entry in self._lost.items())
        past = tuple(Past(*entry) for entry in self.past.items())
        complete = self._complete or self.world_size is None or len(self.members) >= self.world_size
        view = View(self.epoch, tuple(self.members.values()), lost, self.closing, complete, past, self.leader)
        return self._compare_members(before, view.complete), [
            (to, view) for to in self._other_members() if not end_on_request
        ]

    # -- all members
    def announce_ready(self, leaving: bool) -> Outcome:
        """Announce that this member is ready to stop, or `leaving`: then it is out when the leader disconnects it."""
        self.leaving = leaving
        if not self.is_leader:
            return [], [(self.leader, Ready(leaving))]
        return self._hand_over() if leaving else self.on_ready(self.me.id, Ready(False))

    def member_lost(self, worker: int, reason: str) -> Outcome:
        """Handle the loss of a member that did not announce its departure: report it, or remove it as the leader."""
        member = self.members.get(worker)
        if self.closing:
            return [], []
        if worker == self.leader and not self.is_leader:
            return self._world_ended(reason)
        if member is None:
            return [], []
        if not self.is_leader:
            report = self._reported[worker] = Report(worker, member.incarnation, reason)
            return [], [] if self.leaving else [(self.leader, report)]
        self._lost[worker] = reason
        return self._remove_member(worker)

    def note_lost_joiner(self, worker: int, incarnation: int) -> None:
        """Note the loss of a process that is no member: its Join may still be in transit, and is refused by this."""
        self.past[worker] = max(incarnation, self.past.get(worker, -1))

    def _world_ended(self, reason: str) -> Outcome:
        """End the world here: the leader is lost, or has disconnected this member at its own request."""
        if self.leaving:
            return self._finish_closing(), []
        before, self.members, self.ended = self.members, {}, True
        if not before and self.may_outlive_leaders:
            return [fx.Rejected(f"the member that it asked for admission is lost: {reason}", True)], []
        self._lost = {self.leader: reason}
        led = before[self.leader].name if self.leader in before else f"worker {self.leader}"
        why = f"its world ended with its leader, {led}: {reason}"
        effects: Effects = [
            fx.MemberLeft(member, True, reason if id_ == self.leader else why)
            for id_, member in before.items()
            if id_ != self.me.id
        ]
        if not self._complete:
            effects.append(fx.Rejected(f"member {self.leader} left before the world was complete: {reason}"))
        return [*effects, *self._finish_closing()], []

    def on_view(self, view: View) -> Outcome:
        if view.epoch <= self.epoch:
            return [], []
        before, led_before = self.members, self.leader
        self.epoch, self.closing, self.leader = view.epoch, view.closing, view.leader
        self.members = {member.id: member for member in view.members}
        self._lost, self.past = dict(view.lost), dict(view.past)
        self._reported = {id_: report for id_, report in self._reported.items() if self._is_in(report)}
        effects = self._compare_members(before, view.complete)
        more, outbox = self._follow_leader() if self.leader != led_before else ([], [])
        return effects + more, outbox

    def silent_losses(self) -> list[tuple[Member, str]]:
        """Return the members that the view still names although this one has reported their loss, with the reasons."""
        return [(self.members[id_], report.reason) for id_, report in self._reported.items() if self._is_in(report)]

    def _is_in(self, report: Report) -> bool:
        member = self.members.get(report.id)
        return member is not None and member.incarnation == report.incarnation

    def _follow_leader(self) -> Outcome:
        """Repeat the unanswered requests to the new leader, which may be this member."""
        reports = [*self._reported.values()]
        if not self.is_leader:
            requests = [*reports, *([Ready(True)] if self.leaving else [])]
            return [fx.WatchMember(self.members[self.leader])], [(self.leader, request) for request in requests]
        outcomes: list[Outcome] = [([fx.Leads(self.epoch), *map(fx.WatchMember, self._other_members().values())], [])]
        early, self._early = self._early, []
        outcomes += [
            self.answer_request(source, request) for source, request in [(self.me.id, r) for r in reports] + early
        ]
        if self.leaving:
            outcomes.append(self._hand_over())
        return join_outcomes(outcomes)

    def _compare_members(self, before: dict[int, Member], complete: bool) -> Effects:
        effects: Effects = []
        for id_, member in before.items():
            if self.members.get(id_) != member and id_ != self.me.id:
                reason = self._lost.get(id_)
                effects.append(fx.MemberLeft(member, reason is not None, reason or "it left"))
        effects += [fx.MemberJoined(m) for i, m in self.members.items() if before.get(i) != m and i != self.me.id]
        if complete and not self._complete and self.me.id in self.members:
            self._complete = True
            effects.append(fx.Complete(False))
        return effects + self._finish_closing() if self.closing else effects

    def _finish_closing(self) -> Effects:
        effects: Effects = [] if self._closed else [fx.Complete(True)]
        self._closed = True
        return effects
