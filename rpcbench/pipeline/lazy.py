"""Modules that are built where they are needed: their weights never cross the driver.

Guarantees: a module is the same wherever it is built, and in every stage or order: its random numbers begin from a seed
drawn where `lazy` is called, so `torch.manual_seed` before that decides all. Building draws nothing from the worker's
own random numbers.

Weights that lazy modules have in common are named, as no weight is there yet:

    split([lazy(nn.Embedding, 9, 5), …, lazy(nn.Linear, 5, 9)], …, tie=[("0.weight", "7.weight")])

The first module of the row that has the weight decides what it is, wherever the others are built: they build that one,
too, take the weight, and let go of the rest. From then on copies are those of any tied weight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.recompute import seeded
from rpcbench.pipeline.stage_graph import Link

Names = tuple[tuple[str, ...], ...]
"""For each weight all names that it has."""


def checked_ties(tie: Sequence[Sequence[str]], links: Sequence[Link]) -> Names:
    """PipelineError for what are no names of weights of lazy modules, of one in each module and in one tie; and for
    what cannot be lazy."""
    checked({link.name: link.module for link in links})
    found = tuple(tuple(names) for names in tie if not isinstance(names, str))
    names = [name for each in found for name in each]
    if len(found) < len(tie) or any(len(each) < 2 for each in found) or not all(isinstance(n, str) for n in names):
        raise PipelineError(f"tie must be lists of two or more names each, as [('0.weight', '7.weight')], not {tie!r}")
    for name in names:
        place, _ = _place(name, links)
        if not isinstance(links[place].module, Lazy):
            raise PipelineError(f"{name!r} cannot be tied by name: it is there already, so let modules share it")
        if names.count(name) > 1:
            raise PipelineError(f"{name!r} is tied twice: name all that are one weight in one list")
    for each in found:
        if len({_place(name, links)[0] for name in each}) < len(each):
            raise PipelineError(f"{' and '.join(map(repr, each))}: a module ties what it has twice by itself")
    return found


def tied_in(ties: Names, links: Sequence[Link], begin: int, end: int) -> tuple[Tied, ...]:
    """What a stage has of them, that of the links from `begin` to `end`."""
    found = []
    for number, names in enumerate(ties):
        places = sorted(_place(name, links) for name in names)
        own = tuple(f"{place - begin}.{rest}" for place, rest in places if begin <= place < end)
        first, name = places[0]
        module = links[first].module
        assert isinstance(module, Lazy), "as `checked_ties` has seen"
        if own:
            found.append(Tied(number, own, None if begin <= first < end else module, name, names))
    return tuple(found)


def _place(name: str, links: Sequence[Link]) -> tuple[int, str]:
    """The number of the link that has it, and what that calls it."""
    having = [number for number, link in enumerate(links) if name.startswith(link.keys)]
    if not having:
        raise PipelineError(f"no module has {name!r}, which is to be tied")
    number = max(having, key=lambda number: len(links[number].keys))
    return number, name.removeprefix(links[number].keys)


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
