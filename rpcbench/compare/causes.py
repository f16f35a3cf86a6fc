"""Explains the first wrong value: a sentence with the cause, and what to do.

Each cause is a transformation that turns the reference's value into the ranks' values: a sum in place of a mean,
another group, the same piece on every rank. A cause is named only where its transformation gives the ranks' values,
within the same allowance as a right value; else the sentence says what was tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rpcbench.compare.capture import BACKWARD, FORWARD, GRADIENT, INITIAL, INPUT, LOSS, STEP, Key
from rpcbench.compare.compare_runs import Runs
from rpcbench.compare.layouts import (
    CUT,
    SUM,
    WHOLE,
    Coordinate,
    Fit,
    Layout,
    find_layouts,
    fit_layout,
    indices_of,
    select_indices,
)
from rpcbench.compare.verdicts import RIGHT, WRONG, Held, Verdict, as_numbers, hold_values

_HALF_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Evidence:
    """The first wrong value, and what was found before it."""

    runs: Runs
    verdict: Verdict
    earlier: Sequence[Verdict]  # in order
    later: Sequence[Verdict]
    summands: Verdict | None  # the value before it that the ranks have in summands, if that is why this one is wrong

    @cached_property
    def whole(self) -> Tensor:
        """The reference's value."""
        return as_numbers(self.runs.read_whole(self.verdict.key, self.verdict.call))

    @cached_property
    def held(self) -> Held:
        """The ranks' values."""
        values = self.runs.read_values(self.verdict.key, self.verdict.call)
        held = hold_values(self.runs.mesh, values)
        return held._replace(values={place: as_numbers(value) for place, value in held.values.items()})

    @cached_property
    def fits(self) -> list[Fit]:
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
    def kind(self) -> str:
        """The class of the module, in the reference."""
        facts = self.runs.reference.catalog.modules.get(self.verdict.key.name)
        return facts.kind if facts else ""

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


def rank_words(sizes: Sequence[int], places: Iterable[Coordinate]) -> str:
    """Return ranks by number: `rank 2`, `ranks 0 and 1`."""
    numbers = sorted(rank_number(sizes, place) for place in places)
    words = [str(each) for each in numbers]
    return f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"


def rank_number(sizes: Sequence[int], place: Coordinate) -> int:
    """Return the rank at a coordinate of a mesh, in row-major order."""
    found = 0
    for at, size in zip(place, sizes, strict=True):
        found = found * size + at
    return found


Cause = Callable[[Evidence], str | None]


def explain(evidence: Evidence) -> str:
    """Return the cause of the first wrong value, in a sentence or two."""
    for cause in CAUSES:
        if (found := cause(evidence)) is not None:
            return found
    return (
        "none of the known causes gives these values: no reduction that is left out, doubled, or over another group, "
        "no constant factor, no other order of rows, no bias that is added several times, no single rank"
    )


def explain_masks(runs: Runs, verdicts: Sequence[Verdict]) -> tuple[str, str] | None:
    """Return the first module whose dropout masks are wrong, and why: ranks with the same values must draw the same
    mask, ranks with other values other ones."""
    layouts = {
        each.key.name: each
        for each in verdicts
        if each.key.phase == FORWARD and each.word == RIGHT and each.fit is not None
    }
    names = dict.fromkeys(name for catalog in runs.ranks.values() for name in catalog.masks)
    for name in names:
        if (verdict := layouts.get(name)) is not None and (found := _compare_masks(runs, name, verdict)) is not None:
            return name, found
    return None


def _compare_masks(runs: Runs, name: str, verdict: Verdict) -> str | None:
    assert verdict.fit is not None and verdict.mesh is not None
    masks = {place: catalog.masks.get(name) for place, catalog in runs.ranks.items()}
    for d, share in enumerate(verdict.fit.layout.shares):
        along = verdict.mesh.names[d]
        whole = runs.mesh.names.index(along)
        for place, mask in masks.items():
            other = masks[_first_along(place, whole)]
            if not place[whole] or mask is None or other is None:
                continue
            if share.kind == WHOLE and mask != other:
                return (
                    f"ranks along {along} have the same values, and different random dropout masks: give them the same "
                    "seed there"
                )
            if share.kind == CUT and mask == other:
                return (
                    f"ranks along {along} have different values, and the same random dropout mask: give each its own "
                    "seed"
                )
    return None


