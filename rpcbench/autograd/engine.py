"""The engine of distributed backward passes on one worker: it carries out the effects of `protocol.backward`.

A pass runs on one thread at a time; gradients that arrive meanwhile are queued. A pass that began on this worker runs
on the thread that called `run_pass`, other passes run on pool threads. Several passes may run at once. An error is
sent from the worker where it was raised to the one that began the pass.
"""

#     protocol.backward (under the node's lock)      engine (no lock)                     pass that began here?
#     Explore     ──> _explore     graph.ends ──────> `graph_explored`                     pool thread, or at once
#     Propagate   ──> _propagate   ┐                                                      its thread, by `jobs`
#     Accumulate  ──> _accumulate  ┴ _gradients_arrived: LocalPass ─> `gradients_propagated`   its thread, else the pool
#     PassEnded   ──> _end_wait    wakes the thread in `run_pass`
#     ForgetPass  ──> _forget_pass frees the local graph

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rpcbench.autograd import graph
from rpcbench.autograd.gradients import LeafGradients, Leaves, reduce_replicas, split_replicas
from rpcbench.autograd.graph_events import GraphEvents, Pass, Recorded, SentTensors
from rpcbench.autograd.regions import Grads, LocalPass
from rpcbench.base.errors import RemoteError, RpcError, WorkerLostError
from rpcbench.base.futures import release_slot
from rpcbench.base.ids import Counter, Id, worker_of
from rpcbench.base.rebuild import format_traceback, format_value, rebuild_error, restore_state, set_field
from rpcbench.protocol.backward import ROOT
from rpcbench.protocol.effects import Accumulate, Explore, ForgetPass, PassEnded, Propagate
from rpcbench.runtime.agent import Agent
from rpcbench.serialization.pickler import Codec
from rpcbench.wire.messages import EMPTY, BackwardFailed, Gradients


def make_failure(error: BaseException, context: int, pass_id: Id, worker: int, codec: Codec) -> BackwardFailed:
    """Return an error that was raised here as a message: the pickled error, if possible, and always its traceback."""
    text = f"Error on Node {worker}: {format_value(error, str)}\n{format_traceback(error)}"
    body = codec.encode_error(error) if isinstance(error, Exception) else EMPTY
    return BackwardFailed(context, pass_id, worker, type(error).__name__, text, body)


def error_of_failure(failure: BackwardFailed, worker: str, codec: Codec) -> Exception:
    """Return the error to raise where the pass began: RpcError and the original type in one, its traceback as cause."""
    original: Any = None
    if failure.body.payload:
        try:
            original = codec.decode_value(failure.body)
        except Exception:  # noqa: BLE001  (its class cannot be rebuilt here; its traceback can be shown)
            original = None
    if original is None and failure.type == WorkerLostError.__name__:
        return WorkerLostError(failure.text)
    error = _make_error_of_both(failure.text.splitlines()[0] if failure.text else failure.type, original)
    set_field(error, "__cause__", RemoteError(worker, f"{failure.type} while gradients went back:\n{failure.text}"))
    return error


def _make_error_of_both(text: str, original: Any) -> Exception:
    """Return an exception of both types if the original's class allows it, else an RpcError."""
    if not isinstance(original, Exception) or isinstance(original, RpcError):
        return original if isinstance(original, RpcError) else RpcError(text)
    kind = type(original)
    try:
        both: Any = type(kind.__name__, (RpcError, kind), {"__module__": kind.__module__})
        inner = (original.exceptions,) if isinstance(original, ExceptionGroup) else ()
        made: Exception = rebuild_error(both, text, *inner)
        restore_state(made, ((text,), vars(original), {}))
    except Exception:  # noqa: BLE001  (a user's __init_subclass__ or __setstate__, or classes that have no subclass)
        return RpcError(text)
    return made


@dataclass(slots=True)
class _Begun:
    """A pass that began here."""

    roots: SentTensors
    seeds: Grads
    peer: int | None  # the sender of all tensors that the roots depend on, if there is only one
    # Jobs for the thread in `run_pass`; None: the pass is over.
    jobs: queue.SimpleQueue[Callable[[], object] | None] = field(default_factory=queue.SimpleQueue)
    failure: BackwardFailed | None = None


