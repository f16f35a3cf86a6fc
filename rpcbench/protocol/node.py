"""One whole member of a world as a plain value: all machines, joined.

The agent feeds it under one lock; a simulation feeds many of them from one thread. Each message to a member has a
number, and each number is handled once, so a message that comes twice does nothing; what is lost is seen to by
`protocol.delivery`.

The fast path of a plain call is four steps, each of which does all that a node has to do at once.

    caller    `fast_call`: begun and numbered          `fast_resolve`: the reply has come
    callee    `fast_take`: it has come, and begins     `fast_answer`: it has run, and the reply is numbered

Each leaves a node as the general way would (`Node.call`, `handle` and `begin`, `send`, `handle`), where that had no
effect but the one that follows here by itself. Where it might have another, nothing is done, and the general way is to
be taken. Messages that bring RRefs always go there, and so does all while nothing ticks: then a number asks for a
`Wake`. A call takes 42 us with it and 63 without.
"""

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
    never_ran,
)
from rpcbench.base.events import Note, Tables, Told
from rpcbench.base.ids import Id
from rpcbench.protocol.backward import Contexts
from rpcbench.protocol.calls import Calls, Request
from rpcbench.protocol.delivery import COUNT_BITS, OWED, Delivery, Pair, lives, newer, once
from rpcbench.protocol.effects import Came, Complete, Effects, Gone, Heard, Joined, Run, Send, Undelivered, Wake
from rpcbench.protocol.membership import REQUESTS, DepartedMembers, Membership
from rpcbench.protocol.rrefs import Held, Outbox, RRefs
from rpcbench.wire import messages as m

_NO_CALL = -1


def placeholder_for(message: m.Message, error: Exception) -> m.Message | None:
    """What takes the place of a message that is not sent, or is lost: smaller than that, None where nothing is."""
    if isinstance(message, m.Result) or (isinstance(message, m.Failure) and message.body.payload):
        return m.Failure(message.call, type(error).__name__, str(error), m.EMPTY)
    if isinstance(message, m.Create):
        return m.Uncreated(message.rref, message.fork, message.label, str(error))
    return None if isinstance(message, m.Cancel) else m.Cancel(_NO_CALL)


Outcome = tuple[Effects, Outbox]
_FOLLOWED: frozenset[type[Any]] = frozenset((Gone, Joined, Complete))
_ON_MEMBERS = frozenset((*REQUESTS, m.Refused, m.View))


