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
    """The backward of `output`, which was computed from `value` and `weights`; `value` None: no gradient is wanted."""

    def __init__(self, output: Tensor, value: Tensor | None, weights: Sequence[Tensor]) -> None:
        self._output = output
        self._value = value
        self._weights = list(weights)
        self._gradient: Tensor | None = None
        self._noted: dict[Node, tuple[Tensor | None, ...]] = {}
        self._branches: list[tuple[Node, list[Tensor]]] = []
        self._early: Found = []

    def input(self, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the input, for one of the output (None: the output is a scalar loss)."""
        self._gradient = gradient
        if self._value is None:
            return None
        self._branches, early = _branches(self._output, self._value, self._weights)
        hooks = [node.register_prehook(partial(self._note, node)) for node, _ in self._branches]
        try:
            found = torch.autograd.grad(
                [self._output], [self._value, *early], _some(gradient), retain_graph=True, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        self._early = _given(early, found[1:])
        return found[0]

    def weights(self) -> Found:
        """The weights that have a gradient, in their order. Call it once, after `input`."""
        found = self._early
        if not self._weights:
            return found
        if self._value is None:
            grads = torch.autograd.grad([self._output], self._weights, _some(self._gradient), allow_unused=True)
            return _given(self._weights, grads)
        for node, weights in self._branches:
            came = [(GradientEdge(node, number), grad) for number, grad in enumerate(self._noted.pop(node, ()))]
            edges = [(edge, grad) for edge, grad in came if grad is not None]
            if edges:
                roots, grads_in = zip(*edges, strict=True)
                found += _given(weights, torch.autograd.grad(roots, weights, grads_in, allow_unused=True))
        place = {weight: number for number, weight in enumerate(self._weights)}
        return sorted(found, key=lambda pair: place[pair[0]])

    def _note(self, node: Node, grads: tuple[Tensor | None, ...]) -> None:
        self._noted[node] = grads


def _branches(
    output: Tensor, value: Tensor, weights: Sequence[Tensor]
) -> tuple[list[tuple[Node, list[Tensor]]], list[Tensor]]:
    """The nodes of the way that weights branch off from, with these, and the weights that several of them share."""
    assert output.grad_fn is not None
    order = _postorder(output.grad_fn)
    way = _leading_to({get_gradient_edge(value).node}, order)
    behind: dict[Node, set[Tensor]] = {get_gradient_edge(weight).node: {weight} for weight in weights}
    for node in order:
        if node not in way:
            behind.setdefault(node, set()).update(*(behind[child] for child in _children(node)))
    found = [
        (node, set[Tensor]().union(*(behind[child] for child in _children(node) if child not in way)))
        for node in order
        if node in way
    ]
    times = Counter(weight for _, own in found for weight in own)
    shared = [weight for weight in weights if times[weight] > 1]
    alone = [(node, [weight for weight in weights if weight in own and times[weight] == 1]) for node, own in found]
    return [(node, own) for node, own in alone if own], shared


def _leading_to(ends: set[Node], order: Sequence[Node]) -> set[Node]:
    """The nodes from which one of `ends` is reached; `order` has children before parents."""
    leading = set(ends)
    for node in order:
        if any(child in leading for child in _children(node)):
            leading.add(node)
    return leading


def _postorder(root: Node) -> list[Node]:
    """All nodes that are reached, children before parents. Kept alive by the list, so they stay the same objects."""
    order: list[Node] = []
    seen = {root}
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
    return order


def _children(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _some(gradient: Tensor | None) -> list[Tensor] | None:
    return None if gradient is None else [gradient]


def _given(weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Found:
    return [(weight, grad) for weight, grad in zip(weights, grads, strict=True) if grad is not None]
