"""The best way to share out a row of modules among stages, each stage a piece of the row and none empty.

A module weighs its parameters, or the time or memory that it takes with a sample. Weighing leaves the model as it was:
parameters, buffers, gradients, random numbers; a tied weight counts where it comes first.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.lazy import Lazy
from rpcbench.pipeline.recompute import seeded
from rpcbench.pipeline.stage_graph import OUTSIDE, Link, Value, given

ROUNDS = 5
"""So often is each module timed; the median counts."""


def weigh(
    kind: str, links: Sequence[Link], taken: Sequence[tuple[Value, ...]], sample: tuple[Any, ...] | None
) -> list[int]:
    """The weight of each link, by this kind of `balance`: "params", "time" (ns) or "memory" (bytes).

    "time" and "memory" run every module on the `sample`, the model's inputs: forward, and backward as far as gradients
    flow. Memory is what training needs: weights, their gradients, and what the backward keeps of the sample.
    """
    kinds: dict[str, Callable[[nn.Module, tuple[Any, ...]], int]] = {"time": _nanoseconds, "memory": _kept}
    if kind != "params" and kind not in kinds:
        raise PipelineError(
            f"unknown balance {kind!r}; there is 'params', 'time', 'memory', or a list with the modules per stage"
        )
    for link in links:
        if isinstance(link.module, Lazy):
            raise PipelineError(
                f"{link.name!r} is built on its worker, so its weight is not known here: give the number of modules "
                "per stage (balance=[2, 1]), or the names where stages begin (at=[...])"
            )
    if kind == "params":
        return [sum(p.numel() for p in new) for new in _new_parameters(links)]
    if sample is None:
        raise PipelineError(f"balance={kind!r} runs the model here: give it a batch, as sample=x[:8]")
    measured = _measured(kinds[kind], links, taken, sample)
    if kind == "time":
        return measured
    return [m + sum(_held(p) for p in new) for m, new in zip(measured, _new_parameters(links), strict=True)]


def _new_parameters(links: Sequence[Link]) -> Iterator[list[nn.Parameter]]:
    """Parameters per link; one that is used again comes where it is first."""
    seen: set[int] = set()
    for link in links:
        new = [parameter for parameter in link.module.parameters() if id(parameter) not in seen]
        seen.update(map(id, new))
        yield new


def _held(parameter: nn.Parameter) -> int:
    return parameter.nbytes * (2 if parameter.requires_grad else 1)


def _measured(
    measure: Callable[[nn.Module, tuple[Any, ...]], int],
    links: Sequence[Link],
    taken: Sequence[tuple[Value, ...]],
    sample: tuple[Any, ...],
) -> list[int]:
    """Each link's own measure, on a copy, with the values it would get."""
    held = {Value(OUTSIDE, place): value for place, value in enumerate(sample)}
    measured = []
    for number, (link, values) in enumerate(zip(links, taken, strict=True)):
        module, args = copy.deepcopy(link.module), link.terms.taken([held[value] for value in values])
        with seeded(0), torch.enable_grad():
            measured.append(measure(module, args))
            made = module(*map(_own, args))
        held.update((Value(number, place), value) for place, value in enumerate(given(made, link.terms)))
    return measured


def _nanoseconds(module: nn.Module, args: tuple[Any, ...]) -> int:
    """The median of some rounds, after one that counts for nothing."""
    return int(median([_round(module, args) for _ in range(ROUNDS + 1)][1:]))


def _round(module: nn.Module, args: tuple[Any, ...]) -> int:
    begin = time.perf_counter_ns()
    made = module(*map(_own, args))
    roots = [value for value in _tensors(made) if value.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return time.perf_counter_ns() - begin


def _kept(module: nn.Module, args: tuple[Any, ...]) -> int:
    """Bytes that the backward keeps, each memory once; parameters are counted elsewhere."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), min(tensor.nbytes, storage.nbytes())  # a view may be of much more
        if place not in own:
            kept[place] = max(kept.get(place, 0), size)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = module(*map(_own, args))
    del made
    return sum(kept.values())


def _own(value: Any) -> Any:
    """The value as a stage would get it: of a graph of its own, and to be changed in place if the module likes."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad).clone()


def _tensors(made: Any) -> list[torch.Tensor]:
    values = made.values() if isinstance(made, dict) else made if isinstance(made, tuple | list) else (made,)
    return [value for value in values if isinstance(value, torch.Tensor)]


class _Plan(NamedTuple):
    """The first stages: how heavy they are, and how many things they have, each the largest first; less is better."""

    weights: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def badness(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.weights, self.counts

    def extended(self, weight: int, count: int) -> _Plan:
        weights, counts = sorted((*self.weights, weight), reverse=True), sorted((*self.counts, count), reverse=True)
        return _Plan(tuple(weights), tuple(counts), (*self.sizes, count))


def balanced(weights: Sequence[int], stages: int) -> tuple[int, ...]:
    """How many things each stage gets so that the heaviest stage is as light as can be, then the second, and so on.

    Ties go to the even numbers of things, then to the late cuts: a thing without weight stays with the one before it.
    Exact; needs 1 <= stages <= len(weights).
    """
    # Adding the same stage to two plans never changes which is better, so the best prefixes extend to the best plan.
    sums = list(accumulate(weights, initial=0))
    best = {0: _Plan((), (), ())}
    for stage in range(1, stages + 1):
        ends = range(stage, len(weights) - (stages - stage) + 1)
        best = {end: _extend(best, sums, end) for end in ends}
    return best[len(weights)].sizes


def _extend(best: dict[int, _Plan], sums: Sequence[int], end: int) -> _Plan:
    """The best plan up to `end` with one more stage than those in `best`."""
    begins = sorted((begin for begin in best if begin < end), reverse=True)
    found = best[begins[0]].extended(sums[end] - sums[begins[0]], end - begins[0])
    for begin in begins[1:]:
        weight = sums[end] - sums[begin]
        if weight > found.weights[0]:
            break  # too heavy alone, and it only grows
        other = best[begin].extended(weight, end - begin)
        found = min(found, other, key=lambda plan: plan.badness)
    return found
