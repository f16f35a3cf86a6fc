"""Where the first wrong value differs: a map of at most 32 by 32 cells for each rank that has it.

Guarantees
- A cell has the largest difference of the numbers that it stands for, in percent of the largest one of all maps.
- The last dimension of a tensor runs across, all others down. A rank's map is that of its own piece.
- At most `MOST_MAPS` ranks have a map: those that differ come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from rpcbench.compare.capture import BACKWARD
from rpcbench.compare.evidence import Evidence, rank_number
from rpcbench.compare.layouts import pair_pieces
from rpcbench.compare.verdicts import ErrorMap

MOST_CELLS = 32  # along each side of a map
MOST_MAPS = 16


def map_errors(evidence: Evidence) -> tuple[ErrorMap, ...]:
    """Return the maps of a wrong value, by rank; none if no layout fits the shapes of the ranks' values."""
    found = [(ranks, _pool_cells(difference), difference.shape) for ranks, difference in _find_differences(evidence)]
    found.sort(key=lambda each: _largest(each[1]) <= 0)  # stable
    found = sorted(found[:MOST_MAPS], key=lambda each: each[0])
    largest = max((_largest(cells) for _, cells, _ in found), default=0.0)
    dark = largest if all(bool(cells.isfinite().all()) for _, cells, _ in found) else math.inf
    return tuple(
        ErrorMap(ranks, (shape[0], shape[1]), tuple(map(tuple, _percent_of(cells, largest))), dark)
        for ranks, cells, shape in found
    )


def _find_differences(evidence: Evidence) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield ranks and the size of their difference, as a matrix. Ranks whose summands were added up have one."""
    verdict, held, runs = evidence.verdict, evidence.held, evidence.runs
    if verdict.fit is None or held.missing:
        return
    scale = runs.factors.get(verdict.key.turn, 1.0) if verdict.key.phase == BACKWARD else 1.0
    for places, value, wanted in pair_pieces(evidence.whole, held.values, held.mesh.sizes, verdict.fit.layout):
        ranks = sorted(rank_number(runs.mesh.sizes, held.places[place]) for place in places)
        yield tuple(ranks), _as_matrix((value / scale - wanted).abs())


def _as_matrix(value: Tensor) -> Tensor:
    return value.reshape(1, -1) if value.dim() < 2 else value.reshape(-1, value.shape[-1])


def _pool_cells(difference: Tensor) -> Tensor:
    if not difference.numel():
        return difference
    sides = [min(MOST_CELLS, size) for size in difference.shape]
    finite = torch.nan_to_num(difference.double(), nan=torch.inf)
    return adaptive_max_pool2d(finite[None, None], sides)[0, 0]


def _largest(cells: Tensor) -> float:
    """Return the largest finite number, or 1 if there are only others."""
    finite = cells[cells.isfinite()]
    return float(finite.max()) if finite.numel() else float(cells.numel() > 0)


def _percent_of(cells: Tensor, largest: float) -> Sequence[Sequence[int]]:
    shares = cells * (100 / largest) if largest else cells
    rows: list[list[int]] = shares.clamp(max=100).round().int().tolist()
    return rows