class Engine:
    """All passes on one worker. `recorded` returns the record of a context, or raises RuntimeError."""

    def __init__(self, agent: Agent, recorded: Callable[[int], Recorded], graph_events: GraphEvents) -> None:
        self._agent = agent
        self._machine = agent.machine
        self._codec = agent.calls.values.codec
        self._recorded = recorded
        self._graph_events = graph_events
        self._lock = threading.Lock()  # of the queues of passes; no torch code runs under it
        self._begun: dict[Id, _Begun] = {}
        self._pass_numbers = Counter()
        agent.effects.register(Explore, self._explore)
        agent.effects.register(Propagate, self._propagate)
        agent.effects.register(Accumulate, self._accumulate)
        agent.effects.register(PassEnded, self._end_wait)
        agent.effects.register(ForgetPass, self._forget_pass)

    # -- a pass that begins here
    def run_pass(self, context: int, roots: list[torch.Tensor], retain: bool, fast: bool) -> None:
        """Run a pass, and return after it is over on all workers. Raises the errors of `autograd.backward`."""
        self._recorded(context)
        _check_roots(roots)
        edges = [graph.edge_of((root.grad_fn, root.output_nr, root)) for root in roots]
        found = graph.find_ends(edges)
        recvs = [*found.recvs]
        peers = {*map(worker_of, recvs)}
        peer = peers.pop() if len(peers) == 1 else None
        pass_id = Id(self._agent.id, self._pass_numbers.next(), self._agent.incarnation)
        begun = self._begun[pass_id] = _Begun(
            SentTensors(edges, found), [torch.ones_like(root) for root in roots], peer
        )
        try:
            self._machine.feed_event(
                lambda node: node.process_outcome(
                    node.contexts.backward_passes.begin_pass(context, pass_id, recvs, retain, fast)
                )
            )
            self._run_jobs(begun)
        except BaseException as error:
            self._fail_pass(context, pass_id, error)  # such as Ctrl-C: the other workers stop, too
            raise
        finally:
            del self._begun[pass_id]
        if (failure := begun.failure) is not None:
            worker = self._machine.read_node(lambda node: node.member_name(failure.worker))
            raise error_of_failure(failure, worker, self._codec)

    def _run_jobs(self, begun: _Begun) -> None:
        """Run the jobs of a pass until it is over."""
        while True:
            # With one peer the gradients come over one connection: receive on this thread, which saves a switch.
            if begun.peer is not None and begun.jobs.empty():
                self._agent.calls.receive_in_place(begun.peer, begun.jobs.empty)
            try:
                job = begun.jobs.get_nowait()
            except queue.Empty:
                with release_slot():
                    job = begun.jobs.get()
            if job is None:
                return
            job()
            del job  # it holds gradients, which must not live while this thread waits for the next job

    # -- effects of the protocol
    def _end_wait(self, effect: PassEnded) -> None:
        """Wake the thread that began a pass: the pass is over."""
        begun = self._begun.get(effect.pass_id)
        if begun is not None:
            begun.failure = effect.failure
            begun.jobs.put(None)

    def _explore(self, effect: Explore) -> None:
        """Find the recvs behind a send."""
        context, walk, message = effect
        try:
            sent = self._recorded(context).sends[message]
        except (KeyError, RuntimeError) as error:  # the context was released
            self._fail_pass(context, walk, error)
            return
        if sent.found is None:  # a large graph: walking it would hold up the thread that receives
            self._agent.submit(lambda: self._explore_graph(context, walk, message, sent))
        else:
            self._exploration_ended(context, walk, message, sent.found)

    def _explore_graph(self, context: int, pass_id: Id, message: int, sent: SentTensors) -> None:
        found = graph.find_ends(sent.edges)
        self._recorded(context).sends[message] = sent._replace(found=found)
        self._exploration_ended(context, pass_id, message, found)

    def _exploration_ended(self, context: int, pass_id: Id, message: int, found: graph.Ends) -> None:
        recvs = list(found.recvs)
        self._machine.feed_event(
            lambda node: node.process_outcome(
                node.contexts.backward_passes.graph_explored(context, pass_id, message, recvs)
            )
        )

    def _propagate(self, effect: Propagate) -> None:
        """Run backward from the roots, on the thread that began the pass."""
        begun = self._begun.get(effect.pass_id)
        if begun is not None:
            begun.jobs.put(partial(self._gradients_arrived, effect.context, effect.pass_id, ROOT, begun.seeds))

    def _accumulate(self, effect: Accumulate) -> None:
        """Accumulate the gradients that have arrived for a send."""
        message = effect.message
        begun, job = self._begun.get(message.pass_id), partial(self._receive_gradients, message)
        if begun is not None:
            begun.jobs.put(job)
        else:
            self._agent.calls.pool.submit_internal(job)

    def _receive_gradients(self, message: Gradients) -> None:
        try:
            grads = self._codec.decode_value(message.body)
        except Exception as error:  # noqa: BLE001  (such as a user's tensor class that cannot be made)
            self._fail_pass(message.context, message.pass_id, error)
        else:
            self._gradients_arrived(message.context, message.pass_id, message.message, grads)

    def _forget_pass(self, effect: ForgetPass) -> None:
        """Drop the state of a pass that has ended here."""
        try:
            self._recorded(effect.context).passes.pop(effect.pass_id, None)
        except RuntimeError:
            pass  # the context was released before
        self._graph_events.report_change("PassEnded", effect.context)

    # -- running
    def _gradients_arrived(self, context: int, pass_id: Id, message: int, grads: Grads) -> None:
        """Run the gradients of one root of this worker's part, or queue them for the thread that runs the pass."""
        held = self._recorded(context)
        with self._lock:
            state = held.passes.get(pass_id)
            if state is None:
                state = held.passes[pass_id] = Pass()
            if state.busy:
                state.waiting.append((message, grads))
                return
            state.busy = True
        while True:
            try:
                self._run_root(context, pass_id, held, state, message, grads)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  (any error of a user's hook ends the pass on all workers)
                self._fail_pass(context, pass_id, error)
            with self._lock:
                if not state.waiting:
                    state.busy = False
                    return
                message, grads = state.waiting.popleft()

    def _run_root(self, context: int, pass_id: Id, held: Recorded, state: Pass, message: int, grads: Grads) -> None:
        local = state.local
        if local is None:
            local = state.local = self._plan_local_pass(context, pass_id, held)
            self._graph_events.report_change("PassPlanned", context)
        self._graph_events.gradients_arrived(context, message)
        fired = local.run_gradients(message, grads)
        if local.is_complete:
            self._keep_final(context, held, local.final_leaves())
        self._graph_events.report_change("RegionsRan", context)
        bodies = {}
        for key, gradients in fired:
            detached = [gradient if gradient is None else gradient.detach() for gradient in gradients]
            bodies[key] = self._codec.encode_value(detached, label="gradients", route=held.backs[key])[0]
        self._machine.feed_event(
            lambda node: node.process_outcome(
                node.contexts.backward_passes.gradients_propagated(context, pass_id, message, bodies)
            )
        )

    def _plan_local_pass(self, context: int, pass_id: Id, held: Recorded) -> LocalPass:
        """Plan this worker's part: all its sends that take part, and the roots if the pass began here."""
        needed, retain = self._machine.read_node(
            lambda node: node.contexts.backward_passes.participating_sends(context, pass_id)
        )
        parts = {number: held.sends[number] for number in needed}
        if (begun := self._begun.get(pass_id)) is not None:
            parts[ROOT] = begun.roots
        edges, found = zip(*parts.values(), strict=True)
        local = LocalPass(dict(zip(parts, edges, strict=True)), retain, () if None in found else found)
        local.spans = self._graph_events.pass_planned(context, parts)
        return local

    def _keep_final(self, context: int, held: Recorded, leaves: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keep the gradients of a pass that has run here; all-reduce those of leaves with replicas first."""
        own, common = split_replicas(leaves)
        if common:
            held.gradients.replace_gradients(reduce_replicas(common, held.gradients.copy()))
        self._keep_gradients(context, held.gradients, own, held.gradients.add_gradients)

    def add_gradients(self, context: int, leaves: Leaves) -> None:
        gradients = self._recorded(context).gradients
        self._keep_gradients(context, gradients, leaves, gradients.add_gradients)

    def replace_gradients(self, context: int, leaves: Leaves) -> None:
        gradients = self._recorded(context).gradients
        self._keep_gradients(context, gradients, leaves, gradients.replace_gradients)

    def _keep_gradients(
        self, context: int, gradients: LeafGradients, leaves: Leaves, take: Callable[[Leaves], None]
    ) -> None:
        before = len(gradients)
        take(leaves)
        if len(gradients) > before:
            self._graph_events.report_change("LeavesReached", context)
        self._machine.read_node(lambda node: node.contexts.record_gradient_count(context, len(gradients)))

    def _fail_pass(self, context: int, pass_id: Id, error: BaseException) -> None:
        failure = make_failure(error, context, pass_id, self._agent.id, self._codec)
        self._machine.feed_event(lambda node: node.process_outcome(node.contexts.backward_passes.pass_failed(failure)))


def _check_roots(roots: list[torch.Tensor]) -> None:
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not isinstance(root, torch.Tensor):
            raise TypeError(
                f"incompatible function arguments: roots are tensors, such as [loss]; one is a {type(root).__name__}"
            )
        if not root.requires_grad:
            raise RuntimeError(
                "requires_grad not set on root: it was made in no_grad, detached, or no input of it requires grad"
            )
        if root.numel() != 1:
            raise RuntimeError(
                f"a root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar: add .sum()"
            )
        if root.grad_fn is None:
            raise RuntimeError("a root does not have a valid gradient function: it is a leaf, made by no operation")
