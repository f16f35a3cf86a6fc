"""Causes that lie in the piece of a tensor that a rank has: the same one on all ranks, one in another order, or
one that is wrong at its borders.

Each function takes the evidence, and returns a sentence, or None where the ranks' values are not so.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rpcbench.compare.capture import BACKWARD, FORWARD, INITIAL, INPUT
from rpcbench.compare.compare_runs import RECURRENT
from rpcbench.compare.evidence import Evidence, dims_of_kind, find_reordered
from rpcbench.compare.layouts import CUT, SUM, Coordinate, Layout, LayoutFit, norm_of
from rpcbench.compare.verdicts import RIGHT, WRONG


# -- the same piece on each rank
def has_same_rows(evidence: Evidence) -> str | None:
    """All ranks along a dimension have one piece of the model's input."""
    key = evidence.verdict.key
    wrong = [each for each in evidence.earlier if each.key.phase == INPUT and each.key.turn == key.turn]
    inputs = next((each for each in wrong if each.word == WRONG), None)
    if key.phase != FORWARD or inputs is None:
        return None
    given = evidence.about(inputs)
    if (found := _explain_same_piece(given)) is not None or inputs.key.name:
        return found
    others = has_piece_of_other(given)
    return others and f"of what the model is called with, {others}: take the rows by the rank's coordinate in the mesh"


def is_same_piece(evidence: Evidence) -> str | None:
    if evidence.verdict.key.phase not in (FORWARD, INPUT):
        return None
    return _explain_same_piece(evidence)


def _explain_same_piece(evidence: Evidence) -> str | None:
    for layout in _cut_layouts(evidence):
        owner = _find_owner(evidence, layout)
        if owner is None:
            continue
        cut = [d for d, share in enumerate(layout.shares) if share.kind == CUT]
        dim = layout.shares[cut[0]].dim
        along, deal = evidence.names_of(cut), layout.shares[cut[0]].deal
        is_first = not any(owner) and not deal
        others = _has_pieces_apart(evidence, {evidence.held.mesh.names[d] for d in cut})
        rank = evidence.rank_names([owner])
        if evidence.verdict.key.phase == INPUT and not evidence.verdict.key.name and dim == 0 and not others:
            rows = "the first ones of the batch" if is_first else f"those of {rank}"
            return f"all ranks along {along} work on the same rows, {rows}: take the rows by the rank's coordinate"
        piece = "the first piece" if is_first else f"the piece of {rank}"
        return (
            f"all ranks along {along} have the values of {piece} of dimension {dim}: rows, positions or "
            "masks do not move along with the piece of the batch or of the sequence that a rank has"
        )
    return None


def _find_owner(evidence: Evidence, layout: Layout) -> Coordinate | None:
    """Return the rank whose piece all ranks have; None if they have different values, or those of no piece."""
    values = list(evidence.held.values.values())
    if any(each.shape != values[0].shape or not evidence.is_near(norm_of(each - values[0])) for each in values):
        return None
    for place in evidence.held.values:
        piece = evidence.piece_of(layout, place)
        if piece is not None and piece.shape == values[0].shape and evidence.is_near(norm_of(values[0] - piece)):
            return place
    return None


def _cut_layouts(evidence: Evidence) -> Iterator[Layout]:
    for fit in evidence.fits:
        layout = fit.layout
        if layout.has_kind(CUT) and not layout.has_kind(SUM):
            yield layout


def _has_pieces_apart(evidence: Evidence, names: set[str]) -> bool:
    """Return whether another input of the model is cut along these dimensions of the mesh, and is right."""
    return any(
        each.word == RIGHT and each.key.phase == INPUT and not each.key.name and dims_of_kind(each, CUT) & names
        for each in evidence.earlier
    )


def has_piece_of_other(evidence: Evidence) -> str | None:
    """Ranks have exactly the pieces of other ranks."""
    for layout in (fit.layout for fit in evidence.fits if not fit.layout.has_kind(SUM)):
        pieces = {place: evidence.piece_of(layout, place) for place in evidence.held.values}
        owners = {place: _owner_of(evidence, place, pieces) for place in pieces}
        others = {place: owner for place, owner in owners.items() if owner not in (None, place)}
        if others and None not in owners.values():
            listed = ", ".join(
                f"{evidence.rank_names([place])} {'that' if n else 'has the piece'} of {evidence.rank_names([owner])}"
                for n, (place, owner) in enumerate(others.items())
                if owner is not None
            )
            return f"{listed} ({layout.describe(evidence.held.mesh.names)})"
    return None


