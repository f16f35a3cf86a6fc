"""Backward passes over the recorded messages of one worker: walks from the recvs that the roots reach, back to leaves.

    discovery   "the send with this number takes part" goes to each sender whose recv is reached; it answers when all
                that lies behind is known. So every worker knows which sends to wait for, and a call whose result nobody
                used cannot stall the pass. Left out where the messages themselves told what lies behind them.
    gradients   go the same way. Each worker tells the root which send it has run and where it sent gradients then. When
                all that were sent have run, in whatever order the root hears of it, the pass is over.

A `fast` walk asks nothing: whoever gets gradients waits for all its sends of the context, and says which these are. If
the pass comes to rest and some got none, it fails and names them.

Discovery is a diffusing computation: every question gets one answer, after the questions it caused have got theirs.
A failure goes to the root, and from each worker to its neighbours in the walk, so nobody keeps half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rpcbench.base.errors import RpcError
from rpcbench.base.ids import Id, worker_of
from rpcbench.protocol.effects import Accumulate, Effects, Explore, ForgetWalk, Propagate, WalkEnded
from rpcbench.protocol.records import ROOT, Context, Question, Tally, Walk
from rpcbench.protocol.rrefs import Outbox
from rpcbench.wire.messages import EMPTY, Awaited, Body, Discover, Discovered, Gradients, Settled, WalkFailed

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
