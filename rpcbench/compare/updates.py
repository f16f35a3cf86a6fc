"""Causes that lie in a step: in an optimizer's options and parameters, or in a program's own changes of them.

Each function takes the evidence of a value after a step, and returns a sentence, or None. A parameter that has moved in
the right direction, or by a multiple of itself, is told apart: its move is compared with the reference's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rpcbench.compare.capture import BACKWARD, FORWARD, GRADIENT, INITIAL, STEP, Key
from rpcbench.compare.evidence import Evidence, rank_words
from rpcbench.compare.layouts import SUM, Coordinate, fit_layout, norm_of
from rpcbench.compare.verdicts import RIGHT, WRONG, as_numbers

_CLEAR = 1e-2  # of the largest number of a move: smaller ones do not show a factor
_ONE_FACTOR = 1e-2  # by which factors that are taken for one may differ
_MOST_RANGES = 6
_LOST = 1e-3  # of a gradient's norm, by which a state that has nothing else may differ from a multiple of it


class Move(NamedTuple):
    """The change of a rank's piece of a parameter in a step."""

    place: Coordinate
    own: Tensor  # added by its step
    wanted: Tensor  # added by the reference's step
    before: Tensor  # the piece before the step


def is_not_stepped(evidence: Evidence) -> str | None:
    """The parameter is as it was, on all ranks that have it."""
    verdict = evidence.verdict
    if verdict.key.phase != STEP:
        return None
    if verdict.missing:
        return (
            f"nothing has changed the parameters on {rank_words(evidence.runs.mesh.sizes, verdict.missing)}: no "
            "optimizer has stepped there, or one that was made before the parameters were replaced (as fully_shard "
            "does) and still has the old ones"
        )
    moves = list(_find_moves(evidence))
    stale = [each.place for each in moves if evidence.is_near(norm_of(each.own))]
    if not stale:
        return None
    if len(stale) < len(moves):
        return (
            f"the parameter has not moved in the step on {evidence.rank_names(stale)}, and has on the others: a rank "
            "that steps it alone must send it to the others, or an optimizer has left it out there"
        )
    return (
        f"the parameter has not moved in the step, on {evidence.rank_names(stale)}, and the "
        "reference's has: no optimizer has it there, or the one that has it does not step, or a value from before the "
        "step is copied over it (a broadcast from a rank that has not stepped it)"
    )


def is_stepped_more(evidence: Evidence) -> str | None:
    """Optimizers step more often on the ranks than in the reference, between micro-batches."""
    key, runs = evidence.verdict.key, evidence.runs
    most = max(catalog.updates.get(key.turn, 0) for catalog in runs.ranks.values())
    own = runs.reference.catalog.updates.get(key.turn, 0)
    calls = max((len(catalog.values.get(key, {})) for catalog in runs.ranks.values()), default=0)
    if not 0 < own < most or (key.phase in (FORWARD, BACKWARD) and calls < 2) or key.phase == INITIAL:
        return None
    return (
        f"the optimizer steps {most} times in a step of the ranks, and {own} in the reference's: step it after the "
        "last micro-batch only"
    )


def has_other_length(evidence: Evidence) -> str | None:
    """Each rank's parameter has moved in the reference's direction, by another length."""
    factors = []
    for each in _find_moves(evidence):
        square = norm_of(each.wanted) ** 2
        factor = float((each.own.double() * each.wanted.double()).sum()) / square if square else 0.0
        if factor <= 0 or not evidence.is_near(norm_of(each.own - factor * each.wanted)):
            return None
        factors.append(factor)
    if not factors or all(abs(each - 1) < 1e-2 for each in factors):
        return None
    listed = ", ".join(dict.fromkeys(f"{each:.3g}" for each in factors))
    said = f"the gradients are right, and the step goes in the right direction with another length ({listed} times the"
    if max(factors) < 1.01 * min(factors):
        return (
            f"{said} reference's): the optimizer has another learning rate or momentum, or the gradients are "
            "divided or multiplied once more between their reduction and the step"
        )
    return (
        f"{said} reference's): the optimizer divides by a norm, and each rank takes that of its own piece (LAMB, "
        "Adafactor, a clipping of its own). Add up the squares of the pieces over the ranks"
    )


