"""The protocol state of one member as a plain value: it joins calls, RRefs, contexts, membership and delivery.

The agent feeds a node under one lock; a simulation feeds many nodes from one thread. Each message to a member has a
sequence number, and the node handles each number once, so a duplicate has no effect. `protocol.delivery` recovers lost
messages.
"""

# Theory of operation
# An event goes in, effects come out; the agent carries them out after it has released its lock.
#
#     agent                    node                                   state machines
#     a message arrived ─────> handle ─> first_time? ─> handler ────> calls, rrefs, contexts, members
#     call, cancel, lost ────> the method of that name ─────────────>   │
#                              _follow_up   departures and joins        │
#                              _assign_seqs to each message of the      │
#     do: Send, Run,                        outbox                   <──┘ Outcome = (effects, outbox)
#     Resolve, Wake... <────── effects
#
# If a message cannot be delivered, `_undo_send` undoes its bookkeeping: it fails the call or the backward pass, and
# withdraws the RRef forks. A small placeholder takes the sequence number: the receiver expects every number to arrive.
#
# A plain call has a fast path of four steps. Each does all the node's work for that step at once.
#     caller    `fast_call`: start and number the call      `fast_resolve`: the reply has arrived
#     callee    `fast_take`: the call arrives and begins    `fast_answer`: the function has run; number the reply
# Each step leaves the node in the state that the general path would (`start_call`, `handle_message` and
# `begin_serving`, `send_message`, `handle_message`). If the general path might have another effect, the step does
# nothing, returns None or False, and the agent takes the general path. That holds for messages that carry RRefs, and
# for all messages while no tick is scheduled: then a new sequence number requires a `Wake`. A call takes 42 us with the
# fast path and 63 us without.

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rpcbench.base.errors import (
    CallCancelled,
    ConnectionLostError,
    ProtocolError,
    RpcError,
    RpcTimeoutError,
    WorkerLostError,
    mark_never_ran,
)
from rpcbench.base.ids import Id, MessageObserver, Note, Tables
from rpcbench.protocol import effects as fx
from rpcbench.protocol.backward import Contexts
from rpcbench.protocol.calls import Calls, OutgoingCall, Request
from rpcbench.protocol.delivery import (
    OWED,
    SEQUENCE_COUNT_BITS,
    Delivery,
    Pair,
    incarnations_of,
    is_newer,
    is_sent_once,
)
from rpcbench.protocol.effects import Effects, Outbox, Outcome, join_outcomes
from rpcbench.protocol.membership import REQUESTS, DepartedMembers, Membership
from rpcbench.protocol.rrefs import HeldFork, RRefs
from rpcbench.wire import messages as m

_NO_CALL = -1  # a Cancel of this call has no effect, so it can fill any sequence number


def placeholder_for(message: m.Message, error: Exception) -> m.Message | None:
    """Return the smaller message that replaces one that is not sent, or is lost; None if there is none."""
    if isinstance(message, m.Result) or (isinstance(message, m.Failure) and message.body.payload):
        return m.Failure(message.call, type(error).__name__, str(error), m.EMPTY)
    if isinstance(message, m.Create):
        return m.CreateFailed(message.rref, message.fork, message.label, str(error))
    return None if isinstance(message, m.Cancel) else m.Cancel(_NO_CALL)


_FOLLOWED: frozenset[type[Any]] = frozenset((fx.MemberLeft, fx.MemberJoined, fx.Complete))  # for `_follow_up`
_ON_MEMBERS = frozenset((*REQUESTS, m.Refused, m.View))  # only the leader may send these, or only to the leader


