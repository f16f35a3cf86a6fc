"""How the ranks of a mesh hold one tensor, inferred from their values and those of one process. Nobody annotates.

Along each dimension of the mesh the ranks have the whole tensor, a piece of it, or a summand. Shapes leave few such
layouts, and values decide between these.

Guarantees
- Pure: tensors in, layouts and distances out.
- A layout fits only if every rank's value is explained: its piece for cut dimensions, its copy for whole ones.
- Pieces may be uneven, empty, or padded behind the end of the tensor; a dimension may be dealt in the ways of `DEALS`.
"""

# Theory of operation
#
# A mesh {dp: 2, tp: 2}, a weight cut by tensor parallel and again by FSDP, both along dimension 0:
#
#     one process   0 1 2 3 4 5 6 7
#     tp cuts       0 1 2 3 │ 4 5 6 7
#     dp cuts these 0 1│2 3 │ 4 5│6 7        rank (dp 1, tp 0) has 2 3: the order of the two cuts matters
#
# `positions` gives the indices that a rank has along one dimension of the tensor. Ranks that differ only along summed
# mesh dimensions are added up; the sums, or else the values, are compared with the tensor at these indices.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 18  # numbers that are compared at once
Coordinate = tuple[int, ...]
Shapes = Mapping[Coordinate, Sequence[int]]
"""The shape of each rank's value."""
WHOLE, SUM, CUT = "Replicate", "Partial", "Shard"
DEALS = ("", "as they are", "round robin", "zig-zag", "in 2 parts", "in 3 parts", "in 4 parts")
"""Ways in which a dimension is cut. "": pieces of equal size in order, the last ones smaller; "as they are": in order,
of the sizes that the ranks have; "round robin": one index to each rank in turn; "zig-zag": rank r has the pieces r and
2n-1-r of 2n (context parallel); "in k parts": each k-th of it is cut, and a rank has its piece of each."""


@dataclass(frozen=True, slots=True)
class MeshShare:
    """How the ranks along one dimension of the mesh share a tensor."""

    kind: str  # WHOLE, SUM or CUT
    dim: int = -1  # of the tensor, where it is cut
    deal: str = ""

    def __str__(self) -> str:
        if self.kind != CUT:
            return self.kind
        return f"Shard({self.dim})" + (f", {self.deal}" if self.deal else "")


@dataclass(frozen=True, slots=True)
class Layout:
    """One share for each dimension of the mesh, and the order in which these cut the tensor."""

    shares: tuple[MeshShare, ...]
    order: tuple[int, ...]

    def describe(self, names: Sequence[str]) -> str:
        """Return it in torch's words: `dp Shard(0), tp Replicate`."""
        return ", ".join(f"{name} {share}" for name, share in zip(names, self.shares, strict=True))

    def has_kind(self, kind: str) -> bool:
        """Return whether the ranks share it so along any dimension of the mesh."""
        return any(share.kind == kind for share in self.shares)


class LayoutFit(NamedTuple):
    """How well a layout explains the values of the ranks."""

    layout: Layout
    error: float  # norm of the difference from the reference
    factor: float  # by which the ranks' values are best divided to come near to the reference
    scaled_error: float  # norm of the difference after that
    by_rank: dict[Coordinate, float]  # norm of each rank's own difference


def positions(size: int, cuts: Sequence[tuple[MeshShare, int, int]], held: int | None = None) -> Tensor:
    """Return the indices along a dimension of `size` that a rank holds; those from `size` on are padding.

    Args:
        size: Of the whole tensor along the dimension.
        cuts: For each mesh dimension that cuts it, in order: its share, its number of ranks, the rank along it.
        held: The size of the rank's own piece: a longer one is padded.
    """
    found = torch.arange(size)
    for share, count, place in cuts:
        if share.deal == "round robin":
            found = found[place::count]
        elif share.deal == "zig-zag":
            pieces = _split_evenly(found, 2 * count)
            found = torch.cat([pieces[place], pieces[2 * count - 1 - place]])
        elif share.deal.startswith("in "):
            groups = found.tensor_split(int(share.deal.split()[1]))
            found = torch.cat([_split_evenly(group, count)[place] for group in groups])
        elif share.deal == "":
            found = _split_evenly(found, count)[place]
    if held is not None and held > len(found):
        found = torch.cat([found, torch.full((held - len(found),), size)])
    return found


