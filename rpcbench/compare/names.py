"""Names of modules that a rank has numbered anew: its share of the experts, or the layers of its stage, from 0.

Where the reference has `experts.0` to `experts.7` and each rank has `experts.0` and `experts.1`, the rank's own are a
part of these. Which part is found by the initial values of their parameters.

Guarantees
- A list is renumbered only if a rank has fewer members than the reference, the first one from 0.
- A numbering is taken only if initial values prove it; else the names stay, and the difference shows.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations

from rpcbench.compare.capture import INITIAL, Catalog, Key
from rpcbench.compare.layouts import Coordinate

Renumber = Callable[[int], int]
HasEqualStart = Callable[[Key, Mapping[Coordinate, Key]], bool]
"""Takes a parameter of the reference and the name that it has on some ranks; whether their initial values are right."""


def renumber_modules(
    reference: Catalog, ranks: dict[Coordinate, Catalog], mesh: tuple[int, ...], has_equal_start: HasEqualStart
) -> None:
    """Give the modules of each rank, in its catalog, the names that the reference has for them."""
    done: set[str] = set()
    while (found := _find_short_list(reference, ranks, done)) is not None:
        done.add(found)
        for numbering in _possible_numberings(reference, ranks, mesh, found):
            if _is_proven(reference, ranks, found, numbering, has_equal_start):
                for place, renumber in numbering.items():
                    ranks[place] = _rename_catalog(ranks[place], found, renumber)
                break


def _members(catalog: Catalog, path: str) -> set[int]:
    pattern = re.compile(re.escape(path) + r"\.(\d+)(?:\.|$)")
    return {int(found[1]) for name in catalog.modules if (found := pattern.match(name))}


def _find_short_list(reference: Catalog, ranks: Mapping[Coordinate, Catalog], done: set[str]) -> str | None:
    """Return the outermost list of modules that is shorter on all ranks, and begins with 0 on each that has it."""
    lists = {match[1] for name in reference.modules if (match := re.match(r"(.+)\.\d+$", name))}
    for path in sorted(lists - done, key=lambda each: each.count(".")):
        whole = _members(reference, path)
        there = [members for catalog in ranks.values() if (members := _members(catalog, path))]
        if there and all(members == set(range(len(members))) and len(members) < len(whole) for members in there):
            return path
    return None


def _possible_numberings(
    reference: Catalog, ranks: Mapping[Coordinate, Catalog], mesh: tuple[int, ...], path: str
) -> Iterator[dict[Coordinate, Renumber]]:
    """Yield numberings, in blocks and in turn, along each dimension of the mesh and along several."""
    counts = {place: len(_members(catalog, path)) for place, catalog in ranks.items()}
    for n in range(1, len(mesh) + 1):
        for dims in combinations(range(len(mesh)), n):
            size = math.prod(mesh[d] for d in dims)
            index = {place: _flat_index([place[d] for d in dims], [mesh[d] for d in dims]) for place in ranks}
            by_index = {index[place]: counts[place] for place in ranks}
            begin = {each: sum(by_index[other] for other in by_index if other < each) for each in by_index}
            yield {place: _count_from(begin[index[place]], 1) for place in ranks}
            yield {place: _count_from(index[place], size) for place in ranks}


def _flat_index(place: list[int], sizes: list[int]) -> int:
    found = 0
    for at, size in zip(place, sizes, strict=True):
        found = found * size + at
    return found


def _count_from(begin: int, step: int) -> Renumber:
    return lambda number: begin + step * number


def _is_proven(
    reference: Catalog, ranks: Mapping[Coordinate, Catalog], path: str, numbering: Mapping[Coordinate, Renumber],
    has_equal_start: HasEqualStart,
) -> bool:  # fmt: skip
    own: dict[Key, dict[Coordinate, Key]] = {}
    for place, catalog in ranks.items():
        for key in catalog.values:
            if key.phase == INITIAL and key.name.startswith(f"{path}."):
                renamed = key._replace(name=_rename(key.name, path, numbering[place]))
                if renamed not in reference.values:
                    return False
                own.setdefault(renamed, {})[place] = key
    return bool(own) and all(has_equal_start(key, places) for key, places in own.items())


def _rename(name: str, path: str, renumber: Renumber) -> str:
    if not (match := re.match(re.escape(path) + r"\.(\d+)(?=\.|$)", name)):
        return name
    return f"{path}.{renumber(int(match[1]))}{name[match.end() :]}"


def _rename_catalog(catalog: Catalog, path: str, renumber: Renumber) -> Catalog:
    def new(name: str) -> str:
        return _rename(name, path, renumber)

    return dataclasses.replace(
        catalog,
        values={key._replace(name=new(key.name)): calls for key, calls in catalog.values.items()},
        modules={
            new(name): facts._replace(parameters=tuple(map(new, facts.parameters)))
            for name, facts in catalog.modules.items()
        },
        tied={new(name): tuple(map(new, others)) for name, others in catalog.tied.items()},
        masks={new(name): masks for name, masks in catalog.masks.items()},
    )
