"""Which nodes of a worker's graph run together in a backward pass whose roots arrive in any order.

Guarantees
- The nodes of one part are led to by the same roots, so once these have arrived nothing is missing for any of them.
- Gradients go from a part to parts that come later in the plan, never back.
- What leads to no leaf and no received message is in no part.
- Roots that have no leaf and no received message in common are a part each, whose nodes nobody looks at.

Rules
- An end is where a part's gradients are handed out, tensor hooks run: a leaf or recv node that no other part feeds.
- A leaf without hooks may be an end of several parts, unless one leads on to nodes of others: these may lead to that
  leaf too, and torch's engine would go on to it through them.
- Every other edge that leaves a part is tapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rpcbench.autograd.gradients import total
from rpcbench.autograd.graph import Below, Ends, Reach, edge_of, ends, is_leaf, is_recv, leaf_of

RootEdges = Sequence["GradientEdge | None"]


class Part:
    """Nodes that run together.

    `roots` is a bit set. Gradients end at `leaves` and `recvs`, and a portion at each of `shared`, the bare leaves of
    others. `taps` names the tapped edges of each node by place and target. `entries` are the gradients that came from
    outside so far; those in `sums` were made here, and nobody else has them.
    """

    __slots__ = ("entries", "leaves", "recvs", "roots", "shared", "sums", "taps")

    def __init__(self, roots: int, leaves: list[Any], recvs: list[Any]) -> None:
        self.roots = roots
        self.leaves = leaves
        self.recvs = recvs
        self.shared: dict[GradientEdge, None] = {}
        self.taps: dict[Any, list[tuple[int, GradientEdge]]] = {}
        self.entries: dict[GradientEdge, Tensor] = {}
        self.sums: set[GradientEdge] = set()

    def ends(self) -> list[GradientEdge]:
        """Where gradients end: at leaves, at each tensor of recvs, at what is shared."""
        leaves = map(edge_of, zip(self.leaves, repeat(0), repeat(None)))
        recvs = [GradientEdge(recv, number) for recv in self.recvs for number in range(sum(recv.wanted))]
        return [*leaves, *recvs, *self.shared]

    def add(self, edge: GradientEdge, grad: Tensor) -> None:
        """Take a gradient that enters by this edge."""
        before = self.entries.get(edge)
        if before is None:
            self.entries[edge] = grad
        elif edge in self.sums and before.layout is torch.strided:
            before += grad
        else:
            self.entries[edge] = total(before, grad)
            self.sums.add(edge)


class Plan:
    """All parts, in an order in which they can run, and the part of each node that gradients may be brought to.

    `found` is what each root leads to, where that is known of all.
    """

    def __init__(self, roots: Sequence[RootEdges], found: Sequence[Ends] = ()) -> None:
        self.part_of: dict[Any, Part] = {}
        if len(roots) == 1 and not found:
            found = [ends(roots[0])]
        if found and _apart(found):
            self.parts = [self._whole(*one) for one in zip(range(len(roots)), roots, found, strict=True)]
            return
        self._parts: dict[tuple[int, bool], Part] = {}
        together = Reach(chain.from_iterable(roots))
        self._divide(_bits(roots, together), together)
        order = sorted(self._parts, key=lambda key: (key[0].bit_count(), *key))
        self.parts = [self._parts[key] for key in order]

    def _part(self, roots: int, rest: bool) -> Part:
        """Two for each set of roots: what leads to ends, then the rest, which only leads to other parts."""
        part = self._parts.get((roots, rest))
        if part is None:
            part = self._parts[roots, rest] = Part(roots, [], [])
        return part

    def _whole(self, number: int, root: RootEdges, found: Ends) -> Part:
        part = Part(1 << number, found.leaves, [*found.recvs.values()])
        for edge in root:
            if edge is not None:
                self.part_of[edge.node] = part
        return part

    def _divide(self, bits: dict[Any, int], found: Reach) -> None:
        leading_on = {
            bits[node]
            for node, below in found.below.items()
            for child, _ in below
            if child is not None and bits[child] != bits[node] and not _is_terminal(child)
        }
        for node, below in found.below.items():
            roots = bits[node]
            if _is_terminal(node):
                part = self.part_of[node] = self._part(roots, False)
                (part.leaves if is_leaf(node) else part.recvs).append(node)
            else:
                self._place(node, below, roots, share=roots not in leading_on)

    def _place(self, node: Any, below: Below, roots: int, share: bool) -> None:
        """Put an inner node into its part; what it leads to is in place already."""
        front = self._part(roots, False)
        homes = []
        for child, number in below:
            home = self.part_of.get(child)
            if share and home is not front and child is not None and _is_bare_leaf(child):
                home = front
                front.shared[GradientEdge(child, number)] = None
            homes.append(home)
        if front in homes:
            mine = front
        elif any(homes):
            mine = self._part(roots, True)
        else:
            return
        self.part_of[node] = mine
        away = [
            (place, GradientEdge(child, number))
            for place, (child, number) in enumerate(below)
            if child is not None and homes[place] not in (None, mine)
        ]
        if away:
            mine.taps[node] = away


def _apart(found: Sequence[Ends]) -> bool:
    """Whether no two lead to the same leaf or received message."""
    seen: set[Any] = set()
    for one in found:
        if not seen.isdisjoint(terminals := one.terminals):
            return False
        seen.update(terminals)
    return True


def _bits(roots: Sequence[RootEdges], found: Reach) -> dict[Any, int]:
    """For each node the set of roots that lead to it."""
    bits: dict[Any, int] = dict.fromkeys(found.below, 0)
    for number, root in enumerate(roots):
        for edge in root:
            if edge is not None:
                bits[edge.node] |= 1 << number
    for node in reversed(found.below):
        here = bits[node]
        for child, _ in found.below[node]:
            if child is not None:
                bits[child] |= here
    return bits


def _is_terminal(node: Any) -> bool:
    return is_leaf(node) or is_recv(node)


def _is_bare_leaf(node: Any) -> bool:
    return is_leaf(node) and not leaf_of(node)._backward_hooks
