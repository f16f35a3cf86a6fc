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

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

Grads = Sequence["Tensor | None"]
Portions = list[tuple[GradientEdge, "Tensor | None"]]
Taps = Mapping[Any, Sequence[tuple[int, GradientEdge]]]

_RUN = "rpcbench.autograd.taps.run"


def run(
    starts: Mapping[GradientEdge, Tensor], ends: Sequence[GradientEdge], taps: Taps, retain_graph: bool
) -> tuple[Grads, Portions]:
    """Run backward from `starts` to `ends`, and up to the edges that `taps` names: their places and targets by node.

    Returns the gradients that came to the ends, and those on the tapped edges. The tensor hooks of an end are run.
    Without ends, the nodes of `taps` are what is run for.
    """
    if not taps:
        return _grad(starts, ends, retain_graph), []
    taken: dict[int, Portions] = {}
    handles = [node.register_hook(partial(_take, node, edges, taken)) for node, edges in taps.items()]
    try:
        with _stashed(taken):
            grads: Grads = ()
            if ends:
                grads = _grad(starts, ends, retain_graph)
            else:
                inputs = [GradientEdge(node, 0) for node in taps]
                torch.autograd.backward(list(starts), list(starts.values()), retain_graph, inputs=inputs)
    finally:
        for handle in handles:
            handle.remove()
    return grads, (taken[min(taken)] if taken else [])


@contextlib.contextmanager
def _stashed(taken: object) -> Iterator[None]:
    """Have torch hand `taken` to the threads of the backwards that begin inside, so that a tap knows whose they are."""
    outer = torch._C._get_obj_in_tls(_RUN) if torch._C._is_key_in_tls(_RUN) else None
    torch._C._stash_obj_in_tls(_RUN, taken)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_RUN, outer)


def _grad(starts: Mapping[GradientEdge, Tensor], ends: Sequence[GradientEdge], retain_graph: bool) -> Grads:
    """`torch.autograd.grad`, without its checks of what was checked before: they cost a third of a small backward."""
    return _engine_run_backward(
        tuple(starts),
        tuple(starts.values()),
        retain_graph,
        False,
        tuple(ends),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def _take(
    node: Any, edges: Sequence[tuple[int, GradientEdge]], taken: dict[int, Portions], down: Grads, up: Grads
) -> None:
    """Runs after `node` in any backward that has it: note what leaves by the tapped edges, if the run is ours."""
    if not torch._C._is_key_in_tls(_RUN) or torch._C._get_obj_in_tls(_RUN) is not taken:
        return
    if not isinstance(node, torch._C._FunctionBase) and any(down[place] is None for place, _ in edges):
        down = _compute(node, up, [target for _, target in edges])
    portions = taken.setdefault(torch._C._current_graph_task_id(), [])
    portions += [(target, _fit(down[place], target)) for place, target in edges]


def _compute(node: Any, up: Grads, targets: Sequence[GradientEdge]) -> Grads:
    """What `node` makes of `up` for the edges to `targets` alone."""
    results: list[Any] = []
    scalar = torch.zeros((), requires_grad=True)
    scalar.register_hook(lambda _: results.append(node(*up)))  # type: ignore[no-untyped-call]
    inputs: list[Any] = [scalar, *targets]
    torch.autograd.grad(scalar, inputs, scalar, allow_unused=True)
    (result,) = results
    return result if isinstance(result, tuple) else (result,)


def _fit(grad: Tensor | None, target: GradientEdge) -> Tensor | None:
    """The gradient summed over what was broadcast: torch's engine does that after the hooks of a node."""
    if grad is None:
        return None
    shape = torch.Size(target.node._input_metadata[target.output_nr].shape)
    return grad if grad.shape == shape else grad.sum_to_size(shape)
