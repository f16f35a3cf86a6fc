"""Distributed autograd contexts, and the backward passes over the messages of a context.

A context exists on every worker that took part, until the worker that began it releases it, or is lost. Several passes
may run over one context at once. A failure is sent to the root, and from each worker to its neighbours in the pass, so
no worker keeps half of one.
"""

# A pass runs from the recvs that its roots reach back to the leaves, in two phases.
#
#     root worker           worker 1               worker 2
#       Discover(7) ────────> Explore                              a question about each reached recv, to its sender,
#                             Discover(9) ─────────> Explore       which answers after all questions that it caused:
#       <────── Discovered(7) <─────── Discovered(9)               all sends behind it are found
#       Gradients(7) ───────> Accumulate                           gradients follow the same way; each worker reports
#                             Gradients(9) ────────> Accumulate    the send that has run, and the sends it fired
#       <─────────────────────────────────── Settled(9)
#       <── Settled(7, fired 9)                                    all gradients that were sent have run: it is over
#
# Discovery is a diffusing computation (Dijkstra and Scholten, 1980). With it every worker has the set of sends to wait
# for, so a call with an unused result cannot stall the pass. Most passes skip it: a message lists the sends behind it
# as long as these are few. Reports reach the root in any order, which the symmetric difference in `Tally` allows for.
# A `fast` pass skips it, too: each worker that receives gradients waits for all its sends of the context, and lists
# them in its first report. If the pass comes to rest and some sends got no gradients, it fails and names them.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from rpcbench.base.errors import RpcError
from rpcbench.base.ids import Id, Note, Row, Table, Tombstones, make_origin, make_row, origin_of, worker_of
from rpcbench.protocol import effects as fx
from rpcbench.protocol.effects import Effects, Outbox, Outcome, join_outcomes
from rpcbench.wire import messages as m

ROOT = -1
"""Takes the place of a send number for the roots, on the worker that began a pass."""
MOST_BEHIND = 16
"""The most sends that a message lists behind it; beyond that, the backward pass has to ask."""


class Sent(NamedTuple):
    """A message of the context that was sent: its receiver, and the label of its call."""

    to: int
    label: str


class Received(NamedTuple):
    """A message that was received: its sender, and the sends behind it, its own among them; None: too many."""

    source: int
    behind: tuple[int, ...] | None


@dataclass(slots=True)
class Question:
    """A question of the discovery that is not answered yet."""

    asker: int  # the worker that receives the answer
    open: set[int]  # recvs with questions that have to be answered first


@dataclass(slots=True)
class Tally:
    """The reports that the root has received, to detect the end of the pass."""

    open: set[int]  # sends with gradients sent and not reported as run, or reported in the other order
    settled: set[int] = field(default_factory=set)  # sends that have run
    awaited: dict[int, m.Awaited] = field(default_factory=dict)  # sends that workers wait for, in a fast pass

    def add_report(self, report: m.Settled) -> None:
        # A number that is named twice, as sent and as run, is removed, whichever report comes first.
        self.open ^= {report.message, *report.fired}
        self.settled.add(report.message)
        for one in report.awaited:
            self.awaited[one.message] = one

    def has_unreported(self, worker: int) -> bool:
        """Return whether gradients were sent to this worker that it has not reported as run."""
        return any(worker_of(number) == worker for number in self.open)

    def unused_sends(self) -> list[m.Awaited]:
        """Return the sends that got no gradients, after the pass has come to rest."""
        return [one for number, one in sorted(self.awaited.items()) if number not in self.settled]


@dataclass(slots=True)
class BackwardPass:
    """This worker's part of one backward pass."""

    retain: bool = False  # keep the graph's buffers
    fast: bool = False
    plan: tuple[int, ...] = ()  # all sends that take part, if the messages listed them
    needed: set[int] = field(default_factory=set)  # sends of this worker that take part
    tally: Tally | None = None  # on the root only
    # recv → the send (or ROOT) from which it was reached first
    discovered_from: dict[int, int] = field(default_factory=dict)
    questions: dict[int, Question] = field(default_factory=dict)  # by the send that each is about
    arrived: set[int] = field(default_factory=set)  # sends with gradients here
    ran: int = 0
    running: bool = False  # discovery is over