# -- values that are not there, or not numbers
def _is_missing(evidence: Evidence) -> str | None:
    verdict = evidence.verdict
    if verdict.key.phase != GRADIENT or not verdict.missing:
        return None
    if len(verdict.missing) == len(evidence.runs.ranks):
        return "no rank has a gradient: the forward pass does not use the parameter, or cuts it off by detach"
    return (
        f"the parameter has no gradient on {rank_words(evidence.runs.mesh.sizes, verdict.missing)}: the forward pass "
        "there does not use it"
    )


def _is_not_finite(evidence: Evidence) -> str | None:
    bad = [place for place, value in evidence.held.values.items() if not bool(torch.isfinite(value).all())]
    if not bad or not bool(torch.isfinite(evidence.whole).all()):
        return None
    return f"NaN or infinity is born here, on {evidence.rank_names(bad)}; everything before it is finite"


# -- before the first forward
def _has_other_start(evidence: Evidence) -> str | None:
    if evidence.verdict.key.phase != INITIAL:
        return None
    values = list(evidence.held.values.values())
    bad = _places_apart(evidence)
    if bad:
        return (
            f"the parameter begins with other values on {evidence.rank_names(bad)}: give all ranks the same seed, or "
            "broadcast the parameters before the first step"
        )
    if all(torch.equal(values[0], each) for each in values):
        return "the parameter begins with other values than the reference's: make both models with the same seed"
    return (
        "the parameter begins with different initial values on different ranks: give all the same seed, or broadcast "
        "the parameters before the first step"
    )


def _has_same_rows(evidence: Evidence) -> str | None:
    """All ranks along a dimension have one piece of the model's input."""
    key = evidence.verdict.key
    wrong = [each for each in evidence.earlier if each.key.phase == INPUT and each.key.turn == key.turn]
    inputs = next((each for each in wrong if each.word == WRONG), None)
    if key.phase != FORWARD or inputs is None:
        return None
    return _explain_same_piece(_evidence_of(evidence, inputs), "rows")


def _is_same_piece(evidence: Evidence) -> str | None:
    if evidence.verdict.key.phase not in (FORWARD, INPUT):
        return None
    return _explain_same_piece(evidence, "positions")


def _explain_same_piece(evidence: Evidence, default: str) -> str | None:
    for layout, index in _cut_layouts(evidence):
        cut = [d for d, share in enumerate(layout.shares) if share.kind == CUT]
        piece = _first_piece(evidence, layout, index)
        if piece is None:
            continue
        errors = [_norm(value - piece) for value in evidence.held.values.values() if value.shape == piece.shape]
        if len(errors) == len(evidence.held.values) and all(map(evidence.is_near, errors)):
            dim = layout.shares[cut[0]].dim
            along = evidence.names_of(cut)
            if dim == 0:
                return (
                    f"all ranks along {along} work on the same rows, the first ones of the batch: take the rows by the "
                    "rank's coordinate"
                )
            return (
                f"all ranks along {along} have the values of the first piece of dimension {dim}: positions or masks "
                "do not move along with the piece of the sequence that a rank has"
            )
    return None


def _cut_layouts(evidence: Evidence) -> Iterator[tuple[Layout, int]]:
    for fit in evidence.fits:
        dims = [share.dim for share in fit.layout.shares if share.kind == CUT]
        if dims and not fit.layout.has_kind(SUM) and not any(share.deal for share in fit.layout.shares):
            yield fit.layout, dims[0]


def _first_piece(evidence: Evidence, layout: Layout, dim: int) -> Tensor | None:
    shapes = {tuple(value.shape) for value in evidence.held.values.values()}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    found = evidence.whole
    for d, size in enumerate(shape):
        found = found.narrow(d, 0, min(size, found.shape[d]))
    return found