def _owner_of(evidence: Evidence, place: Coordinate, pieces: dict[Coordinate, Tensor | None]) -> Coordinate | None:
    """Return the first rank whose piece a rank has: itself, if it is its own; None if it has no rank's piece."""
    value = evidence.held.values[place] / evidence.scale
    for other in (place, *pieces):
        piece = pieces[other]
        if piece is not None and piece.shape == value.shape and evidence.is_near(norm_of(value - piece)):
            return other
    return None


# -- the first piece alone, or the borders
def is_mask_of_piece(evidence: Evidence) -> str | None:
    """The rank with the first piece of the sequence is right, and the others are not."""
    if evidence.verdict.key.phase != FORWARD:
        return None
    for fit in evidence.fits:
        along = [d for d, share in enumerate(fit.layout.shares) if share.kind == CUT]
        apart = [d for d in along if evidence.held.mesh.names[d] in evidence.dims_apart()]
        if not apart or fit.layout.has_kind(SUM):
            continue
        bad = {place for place, error in fit.by_rank.items() if not evidence.is_near(error)}
        if bad and all((place in bad) == any(place[d] for d in apart) for place in fit.by_rank):
            said = f"the ranks with the first piece along {evidence.names_of(apart)} are right, and the others are not"
            return _explain_first_piece(evidence, said, apart, any(fit.layout.shares[d].dim == 0 for d in apart))
    return None


def _explain_first_piece(evidence: Evidence, said: str, apart: list[int], is_of_rows: bool) -> str | None:
    if evidence.kind in RECURRENT:
        return f"{said}: the sequence is cut, and each piece begins with an empty state in place of the last one"
    if not is_of_rows:
        return (
            f"{said}: positions or a causal mask that begin with 0 on every rank, in place of where its piece begins; "
            "or what a piece takes from those before it is put together wrong (the keys and values of a ring, the "
            "softmax over several blocks, a state)"
        )
    is_pattern = any(evidence.held.mesh.sizes[d] > 2 for d in apart)  # of two ranks, one may be as wrong
    if not is_pattern or any(each.word == WRONG for each in evidence.inputs()):
        return None
    return (
        f"{said}: what does not come with a rank's rows, as random numbers that each rank draws for its own rows with "
        "one seed, or positions or an index that begin with 0 on every rank. Draw them for the whole batch and take "
        "the rank's rows, or give each rank its own seed"
    )


def is_at_border(evidence: Evidence) -> str | None:
    """Only the rows at the borders between the ranks' pieces differ."""
    if evidence.verdict.key.phase not in (FORWARD, BACKWARD):
        return None
    for fit in evidence.fits:
        cuts = [(d, share) for d, share in enumerate(fit.layout.shares) if share.kind == CUT]
        if len(cuts) != 1 or cuts[0][1].deal or fit.layout.has_kind(SUM):
            continue
        (d, share), *_ = cuts
        bad = [_is_border_of(evidence, fit, d, share.dim, place) for place in evidence.held.values]
        if any(bad) and None not in bad:
            return (
                f"only the rows at the borders of the ranks' pieces differ, along dimension {share.dim}: what a piece "
                f"takes from its neighbours along {evidence.names_of([d])} is not theirs. Look at the halo's exchange "
                "(which side, which neighbour, and the way back of its gradient), or at a mask that is off by one there"
            )
    return None


