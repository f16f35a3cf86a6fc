"""Relations between the ranks' value and the reference's, whatever has made them: a factor, a factor for each row or
column, rows or numbers that are zero, a multiple of another tensor that is added, a shift, a sum over some ranks.

Guarantees
- A relation is told only if it gives the ranks' values within the allowance of a right value, and explains at least
  nine tenths of the difference.
- It is told of the ranks that differ; ranks with the right value take no part in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rpcbench.compare.capture import BACKWARD, FORWARD, GRADIENT, INITIAL, INPUT, LOSS, STEP
from rpcbench.compare.evidence import Evidence
from rpcbench.compare.layouts import CUT, SUM, WHOLE, Coordinate, Layout, indices_of, norm_of, select_indices
from rpcbench.compare.verdicts import RIGHT, ValueVerdict

_EXPLAINED = 0.1  # of the difference that a relation may leave
_LEAST = 3  # numbers for each factor that is fitted
_MANY = 24  # numbers in pairs of one factor
_MOST_KNOWN = 48  # tensors that are tried as a term
_MOST_PAIRED = 12  # that are tried one for another
_LARGEST_PAIRED = 1 << 22  # numbers in such a tensor
_MOST_FACTORS = 4  # of single numbers
_MOST_SHIFT = 2
_MOST_GATES = 64  # columns of an output in which the factors of rows are looked for


class PiecePair(NamedTuple):
    """A rank's value, and the piece of the reference that it must be."""

    place: Coordinate
    value: Tensor
    wanted: Tensor


class Pieces(NamedTuple):
    """The pairs of the ranks that differ, under one layout."""

    evidence: Evidence
    layout: Layout
    pairs: list[PiecePair]

    def is_explained(self, guess: Callable[[PiecePair], Tensor]) -> bool:
        """Return whether a guess gives the values: within the allowance, and much nearer than the reference's are."""
        left = math.hypot(*(norm_of(each.value - guess(each)) for each in self.pairs))
        return self.evidence.is_near(left) and left <= _EXPLAINED * self.difference()

    def difference(self) -> float:
        """Return the norm of all differences."""
        return math.hypot(*(norm_of(each.value - each.wanted) for each in self.pairs))


def is_related(evidence: Evidence) -> str | None:
    """The values that are wrong have a simple relation to those of the reference."""
    if evidence.verdict.key.phase not in (INPUT, FORWARD, BACKWARD, GRADIENT):
        return None
    return find_relation(evidence, evidence.scale)


def find_relation(evidence: Evidence, scale: float) -> str | None:
    """Return the relation of the ranks' values, divided by a scale, to the reference's; None if none is found."""
    for pieces in _find_pieces(evidence, scale):
        for relate in _RELATIONS:
            if (found := relate(pieces)) is not None:
                alone = len(pieces.pairs) < len(evidence.held.values)
                where = f"on {evidence.rank_names(each.place for each in pieces.pairs)} alone, " if alone else ""
                return where + found
    return None


def _find_pieces(evidence: Evidence, scale: float) -> Iterator[Pieces]:
    for fit in evidence.fits:
        if fit.layout.has_kind(SUM):
            continue
        pairs = []
        for place, value in evidence.held.values.items():
            wanted = evidence.piece_of(fit.layout, place)
            if wanted is None or wanted.shape != value.shape or not bool(value.isfinite().all()):
                break
            pairs.append(PiecePair(place, value.double() / scale, wanted.double()))
        else:
            bad = [each for each in pairs if not evidence.is_near(norm_of(each.value - each.wanted))]
            if bad:
                yield Pieces(evidence, fit.layout, bad)


# -- factors
def _is_multiple_of_all(pieces: Pieces) -> str | None:
    square = sum(norm_of(each.wanted) ** 2 for each in pieces.pairs)
    factor = sum(float((each.value * each.wanted).sum()) for each in pieces.pairs) / square if square else 0.0
    if not factor or not pieces.is_explained(lambda each: factor * each.wanted):
        return None
    return (
        f"the value is {factor:.4g} times the reference's: a factor is left out, applied twice, or another one (a "
        "scale, a temperature, a gate, 1 / sqrt of a width that is cut)"
    )


