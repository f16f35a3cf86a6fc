"""Weights that lazy modules have in common, by their names in the un-split model, as no weight is there yet.

    split([lazy(nn.Embedding, 9, 5), …, lazy(nn.Linear, 5, 9)], …, tie=[("0.weight", "7.weight")])

Guarantees: the first module of the row that has the weight decides what it is, wherever the others are built: they
build that one, too, take the weight, and let go of the rest. From then on copies are those of any tied weight (`ties`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.lazy import Lazy, Tied, checked
from rpcbench.pipeline.links import Link

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