# -- reductions
def _is_in_summands(evidence: Evidence) -> str | None:
    """The ranks' values add up to the reference: nobody has added them up."""
    if evidence.summands is not None:
        before = evidence.summands
        assert before.fit is not None and before.mesh is not None
        dims = [d for d, share in enumerate(before.fit.layout.shares) if share.kind == SUM]
        along = " and ".join(before.mesh.names[d] for d in dims)
        direction = "its gradient" if before.key.phase == BACKWARD else "it"
        return (
            f"a reduction is left out: the ranks along {along} have summands of {before.key.name or 'the output'}, "
            f"and go on with these. Add {direction} up over {along}"
            + (" in backward" if before.key.phase == BACKWARD else "")
        )
    for fit in evidence.fits:
        dims = [d for d, share in enumerate(fit.layout.shares) if share.kind == SUM]
        size = evidence.size_of(dims)
        if not dims:
            continue
        along = evidence.names_of(dims)
        if evidence.is_near(fit.error):
            return (
                f"a reduction is left out: the ranks' values add up to the reference along {along}, and each rank has "
                f"its own summand. Reduce it over {along}"
            )
        if _is_scaled_by(evidence, fit, float(size)):
            return (
                f"a reduction is left out: the mean of the ranks' values along {along} is the reference, and each rank "
                f"has its own value. Average it over {along}"
            )
    return None


def _is_scaled(evidence: Evidence) -> str | None:
    own = [fit for fit in evidence.fits if not fit.layout.has_kind(SUM)]
    for fit in own:
        for dims in _subsets(len(evidence.held.mesh.sizes)):
            size, along = evidence.size_of(dims), evidence.names_of(dims)
            if size > 1 and _is_scaled_by(evidence, fit, float(size)):
                return (
                    f"the value is {size} times too large, the number of ranks along {along}: a sum stands where their "
                    "mean belongs, or it is reduced twice"
                )
            if size > 1 and _is_scaled_by(evidence, fit, 1 / size):
                return (
                    f"the value is {size} times too small, the number of ranks along {along}: a mean stands where "
                    f"their sum belongs, or it is divided by the number of ranks along {along} once too often"
                )
        calls = _most_calls(evidence)
        for factor, words in ((float(calls), "large: divide the loss of each by their number"), (1 / calls, "small")):
            if calls > 1 and _is_scaled_by(evidence, fit, factor):
                return f"the value is {calls} times too {words}; {calls} is the number of micro-batches"
    return None


def _most_calls(evidence: Evidence) -> int:
    keys = [each.key for each in evidence.earlier if each.key.phase == FORWARD]
    return max((len(c.values.get(key, {})) for key in keys for c in evidence.runs.ranks.values()), default=1)


def _is_scaled_by(evidence: Evidence, fit: Fit, factor: float) -> bool:
    return evidence.is_near(math.hypot(fit.scaled_error, (fit.factor / factor - 1) * evidence.verdict.norm))


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    for n in range(1, count + 1):
        yield from itertools.combinations(range(count), n)


def _is_over_other_group(evidence: Evidence) -> str | None:
    """The ranks agree along dimensions of the mesh where they should have different values."""
    sizes, names = evidence.held.mesh.sizes, evidence.held.mesh.names
    apart = [d for d, name in enumerate(names) if name in _dims_apart(evidence) and sizes[d] > 1]
    others = [d for d, size in enumerate(sizes) if d not in apart and size > 1]
    if not apart or not others or not all(_agree_along(evidence, d) for d in apart):
        return None
    along = evidence.names_of(apart)
    if all(_agree_along(evidence, d) for d in others):
        return (
            f"a collective runs over the wrong group: all ranks have the same value here, also along {along}, where "
            f"they have different pieces. Reduce over {evidence.names_of(others)} alone"
        )
    return (
        f"a collective runs over the wrong group: ranks along {along} agree here, where they have different pieces, "
        f"and ranks along {evidence.names_of(others)} do not. Reduce over {evidence.names_of(others)}"
    )


