"""Members with real tensors: random graphs over several members, cut at each message, and the same graphs uncut.

Every tensor has a twin in a graph that is never cut, made by the same operations and hooks from the same leaves. So a
distributed backward pass must give the gradients of one local backward. The hooks are not linear, so a hook that runs
on an incomplete gradient changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from passes import Passer, Passes
from torch import Tensor

from rpcbench.autograd import graph
from rpcbench.autograd.regions import LocalPass
from rpcbench.base.ids import Id, global_id
from rpcbench.protocol import effects as fx
from rpcbench.protocol.backward import ROOT, Sent
from rpcbench.wire import messages as m
from rpcbench.wire.messages import Body

OPS: list[Callable[[Tensor, Tensor], Sequence[Tensor]]] = [
    lambda a, b: [torch.sin(a) * b],
    lambda a, b: [a + b],
    lambda a, b: torch.cat([a, b.cos()]).split(3),
    lambda a, b: torch.stack([a, b]).unbind(0),
    lambda a, b: [torch.outer(a, b).tanh().sum(0)],
    lambda a, b: [a.clone().mul_(b.sin())],
    lambda a, b: [torch.view_as_real(torch.complex(a, b) * a.tanh()).sum(1)],
]


class Twins(NamedTuple):
    """A tensor of the graph that is cut at messages, and its twin in the uncut graph."""

    cut: Tensor
    whole: Tensor


class Carried(list[Any]):
    """The tensors of a message; its short repr keeps histories readable."""

    def __repr__(self) -> str:
        return f"{len(self)} tensors"


def bent(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else torch.tanh(grad) + grad / 8


class Trainer(Passer):
    """One member, with its own leaves."""

    world: Training

    def __init__(self, world: Training, id_: int, size: int | None, life: int) -> None:
        super().__init__(world, id_, size, life)
        leaf = torch.randn(3, dtype=torch.double).requires_grad_()
        world.leaves.append(leaf)
        self.pool = [Twins(leaf, leaf)]
        self.sent: dict[int, Any] = {}
        self.roots: dict[Id, Any] = {}

    # -- forward
    def _made(self) -> Twins:
        """Apply up to two random operations to tensors of the pool, and return one tensor of it."""
        pick = self.world.random
        for _ in range(pick.randint(0, 2)):
            a, b, make = pick.choice(self.pool), pick.choice(self.pool), pick.choice(OPS)
            self.pool += map(Twins, make(a.cut, b.cut), make(a.whole, b.whole))
            if pick.random() < 0.4:
                self._hook(self.pool[-1])
        return pick.choice(self.pool)

    def _hook(self, twins: Twins) -> None:
        for tensor in twins:
            tensor.register_hook(bent)

    def _record(self, to: int) -> tuple[m.Scope | None, Body]:
        number, self.messages = global_id(self.id, self.messages), self.messages + 1
        pick = self.world.random
        tensors = [self._made() for _ in range(pick.choice((0, 1, 1, 2)))]
        edges = graph.gradient_edges([twins.cut for twins in tensors])
        seen = list(graph.Reach(edges).recvs) if pick.random() < self.world.seen else None
        scope: m.Scope | None = None

        def record() -> fx.Effects:
            nonlocal scope
            scope = self.node.contexts.record_send(
                self.world.context, number, Sent(to, "work"), seen, tensors=bool(tensors)
            )
            return []

        self.feed(record)
        self.sent[number] = edges
        return scope, Body(b"", b"", Carried(tensors))  # type: ignore[arg-type]

    def _received(self, source: int, message: m.Call | m.Result | m.Failure) -> None:
        scope, body = getattr(message, "scope", None), getattr(message, "body", m.EMPTY)
        if scope is None:
            return
        known = False

        def record() -> fx.Effects:
            nonlocal known
            known = self.node.contexts.record_recv(scope, source, tensors=bool(body.buffers))
            return []

        self.feed(record)
        if known:
            copies = [twins.cut.detach().clone().requires_grad_() for twins in body.buffers]  # type: ignore[union-attr]
            received = graph.attach_recv_node(copies, scope.message)
            for cut, twins in zip(received, body.buffers, strict=True):
                self._take(Twins(cut, twins.whole.view_as(twins.whole)))  # type: ignore[union-attr]

    def _take(self, twins: Twins) -> None:
        if self.world.random.random() < 0.5:
            self._hook(twins)
        if self.world.random.random() < 0.2:
            twins = Twins(twins.cut.mul_(2), twins.whole * 2)
        self.pool.append(twins)

    # -- backward
    def begin(self, fast: bool = False) -> None:
        context = self.world.context
        if context not in self.node.contexts.contexts:
            return
        walk = Id(self.id, len(self.roots))
        terms = [self._made() for _ in range(3)]
        losses = Twins(*(sum((term[side].sin().sum() for term in terms), torch.zeros(())) for side in (0, 1)))
        edges = self.roots[walk] = graph.gradient_edges([losses.cut])
        self.world.losses[walk] = losses.whole
        recvs = graph.Reach(edges).recvs
        self.begun[walk] = frozenset(recvs)
        self.world.tell(f"{self.id} begins pass {walk} from {sorted(recvs)}")
        self.feed(
            lambda: self.node.process_outcome(
                self.node.contexts.backward_passes.begin_pass(context, walk, recvs, True, fast)
            )
        )

    def _explore(self, effect: fx.Explore) -> None:
        recvs = graph.Reach(self.sent[effect.message]).recvs
        self.feed(lambda: self.node.process_outcome(self.node.contexts.backward_passes.graph_explored(*effect, recvs)))

    def _accumulate(self, effect: fx.Accumulate) -> None:
        self._run_from(effect.message.pass_id, effect.message.message, effect.message.body.buffers)

    def _arrive(self, walk: Id, root: int, paths: int) -> None:
        self._run_from(walk, root, [torch.ones((), dtype=torch.double)])

    def _run_from(self, walk: Id, root: int, grads: Sequence[Any]) -> None:
        state = self.node.contexts.backward_passes.find_pass(self.world.context, walk)
        if state is None:
            return
        if walk not in self.passes:
            roots = {ROOT: self.roots[walk]} if walk in self.roots else {}
            parts = roots | {send: self.sent[send] for send in state.needed}
            found = [graph.Reach(root) for root in parts.values()]
            self.passes[walk] = LocalPass(parts, True, found)  # type: ignore[assignment]
        local: Any = self.passes[walk]
        fired = local.run_gradients(root, grads)
        if local.is_complete:
            for leaf, gradient in local.final_leaves():
                assert leaf not in self.world.gradients[walk], "a leaf has two gradients"
                self.world.gradients[walk][leaf] = gradient
        bodies = {one.key: Body(b"", b"", Carried(one.grads)) for one in fired}
        walks = self.node.contexts.backward_passes
        self.feed(lambda: self.node.process_outcome(walks.gradients_propagated(self.world.context, walk, root, bodies)))


class Training(Passes):
    """A world of trainers."""

    kind = Trainer

    def __init__(self, seed: int, size: int) -> None:
        torch.manual_seed(seed)
        self.leaves: list[Tensor] = []
        self.losses: dict[Id, Tensor] = {}
        self.crossed = False
        self.gradients: Any = Gradients()
        super().__init__(seed, size)

    def check_gradients(self, walk: Id) -> None:
        """Check that the gradients equal those of one local backward, and are missing for the same leaves.

        Sets `crossed` if a worker other than the one that began the pass has a leaf with a gradient.
        """
        loss = self.losses[walk]
        wanted = torch.autograd.grad(loss, self.leaves, retain_graph=True, allow_unused=True)
        for leaf, want in zip(self.leaves, wanted, strict=True):
            got = self.gradients[walk].get(leaf)
            right = got is want if got is None or want is None else torch.allclose(got, want, rtol=1e-12, atol=1e-12)
            assert right, f"wrong gradient in pass {walk}: {got}, not {want}"
            self.crossed |= want is not None and leaf is not self.leaves[walk.worker]


class Gradients(dict[Id, dict[Tensor, Tensor]]):
    def __missing__(self, walk: Id) -> dict[Tensor, Tensor]:
        return self.setdefault(walk, {})
