"""Gradients of one worker in a step: sums over micro-batches, split backward passes, and sums over tied weights.

Guarantees
- Sums are added in the order of the micro-batches, to those that the context has from before the step. Only memory
  made here is written to. The context gets the sums when the step is complete; a step that fails leaves it as it was.
- Both halves of a backward pass together give the result of one `torch.autograd.grad`, to the last bit unless a weight
  is used in three places or more. Each hook, of a tensor or a node, runs once, with the gradients of a whole backward.
- All copies of a tied weight get the same gradient, to the last bit, so equal copies stay equal. It is the sum over all
  copies in the order of the stages, made by the workers before any optimizer runs. Gradients of an
  earlier step in a context are not counted again.
"""

# Theory of operation
#
# `EngineSums`: torch's engine adds gradients up, each as soon as it is made, while it is still in the core's cache. It
# adds to `.grad`, so `.grad` has the sums while the engine runs and at no other time. The engine takes the first
# gradient as the sum without a copy, even if another tensor has that memory; so one that is shared is copied here.
#
# `SplitBackward`: first the gradient of a stage's input (INPUT), later those of its weights (WEIGHT).
#
#     output ── c ── b ── a ── input      path of the first half, which records the gradients that arrive at a, b and c
#               │    │    │
#               W    V    U               the second half leaves the path there, and computes nothing of it again
#
# The graph and its buffers are kept until the second half. If the input needs no gradient, the first half does nothing.
# A node of the path runs in the first half, with its hooks; a hook behind it notes the gradients with which it has run.
# The second half calls the node with these, without its hooks, for the edges to weights alone. A user's
# `torch.autograd.Function` is not called again, as it has computed all its gradients. Where a user's own hook is
# behind a node (`Node.register_hook`) and may change the gradients of weights, the first half computes all.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge

from rpcbench.autograd.gradients import Leaves, sum_gradients
from rpcbench.autograd.regions import compute_apart, is_in_python
from rpcbench.pipeline.exchange import TIED, Gradients, Messages, Slot, sum_optional_gradients
from rpcbench.pipeline.split import Stage

_PLAIN = Tensor, nn.Parameter
_hooks, _later_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_trained, _grad = attrgetter("requires_grad"), attrgetter("grad")


def summable_stages(params: Mapping[int, Sequence[Tensor]]) -> dict[int, Sequence[Tensor]]:
    """Return the stages whose parameters are all plain and used by no other stage here."""
    uses = Counter([id(param) for own in params.values() for param in own])
    return {stage: own for stage, own in params.items() if all(uses[id(p)] == 1 and _is_plain(p) for p in own)}


def _is_plain(param: Tensor) -> bool:
    return type(param) in _PLAIN and param.is_leaf and param.layout is torch.strided


def _without_hooks(params: Sequence[Tensor]) -> bool:
    """Return whether no hook observes the gradients of these parameters, and all are still trained."""
    return not any(map(_hooks, params)) and not any(map(_later_hooks, params)) and all(map(_trained, params))


def has_write_hooks(param: Tensor) -> bool:
    """Return whether a leaf has hooks that run when torch's engine writes its `.grad`."""
    node = get_gradient_edge(param).node
    # A node shows its hooks by the handle of one of them. It takes some 20 µs, so no step asks for it.
    handles = [node.register_prehook(lambda grads: None), node.register_hook(lambda down, up: None)]
    try:
        return bool(_later_hooks(param)) or any(len(handle.hooks_dict_ref() or ()) > 1 for handle in handles)
    finally:
        for handle in handles:
            handle.remove()