class Node:
    def __init__(self, me: m.Member, world_size: int | None, lossy: bool = False, launched: bool = True) -> None:
        """`lossy`: connections may lose messages without breaking. `launched`: member 0 starts the others."""
        self.me = me.id
        self.calls = Calls()
        self.rrefs = RRefs(me.id, me.incarnation)
        self.contexts = Contexts(me.id, self.member_name)
        self.members = Membership(me, world_size, launched)
        self.leaks: list[HeldFork] = []  # forks that members still held when they left a closing world
        self.rrefs.alive, self.rrefs.incarnation_of = self.is_alive, self._incarnation_of
        self.delivery = Delivery(me.incarnation, lossy)
        self.gone = DepartedMembers()
        # Messages of processes that no View has named yet: (sequence number, message, time), by sender.
        self._early: dict[int, list[tuple[int, m.Message, float, float]]] = {}
        self._handlers: dict[type[Any], Callable[[int, Any, float], Outcome]] = {
            m.Call: self._on_request,
            m.Create: self._on_create,
            m.Fetch: self._on_request,
            m.Result: self._on_result,
            m.Failure: lambda source, msg, now: (self.calls.reply_received(source, msg), []),
            m.Cancel: self._on_cancel,
            m.ForkRequest: lambda source, msg, now: self.rrefs.on_fork_request(source, msg),
            m.ForkAccept: self._on_fork_accept,
            m.ChildAccept: lambda source, msg, now: self.rrefs.child_known(msg.fork),
            m.UserDelete: lambda source, msg, now: (self.rrefs.drop_fork(msg.rref, msg.fork), []),
            m.Discover: lambda source, msg, now: self.contexts.backward_passes.on_discover(source, msg),
            m.Discovered: lambda source, msg, now: self.contexts.backward_passes.on_discovered(msg),
            m.Gradients: lambda source, msg, now: self.contexts.backward_passes.on_gradients(source, msg),
            m.Settled: lambda source, msg, now: self.contexts.backward_passes.on_settled(msg),
            m.BackwardFailed: lambda source, msg, now: self.contexts.backward_passes.pass_failed(msg, source),
            m.ReleaseContext: lambda source, msg, now: self.contexts.release_context(msg.context, (source,)),
            **{kind: lambda source, msg, now: self.members.answer_request(source, msg) for kind in REQUESTS},
            m.Refused: lambda source, msg, now: ([fx.Rejected(msg.reason, msg.again)], []),
            m.View: lambda source, msg, now: self._on_view(msg),
            m.Notice: lambda source, msg, now: ([fx.NoticeReceived(source, msg)], []),
            m.Parcel: lambda source, msg, now: ([fx.DataReceived(source, msg)], []),
            m.CreateFailed: self._on_create_failed,
            m.ContextParticipant: lambda source, msg, now: self.contexts.on_context_participant(source, msg.context),
            m.CancelDelivery: lambda source, msg, now: ([], [(source, self.delivery.pairs[source].make_report(msg))]),
            m.DeliveryReport: lambda source, msg, now: self._on_delivery_report(source, msg),
        }

    # -- received messages
    def handle_message(
        self, source: int, seq: int, message: m.Message, now: float, made: float | None = None
    ) -> Effects:
        """Process a message that has arrived `now`, by the clock of deadlines, which may stand still.

        `made`: the time by the clock of rows, for an RRef that it creates; `now` by default."""
        self.rrefs.made = now if made is None else made
        pair = self.delivery.pairs.get(source)
        if pair is None or seq >> SEQUENCE_COUNT_BITS != pair.stamp:
            pair = self._pair_of_sender(source, seq, message, now)
            if pair is None:
                return []
        if type(message) is m.Seen:
            return [*self.delivery.process_ack(pair, message)]
        effects = self._handle_new(source, message, now) if self.delivery.is_first_time(pair, seq, message) else []
        if pair.owed >= OWED:
            effects.append(pair.make_ack())
        return self._with_wake(effects) if self.delivery.tick_due else effects

    def _handle_new(self, source: int, message: m.Message, now: float) -> Effects:
        kind = type(message)
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"the protocol has no handler for a {kind.__name__}")
        if kind in _ON_MEMBERS and not self.members.may_send(source, message):
            raise ProtocolError(f"worker {source} may not send a {kind.__name__} to worker {self.me}")
        return self._follow_up(*handler(source, message, now))

    def _pair_of_sender(self, source: int, seq: int, message: m.Message, now: float) -> Pair | None:
        """Return the pair for a message of an unknown incarnation, or for an earlier one of this id; None: not now."""
        (incarnation, meant), pair, gone = incarnations_of(seq), self.delivery.pairs.get(source), self.gone.get(source)
        if (
            self.members.ended
            or meant != self.delivery.incarnation
            or (pair is not None and not is_newer(incarnation, pair.peer_incarnation))
        ):
            return None
        if pair is None and self.members.leaving:
            return None  # a leaving member begins no new exchanges
        if pair is None and gone is not None and not is_newer(incarnation, gone.member.incarnation):
            return None  # a late message of a departed process: no event would ever end the work that it begins
        if isinstance(message, m.Join) and self.members.id_refusal(source):
            return None  # two processes raced for this id; the later one will see its connection end
        if isinstance(message, m.Join | m.View):
            return self.delivery.create_pair(source, incarnation)
        # Until a View names the sender, this member would not learn of its end: hold all else back.
        self._early.setdefault(source, []).append((seq, message, now, self.rrefs.made))
        return None

    def _on_request(self, source: int, message: Request, now: float) -> Outcome:
        if isinstance(message, m.Fetch) or not message.forks:
            return self.calls.request_arrived(source, message, set(), now), []
        pending, effects, outbox = self._adopt_forks(message.forks)
        return effects + self.calls.request_arrived(source, message, pending, now), outbox

    def _on_create(self, source: int, message: m.Create, now: float) -> Outcome:
        created = self.rrefs.on_create(source, message.rref, message.fork, message.label, message.origin)
        effects, outbox = self._on_request(source, message, now)
        return effects, created + outbox

    def _on_result(self, source: int, message: m.Result, now: float) -> Outcome:
        if not message.forks:
            return self.calls.reply_received(source, message), []
        _, effects, outbox = self._adopt_forks(message.forks)
        resolved = self.calls.reply_received(source, message)
        if resolved:
            return effects + resolved, outbox
        # The caller no longer waits, so its RRefs are released.
        return join_outcomes([(effects, outbox), self._release_forks(message.forks)])

    def _on_cancel(self, source: int, message: m.Cancel, now: float) -> Outcome:
        dropped = self.calls.cancel_requested(source, message.call)
        if dropped is None:
            return [], []
        return self._not_run(dropped, CallCancelled("the caller cancelled it before it ran"))

    def _on_create_failed(self, source: int, message: m.CreateFailed, now: float) -> Outcome:
        created = self.rrefs.on_create(source, message.rref, message.fork, message.label)
        error = ConnectionLostError(f"RRef creation via rpc.remote() failed: {message.reason}", False)
        return self.rrefs.creation_failed(message.rref, error), created

    def _on_view(self, view: m.View) -> Outcome:
        outcomes = [self.members.on_view(view), self._drop_orphans()]
        if self.members.closing:  # losses that were reported before this View arrived need no further agreement
            outcomes += [self._lost_at_the_end(*loss) for loss in self.members.silent_losses()]
        return join_outcomes(outcomes)

    def _drop_orphans(self) -> Outcome:
        """Drop the RRefs whose owner is known to have left by now."""
        return join_outcomes(map(self._drop_orphan, self.rrefs.orphaned_forks()))

    def _drop_orphan(self, fork: Id) -> Outcome:
        effects, outbox = self.rrefs.owner_lost(fork)
        return effects + self.calls.fork_confirmed(fork), outbox

    def _on_fork_accept(self, source: int, message: m.ForkAccept, now: float) -> Outcome:
        effects, outbox = self.rrefs.on_fork_accept(message)
        return effects + self.calls.fork_confirmed(message.fork), outbox

    def _adopt_forks(self, forks: Iterable[m.Fork]) -> tuple[set[Id], Effects, Outbox]:
        pending: set[Id] = set()
        outcomes: list[Outcome] = []
        for fork in forks:
            waits, effects, outbox = self.rrefs.adopt_fork(fork)
            outcomes.append((effects, outbox))
            if waits:
                pending.add(fork.fork)
        return pending, *join_outcomes(outcomes)

    def _undo_send(self, to: int, message: m.Message, error: Exception, gone: bool = False) -> Outcome:
        """Undo the bookkeeping of a message that will not arrive. `gone`: its receiver has left, too."""
        effects, outbox = self._withdraw_message(to, message, error, gone)
        return ([*effects, fx.BodyLost(to)] if hasattr(message, "body") and not gone else effects), outbox

    def _withdraw_message(self, to: int, message: m.Message, error: Exception, gone: bool) -> Outcome:
        if isinstance(message, m.Discover | m.Gradients):
            text = f"backward of autograd context {message.context}: {error}"
            failure = m.BackwardFailed(message.context, message.pass_id, self.me, type(error).__name__, text, m.EMPTY)
            return self.contexts.backward_passes.pass_failed(failure)
        if (scope := getattr(message, "scope", None)) is not None:
            self.contexts.withdraw_send(scope)
        if isinstance(message, m.Parcel):
            return [fx.Undelivered(to, message, error)], []
        outcomes: list[Outcome] = []
        if gone and isinstance(message, m.ForkRequest | m.Create | m.CreateFailed):
            outcomes.append(self._drop_orphan(message.fork))
        outcomes += map(self.rrefs.withdraw_fork, getattr(message, "forks", ()))
        if isinstance(message, m.Call | m.Create | m.Fetch):
            outcomes.append((self.calls.fail_call(message.call, error), []))
        return join_outcomes(outcomes)

    def _not_run(self, dropped: Request, error: RpcError) -> Outcome:
        """Drop a call that was held or queued."""
        mark_never_ran(error)  # a caller may repeat it without harm
        effects, outbox = self._release_forks(() if isinstance(dropped, m.Fetch) else dropped.forks)
        if isinstance(dropped, m.Create):
            effects += self.rrefs.creation_failed(dropped.rref, error)
        return effects, outbox

    def _release_forks(self, forks: Iterable[m.Fork]) -> Outcome:
        """Release the RRefs of a message that will not be opened."""
        effects: Effects = []
        outbox: Outbox = []
        for fork in forks:
            if fork.owner == self.me:
                effects += self.rrefs.drop_fork(fork.rref, fork.fork)
            else:
                outbox += self.rrefs.release_fork(fork.fork)
        return effects, outbox

    # -- actions of this member
    def start_node(self, leader: int = 0, incarnation: int = 0) -> Effects:
        """Found the world, or ask its `leader`, in incarnation `incarnation`, for admission."""
        self.delivery.create_pair(leader, incarnation)
        return self._follow_up(*self.members.start_membership(leader))

    def send_message(self, to: int, message: m.Message) -> Effects:
        """Send a message that needs no bookkeeping."""
        return self._assign_seqs([(to, message)])

    def start_call(self, to: int, message: Request, now: float, timeout: float | None) -> Effects:
        """Begin a call; its forks are shared already."""
        label = "to_here" if isinstance(message, m.Fetch) else message.label
        self.calls.start_call(message.call, to, label, now, timeout)
        # Between `RRefs.share_rref` and here the lock was free, so the receiver may have left or been restarted.
        if not self._still_meant(message):
            error = WorkerLostError(f"{self.member_name(to)} was lost before {label} could be sent to it")
            return self._follow_up(*self._undo_send(to, message, error, gone=True))
        return self._assign_seqs([(to, message)])

    def _still_meant(self, message: Request) -> bool:
        """Return whether the receiver is still the process that the RRefs of this message were shared with."""
        if isinstance(message, m.Create) and message.fork not in self.rrefs.users:
            return False
        return isinstance(message, m.Fetch) or not message.forks or all(map(self.rrefs.is_shared, message.forks))

    def call_expired(self, call: int) -> Effects:
        """Fail a call at its deadline, and cancel it at the callee."""
        return self._follow_up(*self.calls.call_expired(call, self.member_name))

    def cancel_call(self, call: int) -> Effects:
        """Cancel a call at the request of its caller."""
        return self._follow_up(*self.calls.cancel_call(call))

    def begin_serving(self, source: int, call: int, now: float) -> Effects:
        """Begin an enqueued call, now that a thread is free; no effect if its caller no longer waits."""
        message, may_run = self.calls.begin_call(source, call, now)
        if message is None:
            return []
        if may_run:
            return [fx.Run(source, message)]
        return self._follow_up(*self._not_run(message, RpcTimeoutError("the caller's deadline passed before it ran")))

    def body_opened(self, forks: Iterable[m.Fork]) -> Effects:
        """Release our own RRefs of a body that has been unpickled: it refers to the values themselves now."""
        return self._follow_up(*self._release_forks(fork for fork in forks if fork.owner == self.me))

    def body_dropped(self, forks: Iterable[m.Fork]) -> Effects:
        """Release the RRefs of a body that will not be opened."""
        return self._follow_up(*self._release_forks(forks))

    def withdraw_forks(self, forks: Iterable[m.Fork]) -> Effects:
        """Withdraw RRefs that were forked for a message that will not be made."""
        return self._follow_up(*join_outcomes(map(self.rrefs.withdraw_fork, forks)))

    def send_failed(self, send: fx.Send, error: RpcError) -> Effects:
        """Handle the failure to put a numbered message on the wire."""
        pair, message = self.delivery.pairs.get(send.to), send.message
        if type(message) is m.Seen:
            if pair is not None:
                self.delivery.schedule_ack(pair)
            return self._with_wake([])
        if pair is None or not pair.is_own_number(send.seq):  # the receiver has left, or another process has its id
            return self._follow_up(*self._undo_send(send.to, message, error, gone=True))
        if isinstance(error, ProtocolError) or is_sent_once(message):
            # It cannot be sent, or only once. The receiver expects every number, so a placeholder fills this one.
            instead = placeholder_for(message, error)
            filled = [] if instead is None else [pair.replace_message(send.seq, instead)]
            return filled + self._follow_up(*self._undo_send(send.to, message, error))
        return []  # a control message: a later tick retransmits it

    def take_back_message(self, to: int, message: m.Message, error: RpcError) -> Effects:
        """Take back a message that has no sequence number yet and will not be sent."""
        return self._follow_up(*self._undo_send(to, message, error))

    def process_outcome(self, outcome: Outcome) -> Effects:
        """Assign sequence numbers to the messages of a machine's outcome."""
        return self._follow_up(*outcome)

    def member_lost(self, worker: int, incarnation: int, reason: str) -> Effects:
        """Handle the loss of a member that did not announce its departure."""
        member = self.members.members.get(worker)
        if member is not None and member.incarnation != incarnation:
            return []  # this incarnation has a successor already
        if self.members.closing and member is not None:
            return self._follow_up(*self._lost_at_the_end(member, reason))
        effects = self._follow_up(*self.members.member_lost(worker, reason))
        if member is None:
            effects += self._never_joined(worker, incarnation, reason)
        elif self.members.leaving:
            self.delivery.remove_pair(worker)
        if self.members.ended:
            self._early.clear()
            effects += self._follow_up(*self._drop_orphans())
        return effects

    def _lost_at_the_end(self, member: m.Member, reason: str) -> Outcome:
        """Handle a loss while the world closes: the leader gets no report, and no member waits for the lost one."""
        self.gone[member.id] = fx.MemberLeft(member, True, reason)
        self.delivery.remove_pair(member.id)
        self.leaks += self.rrefs.forks_held_by(member.id)
        return self.rrefs.member_lost(member.id, member.incarnation)[:2]

    def _never_joined(self, worker: int, incarnation: int, reason: str) -> Effects:
        """Handle the loss of a process that no View has named: drop the messages that it has sent."""
        self.members.note_lost_joiner(worker, incarnation)
        early = self._early.pop(worker, ())  # but keep those of a successor
        if later := [words for words in early if is_newer(incarnations_of(words[0])[0], incarnation)]:
            self._early[worker] = later
        gone = self.gone.get(worker)
        if gone is not None and not is_newer(incarnation, gone.member.incarnation):
            return []
        return self._member_left(
            fx.MemberLeft(m.Member(worker, self.member_name(worker), incarnation, ""), True, reason)
        )

    def connection_broken(self, worker: int, incarnation: int, reason: str) -> Effects:
        """Handle a broken connection that may be restored: calls in flight fail, all other messages wait."""
        pair = self.delivery.find_pair(worker, incarnation)
        if pair is None:
            return []
        pair.before = pair.sent  # data numbered until now may be lost with the connection

        def connection_error(call: OutgoingCall) -> ConnectionLostError:
            text = f"the connection to {self.member_name(worker)} broke before {call.label} had finished: {reason}"
            return ConnectionLostError(text)

        calls = [call for call, waiting in self.calls.outgoing.items() if waiting.to == worker]
        return self._follow_up(*join_outcomes(self.calls.give_up_call(call, connection_error) for call in calls))

    def connection_resumed(self, worker: int, incarnation: int) -> Effects:
        """Retransmit or cancel what may be lost with the old connection: a new one to the same process is open."""
        pair = self.delivery.find_pair(worker, incarnation)
        return [] if pair is None else self._with_wake(self.delivery.report_sends(pair.after_reconnect()))

    def request_flush(self, then: Callable[[], object], of: Callable[[Any], bool] | None = None) -> Effects:
        """Request acknowledgement of all messages, or of those `of` a kind; then call `then`, which must not wait."""
        return self.delivery.request_flush(then, of)

    def tick_delivery(self) -> Effects:
        """Acknowledge and retransmit; the agent calls this one period after a `Wake`."""
        return self.delivery.tick()

    # -- observation
    def member_name(self, worker: int) -> str:
        gone = self.gone.get(worker)
        member = gone.member if gone else self.members.members.get(worker)
        return member.name if member else f"worker {worker}"

    def set_observers(self, note: Note | None, observer: MessageObserver | None = None) -> None:
        """Report every change to `note`, and every message to `observer`, from now on; None: report nothing."""
        self.delivery.observer = observer
        self.calls.note = self.rrefs.note = self.contexts.note = note

    def all_tables(self) -> Tables:
        return {
            **self.rrefs.rref_tables(),
            "contexts": self.contexts.contexts_table(),
            "calls": self.calls.calls_table(),
        }

    def check_tables(self) -> None:
        """Raise AssertionError if any table contradicts another."""
        self.calls.check_calls()
        self.rrefs.check_rrefs()
        self.contexts.check_contexts()

    def is_alive(self, worker: int, incarnation: int) -> bool | None:
        """Return whether this incarnation is in the world; None if it may have joined without a View naming it yet."""
        member = self._process_of_worker(worker)
        if member is not None and member.incarnation == incarnation:
            return True
        latest = self.members.past.get(worker, -1) if member is None else member.incarnation
        return False if latest >= incarnation or self.members.ended else None

    # -- internals
    def _follow_up(self, effects: Effects, outbox: Outbox) -> Effects:
        """Follow up members that left or joined, then number the messages."""
        if _FOLLOWED.isdisjoint(map(type, effects)):
            return effects + self._assign_seqs(outbox) if outbox else effects
        follow: Effects = []
        last: Effects = []
        for effect in effects:
            if isinstance(effect, fx.MemberLeft):
                follow += self._member_left(effect)
            elif isinstance(effect, fx.MemberJoined):
                follow += self._admit_member(effect.member)
            elif isinstance(effect, fx.Complete) and not effect.closing:
                last.append(effect)  # carried out last: a thread that waits for it may end the process at once
        for effect in effects:  # after all are admitted: a message of one may refer to another
            if isinstance(effect, fx.MemberJoined):
                follow += self._handle_early(effect.member.id)
        if last:
            effects = [effect for effect in effects if effect not in last]
        return effects + follow + self._assign_seqs(outbox) + last

    def _admit_member(self, member: m.Member) -> Effects:
        """Admit a new process, perhaps under the id of a departed one."""
        self.gone.pop(member.id, None)
        if self.delivery.find_pair(member.id, member.incarnation) is None:
            self.delivery.create_pair(member.id, member.incarnation)
        self.contexts.process_joined(member.id, member.incarnation)
        return self._assign_seqs(self.rrefs.owner_joined(member.id, member.incarnation))

    def _handle_early(self, source: int) -> Effects:
        """Handle the messages that a new process sent before the View that names it arrived here."""
        return [effect for early in self._early.pop(source, ()) for effect in self.handle_message(source, *early)]

    def _incarnation_of(self, worker: int) -> int:
        member = self._process_of_worker(worker)
        return member.incarnation if member else 0

    def _process_of_worker(self, worker: int) -> m.Member | None:
        """Return the process that has this id; this process counts even before a View names it."""
        return self.members.me if worker == self.me else self.members.members.get(worker)

    def _member_left(self, gone: fx.MemberLeft) -> Effects:
        worker = gone.member.id
        why = f"{gone.member.name}: {gone.reason}"
        if self.delivery.find_pair(worker, gone.member.incarnation) is not None:
            self.delivery.remove_pair(worker)
        self.gone[worker] = gone
        calls, held = self.calls.worker_lost(worker, gone.member.name, gone.reason)
        rrefs, rref_messages, waiting = self.rrefs.member_lost(worker, gone.member.incarnation)
        confirmed = [effect for fork in waiting for effect in self.calls.fork_confirmed(fork)]
        outcomes = [(calls + rrefs + confirmed, rref_messages)]
        outcomes += [self._not_run(message, WorkerLostError(why)) for message in held]
        outcomes.append(self.contexts.worker_lost(worker, gone.member.incarnation, why))
        effects, outbox = join_outcomes(outcomes)
        return effects + self._assign_seqs(outbox)

    def _on_delivery_report(self, to: int, fate: m.DeliveryReport) -> Outcome:
        """Take back the users' data that the peer reports as never received: it will refuse it from now on."""
        outcomes: list[Outcome] = []
        for message in self.delivery.process_report(self.delivery.pairs[to], fate):
            answer = isinstance(message, m.Result)
            what = "an answer" if answer else getattr(message, "label", type(message).__name__)
            error = ConnectionLostError(f"{what} was lost on its way to {self.member_name(to)}", answer)
            outcomes.append(self._undo_send(to, message, error))
            if isinstance(message, m.Result | m.Create):  # the peer still waits for a reply, or for the value's fork
                outcomes.append(([], [(to, placeholder_for(message, error))]))
        return join_outcomes(outcomes)

    def _assign_seqs(self, outbox: Outbox) -> Effects:
        effects: Effects = []
        for to, message in outbox:
            pair = self.delivery.pairs.get(to)
            if pair is None and to not in self.gone:  # the first message to a process
                pair = self.delivery.create_pair(to, self._incarnation_of(to))
            if pair is None:
                error = WorkerLostError(self.gone[to].error_text)
                effects += self._follow_up(*self._undo_send(to, message, error, gone=True))
            else:
                effects.append(self.delivery.number_message(pair, message))
        return self._with_wake(effects) if self.delivery.tick_due else effects

    def _with_wake(self, effects: Effects) -> Effects:
        if self.delivery.tick_due:
            self.delivery.tick_due = False
            effects.append(fx.Wake())
        return effects

    # -- the fast path of a plain call
    def fast_call(
        self, to: int, message: m.Call | m.Create | m.Fetch, now: float, timeout: float | None
    ) -> fx.Send | None:
        """Begin a call and return its `Send`; None if nothing was done."""
        delivery = self.delivery
        pair = delivery.pairs.get(to)
        if pair is None or not delivery.ticking:
            return None
        if isinstance(message, m.Create) and message.fork not in self.rrefs.users:
            return None  # the owner has left since; another process may have its id
        label = "to_here" if isinstance(message, m.Fetch) else message.label
        self.calls.start_call(message.call, to, label, now, timeout)
        return delivery.number_message(pair, message)

    def fast_take(self, source: int, seq: int, message: m.Call | m.Fetch, now: float) -> bool:
        """Accept a call that runs now; False if nothing was done."""
        pair = self.delivery.next_in_order(source, seq)
        if pair is None:
            return False
        self.delivery.accept_next(pair, seq, message)
        self.calls.take_request(source, message, now)
        return True

    def fast_answer(self, to: int, result: m.Result) -> fx.Send | None:
        """Number the reply of a function that has returned; None if nothing was done."""
        delivery = self.delivery
        pair = delivery.pairs.get(to)
        if pair is None or not delivery.ticking or not self.calls.finish_serving(to, result.call):
            return None
        return delivery.number_message(pair, result)

    def fast_resolve(self, source: int, seq: int, result: m.Result) -> bool:
        """Accept the reply to a waiting call; False if nothing was done."""
        pair = self.delivery.next_in_order(source, seq)
        if pair is None or result.call not in self.calls.outgoing:
            return False
        self.delivery.accept_next(pair, seq, result)
        self.calls.pop_outgoing(result.call)
        return True