def _dims_apart(evidence: Evidence) -> set[str]:
    """Return the names of mesh dimensions along which ranks must have different values: a parameter's pieces, or the
    pieces of the model's input."""
    key = evidence.verdict.key
    before = Key(0, INITIAL, key.name) if key.phase in (GRADIENT, STEP) else None
    for each in evidence.earlier:
        is_input = each.key.phase == INPUT and not each.key.name
        if each.fit is not None and each.mesh is not None and (each.key == before or (before is None and is_input)):
            return _cut_names(each)
    return set()


def _cut_names(verdict: Verdict) -> set[str]:
    assert verdict.fit is not None and verdict.mesh is not None
    shares = verdict.fit.layout.shares
    return {name for name, share in zip(verdict.mesh.names, shares, strict=True) if share.kind == CUT}


def _forward_of(evidence: Evidence) -> Verdict | None:
    """Return the verdict on the output whose gradient is wrong."""
    key = evidence.verdict.key._replace(phase=FORWARD)
    return next((each for each in evidence.earlier if each.key == key and each.fit is not None), None)


def _is_half_reduced(evidence: Evidence) -> str | None:
    """Ranks that have a value whole have different gradients of it."""
    forward = _forward_of(evidence)
    if evidence.verdict.key.phase != BACKWARD or forward is None or forward.fit is None or forward.mesh is None:
        return None
    whole = [d for d, share in enumerate(forward.fit.layout.shares) if share.kind == WHOLE]
    bad = [d for d in whole if forward.mesh == evidence.held.mesh and not _agree_along(evidence, d)]
    if not bad:
        return None
    along = evidence.names_of(bad)
    return (
        f"ranks along {along} have this value whole, and different gradients of it: a reduction over {along} is left "
        "out in backward, for one of the ways on which the value goes on"
    )


def _is_cut_off(evidence: Evidence) -> str | None:
    """The forward pass is right, and the gradient of a piece lacks what the other ranks do with it."""
    forward = _forward_of(evidence)
    if evidence.verdict.key.phase != BACKWARD or forward is None or forward.word != RIGHT:
        return None
    return (
        "the forward pass is right and this gradient is not: a collective behind it has no backward. A plain "
        "all_reduce or all_gather cuts the gradients of the other ranks off: use a differentiable one, as of "
        "torch.distributed.nn, or an autograd function that reduces the gradient"
    )


def _is_fused_block(evidence: Evidence) -> str | None:
    """A weight of three matrices is cut as if it were one."""
    if evidence.verdict.key.phase != FORWARD:
        return None
    parent = evidence.verdict.key.name.rpartition(".")[0]
    for each in evidence.earlier:
        if each.key.phase != INITIAL or not each.key.name.startswith(parent) or each.fit is None or len(each.shape) < 2:
            continue
        plain = any(share.kind == CUT and share.dim == 0 and not share.deal for share in each.fit.layout.shares)
        if plain and each.shape[0] == 3 * each.shape[1]:
            return (
                f"{each.key.name} holds three matrices (query, key, value) and is cut as one: a rank has rows of some "
                "of them only. Cut each of the three, and give a rank its piece of each"
            )
    return None


def _is_cut_short(evidence: Evidence) -> str | None:
    """The pieces do not make up the tensor."""
    if evidence.fits or evidence.held.missing or not evidence.held.values:
        return None
    whole = tuple(evidence.whole.shape)
    shapes = {tuple(value.shape) for value in evidence.held.values.values()}
    listed = " and ".join(map(str, sorted(shapes)))
    return (
        f"the shapes do not fit: the reference has {whole}, the ranks have {listed}, and no way to cut or copy gives "
        "that. Rows may be missing or dropped where a size is not divisible by the number of ranks: pad it"
    )


def _first_along(place: Coordinate, dim: int) -> Coordinate:
    return (*place[:dim], 0, *place[dim + 1 :])


def _agree_along(evidence: Evidence, dim: int) -> bool:
    values = evidence.held.values
    first = {place: value for place, value in values.items() if place[dim] == 0}
    return all(
        value.shape == (other := first[_first_along(place, dim)]).shape
        and evidence.is_near(_norm(value - other))
        for place, value in values.items()
    )