class EngineSums:
    """Sums that torch's engine makes in one step, for stages that are `summable_stages`, trained and without hooks."""

    def __init__(self, params: Mapping[int, Sequence[Tensor]]) -> None:
        self._params = {stage: own for stage, own in params.items() if _without_hooks(own)}
        self._sums: dict[int, list[Tensor | None]] = {stage: [None] * len(own) for stage, own in self._params.items()}
        self._new = {stage: [*range(len(own))] for stage, own in self._params.items()}  # places without a sum yet

    def __contains__(self, stage: int) -> bool:
        return stage in self._params

    def add_microbatch(
        self, stage: int, roots: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Run a micro-batch's backward from `roots`. Returns the gradients of `wanted`, its own leaves."""
        own = self._params[stage]
        if inputs := (*wanted, *own):  # with no inputs the engine would take all leaves
            before = [*map(_grad, own)]  # the user's
            _set_gradients(own, self._sums[stage])
            try:
                _engine_run_backward(
                    tuple(roots), tuple(gradients), False, False, inputs, allow_unreachable=True, accumulate_grad=True
                )
            finally:  # also after an error no sum stays in `.grad`
                self._sums[stage] = [*map(_grad, own)]
                _set_gradients(own, before)
            if self._new[stage]:
                self._unshare_sums(stage)
        return [value.grad for value in wanted]

    def _unshare_sums(self, stage: int) -> None:
        """Copy each new sum that shares its memory with another tensor."""
        sums, new = self._sums[stage], []
        for place in self._new[stage]:
            if (new_sum := sums[place]) is None:
                new.append(place)
            elif new_sum.layout is not torch.strided or _count_aliases(new_sum) > 1:
                sums[place] = new_sum.clone()
        self._new[stage] = new

    def summed_leaves(self) -> list[tuple[Tensor, Tensor]]:
        return [leaf for stage, own in self._params.items() for leaf in _pair_present(own, self._sums[stage])]


def _set_gradients(params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


def _count_aliases(tensor: Tensor) -> int:
    """Return how many tensors share the memory of one."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # `storage` is a reference of its own


Found = list[tuple[Tensor, Tensor]]
"""Weights with their gradients."""
Exits = list[tuple[int, GradientEdge]]
"""Edges at which a node leaves the path: place among the node's edges, and target."""


class SplitBackward:
    """A backward pass of `outputs` in two halves: for those `values` that a gradient is wanted for, then for
    `compute_weight_gradients`. `gradients`: those of the outputs; None: the output is a scalar loss."""

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor] | None,
        values: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> None:
        self._outputs, self._gradients = outputs, gradients
        self._values, self._weights = values, list(weights)
        self._starts: list[tuple[GradientEdge, Tensor | None]] = []  # of the second half, at outputs
        self._ran: list[tuple[Node, Exits, Sequence[Tensor | None]]] = []  # nodes of the path, with their gradients
        self._found: Found | None = None  # by the first half

    def compute_input_gradients(self) -> list[Tensor | None]:
        """Return the gradients of the values: the first half."""
        if not self._values:
            return []
        path_nodes, branches = _find_branches(self._outputs, self._values, self._weights)
        self._starts = self._gradients_off_path(path_nodes)
        hooks = [node.register_hook(partial(self._record_gradients, node, exits)) for node, exits in branches]
        try:
            whole = any(len(hook.hooks_dict_ref() or ()) > 1 for hook in hooks)  # a user's hook wants all gradients
            early = self._weights if whole else []
            found = torch.autograd.grad(
                self._outputs, [*self._values, *early], self._gradients, retain_graph=not whole, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        if whole:
            self._found = _pair_present(early, found[len(self._values) :])
        return list(found[: len(self._values)])

    def compute_weight_gradients(self) -> Found:
        """Return the weights that have a gradient, in their order: the second half. Call it once, after
        `compute_input_gradients`."""
        if self._found is not None or not self._weights:
            return self._found or []
        if not self._values:  # the first half did nothing
            grads = torch.autograd.grad(self._outputs, self._weights, self._gradients, allow_unused=True)
            return _pair_present(self._weights, grads)
        self._outputs = ()
        entries = [(edge, grad) for edge, grad in (*self._starts, *self._leave_path()) if grad is not None]
        if not entries:
            return []
        grads = _engine_run_backward(
            *zip(*entries, strict=True), False, False, (*self._weights,), allow_unreachable=True, accumulate_grad=False
        )
        return _pair_present(self._weights, grads)

    def _leave_path(self) -> list[tuple[GradientEdge, Tensor | None]]:
        """Return the gradients at the exits of the path, in the order in which torch's engine computes them."""
        exits = [own for _, own, _ in self._ran]
        targets = [target for own in exits for _, target in own]
        found = compute_apart(_drain_nodes(self._ran), targets)
        return [(target, down[place]) for own, down in zip(exits, found, strict=True) for place, target in own]

    def _gradients_off_path(self, path_nodes: set[Node]) -> list[tuple[GradientEdge, Tensor | None]]:
        """Return the gradients of outputs that no value leads to: the first half does not pass them."""
        edges = [get_gradient_edge(output) for output in self._outputs]
        gradients = [*map(torch.ones_like, self._outputs)] if self._gradients is None else self._gradients
        return [(edge, grad) for edge, grad in zip(edges, gradients, strict=True) if edge.node not in path_nodes]

    def _record_gradients(
        self, node: Node, exits: Exits, down: Sequence[Tensor | None], up: Sequence[Tensor | None]
    ) -> None:
        """Record the gradients with which a node of the path has run."""
        if is_in_python(node):
            self._starts += [(target, down[place]) for place, target in exits]
        else:
            self._ran.append((node, exits, up))


def _drain_nodes(
    ran: list[tuple[Node, Exits, Sequence[Tensor | None]]],
) -> Iterator[tuple[Node, Sequence[Tensor | None]]]:
    """Yield nodes with their gradients. Each frees what only it needs of the graph before the next one comes."""
    ran.reverse()
    while ran:
        node, _, up = ran.pop()
        yield node, up


def _find_branches(
    outputs: Sequence[Tensor], values: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[set[Node], list[tuple[Node, Exits]]]:
    """Return the nodes of the path, and those at which a backward leaves it for weights, with their exits."""
    order = _sort_postorder([get_gradient_edge(output).node for output in outputs])
    path_nodes = _leading_to({get_gradient_edge(value).node for value in values}, order)
    needed = _leading_to({get_gradient_edge(weight).node for weight in weights}, order) - path_nodes
    exits = {
        node: [
            (place, GradientEdge(child, number))
            for place, (child, number) in enumerate(node.next_functions)
            if child in needed
        ]
        for node in order
        if node in path_nodes
    }
    return path_nodes, [(node, own) for node, own in exits.items() if own]


def _leading_to(ends: set[Node], order: Sequence[Node]) -> set[Node]:
    """Return the nodes from which one of `ends` is reached; `order` has children before parents."""
    leading = set(ends)
    for node in order:
        if any(child in leading for child in _child_nodes(node)):
            leading.add(node)
    return leading


def _sort_postorder(roots: Sequence[Node]) -> list[Node]:
    """Return all reachable nodes, children before parents. The list keeps the Python object of each alive."""
    order: list[Node | None] = []
    seen: set[Node] = set()
    stack: list[tuple[Node | None, Iterator[Node]]] = [(None, iter(roots))]
    while stack:  # no recursion: graphs are deeper than Python allows
        node, children = stack[-1]
        child = next((child for child in children if child not in seen), None)
        if child is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(child)
            stack.append((child, _child_nodes(child)))
    return [node for node in order if node is not None]


def _child_nodes(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _pair_present(weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Found:
    return [(weight, grad) for weight, grad in zip(weights, grads, strict=True) if grad is not None]


Tie = dict[int, str]
"""Stage → its name for its copy of one weight."""


def find_ties(stages: Sequence[Stage]) -> list[Tie]:
    """Return the parameters that several of these stages have, or will have after lazy modules are built."""
    found: dict[tuple[str, int], Tie] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            found.setdefault(("there", id(parameter)), {})[stage.index] = name
        for tied in stage.tied:
            found.setdefault(("lazy", tied.number), {})[stage.index] = tied.own[0]
    return [tie for tie in found.values() if len(tie) > 1]


class Copies:
    """One worker's copies of tied weights: (number of the tie, stage). `params`: stage → trained parameters."""

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
        """Stage → place among its parameters → the copy at that place."""

    def is_repeated(self, param: torch.Tensor) -> bool:
        """Return whether an earlier stage has this parameter, too."""
        name = self._named.get(param)
        return name is not None and name[1] > min(self.ties[name[0]])


class TiedGradients:
    """Gradients of this worker's copies in one step, kept apart until those of all other copies have arrived."""

    def __init__(self, step: int, copies: Copies) -> None:
        self._step, self._copies = step, copies
        self._own: dict[tuple[int, int], torch.Tensor | None] = dict.fromkeys(copies.names)

    def keep_tied_gradients(self, stage: int, gradients: Gradients) -> Gradients:
        """Keep the gradients of a stage's tied weights. Returns the others, in their places."""
        tied = self._copies.places[stage]
        if not tied:
            return gradients
        rest = list(gradients)
        for place, copy in tied.items():
            self._own[copy], rest[place] = sum_optional_gradients(self._own[copy], rest[place]), None
        return rest

    def gradient_messages(self) -> Messages:
        """Return the messages with each copy's gradient to each of the other copies."""
        return [
            (Slot(self._step, TIED, other, number, stage), (gradient,))
            for (number, stage), gradient in self._own.items()
            for other in self._copies.ties[number]
            if other != stage
        ]

    def receive_totals(self, take: Callable[[Slot], tuple[Any, ...]]) -> dict[int, Gradients]:
        """Wait for the gradients of all copies. Returns stage → sums in the places of its tied weights."""
        found = {copy: self._sum_copies(copy, take) for copy in self._own}
        return {
            stage: [found[tied[place]] if place in tied else None for place in range(len(self._copies.params[stage]))]
            for stage, tied in self._copies.places.items()
            if tied
        }

    def _sum_copies(self, copy: tuple[int, int], take: Callable[[Slot], tuple[Any, ...]]) -> torch.Tensor | None:
        number, stage = copy
        total = None
        for other in sorted(self._copies.ties[number]):  # one order for all: the same bits
            gradient = self._own[copy] if other == stage else take(Slot(self._step, TIED, stage, number, other))[0]
            # a new tensor: two copies on one worker must not share the memory of a gradient
            total = (
                gradient.clone() if total is None and gradient is not None else sum_optional_gradients(total, gradient)
            )
        return total


class Sums:
    """Sums made in Python. `params`: stage → parameters, in the order of gradients; `before`: start values."""

    def __init__(self, params: Mapping[int, Sequence[Tensor]], before: Mapping[Tensor, Tensor]) -> None:
        self._params, self._before = params, before
        self._sums: dict[tuple[int, Tensor], Tensor] = {}  # (stage, parameter) → sum
        self._own: set[tuple[int, Tensor]] = set()  # sums that were made here, so they may be added to in place

    def add_gradients(self, stage: int, gradients: Gradients) -> None:
        with torch.no_grad():
            for param, gradient in _pair_present(self._params[stage], gradients):
                key = stage, param
                sofar = self._sums.get(key, self._before.get(param))
                if sofar is None:
                    self._sums[key] = gradient  # not a copy: the engine's memory, so not `_own`
                elif key in self._own and gradient.layout is torch.strided:  # a sparse one needs another kind of sum
                    sofar.add_(gradient)
                else:
                    self._sums[key] = made = sum_gradients(sofar, gradient)
                    if made.layout is torch.strided:
                        self._own.add(key)

    def summed_leaves(self) -> Leaves:
        return [(param, total) for (_, param), total in self._sums.items()]
