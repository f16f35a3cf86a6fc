"""A split model run against the whole one, here, before any worker is asked: is it the same, and what crosses cuts?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.exchange import nbytes
from rpcbench.pipeline.ports import OUTSIDE, Ports, Segment, sendable
from rpcbench.runtime.handles import layout_of


@dataclass(frozen=True, slots=True)
class Crossing:
    """What goes from a stage to another for one batch: "float32[4, 8]" for each tensor, and bytes of all."""

    source: int
    stage: int
    values: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Check:
    """`difference`: the largest between an element of the split model's output and the whole's; 0.0 is the same bits.

    `print` shows it.
    """

    difference: float
    crossings: tuple[Crossing, ...]

    def __str__(self) -> str:
        lines = [f"largest difference from the whole model: {self.difference:g}"]
        for c in self.crossings:
            lines.append(f"stage {c.source} → {c.stage}: {', '.join(c.values)} ({c.nbytes} bytes)")
        return "\n".join(lines)


class Stage(Protocol):
    """What is looked at here of a stage of `split`."""

    @property
    def index(self) -> int: ...
    @property
    def module(self) -> nn.Sequential: ...
    @property
    def ports(self) -> Ports: ...


def check(
    stages: Sequence[Stage], inputs: tuple[Any, ...], whole: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> Check:
    """Run the stages one after the other on the model's inputs, and `whole(*args, **kwargs)`; in evaluation mode."""
    given: dict[int, tuple[Any, ...]] = {}
    crossings: list[Crossing] = []
    made: Any = None
    with contextlib.ExitStack() as modes, torch.no_grad():
        modes.enter_context(evaluating(whole))
        for stage in stages:
            modes.enter_context(evaluating(stage.module))
            values = _taken(stage, given, inputs, crossings, stages)
            made = stage.module(*values)
            if stage is not stages[-1]:
                given[stage.index] = sendable(made if isinstance(stage.module, Segment) else (made,), stage.index)
        return Check(
            _difference(made, whole(*args, **kwargs)), tuple(sorted(crossings, key=lambda c: (c.source, c.stage)))
        )


def _taken(
    stage: Stage,
    given: dict[int, tuple[Any, ...]],
    inputs: tuple[Any, ...],
    crossings: list[Crossing],
    stages: Sequence[Stage],
) -> list[Any]:
    values: list[Any] = [None] * len(stage.ports.order)
    for way in stage.ports.takes:
        if way.stage == OUTSIDE:
            message = tuple(inputs[number] for number in stage.ports.inputs)
        else:
            (sent,) = (each for each in stages[way.stage].ports.gives if each.stage == stage.index)
            message = tuple(given[way.stage][place] for place in sent.places)
            crossings.append(Crossing(way.stage, stage.index, tuple(map(_told, message)), nbytes(message)))
        for place, value in zip(way.places, message, strict=True):
            values[place] = value
    return values


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode inside, and afterwards each of its modules as it was."""
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode


def _told(value: Any) -> str:
    return layout_of(value) if isinstance(value, torch.Tensor) else repr(value)


def _difference(found: Any, wanted: Any) -> float:
    """The largest between any two elements; dicts of any class are compared by their keys."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        if found.keys() != wanted.keys():
            raise PipelineError(f"the split model gives {_keys(found)}, the whole one {_keys(wanted)}")
        return max((_difference(found[key], wanted[key]) for key in wanted), default=0.0)
    (one, spec), (other, others) = (
        _pytree.tree_flatten(made, lambda v: isinstance(v, dict)) for made in (found, wanted)
    )
    if spec != others or isinstance(found, dict) or isinstance(wanted, dict):
        raise PipelineError(f"the split model gives {type(found).__name__}, the whole one {type(wanted).__name__}")
    if spec.is_leaf():
        return _apart(found, wanted)
    return max((_difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def _keys(made: dict[Any, Any]) -> str:
    return ", ".join(map(repr, made)) or "an empty dict"


def _apart(one: Any, other: Any) -> float:
    if not isinstance(one, torch.Tensor):
        return 0.0 if one == other else float("inf")
    if one.shape != other.shape or one.dtype != other.dtype:
        raise PipelineError(f"the split model gives {_told(one)}, the whole one {_told(other)}")
    same = (one == other) | ((one != one) & (other != other))
    apart = torch.where(same, 0.0, (one.double() - other.double()).abs())
    return float(apart.max()) if apart.numel() else 0.0
