"""The evidence that explains a difference: the first wrong value, and the verdicts before it.

Guarantees
- Values are read once, when a cause first asks for them.
- "Near" means within the allowance of the value that is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rpcbench.compare.capture import BACKWARD, FORWARD, GRADIENT, INITIAL, INPUT, LOSS, STEP, Key
from rpcbench.compare.compare_runs import Runs
from rpcbench.compare.layouts import (
    CUT,
    Coordinate,
    Layout,
    LayoutFit,
    find_layouts,
    fit_layout,
    indices_of,
    norm_of,
    select_indices,
)  # fmt: skip
from rpcbench.compare.verdicts import RIGHT, WRONG, HeldValues, ValueVerdict, as_numbers, hold_values


@dataclass
class Evidence:
    """The first wrong value, and what was found before it."""

    runs: Runs
    verdict: ValueVerdict
    earlier: Sequence[ValueVerdict]  # in order
    later: Sequence[ValueVerdict]
    summands: ValueVerdict | None  # the value before it whose summands nobody has added up, if there is one

    @cached_property
    def whole(self) -> Tensor:
        """The reference's value."""
        return as_numbers(self.runs.read_whole(self.verdict.key, self.verdict.call))

    @cached_property
    def held(self) -> HeldValues:
        """The ranks' values."""
        values = self.runs.read_values(self.verdict.key, self.verdict.call)
        held = hold_values(self.runs.mesh, values)
        return held._replace(values={place: as_numbers(value) for place, value in held.values.items()})

    @cached_property
    def fits(self) -> list[LayoutFit]:
        """All layouts that the shapes allow."""
        if self.held.missing or not self.held.values:
            return []
        shapes = {place: tuple(value.shape) for place, value in self.held.values.items()}
        sizes = self.held.mesh.sizes
        return [
            fit_layout(self.whole, self.held.values, sizes, layout)
            for layout in find_layouts(self.whole.shape, shapes, sizes)
        ]

    @property
    def types(self) -> set[str]:
        """The types that the ranks have it in."""
        calls = (catalog.values.get(self.verdict.key, {}) for catalog in self.runs.ranks.values())
        return {str(kept.stored.dtype).removeprefix("torch.") for each in calls for kept in each.values()}

    @property
    def kind(self) -> str:
        """The class of the module, in the reference."""
        facts = self.runs.reference.catalog.modules.get(self.verdict.key.name)
        return facts.kind if facts else ""

    @property
    def scale(self) -> float:
        """By which right values of the ranks are larger: gradients in the backward pass have the scale of the loss."""
        return self.runs.factors.get(self.verdict.key.turn, 1.0) if self.verdict.key.phase == BACKWARD else 1.0

    def inputs(self) -> list[ValueVerdict]:
        """Return the verdicts on what the module of the wrong value is called with."""
        key = self.verdict.key._replace(phase=INPUT, part="")
        return [
            each for each in self.earlier if each.key._replace(part="") == key and each.call == self.verdict.call
        ]

    def about(self, verdict: ValueVerdict) -> Evidence:
        """Return the evidence of another value."""
        return Evidence(self.runs, verdict, self.earlier, self.later, None)

    def is_near(self, error: float) -> bool:
        """Return whether round-off explains a difference of this norm."""
        return error <= self.verdict.allowed

    def size_of(self, dims: Iterable[int]) -> int:
        """Return the number of ranks along dimensions of the mesh."""
        return math.prod(self.held.mesh.sizes[d] for d in dims)

    def names_of(self, dims: Iterable[int]) -> str:
        """Return the names of dimensions of the mesh, as words."""
        return " and ".join(self.held.mesh.names[d] for d in dims)

    def rank_names(self, places: Iterable[Coordinate]) -> str:
        """Return ranks of the held mesh by their numbers in the whole one: `rank 2`, `ranks 0 and 1`."""
        return rank_words(self.runs.mesh.sizes, [self.held.places[place] for place in places])

    def is_scaled_by(self, fit: LayoutFit, factor: float) -> bool:
        """Return whether the ranks' values are those of the layout, times a factor."""
        return self.is_near(math.hypot(fit.scaled_error, (fit.factor / factor - 1) * self.verdict.norm))

    def agree_along(self, dim: int) -> bool:
        """Return whether ranks that differ only along a dimension of the mesh have the same value."""
        values = self.held.values
        return all(
            value.shape == (other := values[first_along(place, dim)]).shape and self.is_near(norm_of(value - other))
            for place, value in values.items()
        )

    def piece_of(self, layout: Layout, place: Coordinate) -> Tensor | None:
        """Return the part of the reference's value that a rank has under a layout; None if there is none."""
        shapes = {each: tuple(value.shape) for each, value in self.held.values.items()}
        try:
            indices = indices_of(self.whole.shape, shapes, self.held.mesh.sizes, layout, place)
        except LookupError:
            return None
        return select_indices(self.whole, indices)

    def join_pieces(self, layout: Layout) -> Tensor | None:
        """Return the ranks' pieces under a layout without summands, put together; None if some are padded."""
        found = torch.full_like(self.whole, math.nan)
        shapes = {each: tuple(value.shape) for each, value in self.held.values.items()}
        for place, value in self.held.values.items():
            indices = indices_of(self.whole.shape, shapes, self.held.mesh.sizes, layout, place)
            if any((index >= size).any() for index, size in zip(indices, self.whole.shape, strict=True)):
                return None  # padded
            found[torch.meshgrid(*indices, indexing="ij")] = value.to(found.dtype)
        return found

    def dims_apart(self) -> set[str]:
        """Return the names of mesh dimensions along which ranks must have different values: a parameter's pieces, or
        the pieces of the model's input."""
        key = self.verdict.key
        before = Key(0, INITIAL, key.name) if key.phase in (GRADIENT, STEP) else None
        for each in self.earlier:
            is_input = each.key.phase == INPUT and not each.key.name
            if each.key == before or (before is None and is_input):
                return dims_of_kind(each, CUT)
        return set()

    def subsets_of_dims(self) -> Iterator[tuple[int, ...]]:
        """Yield sets of dimensions of the mesh that have several ranks, small sets first."""
        dims = [d for d, size in enumerate(self.held.mesh.sizes) if size > 1]
        for n in range(1, len(dims) + 1):
            yield from itertools.combinations(dims, n)


