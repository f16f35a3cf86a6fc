"""The dataflow between stages: which values each stage takes from which other stage. Names are resolved before a run.

Guarantees
- A model is a row of modules, each under its name in the un-split model. The row has every module that runs, in the
  order in which they run; a module that is used twice is in it twice. A chain in the row is expanded, if it does
  nothing but run its modules.
- A name refers to the latest value given under it before. A value is sent once to each stage that takes it, and to no
  other stage. Values between two stages have the same order at both ends.
- Parts may state names of dimensions for their values. Two parts that do so for one value are compared before anything
  is sent. A value has the names stated for it wherever the model is cut: a dimension without a name gets its name; one
  of another name ends the step with an error that shows stage, part, value and both names.
- A model that states no names of dimensions does not import `rpcbench.named`.
"""

# Theory of operation
#
#     row of links    embed      encode              decode                 head
#     takes -> gives  -> h       h -> h, enc         h, enc -> h            h ->
#     stages          0          1                   2                      3
#     paths           0 -> 1: h  1 -> 2: h, enc      2 -> 3: h              a value that skips a stage is not sent to it
#
# 1. `links_of_model` and `expand_chain` turn a model into links; `connect_links` resolves each name to a `Value`: a
#    link's number and a place among the values that this link gives. OUTSIDE is the number for the model's inputs.
# 2. `StageGraph` is given the bounds of the stages. A stage needs each value that a link of it takes from an earlier
#    link outside the stage, and gives each value of its own that a later stage needs; both lists are sorted.
# 3. A `StageIO` has one `ValuePath` for each pair of stages. Both ends derive it from these sorted lists, so they agree
#    on the order of the values in a message, and no names are sent.
# 4. `module` makes the stage's module: a plain nn.Sequential if every link takes the one value before it, else a
#    `Segment`, which keeps all values of the stage by number while it runs.

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
"""Names of dimensions by the name of the value."""
Values = Sequence[str] | Mapping[str, Sequence[str | None] | None]
"""Names of values, with or without the names of their dimensions."""


class DimensionSpec(NamedTuple):
    """The values that a link takes and gives: their names, and the names of their dimensions."""

    name: str  # of the link, for errors
    takes: tuple[str, ...] | None  # None: all values of the link before
    gives: tuple[str, ...] | None  # None: one value without a name
    dims_taken: Stated  # only values whose dimensions are stated
    dims_given: Stated

    def name_inputs(self, values: Sequence[Any], where: str = "") -> tuple[Any, ...]:
        """Return the module's arguments, with the stated names. `where`: a prefix for errors that names the stage."""
        if not self.dims_taken:
            return tuple(values)
        return _name_values(self.dims_taken, zip(self.takes or (), values, strict=True), f"{where}{self.name!r} takes")

    def name_outputs(self, values: Sequence[Any], where: str = "") -> tuple[Any, ...]:
        """Return the values that the module has returned, with the stated names; see `name_inputs`."""
        if not self.dims_given:
            return tuple(values)
        return _name_values(self.dims_given, zip(self.gives or (), values, strict=True), f"{where}{self.name!r} gives")


def _name_values(dims: Stated, values: Iterable[tuple[str, Any]], who: str) -> tuple[Any, ...]:
    return tuple(
        _name_tensor(value, dims[name], f"{who} {name!r}") if name in dims else value for name, value in values
    )


def _name_tensor(value: Any, dims: Dims, who: str) -> Any:
    # Imported here, so that a model without names of dimensions never loads the package.
    from rpcbench.named import NamesError, named
    from rpcbench.named.rules import format_tensor

    if not isinstance(value, torch.Tensor):
        raise PipelineError(f"{who} as {_format_dims(dims)}, but it is no tensor: {value!r}")
    try:
        return named(value, *dims)
    except NamesError:
        raise PipelineError(f"{who} as {_format_dims(dims)}, but it is {format_tensor(value)}") from None


def parse_dims(what: str, values: Values | None) -> Stated:
    """Return the names of dimensions given in `takes=` or `gives=`. PipelineError for one that is not a name."""
    if not isinstance(values, Mapping):
        return {}
    found = {value: dims for value, dims in values.items() if dims is not None}
    return {value: _checked_names(what, value, dims) for value, dims in found.items()}


def _checked_names(what: str, value: str, dims: Sequence[str | None]) -> Dims:
    from rpcbench.named import dimnames

    if isinstance(dims, str):
        raise PipelineError(f'{what}={{{value!r}: {dims!r}}}: names of dimensions are a tuple, as ("N", "C")')
    try:
        return dimnames.check_names(dims, len(dims))
    except dimnames.NamesError as error:
        raise PipelineError(f"{what}={{{value!r}: {tuple(dims)!r}}}: {error}") from None


