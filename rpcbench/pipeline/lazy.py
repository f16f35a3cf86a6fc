"""Modules that are built where they are needed: their weights never cross the driver.

Guarantees: a module is the same wherever it is built, and in every stage or order: its random numbers begin from a seed
drawn where `lazy` is called, so `torch.manual_seed` before that decides all. Building draws nothing from the worker's
own random numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.chance import seeded

_one_at_a_time = threading.Lock()
"""Several stages of a worker are built by several threads, and all draw from the process's one generator."""


class Lazy(nn.Module):
    """A module to be built later, without parameters until then. Made by `lazy`."""

    def __init__(self, factory: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.factory, self.args, self.kwargs = factory, args, kwargs
        self.seed = int(torch.randint(2**62, ()))

    def build(self) -> nn.Module:
        """A new module, each time the same. PipelineError where the factory makes something else."""
        with _one_at_a_time, seeded(self.seed):
            made = self.factory(*self.args, **self.kwargs)
        if not isinstance(made, nn.Module):
            raise PipelineError(f"{self!r} made {type(made).__name__}, not a torch.nn.Module")
        return made

    def extra_repr(self) -> str:
        keywords = [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return ", ".join([getattr(self.factory, "__name__", repr(self.factory)), *map(repr, self.args), *keywords])


def lazy(factory: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Lazy:
    """`factory(*args, **kwargs)`, usually a class of modules, to be called on the worker that the module is for.

        split([lazy(nn.Linear, 4, 8), nn.ReLU(), lazy(nn.Linear, 8, 1)], workers, balance=[2, 1])

    Its random numbers are decided here: the same after the same `torch.manual_seed`, whatever the split.
    """
    return Lazy(factory, args, kwargs)


def checked(row: Mapping[str, nn.Module]) -> None:
    """PipelineError for a lazy module within another, and for one in two places: each would be another module."""
    places: dict[nn.Module, str] = {}
    for name, module in row.items():
        for inner, found in module.named_modules():
            if inner and isinstance(found, Lazy):
                raise PipelineError(f"{found!r} is inside {name!r}: only what stands in the row itself can be lazy")
        if isinstance(module, Lazy) and places.setdefault(module, name) != name:
            raise PipelineError(f"{name!r} and {places[module]!r} are the same {module!r}: call lazy() for each")


class Tied(NamedTuple):
    """A weight that lazy modules of a stage have in common with each other, or with `first` in another stage.

    `own`: what the stage calls it, in the order of its modules; `name`: what `first` calls it. `number`: which of all
    ties this is, and `names` are all that the un-split model has for it.
    """

    number: int
    own: tuple[str, ...]
    first: Lazy | None
    name: str
    names: tuple[str, ...]


def built(stage: nn.Sequential, tied: Sequence[Tied] = ()) -> nn.Sequential:
    """The stage, with all that is lazy in its row built, and tied. PipelineError for what cannot be one weight."""
    for place, module in enumerate(stage):
        if isinstance(module, Lazy):
            stage[place] = module.build()
    made = {first: first.build() for first in dict.fromkeys(each.first for each in tied) if first is not None}
    for each in tied:
        own = [_weight(stage, name, each) for name in each.own]
        first = own[0] if each.first is None else _weight(made[each.first], each.name, each)
        _tie(stage, each, own, first)
    return stage


def _weight(module: nn.Module, name: str, tied: Tied) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        raise PipelineError(f"{_listed(tied)} cannot be tied: {error}") from error


def _tie(stage: nn.Module, tied: Tied, own: Sequence[nn.Parameter], first: nn.Parameter) -> None:
    """Let all of the stage's own be one, which is as the first."""
    kinds = dict.fromkeys(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in (first, *own))
    if len(kinds) > 1:
        raise PipelineError(f"{_listed(tied)} cannot be tied: they are {' and '.join(kinds)}")
    with torch.no_grad():
        own[0].copy_(first).requires_grad_(first.requires_grad)
    for name in tied.own[1:]:
        holder, _, leaf = name.rpartition(".")
        setattr(stage.get_submodule(holder), leaf, own[0])


def _listed(tied: Tied) -> str:
    return " and ".join(map(repr, tied.names))