def _has_zero_rows(pieces: Pieces) -> str | None:
    zero = [_norms_of_rows(each.value) == 0 for each in pieces.pairs]
    lost = [(rows & (_norms_of_rows(each.wanted) > 0)).sum() for rows, each in zip(zero, pieces.pairs, strict=True)]
    if not any(lost) or pieces.pairs[0].value.dim() < 2:
        return None
    if not pieces.is_explained(lambda each: each.wanted * (_norms_of_rows(each.value) > 0)[..., None]):
        return None
    total = sum(rows.numel() for rows in zero)
    said = f"{int(sum(lost))} of {total} rows are zero and have numbers in the reference, and all others are right"
    places = {tuple((rows & (_norms_of_rows(each.wanted) > 0)).flatten().nonzero()[:, 0].tolist())
              for rows, each in zip(zero, pieces.pairs, strict=True)}  # fmt: skip
    if len(places) == 1 and len(pieces.pairs) > 1 and pieces.layout.has_kind(CUT) and len(*places) == 1:
        return (
            f"{said}: it is row {places.pop()[0]} of each of these ranks' pieces. An index that means a row of the "
            "whole, as padding_idx does, is taken within a piece: subtract where the piece begins"
        )
    return f"{said}: these rows are dropped or not sent (a capacity of experts that is full, a mask, padding)"


def _norms_of_rows(value: Tensor) -> Tensor:
    return value.norm(dim=-1) if value.dim() else value.abs()


def _has_factor_for_each(pieces: Pieces) -> str | None:
    """Each row, or each column, is multiplied by a factor of its own."""
    dims = pieces.pairs[0].value.dim()
    ways = [("row", (dims - 1,)), ("column", tuple(range(dims - 1))), ("row of the batch", tuple(range(1, dims)))]
    for word, along in ways if dims >= 2 else ():
        if not all(_has_enough(each.value, along) for each in pieces.pairs):
            continue
        factors = {each.place: _fit_factors(each, along) for each in pieces.pairs}
        if not pieces.is_explained(lambda each, found=factors: found[each.place] * each.wanted):  # type: ignore[misc]
            continue
        values = torch.cat([each.flatten() for each in factors.values()])
        listed = f"from {float(values.min()):.3g} to {float(values.max()):.3g}"
        known = _name_gates(pieces, factors) if word == "row" else _name_scale(pieces, factors)
        return f"each {word} is that of the reference, times a factor of its own ({listed}){known or _FACTORS[word]}"
    return None


def _has_enough(value: Tensor, along: tuple[int, ...]) -> bool:
    """Return whether so many numbers have one factor each that no others would fit by chance."""
    size = math.prod(value.shape[d] for d in along)
    return size >= _LEAST or (size > 1 and value.numel() >= _MANY)


_FACTORS = {
    "row": ": gates or weights that are applied twice or not at all, or a norm, a softmax or a mean that divides by "
    "another number for each row, as by a sum over other ranks",
    "column": ": the scale of a norm that is applied twice or not at all, or statistics of each column",
    "row of the batch": ": weights of rows, or a mean that divides by another count in each row",
}


def _fit_factors(each: PiecePair, along: tuple[int, ...]) -> Tensor:
    square = each.wanted.square().sum(along, keepdim=True)
    return torch.where(square > 0, (each.value * each.wanted).sum(along, keepdim=True) / square, 1.0)


def _name_gates(pieces: Pieces, factors: dict[Coordinate, Tensor]) -> str:
    """Return of which module's output each row's factor is an entry, or 1 / an entry."""
    evidence = pieces.evidence
    shape = evidence.whole.shape[:-1]
    for each in evidence.earlier:
        is_gate = each.shape[:-1] == shape and each.shape and each.shape[-1] <= _MOST_GATES and "float" in each.dtype
        if each.key.phase != FORWARD or each.word != RIGHT or not is_gate or each.key.turn != evidence.verdict.key.turn:
            continue
        output = evidence.about(each).whole.double()
        for gates, word in ((output, ""), (output.softmax(-1), "softmax of the ")):
            for power, how in ((1, "applied once more"), (-1, "not applied")):
                if all(_are_entries(pieces, found**power, gates, place) for place, found in factors.items()):
                    name = f"the {word}output of {each.key.name}{each.key.part}"
                    return f": it is an entry of {name}, which is {how}"
    return ""