def check_same_dims(value: str, producer: DimensionSpec, taker: DimensionSpec) -> None:
    """Raise PipelineError if two modules state different names for the dimensions of one value."""
    given, taken = producer.dims_given.get(value), taker.dims_taken.get(value)
    if given is None or taken is None:
        return
    # The taker may name a dimension that the giver leaves open (None), but not the reverse: a name is never dropped.
    if len(given) != len(taken) or any(a not in (None, b) for a, b in zip(given, taken, strict=True)):
        raise PipelineError(
            f"{taker.name!r} takes {value!r} as {_format_dims(taken)}, but {producer.name!r} gives it as "
            f"{_format_dims(given)}: "
            "state the same names of dimensions in both parts, in the same order"
        )


def _format_dims(dims: Dims) -> str:
    return f"({', '.join(map(str, dims))})"


_SENDABLE = (torch.Tensor, int, float, type(None))  # types that a message between stages may have
OUTSIDE = -1
"""The number of the stage, or of the link, that the model's inputs come from."""


class Value(NamedTuple):
    """One value of the model: a link, and the place among the values that it gives."""

    link: int
    place: int


class ValuePath(NamedTuple):
    """The values sent between a stage and `stage`: their places among all that the first one takes, or gives."""

    stage: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class StageIO:
    """The connections of one stage. `inputs`: the numbers of those of the model's inputs that it takes."""

    takes: tuple[ValuePath, ...]  # in the order of the giving stages
    gives: tuple[ValuePath, ...]  # in the order of the taking stages
    inputs: tuple[int, ...] = ()

    @cached_property
    def argument_order(self) -> list[int]:
        """For each argument of the module, its index among all values taken, path after path."""
        places = [place for path in self.takes for place in path.places]
        return sorted(range(len(places)), key=places.__getitem__)

    @cached_property
    def gradient_paths(self) -> tuple[ValuePath, ...]:
        """The paths on which gradients are sent back."""
        return tuple(path for path in self.takes if path.stage != OUTSIDE)  # the model's inputs get no gradient


def inputs_of_stages(ports: Iterable[StageIO]) -> list[int]:
    """Return the numbers of the model's inputs that any of these stages takes."""
    return sorted({number for each in ports for number in each.inputs})


def connect_links(links: Sequence[ModuleLink], inputs: Sequence[str]) -> list[tuple[Value, ...]]:
    """Return for each link the values that it takes. PipelineError for an unknown name, or dimensions that disagree."""
    known = {name: Value(OUTSIDE, place) for place, name in enumerate(inputs)}
    before = tuple(known.values()) or (Value(OUTSIDE, 0),)  # an input without a name is one value
    taken = []
    for number, link in enumerate(links):
        taken.append(before if link.takes is None else tuple(_find_value(name, known, link) for name in link.takes))
        before = tuple(Value(number, place) for place in range(len(link.gives or [None])))
        known.update(zip(link.gives or (), before, strict=False))  # a later value of the same name hides this one
    for link, values in zip(links, taken, strict=True):
        for name, value in zip(link.takes or (), values, strict=False):
            if value.link != OUTSIDE:  # no link gives an input
                check_same_dims(name, links[value.link].dimension_spec, link.dimension_spec)
    return taken


def _find_value(name: str, known: dict[str, Value], link: ModuleLink) -> Value:
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "nothing before it has a name"
        raise PipelineError(
            f"{link.name!r} takes {name!r}, but {there}: name a value of a module before it (part(module, gives=...)), "
            "or the model's inputs (split(..., inputs=...))"
        )
    return known[name]