# -- the loss
def _is_wrong_loss(evidence: Evidence) -> str | None:
    if evidence.verdict.key.phase != LOSS or not _outputs_are_right(evidence):
        return None
    losses = {place: float(value) for place, value in evidence.held.values.items()}
    reference, mean = float(evidence.whole), sum(losses.values()) / len(losses)
    for dims in _subsets(len(evidence.held.mesh.sizes)):
        if abs(abs(mean - reference) - math.log(evidence.size_of(dims))) <= 10 * evidence.verdict.allowed:
            return (
                f"the loss is off by log({evidence.size_of(dims)}), the number of ranks along "
                f"{evidence.names_of(dims)}: each rank's whole scores are taken for a piece of the vocabulary, and "
                "counted once for each rank"
            )
    listed = ", ".join(f"{each:.6g}" for each in dict.fromkeys(losses.values()))
    said = f"the model's output is right and the loss is not: {listed} in place of {reference:.6g}"
    apart = _dims_apart(evidence)
    if any(name not in apart and not _agree_along(evidence, d) for d, name in enumerate(evidence.held.mesh.names)):
        return (
            f"{said}. Ranks with the same rows have different losses: each takes its piece of the vocabulary for the "
            "whole, in the label smoothing, the normalization, or a reduction that is left out"
        )
    if len({*losses.values()}) > 1:
        return (
            f"{said}; their mean is {mean:.6g}. A mean of means: ranks with different numbers of tokens must be "
            "weighted by these, so divide each rank's sum by the number of tokens of all"
        )
    return f"{said}. Look at its normalization, its reductions, and its label smoothing"


def _outputs_are_right(evidence: Evidence) -> bool:
    turn = evidence.verdict.key.turn
    return not any(
        each.word == WRONG for each in evidence.earlier if each.key.phase == FORWARD and each.key.turn == turn
    )


# -- one rank
def _places_apart(evidence: Evidence) -> list[Coordinate]:
    """Return the ranks that alone are wrong: the others fit a layout, and are the most."""
    for fit in evidence.fits:
        if fit.layout.has_kind(SUM):
            continue
        bad = [place for place, error in fit.by_rank.items() if not evidence.is_near(error)]
        if bad and len(bad) < len(fit.by_rank) / 2:
            return bad
    return []


def _is_one_rank(evidence: Evidence) -> str | None:
    if not (bad := _places_apart(evidence)):
        return None
    if evidence.verdict.key.phase == STEP:
        return (
            f"the replicas have drifted apart: {evidence.rank_names(bad)} alone differs, though all gradients are "
            "right. Its optimizer has other options or another state, or did not step"
        )
    return f"{evidence.rank_names(bad)} alone differs; the other ranks are right. Compare its options and its data"


def _has_drifted(evidence: Evidence) -> str | None:
    if evidence.verdict.key.phase != STEP or _disagreement(evidence) is None:
        return None
    return (
        "the replicas have drifted apart: ranks that hold the same piece have different values after the step, though "
        "all gradients are right. Their optimizers have different options or states, or a buffer is never shared"
    )


def _disagreement(evidence: Evidence) -> float | None:
    values = list(evidence.held.values.values())
    if any(value.shape != values[0].shape for value in values):
        return None
    found = max((_norm(value - values[0]) for value in values[1:]), default=0.0)
    return None if evidence.is_near(found) else found


# -- other transformations
def _has_other_order(evidence: Evidence) -> str | None:
    whole = evidence.whole
    if not whole.dim() or whole.shape[0] < 2:
        return None
    for name, values in (("", [*evidence.held.values.values()][:1]), ("each", [*evidence.held.values.values()])):
        joined = values[0] if name == "" else _concatenate(values)
        if joined is None or joined.shape != whole.shape:
            continue
        for dims in (1, 2):
            if whole.dim() > dims - 1 and evidence.is_near(_order_free_distance(joined, whole, dims)):
                return (
                    "the same rows in another order: the tokens or rows that come back are not put where they came "
                    "from. Undo the permutation of the exchange"
                )
    return None