def has_other_decay(evidence: Evidence) -> str | None:
    """The difference from the reference is a multiple of the parameter itself."""
    shares = []
    for each in _find_moves(evidence):
        off, square = each.own - each.wanted, norm_of(each.before) ** 2
        share = float((off.double() * each.before.double()).sum()) / square if square else 0.0
        if not share or not evidence.is_near(norm_of(off - share * each.before)):
            return None
        shares.append(share)
    if not shares or max(shares) - min(shares) > 0.05 * abs(shares[0]):
        return None
    word = "less" if shares[0] > 0 else "more"
    return (
        f"the parameter is decayed {word} than in the reference, by {abs(shares[0]):.2g} of itself: its group has "
        "another weight decay. Groups made by the name or the dimensions of a parameter are others for a flat shard"
    )


def has_other_gradient(evidence: Evidence) -> str | None:
    """The difference from the reference's step is a multiple of the gradient, of which nothing else is known."""
    key, runs = evidence.verdict.key, evidence.runs
    gradient = key._replace(phase=GRADIENT, part="")
    is_known = any(each.key == gradient and each.word == RIGHT for each in evidence.earlier)
    if gradient not in runs.reference.catalog.values or is_known:
        return None
    whole, shares = as_numbers(runs.read_whole(gradient, None)), []
    square = norm_of(whole) ** 2
    for each in _find_moves(evidence):
        if each.own.shape != whole.shape or not square:
            return None
        off = each.own - each.wanted
        share = float((off.double() * whole.double()).sum()) / square
        if not share or not evidence.is_near(norm_of(off - share * whole)):
            return None
        shares.append(share)
    if not shares or max(shares) - min(shares) > 0.01 * abs(shares[0]):
        return None
    rate = runs.reference.catalog.options.get((key.turn, key.name), {}).get("lr")
    times = f", as if that were {1 - shares[0] / float(rate):.4g} times as large" if rate is not None else ""
    return (
        f"the step differs from the reference's by {shares[0]:.3g} times the gradient{times}: the gradient is "
        "multiplied or divided on its way to the step (a sum over the ranks in place of a mean, or the other way round)"
    )


def has_factor_for_each_range(evidence: Evidence) -> str | None:
    """Ranges of the parameter, in the order of its numbers, have moved by different multiples of the right move."""
    lists = []
    for each in _find_moves(evidence):
        factors = _fit_ranges(each)
        if factors is None or not evidence.is_near(norm_of(each.own.flatten() - factors * each.wanted.flatten())):
            return None
        lists.append(list(dict.fromkeys(f"{factor:.3g}" for factor in factors.tolist())))
    if not lists or max(map(len, lists)) < 2:
        return None
    return (
        f"ranges of the parameter's numbers have moved in the right direction by {' and '.join(lists[0])} times the "
        "right length: it is stepped in pieces of a flat tensor, and each piece is clipped or divided by a norm of its "
        "own. Add up the squares of the norms over the ranks first"
    )


def _fit_ranges(move: Move) -> Tensor | None:
    """Return the factor of each number of a move; None if there are more than a few ranges of one factor."""
    own, wanted = move.own.flatten().double(), move.wanted.flatten().double()
    if not len(own) or not bool(wanted.any()):
        return None
    known = (wanted.abs() > _CLEAR * wanted.abs().max()).nonzero()[:, 0]
    ratios = own[known] / wanted[known]
    jumps = ((ratios[1:] / ratios[:-1] - 1).abs() > _ONE_FACTOR).nonzero()[:, 0]
    if len(jumps) >= _MOST_RANGES:
        return None
    factors, begins = torch.empty_like(own), [0, *(known[jumps + 1]).tolist(), len(own)]
    for begin, end in itertools.pairwise(begins):
        part, right = own[begin:end], wanted[begin:end]
        factors[begin:end] = (part @ right) / (right @ right)
    # Numbers between two that show a jump are too small to be told by their ratio, and may be in either range.
    for begin, end in zip(known[jumps].tolist(), known[jumps + 1].tolist(), strict=True):
        low, high = factors[begin], factors[end]
        part, right = own[begin + 1 : end], wanted[begin + 1 : end]
        is_low = (part - low * right).abs() < (part - high * right).abs()
        factors[begin + 1 : end] = torch.where(is_low, low, high)
    return factors


def has_drifted(evidence: Evidence) -> str | None:
    """Ranks that hold the same piece have different values after the step."""
    apart, names = evidence.dims_apart(), evidence.held.mesh.names
    if evidence.verdict.key.phase != STEP or all(
        evidence.agree_along(d) for d, n in enumerate(names) if n not in apart
    ):
        return None
    if evidence.verdict.key._replace(phase=GRADIENT, part="") not in evidence.runs.reference.catalog.values:
        return (
            "the replicas have drifted apart: no gradient changes this value, and each rank changes it by what its own "
            "rows show. Add up what it is made of (counts, sums, means) over the ranks first, or send one rank's value "
            "to all"
        )
    return (
        "the replicas have drifted apart: ranks that hold the same piece have different values after the step, though "
        "all gradients are right. Their optimizers have different options or states, or a buffer is never shared"
    )


