"""Judges one value: do the ranks have, together, what one process has?

Guarantees
- Right means that a layout of `layouts` explains every rank's value within the allowance; the layout is in the verdict.
- Parameters, their gradients and initial values are never right as summands: a step takes each rank's own value.
- A value that is zero everywhere, or that round-off moves as far as it is large, is neither right nor wrong.
- A DTensor's own placements are tried first, and are not believed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rpcbench.compare.capture import BACKWARD, FORWARD, INPUT, LOSS, Key
from rpcbench.compare.layouts import SUM, Coordinate, Layout, LayoutFit, find_layouts, fit_layout, norm_of

RIGHT, WRONG, UNKNOWN, ABSENT = "right", "wrong", "cannot tell", "not there"
ANY = math.inf  # a scale that is not known yet
_SUMMABLE = (INPUT, FORWARD, BACKWARD, LOSS)


class Mesh(NamedTuple):
    """The dimensions of a mesh of ranks."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]


def driver_place(mesh: Mesh) -> Coordinate:
    """Return the coordinate of a driver, which is in no mesh of workers: its number as a rank comes after theirs."""
    return (mesh.sizes[0], *(0 for _ in mesh.sizes[1:]))


class ErrorMap(NamedTuple):
    """Where the values of one rank differ, see `error_maps`."""

    ranks: tuple[int, ...]  # one; those whose summands were added up
    shape: tuple[int, int]  # of the piece, as a matrix
    cells: tuple[tuple[int, ...], ...]  # percent of the largest difference
    largest: float  # difference of all maps; infinite if a number is not finite


@dataclass(slots=True)
class ValueVerdict:
    """The verdict on one value."""

    key: Key
    call: int | None  # None: all calls, joined along their first dimension
    word: str  # RIGHT, WRONG, UNKNOWN or ABSENT
    layout: str = ""  # in words
    error: float = 0.0  # norm of the difference, of the best layout
    allowed: float = 0.0
    norm: float = 0.0  # of the reference
    shape: tuple[int, ...] = ()
    dtype: str = ""
    factor: float = 1.0  # by which a right gradient of the backward pass is larger: the scale of the loss
    mesh: Mesh | None = field(default=None, repr=False)  # of the ranks that have it
    fit: LayoutFit | None = field(default=None, repr=False)
    places: tuple[Coordinate, ...] = field(default=(), repr=False)  # ranks that have it
    whole_places: dict[Coordinate, Coordinate] = field(default_factory=dict, repr=False)  # in `mesh` → in the whole one
    missing: tuple[Coordinate, ...] = field(default=(), repr=False)  # ranks that should have it, and do not
    maps: tuple[ErrorMap, ...] = field(default=(), repr=False)  # of the first wrong value of a report only


class HeldValues(NamedTuple):
    """The ranks that have a value, as a mesh of their own."""

    mesh: Mesh
    values: dict[Coordinate, Tensor]  # by the coordinate in `mesh`
    places: dict[Coordinate, Coordinate]  # of these, in the whole mesh
    missing: tuple[Coordinate, ...]


def hold_values(mesh: Mesh, values: Mapping[Coordinate, Tensor]) -> HeldValues:
    """Return the ranks that have a value as a mesh: a stage of a pipeline is on one coordinate of `pp`."""
    there = [sorted({place[d] for place in values}) for d in range(len(mesh.sizes))]
    kept = [d for d, each in enumerate(there) if len(each) == mesh.sizes[d]]
    # Along other dimensions the value is on some ranks only: each is a dimension of its own, if it has several.
    kept += [d for d, each in enumerate(there) if 1 < len(each) < mesh.sizes[d]]
    kept.sort()
    small = Mesh(tuple(mesh.names[d] for d in kept), tuple(len(there[d]) for d in kept))
    places = {
        tuple(there[d].index(place[d]) for d in kept): place for place in itertools.product(*there) if place in values
    }
    missing = tuple(place for place in itertools.product(*there) if place not in values)
    return HeldValues(small, {own: values[place] for own, place in places.items()}, places, missing)