class Node:
    def __init__(self, me: m.Member, world_size: int | None, lossy: bool = False, launched: bool = True) -> None:
        """`lossy`: connections may lose messages without breaking, so users' data that is late may be lost.

        `launched`: member 0 starts the others.
        """
        self.me = me.id
        self.calls = Calls()
        self.rrefs = RRefs(me.id, me.incarnation)
        self.contexts = Contexts(me.id, self.name)
        self.members = Membership(me, world_size, launched)
        self.leaks: list[Held] = []  # what members held on to when they left a world that was over
        self.rrefs.alive, self.rrefs.life_of = self._alive, self._life_of
        self.delivery = Delivery(me.incarnation, lossy)
        self.gone = DepartedMembers()
        self._early: dict[int, list[tuple[int, m.Message, float]]] = {}
        self._handlers: dict[type[Any], Callable[[int, Any, float], Outcome]] = {
            m.Call: self._on_request,
            m.Create: self._on_create,
            m.Fetch: self._on_request,
            m.Result: self._on_result,
            m.Failure: lambda source, msg, now: (self.calls.answered(source, msg), []),
            m.Cancel: self._on_cancel,
            m.ForkRequest: lambda source, msg, now: self.rrefs.on_fork_request(source, msg),
            m.ForkAccept: self._on_fork_accept,
            m.ChildAccept: lambda source, msg, now: self.rrefs.on_child_accept(msg),
            m.UserDelete: lambda source, msg, now: (self.rrefs.on_user_delete(msg), []),
            m.Discover: lambda source, msg, now: self.contexts.walks.on_discover(source, msg),
            m.Discovered: lambda source, msg, now: self.contexts.walks.on_discovered(msg),
            m.Gradients: lambda source, msg, now: self.contexts.walks.on_gradients(source, msg),
            m.Settled: lambda source, msg, now: self.contexts.walks.on_settled(msg),
            m.WalkFailed: lambda source, msg, now: self.contexts.walks.on_failed(source, msg),
            m.ReleaseContext: lambda source, msg, now: self.contexts.release(msg.context, (source,)),
            **{kind: lambda source, msg, now: self.members.asked(source, msg) for kind in REQUESTS},
            m.Refused: lambda source, msg, now: (self.members.on_refused(msg), []),
            m.View: lambda source, msg, now: self._on_view(msg),
            m.Notice: lambda source, msg, now: ([Heard(source, msg)], []),
            m.Parcel: lambda source, msg, now: ([Came(source, msg)], []),
            m.Uncreated: self._on_uncreated,
            m.Attending: lambda source, msg, now: self.contexts.on_attending(source, msg.context),
            m.Forget: lambda source, msg, now: ([], [(source, self.delivery.pairs[source].fate(msg))]),
            m.Fate: lambda source, msg, now: self._on_fate(source, msg),
        }

    # -- what comes in
    def handle(self, source: int, seq: int, message: m.Message, now: float) -> Effects:
        """A message has arrived."""
        pair = self.delivery.pairs.get(source)
        if pair is None or seq >> COUNT_BITS != pair.stamp:
            pair = self._met(source, seq, message, now)
            if pair is None:
                return []
        if type(message) is m.Seen:
            return [*self.delivery.acknowledged(pair, message)]
        effects = self._new(source, message, now) if self.delivery.first_time(pair, seq, message) else []
        if pair.owed >= OWED:
            effects.append(pair.seen())
        return self._stirred(effects) if self.delivery.stirred else effects

    def _new(self, source: int, message: m.Message, now: float) -> Effects:
        kind = type(message)
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"no rule for a {kind.__name__}")
        if kind in _ON_MEMBERS and not self.members.may_say(source, message):
            raise ProtocolError(f"worker {source} may not send a {kind.__name__} to worker {self.me}")
        return self._after(*handler(source, message, now))

    def _met(self, source: int, seq: int, message: m.Message, now: float) -> Pair | None:
        """Words from a process that is not the known one under that id, or meant for one before us. None: not now.

        Until a View names it, only what changes the view is heard: nobody would tell us of its end.
        """
        (life, meant), pair, gone = lives(seq), self.delivery.pairs.get(source), self.gone.get(source)
        if self.members.ended or meant != self.delivery.life or (pair is not None and not newer(life, pair.life)):
            return None
        if pair is None and self.members.leaving:
            return None  # no new acquaintances
        if pair is None and gone is not None and not newer(life, gone.member.incarnation):
            return None  # last words: what they would begin, nobody would end
        if isinstance(message, m.Join) and self.members.taken(source):
            return None  # its connection was let in before the other's was: it will see it end
        if isinstance(message, m.Join | m.View):
            return self.delivery.meet(source, life)
        self._early.setdefault(source, []).append((seq, message, now))
        return None

    def _on_request(self, source: int, message: Request, now: float) -> Outcome:
        if isinstance(message, m.Fetch) or not message.forks:
            return self.calls.arrived(source, message, set(), now), []
        pending, effects, outbox = self._adopt(message.forks)
        return effects + self.calls.arrived(source, message, pending, now), outbox

    def _on_create(self, source: int, message: m.Create, now: float) -> Outcome:
        created = self.rrefs.on_create(source, message.rref, message.fork, message.label, now, message.origin)
        effects, outbox = self._on_request(source, message, now)
        return effects, created + outbox

    def _on_result(self, source: int, message: m.Result, now: float) -> Outcome:
        if not message.forks:
            return self.calls.answered(source, message), []
        _, effects, outbox = self._adopt(message.forks)
        resolved = self.calls.answered(source, message)
        if resolved:
            return effects + resolved, outbox
        dropped, released = self._disown(message.forks)  # nobody waits any more
        return effects + dropped, outbox + released

    def _on_cancel(self, source: int, message: m.Cancel, now: float) -> Outcome:
        dropped = self.calls.cancel_asked(source, message.call)
        if dropped is None:
            return [], []
        return self._not_run(dropped, CallCancelled("its caller gave it up before it ran"))

    def _on_uncreated(self, source: int, message: m.Uncreated, now: float) -> Outcome:
        created = self.rrefs.on_create(source, message.rref, message.fork, message.label, now)
        error = ConnectionLostError(f"RRef creation via rpc.remote() failed: {message.reason}", False)
        return self.rrefs.unmade(message.rref, error), created

    def _on_view(self, view: m.View) -> Outcome:
        outcomes = [self.members.on_view(view), self._forsake()]
        if self.members.closing:  # some were lost before this member knew that they might go
            outcomes += [self._lost_at_the_end(*loss) for loss in self.members.lost_silently()]
        return [effect for effects, _ in outcomes for effect in effects], [out for _, box in outcomes for out in box]

    def _forsake(self) -> Outcome:
        """RRefs whose owner is known to be gone by now are lost."""
        effects: Effects = []
        outbox: Outbox = []
        for fork in self.rrefs.forsaken():
            more, out = self.rrefs.owner_lost(fork)
            effects, outbox = effects + more + self.calls.confirmed(fork), outbox + out
        return effects, outbox

    def _on_fork_accept(self, source: int, message: m.ForkAccept, now: float) -> Outcome:
        effects, outbox = self.rrefs.on_fork_accept(message)
        return effects + self.calls.confirmed(message.fork), outbox

    def _adopt(self, forks: Iterable[m.Fork]) -> tuple[set[Id], Effects, Outbox]:
        pending: set[Id] = set()
        effects: Effects = []
        outbox: Outbox = []
        for fork in forks:
            waits, more, out = self.rrefs.adopt(fork)
            effects, outbox = effects + more, outbox + out
            if waits:
                pending.add(fork.fork)
        return pending, effects, outbox

    def _taken_back(self, to: int, message: m.Message, error: Exception, gone: bool = False) -> Outcome:
        """What waits for a message that does not come, waits no more. `gone`: nor does the process it was meant for."""
        if isinstance(message, m.Discover | m.Gradients):
            text = f"backward of autograd context {message.context}: {error}"
            failure = m.WalkFailed(message.context, message.walk, self.me, type(error).__name__, text, m.EMPTY)
            return self.contexts.walks.failed(message.context, message.walk, failure)
        effects: Effects = []
        outbox: Outbox = []
        if (scope := getattr(message, "scope", None)) is not None:
            self.contexts.unsent(scope)
        if isinstance(message, m.Parcel):
            return [Undelivered(to, message, error)], []
        if gone and isinstance(message, m.ForkRequest | m.Create | m.Uncreated):
            effects, outbox = self.rrefs.owner_lost(message.fork)
            effects += self.calls.confirmed(message.fork)
        for fork in getattr(message, "forks", ()):
            more, out = self.rrefs.unshare(fork)
            effects, outbox = effects + more, outbox + out
        if isinstance(message, m.Call | m.Create | m.Fetch):
            effects += self.calls.failed(message.call, error)
        return effects, outbox

    def _not_run(self, dropped: Request, error: RpcError) -> Outcome:
        """A call that was held or queued is dropped."""
        never_ran(error)
        effects, outbox = self._disown(() if isinstance(dropped, m.Fetch) else dropped.forks)
        if isinstance(dropped, m.Create):
            effects += self.rrefs.unmade(dropped.rref, error)
        return effects, outbox

    def _disown(self, forks: Iterable[m.Fork]) -> Outcome:
        """RRefs of a message that nobody will open."""
        effects: Effects = []
        outbox: Outbox = []
        for fork in forks:
            if fork.owner == self.me:
                effects += self.rrefs.came_home(fork)
            else:
                outbox += self.rrefs.release(fork.fork)
        return effects, outbox

    # -- what this member does
    def start(self, leader: int = 0, life: int = 0) -> Effects:
        """Found the world, or ask the one who leads it, in this incarnation, to be let in."""
        self.delivery.meet(leader, life)
        return self._after(*self.members.start(leader))

    def send(self, to: int, message: m.Message) -> Effects:
        """Any message that needs no bookkeeping."""
        return self._number([(to, message)])

    def call(self, to: int, message: Request, now: float, timeout: float | None) -> Effects:
        """Begin a call; its forks are shared already."""
        label = "to_here" if isinstance(message, m.Fetch) else message.label
        self.calls.start(message.call, to, label, now, timeout)
        if not self._still_meant(message):
            error = WorkerLostError(f"the {self.name(to)} that {label} was meant for is gone")
            return self._after(*self._taken_back(to, message, error, gone=True))
        return self._number([(to, message)])

    def _still_meant(self, message: Request) -> bool:
        """Whether the process that RRefs were shared with for this message is the one that it goes to."""
        if isinstance(message, m.Create) and message.fork not in self.rrefs.users:
            return False
        return isinstance(message, m.Fetch) or not message.forks or all(map(self.rrefs.shared, message.forks))

    def expired(self, call: int) -> Effects:
        """The deadline of a call has passed."""
        waiting = self.calls.outgoing.get(call)
        if waiting is None:
            return []
        return self.calls.expired(call, self.name(waiting.to)) + self._number([(waiting.to, m.Cancel(call))])

    def cancel(self, call: int) -> Effects:
        """The caller gives a call up."""
        effects, to = self.calls.cancelled(call)
        return effects if to is None else effects + self._number([(to, m.Cancel(call))])

    def begin(self, source: int, call: int, now: float) -> Effects:
        """There is a thread for a call that was enqueued; nothing to do if its caller no longer waits."""
        message, may_run = self.calls.begin(source, call, now)
        if message is None:
            return []
        if may_run:
            return [Run(source, message)]
        return self._after(*self._not_run(message, RpcTimeoutError("its caller gave it up before it ran")))

    def opened(self, forks: Iterable[m.Fork]) -> Effects:
        """A body has been unpickled: RRefs of ours in it stand for the values themselves now."""
        return self._after(*self._disown(fork for fork in forks if fork.owner == self.me))

    def dropped(self, forks: Iterable[m.Fork]) -> Effects:
        """A body will not be opened."""
        return self._after(*self._disown(forks))

    def unshared(self, forks: Iterable[m.Fork]) -> Effects:
        """RRefs that were forked for a message that there will be none of."""
        effects: Effects = []
        outbox: Outbox = []
        for fork in forks:
            more, out = self.rrefs.unshare(fork)
            effects, outbox = effects + more, outbox + out
        return self._after(effects, outbox)

    def unsent(self, send: Send, error: RpcError) -> Effects:
        """A numbered message could not be put on the wire.

        A control message goes again later, if that may help. What else it would have carried is taken back, and
        something small goes out under its number, as the receiver counts on every number to come.
        """
        pair, message = self.delivery.pairs.get(send.to), send.message
        if type(message) is m.Seen:
            if pair is not None:
                self.delivery.owe(pair)
            return self._stirred([])
        if pair is None or not pair.sends(send.seq):
            return self._after(*self._taken_back(send.to, message, error, gone=True))
        if isinstance(error, ProtocolError) or once(message):
            instead = placeholder_for(message, error)
            filled = [] if instead is None else [pair.replace(send.seq, instead)]
            return filled + self._after(*self._taken_back(send.to, message, error))
        return []

    def never_sent(self, to: int, message: m.Message, error: RpcError) -> Effects:
        """A message that has no number will not be sent after all."""
        return self._after(*self._taken_back(to, message, error))

    def outcome(self, outcome: Outcome) -> Effects:
        """Number the messages of a machine's outcome."""
        return self._after(*outcome)

    def lost(self, worker: int, incarnation: int, reason: str) -> Effects:
        """A member is gone without a word."""
        member = self.members.members.get(worker)
        if member is not None and member.incarnation != incarnation:
            return []  # one that has a successor already
        if self.members.closing and member is not None:
            return self._after(*self._lost_at_the_end(member, reason))
        effects = self._after(*self.members.lost(worker, reason))
        if member is None:
            effects += self._never_came(worker, incarnation, reason)
        elif self.members.leaving:
            self.delivery.drop(worker)
        if self.members.ended:
            self._early.clear()
            effects += self._after(*self._forsake())
        return effects

    def _lost_at_the_end(self, member: m.Member, reason: str) -> Outcome:
        """Nobody is told of a loss any more; but what the member held, or has not acknowledged, is not waited for."""
        self.gone[member.id] = Gone(member, True, reason)
        self.delivery.drop(member.id)
        self.leaks += self.rrefs.held_by(member.id)
        return self.rrefs.lost(member.id, member.incarnation)[:2]

    def _never_came(self, worker: int, incarnation: int, reason: str) -> Effects:
        """One is gone that is no member as far as is known here: what it has said, or says yet, is not heard."""
        self.members.never(worker, incarnation)
        early = self._early.pop(worker, ())
        if later := [words for words in early if newer(lives(words[0])[0], incarnation)]:
            self._early[worker] = later
        gone = self.gone.get(worker)
        if gone is not None and not newer(incarnation, gone.member.incarnation):
            return []
        return self._left(Gone(m.Member(worker, self.name(worker), incarnation, ""), True, reason))

    def broken(self, worker: int, incarnation: int, reason: str) -> Effects:
        """The connection to a member has ended, but it may come back: calls in flight fail, all else waits."""
        pair = self.delivery.pair(worker, incarnation)
        if pair is None:
            return []
        pair.before = pair.sent
        calls = [(call, waiting) for call, waiting in self.calls.outgoing.items() if waiting.to == worker]
        effects: Effects = []
        for call, waiting in calls:
            text = f"the connection to {self.name(worker)} broke while it had {waiting.label} to do: {reason}"
            effects += self.calls.failed(call, ConnectionLostError(text))
        return self._after(effects, [(worker, m.Cancel(call)) for call, _ in calls])

    def resume(self, worker: int, incarnation: int) -> Effects:
        """A new connection to the same process stands: what may be lost with the old one is seen to."""
        pair = self.delivery.pair(worker, incarnation)
        return [] if pair is None else self._stirred(self.delivery.telling(pair.mend_all()))

    def flush(self, then: Callable[[], object], of: Callable[[Any], bool] | None = None) -> Effects:
        """Have what was sent, or all `of` a kind, acknowledged soon; then `then` is called, which must not wait."""
        return self.delivery.flush(then, of)

    def tick(self) -> Effects:
        """The answer to `Wake`: acknowledge, and send again what is missing."""
        return self.delivery.tick()

    # -- looking
    def name(self, worker: int) -> str:
        gone = self.gone.get(worker)
        member = gone.member if gone else self.members.members.get(worker)
        return member.name if member else f"worker {worker}"

    def listen(self, note: Note | None, told: Told | None = None) -> None:
        """Tell of every change, and of every message, from now on (None: of none)."""
        self.delivery.told = told
        self.calls.note = self.rrefs.note = self.contexts.note = note

    def tables(self) -> Tables:
        return {**self.rrefs.tables(), "contexts": self.contexts.table(), "calls": self.calls.table()}

    def check(self) -> None:
        """Raise AssertionError if any table contradicts another."""
        self.calls.check()
        self.rrefs.check()
        self.contexts.check()

    # -- inside
    def _after(self, effects: Effects, outbox: Outbox) -> Effects:
        """Follow up members that went or came, then number the messages.

        That the world is complete is told here last: who waits for that may end the process at once.
        """
        if _FOLLOWED.isdisjoint(map(type, effects)):
            return effects + self._number(outbox) if outbox else effects
        follow: Effects = []
        last: Effects = []
        for effect in effects:
            if isinstance(effect, Gone):
                follow += self._left(effect)
            elif isinstance(effect, Joined):
                follow += self._came(effect.member)
            elif isinstance(effect, Complete) and not effect.closing:
                last.append(effect)
        if last:
            effects = [effect for effect in effects if effect not in last]
        return effects + follow + self._number(outbox) + last

    def _came(self, member: m.Member) -> Effects:
        """A new process, perhaps under the id of one that is gone; it may have spoken to us before we knew of it."""
        self.gone.pop(member.id, None)
        pair = self.delivery.pairs.get(member.id)
        if pair is None or pair.life != member.incarnation:
            self.delivery.meet(member.id, member.incarnation)
        self.contexts.came(member.id, member.incarnation)
        effects = self._number(self.rrefs.came(member.id, member.incarnation))
        for early in self._early.pop(member.id, ()):
            effects += self.handle(member.id, *early)
        return effects

    def _life_of(self, worker: int) -> int:
        member = self._process(worker)
        return member.incarnation if member else 0

    def _process(self, worker: int) -> m.Member | None:
        """The process under an id; this one is there whether a View names it or not."""
        return self.members.me if worker == self.me else self.members.members.get(worker)

    def _alive(self, worker: int, life: int) -> bool | None:
        """Whether this very process is in the world; None if it may have come, and is not known here yet."""
        member = self._process(worker)
        if member is not None and member.incarnation == life:
            return True
        latest = self.members.past.get(worker, -1) if member is None else member.incarnation
        return False if latest >= life or self.members.ended else None

    def _left(self, gone: Gone) -> Effects:
        worker = gone.member.id
        why = f"{gone.member.name}: {gone.reason}"
        if self.delivery.pair(worker, gone.member.incarnation) is not None:
            self.delivery.drop(worker)
        self.gone[worker] = gone
        calls, held = self.calls.lost(worker, gone.member.name, gone.reason)
        effects, outbox, waiting = self.rrefs.lost(worker, gone.member.incarnation)
        effects = calls + effects
        for fork in waiting:
            effects += self.calls.confirmed(fork)
        for message in held:
            more, out = self._not_run(message, WorkerLostError(why))
            effects, outbox = effects + more, outbox + out
        more, out = self.contexts.lost(worker, gone.member.incarnation, why)
        return effects + more + self._number(outbox + out)

    def _on_fate(self, to: int, fate: m.Fate) -> Outcome:
        """Users' data that never came, and never will, is taken back."""
        effects: Effects = []
        outbox: Outbox = []
        for message in self.delivery.settled(self.delivery.pairs[to], fate):
            answer = isinstance(message, m.Result)
            what = "an answer" if answer else getattr(message, "label", type(message).__name__)
            error = ConnectionLostError(f"{what} was lost on its way to {self.name(to)}", answer)
            more, out = self._taken_back(to, message, error)
            effects, outbox = effects + more, outbox + out
            if isinstance(message, m.Result | m.Create):
                outbox.append((to, placeholder_for(message, error)))
        return effects, outbox

    def _number(self, outbox: Outbox) -> Effects:
        effects: Effects = []
        for to, message in outbox:
            pair = self.delivery.pairs.get(to) or self._pair(to)
            if pair is None:
                error = WorkerLostError(self.gone[to].words)
                effects += self._after(*self._taken_back(to, message, error, gone=True))
            else:
                effects.append(self.delivery.number(pair, message))
        return self._stirred(effects) if self.delivery.stirred else effects

    def _pair(self, to: int) -> Pair | None:
        """The pair for a first message to a process; None where it has gone."""
        return None if to in self.gone else self.delivery.meet(to, self._life_of(to))

    def _stirred(self, effects: Effects) -> Effects:
        if self.delivery.stirred:
            self.delivery.stirred = False
            effects.append(Wake())
        return effects

    # -- the fast path of a plain call
    def fast_call(
        self, to: int, message: m.Call | m.Create | m.Fetch, now: float, timeout: float | None
    ) -> Send | None:
        """A call begins: what is to be sent; None where nothing has been done."""
        delivery = self.delivery
        pair = delivery.pairs.get(to)
        if pair is None or not delivery.ticking:
            return None
        if isinstance(message, m.Create) and message.fork not in self.rrefs.users:
            return None  # its maker has gone since; another may be in its place
        label = "to_here" if isinstance(message, m.Fetch) else message.label
        self.calls.start(message.call, to, label, now, timeout)
        return delivery.number(pair, message)

    def fast_take(self, source: int, seq: int, message: m.Call | m.Fetch, now: float) -> bool:
        """A call has come, and its function runs now; False where nothing has been done."""
        pair = self.delivery.next_from(source, seq)
        if pair is None:
            return False
        self.delivery.came(pair, seq, message)
        self.calls.taken(source, message, now)
        return True

    def fast_answer(self, to: int, result: m.Result) -> Send | None:
        """The function has returned: what is to be sent; None where nothing has been done."""
        delivery = self.delivery
        pair = delivery.pairs.get(to)
        if pair is None or not delivery.ticking or not self.calls.served(to, result.call):
            return None
        return delivery.number(pair, result)

    def fast_resolve(self, source: int, seq: int, result: m.Result) -> bool:
        """The answer to a call that waits has come; False where nothing has been done."""
        pair = self.delivery.next_from(source, seq)
        if pair is None or result.call not in self.calls.outgoing:
            return False
        self.delivery.came(pair, seq, result)
        self.calls.ended(result.call)
        return True
