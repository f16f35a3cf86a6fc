"""Runs a part of torch's graph and takes the gradients off the edges that leave it.

The node at the far end of such an edge may get more from elsewhere, and its hooks run on the whole sum. Captured by
torch's engine, they would run on this portion. So a portion is taken where it leaves, by a hook that runs after the
node at the near end.

Guarantees
- `run` executes the nodes between `starts` and the ends or tapped edges, each once, and each hook of each of them.
- Nothing at the far end of a tapped edge runs.
- A node may be in several runs at once, on several threads: each takes its own gradients.

Rules
- A built-in node computes what the running backward asks for, and nobody asks for a tapped edge. So the tap calls the
  node once more, inside a backward of one scalar that asks for these edges alone and never gets to them.
- A `Node.register_hook` on such a node sees None for its tapped edges, as in any backward that does not ask for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Grads = Sequence["Tensor | None"]
Portions = list[tuple[GradientEdge, "Tensor | None"]]


def run(
    starts: Mapping[GradientEdge, Tensor],
    ends: Sequence[GradientEdge],
    taps: Mapping[Any, Sequence[int]],
    retain_graph: bool,
) -> Portions:
    """Run backward from `starts` to `ends`, and up to each edge that `taps` names by node and place.

    Returns the gradients that came to the ends, then those on the tapped edges. The tensor hooks of an end are run.
    Without ends, the nodes of `taps` are what is run for.
    """
    if not taps:
        return _grad(starts, ends, retain_graph)
    taken: dict[int, Portions] = {}
    me: list[int] = []
    mark = _mark(lambda: me.append(torch._C._current_graph_task_id()))
    starts = {**starts, get_gradient_edge(mark): mark}
    handles = [node.register_hook(partial(_take, node, places, taken)) for node, places in taps.items()]
    try:
        if ends:
            portions = _grad(starts, [get_gradient_edge(mark), *ends], retain_graph)[1:]
        else:
            portions = []
            inputs = [get_gradient_edge(mark), *(GradientEdge(node, 0) for node in taps)]
            torch.autograd.backward(list(starts), list(starts.values()), retain_graph, inputs=inputs)
    finally:
        for handle in handles:
            handle.remove()
    return portions + taken.get(me[0], [])


def _grad(starts: Mapping[GradientEdge, Tensor], ends: Sequence[GradientEdge], retain_graph: bool) -> Portions:
    grads = torch.autograd.grad(list(starts), ends, list(starts.values()), retain_graph, allow_unused=True)
    return list(zip(ends, grads, strict=True))


def _mark(note: Callable[[], None]) -> Tensor:
    """A leaf to start a backward from and to end it at: `note` is called within."""
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_hook(lambda _: note())  # type: ignore[no-untyped-call]
    return leaf


def _take(node: Any, places: Sequence[int], taken: dict[int, Portions], down: Grads, up: Grads) -> None:
    """Runs after `node`, in any backward that has it: note what leaves by the tapped edges."""
    targets = [GradientEdge(*node.next_functions[place]) for place in places]
    grads = [down[place] for place in places]
    if not isinstance(node, torch._C._FunctionBase) and any(grad is None for grad in grads):
        computed = _compute(node, up, targets)
        grads = [computed[place] for place in places]
    portions = taken.setdefault(torch._C._current_graph_task_id(), [])
    portions += [(target, _fit(grad, target)) for target, grad in zip(targets, grads, strict=True)]


def _compute(node: Any, up: Grads, targets: Sequence[GradientEdge]) -> Grads:
    """What `node` makes of `up` for the edges to `targets` alone."""
    results: list[Any] = []
    mark = _mark(lambda: results.append(node(*up)))
    torch.autograd.grad(mark, [get_gradient_edge(mark), *targets], mark, allow_unused=True)
    (result,) = results
    return result if isinstance(result, tuple) else (result,)


def _fit(grad: Tensor | None, target: GradientEdge) -> Tensor | None:
    """The gradient as torch's engine passes it on: summed over what was broadcast, in the type of what it is for."""
    if grad is None:
        return None
    wanted: Any = target.node._input_metadata[target.output_nr]
    if grad.shape != (shape := torch.Size(wanted.shape)):
        grad = grad.sum_to_size(shape)
    if grad.dtype != wanted.dtype and (wanted.dtype.is_complex or not grad.is_complex()):
        grad = grad.to(wanted.dtype)
    return grad
