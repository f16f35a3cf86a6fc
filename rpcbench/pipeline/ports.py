"""What each stage takes from which other stage, and gives to which: names are looked up once, before anything is sent.

    row of modules      embed      encode              decode                 head
    takes → gives        → h       h → h, enc          h, enc → h             h →
    stages               0         1                   2                      3
    ways                 0 → 1     1 → 2: h, enc       2 → 3                  a value that skips a stage passes it by

Guarantees: a name means the latest value given under it before; a value goes once to each stage that takes it, and to
no other; what goes from one stage to another has the same order at both ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.dimensions import Terms, agree
from rpcbench.pipeline.links import Link

_SENDABLE = (torch.Tensor, int, float, type(None))
OUTSIDE = -1
"""Number of the stage, or link, that the model's inputs come from."""


class Value(NamedTuple):
    """What a link gives: which of its values."""

    link: int
    place: int


class Way(NamedTuple):
    """What goes between a stage and another, `stage`: the places it has among all that the first takes, or gives."""

    stage: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class Ports:
    """What one stage takes, and to whom it gives. `inputs`: those of the model's inputs that it takes, by number."""

    takes: tuple[Way, ...]
    gives: tuple[Way, ...]
    inputs: tuple[int, ...] = ()

    @cached_property
    def order(self) -> list[int]:
        """Of all that it takes, one way after the other, which comes first, second, … in the call of its module."""
        places = [place for way in self.takes for place in way.places]
        return sorted(range(len(places)), key=places.__getitem__)

    @cached_property
    def back(self) -> tuple[Way, ...]:
        """To whom gradients go back."""
        return tuple(way for way in self.takes if way.stage != OUTSIDE)


def inputs_of(ports: Iterable[Ports]) -> list[int]:
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


class Wiring:
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

    def ports(self, stage: int) -> Ports:
        """Where what the stage takes comes from, and what it gives goes."""
        needs, gives = self._needs[stage], self._gives(stage)
        sources = sorted({self._home[value.link] for value in needs})
        takes = [Way(s, tuple(p for p, v in enumerate(needs) if self._home[v.link] == s)) for s in sources]
        to = [Way(t, tuple(p for p, v in enumerate(gives) if v in self._needs[t])) for t in range(self._count)]
        inputs = tuple(value.place for value in needs if value.link == OUTSIDE)
        return Ports(tuple(takes), tuple(way for way in to if way.places), inputs)

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


def given(made: Any, terms: Terms, where: str = "") -> tuple[Any, ...]:
    """What a module has returned, as the values it has names for. `where`: as "stage 1, ", for errors."""
    names = terms.gives
    if names is not None and isinstance(made, dict) and made.keys() >= set(names):
        return terms.given([made[name] for name in names], where)
    if names is None or (len(names) == 1 and not isinstance(made, tuple | list)):
        return terms.given([made], where)
    if isinstance(made, tuple | list) and len(made) == len(names):
        return terms.given(made, where)
    raise PipelineError(f"{terms.name!r} gives {', '.join(names)}, but its forward returned {_told(made)}")


def _output(made: Any, terms: Terms, where: str) -> Any:
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