def has_lost_state(evidence: Evidence) -> str | None:
    """The state of the optimizer is a multiple of this step's gradient: it has forgotten the steps before."""
    key = evidence.verdict.key
    gradient = key._replace(phase=GRADIENT, part="")
    values = (evidence.verdict, *evidence.later)
    states = [each for each in values if each.key == key._replace(part=each.key.part) and each.key.part]
    if key.phase != STEP or not key.turn or gradient not in evidence.runs.reference.catalog.values:
        return None
    wanted = as_numbers(evidence.runs.read_whole(gradient, None))
    for each in (state for state in states if state.word == WRONG and tuple(state.shape) == tuple(wanted.shape)):
        state = evidence.about(each)
        fits = (fit_layout(wanted, state.held.values, state.held.mesh.sizes, fit.layout) for fit in state.fits)
        if any(fit.scaled_error <= _LOST * norm_of(wanted) for fit in fits if not fit.layout.has_kind(SUM)):
            return (
                f"the optimizer has lost its state: {each.key.part} has this step's gradient alone, and nothing of the "
                "steps before. It is made anew in each step, or its state is not loaded"
            )
    return None


def is_other_update(evidence: Evidence) -> str | None:
    key = evidence.verdict.key
    gradient = key._replace(phase=GRADIENT, part="")
    if key.phase != STEP or not any(each.key == gradient and each.word == RIGHT for each in evidence.earlier):
        return None
    return (
        "the gradients are right and the step is not: the optimizer has other options than the reference's (learning "
        "rate, weight decay, betas), steps more than once, decays the weights a second time, has lost its state, or "
        "makes its update of a rank's piece of the gradient where it needs the whole one (Muon, Shampoo, a norm)"
    )


def is_not_optimized(evidence: Evidence) -> str | None:
    """All parameters with a gradient are right, and a value without one is not."""
    key, values = evidence.verdict.key, evidence.runs.reference.catalog.values
    if key.phase != STEP or key._replace(phase=GRADIENT) in values or key.part:
        return None
    others = [each for each in (*evidence.earlier, *evidence.later) if each.key.turn == key.turn]
    stepped = [each.word for each in others if each.key._replace(phase=GRADIENT, part="") in values]
    if WRONG in stepped or RIGHT not in stepped:
        return None
    return (
        "the parameters that the optimizer steps are right, and this value, which it does not step (an average of the "
        "weights, a buffer), is not: it is updated more or less often than once in a step, with another decay, or "
        "from other values, as those before the step"
    )


def is_running_statistic(evidence: Evidence) -> str | None:
    if evidence.verdict.key.phase != STEP or "running_" not in evidence.verdict.key.name:
        return None
    mean = evidence.verdict.key._replace(name=evidence.verdict.key.name.replace("running_var", "running_mean"))
    if mean != evidence.verdict.key and any(each.key == mean and each.word == RIGHT for each in evidence.earlier):
        return (
            "the running mean is right and the running variance is not: it is corrected by the number of a rank's own "
            "rows, n / (n - 1), in place of those of the whole batch"
        )
    return (
        "the module's output is right, and the running statistics that it keeps are not: they are those of each "
        "rank's own rows (average them over the ranks, or use SyncBatchNorm), have another momentum, or are kept more "
        "or less often than once in a step"
    )


def _find_moves(evidence: Evidence) -> Iterator[Move]:
    """Yield the moves of a parameter in the step, by rank; none if the values before it are not known, or not right."""
    key = evidence.verdict.key
    start = key._replace(phase=STEP, turn=key.turn - 1) if key.turn else Key(0, INITIAL, key.name)
    before = next((each for each in evidence.earlier if each.key == start and each.word == RIGHT), None)
    if key.phase != STEP or key.part or before is None or before.fit is None:
        return
    old = evidence.about(before)
    for place, value in evidence.held.values.items():
        now, then = evidence.piece_of(before.fit.layout, place), old.piece_of(before.fit.layout, place)
        own = old.held.values.get(place)
        if now is not None and then is not None and own is not None and now.shape == value.shape:
            yield Move(place, value - own, now - then, then)
