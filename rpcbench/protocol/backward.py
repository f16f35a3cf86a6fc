"""Distributed autograd contexts, and the backward passes that go back over the messages of a context.

A context lives on every worker that took part, until the one that began it releases it, or is gone. Each message says
which sends lie behind it as long as these are few, so most backward passes know what takes part before they begin.
Several passes may go back over one context at once.

A pass goes from the recvs that its roots reach, back to the leaves.

    discovery   "the send with this number takes part" goes to each sender whose recv is reached; it answers when all
                that lies behind is known. So every worker knows which sends to wait for, and a call whose result nobody
                used cannot stall the pass. Left out where the messages themselves told what lies behind them.
    gradients   go the same way. Each worker tells the root which send it has run and where it sent gradients then. When
                all that were sent have run, in whatever order the root hears of it, the pass is over.

Discovery is a diffusing computation (Dijkstra and Scholten, 1980): every question gets one answer, after the questions
it caused have got theirs. A `fast` pass asks nothing: each worker that gets gradients waits for all its sends of the
context, and says which these are. If the pass comes to rest and some got none, it fails and names them.
A failure goes to the root, and from each worker to its neighbours in the pass, so no worker keeps half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rpcbench.base.errors import RpcError
from rpcbench.base.events import Note, Row, Table
from rpcbench.base.ids import Id, origin, origin_of, worker_of
from rpcbench.protocol.effects import Accumulate, Effects, Explore, ForgetContext, ForgetWalk, Propagate, WalkEnded
from rpcbench.protocol.rrefs import Outbox
from rpcbench.wire.messages import (
    EMPTY,
    Attending,
    Awaited,
    Body,
    Discover,
    Discovered,
    Gradients,
    ReleaseContext,
    Scope,
    Settled,
    WalkFailed,
)

ROOT = -1
"""Stands for the send number of the roots, on the worker that began a walk."""
MOST_BEHIND = 16
"""Beyond so many, messages no longer say what lies behind them; the backward pass has to ask."""


class Sent(NamedTuple):
    """A message of the context that went out: to whom, and what it was part of."""

    to: int
    label: str


class Received(NamedTuple):
    """A message that came in: from whom, and the sends that lie behind it, its own among them; None: too many."""

    source: int
    behind: tuple[int, ...] | None


@dataclass(slots=True)
class Question:
    """One question of the discovery that is not answered yet: who asked, and which of ours it waits for."""

    asker: int
    open: set[int]


class Tally:
    """What the root has heard. `open`: gradients that were sent and have not run, or the other way round."""

    __slots__ = ("awaited", "open", "settled")

    def __init__(self, open_: set[int]) -> None:
        self.open = open_
        self.settled: set[int] = set()
        self.awaited: dict[int, Awaited] = {}

    def add(self, report: Settled) -> None:
        self.open ^= {report.message, *report.fired}
        self.settled.add(report.message)
        for one in report.awaited:
            self.awaited[one.message] = one

    def owes(self, worker: int) -> bool:
        """Whether gradients that were sent to this worker are not known to have run."""
        return any(worker_of(number) == worker for number in self.open)

    def unused(self) -> list[Awaited]:
        """Sends that were awaited in vain, once the pass has come to rest."""
        return [one for number, one in sorted(self.awaited.items()) if number not in self.settled]


class Walk:
    """This worker's part of one backward pass; `plan` are all sends that take part, where the messages told."""

    __slots__ = ("arrived", "asked", "fast", "needed", "plan", "questions", "ran", "retain", "running", "tally")

    def __init__(
        self,
        retain: bool = False,
        fast: bool = False,
        plan: tuple[int, ...] = (),
        needed: set[int] | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.retain = retain
        self.fast = fast
        self.plan = plan
        self.needed = set() if needed is None else needed
        self.asked: dict[int, int] = {}  # recv -> the send (or ROOT) from which it was reached first
        self.questions: dict[int, Question] = {}
        self.arrived: set[int] = set()
        self.ran = 0
        self.running = False
        self.tally = tally  # on the root


class Context:
    """What one worker knows of one context."""

    __slots__ = ("failed", "gradients", "known", "ran", "recvs", "sends", "walks")

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.sends: dict[int, Sent] = {}
        self.recvs: dict[int, Received] = {}
        self.walks: dict[Id, Walk] = {}
        self.ran: dict[Id, set[int]] = {}  # walks whose part here is over, with its neighbours
        self.failed: set[Id] = set()  # walks that must not begin again here
        self.gradients = 0

    def behind(self, recvs: Iterable[int], *more: int) -> tuple[int, ...] | None:
        """The sends behind all of these, where that is known and they are few; None also for recvs of elsewhere."""
        return union([one.behind if (one := self.recvs.get(recv)) else None for recv in recvs], *more)


def union(parts: Iterable[tuple[int, ...] | None], *more: int) -> tuple[int, ...] | None:
    """All sends of these, or None where they are too many or unknown."""
    found = dict.fromkeys(more)
    for part in parts:
        if part is None or len(found) > MOST_BEHIND:
            return None
        found |= dict.fromkeys(part)
    return tuple(found) if len(found) <= MOST_BEHIND else None


_FOREIGN = (
    "the roots depend on a tensor that was received in another autograd context: make all calls of a pass in one "
    "context, or detach() that tensor"
)

Outcome = tuple[Effects, Outbox]
Tell = Callable[[str, int], None]
Name = Callable[[int], str]


class Walks:
    """All walks on one worker. Methods return `(effects, outbox)`."""

    def __init__(self, me: int, contexts: dict[int, Context], gone: dict[int, str], tell: Tell, name: Name) -> None:
        self.me = me
        self.gone = gone
        self._contexts = contexts
        self._tell = tell
        self._name = name

    def begin(self, context: int, walk: Id, recvs: Iterable[int], retain: bool, fast: bool) -> Outcome:
        """Begin a backward pass here; `recvs` are those its roots reach."""
        known, recvs = self._contexts[context], list(recvs)
        plan = None if fast else known.behind(recvs)
        state = known.walks[walk] = Walk(retain, fast, plan or (), tally=Tally({ROOT}))
        if plan is None and not fast:
            state.questions[ROOT] = Question(self.me, set())
            return self._ask(context, walk, ROOT, recvs)
        state.needed = set(known.sends) if fast else known.sends.keys() & state.plan
        state.running = True
        self._tell("WalkBegan", context)
        return [Propagate(context, walk)], []

    # -- discovery
    def on_discover(self, source: int, message: Discover) -> Outcome:
        known = self._contexts.get(message.context)
        if known is None or message.message not in known.sends:
            return self._refuse(source, message, "the context is released, or never sent this message")
        if message.walk in known.failed:
            return self._refuse(source, message, "this backward pass has failed already")
        walk = known.walks.setdefault(message.walk, Walk())
        walk.needed.add(message.message)
        walk.questions[message.message] = Question(source, set())
        self._tell("SendDiscovered", message.context)
        return [Explore(message.context, message.walk, message.message)], []

    def explored(self, context: int, walk: Id, message: int, recvs: Iterable[int]) -> Outcome:
        """The answer to `Explore`."""
        if self.find(context, walk) is None:
            return [], []
        return self._ask(context, walk, message, recvs)

    def on_discovered(self, message: Discovered) -> Outcome:
        state = self.find(message.context, message.walk)
        asker = state.asked.get(message.message) if state else None
        if state is None or asker not in state.questions:
            return [], []
        state.questions[asker].open.discard(message.message)
        return self._answer(message.context, message.walk, state, asker)

    def _ask(self, context: int, walk: Id, message: int, recvs: Iterable[int]) -> Outcome:
        known, state = self._contexts[context], self._contexts[context].walks[walk]
        new = [recv for recv in recvs if recv not in state.asked]
        if not known.recvs.keys() >= set(new):
            return self._foreign(context, walk)
        for recv in new:
            state.asked[recv] = message
            state.questions[message].open.add(recv)
        effects, outbox = self._answer(context, walk, state, message)
        return effects, [(known.recvs[recv].source, Discover(context, walk, recv)) for recv in new] + outbox

    def _answer(self, context: int, walk: Id, state: Walk, message: int) -> Outcome:
        """Answer the question about `message` if all it waited for is answered."""
        outcome: Outcome = ([], [])
        if not state.questions[message].open:
            question = state.questions.pop(message)
            if message == ROOT:
                state.running = True
                outcome = [Propagate(context, walk)], []
            else:
                outcome = [], [(question.asker, Discovered(context, walk, message))]
        self._tell("WalkMoved", context)
        return outcome

    # -- gradients
    def on_gradients(self, source: int, message: Gradients) -> Outcome:
        effects, outbox = self.on_settled(message.settled) if message.settled else ([], [])
        if refusal := self._take(message):
            return effects, [*outbox, (source, self._refusal(message, refusal))]
        self._tell("GradientsArrived", message.context)
        return [*effects, Accumulate(source, message)], outbox

    def _take(self, message: Gradients) -> str | None:
        """Note that the gradients have come; or why they may not."""
        known = self._contexts.get(message.context)
        if known is None or message.walk in known.failed:
            return "the context is released, or this backward pass has failed already"
        state = known.walks.get(message.walk) or self._joining(known, message)
        if message.message not in state.needed or message.message in state.arrived:
            return "no backward pass waits for these gradients"
        known.walks[message.walk] = state
        state.running, state.retain = True, message.retain
        state.arrived.add(message.message)
        return None

    def _joining(self, known: Context, message: Gradients) -> Walk:
        """What a walk that does not ask is here, when it comes by for the first time."""
        needed = set(known.sends) if message.fast else known.sends.keys() & message.plan
        return Walk(message.retain, message.fast, message.plan, needed)

    def propagated(self, context: int, walk: Id, message: int, fired: Mapping[int, Body]) -> Outcome:
        """Gradients for a send (or the roots) have run; those of the recvs in `fired` go out now."""
        known = self._contexts.get(context)
        state = None if known is None else known.walks.get(walk)
        if known is None or state is None:
            return [], []
        if not known.recvs.keys() >= fired.keys():
            return self._foreign(context, walk)
        awaited: tuple[Awaited, ...] = ()
        if state.fast and not state.ran:
            awaited = tuple([Awaited(number, *known.sends[number]) for number in state.needed])
        report: Settled | None = Settled(context, walk, message, tuple(fired), awaited)
        state.ran += 1
        outbox: Outbox = []
        for recv, body in fired.items():
            state.asked[recv] = message
            to = known.recvs[recv].source
            rides = report if to == walk.worker != self.me else None
            outbox.append((to, Gradients(context, walk, recv, state.retain, state.fast, state.plan, rides, body)))
            report = None if rides else report
        if fired:
            self._tell("GradientsSent", context)
        if state.tally is None:
            outbox += [(walk.worker, report)] if report else []
            return self._finish(context, walk, known, state), outbox
        assert report is not None  # it rides to another, the root
        effects, more = self.on_settled(report)
        return effects, outbox + more

    def on_settled(self, report: Settled) -> Outcome:
        """The root hears that gradients have run."""
        state = self.find(report.context, report.walk)
        if state is None or (tally := state.tally) is None:
            return [], []
        tally.add(report)
        for worker, why in self.gone.items():
            if tally.owes(worker):
                return self._without(report.context, report.walk, f"{why}, while gradients were on their way")
        if tally.open:
            self._tell("GradientsRan", report.context)
            return [], []
        if unused := tally.unused():
            return self.failed(report.context, report.walk, self._in_vain(report, unused))
        del self._contexts[report.context].walks[report.walk]
        self._tell("WalkFinished", report.context)
        return [WalkEnded(report.context, report.walk, None), ForgetWalk(report.context, report.walk)], []

    def _finish(self, context: int, walk: Id, known: Context, state: Walk) -> Effects:
        """Where all sends that take part have run, this worker's part is over."""
        if state.ran < len(state.needed):
            self._tell("GradientsRan", context)
            return []
        del known.walks[walk]
        known.ran[walk] = self._neighbours(known, state)
        self._tell("WalkFinished", context)
        return [ForgetWalk(context, walk)]

    def _in_vain(self, report: Settled, unused: list[Awaited]) -> WalkFailed:
        calls = ", ".join(
            f"{self._name(worker_of(one.message))} to {self._name(one.to)} ({one.label})" for one in unused
        )
        text = (
            f"backward of autograd context {report.context} in mode 'fast' needs gradients for every message that was "
            f"sent, and these got none: {calls}. Nobody used what some of them carried: leave those calls out of the "
            "context, or use mode='smart'"
        )
        return WalkFailed(report.context, report.walk, self.me, "RpcError", text, EMPTY)

    # -- failures
    def failed(self, context: int, walk: Id, failure: WalkFailed, source: int | None = None) -> Outcome:
        """The pass goes wrong here, or `source` says that it has: tell the neighbours, once."""
        known = self._contexts.get(context)
        if known is None or walk in known.failed:
            return [], []
        known.failed.add(walk)
        state = known.walks.pop(walk, None)
        neighbours = known.ran.pop(walk, set()) if state is None else self._neighbours(known, state)
        self._tell("WalkFailed", context)
        ended: Effects = [WalkEnded(context, walk, failure)] if state and state.tally else []
        others = {walk.worker, *neighbours} - {self.me, source, *self.gone}
        return [*ended, ForgetWalk(context, walk)], [(other, failure) for other in sorted(others)]

    def _foreign(self, context: int, walk: Id) -> Outcome:
        return self.failed(context, walk, WalkFailed(context, walk, self.me, "RpcError", _FOREIGN, EMPTY))

    def on_failed(self, source: int, message: WalkFailed) -> Outcome:
        return self.failed(message.context, message.walk, message, source)

    def lost(self, context: int, worker: int, reason: str) -> Outcome:
        """A worker is gone: fail the walks of the context that it takes part in, as far as this one knows."""
        known = self._contexts[context]
        effects: Effects = []
        outbox: Outbox = []
        for walk, state in list(known.walks.items()):
            owes = state.tally is not None and state.tally.owes(worker)
            if owes or worker == walk.worker or worker in self._neighbours(known, state):
                more, out = self._without(context, walk, reason)
                effects, outbox = effects + more, outbox + out
        return effects, outbox

    def _without(self, context: int, walk: Id, reason: str) -> Outcome:
        text = f"backward of autograd context {context} needs a worker that is gone: {reason}"
        return self.failed(context, walk, WalkFailed(context, walk, self.me, "WorkerLostError", text, EMPTY))

    def _neighbours(self, known: Context, state: Walk) -> set[int]:
        """Who asked this worker, or sends it gradients, and whom it has asked or sent them to."""
        above = {known.sends[send].to for send in state.needed}
        return above | {known.recvs[recv].source for recv in state.asked}

    def _refuse(self, source: int, message: Discover, reason: str) -> Outcome:
        return [], [(source, self._refusal(message, reason))]

    def _refusal(self, message: Discover | Gradients, reason: str) -> WalkFailed:
        return WalkFailed(message.context, message.walk, self.me, "RpcError", reason, EMPTY)

    # -- looking
    def part(self, context: int, walk: Id) -> tuple[set[int], bool]:
        """The sends of this worker that take part, and whether the graph is retained. RpcError if it is over."""
        state = self.find(context, walk)
        if state is None:
            raise RpcError(f"the backward pass {walk} of autograd context {context} is over")
        return set(state.needed), state.retain

    def find(self, context: int, walk: Id) -> Walk | None:
        known = self._contexts.get(context)
        return None if known is None else known.walks.get(walk)


_new = tuple.__new__  # a step less than the class itself takes
_TOMBSTONES = 4096
_RELEASED = "the autograd context was released before its backward pass had ended"


class Contexts:
    """All contexts of one worker. Methods return `(effects, outbox)`. `name` gives a worker's name for error texts."""

    def __init__(self, me: int, name: Name = lambda worker: f"worker {worker}") -> None:
        self.note: Note | None = None
        self.me = me
        self.contexts: dict[int, Context] = {}
        self.gone: dict[int, str] = {}  # and why
        self._over: set[int] = set()  # origins of contexts whose worker is gone
        self.walks = Walks(me, self.contexts, self.gone, self._tell, name)
        self._released: dict[int, None] = {}

    # -- recording
    def open(self, context: int) -> Context | None:
        """The context, made if it is new here; None once it is over: late calls cannot revive it."""
        known = self.contexts.get(context)
        if known is not None:
            return known
        if context in self._released or origin_of(context) in self._over:
            return None
        known = self.contexts[context] = Context()
        self._tell("ContextCreated", context)
        return known

    def record_send(
        self, context: int, message: int, sent: Sent, recvs: Iterable[int] | None, tensors: bool
    ) -> Scope | None:
        """A message of this context goes out; what it says of itself, None where the context is over.

        `recvs`: those behind its tensors; None where they are not known yet.
        """
        known = self.contexts.get(context) or self._open_with(context, sent.to)
        if known is None:
            return None
        known.known.add(sent.to)
        behind: tuple[int, ...] | None = ()
        if tensors:
            known.sends[message] = sent
            behind = None if recvs is None else known.behind(recvs, message)
        self._tell("SendRecorded", context)
        return _new(Scope, (context, message, behind))

    def record_recv(self, scope: Scope, source: int, tensors: bool) -> bool:
        """A message has come in. False where the context is over."""
        known = self.contexts.get(scope.context) or self._open_with(scope.context, source)
        if known is None:
            return False
        known.known.add(source)
        if tensors:
            known.recvs[scope.message] = _new(Received, (source, scope.behind))
        self._tell("RecvRecorded", scope.context)
        return True

    def unsent(self, scope: Scope) -> None:
        """A recorded message did not go out after all."""
        known = self.contexts.get(scope.context)
        if known is not None:
            known.sends.pop(scope.message, None)
            self._tell("SendTakenBack", scope.context)

    def gradients_held(self, context: int, count: int) -> None:
        """The worker now holds gradients for this many leaves in the context."""
        known = self.contexts.get(context)
        if known is not None:
            known.gradients = count
            self._tell("GradientsAccumulated", context)

    # -- ends
    def release(self, context: int, told: Iterable[int] = ()) -> Outcome:
        """Over: forget it here and tell the others known to have taken part, but those who hear of it otherwise."""
        self._bury(context)
        known = self.contexts.pop(context, None)
        if known is None:
            return [], []
        self._tell("ContextReleased", context)
        ended: Effects = [
            WalkEnded(context, walk, WalkFailed(context, walk, self.me, "RpcError", _RELEASED, EMPTY))
            for walk, state in known.walks.items()
            if state.tally
        ]
        others = [(worker, ReleaseContext(context)) for worker in sorted(known.known - {self.me, *told})]
        return [*ended, ForgetContext(context)], others

    def on_attending(self, source: int, context: int) -> Outcome:
        """A worker has a context that was begun here, and may not have it from us: it will hear of the end."""
        known = self.contexts.get(context)
        if known is None:
            return [], [(source, ReleaseContext(context))]
        known.known.add(source)
        self._tell("WorkerAttends", context)
        return [], []

    def came(self, worker: int, incarnation: int) -> None:
        """A worker is here, perhaps after another one under its id."""
        self.gone.pop(worker, None)
        self._over.discard(origin(worker, incarnation))

    def lost(self, worker: int, incarnation: int, reason: str) -> Outcome:
        """A worker is gone: walks that need it fail, contexts it began are over.

        Through it alone a context may have come here; so those who began such contexts are told who has them.
        """
        self.gone[worker] = reason
        self._over.add(origin(worker, incarnation))
        effects: Effects = []
        outbox: Outbox = []
        for context, known in list(self.contexts.items()):
            more, out = self.walks.lost(context, worker, reason)
            effects, outbox = effects + more, outbox + out
            told_by_it, began = worker in known.known, worker_of(context)
            known.known.discard(worker)
            self._tell("WorkerLost", context)
            if told_by_it and began not in (self.me, worker):
                outbox.append((began, Attending(context)))
            if origin_of(context) in self._over:
                more, out = self.release(context)
                effects, outbox = effects + more, outbox + out
        return effects, outbox

    # -- looking
    def table(self) -> Table:
        return {str(number): _context_row(number, context) for number, context in self.contexts.items()}

    def check(self) -> None:
        """Raise if the tables contradict each other."""
        for context in self.contexts.values():
            for number, walk in context.walks.items():
                assert walk.arrived <= walk.needed, "gradients for a send that takes no part"
                assert walk.needed <= context.sends.keys(), "a send takes part that was never recorded"
                assert number not in context.failed, "a failed walk goes on"
                assert not (walk.running and walk.questions), "a walk runs before it knows what takes part"

    # -- inside
    def _open_with(self, context: int, other: int) -> Context | None:
        """One that is new, unless it is only known from a worker that is gone: nobody would tell of its end."""
        if other in self.gone:
            self._bury(context)
        return self.open(context)

    def _bury(self, context: int) -> None:
        self._released[context] = None
        while len(self._released) > _TOMBSTONES:
            del self._released[next(iter(self._released))]

    def _tell(self, kind: str, context: int) -> None:
        if self.note is not None:
            self.note(kind, "contexts", str(context), partial(self._row, context))

    def _row(self, context: int) -> Row | None:
        known = self.contexts.get(context)
        return _context_row(context, known) if known else None


def _context_row(number: int, context: Context) -> Row:
    return {
        "context": number,
        "known": sorted(context.known),
        "sends": [{"message": message, "to": sent.to} for message, sent in context.sends.items()],
        "recvs": [{"message": message, "from": received.source} for message, received in context.recvs.items()],
        "passes": [
            {
                "pass": str(walk),
                "state": "running" if state.running else "discovering",
                "needed": len(state.needed),
                "arrived": len(state.arrived),
                "waiting": sum(len(q.open) for q in state.questions.values())
                + len(state.tally.open if state.tally else ()),
            }
            for walk, state in context.walks.items()
        ],
        "gradients": context.gradients,
    }
