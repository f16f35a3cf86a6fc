"""Each rank's part of a gradient that is reduced: the gradient of its own rows, computed again.

The gradient of a linear layer's weight is made of the layer's input and its output's gradient, which every rank has
kept. So the gradient of each rank before the reduction is known, and the reduced one shows what was done with them.

Guarantees
- A sentence is returned only if the ranks' own gradients, with one weight each, give the value that the ranks have.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rpcbench.compare.capture import BACKWARD, GRADIENT, INPUT, Key
from rpcbench.compare.evidence import Evidence
from rpcbench.compare.layouts import Coordinate, norm_of
from rpcbench.compare.verdicts import as_numbers

_EXPLAINED = 1e-3  # of a gradient's norm, by which the weighted sum may differ
_SAME = 1e-2  # of the largest weight, by which two that are taken for one may differ
_LEAST = 2  # ranks
_LARGEST = 1 << 26  # numbers in the gradients of all ranks


def is_made_of_other_ranks(evidence: Evidence) -> str | None:
    """The ranks' own gradients have other weights in the reduced one than in the reference."""
    values = evidence.held.values.values()
    if evidence.verdict.key.phase != GRADIENT or any(each.shape != evidence.whole.shape for each in values):
        return None
    if evidence.held.missing or evidence.whole.numel() * len(values) > _LARGEST:
        return None
    if (own := _find_own_gradients(evidence)) is None:
        return None
    wanted = _fit_weights(evidence.whole, own)
    found = {place: _fit_weights(value, own) for place, value in evidence.held.values.items()}
    if wanted is None:
        return None
    if all(weights is None for weights in found.values()):
        return _describe_extremes(evidence, own)
    groups: dict[str, list[Coordinate]] = {}
    for place, weights in found.items():
        if weights is None or _is_multiple(weights, wanted):
            return None
        groups.setdefault(_write_weights(evidence, weights), []).append(place)
    listed = "; ".join(f"{words} on {evidence.rank_names(places)}" for words, places in groups.items())
    return (
        "the reduction is over other ranks, or gives them other weights: of the ranks' own gradients, which the input "
        f"of the layer and the gradient of its output show, it has {listed}, and the reference "
        f"{_write_weights(evidence, wanted)}. Look at its group, a clipping or a division before it, or a broadcast"
    )


def _is_multiple(weights: Tensor, wanted: Tensor) -> bool:
    """Return whether weights are those of the reference, times a factor: the mistake is no one of the reduction."""
    factor = float(weights @ wanted) / float(wanted @ wanted)
    return bool(((weights - factor * wanted).abs() < _SAME * float(weights.abs().max())).all())


def _write_weights(evidence: Evidence, weights: Tensor) -> str:
    """Return the weight of each rank's gradient, in words: `0.5 of rank 0 + 0.5 of rank 1`."""
    named = zip(weights.tolist(), evidence.held.values, strict=True)
    most = float(weights.abs().max())
    return " + ".join(
        f"{each:.2g} of {evidence.rank_names([place])}" for each, place in named if abs(each) >= _SAME * most
    )


def _find_own_gradients(evidence: Evidence) -> list[Tensor] | None:
    """Return the gradient that each rank has before a reduction; None if it is not known."""
    name, _, leaf = evidence.verdict.key.name.rpartition(".")
    facts = evidence.runs.reference.catalog.modules.get(name)
    if facts is None or facts.kind != "Linear" or len(evidence.held.values) < _LEAST:
        return None
    turn = evidence.verdict.key.turn
    found = []
    for place in evidence.held.places.values():
        given = _read_rows(evidence, place, Key(turn, INPUT, name, "[0][0]"))
        gradient = _read_rows(evidence, place, Key(turn, BACKWARD, name))
        if given is None or gradient is None or len(given) != len(gradient):
            return None
        found.append(gradient.sum(0) if leaf == "bias" else gradient.T @ given)
    return found if all(each.shape == evidence.whole.shape for each in found) else None


def _read_rows(evidence: Evidence, place: Coordinate, key: Key) -> Tensor | None:
    """Return what a rank has kept of all calls, as a matrix."""
    calls = evidence.runs.ranks[place].values.get(key)
    if not calls:
        return None
    values = [as_numbers(evidence.runs.read_value(place, calls[n])).double() for n in sorted(calls)]
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in values]) if all(v.dim() for v in values) else None


def _fit_weights(value: Tensor, own: list[Tensor]) -> Tensor | None:
    """Return the weights with which the ranks' own gradients give a value; None if none do, or they are not unique."""
    columns = torch.stack([each.flatten() for each in own], 1)
    target = value.double().flatten()
    if len(target) < 2 * len(own) or torch.linalg.matrix_rank(columns, rtol=_EXPLAINED) < len(own):
        return None
    weights = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0]
    error = norm_of(columns @ weights - target)
    return weights if error <= _EXPLAINED * norm_of(target) and math.isfinite(error) else None


def _describe_extremes(evidence: Evidence, own: list[Tensor]) -> str | None:
    """The reduction takes the largest or the smallest number of the ranks, or their product, in place of a sum."""
    stacked = torch.stack(own)
    ways = {"MAX": stacked.amax(0), "MIN": stacked.amin(0), "PRODUCT": stacked.prod(0)}
    for word, wanted in ways.items():
        limit = _EXPLAINED * norm_of(wanted)
        if all(norm_of(value.double() - wanted) <= limit for value in evidence.held.values.values()):
            return f"the reduction has the operation {word} in place of a sum or a mean of the ranks' gradients"
    return None
