"""Gradients of one worker in a step: added up over micro-batches, made in two halves, and shared by copies of a weight.

Sums
- They are added in the order of the micro-batches, to what the context has of them from before the step. Memory is
  written to only if it was made here. The context gets them when the step is whole; a step that fails leaves it as it
  was.
- `EngineSums` has torch's engine add them up, each as soon as it is made: it is still in the core's cache then. The
  engine adds to `.grad`, so the sums are there while it runs, and at no other time; what `.grad` is to any other code
  does not change. Only plain parameters of one stage that have no hook, and each sum in memory of its own. torch takes
  the first gradient for the sum as it is, also where its memory is that of another one; so what came first is copied
  where any other object has it.

Halves: first the gradient of a stage's input, later those of its weights.

    output ── c ── b ── a ── input      the way of the first half; it notes the gradients that come to a, b and c
              │    │    │
              W    V    U               the second half goes on from there, and computes nothing of the way again

- Both halves together give what `torch.autograd.grad` gives for all at once, to the last bit. Hooks run in the half
  that their tensor belongs to. A stage whose input needs no gradient has nothing to do at first. The graph and its
  buffers are kept until the second half.
- Where a weight is used at several places of the way, as in a layer that is applied twice, the first half computes the
  gradients of all that is used so: their sum could not be made anew without the way. A `torch.autograd.Function` of the
  user's is not told which half runs, so it computes both each time.

Tied weights: each stage has a copy, and all copies get the same gradient. A step's gradients of all copies are added
up, in the order of the stages, before any optimizer runs, by the workers themselves. So every copy sees the same bits,
and copies that were equal stay equal. What an earlier step has left in a context is not counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge

from rpcbench.autograd.gradients import Leaves, total
from rpcbench.pipeline.exchange import TIED, Gradients, Messages, Slot
from rpcbench.pipeline.split import Stage

_PLAIN = Tensor, nn.Parameter
_hooks, _later_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_trained, _grad = attrgetter("requires_grad"), attrgetter("grad")


def summable(params: Mapping[int, Sequence[Tensor]]) -> dict[int, Sequence[Tensor]]:
    """Those of these stages whose parameters are plain, and used by no other stage here."""
    uses = Counter([id(param) for own in params.values() for param in own])
    return {stage: own for stage, own in params.items() if all(uses[id(p)] == 1 and _plain(p) for p in own)}


def _plain(param: Tensor) -> bool:
    return type(param) in _PLAIN and param.is_leaf and param.layout is torch.strided


def _unseen(params: Sequence[Tensor]) -> bool:
    """Whether nobody sees their gradients as they come; and they are still trained."""
    return not any(map(_hooks, params)) and not any(map(_later_hooks, params)) and all(map(_trained, params))


class EngineSums:
    """Of those of these stages, all `summable`, that are trained and have no hooks: `stage in sums`. For one step."""

    def __init__(self, params: Mapping[int, Sequence[Tensor]]) -> None:
        self._params = {stage: own for stage, own in params.items() if _unseen(own)}
        self._sums: dict[int, list[Tensor | None]] = {stage: [None] * len(own) for stage, own in self._params.items()}
        self._new = {stage: [*range(len(own))] for stage, own in self._params.items()}  # places without a sum yet

    def __contains__(self, stage: int) -> bool:
        return stage in self._params

    def add(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The backward of a micro-batch, from `roots` with their `gradients`; what it gives for those `wanted`, which
        are leaves of this micro-batch alone."""
        own = self._params[stage]
        if inputs := (*wanted, *own):  # else they would be all that there are
            before = [*map(_grad, own)]
            _put(own, self._sums[stage])
            try:
                _engine_run_backward(
                    tuple(roots), tuple(gradients), False, False, inputs, allow_unreachable=True, accumulate_grad=True
                )
            finally:
                self._sums[stage] = [*map(_grad, own)]
                _put(own, before)
            if self._new[stage]:
                self._part(stage)
        return [value.grad for value in wanted]

    def _part(self, stage: int) -> None:
        """Give those sums that are new memory of their own."""
        sums, new = self._sums[stage], []
        for place in self._new[stage]:
            if (came := sums[place]) is None:
                new.append(place)
            elif came.layout is not torch.strided or _uses(came) > 1:
                sums[place] = came.clone()
        self._new[stage] = new

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters with what their gradients have added up to."""
        return [
            (param, found)
            for stage, own in self._params.items()
            for param, found in zip(own, self._sums[stage], strict=True)
            if found is not None
        ]


def _put(params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


def _uses(tensor: Tensor) -> int:
    """How many tensors have its memory."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # but for `storage`


Found = list[tuple[Tensor, Tensor]]
"""Weights with their gradients."""


class SplitBackward:
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


Tie = dict[int, str]
"""Stage → what it calls its copy of one weight."""


def ties(stages: Sequence[Stage]) -> list[Tie]:
    """The parameters that several of these stages have, or will have where they are built."""
    found: dict[tuple[str, int], Tie] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            found.setdefault(("there", id(parameter)), {})[stage.index] = name
        for tied in stage.tied:
            found.setdefault(("lazy", tied.number), {})[stage.index] = tied.own[0]
    return [tie for tie in found.values() if len(tie) > 1]


