"""One backward pass on one worker, where the gradients of its roots come in any order.

A root is something gradients come for: a local loss, or a message that was sent. A region is the nodes that the same
roots lead to; it runs once, when all these roots have arrived, so every node sees whole sums and every hook runs once.

Guarantees
- The gradients are those of one local backward from all roots. A pass with one root is one `torch.autograd.grad`.
- `.grad` of no tensor is touched. Hooks of tensors and of nodes run, but for those that belong to the writing of
  `.grad`: `register_post_accumulate_grad_hook`, and hooks on the AccumulateGrad nodes of leaves.
- Without `retain_graph` the buffers of a node are freed when it has run.
- An edge between two regions over which no gradient comes is not followed. What counts by torch's backward, as
  `register_multi_grad_hook` does, counts each region for itself.

Rules
- One thread at a time calls one pass; several passes may go over one graph at once.
- Gradients handed out may share memory with each other and with those that came in: nobody changes them in place.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rpcbench.autograd import taps
from rpcbench.autograd.graph import Ends, edge_of
from rpcbench.autograd.parts import Part, Plan
from rpcbench.autograd.taps import Grads, Portions
from rpcbench.base.errors import ProtocolError, counted


class Fired(NamedTuple):
    """The final gradients of one received message, one for each place in it.

    None stands where no gradient came, as it does between nodes of a local backward.
    """

    key: Any
    grads: list[Tensor | None]


class LocalPass:
    """One backward pass over this worker's part of the graph.

    `roots` has the edges of each root that takes part, as `graph.edges` gives them. `found` is what each of them leads
    to, in that order, where that is known of all.
    """

    def __init__(
        self,
        roots: Mapping[Any, Sequence[GradientEdge | None]],
        retain_graph: bool = False,
        found: Sequence[Ends] = (),
    ) -> None:
        self._roots = roots  # also what keeps the graph alive
        self._retain_graph = retain_graph
        self._bits = {key: 1 << number for number, key in enumerate(roots)}
        self._missing = (1 << len(roots)) - 1
        self._leaves: list[tuple[Any, Tensor | None]] = []
        plan = Plan(list(roots.values()), found)
        self._part_of, self._waiting = plan.part_of, plan.parts
        self.regions, self.ran = len(plan.parts), 0

    @property
    def complete(self) -> bool:
        """Whether all roots have arrived, and so everything has run."""
        return not self._missing

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """The leaf tensors reached so far for the last time, with their final gradients; all of them when complete."""
        return [
            (leaf, grad) for node, grad in self._leaves if grad is not None and (leaf := node.variable).requires_grad
        ]

    def arrive(self, key: Hashable, grads: Sequence[Tensor | None]) -> list[Fired]:
        """Take the gradients of one root and run all that has become complete; returns what can be sent on.

        Errors of user code pass through; the pass is then over. ProtocolError for a root that is not (or no longer)
        expected, or another number of gradients than the root has edges.
        """
        bit = self._bits.get(key, 0)
        if not bit & self._missing:
            raise ProtocolError(f"gradients came for {key}, which this backward pass does not wait for")
        edges = self._roots[key]
        if len(grads) != len(edges):
            raise ProtocolError(
                f"{counted(len(grads), 'gradient')} came for {key}, which has {counted(len(edges), 'tensor')}"
            )
        self._missing &= ~bit
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # `no_grad` is six calls in Python
        try:
            for edge, grad in zip(edges, grads, strict=True):
                if edge is not None and grad is not None:
                    self._bring(edge_of((edge.node, edge.output_nr, None)), grad)
            fired = [one for part in self._ready() for one in self._run(part)]
            self.ran = self.regions - len(self._waiting)
            return fired
        finally:
            torch._C._set_grad_enabled(before)

    def _bring(self, edge: GradientEdge, grad: Tensor) -> None:
        part = self._part_of.get(edge.node)
        if part is not None:
            part.add(edge, grad)

    def _ready(self) -> list[Part]:
        ready: list[Part] = []
        waiting: list[Part] = []
        for part in self._waiting:
            (waiting if part.roots & self._missing else ready).append(part)
        self._waiting = waiting
        return ready

    def _run(self, part: Part) -> list[Fired]:
        ends = part.ends()
        grads: Grads = [None] * len(ends)
        tapped: Portions = []
        if part.entries:
            grads, tapped = taps.run(part.entries, ends, part.taps, self._retain_graph)
        left = iter(grads)  # in the order of `ends`
        self._leaves += zip(part.leaves, left, strict=False)
        fired = [Fired(recv.key, [next(left) if wanted else None for wanted in recv.wanted]) for recv in part.recvs]
        for edge, grad in chain(zip(part.shared, left, strict=True), tapped):
            if grad is not None:
                self._bring(edge, grad)
        return fired
