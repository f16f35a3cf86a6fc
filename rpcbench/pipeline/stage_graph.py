"""What each stage takes from which other stage, and gives to which: names are looked up once, before anything is sent.

    row of modules      embed      encode              decode                 head
    takes → gives        → h       h → h, enc          h, enc → h             h →
    stages               0         1                   2                      3
    paths                0 → 1     1 → 2: h, enc       2 → 3                  a value that skips a stage passes it by

Guarantees
- A model is a row of modules, each under its name in the un-split model. The row has every module that runs, in the
  order in which they run, one that is used twice twice; a chain in the row is taken apart, as long as it does nothing
  but run its modules.
- A name means the latest value given under it before; a value goes once to each stage that takes it, and to no other;
  what goes from one stage to another has the same order at both ends.
- Parts may state names of dimensions for their values. Two parts that do so for one value agree before anything is
  sent.

    part(encode, takes={"x": ("N", "T")}, gives={"h": ("N", "T", "E"), "mask": None})    None: of that one nothing

- A value has the names stated for it wherever the model is cut: a dimension without a name gets its name, and one of
  another name ends the step with an error that tells of stage, part, value, and both. A model that states none loads
  nothing of `rpcbench.named`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from rpcbench.base.errors import PipelineError

Dims = tuple[str | None, ...]
Stated = dict[str, Dims]
"""Value → the names of its dimensions."""
Values = Sequence[str] | Mapping[str, Sequence[str | None] | None]
"""Names of values, perhaps with those of their dimensions."""


class DimensionSpec(NamedTuple):
    """What a module of the row takes and gives: names of values, and of their dimensions."""

    name: str
    takes: tuple[str, ...] | None
    gives: tuple[str, ...] | None
    dims_taken: Stated
    dims_given: Stated

    def taken(self, values: Sequence[Any], where: str = "") -> tuple[Any, ...]:
        """What it is called with, under the names that it states. `where`: as "stage 1, ", for errors."""
        if not self.dims_taken:
            return tuple(values)
        return _under(self.dims_taken, zip(self.takes or (), values, strict=True), f"{where}{self.name!r} takes")

    def given(self, values: Sequence[Any], where: str = "") -> tuple[Any, ...]:
        """What it has given, likewise."""
        if not self.dims_given:
            return tuple(values)
        return _under(self.dims_given, zip(self.gives or (), values, strict=True), f"{where}{self.name!r} gives")


def _under(dims: Stated, values: Iterable[tuple[str, Any]], who: str) -> tuple[Any, ...]:
    return tuple(_named(value, dims[name], f"{who} {name!r}") if name in dims else value for name, value in values)


def _named(value: Any, dims: Dims, who: str) -> Any:
    from rpcbench.named import NamesError, named
    from rpcbench.named.rules import show

    if not isinstance(value, torch.Tensor):
        raise PipelineError(f"{who} as {_listed(dims)}, but it is no tensor: {value!r}")
    try:
        return named(value, *dims)
    except NamesError:
        raise PipelineError(f"{who} as {_listed(dims)}, but it is {show(value)}") from None


def stated(what: str, values: Values | None) -> Stated:
    """Those given in `takes=` or `gives=`. PipelineError where one is no name."""
    if not isinstance(values, Mapping):
        return {}
    found = {value: dims for value, dims in values.items() if dims is not None}
    return {value: _checked_names(what, value, dims) for value, dims in found.items()}


def _checked_names(what: str, value: str, dims: Sequence[str | None]) -> Dims:
    from rpcbench.named import dimnames

    if isinstance(dims, str):
        raise PipelineError(f'{what}={{{value!r}: {dims!r}}}: names of dimensions are a tuple, as ("N", "C")')
    try:
        return dimnames.checked(dims, len(dims))
    except dimnames.NamesError as error:
        raise PipelineError(f"{what}={{{value!r}: {tuple(dims)!r}}}: {error}") from None


def agree(value: str, giver: DimensionSpec, taker: DimensionSpec) -> None:
    """PipelineError where no value can have the names that one module states and those that another does."""
    given, taken = giver.dims_given.get(value), taker.dims_taken.get(value)
    if given is None or taken is None:
        return
    if len(given) != len(taken) or any(a not in (None, b) for a, b in zip(given, taken, strict=True)):
        raise PipelineError(
            f"{taker.name!r} takes {value!r} as {_listed(taken)}, but {giver.name!r} gives it as {_listed(given)}: "
            "state the same names of dimensions in both parts, in the same order"
        )


def _listed(dims: Dims) -> str:
    return f"({', '.join(map(str, dims))})"


_SENDABLE = (torch.Tensor, int, float, type(None))
OUTSIDE = -1
"""Number of the stage, or link, that the model's inputs come from."""


