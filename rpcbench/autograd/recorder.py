"""Distributed autograd on one worker: the graph behind the tables of `protocol.contexts`.

Remembers, per context, what was sent (edges into the local graph) and the gradients of this worker's leaves, which
never go into `.grad`. Answers the machine's questions: what lies behind a send, and what follows from gradients.
A pass runs on one thread at a time; gradients that arrive meanwhile queue. Several passes may run at once.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from rpcbench.agent.core import Agent
from rpcbench.autograd import graph
from rpcbench.autograd.regions import Fired, LocalPass
from rpcbench.protocol.contexts import ROOT
from rpcbench.protocol.effects import Effects
from rpcbench.protocol.node import Node
from rpcbench.wire.messages import EMPTY, Gradients, Scope, WalkFailed
from rpcbench.words.errors import RemoteError, RpcError, WorkerLostError
from rpcbench.words.futures import Future
from rpcbench.words.ids import Counter, Id, global_id

Edges = list["GradientEdge | None"]
Grads = list["torch.Tensor | None"]


@dataclass(slots=True)
class _Pass:
    """One backward pass, as far as it runs on this worker."""

    retain: bool
    local: LocalPass | None = None
    waiting: collections.deque[tuple[int, Grads]] = field(default_factory=collections.deque)
    busy: bool = False


@dataclass(slots=True)
class _Context:
    sends: dict[int, Edges] = field(default_factory=dict)
    gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    passes: dict[Id, _Pass] = field(default_factory=dict)


@dataclass(slots=True)
class _Begun:
    """A pass that began here: its roots, and who waits for its end."""

    edges: Edges
    seeds: Grads
    retain: bool
    done: Future[None]


class AutogradRecorder:
    """An agent's `Recorder`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._machine = agent.machine
        self._codec = agent.values.codec
        self._lock = threading.Lock()
        self._contexts: dict[int, _Context] = {}
        self._begun: dict[Id, _Begun] = {}
        self._messages = Counter()
        self._ids = Counter()
        self._walks = Counter()
        self._current: ContextVar[int | None] = ContextVar("rpcbench_context", default=None)

    # -- contexts
    def new_context(self) -> int:
        """A context that begins on this worker."""
        context = global_id(self._agent.id, self._ids.next())
        self._in_tables(lambda node: node.contexts.open(context) is not None, context)
        return context

    def current(self) -> int | None:
        return self._current.get()

    @contextlib.contextmanager
    def inside(self, context: int) -> Iterator[None]:
        token = self._current.set(context)
        try:
            yield
        finally:
            self._current.reset(token)

    def release(self, context: int) -> None:
        """The context is over, on all workers."""
        self._machine.feed(lambda node: node.outcome(node.contexts.release(context)))

    def gradients(self, context: int) -> dict[torch.Tensor, torch.Tensor]:
        """Gradients of this worker's leaves. RuntimeError for a context that is not there."""
        with self._lock:
            return dict(self._context(context).gradients)

    def is_valid(self, context: int) -> bool:
        with self._lock:
            return context in self._contexts

    def accumulate_leaves(self, context: int, leaves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add gradients of leaves to the context's own."""
        with self._lock:
            held = self._context(context).gradients
            for leaf, gradient in leaves:
                before = held.get(leaf)
                held[leaf] = gradient if before is None else before + gradient
            count = len(held)
        self._machine.ask(lambda node: node.contexts.gradients_held(context, count))

    def scale(self, context: int, leaves: Sequence[torch.Tensor], factor: float) -> None:
        """Multiply gradients of a context. Not in place: others may hold the same tensors."""
        with self._lock:
            held = self._context(context).gradients
            held.update((leaf, held[leaf] * factor) for leaf in leaves if leaf in held)

    # -- recording
    def sending(self, context: int, tensors: list[torch.Tensor], to: int) -> Scope | None:
        edges = graph.edges(tensors)
        recorded = any(edge is not None for edge in edges)
        message = self.record_send(context, to, recorded)
        if message is None:
            return None
        if recorded:
            with self._lock:
                self._contexts.setdefault(context, _Context()).sends[message] = edges
        return Scope(context, message)

    def received(self, scope: Scope, tensors: list[torch.Tensor], source: int) -> list[torch.Tensor]:
        recorded = any(tensor.requires_grad for tensor in tensors)
        if not self.record_recv(scope.context, scope.message, source, recorded) or not recorded:
            return tensors
        return graph.receive(tensors, scope.message)

    def record_send(self, context: int, to: int, tensors: bool) -> int | None:
        """Put a send into the tables; the message's number, or None where the context is over."""
        message = global_id(self._agent.id, self._messages.next())
        known = self._in_tables(lambda node: node.contexts.record_send(context, message, to, tensors), context)
        return message if known else None

    def record_recv(self, context: int, message: int, source: int, tensors: bool) -> bool:
        """Put a recv into the tables; False where the context is over."""
        return self._in_tables(lambda node: node.contexts.record_recv(context, message, source, tensors), context)

    def _in_tables(self, record: Callable[[Node], bool], context: int) -> bool:
        known = self._machine.ask(record)
        if known:
            with self._lock:
                self._contexts.setdefault(context, _Context())
        return known

    def unsent(self, scope: Scope) -> None:
        with self._lock:
            context = self._contexts.get(scope.context)
            if context is not None:
                context.sends.pop(scope.message, None)

    # -- a pass that begins here
    def backward(self, context: int, roots: list[torch.Tensor], retain: bool) -> Future[None]:
        """Begin a pass; the future ends with it. Errors of the roots are raised at once."""
        _check_roots(roots)
        with self._lock:
            self._context(context)
        edges = graph.edges(roots)
        walk = Id(self._agent.id, self._walks.next(), self._agent.incarnation)
        begun = _Begun(edges, [torch.ones_like(root) for root in roots], retain, Future())
        with self._lock:
            self._begun[walk] = begun
        recvs = list(graph.reach(edges).recvs)
        self._machine.feed(lambda node: node.outcome(node.contexts.begin(context, walk, recvs)))
        return begun.done

    def ended(self, context: int, walk: Id, failure: WalkFailed | None, source: int) -> None:
        with self._lock:
            begun = self._begun.pop(walk)
        if failure is None:
            begun.done.set_result(None)
        else:
            begun.done.set_exception(self._error(failure, source))

    def _error(self, failure: WalkFailed, source: int) -> Exception:
        """An error of (RpcError, the original type), so that both are caught."""
        original: Any = None
        if failure.body.payload:
            original = self._codec.decode(failure.body)
        if original is None and failure.type == WorkerLostError.__name__:
            return WorkerLostError(failure.text)
        error = _both(failure.text.splitlines()[0] if failure.text else failure.type, original)
        story = f"{failure.type} while gradients went back:\n{failure.text}"
        error.__cause__ = RemoteError(f"worker {source}", story)
        return error

    # -- the machine's questions
    def explore(self, context: int, walk: Id, message: int) -> None:
        with self._guard(context, walk, message):
            with self._lock:
                edges = self._context(context).sends[message]
            recvs = list(graph.reach(edges).recvs)
            self._machine.feed(lambda node: node.outcome(node.contexts.explored(context, walk, message, recvs)))

    def propagate(self, context: int, walk: Id) -> None:
        with self._lock:
            begun = self._begun[walk]
        self._arrive(context, walk, ROOT, begun.seeds, begun.retain)

    def accumulate(self, source: int, message: Gradients) -> None:
        with self._guard(message.context, message.walk, message.message):
            grads = self._codec.decode(message.body)
            self._arrive(message.context, message.walk, message.message, grads, message.retain)

    def forget(self, context: int, walk: Id | None) -> None:
        with self._lock:
            if walk is None:
                gone: Any = self._contexts.pop(context, None)
            else:
                held = self._contexts.get(context)
                gone = held.passes.pop(walk, None) if held else None
        del gone  # tensors are freed here, after the lock

    # -- running
    def _arrive(self, context: int, walk: Id, message: int, grads: Grads, retain: bool) -> None:
        """Gradients for one root of this worker's part; run now, or by the thread that runs the pass already."""
        with self._lock:
            held = self._contexts.get(context)
            if held is None:
                return
            state = held.passes.setdefault(walk, _Pass(retain))
            state.waiting.append((message, grads))
            if state.busy:
                return
            state.busy = True
        while True:
            with self._lock:
                if not state.waiting:
                    state.busy = False
                    return
                message, grads = state.waiting.popleft()
            with self._guard(context, walk, message):
                self._step(context, walk, state, message, grads)

    def _step(self, context: int, walk: Id, state: _Pass, message: int, grads: Grads) -> None:
        if state.local is None:
            state.local = LocalPass(self._roots(context, walk), state.retain)
        fired = state.local.arrive(message, grads)
        if state.local.complete:
            self.accumulate_leaves(context, state.local.leaves())
        sent = [(f.key, Gradients(context, walk, f.key, state.retain, self._body(f))) for f in fired]

        def feed(node: Node) -> Effects:
            recvs = {number: node.contexts.contexts[context].recvs[number] for number, _ in sent}
            effects, outbox = node.contexts.propagated(context, walk, message, list(recvs))
            return node.outcome((effects, outbox + [(recvs[number], gradients) for number, gradients in sent]))

        self._machine.feed(feed)

    def _body(self, fired: Fired) -> Any:
        return self._codec.encode([None if g is None else g.detach() for g in fired.filled()]).body

    def _roots(self, context: int, walk: Id) -> dict[int, Edges]:
        """All sends that take part, and the roots of the pass where it began here."""
        needed = self._machine.ask(lambda node: set(node.contexts.contexts[context].walks[walk].needed))
        with self._lock:
            sends = self._context(context).sends
            roots = {number: sends[number] for number in needed}
            if walk in self._begun:
                roots[ROOT] = self._begun[walk].edges
        return roots

    @contextlib.contextmanager
    def _guard(self, context: int, walk: Id, message: int) -> Iterator[None]:
        """Whatever a user's hook or function raises ends the pass, on the worker that began it too."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001  (it is the pass's error, whatever it is)
            failure = self._failure(context, walk, message, error)
            me = self._agent.id
            self._machine.feed(lambda n: n.outcome(n.contexts.failed(context, walk, message, failure, me)))

    def _failure(self, context: int, walk: Id, message: int, error: BaseException) -> WalkFailed:
        text = f"Error on Node {self._agent.id}: {error}\n" + "".join(traceback.format_exception(error))
        try:
            body = self._codec.encode(error).body if isinstance(error, Exception) else EMPTY
        except Exception:  # noqa: BLE001  (it cannot travel; its story does)
            body = EMPTY
        return WalkFailed(context, walk, message, type(error).__name__, text, body)

    def _context(self, context: int) -> _Context:
        held = self._contexts.get(context)
        if held is None:
            raise RuntimeError(f"Could not find autograd context with id: {context}; it is released, or not ours")
        return held


def _check_roots(roots: list[torch.Tensor]) -> None:
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"a root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError("a root does not have a valid gradient function.")


def _both(text: str, original: Any) -> Exception:
    """An exception of both kinds, where the original's class allows it."""
    if not isinstance(original, Exception) or isinstance(original, RpcError):
        return original if isinstance(original, RpcError) else RpcError(text)
    kind = type(original)
    try:
        both: Any = type(kind.__name__, (RpcError, kind), {"__module__": kind.__module__})
        made: Exception = both.__new__(both, text)
        made.args = (text,)
    except TypeError:
        return RpcError(text)
    return made
