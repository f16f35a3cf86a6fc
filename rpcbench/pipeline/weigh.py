"""How heavy each module of a row is: in parameters, or in time or memory as a sample shows.

Guarantees: weighing leaves the model as it was: parameters, buffers, gradients, random numbers; a tied weight counts
where it comes first.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.chance import seeded
from rpcbench.pipeline.lazy import Lazy
from rpcbench.pipeline.links import Link
from rpcbench.pipeline.ports import OUTSIDE, Value, given

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