def find_reordered(earlier: Sequence[ValueVerdict], wrong: ValueVerdict) -> ValueVerdict | None:
    """Return the first output before a wrong loss, or a wrong input, from which on the ranks have rows in another order
    than in the model's input."""
    flows = [each for each in earlier if each.key.turn == wrong.key.turn and each.key.phase in (INPUT, FORWARD)]
    if wrong.key.phase == FORWARD and not any(
        each.word == WRONG for each in flows if each.key.phase == INPUT and each.key.name == wrong.key.name
    ):
        return None
    right = [(each, _deals_of(each)) for each in flows if each.word == RIGHT]
    inputs = next((deals for each, deals in right if not each.key.name and each.key.phase == INPUT), {})
    outputs = [(each, deals) for each, deals in right if each.key.phase == FORWARD]
    for name, deal in inputs.items() if wrong.key.phase in (FORWARD, LOSS) and outputs else ():
        found = None
        for each, deals in outputs:
            found = None if deals.get(name) == deal else found or (each if name in deals else None)
        if found is not None:
            return found
    return None


def _deals_of(verdict: ValueVerdict) -> dict[str, str]:
    """Return how the ranks along each dimension of the mesh are dealt rows, where they are."""
    if verdict.fit is None or verdict.mesh is None:
        return {}
    shares = zip(verdict.mesh.names, verdict.fit.layout.shares, strict=True)
    deals = {name: share.deal.removeprefix("as they are") for name, share in shares if share.kind == CUT}
    return {name: deal for name, deal in deals.items() if not deal.startswith("in ")}  # of heads, not of rows


def rank_words(sizes: Sequence[int], places: Iterable[Coordinate]) -> str:
    """Return ranks by number: `rank 2`, `ranks 0 and 1`; `the driver`, which is in no mesh."""
    numbers = sorted(rank_number(sizes, place) for place in places)
    words = [str(each) for each in numbers if each < math.prod(sizes)]
    listed = (
        f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}" if words else ""
    )
    return " and ".join(filter(None, (listed, "the driver" if len(words) < len(numbers) else "")))


def rank_number(sizes: Sequence[int], place: Coordinate) -> int:
    """Return the rank at a coordinate of a mesh, in row-major order."""
    found = 0
    for at, size in zip(place, sizes, strict=True):
        found = found * size + at
    return found


def first_along(place: Coordinate, dim: int) -> Coordinate:
    """Return the first coordinate in the same line of the mesh along a dimension."""
    return (*place[:dim], 0, *place[dim + 1 :])


def dims_of_kind(verdict: ValueVerdict, kind: str) -> set[str]:
    """Return the names of the mesh dimensions along which the ranks share a value so."""
    if verdict.fit is None or verdict.mesh is None:
        return set()
    shares = zip(verdict.mesh.names, verdict.fit.layout.shares, strict=True)
    return {name for name, share in shares if share.kind == kind}
