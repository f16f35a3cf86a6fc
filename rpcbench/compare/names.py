"""Names of modules that a rank has numbered anew: its share of the experts, or the layers of its stages, from 0.

Where the reference has `experts.0` to `experts.7` and each rank has `experts.0` and `experts.1`, the rank's own are a
part of these. A stage of a pipeline may be a `nn.Sequential` of some layers, and a rank may have several stages, in a
`ModuleList` or `ModuleDict`. Which part of the reference each has is found by the initial values of parameters.

Guarantees
- A list is renumbered only if each rank has fewer members than the reference, the first one from 0.
- The numbering taken is the one that explains most initial values; if it explains none, the names stay.
- Where two stages of a rank have a name in common (the model's own name), the values are those of the first one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from rpcbench.compare.capture import INITIAL, Catalog, Kept, Key, ModuleFacts, join_name
from rpcbench.compare.layouts import Coordinate

Renumber = Callable[[int], int]
HasEqualStart = Callable[[Key, Mapping[Coordinate, Key]], bool]
"""Takes a parameter of the reference and the name that it has on some ranks; whether their initial values are right."""
_MOST_NAMES = 4  # in a sentence
_CONTAINERS = ("ModuleList", "ModuleDict")  # they have no forward, so a model that is one holds stages


class ModuleLists(NamedTuple):
    """A list of modules, of which each stage has a part."""

    whole: str  # its path in the reference
    own: str  # its path in each stage


@dataclass
class StageNames:
    """Names in one stage on one rank; a model that is no container of stages is one stage."""

    place: Coordinate
    number: int  # among those of its rank
    catalog: Catalog  # of the rank
    names: dict[str, str]  # own path of each module → its name in the reference, as far as it is known

    def members(self, path: str) -> set[int]:
        """Return the numbers that the modules of a list have."""
        return _members(self.names.values(), path)

    def parameters_in(self, path: str) -> Iterator[tuple[Key, str]]:
        """Yield each parameter of the modules of a list, with its name in the reference as far as it is known."""
        for own, name in self.names.items():
            if re.match(_member_pattern(path), name):
                for parameter in self.catalog.modules[own].parameters:
                    if (key := Key(0, INITIAL, parameter)) in self.catalog.values:
                        yield key, join_name(name, parameter.removeprefix(f"{own}."))


def renumber_modules(
    reference: Catalog, ranks: dict[Coordinate, Catalog], mesh: tuple[int, ...], has_equal_start: HasEqualStart
) -> None:
    """Give the modules of each rank, in its catalog, the names that the reference has for them."""
    stages = [stage for place, catalog in ranks.items() for stage in _split_stages(reference, place, catalog)]
    done: set[ModuleLists] = set()
    while (lists := _find_short_list(reference, stages, done)) is not None:
        done.add(lists)
        if (best := _choose_numbering(reference, stages, mesh, lists, has_equal_start)) is not None:
            for stage, renumber in zip(stages, best, strict=True):
                stage.names = {own: _rename(name, lists, renumber) for own, name in stage.names.items()}
    for place, catalog in ranks.items():
        names = {own: name for stage in stages if stage.place == place for own, name in stage.names.items()}
        if any(own != name for own, name in names.items()):
            ranks[place] = _rename_catalog(catalog, names)


def _split_stages(reference: Catalog, place: Coordinate, catalog: Catalog) -> Iterator[StageNames]:
    """Yield the stages of a rank, in order."""
    root = catalog.modules.get("")  # None: the parts of a driven model, which have their names
    if root is None or root.kind not in _CONTAINERS or reference.modules[""].kind in _CONTAINERS:
        yield StageNames(place, 0, catalog, {name: name for name in catalog.modules})
        return
    keys = dict.fromkeys(name.partition(".")[0] for name in catalog.modules if name)
    for number, key in enumerate(keys):
        paths = [name for name in catalog.modules if name == key or name.startswith(f"{key}.")]
        yield StageNames(place, number, catalog, {path: path[len(key) + 1 :] for path in paths})


def _member_pattern(path: str) -> str:
    return (re.escape(path) + r"\." if path else "") + r"(\d+)(?=\.|$)"


def _members(names: Iterable[str], path: str) -> set[int]:
    return {int(found[1]) for name in names if (found := re.match(_member_pattern(path), name))}


def _find_short_list(reference: Catalog, stages: Sequence[StageNames], done: set[ModuleLists]) -> ModuleLists | None:
    """Return the outermost list of modules that is shorter on all ranks, and begins with 0 on each that has it."""
    paths = {match[1] or "" for name in reference.modules if (match := re.match(r"(?:(.+)\.)?\d+$", name))}
    for path in sorted(paths, key=lambda each: (bool(each), each.count("."))):
        whole = _members(reference.modules, path)
        for own in dict.fromkeys((path, "")):
            there = [members for stage in stages if (members := stage.members(own))]
            is_short = all(members == set(range(len(members))) and len(members) < len(whole) for members in there)
            if there and is_short and (lists := ModuleLists(path, own)) not in done:
                return lists
    return None


def _choose_numbering(
    reference: Catalog, stages: Sequence[StageNames], mesh: tuple[int, ...], lists: ModuleLists,
    has_equal_start: HasEqualStart,
) -> list[Renumber] | None:  # fmt: skip
    """Return the numbers of each stage's modules that explain most initial values; None if none explains any."""
    best, most = None, 0.0
    for numbering in _possible_numberings(stages, mesh, lists.own):
        share = _explained_share(reference, stages, lists, numbering, has_equal_start)
        if share > most:
            best, most = numbering, share
        if share == 1.0:
            break
    return best