def _is_border_of(evidence: Evidence, fit: LayoutFit, d: int, dim: int, place: Coordinate) -> bool | None:
    """Return whether a rank's rows differ at a border to another piece, at most a quarter of them; None: others do."""
    value, piece = evidence.held.values[place] / evidence.scale, evidence.piece_of(fit.layout, place)
    if piece is None or piece.shape != value.shape:
        return None
    size = piece.shape[dim]
    errors = (value - piece).movedim(dim, 0).reshape(size, -1).norm(dim=1)
    wrong = [n for n in range(size) if not evidence.is_near(float(errors[n]))]
    width = max(1, size // 4)
    first = {*range(width)} if place[d] else set()
    last = {*range(size - width, size)} if place[d] < evidence.held.mesh.sizes[d] - 1 else set()
    return None if {*wrong} - first - last or len(wrong) == size else bool(wrong)


def has_wrong_entry(evidence: Evidence) -> str | None:
    """All rows that look up some entries of a table are wrong, and all others are right."""
    key, fit = evidence.verdict.key, evidence.verdict.fit
    if evidence.kind != "Embedding" or key.phase != FORWARD or fit is None or fit.layout.has_kind(SUM):
        return None
    inputs = (each for each in evidence.earlier if (each.key.phase, each.key.name) == (INPUT, key.name))
    looked_up = next(
        (each for each in inputs if each.key.turn == key.turn and each.call == evidence.verdict.call), None
    )
    joined = evidence.join_pieces(fit.layout)
    if looked_up is None or joined is None or (entries := evidence.about(looked_up).whole).shape != joined.shape[:-1]:
        return None
    is_wrong = (joined - evidence.whole).norm(dim=-1) > evidence.verdict.allowed
    bad, good = ({*entries[each].int().tolist()} for each in (is_wrong, ~is_wrong))
    if not bad or bad & good or len(bad) > len(good):
        return None
    listed = ", ".join(map(str, sorted(bad)[:5])) + (" and others" if len(bad) > 5 else "")
    return (
        f"the rows that look up entry {listed} of the table are wrong, and all others are right: the ranks' pieces of "
        "the table overlap there, or leave it out (an index off by one where a piece begins or ends), or a rank looks "
        "up others than the reference"
    )


# -- another order
def is_reordered(evidence: Evidence) -> str | None:
    """The ranks go on with rows in another order than those of the model's input."""
    if evidence.summands is not None or (found := find_reordered(evidence.earlier, evidence.verdict)) is None:
        return None
    return (
        f"from here on the ranks have rows in another order than in the model's input ({found.layout}): what is added "
        "to them or compared with them, a residual or targets, is in the input's order. Send them back as they came"
    )


def has_other_order(evidence: Evidence) -> str | None:
    """The values, or the inputs of the module, are those of the reference in another order along a dimension."""
    key = evidence.verdict.key
    if key.phase not in (FORWARD, BACKWARD):
        return None
    inputs = [each for each in evidence.earlier if each.key.phase == INPUT and each.key.name == key.name]
    wrong = [evidence.about(each) for each in inputs if each.word == WRONG and each.key.turn == key.turn]
    for each in (evidence, *wrong):
        for dim in range(each.whole.dim()):
            if is_permuted(each, dim):
                return (
                    f"the same values in another order along dimension {dim}: rows, tokens or heads are not put where "
                    "they came from. Undo the permutation of the exchange"
                )
    return None


def is_permuted(evidence: Evidence, dim: int) -> bool:
    joined = [evidence.join_pieces(fit.layout) for fit in evidence.fits if not fit.layout.has_kind(SUM)]
    return any(
        value is not None
        and evidence.is_near(_order_free_distance(value, evidence.whole, dim))
        and not evidence.is_near(norm_of(value - evidence.whole))  # of copies, one is right
        for value in joined
    )


def _order_free_distance(one: Tensor, other: Tensor, dim: int) -> float:
    """Return the distance of two tensors, each sorted along a dimension by a random direction."""
    first, second = (each.movedim(dim, 0).reshape(each.shape[dim], -1).double() for each in (one, other))
    direction = torch.randn(first.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return norm_of(first[(first @ direction).argsort()] - second[(second @ direction).argsort()])


# -- several matrices in one
def is_fused_block(evidence: Evidence) -> str | None:
    """A weight of two or three matrices is cut as if it were one."""
    key = evidence.verdict.key
    parent = key.name.rpartition(".")[0]
    width = _input_width(evidence)
    for each in evidence.earlier:
        owner = each.key.name.rpartition(".")[0]
        is_beside = owner.rpartition(".")[0] == parent or owner == parent
        if each.key.phase != INITIAL or not is_beside or each.fit is None or len(each.shape) < 2 or not width:
            continue
        called = [other for other in evidence.earlier if (other.key.phase, other.key.name) == (FORWARD, owner)]
        if owner != parent and not any(other.key.turn == key.turn and other.word == RIGHT for other in called):
            continue
        plain = any(share.kind == CUT and share.dim == 0 and not share.deal for share in each.fit.layout.shares)
        words = {2 * width: "two matrices (gate and value)", 3 * width: "three matrices (query, key, value)"}
        if plain and each.shape[0] in words:
            return (
                f"{each.key.name} holds {words[each.shape[0]]} and is cut as one: a rank has rows of some of them "
                "only. Cut each of them, and give a rank its piece of each"
            )
    return None


def _input_width(evidence: Evidence) -> int | None:
    """Return the columns that a module reads, if they are wrong: what stands between it and a fused weight is."""
    key = evidence.verdict.key
    for each in reversed(evidence.earlier):
        if (each.key.phase, each.key.name, each.key.turn) == (INPUT, key.name, key.turn):
            return each.shape[-1] if key.phase == FORWARD and each.word == WRONG and each.shape else None
    return None