class Copies:
    """The copies of tied weights on one worker, each known by the number of its tie and its stage.

    `params`: those of each stage that are trained, in the order that gradients have.
    """

    def __init__(
        self, ties: Sequence[Tie], modules: Mapping[int, nn.Module], params: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        self.ties, self.params = ties, params
        self.names = [(number, stage) for number, tie in enumerate(ties) for stage in tie if stage in modules]
        self._named: dict[torch.Tensor, tuple[int, int]] = {
            modules[stage].get_parameter(ties[number][stage]): (number, stage) for number, stage in self.names
        }
        self.places = {
            stage: {place: self._named[param] for place, param in enumerate(own) if param in self._named}
            for stage, own in params.items()
        }
        """Stage → place among its parameters → which copy is there."""

    def repeats(self, param: torch.Tensor) -> bool:
        """Whether an earlier stage has this parameter, too."""
        name = self._named.get(param)
        return name is not None and name[1] > min(self.ties[name[0]])


class TiedGradients:
    """Gradients of this worker's copies in one step, kept apart until those of all others are known."""

    def __init__(self, step: int, copies: Copies) -> None:
        self._step, self._copies = step, copies
        self._own: dict[tuple[int, int], torch.Tensor | None] = dict.fromkeys(copies.names)

    def keep(self, stage: int, gradients: Gradients) -> Gradients:
        """Keep the gradients of a stage's tied weights; the others are returned, in their places."""
        tied = self._copies.places[stage]
        if not tied:
            return gradients
        rest = list(gradients)
        for place, copy in tied.items():
            gradient, rest[place] = rest[place], None
            if gradient is not None:
                before = self._own[copy]
                self._own[copy] = gradient if before is None else before + gradient
        return rest

    def messages(self) -> Messages:
        """Each copy's gradient, for each of the other copies."""
        return [
            (Slot(self._step, TIED, other, number, stage), (gradient,))
            for (number, stage), gradient in self._own.items()
            for other in self._copies.ties[number]
            if other != stage
        ]

    def totals(self, take: Callable[[Slot], tuple[Any, ...]]) -> dict[int, Gradients]:
        """Of each stage, the sums of all copies' gradients in the places of its tied weights, waited for."""
        found = {copy: self._total(copy, take) for copy in self._own}
        return {
            stage: [found[tied[place]] if place in tied else None for place in range(len(self._copies.params[stage]))]
            for stage, tied in self._copies.places.items()
            if tied
        }

    def _total(self, copy: tuple[int, int], take: Callable[[Slot], tuple[Any, ...]]) -> torch.Tensor | None:
        number, stage = copy
        came = [
            self._own[copy] if other == stage else take(Slot(self._step, TIED, stage, number, other))[0]
            for other in sorted(self._copies.ties[number])
        ]
        return _total(gradient for gradient in came if gradient is not None)


def _total(gradients: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """A new tensor: the copies of one worker must not share the memory of a gradient."""
    total = None
    for gradient in gradients:
        total = gradient.clone() if total is None else total + gradient
    return total


_layout = attrgetter("layout")


class _Stage:
    """The sums of one stage, and which of them were made here and may be added to; in the order of its parameters."""

    __slots__ = ("own", "sums")

    def __init__(self, count: int) -> None:
        self.sums: list[Tensor | None] = [None] * count
        self.own = [False] * count


class Sums:
    """`params`: of each stage; gradients come in their order. `before`: what the context has."""

    def __init__(self, params: Mapping[int, Sequence[Tensor]], before: Mapping[Tensor, Tensor]) -> None:
        self._params, self._before = params, before
        self._stages: dict[int, _Stage] = {}

    def add(self, stage: int, gradients: Gradients) -> None:
        held = self._stages.get(stage)
        if held is None:
            held = self._stages[stage] = _Stage(len(gradients))
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # `no_grad` is six calls in Python
        try:
            dense = _dense(gradients)  # then one call for all, however many parameters a stage has
            if dense and all(held.own):
                torch._foreach_add_(held.sums, gradients)  # type: ignore[arg-type]
            elif dense and not any(held.own) and _dense(held.sums):
                held.sums[:] = torch._foreach_add(held.sums, gradients)  # type: ignore[arg-type]
                held.own[:] = [True] * len(gradients)
            else:
                self._add(held, self._params[stage], gradients)
        finally:
            torch._C._set_grad_enabled(before)

    def _add(self, held: _Stage, params: Sequence[Tensor], gradients: Gradients) -> None:
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            sofar = held.sums[place]
            if sofar is None and self._before:
                sofar = self._before.get(params[place])
            if sofar is None:
                held.sums[place] = gradient
            elif held.own[place] and gradient.layout is torch.strided:
                sofar.add_(gradient)
            else:
                held.sums[place] = made = total(sofar, gradient)
                held.own[place] = made.layout is torch.strided

    def leaves(self) -> Leaves:
        return [
            (param, found)
            for stage, held in self._stages.items()
            for param, found in zip(self._params[stage], held.sums, strict=True)
            if found is not None
        ]


def _dense(gradients: Gradients) -> bool:
    return {*map(type, gradients)} == {Tensor} and {*map(_layout, gradients)} == {torch.strided}