def judge_value(
    key: Key,
    call: int | None,
    whole: Tensor,
    mesh: Mesh,
    values: Mapping[Coordinate, Tensor],
    allowed: float,
    factor: float = 1.0,
    claims: Collection[str] = (),
) -> ValueVerdict:
    """Judge one value of the reference by those of the ranks.

    Args:
        key: Its name; `call`: of the module, or None for all.
        whole: The reference's value.
        mesh: Of all ranks.
        values: Of the ranks that have it, by coordinate.
        allowed: Norm of the difference that round-off explains.
        factor: By which right values are larger: gradients have the scale of the loss. `ANY`: not known.
        claims: Kinds of placements that DTensors among the values have.
    """
    verdict = ValueVerdict(key, call, ABSENT, allowed=allowed, shape=tuple(whole.shape), dtype=_short(whole.dtype))
    verdict.places = tuple(values)
    if not values:
        return verdict
    held = hold_values(mesh, values)
    verdict.mesh, verdict.missing, verdict.whole_places = held.mesh, held.missing, held.places
    whole, local = as_numbers(whole), {place: as_numbers(value) for place, value in held.values.items()}
    verdict.norm = norm_of(whole)
    if not held.missing:
        _choose_fit(verdict, whole, local, claims, factor)
    else:
        verdict.word, verdict.error = WRONG, float("inf")
    if verdict.fit is not None:
        verdict.layout = verdict.fit.layout.describe(held.mesh.names)
    return verdict


def as_numbers(value: Tensor) -> Tensor:
    """Return a value in a type in which differences are exact enough: float32, or double."""
    return value if value.dtype == torch.float64 else value.double() if not value.is_floating_point() else value.float()


def _choose_fit(
    verdict: ValueVerdict, whole: Tensor, local: Mapping[Coordinate, Tensor], claims: Collection[str],
    factor: float,
) -> None:  # fmt: skip
    """Take the first layout that is near; else the nearest one."""
    assert verdict.mesh is not None
    shapes = {place: tuple(value.shape) for place, value in local.items()}
    tried: list[LayoutFit] = []
    for layout in find_layouts(whole.shape, shapes, verdict.mesh.sizes):
        if not _may_be(verdict, layout, claims):
            continue
        tried.append(fit_layout(whole, local, verdict.mesh.sizes, layout))
        if _take_if_near(verdict, tried[-1], factor):
            return
    verdict.word = WRONG
    verdict.fit = min(tried, key=lambda fit: fit.error, default=None)
    verdict.error = verdict.fit.error if verdict.fit else float("inf")


def _may_be(verdict: ValueVerdict, layout: Layout, claims: Collection[str]) -> bool:
    """Return whether a value of this phase may be in summands: not where a step takes each rank's own."""
    return verdict.key.phase in _SUMMABLE or not layout.has_kind(SUM) or SUM in claims


def _take_if_near(verdict: ValueVerdict, fit: LayoutFit, factor: float) -> bool:
    scales = [factor] if factor != ANY else [1.0, *_nearest_scales(fit)]
    is_number = verdict.key.phase == FORWARD and not verdict.shape  # as of a loss that is a module
    if verdict.key.phase == LOSS or is_number:  # the mean of the ranks' along some dimensions, their sum along others
        scales += [factor * size for size in _summed_sizes(fit.layout, verdict.mesh)]
    for scale in scales:
        error = _error_at(fit, scale, verdict.norm)
        if error <= verdict.allowed:
            verdict.word = RIGHT if verdict.norm > verdict.allowed else UNKNOWN
            verdict.fit, verdict.factor, verdict.error = fit, scale, error
            return True
    return False


def _nearest_scales(fit: LayoutFit) -> list[float]:
    """Return the scale of the ranks' values: the whole number near to it, if one explains them as well."""
    if not 0 < fit.factor < math.inf:
        return []
    whole = round(fit.factor) or 1
    return [float(whole), 1 / max(1, round(1 / fit.factor)), fit.factor]


def _summed_sizes(layout: Layout, mesh: Mesh | None) -> list[float]:
    """Return the numbers of ranks that are added up, along any dimensions: a mean over them is their sum, divided."""
    assert mesh is not None
    found = [1.0]
    for share, size in zip(layout.shares, mesh.sizes, strict=True):
        found += [size * other for other in found] if share.kind == SUM else []
    return found[1:]


def _error_at(fit: LayoutFit, factor: float, norm: float) -> float:
    """Return the norm of `value / factor - reference`, where `fit.factor` may be a little off the one asked for."""
    if factor == 1.0:
        return fit.error
    return math.hypot(fit.scaled_error, (fit.factor / factor - 1) * norm)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
