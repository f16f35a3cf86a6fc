"""The record of distributed autograd on one worker: each context's sends, recvs and gradients. `engine` runs over it.

Guarantees
- Messages are recorded in every grad mode.
- The record of a context is made under the protocol's lock and freed after it, so a late message cannot revive the
  record of a released context.
- A call that is made without grad mode (`no_grad`, `inference_mode`) runs without it on the other side.
- Autocast is not sent along, as in torch, unless requested: for one call (`same_modes`), or for all calls of a member
  (`same_modes=True` of a Cluster or of the options of `init_rpc`).
- `accumulate` adds gradients over contexts (micro-batches with a context each) exactly once on each worker, however
  many paths lead to it. Releasing the context of the sum releases it on all these workers.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import torch

from rpcbench.autograd import graph
from rpcbench.autograd.engine import Engine
from rpcbench.autograd.graph_events import GraphEvents, Recorded, SentTensors
from rpcbench.base.ids import Counter, Id, first_serial, global_id
from rpcbench.protocol.backward import Sent
from rpcbench.protocol.effects import ForgetContext
from rpcbench.protocol.node import Node
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.serialization.tensor_types import Route
from rpcbench.wire.messages import Scope

_DEVICES = ("cpu", "cuda")  # with an autocast state of their own


class SameModes:
    """A function that runs under the grad mode of the thread that made it, and if requested under its `autocast`."""

    def __init__(self, function: Callable[..., Any], autocast: bool) -> None:
        self._function = function
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in (_DEVICES if autocast else ())
        ]
        self.__dict__.update(  # the label of the call, and torch's mark of `async_execution`
            (name, getattr(function, name))
            for name in ("__qualname__", "_wrapped_async_rpc_function")
            if hasattr(function, name)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(self._grad))
            for device, enabled, dtype in self._autocast:
                # Entering autocast(enabled=False) costs time, and is needed only where this thread has it enabled.
                if enabled != torch.is_autocast_enabled(device) or enabled:
                    modes.enter_context(torch.autocast(device, dtype, enabled))
            return self._function(*args, **kwargs)


def same_modes(function: Callable[..., Any]) -> SameModes:
    """Return `function` so that it runs on any worker with the grad mode and autocast of this thread.

    A call under `no_grad` needs no `same_modes` for its grad mode; it sends autocast along.

    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     rpc.rpc_sync("worker1", dist_autograd.same_modes(torch.mm), (x, x)).dtype
    torch.bfloat16
    """
    return SameModes(function, autocast=True)


_request_numbers = Counter()  # numbers this process's calls of `accumulate`


@contextlib.contextmanager
def accumulator() -> Iterator[int]:
    """Make a context that only holds sums of gradients, and yield its id; all workers release it after the block.

    >>> w = torch.ones(3, requires_grad=True)
    >>> with dist_autograd.accumulator() as total:
    ...     for factor in (1.0, 2.0):
    ...         with dist_autograd.context() as context_id:
    ...             dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, (w, factor)).sum()])
    ...             dist_autograd.accumulate(total, context_id)
    ...     dist_autograd.get_gradients(total)[w]
    tensor([3., 3., 3.])
    """
    here = recorder()
    context_id = here.new_context()
    try:
        yield context_id
    finally:
        here.release_context(context_id)


def accumulate(into: int, *others: int) -> None:
    """Add the gradients of other contexts to those of `into`, on all workers that hold some. The others keep theirs.

    Args:
        into: The id of the context that receives the sums; `DistributedOptimizer.step` works with it.
        others: The ids of the contexts to add.

    Raises:
        RuntimeError: This worker has no such context.
        RpcError: A worker that holds gradients cannot be reached.
    """
    here = recorder()
    for context_id in (into, *others):
        here.find_record(context_id)
    me = here.agent.id
    with here.enter_context(into):
        _add_up(Id(me, _request_numbers.next(), here.agent.incarnation), into, others, (me,))


def _add_up(request_id: Id, into: int, others: Sequence[int], notified: Sequence[int]) -> None:
    """Add the gradients of this worker, then call this on the workers that the contexts have reached from here."""
    here = recorder()
    if not here.is_first_request(into, request_id):
        return
    workers: set[int] = set()
    for context_id in set(others) & set(here.context_ids()):
        copies = [(leaf, gradient.clone()) for leaf, gradient in here.named_gradients(context_id).items()]
        here.passes.add_gradients(into, copies)
        workers |= here.known_workers(context_id)
    # a worker that two paths lead to is called twice: `is_first_request` makes the call idempotent
    workers -= set(notified)
    known = (*notified, *workers)
    args = request_id, into, others, known
    for future in [here.agent.call(worker, _add_up, args, label="accumulate") for worker in workers]:
        future.wait()


_new = tuple.__new__  # saves one call against the named tuple's own constructor
_GLANCE = 256  # the most nodes of the graph examined when a message is sent; beyond that, the backward pass does so
_RECORDED = attrgetter("requires_grad")
_CUT = (
    "the call of {} sends a tensor that requires grad, outside of any autograd context: the tensor will get no "
    "gradient. Make the call inside `with rpcbench.autograd.context()`, or send tensor.detach()"
)
_UNKNOWN = (
    "Could not find autograd context with id: {}. It is released at the end of its `with` block, and backward, "
    "get_gradients and the optimizer's step belong inside; or this worker has not taken part in it"
)
_NO_ID = "incompatible function arguments: a context id is the number that `with context() as id` gives, not {!r}"
_STAYS = (
    "a tensor that {} returned outside of any autograd context has got a gradient: it stays on this worker, and none "
    "is sent back to the inputs of the call. Make the call inside `with rpcbench.autograd.context()`; if this is "
    "intended, use tensor.detach().requires_grad_()"
)


class AutogradRecorder:
    """The autograd recorder of one agent: records messages of contexts, and keeps their graphs and gradients."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._contexts: dict[int, Recorded] = {}  # changed only under the node's lock, with the node's own contexts
        self.graph_events = GraphEvents(agent.links.bus, agent.calls.values, self._contexts)
        self.passes = Engine(agent, self.find_record, self.graph_events)
        agent.effects.register(ForgetContext, lambda effect: self._forget_record(effect.context))
        self._machine = agent.machine
        self._lock = threading.Lock()
        self._warned: set[str] = set()  # functions and workers that a warning was given for
        self._messages = Counter(first_serial(agent.incarnation))
        self._ids = Counter(first_serial(agent.incarnation))
        self._current: ContextVar[int | None] = ContextVar("rpcbench_context", default=None)
        self.on_release: list[Callable[[int], object]] = []
        """Called with the id of each context that this worker is about to release."""

    # -- contexts
    def new_context(self) -> int:
        """Make a context that begins on this worker, and return its id."""
        context = global_id(self.agent.id, self._ids.next())
        self._machine.read_node(self._open_context, context)
        return context

    def _open_context(self, node: Node, context: int) -> None:
        node.contexts.open_context(context)
        self._contexts[context] = Recorded()

    def new_own_context(self) -> int:
        """Make a context for this thread. RuntimeError if it has one already."""
        if self.current_context() is not None:
            raise RuntimeError("Already have an autograd context id for this thread.")
        return self.new_context()

    def current_context(self) -> int | None:
        return self._current.get()

    def set_context(self, context: int | None) -> None:
        """Make a context (None: no context) this thread's own from here on."""
        self._current.set(context)

    def enter_context(self, context: int) -> AbstractContextManager[None]:
        return _Inside(self._current, context)

    def release_context(self, context: int, notified: Iterable[int] = ()) -> None:
        """Release a context on all workers, except those in `notified`, which are notified otherwise."""
        for listener in [*self.on_release]:
            listener(context)
        self._machine.feed_event(lambda node: node.process_outcome(node.contexts.release_context(context, notified)))

    def find_record(self, context: int) -> Recorded:
        """Return the record of a context. RuntimeError if there is none."""
        found = self._contexts.get(context)
        if found is None:
            if not isinstance(context, int):
                raise TypeError(_NO_ID.format(context))
            raise RuntimeError(_UNKNOWN.format(context))
        return found

    def known_workers(self, context: int) -> set[int]:
        """Return the workers with which messages of the context were exchanged."""
        return self._machine.read_node(lambda node: set(node.contexts.contexts[context].known))

    def context_ids(self) -> list[int]:
        return list(self._contexts)

    def _forget_record(self, context: int) -> None:
        self.graph_events.context_dropped(context, self._contexts.pop(context, None))

    # -- gradients
    def named_gradients(self, context: int) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients of this worker's leaves. RuntimeError for a context without a record."""
        return self.find_record(context).gradients.copy_with_names()

    def scale_gradients(self, context: int, leaves: Sequence[torch.Tensor], factor: float) -> None:
        self.find_record(context).gradients.scale_gradients(leaves, factor)

    def is_first_request(self, context: int, request_id: Id) -> bool:
        """Return True once for each request `request_id` to add gradients to a context."""
        with self._lock:
            summed = self.find_record(context).summed
            known = request_id in summed
            summed.add(request_id)
        return not known

    # -- recording
    def wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.agent.config.same_modes:
            return same_modes(function)
        return function if torch.is_grad_enabled() else SameModes(function, autocast=False)

    def record_send(self, context: int, tensors: Sequence[torch.Tensor], to: int, label: str) -> Scope | None:
        # cuts the graph before the lock is taken: it runs torch code
        edges = graph.gradient_edges(tensors) if tensors else []
        if not any(edges):
            return self._machine.read_node(self._record_send, context, Sent(to, label), (), False, None)
        found = graph.find_ends_within(edges, _GLANCE)
        recvs, sent, kept = None if found is None else [*found.recvs], Sent(to, label), SentTensors(edges, found)
        scope = self._machine.read_node(self._record_send, context, sent, recvs, True, kept)
        if scope is not None:
            self.graph_events.message_sent(context, scope.message, sent, tensors, kept)
        return scope

    def _record_send(
        self, node: Node, context: int, sent: Sent, recvs: Iterable[int] | None, tensors: bool, kept: SentTensors | None
    ) -> Scope | None:
        """Number and record a message, under the node's lock; `kept` has the edges for a backward pass."""
        message = global_id(self.agent.id, self._messages.next())
        scope = node.contexts.record_send(context, message, sent, recvs, tensors)
        if scope is not None:
            recorded = self._find_or_make_record(context)
            if kept is not None:
                recorded.sends[message] = kept
        return scope

    def _find_or_make_record(self, context: int) -> Recorded:
        """Return the record of an open context, made if it is new here."""
        found = self._contexts.get(context)
        if found is None:
            found = self._contexts[context] = Recorded()
        return found

    def record_receive(self, scope: Scope, tensors: list[torch.Tensor], source: int, back: Route) -> list[torch.Tensor]:
        recorded = any(map(_RECORDED, tensors))
        kept = self._machine.read_node(self._record_recv, scope, source, recorded)
        if kept is None or not recorded:
            return tensors
        self.graph_events.message_received(scope.context, scope.message, source)
        kept.backs[scope.message] = back
        received = graph.attach_recv_node(tensors, scope.message)
        kept.recvs[scope.message] = next(filter(_RECORDED, received)).grad_fn
        return received

    def _record_recv(self, node: Node, scope: Scope, source: int, tensors: bool) -> Recorded | None:
        """Record a received message, under the node's lock; None if the context is over."""
        return self._find_or_make_record(scope.context) if node.contexts.record_recv(scope, source, tensors) else None

    def record_cut_send(self, tensors: Sequence[torch.Tensor], to: int, label: str) -> Scope | None:
        context = self._current.get()
        if context is None:
            return None
        # Recorded without edges: no backward pass runs through this message.
        sent, recorded = _new(Sent, (to, label)), any(map(_RECORDED, tensors))
        scope = self._machine.read_node(self._record_send, context, sent, (), recorded, None)
        if recorded and scope is not None:
            self.graph_events.message_sent(context, scope.message, sent, tensors)
        return scope

    def record_cut_receive(self, scope: Scope, tensors: Sequence[torch.Tensor], source: int) -> None:
        recorded = any(map(_RECORDED, tensors))
        if self._machine.read_node(self._record_recv, scope, source, recorded) is not None and recorded:
            self.graph_events.message_received(scope.context, scope.message, source)

    def note_unrecorded(self, tensors: Sequence[torch.Tensor], label: str) -> None:
        """Warn, once for each function, of a call outside any context that cuts the graph of these tensors."""
        for tensor in tensors:
            # Leaves and calls in no_grad are no mistake: parameters and whole modules are sent to be used elsewhere.
            if tensor.grad_fn is not None and torch.is_grad_enabled():
                self.warn_once(label, _CUT)

    def note_unattached(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Warn, once for each worker, if one of these results of a call outside any context gets a gradient."""
        for tensor in tensors:
            # A hook warns only if a backward comes here. A fetched parameter may get gradients on this worker.
            if tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
                tensor.register_hook(_Stays(self, source))  # type: ignore[no-untyped-call]

    def warn_once(self, name: str, text: str) -> None:
        """Warn about a function or a worker, at most once."""
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(text.format(name), UserWarning, stacklevel=3)

    def withdraw_send(self, scope: Scope) -> None:
        kept = self._contexts.get(scope.context)
        if kept is not None:
            kept.sends.pop(scope.message, None)
            self.graph_events.send_withdrawn(scope.context, scope.message)


class _Inside:
    """A block in which a context is this thread's own. A generator would take four times as long."""

    __slots__ = ("_context", "_current", "_token")

    def __init__(self, current: ContextVar[int | None], context: int) -> None:
        self._current = current
        self._context = context

    def __enter__(self) -> None:
        self._token = self._current.set(self._context)

    def __exit__(self, *_: object) -> None:
        self._current.reset(self._token)


class _Stays:
    """A hook on a tensor that was received outside any context."""

    __torch_unserializable__ = True  # torch gives no warning when a tensor with this hook is copied or saved

    def __init__(self, here: AutogradRecorder, source: int) -> None:
        self._here, self._source = weakref.ref(here), source

    def __call__(self, _gradient: torch.Tensor) -> None:
        if (here := self._here()) is not None:
            here.warn_once(here.agent.machine.read_node(lambda node: node.member_name(self._source)), _STAYS)


def recorder(agent: Agent | None = None) -> AutogradRecorder:
    """Return the recorder of an agent, by default the current one. RuntimeError if RPC is not initialized."""
    try:
        found = (agent or current.current_agent()).calls.values.recorder
    except RuntimeError as error:
        raise RuntimeError(f"{error} (Need to initialize distributed autograd, which RPC does.)") from None
    assert isinstance(found, AutogradRecorder), "an agent without distributed autograd"
    return found