class Value(NamedTuple):
    """What a link gives: which of its values."""

    link: int
    place: int


class ValuePath(NamedTuple):
    """What goes between a stage and another, `stage`: the places it has among all that the first takes, or gives."""

    stage: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class StageIO:
    """What one stage takes, and to whom it gives. `inputs`: those of the model's inputs that it takes, by number."""

    takes: tuple[ValuePath, ...]
    gives: tuple[ValuePath, ...]
    inputs: tuple[int, ...] = ()

    @cached_property
    def order(self) -> list[int]:
        """Of all that it takes, one way after the other, which comes first, second, … in the call of its module."""
        places = [place for way in self.takes for place in way.places]
        return sorted(range(len(places)), key=places.__getitem__)

    @cached_property
    def back(self) -> tuple[ValuePath, ...]:
        """To whom gradients go back."""
        return tuple(way for way in self.takes if way.stage != OUTSIDE)


def inputs_of(ports: Iterable[StageIO]) -> list[int]:
    """The model's inputs that some stages take, by number."""
    return sorted({number for each in ports for number in each.inputs})


def connect(links: Sequence[Link], inputs: Sequence[str]) -> list[tuple[Value, ...]]:
    """For each link, the values it takes. PipelineError for a name that nothing before it has, and where links state
    different names for the dimensions of a value."""
    known = {name: Value(OUTSIDE, place) for place, name in enumerate(inputs)}
    before = tuple(known.values()) or (Value(OUTSIDE, 0),)
    taken = []
    for number, link in enumerate(links):
        taken.append(before if link.takes is None else tuple(_find(name, known, link) for name in link.takes))
        before = tuple(Value(number, place) for place in range(len(link.gives or [None])))
        known.update(zip(link.gives or (), before, strict=False))
    for link, values in zip(links, taken, strict=True):
        for name, value in zip(link.takes or (), values, strict=False):
            if value.link != OUTSIDE:
                agree(name, links[value.link].terms, link.terms)
    return taken


def _find(name: str, known: dict[str, Value], link: Link) -> Value:
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "nothing before it has a name"
        raise PipelineError(
            f"{link.name!r} takes {name!r}, but {there}: name what a module before it gives (part(module, gives=...)), "
            "or the model's inputs (split(..., inputs=...))"
        )
    return known[name]


class StageGraph:
    """Stages cut from a row of links: stage `s` has links `bounds[s]` to `bounds[s + 1]`."""

    def __init__(self, links: Sequence[Link], taken: Sequence[tuple[Value, ...]], bounds: Sequence[int]) -> None:
        self._links, self._taken, self._bounds = links, taken, bounds
        self._count = len(bounds) - 1
        self._home = {link: s for s in range(self._count) for link in range(bounds[s], bounds[s + 1])}
        self._home[OUTSIDE] = OUTSIDE
        self._needs = [sorted(self._needed(s)) for s in range(self._count)]

    def _needed(self, stage: int) -> set[Value]:
        own = range(self._bounds[stage], self._bounds[stage + 1])
        return {value for link in own for value in self._taken[link] if value.link < own.start}

    def _gives(self, stage: int) -> list[Value]:
        return sorted({v for needs in self._needs for v in needs if self._home[v.link] == stage})

    def ports(self, stage: int) -> StageIO:
        """Where what the stage takes comes from, and what it gives goes."""
        needs, gives = self._needs[stage], self._gives(stage)
        sources = sorted({self._home[value.link] for value in needs})
        takes = [ValuePath(s, tuple(p for p, v in enumerate(needs) if self._home[v.link] == s)) for s in sources]
        to = [ValuePath(t, tuple(p for p, v in enumerate(gives) if v in self._needs[t])) for t in range(self._count)]
        inputs = tuple(value.place for value in needs if value.link == OUTSIDE)
        return StageIO(tuple(takes), tuple(way for way in to if way.places), inputs)

    def module(self, stage: int) -> nn.Sequential:
        """The stage's modules, as one that is called with what the stage takes, in the order of its ports."""
        begin, end = self._bounds[stage], self._bounds[stage + 1]
        own, taken = self._links[begin:end], self._taken[begin:end]
        modules = [link.module for link in own]
        row = [(Value(begin + number, 0),) for number in range(len(own))]
        gives = None if stage + 1 == self._count else self._gives(stage)
        plain = len(self._needs[stage]) == 1 and taken == [tuple(self._needs[stage]), *row[:-1]]
        unnamed = all(link.gives is None and not link.dims_taken for link in own)
        if plain and unnamed and (gives is None or gives == [*row[-1]]):
            return nn.Sequential(*modules)
        return Segment(modules, own, begin, taken, self._needs[stage], gives, stage)