def _are_entries(pieces: Pieces, factors: Tensor, gates: Tensor, place: Coordinate) -> bool:
    shapes = {each: tuple(value.shape) for each, value in pieces.evidence.held.values.items()}
    sizes = pieces.evidence.held.mesh.sizes
    indices = indices_of(pieces.evidence.whole.shape, shapes, sizes, pieces.layout, place)
    own = select_indices(gates, [*indices[:-1], torch.arange(gates.shape[-1])])
    return bool(((own - factors).abs().amin(-1) < 1e-3 * factors.abs().squeeze(-1)).all())


def _name_scale(pieces: Pieces, factors: dict[Coordinate, Tensor]) -> str:
    """Return which parameter of the module the factors of columns are."""
    first = next(iter(factors.values())).flatten()
    for name, value in _parameters_of(pieces.evidence):
        for power, how in ((1, "applied once more"), (-1, "not applied")):
            if value.shape == first.shape and torch.allclose(first**power, value.double(), rtol=1e-3):
                return f": it is {name}, which is {how}"
    return ""


def _parameters_of(evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of one dimension in a module, as they begin."""
    prefix = f"{evidence.verdict.key.name}." if evidence.verdict.key.name else ""
    for each in evidence.earlier:
        if each.key.phase == INITIAL and each.key.name.startswith(prefix) and len(each.shape) == 1:
            yield each.key.name, evidence.about(each).whole


def _has_line_for_each_column(pieces: Pieces) -> str | None:
    """Each column is multiplied by a factor of its own, and moved by an offset of its own."""
    dims = pieces.pairs[0].value.dim()
    if dims < 2 or any(each.value[..., 0].numel() < 2 * _LEAST for each in pieces.pairs):
        return None
    rows = tuple(range(dims - 1))
    offsets = {each.place: (each.value - each.wanted).mean(rows, keepdim=True) for each in pieces.pairs}
    if pieces.is_explained(lambda each: each.wanted + offsets[each.place]):
        return (
            "the value is that of the reference plus the same numbers in each row: a bias, a mean, or a vector of "
            "positions is another one there, or in another order"
        )
    if not pieces.is_explained(_fit_columns):
        return None
    return (
        "each column is that of the reference, times a factor and plus an offset of its own: a norm with other "
        "statistics of its columns, or with its weight and bias left out or applied again"
    )


def _fit_columns(each: PiecePair) -> Tensor:
    """Return the wanted piece, each column with the factor and the offset that bring it nearest to the value."""
    rows = tuple(range(each.value.dim() - 1))
    means = [tensor.mean(rows, keepdim=True) for tensor in (each.value, each.wanted)]
    value, wanted = (tensor - mean for tensor, mean in zip((each.value, each.wanted), means, strict=True))
    square = wanted.square().sum(rows, keepdim=True)
    factor = torch.where(square > 0, (value * wanted).sum(rows, keepdim=True) / square, 1.0)
    return factor * wanted + means[0]


# -- numbers
def _has_other_zeros(pieces: Pieces) -> str | None:
    """Numbers that are not zero are right."""
    for one, guess in (
        ("the ranks have", lambda each: each.wanted * (each.value != 0)),
        ("the reference has", lambda each: torch.where(each.wanted == 0, each.value, each.wanted)),
    ):
        if pieces.is_explained(guess):
            count = sum(int(((each.value == 0) != (each.wanted == 0)).sum()) for each in pieces.pairs)
            total = sum(each.value.numel() for each in pieces.pairs)
            return (
                f"{count} of {total} numbers differ, where {one} zeros, and all others are right: a mask, a padding or "
                "an activation that cuts off others than in the reference"
            )
    return None


def _has_few_factors(pieces: Pieces) -> str | None:
    """Each number is multiplied by one of a few factors."""
    factors = torch.cat([(each.value / each.wanted).flatten() for each in pieces.pairs])
    factors = torch.unique((factors[factors.isfinite()] * 100).round() / 100)
    total = sum(each.value.numel() for each in pieces.pairs)
    if not 1 < len(factors) <= _MOST_FACTORS or total < _LEAST * len(factors):
        return None

    def guess(each: PiecePair) -> Tensor:
        ratio = (each.value / each.wanted).nan_to_num(1.0, 1.0, 1.0)
        nearest: Tensor = factors[(ratio[..., None] - factors).abs().argmin(-1)]
        return each.wanted * nearest

    if not pieces.is_explained(guess):
        return None
    listed = ", ".join(f"{float(each):.3g}" for each in factors)
    return (
        f"each number is that of the reference, times one of {listed}: weights of classes, of positive targets or of "
        "parts, or a mask, are others"
    )


def _is_cut_off_at(pieces: Pieces) -> str | None:
    """All numbers beyond a limit are that limit."""
    limit = max(float(each.value.abs().max()) for each in pieces.pairs if each.value.numel())
    if not pieces.is_explained(lambda each: each.wanted.clamp(-limit, limit)):
        return None
    return (
        f"all numbers beyond {limit:.4g} are cut off there, and all others are right: a clamp or a clipping by value "
        "that the reference has not, or has with another limit"
    )


def _is_shifted(pieces: Pieces) -> str | None:
    for dim in range(pieces.pairs[0].value.dim()):
        for shift in (n for n in range(-_MOST_SHIFT, _MOST_SHIFT + 1) if n):

            def guess(each: PiecePair, dim: int = dim, shift: int = shift) -> Tensor:
                size = each.value.shape[dim]
                if size < _LEAST * abs(shift):
                    return each.wanted
                moved = each.value.clone()  # what has come in at the end may be anything
                begin, length = max(shift, 0), size - abs(shift)
                moved.narrow(dim, begin, length).copy_(each.wanted.narrow(dim, max(-shift, 0), length))
                return moved

            if pieces.is_explained(guess):
                return (
                    f"the values are those of the reference, moved {'back' if shift < 0 else 'on'} by {abs(shift)} "
                    f"along dimension {dim}: look at where a piece begins, and at padding and shifts"
                )
    return None


# -- terms
def _has_other_term(pieces: Pieces) -> str | None:
    """The difference is a multiple of another tensor that is known."""
    for words, whole in _known_tensors(pieces.evidence):
        own = {each.place: _cut_like(pieces, whole, each.place) for each in pieces.pairs}
        square = sum(norm_of(each) ** 2 for each in own.values())
        dot = sum(float(((each.value - each.wanted) * own[each.place]).sum()) for each in pieces.pairs)
        factor = dot / square if square else 0.0
        if not factor or not pieces.is_explained(
            lambda each, factor=factor, own=own: each.wanted + factor * own[each.place]  # type: ignore[misc]
        ):
            continue
        return f"the value is that of the reference {_write_term(factor, words)}"
    return None


def _has_term_for_other(pieces: Pieces) -> str | None:
    """The value has one known tensor in place of another one."""
    if pieces.evidence.whole.numel() > _LARGEST_PAIRED:
        return None
    known = [
        (words, {each.place: _cut_like(pieces, whole, each.place) for each in pieces.pairs})
        for words, whole in itertools.islice(_known_tensors(pieces.evidence), _MOST_PAIRED)
    ]
    for (wanted, one), (added, two) in itertools.permutations(known, 2):
        if pieces.is_explained(lambda each, one=one, two=two: each.wanted - one[each.place] + two[each.place]):  # type: ignore[misc]
            return f"the value has {added} where the reference has {wanted}"
    return None


def _write_term(factor: float, words: str) -> str:
    times = round(factor)
    if abs(factor - times) > 1e-2 or not times:
        return f"{'plus' if factor > 0 else 'minus'} {abs(factor):.3g} times {words}: it is scaled otherwise"
    if times == -1:
        return f"without {words}: it is not added, or added to another value"
    if times < 0:
        return f"minus {-times} times {words}"
    return (
        f"plus {f'{times} times ' if times > 1 else ''}{words}: it is added {times + 1} times (as on each rank, before "
        "a sum over the ranks), or is no part of the value"
    )


def _cut_like(pieces: Pieces, whole: Tensor, place: Coordinate) -> Tensor:
    shapes = {each: tuple(value.shape) for each, value in pieces.evidence.held.values.items()}
    indices = indices_of(whole.shape, shapes, pieces.evidence.held.mesh.sizes, pieces.layout, place)
    return select_indices(whole, indices)


def _known_tensors(evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    """Yield what may be in a value, or be left out of it, in words and as a tensor of its shape."""
    key, whole = evidence.verdict.key, evidence.whole
    if key.phase == GRADIENT:
        start = key._replace(phase=STEP, turn=key.turn - 1) if key.turn else key._replace(phase=INITIAL)
        before = (each for each in evidence.earlier if each.key == start)
        yield from ((f"{key.name} itself, as of a decay", evidence.about(each).whole) for each in before)
    if key.phase == FORWARD and whole.dim() >= 2:
        own = [each for each in _parameters_of(evidence) if each[1].shape == whole.shape[-1:]]
        yield from ((name, value.double().expand(whole.shape)) for name, value in own)
    phases = (BACKWARD,) if key.phase == BACKWARD else (INPUT, FORWARD) if key.phase in (INPUT, FORWARD) else ()
    near = [each for each in evidence.earlier if each.key.turn == key.turn and each.key.phase in phases]
    near = [each for each in near[::-1] if _may_be_term(each, evidence)]
    near.sort(key=lambda each: each.key.name != key.name)  # stable: the module's own input comes first
    seen: set[tuple[float, float]] = set()  # a norm and a sum, by which copies are known
    for each in near[:_MOST_KNOWN]:
        value = evidence.about(each).whole.double().expand(whole.shape)
        if (mark := (norm_of(value), float(value.sum()))) in seen:
            continue
        seen.add(mark)
        what = {INPUT: "the input", FORWARD: "the output", BACKWARD: "the gradient"}[each.key.phase]
        yield f"{what} of {each.key.name or 'the model'}{each.key.part}", value


def _may_be_term(each: ValueVerdict, evidence: Evidence) -> bool:
    """Return whether a value has the shape of the wrong one, or is added to each row of it."""
    shape = tuple(evidence.whole.shape)
    is_same_call = each.call == evidence.verdict.call
    is_like = bool(each.shape) and each.shape == shape[-len(each.shape) :]
    return is_like and is_same_call and each is not evidence.verdict


# -- some ranks
def is_over_some_ranks(evidence: Evidence) -> str | None:
    """Groups of ranks agree that are no dimension of the mesh, and their values make up the reference."""
    if evidence.verdict.key.phase == LOSS or not evidence.whole.dim():
        return None
    for fit in evidence.fits:
        if any(share.kind != WHOLE for share in fit.layout.shares):
            continue
        groups = _group_equal(evidence)
        many = len(evidence.held.values)
        dims = [d for d, size in enumerate(evidence.held.mesh.sizes) if size > 1]
        if not 1 < len(groups) < many or any(evidence.agree_along(d) for d in dims):
            return None
        values = [(len(each), evidence.held.values[each[0]].double() / evidence.scale) for each in groups]
        mean = sum((size * value for size, value in values), torch.zeros(())) / many
        total = sum((value for _, value in values), torch.zeros(()))
        biases = [value for _, value in _parameters_of(evidence) if value.shape == evidence.whole.shape[-1:]]
        sums = [total, *(total - (len(groups) - 1) * bias.double() for bias in biases)]
        word = "mean" if evidence.is_near(norm_of(mean - evidence.whole)) else "sum"
        if word == "sum" and not any(evidence.is_near(norm_of(each - evidence.whole)) for each in sums):
            return None
        listed = ", ".join(f"{evidence.rank_names(each)}" for each in groups)
        return (
            f"a reduction runs over some ranks only: each of these groups has a value of its own: {listed}; the {word} "
            f"over all {'ranks' if word == 'mean' else 'groups'} is the reference. Reduce over all {many} ranks"
        )
    return None


def _group_equal(evidence: Evidence) -> list[list[Coordinate]]:
    found: list[list[Coordinate]] = []
    for place, value in evidence.held.values.items():
        same = (each for each in found if evidence.is_near(norm_of(evidence.held.values[each[0]] - value)))
        group = next(same, None)
        if group is None:
            found.append([place])
        else:
            group.append(place)
    return found


_RELATIONS: tuple[Callable[[Pieces], str | None], ...] = (
    _is_multiple_of_all, _has_zero_rows, _has_other_term, _has_factor_for_each, _has_other_zeros, _is_cut_off_at,
    _has_few_factors,
    _is_shifted, _has_line_for_each_column, _has_term_for_other,
)  # fmt: skip