def _possible_numberings(stages: Sequence[StageNames], mesh: tuple[int, ...], path: str) -> Iterator[list[Renumber]]:
    """Yield numberings: as they are; in blocks and in turn, along each dimension of the mesh and along several."""
    counts = [len(stage.members(path)) for stage in stages]
    each_rank = 1 + max(stage.number for stage in stages)
    yield [_count_from(0, 1) for _ in stages]
    for n in range(1, len(mesh) + 1):
        for dims in combinations(range(len(mesh)), n):
            size = math.prod(mesh[d] for d in dims)
            index = [_flat_index([stage.place[d] for d in dims], [mesh[d] for d in dims]) for stage in stages]
            for order in _possible_orders(index, [stage.number for stage in stages], size, each_rank):
                by_order = dict(zip(order, counts, strict=True))
                yield [_count_from(sum(by_order[other] for other in by_order if other < own), 1) for own in order]
            if each_rank == 1:
                yield [_count_from(own, size) for own in index]


def _possible_orders(index: Sequence[int], number: Sequence[int], size: int, each_rank: int) -> Iterator[list[int]]:
    """Yield the places of the stages in the model: in loops over the ranks, to and fro, and rank by rank."""
    yield [n * size + at for at, n in zip(index, number, strict=True)]
    if each_rank > 1:
        yield [n * size + (size - 1 - at if n % 2 else at) for at, n in zip(index, number, strict=True)]
        yield [at * each_rank + n for at, n in zip(index, number, strict=True)]


def _flat_index(place: list[int], sizes: list[int]) -> int:
    found = 0
    for at, size in zip(place, sizes, strict=True):
        found = found * size + at
    return found


def _count_from(begin: int, step: int) -> Renumber:
    return lambda number: begin + step * number


def _explained_share(
    reference: Catalog, stages: Sequence[StageNames], lists: ModuleLists, numbering: Sequence[Renumber],
    has_equal_start: HasEqualStart,
) -> float:  # fmt: skip
    """Return the share of initial values that are right under a numbering; 0 if it makes names that are not there."""
    own: dict[Key, dict[Coordinate, Key]] = {}
    for stage, renumber in zip(stages, numbering, strict=True):
        for key, name in stage.parameters_in(lists.own):
            renamed = key._replace(name=_rename(name, lists, renumber))
            if renamed not in reference.values:
                return 0.0
            own.setdefault(renamed, {})[stage.place] = key
    return sum(has_equal_start(key, places) for key, places in own.items()) / len(own) if own else 0.0


def _rename(name: str, lists: ModuleLists, renumber: Renumber) -> str:
    if not (match := re.match(_member_pattern(lists.own), name)):
        return name
    return f"{join_name(lists.whole, str(renumber(int(match[1]))))}{name[match.end() :]}"


def _rename_catalog(catalog: Catalog, names: Mapping[str, str]) -> Catalog:
    def new(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        return names[name] if name in names else join_name(names[path], leaf) if path in names else name

    values: dict[Key, dict[int, Kept]] = {}
    for key, calls in catalog.values.items():
        values.setdefault(key._replace(name=new(key.name)), calls)
    modules: dict[str, ModuleFacts] = {}
    for name, facts in catalog.modules.items():
        modules.setdefault(new(name), facts._replace(parameters=tuple(map(new, facts.parameters))))
    return dataclasses.replace(
        catalog, values=values, modules=modules,
        tied={new(name): tuple(map(new, others)) for name, others in catalog.tied.items()},
        masks={new(name): masks for name, masks in catalog.masks.items()},
        options={(turn, new(name)): options for (turn, name), options in catalog.options.items()},
    )  # fmt: skip


# -- names that do not match
def describe_unmatched(reference: Catalog, ranks: Iterable[Catalog]) -> str:
    """Return which modules and parameters of the reference no rank has by name, in a sentence with the names on the
    ranks that are nearest; empty if there are none."""
    own, theirs = _names_in(reference), set[str]().union(*map(_names_in, ranks))
    there = theirs.union(*map(_paths_around, theirs))  # a list of modules is there if a member is
    lacking = _outermost(own - there)
    if not lacking:
        return ""
    others = _outermost(theirs - own)
    words = [_with_nearest(name, others) for name in lacking[:_MOST_NAMES]]
    more = [f"{len(lacking) - len(words)} more"] if len(lacking) > len(words) else []
    return f"Not compared, as no rank has anything of this name: {', '.join([*words, *more])}"


def _names_in(catalog: Catalog) -> set[str]:
    """Return the names of modules and parameters, but for the model itself."""
    return {*catalog.modules, *(key.name for key in catalog.values if key.phase == INITIAL)} - {""}


def _paths_around(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


def _outermost(names: Collection[str]) -> list[str]:
    """Return those names that are not inside another one, in order."""
    return sorted(name for name in names if name.rpartition(".")[0] not in names)


def _with_nearest(name: str, others: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, others, 1, 0.5)
    return f"{name} (did you mean {near[0]}, which the ranks have?)" if near else name