class Segment(nn.Sequential):
    """Some links of the row, which hand values to each other by number; called with `needs`, it returns `gives`.

    `gives` None: what the last of them returns, as it is but for names of dimensions that it states. `stage`: which of
    the pipeline's this is, for errors.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        links: Sequence[Link],
        begin: int,
        taken: Sequence[tuple[Value, ...]],
        needs: Sequence[Value],
        gives: Sequence[Value] | None,
        stage: int,
    ) -> None:
        super().__init__(*modules)
        self._terms = [link.terms for link in links]
        self._begin, self._taken, self._needs, self._values = begin, taken, needs, gives
        self._where = f"stage {stage}, "

    def forward(self, *values: Any) -> Any:
        held = dict(zip(self._needs, values, strict=True))
        made: Any = None
        for number, (module, taken, terms) in enumerate(zip(self, self._taken, self._terms, strict=True)):
            made = module(*terms.taken([held[value] for value in taken], self._where))
            if number + 1 < len(self) or self._values is not None:
                own = given(made, terms, self._where)
                held.update((Value(self._begin + number, p), v) for p, v in enumerate(own))
        if self._values is None:
            return _output(made, self._terms[-1], self._where)
        return tuple(held[value] for value in self._values)


def given(made: Any, terms: DimensionSpec, where: str = "") -> tuple[Any, ...]:
    """What a module has returned, as the values it has names for. `where`: as "stage 1, ", for errors."""
    names = terms.gives
    if names is not None and isinstance(made, dict) and made.keys() >= set(names):
        return terms.given([made[name] for name in names], where)
    if names is None or (len(names) == 1 and not isinstance(made, tuple | list)):
        return terms.given([made], where)
    if isinstance(made, tuple | list) and len(made) == len(names):
        return terms.given(made, where)
    raise PipelineError(f"{terms.name!r} gives {', '.join(names)}, but its forward returned {_told(made)}")


def _output(made: Any, terms: DimensionSpec, where: str) -> Any:
    """What the last module of all has returned, as it is but for names of dimensions that it states."""
    if not terms.dims_given:
        return made
    values = given(made, terms, where)
    if isinstance(made, dict):
        return {**made, **dict(zip(terms.gives or (), values, strict=True))}
    return values if isinstance(made, tuple | list) else values[0]


def sendable(values: tuple[Any, ...], stage: int) -> tuple[Any, ...]:
    """The values, if they can go to another stage; PipelineError for what is neither tensor nor number."""
    for value in values:
        if not isinstance(value, _SENDABLE):
            raise PipelineError(
                f"stage {stage} gives {_told(value)}; only tensors and numbers go between stages. Give each a name: "
                'part(module, gives=("h", "mask"))'
            )
    return values


def _told(value: Any) -> str:
    count = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    return f"{type(value).__name__}{count}"


def model_inputs(batch: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """A batch as the model's inputs: by their names, in their order, or where they have none as one."""
    if not names:
        return (batch,)
    if isinstance(batch, dict):
        missing = [name for name in names if name not in batch]
        if not missing:
            return tuple(batch[name] for name in names)
        raise PipelineError(f"the batch has no {missing[0]!r}; the model's inputs are {', '.join(names)}")
    given = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if len(given) != len(names):
        raise PipelineError(f"the model's inputs are {', '.join(names)}, but the batch has {len(given)}")
    return given


Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A module of a list, with names for what it takes and gives, and for their dimensions. Made by `part`."""

    module: nn.Module
    takes: Names | None
    gives: Names | None
    dims_taken: Stated
    dims_given: Stated


@dataclass(frozen=True, slots=True)
class Link:
    """One module of the row. `takes` None: what the one before gives; `gives` None: one value without a name.

    `prefix`: what the un-split model puts before the names of its parameters; None: the name and a dot.
    """

    name: str
    module: nn.Module
    takes: Names | None = None
    gives: Names | None = None
    prefix: str | None = None
    dims_taken: Stated = field(default_factory=dict)
    dims_given: Stated = field(default_factory=dict)

    @property
    def keys(self) -> str:
        """What the un-split model puts before the names of the module's parameters and buffers."""
        return f"{self.name}." if self.prefix is None else self.prefix

    @property
    def terms(self) -> DimensionSpec:
        return DimensionSpec(self.name, self.takes, self.gives, self.dims_taken, self.dims_given)


