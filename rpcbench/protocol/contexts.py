"""Distributed autograd contexts: which messages a forward pass has sent and received, and walks back over them.

A context lives on every worker that took part. A backward pass is a walk: it has an id, several of one context may
overlap, and it goes over the recorded messages twice.

    discovery   from the roots: "the send with this number takes part" goes to each sender whose recv is reached;
                it answers when all that lies behind is known. Then every worker knows which sends to wait for, so a
                call whose result nobody used cannot stall the pass.
    backward    gradients go the same way; a worker answers for those of one send when all that followed from them,
                there and further on, is settled.

Both are diffusing computations: every question gets one answer, after the questions it caused have got theirs. The
answers form a tree that ends at the worker which began the walk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rpcbench.protocol.effects import (
    Accumulate,
    Effects,
    Explore,
    ForgetContext,
    ForgetWalk,
    Propagate,
    WalkEnded,
)  # fmt: skip
from rpcbench.protocol.rrefs import Outbox
from rpcbench.wire.messages import (
    EMPTY,
    Discover,
    Discovered,
    Gradients,
    ReleaseContext,
    Settled,
    WalkFailed,
)  # fmt: skip
from rpcbench.words.events import Note, Row, Table
from rpcbench.words.ids import Id, worker_of

ROOT = -1
"""Stands for the send number of the roots, on the worker that began a walk."""
_TOMBSTONES = 4096
_RELEASED = "the autograd context was released before its backward pass had ended"
_FOREIGN = (
    "the roots depend on a tensor that was received in another autograd context: make all calls of a pass in one "
    "context, or detach() that tensor"
)

Outcome = tuple[Effects, Outbox]


@dataclass(slots=True)
class Question:
    """One question that is not answered yet: who asked, and which questions of ours it waits for."""

    asker: int
    open: set[int]


@dataclass(slots=True)
class Walk:
    """This worker's part of one backward pass. Keys of questions are send numbers, or ROOT."""

    needed: set[int] = field(default_factory=set)
    asked: dict[int, int] = field(default_factory=dict)  # recv number -> our question that reached it first
    questions: dict[int, Question] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    running: bool = False


@dataclass(slots=True)
class Context:
    """What one worker knows of one context."""

    known: set[int] = field(default_factory=set)
    sends: dict[int, int] = field(default_factory=dict)
    recvs: dict[int, int] = field(default_factory=dict)
    walks: dict[Id, Walk] = field(default_factory=dict)
    failed: set[Id] = field(default_factory=set)  # walks that must not begin again here
    gradients: int = 0