def _split_evenly(indices: Tensor, count: int) -> list[Tensor]:
    """Return `count` pieces as torch's `chunk` cuts, with empty ones at the end."""
    piece = -(-len(indices) // count)
    return [indices[piece * n : piece * (n + 1)] for n in range(count)]


def find_layouts(shape: Sequence[int], held: Shapes, mesh: Sequence[int]) -> Iterator[Layout]:
    """Yield the layouts that the shapes allow, likely ones first.

    Args:
        shape: Of the whole tensor.
        held: The shape of each rank's value.
        mesh: Sizes of the mesh.
    """
    if any(len(each) != len(shape) for each in held.values()):
        return
    cut_dims = [d for d in range(len(shape)) if any(each[d] != shape[d] for each in held.values())]
    for shares in sorted(itertools.product(*_shares_along(cut_dims, mesh)), key=_unlikelihood):
        dims = [share.dim for share in shares if share.kind == CUT]
        if {*dims} != {*cut_dims} or sum(bool(share.deal) for share in shares) > 1:
            continue
        orders = [tuple(range(len(mesh)))]
        if len(dims) > len({*dims}):  # two mesh dimensions cut one of the tensor
            orders = list(itertools.permutations(range(len(mesh))))
        for order in orders:
            layout = Layout(shares, order)
            if _has_right_sizes(shape, held, mesh, layout):
                yield layout


def _shares_along(cut_dims: Sequence[int], mesh: Sequence[int]) -> list[list[MeshShare]]:
    cuts = [MeshShare(CUT, dim, deal) for deal in DEALS for dim in cut_dims]
    return [[MeshShare(WHOLE), *(cuts if size > 1 else []), *([MeshShare(SUM)] if size > 1 else [])] for size in mesh]


def _unlikelihood(shares: Sequence[MeshShare]) -> tuple[int, int]:
    return sum(share.kind == SUM for share in shares), sum(DEALS.index(share.deal) for share in shares)


def _has_right_sizes(
    shape: Sequence[int], held: Shapes, mesh: Sequence[int], layout: Layout
) -> bool:
    for m, share in enumerate(layout.shares):
        if share.kind != CUT and any(each != held[(*place[:m], 0, *place[m + 1 :])] for place, each in held.items()):
            return False  # copies and summands have one shape
    try:
        return all(
            len(found) == each[d]
            for place, each in held.items()
            for d, found in enumerate(indices_of(shape, held, mesh, layout, place))
        )
    except LookupError:
        return False


def indices_of(
    shape: Sequence[int], held: Shapes, mesh: Sequence[int], layout: Layout, place: Coordinate
) -> list[Tensor]:
    """Return the indices along each dimension that the rank at `place` holds. LookupError if it cannot be cut so."""
    found = []
    for d, size in enumerate(shape):
        cuts = [(layout.shares[m], mesh[m], place[m]) for m in layout.order if layout.shares[m].dim == d]
        if any(share.deal == "as they are" for share, _, _ in cuts):
            found.append(_positions_by_sizes(size, held, d, layout, place))
        else:
            padded = bool(cuts) and held[place][d] * math.prod(count for _, count, _ in cuts) >= size
            found.append(positions(size, cuts, held[place][d] if padded else None))
    return found


def _positions_by_sizes(
    size: int, held: Shapes, dim: int, layout: Layout, place: Coordinate
) -> Tensor:
    along, *others = (m for m, share in enumerate(layout.shares) if share.dim == dim)
    if others:
        raise LookupError("sizes alone do not say how two dimensions of the mesh cut one of the tensor")
    before = [other for other in held if other[:along] == place[:along] and other[along + 1 :] == place[along + 1 :]]
    begins = sum(held[other][dim] for other in before if other[along] < place[along])
    if sum(held[other][dim] for other in before) != size:
        raise LookupError("the pieces do not add up to the tensor")
    return torch.arange(begins, begins + held[place][dim])


def fit_layout(whole: Tensor, held: Mapping[Coordinate, Tensor], mesh: Sequence[int], layout: Layout) -> LayoutFit:
    """Compare the ranks' values with the whole tensor, under a layout that `find_layouts` gave."""
    worst: dict[Coordinate, float] = {}  # piece → largest squared error of its copies
    by_rank: dict[Coordinate, float] = {}
    sums = BlockSums()
    for places, value, wanted in pair_pieces(whole, held, mesh, layout):
        found = measure_sums(value, wanted)
        piece = tuple(at if share.kind == CUT else 0 for share, at in zip(layout.shares, places[0], strict=True))
        worst[piece] = max(worst.get(piece, 0.0), found.error)
        by_rank.update(dict.fromkeys(places, found.error**0.5))
        sums = BlockSums(*(one + other for one, other in zip(sums, found, strict=True)))
    return LayoutFit(layout, sum(worst.values()) ** 0.5, *_scale_of(sums), by_rank)


class BlockSums(NamedTuple):
    """BlockSums over the numbers of a rank's value v and the reference's w."""

    error: float = 0.0  # of (v - w)²
    dot: float = 0.0  # of v w
    own: float = 0.0  # of v²
    square: float = 0.0  # of w²


def measure_sums(value: Tensor, wanted: Tensor) -> BlockSums:
    """Return the sums of two tensors of one shape in double precision, block by block: none of them is copied whole."""
    found = BlockSums()
    flat = value.reshape(-1), wanted.reshape(-1)
    for begin in range(0, value.numel(), BLOCK):
        v, w = (each[begin : begin + BLOCK].double() for each in flat)
        block = (_square_error(v, w), v @ w, v @ v, w @ w)
        found = BlockSums(*(one + float(other) for one, other in zip(found, block, strict=True)))
    return found


def _square_error(value: Tensor, wanted: Tensor) -> Tensor:
    """Return the sum of (v - w)²: infinite if a number is NaN, or infinite, where the other one is not."""
    difference = value - wanted
    error = difference @ difference
    if error.isnan():
        is_same = (value == wanted) | (value.isnan() & wanted.isnan())
        difference = difference.masked_fill(is_same, 0.0)
        error = (difference @ difference).nan_to_num(nan=math.inf, posinf=math.inf)
    return error


def norm_of(value: Tensor) -> float:
    """Return the norm of a tensor, in double precision."""
    return math.sqrt(measure_sums(value, value).square)


def _scale_of(sums: BlockSums) -> tuple[float, float]:
    """Return the factor f that brings v / f nearest to w, and the norm of their difference then."""
    if not sums.square:
        return 1.0, sums.error**0.5
    if not sums.dot:
        return 0.0, math.inf
    factor = sums.dot / sums.square
    return factor, max(0.0, sums.own / factor**2 - sums.square) ** 0.5


def pair_pieces(
    whole: Tensor, held: Mapping[Coordinate, Tensor], mesh: Sequence[int], layout: Layout
) -> Iterator[tuple[list[Coordinate], Tensor, Tensor]]:
    """Yield each rank's value with the piece of the whole tensor that it must be, without padding. Ranks that have
    summands come together, with their sum."""
    shapes = {place: tuple(value.shape) for place, value in held.items()}
    groups: dict[Coordinate, list[Coordinate]] = {}
    for place in held:
        summed = tuple(-1 if share.kind == SUM else at for share, at in zip(layout.shares, place, strict=True))
        groups.setdefault(summed, []).append(place)
    for places in groups.values():
        indices = indices_of(whole.shape, shapes, mesh, layout, places[0])
        value = _without_padding(_add_up([held[place] for place in places]), whole.shape, indices)
        yield places, value, select_indices(whole, indices)


def select_indices(whole: Tensor, indices: Sequence[Tensor]) -> Tensor:
    for d, index in enumerate(indices):
        index = index[index < whole.shape[d]]
        if len(index) == whole.shape[d] and bool((index[1:] > index[:-1]).all()):
            continue
        if len(index) and int(index[-1]) - int(index[0]) == len(index) - 1 and bool((index[1:] > index[:-1]).all()):
            whole = whole.narrow(d, int(index[0]), len(index))
        else:
            whole = whole.index_select(d, index)
    return whole


def _without_padding(value: Tensor, shape: Sequence[int], indices: Sequence[Tensor]) -> Tensor:
    for d, index in enumerate(indices):
        count = int((index < shape[d]).sum())
        if count < value.shape[d]:
            value = value.narrow(d, 0, count)
    return value


def _add_up(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