@dataclass(slots=True)
class Context:
    """One worker's record of one context."""

    known: set[int] = field(default_factory=set)  # workers with which messages of the context were exchanged
    sends: dict[int, Sent] = field(default_factory=dict)
    recvs: dict[int, Received] = field(default_factory=dict)
    backward_passes: dict[Id, BackwardPass] = field(default_factory=dict)
    ran: dict[Id, set[int]] = field(default_factory=dict)  # passes that are over here: neighbours, to notify on failure
    failed: set[Id] = field(default_factory=set)  # passes that must not begin again here
    gradients: int = 0  # leaves with a gradient

    def sends_behind(self, recvs: Iterable[int], *more: int) -> tuple[int, ...] | None:
        """Return the sends behind all of these; None if too many, not listed, or a recv of another context."""
        return union_of_sends([one.behind if (one := self.recvs.get(recv)) else None for recv in recvs], *more)


def union_of_sends(parts: Iterable[tuple[int, ...] | None], *more: int) -> tuple[int, ...] | None:
    """Return all sends of these; None if they are too many or not listed."""
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

Tell = Callable[[str, int], None]
Name = Callable[[int], str]


class BackwardPasses:
    """All backward passes on one worker. Methods return `(effects, outbox)`."""

    def __init__(self, me: int, contexts: dict[int, Context], gone: dict[int, str], tell: Tell, name: Name) -> None:
        self.me = me
        self.gone = gone
        self._contexts = contexts
        self._tell = tell
        self._name = name

    def begin_pass(self, context: int, pass_id: Id, recvs: Iterable[int], retain: bool, fast: bool) -> Outcome:
        """Begin a backward pass on this worker; `recvs` are those that its roots reach."""
        known, recvs = self._contexts[context], list(recvs)
        plan = None if fast else known.sends_behind(recvs)
        state = known.backward_passes[pass_id] = BackwardPass(retain, fast, plan or (), tally=Tally({ROOT}))
        if plan is None and not fast:
            state.questions[ROOT] = Question(self.me, set())
            return self._send_questions(context, pass_id, ROOT, recvs)
        state.needed = set(known.sends) if fast else known.sends.keys() & state.plan
        state.running = True
        self._tell("WalkBegan", context)
        return [fx.Propagate(context, pass_id)], []

    # -- discovery
    def on_discover(self, source: int, message: m.Discover) -> Outcome:
        known = self._contexts.get(message.context)
        if known is None or message.message not in known.sends:
            return self._refuse_message(source, message, "the context is released, or never sent this message")
        if message.pass_id in known.failed:
            return self._refuse_message(source, message, "this backward pass has failed already")
        pass_id = known.backward_passes.setdefault(message.pass_id, BackwardPass())
        pass_id.needed.add(message.message)
        pass_id.questions[message.message] = Question(source, set())
        self._tell("SendDiscovered", message.context)
        return [fx.Explore(message.context, message.pass_id, message.message)], []

    def graph_explored(self, context: int, pass_id: Id, message: int, recvs: Iterable[int]) -> Outcome:
        """Continue the discovery with the result of `Explore`."""
        if self.find_pass(context, pass_id) is None:
            return [], []
        return self._send_questions(context, pass_id, message, recvs)

    def on_discovered(self, message: m.Discovered) -> Outcome:
        state = self.find_pass(message.context, message.pass_id)
        asker = state.discovered_from.get(message.message) if state else None
        if state is None or asker not in state.questions:
            return [], []
        state.questions[asker].open.discard(message.message)
        return self._answer_if_explored(message.context, message.pass_id, state, asker)

    def _send_questions(self, context: int, pass_id: Id, message: int, recvs: Iterable[int]) -> Outcome:
        known, state = self._contexts[context], self._contexts[context].backward_passes[pass_id]
        new = [recv for recv in recvs if recv not in state.discovered_from]
        if not known.recvs.keys() >= set(new):
            return self._fail_pass(context, pass_id, _FOREIGN)
        for recv in new:
            state.discovered_from[recv] = message
            state.questions[message].open.add(recv)
        effects, outbox = self._answer_if_explored(context, pass_id, state, message)
        return effects, [(known.recvs[recv].source, m.Discover(context, pass_id, recv)) for recv in new] + outbox

    def _answer_if_explored(self, context: int, pass_id: Id, state: BackwardPass, message: int) -> Outcome:
        """Answer the question about `message` if all questions that it caused are answered."""
        outcome: Outcome = ([], [])
        if not state.questions[message].open:
            question = state.questions.pop(message)
            if message == ROOT:
                state.running = True
                outcome = [fx.Propagate(context, pass_id)], []
            else:
                outcome = [], [(question.asker, m.Discovered(context, pass_id, message))]
        self._tell("WalkMoved", context)
        return outcome

    # -- gradients
    def on_gradients(self, source: int, message: m.Gradients) -> Outcome:
        effects, outbox = self.on_settled(message.settled) if message.settled else ([], [])
        if refusal := self._take_gradients(message):
            return join_outcomes([(effects, outbox), self._refuse_message(source, message, refusal)])
        self._tell("GradientsArrived", message.context)
        return [*effects, fx.Accumulate(source, message)], outbox

    def _take_gradients(self, message: m.Gradients) -> str | None:
        """Note that the gradients have arrived; return the reason if they may not be used."""
        known = self._contexts.get(message.context)
        if known is None or message.pass_id in known.failed:
            return "the context is released, or this backward pass has failed already"
        state = known.backward_passes.get(message.pass_id)
        if state is None:  # a pass without discovery
            needed = set(known.sends) if message.fast else known.sends.keys() & message.plan
            state = BackwardPass(message.retain, message.fast, message.plan, needed)
        if message.message not in state.needed or message.message in state.arrived:
            return "no backward pass waits for these gradients"
        known.backward_passes[message.pass_id] = state
        state.running, state.retain = True, message.retain
        state.arrived.add(message.message)
        return None

    def gradients_propagated(self, context: int, pass_id: Id, message: int, fired: Mapping[int, m.Body]) -> Outcome:
        """Send the gradients of the recvs in `fired`, and report that a send, or the roots, has run."""
        known = self._contexts.get(context)
        state = None if known is None else known.backward_passes.get(pass_id)
        if known is None or state is None:
            return [], []
        if not known.recvs.keys() >= fired.keys():
            return self._fail_pass(context, pass_id, _FOREIGN)
        awaited: tuple[m.Awaited, ...] = ()
        if state.fast and not state.ran:
            awaited = tuple([m.Awaited(number, *known.sends[number]) for number in state.needed])
        report: m.Settled | None = m.Settled(context, pass_id, message, tuple(fired), awaited)
        state.ran += 1
        outbox: Outbox = []
        for recv, body in fired.items():
            state.discovered_from[recv] = message
            to = known.recvs[recv].source
            # Gradients for the root worker carry the report, which saves a message.
            rides = report if to == pass_id.worker != self.me else None
            outbox.append((to, m.Gradients(context, pass_id, recv, state.retain, state.fast, state.plan, rides, body)))
            report = None if rides else report
        if fired:
            self._tell("GradientsSent", context)
        if state.tally is None:
            outbox += [(pass_id.worker, report)] if report else []
            return self._finish_if_done(context, pass_id, known, state), outbox
        assert report is not None  # the root's own report rides with no message
        effects, more = self.on_settled(report)
        return effects, outbox + more

    def on_settled(self, report: m.Settled) -> Outcome:
        """Add a worker's report to the tally; runs on the root worker."""
        state = self.find_pass(report.context, report.pass_id)
        if state is None or (tally := state.tally) is None:
            return [], []
        tally.add_report(report)
        # The report may be the first to name a worker that was lost before.
        for worker, why in self.gone.items():
            if tally.has_unreported(worker):
                return self._fail_for_loss(report.context, report.pass_id, f"{why}, while gradients were in transit")
        if tally.open:
            self._tell("GradientsRan", report.context)
            return [], []
        if unused := tally.unused_sends():
            return self._fail_unused(report, unused)
        del self._contexts[report.context].backward_passes[report.pass_id]
        self._tell("WalkFinished", report.context)
        return [fx.PassEnded(report.context, report.pass_id, None), fx.ForgetPass(report.context, report.pass_id)], []

    def _finish_if_done(self, context: int, pass_id: Id, known: Context, state: BackwardPass) -> Effects:
        """End this worker's part of the pass if all its sends that take part have run."""
        if state.ran < len(state.needed):
            self._tell("GradientsRan", context)
            return []
        del known.backward_passes[pass_id]
        known.ran[pass_id] = self._neighbour_ids(known, state)
        self._tell("WalkFinished", context)
        return [fx.ForgetPass(context, pass_id)]

    def _fail_unused(self, report: m.Settled, unused: list[m.Awaited]) -> Outcome:
        calls = ", ".join(
            f"{self._name(worker_of(one.message))} to {self._name(one.to)} ({one.label})" for one in unused
        )
        text = (
            f"backward of autograd context {report.context} in mode 'fast' needs gradients for every message that was "
            f"sent, and these got none: {calls}. The results of some of them were not used: leave those calls out of "
            "the context, or use mode='smart'"
        )
        return self._fail_pass(report.context, report.pass_id, text)

    # -- failures
    def pass_failed(self, failure: m.BackwardFailed, source: int | None = None) -> Outcome:
        """Fail a pass here, or because `source` has reported a failure, and report it to the neighbours once."""
        context, pass_id = failure.context, failure.pass_id
        known = self._contexts.get(context)
        if known is None or pass_id in known.failed:  # each worker forwards a failure once, so the flooding ends
            return [], []
        known.failed.add(pass_id)
        state = known.backward_passes.pop(pass_id, None)
        neighbours = known.ran.pop(pass_id, set()) if state is None else self._neighbour_ids(known, state)
        self._tell("BackwardFailed", context)
        ended: Effects = [fx.PassEnded(context, pass_id, failure)] if state and state.tally else []
        others = {pass_id.worker, *neighbours} - {self.me, source, *self.gone}
        return [*ended, fx.ForgetPass(context, pass_id)], [(other, failure) for other in sorted(others)]

    def _fail_pass(self, context: int, pass_id: Id, text: str, kind: str = "RpcError") -> Outcome:
        return self.pass_failed(m.BackwardFailed(context, pass_id, self.me, kind, text, m.EMPTY))

    def fail_lost_worker(self, context: int, worker: int, reason: str) -> Outcome:
        """Fail the passes over a context in which a lost worker takes part, as far as this worker has a record."""
        known = self._contexts[context]
        outcomes = []
        for pass_id, state in list(known.backward_passes.items()):
            owes = state.tally is not None and state.tally.has_unreported(worker)
            if owes or worker == pass_id.worker or worker in self._neighbour_ids(known, state):
                outcomes.append(self._fail_for_loss(context, pass_id, reason))
        return join_outcomes(outcomes)

    def _fail_for_loss(self, context: int, pass_id: Id, reason: str) -> Outcome:
        text = f"backward of autograd context {context} needs a worker that was lost: {reason}"
        return self._fail_pass(context, pass_id, text, "WorkerLostError")

    def _neighbour_ids(self, known: Context, state: BackwardPass) -> set[int]:
        """Return the workers that exchange questions or gradients of this pass with this one."""
        above = {known.sends[send].to for send in state.needed}
        return above | {known.recvs[recv].source for recv in state.discovered_from}

    def _refuse_message(self, source: int, message: m.Discover | m.Gradients, reason: str) -> Outcome:
        return [], [(source, m.BackwardFailed(message.context, message.pass_id, self.me, "RpcError", reason, m.EMPTY))]

    # -- observation
    def participating_sends(self, context: int, pass_id: Id) -> tuple[set[int], bool]:
        """Return this worker's sends that take part, and whether the graph is retained. RpcError if it is over."""
        state = self.find_pass(context, pass_id)
        if state is None:
            raise RpcError(f"the backward pass {pass_id} of autograd context {context} is over")
        return set(state.needed), state.retain

    def find_pass(self, context: int, pass_id: Id) -> BackwardPass | None:
        known = self._contexts.get(context)
        return None if known is None else known.backward_passes.get(pass_id)