class Contexts:
    """All contexts of one worker. Methods return `(effects, outbox)`."""

    def __init__(self, me: int) -> None:
        self.note: Note | None = None
        self.me = me
        self.contexts: dict[int, Context] = {}
        self.gone: set[int] = set()
        self._released: dict[int, None] = {}

    # -- recording
    def open(self, context: int) -> Context | None:
        """The context, made if it is new here; None once it is over: late calls cannot revive it."""
        if context in self._released or worker_of(context) in self.gone:
            return None
        known = self.contexts.get(context)
        if known is None:
            known = self.contexts[context] = Context()
            self._tell("ContextCreated", context)
        return known

    def record_send(self, context: int, message: int, to: int, tensors: bool) -> bool:
        """A message of this context goes to `to`. False where the context is released."""
        known = self.open(context)
        if known is None:
            return False
        known.known.add(to)
        if tensors:
            known.sends[message] = to
        self._tell("SendRecorded", context)
        return True

    def record_recv(self, context: int, message: int, source: int, tensors: bool) -> bool:
        known = self.open(context)
        if known is None:
            return False
        known.known.add(source)
        if tensors:
            known.recvs[message] = source
        self._tell("RecvRecorded", context)
        return True

    def gradients_held(self, context: int, count: int) -> None:
        """The worker now holds gradients for this many leaves in the context."""
        known = self.contexts.get(context)
        if known is not None:
            known.gradients = count
            self._tell("GradientsAccumulated", context)

    # -- walking
    def begin(self, context: int, walk: Id, recvs: Iterable[int]) -> Outcome:
        """Begin a backward pass here; `recvs` are those its roots reach."""
        self.contexts[context].walks[walk] = Walk(questions={ROOT: Question(self.me, set())})
        return self._ask(context, walk, ROOT, recvs)

    def on_discover(self, source: int, message: Discover) -> Outcome:
        known = self.contexts.get(message.context)
        if known is None or message.message not in known.sends:
            return [], [(source, _failed(message, "the context is released, or never sent this message"))]
        if message.walk in known.failed:
            return [], [(source, _failed(message, "this backward pass has failed already"))]
        walk = known.walks.setdefault(message.walk, Walk())
        walk.needed.add(message.message)
        walk.questions[message.message] = Question(source, set())
        self._tell("SendDiscovered", message.context)
        return [Explore(message.context, message.walk, message.message)], []

    def explored(self, context: int, walk: Id, message: int, recvs: Iterable[int]) -> Outcome:
        """The answer to `Explore`."""
        if self._walk(context, walk) is None:
            return [], []
        return self._ask(context, walk, message, recvs)

    def on_discovered(self, message: Discovered) -> Outcome:
        return self._closed(message.context, message.walk, message.message)

    def on_gradients(self, source: int, message: Gradients) -> Outcome:
        walk = self._walk(message.context, message.walk)
        if walk is None or message.message not in walk.needed or message.message in walk.arrived:
            return [], [(source, _failed(message, "no backward pass waits for these gradients"))]
        walk.running = True
        walk.arrived.add(message.message)
        walk.questions[message.message] = Question(source, set())
        self._tell("GradientsArrived", message.context)
        return [Accumulate(source, message)], []

    def propagated(self, context: int, walk: Id, message: int, recvs: Iterable[int]) -> Outcome:
        """Gradients for a send (or the roots) have run; those of `recvs` go out now."""
        state = self._walk(context, walk)
        if state is None:
            return [], []
        for recv in recvs:
            state.asked[recv] = message
            state.questions[message].open.add(recv)
        return self._settle(context, walk, message)

    def on_settled(self, message: Settled) -> Outcome:
        return self._closed(message.context, message.walk, message.message)

    def failed(self, context: int, walk: Id, message: int, failure: WalkFailed, source: int) -> Outcome:
        """What lies behind this question of ours, or its own work here, went wrong: the asker is told."""
        state = self._walk(context, walk)
        if state is None:
            return [], []
        asked = state.questions
        del self.contexts[context].walks[walk]
        self.contexts[context].failed.add(walk)
        self._tell("WalkFailed", context)
        effects: Effects = [ForgetWalk(context, walk)]
        if ROOT in asked:
            return [*effects, WalkEnded(context, walk, failure, source)], []
        return effects, [(q.asker, failure._replace(message=number)) for number, q in asked.items()]

    def on_failed(self, source: int, message: WalkFailed) -> Outcome:
        state = self._walk(message.context, message.walk)
        if state is None:
            return [], []
        return self.failed(message.context, message.walk, message.message, message, source)

    # -- ends
    def release(self, context: int) -> Outcome:
        """Over: forget it here and tell the workers known to have taken part."""
        self._released[context] = None
        while len(self._released) > _TOMBSTONES:
            del self._released[next(iter(self._released))]
        known = self.contexts.pop(context, None)
        if known is None:
            return [], []
        self._tell("ContextReleased", context)
        ended: Effects = [
            WalkEnded(context, walk, WalkFailed(context, walk, ROOT, "RuntimeError", _RELEASED, EMPTY), self.me)
            for walk, state in known.walks.items()
            if ROOT in state.questions
        ]
        others = [(worker, ReleaseContext(context)) for worker in sorted(known.known - {self.me})]
        return [*ended, ForgetContext(context)], others

    def lost(self, worker: int, failure: WalkFailed, members: Iterable[int]) -> Outcome:
        """A worker is gone: walks that need it fail, contexts it began are over.

        Through it alone a context may have come to others; so all `members` will hear of the end of those begun here.
        """
        self.gone.add(worker)
        effects: Effects = []
        outbox: Outbox = []
        for context, known in list(self.contexts.items()):
            for walk, state in list(known.walks.items()):
                questions = state.questions.values()
                needs = any(known.recvs.get(recv) == worker for q in questions for recv in q.open)
                if needs or any(q.asker == worker for q in questions):
                    told = failure._replace(context=context, walk=walk)
                    more, out = self.failed(context, walk, ROOT, told, worker)
                    effects, outbox = effects + more, outbox + out
            known.known.discard(worker)
            if worker_of(context) == self.me:
                known.known.update(set(members) - {self.me})
            self._tell("WorkerLost", context)
            if worker_of(context) == worker:
                more, out = self.release(context)
                effects, outbox = effects + more, outbox + out
        return effects, outbox

    # -- looking
    def table(self) -> Table:
        return {str(number): _row(number, context) for number, context in self.contexts.items()}

    def check(self) -> None:
        """Raise if the tables contradict each other."""
        for context in self.contexts.values():
            for walk in context.walks.values():
                assert walk.arrived <= walk.needed, "gradients for a send that takes no part"

    # -- inside
    def _walk(self, context: int, walk: Id) -> Walk | None:
        known = self.contexts.get(context)
        return None if known is None else known.walks.get(walk)

    def _ask(self, context: int, walk: Id, message: int, recvs: Iterable[int]) -> Outcome:
        known, state = self.contexts[context], self.contexts[context].walks[walk]
        new = [recv for recv in recvs if recv not in state.asked]
        if not known.recvs.keys() >= set(new):
            return self.failed(context, walk, message, _failed(Discover(context, walk, message), _FOREIGN), self.me)
        for recv in new:
            state.asked[recv] = message
            state.questions[message].open.add(recv)
        effects, outbox = self._settle(context, walk, message)
        return effects, [(known.recvs[recv], Discover(context, walk, recv)) for recv in new] + outbox

    def _closed(self, context: int, walk: Id, recv: int) -> Outcome:
        """One question of ours is answered."""
        state = self._walk(context, walk)
        if state is None or recv not in state.asked:
            return [], []
        message = state.asked[recv]
        if message not in state.questions:
            return [], []
        state.questions[message].open.discard(recv)
        return self._settle(context, walk, message)

    def _settle(self, context: int, walk: Id, message: int) -> Outcome:
        """Answer the question about `message` if all it waited for is answered."""
        walks = self.contexts[context].walks
        state = walks[walk]
        outcome: Outcome = ([], [])
        if not state.questions[message].open:
            root = message == ROOT
            outcome = self._root_settled(context, walk, state) if root else self._answer(context, walk, state, message)
        self._tell("WalkMoved" if walk in walks else "WalkFinished", context)
        return outcome

    def _answer(self, context: int, walk: Id, state: Walk, message: int) -> Outcome:
        question = state.questions.pop(message)
        answer = Settled if message in state.arrived else Discovered
        outbox: Outbox = [(question.asker, answer(context, walk, message))]
        return self._finish(context, walk, state), outbox

    def _root_settled(self, context: int, walk: Id, state: Walk) -> Outcome:
        if not state.running:
            state.running = True
            return [Propagate(context, walk)], []
        del state.questions[ROOT]
        ended: Effects = [WalkEnded(context, walk, None, self.me)]
        return ended + self._finish(context, walk, state), []

    def _finish(self, context: int, walk: Id, state: Walk) -> Effects:
        if not state.running or state.questions or state.arrived != state.needed:
            return []
        del self.contexts[context].walks[walk]
        return [ForgetWalk(context, walk)]

    def _tell(self, kind: str, context: int) -> None:
        if self.note is not None:
            known = self.contexts.get(context)
            self.note(kind, "contexts", str(context), _row(context, known) if known else None)


def _failed(question: Discover | Gradients, reason: str) -> WalkFailed:
    return WalkFailed(question.context, question.walk, question.message, "RuntimeError", reason, EMPTY)


def _row(number: int, context: Context) -> Row:
    return {
        "context": number,
        "known": sorted(context.known),
        "sends": [{"message": message, "to": to} for message, to in context.sends.items()],
        "recvs": [{"message": message, "from": source} for message, source in context.recvs.items()],
        "passes": [
            {
                "pass": str(walk),
                "state": "running" if state.running else "discovering",
                "needed": len(state.needed),
                "arrived": len(state.arrived),
                "waiting": sum(len(q.open) for q in state.questions.values()),
            }
            for walk, state in context.walks.items()
        ],
        "gradients": context.gradients,
    }
