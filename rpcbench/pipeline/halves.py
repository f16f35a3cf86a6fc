"""A stage's backward in two halves: first the gradient of its input, later those of its weights.

    output ── c ── b ── a ── input      the way of the first half; it notes the gradients that come to a, b and c
              │    │    │
              W    V    U               the second half goes on from there, and computes nothing of the way again

Guarantees
- Both halves together give what `torch.autograd.grad` gives for all at once, to the last bit. Hooks run in the half
  that their tensor belongs to. A stage whose input needs no gradient, as the first stage's, has nothing to do at first.
- The graph and its buffers are kept until the second half, and freed then.

Where a weight is used at several places of the way, as in a layer that is applied twice, the first half computes the
gradients of all that is used so: their sum could not be made anew without the way. A `torch.autograd.Function` of the
user's is not told which half runs, so it computes both each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Found = list[tuple[Tensor, Tensor]]
"""Weights with their gradients."""


class Halves:
    """The backward of `outputs`, computed from `weights` and those `values` that a gradient is wanted for, if any.

    `gradients`: those of the outputs; None: the output is a scalar loss.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor] | None,
        values: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> None:
        self._outputs, self._gradients = outputs, gradients
        self._values, self._weights = values, list(weights)
        self._noted: dict[Node, tuple[Tensor | None, ...]] = {}
        self._branches: list[tuple[Node, list[Tensor]]] = []
        self._early: Found = []

    def inputs(self) -> list[Tensor | None]:
        """The gradients of the values."""
        if not self._values:
            return []
        way, self._branches, early = _branches(self._outputs, self._values, self._weights)
        hooks = [node.register_prehook(partial(self._note, node)) for node, _ in self._branches if node in way]
        try:
            found = torch.autograd.grad(
                self._outputs, [*self._values, *early], self._gradients, retain_graph=True, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        self._note_apart(way)
        self._early = _given(early, found[len(self._values) :])
        return list(found[: len(self._values)])

    def weights(self) -> Found:
        """The weights that have a gradient, in their order. Call it once, after `inputs`."""
        found = self._early
        if not self._weights:
            return found
        if not self._values:
            grads = torch.autograd.grad(self._outputs, self._weights, self._gradients, allow_unused=True)
            return _given(self._weights, grads)
        for node, weights in self._branches:
            came = [(GradientEdge(node, number), grad) for number, grad in enumerate(self._noted.pop(node, ()))]
            edges = [(edge, grad) for edge, grad in came if grad is not None]
            if edges:
                roots, grads_in = zip(*edges, strict=True)
                found += _given(weights, torch.autograd.grad(roots, weights, grads_in, allow_unused=True))
        place = {weight: number for number, weight in enumerate(self._weights)}
        return sorted(found, key=lambda pair: place[pair[0]])

    def _note_apart(self, way: set[Node]) -> None:
        """Outputs that no value leads to: the first half does not come by them, so their gradients are noted here."""
        for number, output in enumerate(self._outputs):
            edge = get_gradient_edge(output)
            if edge.node not in way:
                gradient = torch.ones_like(output) if self._gradients is None else self._gradients[number]
                noted = dict(enumerate(self._noted.get(edge.node, ())))
                before = noted.get(edge.output_nr)
                noted[edge.output_nr] = gradient if before is None else before + gradient
                self._noted[edge.node] = tuple(noted.get(place) for place in range(1 + max(noted)))

    def _note(self, node: Node, grads: tuple[Tensor | None, ...]) -> None:
        self._noted[node] = grads


def _branches(
    outputs: Sequence[Tensor], values: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[set[Node], list[tuple[Node, list[Tensor]]], list[Tensor]]:
    """The nodes of the way; those that weights branch off from, with these; and the weights that several of them share.

    An output apart from the way is a branch by itself.
    """
    roots = [get_gradient_edge(output).node for output in outputs]
    order = _postorder(roots)
    way = _leading_to({get_gradient_edge(value).node for value in values}, order)
    behind: dict[Node, set[Tensor]] = {get_gradient_edge(weight).node: {weight} for weight in weights}
    for node in order:
        if node not in way:
            behind.setdefault(node, set()).update(*(behind[child] for child in _children(node)))
    found = [
        (node, set[Tensor]().union(*(behind[child] for child in _children(node) if child not in way)))
        for node in order
        if node in way
    ]
    found += [(root, behind[root]) for root in dict.fromkeys(roots) if root not in way]
    times = Counter(weight for _, own in found for weight in own)
    shared = [weight for weight in weights if times[weight] > 1]
    alone = [(node, [weight for weight in weights if weight in own and times[weight] == 1]) for node, own in found]
    return way, [(node, own) for node, own in alone if own], shared


def _leading_to(ends: set[Node], order: Sequence[Node]) -> set[Node]:
    """The nodes from which one of `ends` is reached; `order` has children before parents."""
    leading = set(ends)
    for node in order:
        if any(child in leading for child in _children(node)):
            leading.add(node)
    return leading


def _postorder(roots: Sequence[Node]) -> list[Node]:
    """All nodes that are reached, children before parents. Kept alive by the list, so they stay the same objects."""
    order: list[Node] = []
    seen: set[Node] = set()
    for root in roots:
        if root not in seen:
            seen.add(root)
            _descend(root, seen, order)
    return order


def _descend(root: Node, seen: set[Node], order: list[Node]) -> None:
    stack = [(root, _children(root))]
    while stack:
        node, children = stack[-1]
        child = next((child for child in children if child not in seen), None)
        if child is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(child)
            stack.append((child, _children(child)))


def _children(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _given(weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Found:
    return [(weight, grad) for weight, grad in zip(weights, grads, strict=True) if grad is not None]