class StageGraph:
    """Stages cut from a row of links: stage `s` has links `bounds[s]` to `bounds[s + 1] - 1`."""

    def __init__(self, links: Sequence[ModuleLink], taken: Sequence[tuple[Value, ...]], bounds: Sequence[int]) -> None:
        self._links, self._taken, self._bounds = links, taken, bounds
        self._count = len(bounds) - 1
        self._stage_of_link = {
            link: s for s in range(self._count) for link in range(bounds[s], bounds[s + 1])
        }  # link -> stage
        self._stage_of_link[OUTSIDE] = OUTSIDE
        self._needs = [sorted(self._inputs_of_stage(s)) for s in range(self._count)]

    def _inputs_of_stage(self, stage: int) -> set[Value]:
        own = range(self._bounds[stage], self._bounds[stage + 1])
        return {value for link in own for value in self._taken[link] if value.link < own.start}

    def _outputs_of_stage(self, stage: int) -> list[Value]:
        return sorted({v for needs in self._needs for v in needs if self._stage_of_link[v.link] == stage})

    def make_stage_io(self, stage: int) -> StageIO:
        needs, gives = self._needs[stage], self._outputs_of_stage(stage)
        sources = sorted({self._stage_of_link[value.link] for value in needs})
        takes = [
            ValuePath(s, tuple(p for p, v in enumerate(needs) if self._stage_of_link[v.link] == s)) for s in sources
        ]
        to = [ValuePath(t, tuple(p for p, v in enumerate(gives) if v in self._needs[t])) for t in range(self._count)]
        inputs = tuple(value.place for value in needs if value.link == OUTSIDE)
        return StageIO(tuple(takes), tuple(path for path in to if path.places), inputs)

    def make_module(self, stage: int) -> nn.Sequential:
        """Return the stage as one module, called with the values that it takes, in the order of its ports."""
        begin, end = self._bounds[stage], self._bounds[stage + 1]
        own, taken = self._links[begin:end], self._taken[begin:end]
        modules = [link.module for link in own]
        row = [(Value(begin + number, 0),) for number in range(len(own))]  # each link's first value
        gives = None if stage + 1 == self._count else self._outputs_of_stage(stage)
        plain = len(self._needs[stage]) == 1 and taken == [tuple(self._needs[stage]), *row[:-1]]
        unnamed = all(link.gives is None and not link.dims_taken for link in own)
        # A chain in which each module takes the one value before it needs no bookkeeping by name.
        if plain and unnamed and (gives is None or gives == [*row[-1]]):
            return nn.Sequential(*modules)
        return Segment(modules, own, begin, taken, self._needs[stage], gives, stage)


class Segment(nn.Sequential):
    """Links of the row in one stage, which pass values to each other by number. Called with `needs`, it returns
    `gives`, or for None the output of its last module, with the stated names of dimensions. `stage`: for errors."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        links: Sequence[ModuleLink],
        begin: int,
        taken: Sequence[tuple[Value, ...]],
        needs: Sequence[Value],
        gives: Sequence[Value] | None,
        stage: int,
    ) -> None:
        super().__init__(*modules)
        self._terms = [link.dimension_spec for link in links]
        self._begin, self._taken, self._needs, self._values = begin, taken, needs, gives
        self._where = f"stage {stage}, "

    def forward(self, *values: Any) -> Any:
        held = dict(zip(self._needs, values, strict=True))  # by number, not by name: names may repeat
        made: Any = None
        for number, (module, taken, terms) in enumerate(zip(self, self._taken, self._terms, strict=True)):
            made = module(*terms.name_inputs([held[value] for value in taken], self._where))
            if number + 1 < len(self) or self._values is not None:  # not for the output of the model
                own = values_of_output(made, terms, self._where)
                held.update((Value(self._begin + number, p), v) for p, v in enumerate(own))
        if self._values is None:
            return _name_output(made, self._terms[-1], self._where)
        return tuple(held[value] for value in self._values)


def values_of_output(made: Any, terms: DimensionSpec, where: str = "") -> tuple[Any, ...]:
    """Return the output of a module as a tuple of values, one for each name. `where`: see
    `DimensionSpec.name_inputs`."""
    names = terms.gives
    if names is not None and isinstance(made, dict) and made.keys() >= set(names):
        return terms.name_outputs([made[name] for name in names], where)
    if names is None or (len(names) == 1 and not isinstance(made, tuple | list)):
        return terms.name_outputs([made], where)
    if isinstance(made, tuple | list) and len(made) == len(names):
        return terms.name_outputs(made, where)
    raise PipelineError(f"{terms.name!r} gives {', '.join(names)}, but its forward returned {_describe_value(made)}")


def _name_output(made: Any, terms: DimensionSpec, where: str) -> Any:
    """Return the output of the model's last module, in the same structure, with the stated names of dimensions."""
    if not terms.dims_given:
        return made
    values = values_of_output(made, terms, where)
    if isinstance(made, dict):
        return {**made, **dict(zip(terms.gives or (), values, strict=True))}
    return values if isinstance(made, tuple | list) else values[0]


def check_sendable(values: tuple[Any, ...], stage: int) -> tuple[Any, ...]:
    """Return the values if they can be sent to another stage. PipelineError unless all are tensors or numbers."""
    for value in values:
        if not isinstance(value, _SENDABLE):
            raise PipelineError(
                f"stage {stage} gives {_describe_value(value)}; only tensors and numbers go between stages. Give "
                "each a name: "
                'part(module, gives=("h", "mask"))'
            )
    return values


def _describe_value(value: Any) -> str:
    count = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    return f"{type(value).__name__}{count}"


