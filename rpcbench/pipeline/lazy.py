"""Modules that are built on their workers: their weights never pass through the driver.

Guarantees
- A module is the same wherever it is built, and in every stage or order: it draws from a seed that `lazy` has drawn, so
  `torch.manual_seed` before that determines all.
- Building a module draws nothing from the worker's own random state.

Weights that lazy modules share are given by name, as no weight exists yet:

    split([lazy(nn.Embedding, 9, 5), …, lazy(nn.Linear, 5, 9)], …, tie=[("0.weight", "7.weight")])
"""

# The first module of the row that has a tied weight determines its values, wherever the others are built: another stage
# builds that module, too, copies the weight and frees the rest. From then on the copies are those of any tied weight.

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.recompute import seeded_rng
from rpcbench.pipeline.stage_graph import ModuleLink

Names = tuple[tuple[str, ...], ...]
"""For each weight all of its names."""


def validate_ties(tie: Sequence[Sequence[str]], links: Sequence[ModuleLink]) -> Names:
    """Return the ties. PipelineError for bad lazy modules, and for names that are no weights of theirs."""
    check_lazy_modules({link.name: link.module for link in links})
    found = tuple(tuple(names) for names in tie if not isinstance(names, str))
    names = [name for each in found for name in each]
    if len(found) < len(tie) or any(len(each) < 2 for each in found) or not all(isinstance(n, str) for n in names):
        raise PipelineError(f"tie must be lists of two or more names each, as [('0.weight', '7.weight')], not {tie!r}")
    for name in names:
        place, _ = _locate_weight(name, links)
        if not isinstance(links[place].module, Lazy):
            raise PipelineError(f"{name!r} cannot be tied by name: it exists already, so let the modules share it")
        if names.count(name) > 1:
            raise PipelineError(f"{name!r} is tied twice: put all names of one weight into one list")
    for each in found:
        if len({_locate_weight(name, links)[0] for name in each}) < len(each):
            raise PipelineError(f"{' and '.join(map(repr, each))}: a module has to tie its own weights itself")
    return found


def ties_of_stage(ties: Names, links: Sequence[ModuleLink], begin: int, end: int) -> tuple[Tied, ...]:
    """Return the ties of a stage that has the links from `begin` to `end`."""
    found = []
    for number, names in enumerate(ties):
        places = sorted(_locate_weight(name, links) for name in names)  # the first in the row comes first
        own = tuple(f"{place - begin}.{rest}" for place, rest in places if begin <= place < end)
        first, name = places[0]
        module = links[first].module
        assert isinstance(module, Lazy), "as `validate_ties` has seen"
        if own:
            found.append(Tied(number, own, None if begin <= first < end else module, name, names))
    return tuple(found)


def _locate_weight(name: str, links: Sequence[ModuleLink]) -> tuple[int, str]:
    """Return the number of the link with this weight, and the name in its module."""
    having = [number for number, link in enumerate(links) if name.startswith(link.key_prefix)]
    if not having:
        raise PipelineError(f"no module has {name!r}, which is to be tied")
    number = max(having, key=lambda number: len(links[number].key_prefix))  # a prefix may fit, too: the longest
    return number, name.removeprefix(links[number].key_prefix)


_one_at_a_time = threading.Lock()
"""Stages of a worker are built on several threads, and all draw from the process's one random generator."""


class Lazy(nn.Module):
    """A module that is built later, without parameters until then. Made by `lazy`."""

    def __init__(self, factory: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.factory, self.args, self.kwargs = factory, args, kwargs
        self.seed = int(torch.randint(2**62, ()))  # drawn on the driver

    def build_module(self) -> nn.Module:
        """Build the module: a new one, equal each time. Raises PipelineError if the factory returns no module."""
        with _one_at_a_time, seeded_rng(self.seed):
            made = self.factory(*self.args, **self.kwargs)
        if not isinstance(made, nn.Module):
            raise PipelineError(f"{self!r} made {type(made).__name__}, not a torch.nn.Module")
        return made

    def extra_repr(self) -> str:
        keywords = [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return ", ".join([getattr(self.factory, "__name__", repr(self.factory)), *map(repr, self.args), *keywords])


def lazy(factory: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Lazy:
    """Return a placeholder for `factory(*args, **kwargs)`, which is called on the worker that the module is for.

        split([lazy(nn.Linear, 4, 8), nn.ReLU(), lazy(nn.Linear, 8, 1)], workers, balance=[2, 1])

    Its random numbers are determined here: they are equal after an equal `torch.manual_seed`, in every split.

    Args:
        factory: returns the module, usually its class; it is pickled, as are the arguments.
        args: arguments of the factory.
        kwargs: keyword arguments of the factory.

    Returns:
        A module without parameters, for a place in the row that `split` takes.
    """
    return Lazy(factory, args, kwargs)


def check_lazy_modules(row: Mapping[str, nn.Module]) -> None:
    """Raise PipelineError for a lazy module inside another module, and for one in two places: each builds its own."""
    places: dict[nn.Module, str] = {}
    for name, module in row.items():
        for inner, found in module.named_modules():
            if inner and isinstance(found, Lazy):
                raise PipelineError(f"{found!r} is inside {name!r}: only modules of the row itself can be lazy")
        if isinstance(module, Lazy) and places.setdefault(module, name) != name:
            raise PipelineError(f"{name!r} and {places[module]!r} are the same {module!r}: call lazy() for each")


class Tied(NamedTuple):
    """A weight that lazy modules of a stage share with each other, or with a module of another stage."""

    number: int  # of all ties of the model
    own: tuple[str, ...]  # its names in the stage, in the order of modules
    first: Lazy | None  # the module that determines it; None: it is in this stage
    name: str  # in `first`
    names: tuple[str, ...]  # in the un-split model


def build_stage(stage: nn.Sequential, tied: Sequence[Tied] = ()) -> nn.Sequential:
    """Build and tie all lazy modules of a stage. Raises PipelineError for weights that cannot be one."""
    for place, module in enumerate(stage):
        if isinstance(module, Lazy):
            stage[place] = module.build_module()
    made = {first: first.build_module() for first in dict.fromkeys(each.first for each in tied) if first is not None}
    for each in tied:
        own = [_find_weight(stage, name, each) for name in each.own]
        first = own[0] if each.first is None else _find_weight(made[each.first], each.name, each)
        _tie_parameters(stage, each, own, first)
    return stage


def _find_weight(module: nn.Module, name: str, tied: Tied) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        raise PipelineError(f"{_format_names(tied)} cannot be tied: {error}") from error


def _tie_parameters(stage: nn.Module, tied: Tied, own: Sequence[nn.Parameter], first: nn.Parameter) -> None:
    """Make all own parameters of a tie one parameter, with the values of the first."""
    kinds = dict.fromkeys(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in (first, *own))
    if len(kinds) > 1:
        raise PipelineError(f"{_format_names(tied)} cannot be tied: they are {' and '.join(kinds)}")
    with torch.no_grad():
        own[0].copy_(first).requires_grad_(first.requires_grad)
    for name in tied.own[1:]:
        holder, _, leaf = name.rpartition(".")
        setattr(stage.get_submodule(holder), leaf, own[0])


def _format_names(tied: Tied) -> str:
    return " and ".join(map(repr, tied.names))
