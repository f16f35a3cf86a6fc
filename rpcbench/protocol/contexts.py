"""Distributed autograd contexts: which messages a forward pass has sent and received.

A context lives on every worker that took part, until the one that began it releases it, or is gone. Each message says
which sends lie behind it, as long as these are few; so most backward passes know what takes part before they begin.
Several passes may go back over one context at once: see `walks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from rpcbench.base.events import Note, Row, Table
from rpcbench.base.ids import origin, origin_of, worker_of
from rpcbench.protocol.effects import Effects, ForgetContext, WalkEnded
from rpcbench.protocol.records import Context, Received, Sent
from rpcbench.protocol.rrefs import Outbox
from rpcbench.protocol.walks import Name, Outcome, Walks
from rpcbench.wire.messages import EMPTY, Attending, ReleaseContext, Scope, WalkFailed

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
        return {str(number): _row(number, context) for number, context in self.contexts.items()}

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
        return _row(context, known) if known else None


def _row(number: int, context: Context) -> Row:
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