_new = tuple.__new__  # saves one call against the named tuple's own constructor
_RELEASED = "the autograd context was released before its backward pass had ended"


class Contexts:
    """All contexts of one worker. Methods return `(effects, outbox)`. `name` maps a worker's id to its name."""

    def __init__(self, me: int, name: Name = lambda worker: f"worker {worker}") -> None:
        self.note: Note | None = None
        self.me = me
        self.contexts: dict[int, Context] = {}
        self.gone: dict[int, str] = {}  # lost worker → reason
        self._ended_origins: set[int] = set()  # origins (see `base.ids`) of contexts that lost workers began
        self.backward_passes = BackwardPasses(me, self.contexts, self.gone, self._report_context, name)
        self._released = Tombstones()

    # -- recording
    def open_context(self, context: int) -> Context | None:
        """Return the context, made if it is new here; None once it is over: late calls cannot revive it."""
        known = self.contexts.get(context)
        if known is not None:
            return known
        if context in self._released or origin_of(context) in self._ended_origins:
            return None
        known = self.contexts[context] = Context()
        self._report_context("ContextCreated", context)
        return known

    def record_send(
        self, context: int, message: int, sent: Sent, recvs: Iterable[int] | None, tensors: bool
    ) -> m.Scope | None:
        """Record a message about to be sent, with the `recvs` behind its tensors (None: unknown); return its scope."""
        known = self.contexts.get(context) or self._open_with(context, sent.to)
        if known is None:
            return None
        known.known.add(sent.to)
        behind: tuple[int, ...] | None = ()
        if tensors:
            known.sends[message] = sent
            behind = None if recvs is None else known.sends_behind(recvs, message)
        self._report_context("SendRecorded", context)
        return _new(m.Scope, (context, message, behind))

    def record_recv(self, scope: m.Scope, source: int, tensors: bool) -> bool:
        """Record a message that has arrived. False if the context is over."""
        known = self.contexts.get(scope.context) or self._open_with(scope.context, source)
        if known is None:
            return False
        known.known.add(source)
        if tensors:
            known.recvs[scope.message] = _new(Received, (source, scope.behind))
        self._report_context("RecvRecorded", scope.context)
        return True

    def withdraw_send(self, scope: m.Scope) -> None:
        """Remove a recorded message that was not sent after all."""
        known = self.contexts.get(scope.context)
        if known is not None:
            known.sends.pop(scope.message, None)
            self._report_context("SendTakenBack", scope.context)

    def record_gradient_count(self, context: int, count: int) -> None:
        """Note that the worker now holds gradients for this many leaves in the context."""
        known = self.contexts.get(context)
        if known is not None:
            known.gradients = count
            self._report_context("GradientsAccumulated", context)

    # -- ends of contexts
    def release_context(self, context: int, notified: Iterable[int] = ()) -> Outcome:
        """End a context here, and at the workers known to have taken part, except those in `notified`."""
        self._released.add_tombstone(context)
        known = self.contexts.pop(context, None)
        if known is None:
            return [], []
        self._report_context("ContextReleased", context)
        ended: Effects = [
            fx.PassEnded(context, pass_id, m.BackwardFailed(context, pass_id, self.me, "RpcError", _RELEASED, m.EMPTY))
            for pass_id, state in known.backward_passes.items()
            if state.tally
        ]
        others = [(worker, m.ReleaseContext(context)) for worker in sorted(known.known - {self.me, *notified})]
        return [*ended, fx.ForgetContext(context)], others

    def on_context_participant(self, source: int, context: int) -> Outcome:
        """Note that a worker has a context that began here, so that it is sent the release."""
        known = self.contexts.get(context)
        if known is None:
            return [], [(source, m.ReleaseContext(context))]
        known.known.add(source)
        self._report_context("WorkerAttends", context)
        return [], []

    def process_joined(self, worker: int, incarnation: int) -> None:
        """Admit a new process, perhaps under the id of a lost one."""
        self.gone.pop(worker, None)
        self._ended_origins.discard(make_origin(worker, incarnation))

    def worker_lost(self, worker: int, incarnation: int, reason: str) -> Outcome:
        """Fail the passes that need a lost worker, and end the contexts that it began."""
        self.gone[worker] = reason
        self._ended_origins.add(make_origin(worker, incarnation))
        outcomes: list[Outcome] = []
        for context, known in list(self.contexts.items()):
            outcomes.append(self.backward_passes.fail_lost_worker(context, worker, reason))
            is_participant, began = worker in known.known, worker_of(context)
            known.known.discard(worker)
            self._report_context("WorkerLost", context)
            # This worker may have received the context only from the lost one, so its origin may have no record of us.
            if is_participant and began not in (self.me, worker):
                outcomes.append(([], [(began, m.ContextParticipant(context))]))
            if origin_of(context) in self._ended_origins:
                outcomes.append(self.release_context(context))
        return join_outcomes(outcomes)

    # -- observation
    def contexts_table(self) -> Table:
        return {str(number): _context_row(number, context) for number, context in self.contexts.items()}

    def check_contexts(self) -> None:
        for context in self.contexts.values():
            for number, pass_id in context.backward_passes.items():
                assert pass_id.arrived <= pass_id.needed, "gradients for a send that takes no part"
                assert pass_id.needed <= context.sends.keys(), "a send takes part that was never recorded"
                assert number not in context.failed, "a failed pass goes on"
                assert not (pass_id.running and pass_id.questions), "a pass runs before its discovery has ended"

    # -- internals
    def _open_with(self, context: int, other: int) -> Context | None:
        """Open a context that is new here, by a message to or from `other`."""
        if other in self.gone:  # a late message of a lost worker: no worker would send us the release
            self._released.add_tombstone(context)
        return self.open_context(context)

    def _report_context(self, kind: str, context: int) -> None:
        if self.note is not None:
            self.note(kind, "contexts", str(context), partial(make_row, self.contexts, context, _context_row))


def _context_row(number: int, context: Context) -> Row:
    return {
        "context": number,
        "known": sorted(context.known),
        "sends": [{"message": message, "to": sent.to} for message, sent in context.sends.items()],
        "recvs": [{"message": message, "from": received.source} for message, received in context.recvs.items()],
        "passes": [
            {
                "pass": str(pass_id),
                "state": "running" if state.running else "discovering",
                "needed": len(state.needed),
                "arrived": len(state.arrived),
                "waiting": sum(len(q.open) for q in state.questions.values())
                + len(state.tally.open if state.tally else ()),
            }
            for pass_id, state in context.backward_passes.items()
        ],
        "gradients": context.gradients,
    }