def model_inputs(batch: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Return a batch as the model's inputs, in the order of `names`; without names it is one input."""
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
    """A module of a list, with names for the values that it takes and gives. Made by `part`."""

    module: nn.Module
    takes: Names | None  # None: all values of the module before
    gives: Names | None  # None: one value without a name
    dims_taken: Stated
    dims_given: Stated


@dataclass(frozen=True, slots=True)
class ModuleLink:
    """One module of the row."""

    name: str
    module: nn.Module
    takes: Names | None = None  # None: all values of the link before
    gives: Names | None = None  # None: one value without a name
    prefix: str | None = None  # of its parameters' names in the un-split model; None: name and dot
    dims_taken: Stated = field(default_factory=dict)
    dims_given: Stated = field(default_factory=dict)

    @property
    def key_prefix(self) -> str:
        """The prefix that the state_dict of the un-split model has before the module's parameters and buffers."""
        return f"{self.name}." if self.prefix is None else self.prefix

    @property
    def dimension_spec(self) -> DimensionSpec:
        return DimensionSpec(self.name, self.takes, self.gives, self.dims_taken, self.dims_given)


Model = nn.Module | Sequence[nn.Module | Part] | Mapping[str, nn.Module | Part]


def part(module: nn.Module, takes: Values | None = None, gives: Values | None = None) -> Part:
    """Name the values that a module of a list takes and gives, for `split`.

    The module is called with the values of these names, in their order. Each is the latest that a module before it has
    given under this name, or the model's input. Values are tensors of any type and shape, and plain numbers.

    A dict also states the names of dimensions, as in `rpcbench.named`, or None for a value without statement:

        part(encode, takes={"x": ("N", "T")}, gives={"h": ("N", "T", "E"), "mask": None})

    A value that the module takes or gives then has these names: a dimension without a name gets it, and one of another
    name is a PipelineError. None in a tuple is a dimension that stays without a name.

    Args:
        module: the module.
        takes: names of its arguments; None: all values that the module before it gives.
        gives: names of the values that it returns: a single value, a tuple in this order, or a dict. None: one value
            that only the next module can take.

    Returns:
        A Part, to be put into the list.

    Raises:
        PipelineError: where something is not a name, or `gives` has a name twice.
    """
    names_taken, names_given = _check_names("takes", takes), _check_names("gives", gives)
    return Part(module, names_taken, names_given, parse_dims("takes", takes), parse_dims("gives", gives))


def _check_names(what: str, names: Values | None) -> Names | None:
    if names is None:
        return None
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise PipelineError(f'{what} must be a list of names as {what}=("h",), not {names!r}')
    if what == "gives" and len(set(names)) < len(names):
        raise PipelineError(f"gives={tuple(names)!r} has a name twice")
    return tuple(names)


def links_of_model(model: Model) -> list[ModuleLink]:
    """Return the modules to be run in turn, a chain as one link."""
    named: list[tuple[str, object]]
    if isinstance(model, nn.ModuleList | list | tuple):
        named = [(str(index), item) for index, item in enumerate(model)]
    elif isinstance(model, Mapping):
        named = [(str(name), item) for name, item in model.items()]
    elif isinstance(model, nn.Module) and _is_chain(model):
        # Not `named_children`: it leaves out the second use of a module.
        named = [(name, module) for name, module in model._modules.items() if module is not None]
    else:
        raise PipelineError(
            f"{type(model).__name__} cannot be cut: it is no plain nn.Sequential, so the order of its modules is not "
            "known. Give split() an nn.Sequential, a list of modules to be run one after the other, or "
            "traced(model, x), which follows its forward"
        )
    return [_make_link(name, item) for name, item in named]


def _make_link(name: str, item: object) -> ModuleLink:
    module = item.module if isinstance(item, Part) else item
    if not isinstance(module, nn.Module):
        raise PipelineError(f"item {name} of the list is {module!r}, not a torch.nn.Module")
    if not isinstance(item, Part):
        return ModuleLink(name, module)
    return ModuleLink(name, module, item.takes, item.gives, dims_taken=item.dims_taken, dims_given=item.dims_given)


def expand_chain(child: ModuleLink) -> list[ModuleLink]:
    """Return the child, or the links of its chain: the first takes its values, the last gives its values."""
    found = list(_chain_links(child.name, child.module))
    found[0] = replace(found[0], takes=child.takes, dims_taken=child.dims_taken)
    found[-1] = replace(found[-1], gives=child.gives, dims_given=child.dims_given)
    return found


def _chain_links(name: str, module: nn.Module) -> Iterator[ModuleLink]:
    if not _is_chain(module) or not len(module._modules):  # an empty chain stays a link
        yield ModuleLink(name, module)
        return
    for own, child in module._modules.items():
        if child is not None:
            yield from _chain_links(f"{name}.{own}", child)


def _is_chain(module: nn.Module) -> bool:
    """Return whether this is an nn.Sequential with no forward, hooks or parameters of its own."""
    # Anything more than running its modules would be lost if the chain were taken apart.
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    own = (module._parameters, module._buffers)
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not any(hooks + own)