def _concatenate(values: Sequence[Tensor]) -> Tensor | None:
    if len({value.shape[1:] for value in values}) != 1:
        return None
    return torch.cat([*values])


def _order_free_distance(one: Tensor, other: Tensor, dims: int) -> float:
    """Return the distance of two sets of rows; the first `dims` dimensions count the rows."""
    width = math.prod(one.shape[dims:])
    direction = torch.randn(width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first, second = (each.reshape(-1, width).double() for each in (one, other))
    return _norm(first[(first @ direction).argsort()] - second[(second @ direction).argsort()])


def _has_bias_apart(evidence: Evidence) -> str | None:
    """The values are explained once a bias of the module is taken apart from them."""
    name = evidence.verdict.key.name
    if evidence.verdict.key.phase != FORWARD or not evidence.fits:
        return None
    for each in evidence.runs.reference.catalog.modules[name].parameters:
        initial = Key(0, INITIAL, each)
        if each.endswith("bias") and initial in evidence.runs.reference.catalog.values:
            bias = as_numbers(evidence.runs.read_whole(initial, None))
            if evidence.whole.dim() and bias.shape == evidence.whole.shape[-1:]:
                found = next(filter(None, (_explain_bias(evidence, fit, bias) for fit in evidence.fits)), None)
                if found:
                    return found
    return None


def _explain_bias(evidence: Evidence, fit: Fit, bias: Tensor) -> str | None:
    if any(share.kind == CUT and share.dim == evidence.whole.dim() - 1 for share in fit.layout.shares):
        return None
    summed = [d for d, share in enumerate(fit.layout.shares) if share.kind == SUM]
    if summed:
        along = evidence.names_of(summed)
        if evidence.is_near(_refit(evidence, fit, bias).error):
            return (
                f"a reduction is left out: the ranks' values add up to the reference along {along}, but for the bias, "
                f"which each has added. Reduce over {along}, then add the bias"
            )
        return None
    for dims in _subsets(len(evidence.held.mesh.sizes)):
        size, along = evidence.size_of(dims), evidence.names_of(dims)
        if size > 1 and evidence.is_near(_refit(evidence, fit, bias, float(size)).error):
            return f"the bias is added {size} times, once on each rank along {along}: add it after the reduction"
        apart, norm = _refit(evidence, fit, bias), float(torch.linalg.vector_norm(evidence.whole - bias))
        for factor, words in ((float(size), "large: a sum for a mean"), (1 / size, "small: a mean for a sum")):
            if size > 1 and evidence.is_near(math.hypot(apart.scaled_error, (apart.factor / factor - 1) * norm)):
                return f"but for the bias, the value is {size} times too {words} over {along}"
    return None


def _refit(evidence: Evidence, fit: Fit, bias: Tensor, times: float = 1.0) -> Fit:
    """Fit again without the bias, which the reference has once, and each rank `times`."""
    values = {place: value - times * bias for place, value in evidence.held.values.items()}
    return fit_layout(evidence.whole - bias, values, evidence.held.mesh.sizes, fit.layout)


def _is_batch_norm(evidence: Evidence) -> str | None:
    if "BatchNorm" not in evidence.kind or evidence.verdict.key.phase not in (FORWARD, STEP):
        return None
    return (
        "each rank normalizes by the mean and the variance of its own rows, and the reference by those of the whole "
        "batch: use SyncBatchNorm, or a norm without statistics of the batch"
    )


def _is_running_statistic(evidence: Evidence) -> str | None:
    if evidence.verdict.key.phase != STEP or "running_" not in evidence.verdict.key.name:
        return None
    return (
        "the running statistics of BatchNorm are those of each rank's own rows: use SyncBatchNorm, or average them "
        "over the ranks"
    )


def _has_lower_precision(evidence: Evidence) -> str | None:
    if evidence.verdict.dtype not in ("float32", "float64"):
        return None
    for name, dtype in _HALF_TYPES.items():
        values = evidence.held.values.values()
        if all(torch.equal(value.to(dtype).to(value.dtype), value) for value in values):
            return f"every number is one of {name}: a reduction or a copy runs in {name}, with fewer digits than meant"
    nearest = evidence.verdict.fit
    if nearest is not None and evidence.verdict.norm:
        share = nearest.error / evidence.verdict.norm
        if share < 4 * torch.finfo(torch.bfloat16).eps and _is_spread(evidence, nearest):
            return (
                f"the values are right to {share:.0e}, all of them a little off: a part of the computation has fewer "
                "digits than meant (bfloat16 or float16 in a reduction, or TF32)"
            )
    return None


def _is_spread(evidence: Evidence, fit: Fit) -> bool:
    """Return whether the difference is spread over the values like round-off: on all ranks, and over many numbers."""
    return all(error > evidence.verdict.allowed / 10 for error in fit.by_rank.values())


def _is_clipped(evidence: Evidence) -> str | None:
    """Each rank's gradient is the reference's, times a factor of its own that is the same for all its parameters."""
    if evidence.verdict.key.phase != GRADIENT:
        return None
    for fit in evidence.fits:
        if fit.layout.has_kind(SUM) or fit.layout.order is None:
            continue
        factors = _own_factors(evidence, fit.layout)
        if factors is None or all(abs(each - 1) < 1e-3 for each in factors.values()):
            continue
        listed = ", ".join(f"{each:.4g}" for each in dict.fromkeys(round(each, 6) for each in factors.values()))
        return (
            f"the gradients have the right direction and another length ({listed} times the reference's): they are "
            "clipped by a norm that is not that of the whole model, as of a rank's own shard, or of some parameters"
        )
    return None


def _own_factors(evidence: Evidence, layout: Layout) -> dict[Coordinate, float] | None:
    found = {}
    for place, value in evidence.held.values.items():
        piece = _piece_of(evidence, layout, place)
        if piece is None or piece.shape != value.shape or not (square := float((piece.double() ** 2).sum())):
            return None
        factor = float((piece.double() * value.double()).sum()) / square
        if factor <= 0 or not evidence.is_near(_norm(value / factor - piece)):
            return None
        found[place] = factor
    return found


def _piece_of(evidence: Evidence, layout: Layout, place: Coordinate) -> Tensor | None:
    shapes = {each: tuple(value.shape) for each, value in evidence.held.values.items()}
    try:
        return select_indices(
            evidence.whole, indices_of(evidence.whole.shape, shapes, evidence.held.mesh.sizes, layout, place)
        )
    except LookupError:
        return None


def _is_tied(evidence: Evidence) -> str | None:
    name = evidence.verdict.key.name
    tied = evidence.runs.reference.catalog.tied
    group = next(((first, *others) for first, others in tied.items() if name in (first, *others)), None)
    if group is None or evidence.verdict.key.phase not in (GRADIENT, STEP):
        return None
    return (
        f"{' and '.join(group)} are one parameter in the reference: its gradient is the sum of what all its uses give. "
        "The ranks that hold copies must add their gradients up"
    )


def _norm(difference: Tensor) -> float:
    return float(torch.linalg.vector_norm(difference, dtype=torch.float64)) if difference.numel() else 0.0


def _evidence_of(evidence: Evidence, verdict: Verdict) -> Evidence:
    return Evidence(evidence.runs, verdict, evidence.earlier, evidence.later, None)


CAUSES: tuple[Cause, ...] = (
    _is_missing,
    _is_not_finite,
    _is_cut_short,
    _has_other_start,
    _has_same_rows,
    _is_batch_norm,
    _is_running_statistic,
    _is_tied,
    _is_scaled,
    _is_in_summands,
    _has_bias_apart,
    _is_over_other_group,
    _is_wrong_loss,
    _is_same_piece,
    _has_other_order,
    _is_clipped,
    _has_lower_precision,
    _is_one_rank,
    _has_drifted,
    _is_half_reduced,
    _is_cut_off,
    _is_fused_block,
)
