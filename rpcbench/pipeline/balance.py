"""The best partition of a row of modules into stages: each stage is a piece of the row, and none is empty.

A module's weight is its number of parameters, or the time or memory that it needs for a sample. Weighing leaves the
model unchanged: parameters, buffers, gradients, random state. A tied weight counts at its first module.
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
from rpcbench.pipeline.recompute import seeded_rng
from rpcbench.pipeline.stage_graph import OUTSIDE, ModuleLink, Value, values_of_output

ROUNDS = 5
"""Measurements of the time of each module; the median counts."""


def weigh_links(
    kind: str, links: Sequence[ModuleLink], taken: Sequence[tuple[Value, ...]], sample: tuple[Any, ...] | None
) -> list[int]:
    """Return the weight of each link, by this kind of `balance`: "params" (count), "time" (ns) or "memory" (bytes). The
    last two run every module on the `sample`, the model's inputs: forward, and backward as far as gradients flow.
    Memory is that of training: weights, their gradients, and the tensors that the backward keeps for the sample."""
    kinds: dict[str, Callable[[nn.Module, tuple[Any, ...]], int]] = {
        "time": _measure_nanoseconds,
        "memory": _count_saved_bytes,
    }
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
    measured = _measure_links(kinds[kind], links, taken, sample)
    if kind == "time":
        return measured
    held = [sum(p.nbytes * (2 if p.requires_grad else 1) for p in new) for new in _new_parameters(links)]
    return [kept + own for kept, own in zip(measured, held, strict=True)]


def _new_parameters(links: Sequence[ModuleLink]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each link; one that is used again is at its first link only."""
    seen: set[int] = set()
    for link in links:
        new = [parameter for parameter in link.module.parameters() if id(parameter) not in seen]
        seen.update(map(id, new))
        yield new


def _measure_links(
    measure: Callable[[nn.Module, tuple[Any, ...]], int],
    links: Sequence[ModuleLink],
    taken: Sequence[tuple[Value, ...]],
    sample: tuple[Any, ...],
) -> list[int]:
    """Return the measure of each link, on a copy of its module, with the values that it gets in the model."""
    held = {Value(OUTSIDE, place): value for place, value in enumerate(sample)}
    measured = []
    for number, (link, values) in enumerate(zip(links, taken, strict=True)):
        module, args = copy.deepcopy(link.module), link.dimension_spec.name_inputs([held[value] for value in values])
        with seeded_rng(0), torch.enable_grad():  # the process's random state stays as it was
            measured.append(measure(module, args))
            made = module(*map(_copy_as_input, args))
        held.update(
            (Value(number, place), value) for place, value in enumerate(values_of_output(made, link.dimension_spec))
        )
    return measured


def _measure_nanoseconds(module: nn.Module, args: tuple[Any, ...]) -> int:
    return int(median([_time_round(module, args) for _ in range(ROUNDS + 1)][1:]))  # the first warms up


def _time_round(module: nn.Module, args: tuple[Any, ...]) -> int:
    begin = time.perf_counter_ns()
    made = module(*map(_copy_as_input, args))
    values = made.values() if isinstance(made, dict) else made if isinstance(made, tuple | list) else (made,)
    roots = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return time.perf_counter_ns() - begin


def _count_saved_bytes(module: nn.Module, args: tuple[Any, ...]) -> int:
    """Return the bytes that autograd saves for the backward, each memory once; parameters are counted elsewhere."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}  # address → bytes

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), min(tensor.nbytes, storage.nbytes())  # a view may be of much more
        if place not in own:
            kept[place] = max(kept.get(place, 0), size)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = module(*map(_copy_as_input, args))
    del made
    return sum(kept.values())


def _copy_as_input(value: Any) -> Any:
    """Return the value as a stage would receive it: in a graph of its own, and free to be modified in place."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad).clone()


class _Partition(NamedTuple):
    """The first stages of a partition: their weights and module counts, largest first; smaller is better."""

    weights: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]  # module counts in the order of the stages

    @property
    def sort_key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.weights, self.counts

    def with_stage(self, weight: int, count: int) -> _Partition:
        weights, counts = sorted((*self.weights, weight), reverse=True), sorted((*self.counts, count), reverse=True)
        return _Partition(tuple(weights), tuple(counts), (*self.sizes, count))


def balance_stages(weights: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return how many modules each stage gets so that the heaviest stage is as light as possible, then the second, and
    so on. Ties go to equal module counts, then to late cuts: a module without weight stays with the one before it. The
    result is exact. Needs 1 <= stages <= len(weights)."""
    # Adding the same stage to two plans never changes which is better, so the best prefixes extend to the best plan.
    sums = list(accumulate(weights, initial=0))  # prefix sums: the weight of a piece is a difference
    best = {0: _Partition((), (), ())}  # modules so far → best plan for them
    for stage in range(1, stages + 1):
        ends = range(stage, len(weights) - (stages - stage) + 1)
        best = {end: _add_stage(best, sums, end) for end in ends}
    return best[len(weights)].sizes


def _add_stage(best: dict[int, _Partition], sums: Sequence[int], end: int) -> _Partition:
    """Return the best plan up to `end`, with one more stage than those in `best`."""
    begins = sorted((begin for begin in best if begin < end), reverse=True)  # late cuts first: they win ties
    found = best[begins[0]].with_stage(sums[end] - sums[begins[0]], end - begins[0])
    for begin in begins[1:]:
        weight = sums[end] - sums[begin]
        if weight > found.weights[0]:
            break  # this stage alone is too heavy, and earlier cuts add to it
        other = best[begin].with_stage(weight, end - begin)
        found = min(found, other, key=lambda plan: plan.sort_key)
    return found