Model = nn.Module | Sequence[nn.Module | Part] | Mapping[str, nn.Module | Part]


def part(module: nn.Module, takes: Values | None = None, gives: Values | None = None) -> Part:
    """A module for a list given to `split`, with names for what it takes and gives.

    It is called with the values of these names, in their order: each is the latest that a module before it has given
    under this name, or the model's input. It returns one value, or as many as it has names for: a tuple in their order,
    or a dict. Without `takes` it gets all that the module before it gives; without `gives` it gives one value that only
    the next module can take. Values are tensors of any type and shape, and plain numbers.

    A dict states the names of dimensions as well, of `rpcbench.named`, or None for a value that it says nothing of:

        part(encode, takes={"x": ("N", "T")}, gives={"h": ("N", "T", "E"), "mask": None})

    A value that comes, or that the module gives, has these names then: a dimension without a name gets it, and one of
    another name is a PipelineError. None in a tuple is a dimension that stays without.
    """
    names_taken, names_given = _checked("takes", takes), _checked("gives", gives)
    return Part(module, names_taken, names_given, stated("takes", takes), stated("gives", gives))


def _checked(what: str, names: Values | None) -> Names | None:
    if names is None:
        return None
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise PipelineError(f'{what} must be a list of names as {what}=("h",), not {names!r}')
    if what == "gives" and len(set(names)) < len(names):
        raise PipelineError(f"gives={tuple(names)!r} has a name twice")
    return tuple(names)


def children(model: Model) -> list[Link]:
    """The modules to be run in turn, chains as one. `named_children` would leave out the second use of a module."""
    named: list[tuple[str, object]]
    if isinstance(model, nn.ModuleList | list | tuple):
        named = [(str(index), item) for index, item in enumerate(model)]
    elif isinstance(model, Mapping):
        named = [(str(name), item) for name, item in model.items()]
    elif isinstance(model, nn.Module) and _is_chain(model):
        named = [(name, module) for name, module in model._modules.items() if module is not None]
    else:
        raise PipelineError(
            f"{type(model).__name__} cannot be cut: it is no plain nn.Sequential, so the order of its modules is not "
            "known. Give split() an nn.Sequential, a list of modules to be run one after the other, or what "
            "traced(model, x) gives, which follows its forward"
        )
    return [_link(name, item) for name, item in named]


def _link(name: str, item: object) -> Link:
    module = item.module if isinstance(item, Part) else item
    if not isinstance(module, nn.Module):
        raise PipelineError(f"item {name} of the list is {module!r}, not a torch.nn.Module")
    if not isinstance(item, Part):
        return Link(name, module)
    return Link(name, module, item.takes, item.gives, dims_taken=item.dims_taken, dims_given=item.dims_given)


def expanded(child: Link) -> list[Link]:
    """The child, or what it chains: the first of these takes what the child takes, the last gives what it gives."""
    found = list(_walk(child.name, child.module))
    found[0] = replace(found[0], takes=child.takes, dims_taken=child.dims_taken)
    found[-1] = replace(found[-1], gives=child.gives, dims_given=child.dims_given)
    return found


def _walk(name: str, module: nn.Module) -> Iterator[Link]:
    if not _is_chain(module) or not len(module._modules):
        yield Link(name, module)
        return
    for own, child in module._modules.items():
        if child is not None:
            yield from _walk(f"{name}.{own}", child)


def _is_chain(module: nn.Module) -> bool:
    """An nn.Sequential that does nothing but run its modules: no forward of its own, no hooks, no parameters."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    own = (module._parameters, module._buffers)
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not any(hooks + own)
