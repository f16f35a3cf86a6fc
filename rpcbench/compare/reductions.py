"""Causes that lie in a reduction: left out, doubled, over another group, of a wrong kind, or without a backward.

Each function takes the evidence, and returns a sentence, or None where its transformation does not give the ranks'
values.
"""

from __future__ import annotations

import math
import re

from torch import Tensor

from rpcbench.compare.capture import BACKWARD, FORWARD, GRADIENT, INITIAL, INPUT, STEP, Key
from rpcbench.compare.evidence import Evidence, dims_of_kind, rank_words
from rpcbench.compare.layouts import (
    CUT,
    SUM,
    WHOLE,
    Coordinate,
    Layout,
    LayoutFit,
    fit_layout,
    norm_of,
)  # fmt: skip
from rpcbench.compare.verdicts import RIGHT, WRONG, ValueVerdict, as_numbers

_OVER_CHANNELS = ("Conv", "BatchNorm", "SyncBatchNorm", "GroupNorm", "InstanceNorm")  # these are dimension 1

_LAST_GRADIENTS = 3  # that are asked for the weights of the ranks' losses
_EXACT = 1e-4  # of these
_ONE_FACTOR = 1e-2  # by which factors that are taken for one may differ
_LARGEST_SUM = 256  # of weights as whole numbers


def is_in_summands(evidence: Evidence) -> str | None:
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
                f"its own summand. Reduce it over {along}, and wait for that"
            )
        if evidence.is_scaled_by(fit, float(size)):
            return (
                f"a reduction is left out: the mean of the ranks' values along {along} is the reference, and each rank "
                f"has its own value. Average it over {along}"
            )
    return None


def is_scaled(evidence: Evidence) -> str | None:
    """The value is too large or too small by a number of ranks, or of micro-batches."""
    counts: dict[int, list[str]] = {}
    for dims in evidence.subsets_of_dims():
        counts.setdefault(evidence.size_of(dims), []).append(f"of ranks along {evidence.names_of(dims)}")
    if (calls := most_calls(evidence)) > 1:
        counts.setdefault(calls, []).append("of micro-batches")
    for name, size in zip(*evidence.runs.mesh, strict=True):  # also where the value is not: an expert is on some ranks
        if (word := f"of ranks along {name}") not in counts.setdefault(size, []):
            counts[size].append(word)
    counts.pop(1, None)
    tie = _write_tie(evidence)
    for fit in evidence.fits:
        for count, words in counts.items() if not fit.layout.has_kind(SUM) else ():
            number = f"the number {' and '.join(words)}"
            if evidence.is_scaled_by(fit, float(count)):
                return (
                    f"the value is {count} times too large, {number}: a sum stands where a mean belongs, or it is "
                    f"reduced twice{tie}"
                )
            if evidence.is_scaled_by(fit, 1 / count):
                return (
                    f"the value is {count} times too small, {number}: a mean stands where a sum belongs, or it is "
                    f"divided once too often{tie}"
                )
    return None


def _write_tie(evidence: Evidence) -> str:
    """Return what follows from a parameter's other names; empty if it has none, or the value is no gradient."""
    group = _find_tie(evidence)
    if not group or evidence.verdict.key.phase != GRADIENT:
        return ""
    return f". {' and '.join(group)} are one parameter, whose gradient is the sum of what all its uses give"


def most_calls(evidence: Evidence) -> int:
    """Return how often a rank calls a module in a step, at most: the number of micro-batches."""
    keys = [each.key for each in evidence.earlier if each.key.phase == FORWARD]
    return max((len(c.values.get(key, {})) for key in keys for c in evidence.runs.ranks.values()), default=1)


def is_over_other_group(evidence: Evidence) -> str | None:
    """The ranks agree along dimensions of the mesh where they should have different values."""
    sizes, names = evidence.held.mesh.sizes, evidence.held.mesh.names
    apart = [d for d, name in enumerate(names) if name in evidence.dims_apart() and sizes[d] > 1]
    others = [d for d, size in enumerate(sizes) if d not in apart and size > 1]
    if not apart or not others or not all(evidence.agree_along(d) for d in apart):
        return None
    along = evidence.names_of(apart)
    if all(evidence.agree_along(d) for d in others):
        return (
            f"a collective runs over the wrong group: all ranks have the same value here, also along {along}, where "
            f"they have different pieces. Reduce over {evidence.names_of(others)} alone"
        )
    return (
        f"a collective runs over the wrong group: ranks along {along} agree here, where they have different pieces, "
        f"and ranks along {evidence.names_of(others)} do not. Reduce over {evidence.names_of(others)}"
    )


def _forward_of(evidence: Evidence) -> ValueVerdict | None:
    """Return the verdict on the output whose gradient is wrong."""
    key = evidence.verdict.key._replace(phase=FORWARD)
    return next((each for each in evidence.earlier if each.key == key and each.fit is not None), None)


def is_cut_twice(evidence: Evidence) -> str | None:
    """A weight is cut along the dimension of the mesh where the ranks have different rows, and is not gathered."""
    key = evidence.verdict.key
    facts = evidence.runs.reference.catalog.modules.get(key.name)
    if key.phase != FORWARD or facts is None:
        return None
    inputs = [each for each in evidence.earlier if each.key.phase == INPUT and each.key.name == key.name]
    channels = 1 if facts.kind.startswith(_OVER_CHANNELS) else -1
    apart = set().union(*(_dims_of_rows(each, channels) for each in inputs if each.word == RIGHT))
    for each in evidence.earlier:
        is_own = each.key.phase == INITIAL and each.key.name in facts.parameters
        if is_own and (both := apart & dims_of_kind(each, CUT)):
            along = " and ".join(sorted(both))
            return (
                f"{each.key.name} is cut along {along}, where the ranks have different rows, so no rank has all of its "
                f"own result: the module is made parallel over the wrong dimension of the mesh or the wrong group"
            )
    return None


def _dims_of_rows(verdict: ValueVerdict, channels: int) -> set[str]:
    """Return the names of the mesh dimensions along which the ranks have different rows of an input: other dimensions
    than that of the channels."""
    if verdict.fit is None or verdict.mesh is None:
        return set()
    shares = zip(verdict.mesh.names, verdict.fit.layout.shares, strict=True)
    return {name for name, share in shares if share.kind == CUT and share.dim != channels % len(verdict.shape)}


def is_normalized_alone(evidence: Evidence) -> str | None:
    """Each row of a rank's piece is the reference's, times a factor of its own: that of the piece's own norm or sum."""
    last = evidence.whole.dim() - 1
    if evidence.verdict.key.phase != FORWARD or last < 1:
        return None
    for fit in evidence.fits:
        cuts = [d for d, share in enumerate(fit.layout.shares) if share.kind == CUT and share.dim == last]
        pieces = {place: evidence.piece_of(fit.layout, place) for place in evidence.held.values}
        if not cuts or fit.layout.has_kind(SUM) or not all(
            piece is not None and _has_factor_in_each_row(evidence, piece, evidence.held.values[place])
            for place, piece in pieces.items()
        ):  # fmt: skip
            continue
        along = evidence.names_of(cuts)
        return (
            f"each row is right but for a factor, and each rank has another one: a norm or a softmax takes a rank's "
            f"piece of the row for the whole. Add up what it divides by over {along}"
        )
    return None


def _has_factor_in_each_row(evidence: Evidence, piece: Tensor, value: Tensor) -> bool:
    if piece.shape != value.shape or piece.shape[-1] < 2:
        return False
    piece, value = piece.double(), value.double()
    factor = (piece * value).sum(-1, keepdim=True) / piece.square().sum(-1, keepdim=True)
    return bool((factor > 0).all()) and evidence.is_near(norm_of(value / factor - piece))


def is_other_expert(evidence: Evidence) -> str | None:
    """Ranks have the same gradient for parameters that are different ones."""
    key, places = evidence.verdict.key, evidence.verdict.places
    if key.phase not in (GRADIENT, BACKWARD) or len(places) == len(evidence.runs.ranks) or not places:
        return None
    own = evidence.held.values[min(evidence.held.values)]
    pattern = re.sub(r"\d+", "#", key.name)
    for place, catalog in evidence.runs.ranks.items():
        for other in catalog.values if place not in places else ():
            if other._replace(name=key.name) == key and re.sub(r"\d+", "#", other.name) == pattern:
                value = as_numbers(evidence.runs.read_value(place, next(iter(catalog.values[other].values()))))
                if value.shape == own.shape and evidence.is_near(norm_of(value - own)):
                    return (
                        f"{other.name}, another parameter on another rank, has the same gradient: it is reduced over a "
                        "group whose ranks hold different parameters, as experts are. Leave it out of that reduction"
                    )
    return None


def is_half_reduced(evidence: Evidence) -> str | None:
    """Ranks that have a value whole have different gradients of it."""
    forward = _forward_of(evidence)
    if evidence.verdict.key.phase != BACKWARD or forward is None or forward.fit is None or forward.mesh is None:
        return None
    whole = [d for d, share in enumerate(forward.fit.layout.shares) if share.kind == WHOLE]
    bad = [d for d in whole if forward.mesh == evidence.held.mesh and not evidence.agree_along(d)]
    if not bad:
        return None
    along = evidence.names_of(bad)
    return (
        f"ranks along {along} have this value whole, and different gradients of it: a reduction over {along} is left "
        "out in backward, for one of the ways on which the value goes on"
    )


def is_computed_again_otherwise(evidence: Evidence) -> str | None:
    """A module's forward is run again in the backward pass, and has other values then."""
    key, runs = evidence.verdict.key, evidence.runs
    if key.phase not in (BACKWARD, GRADIENT):
        return None
    own = {place: {*catalog.changed_again.items()} for place, catalog in runs.ranks.items()}
    own = {place: found - {*runs.reference.catalog.changed_again.items()} for place, found in own.items()}
    found = next((each for each in own.values() if each), None)
    if found is None:
        return None
    (_, name), word = min(found)
    where = rank_words(runs.mesh.sizes, [place for place, each in own.items() if each])
    return (
        f"the forward is run again in the backward pass (an activation checkpoint), and the {word} of {name} is "
        f"another one then, on {where}: random numbers must be the same both times (preserve_rng_state), and so must "
        "every state that the forward reads"
    )


def is_cut_off(evidence: Evidence) -> str | None:
    """The forward pass is right, and its gradient is not."""
    forward = _forward_of(evidence)
    if evidence.verdict.key.phase != BACKWARD or forward is None or forward.word != RIGHT:
        return None
    return (
        "the forward pass is right and this gradient is not: look at the backward of the collectives behind it. A "
        "plain all_reduce or all_gather has none and cuts the gradients of the other ranks off: use a differentiable "
        "one, as of torch.distributed.nn. An autograd function may reduce its gradient too often, or not at all"
    )


def has_bias_apart(evidence: Evidence) -> str | None:
    """The values are explained once a bias of the module is taken apart from them."""
    name = evidence.verdict.key.name
    if evidence.verdict.key.phase != FORWARD or not evidence.fits:
        return None
    own = evidence.runs.reference.catalog.modules[name].parameters
    starts = [Key(0, INITIAL, each) for each in own if Key(0, INITIAL, each) in evidence.runs.reference.catalog.values]
    values = {key.name: as_numbers(evidence.runs.read_whole(key, None)) for key in starts}
    is_convolution = any(value.dim() > 2 for value in values.values())
    channels = 1 if is_convolution else evidence.whole.dim() - 1
    for leaf, bias in values.items():
        if leaf.endswith("bias") and bias.shape == evidence.whole.shape[channels : channels + 1]:
            bias = bias.reshape(-1, *(1 for _ in evidence.whole.shape[channels + 1 :]))
            fits = (fit for fit in evidence.fits if not any(share.dim == channels for share in fit.layout.shares))
            if found := next(filter(None, (_explain_bias(evidence, fit, bias) for fit in fits)), None):
                return found
    return None


def _explain_bias(evidence: Evidence, fit: LayoutFit, bias: Tensor) -> str | None:
    summed = [d for d, share in enumerate(fit.layout.shares) if share.kind == SUM]
    if summed:
        along = evidence.names_of(summed)
        if evidence.is_near(_refit(evidence, fit, bias).error):
            return (
                f"a reduction is left out: the ranks' values add up to the reference along {along}, but for the bias, "
                f"which each has added. Reduce over {along}, then add the bias"
            )
        return None
    for dims in evidence.subsets_of_dims():
        size, along = evidence.size_of(dims), evidence.names_of(dims)
        if evidence.is_near(_refit(evidence, fit, bias, float(size)).error):
            return (
                f"the bias is added {size} times, as many as there are ranks along {along}: add it once, after the "
                "reduction"
            )
        apart, norm = _refit(evidence, fit, bias), norm_of(evidence.whole - bias)
        for factor, words in ((float(size), "large: a sum for a mean"), (1 / size, "small: a mean for a sum")):
            if evidence.is_near(math.hypot(apart.scaled_error, (apart.factor / factor - 1) * norm)):
                return f"but for the bias, the value is {size} times too {words} over {along}"
    return None


def _refit(evidence: Evidence, fit: LayoutFit, bias: Tensor, times: float = 1.0) -> LayoutFit:
    """LayoutFit again without the bias, which the reference has once, and each rank `times`."""
    values = {place: value - times * bias for place, value in evidence.held.values.items()}
    return fit_layout(evidence.whole - bias, values, evidence.held.mesh.sizes, fit.layout)


def is_clipped(evidence: Evidence) -> str | None:
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
        others = [each for each in (*evidence.earlier, *evidence.later) if each.key.phase == GRADIENT]
        others = [each for each in others if each.key.turn == evidence.verdict.key.turn]
        if any(each.word == RIGHT for each in others):
            return (
                f"this gradient has the right direction and another length ({listed} times the reference's), and those "
                "of other parameters are right: it is divided or multiplied by another number than these"
            )
        if (own := _describe_own_norms(evidence, others)) is not None:
            return own
        if all(each > 1.5 and _is_power_of_two(each) for each in factors.values()):
            return (
                f"the gradients have the right direction and another length ({listed} times the reference's): the "
                "scale of the loss is not taken off, or a sum over so many parts is not divided"
            )
        smaller = all(each < 1 for each in factors.values())
        what = (
            "too large, as where parameters or ranks that hold the same are counted several times"
            if smaller else "not that of the whole model, as of a rank's own shard or of some parameters"
        )  # fmt: skip
        return (
            f"the gradients have the right direction and another length ({listed} times the reference's): they are "
            f"clipped by a norm that is {what}, or before the scale of the loss is taken off, or multiplied by another "
            "number"
        )
    return None


def _is_power_of_two(factor: float) -> bool:
    return abs(factor - round(factor)) < 1e-3 * factor and math.log2(round(factor)).is_integer()


def _describe_own_norms(evidence: Evidence, others: list[ValueVerdict]) -> str | None:
    """Each rank has one factor for all of its gradients, and not all ranks have the same."""
    found: dict[Coordinate, list[float]] = {}
    for each in (evidence.verdict, *others):
        own = evidence.about(each)
        layouts = [fit.layout for fit in own.fits if not fit.layout.has_kind(SUM)]
        factors = next(filter(None, (_own_factors(own, layout) for layout in layouts)), {})
        for place, factor in factors.items():
            found.setdefault(own.held.places[place], []).append(factor)
    if any(max(many) > (1 + _ONE_FACTOR) * min(many) for many in found.values()):
        return None
    groups: dict[str, list[Coordinate]] = {}
    firsts = [own[0] for own in found.values()]
    for place, own_factors in sorted(found.items()):
        groups.setdefault(f"{own_factors[0]:.3g}", []).append(place)
    if not firsts or max(firsts) < (1 + _ONE_FACTOR) * min(firsts):
        return None
    sizes = evidence.runs.mesh.sizes
    listed = ", ".join(f"{factor} on {rank_words(sizes, places)}" for factor, places in groups.items())
    return (
        "the gradients have the right direction, and each rank has one factor for all of its own, which is another one "
        f"than that of other ranks ({listed}): they are clipped by a norm that each rank takes of its own parameters "
        "or pieces. Add up the squares of the norms over the ranks first"
    )


def _own_factors(evidence: Evidence, layout: Layout) -> dict[Coordinate, float] | None:
    found = {}
    for place, value in evidence.held.values.items():
        piece = evidence.piece_of(layout, place)
        if piece is None or piece.shape != value.shape or not (square := float((piece.double() ** 2).sum())):
            return None
        factor = float((piece.double() * value.double()).sum()) / square
        if factor <= 0 or not evidence.is_near(norm_of(value / factor - piece)):
            return None
        found[place] = factor
    return found


def describe_weights(evidence: Evidence) -> str | None:
    """Return the weights with which the ranks' losses give the reference's one, in words; None if they cannot be told.

    The gradient of what a rank's loss is made of is the reference's, divided by the rank's weight.
    """
    key = evidence.verdict.key
    backward = [each for each in evidence.later if each.key.phase == BACKWARD and each.key.turn == key.turn]
    for each in backward[:_LAST_GRADIENTS]:
        gradient = Evidence(evidence.runs, each, (), (), None)
        for fit in gradient.fits:
            if (weights := _weights_of(evidence, gradient, fit.layout)) is not None:
                listed = ", ".join(f"{word} on {gradient.rank_names(ranks)}" for word, ranks in _group(weights).items())
                return f"the gradients of {each.key.name or 'the output'} show the weights: {listed}"
    return None


def _weights_of(loss: Evidence, gradient: Evidence, layout: Layout) -> dict[Coordinate, float] | None:
    """Return the weight of each rank's piece of the batch; None unless they give the reference's loss."""
    factors = None if layout.has_kind(SUM) or not layout.has_kind(CUT) else _own_factors(gradient, layout)
    losses = {loss.held.places[place]: float(value) for place, value in loss.held.values.items()}
    if factors is None or {gradient.held.places[place] for place in factors} != {*losses}:
        return None
    weights = {place: 1 / factor for place, factor in factors.items()}
    firsts = [  # of ranks that have the same piece, one counts
        place
        for place in weights
        if all(at == 0 or share.kind == CUT for at, share in zip(place, layout.shares, strict=True))
    ]
    mean = sum(weights[place] * losses[gradient.held.places[place]] for place in firsts)
    is_mean = abs(sum(weights[place] for place in firsts) - 1) < _EXACT
    return weights if is_mean and abs(mean - float(loss.whole)) < _EXACT * abs(mean) else None


def _group(weights: dict[Coordinate, float]) -> dict[str, list[Coordinate]]:
    """Return the ranks by their weight in words: whole numbers of a small sum, as `3/8`, or a decimal fraction."""
    sums = range(1, _LARGEST_SUM)
    whole = next((n for n in sums if all(abs(each * n - round(each * n)) < _EXACT for each in weights.values())), None)
    found: dict[str, list[Coordinate]] = {}
    for place, weight in weights.items():
        word = f"{weight:.4g}" if whole is None else f"{weight * whole:.0f}/{whole}"
        found.setdefault(word, []).append(place)
    return found


def is_tied(evidence: Evidence) -> str | None:
    group = _find_tie(evidence)
    if not group or evidence.verdict.key.phase not in (GRADIENT, STEP):
        return None
    others = [each for each in evidence.later if each.key.phase == GRADIENT == evidence.verdict.key.phase]
    if any(each.word == WRONG and each.key.turn == evidence.verdict.key.turn for each in others):
        return None
    return (
        f"{' and '.join(group)} are one parameter in the reference: its gradient is the sum of what all its uses give. "
        "The ranks that hold copies must add their gradients up"
    )


def _find_tie(evidence: Evidence) -> tuple[str, ...]:
    """Return all names that the reference has for the parameter, if it has several."""
    name, tied = evidence.verdict.key.name, evidence.runs.reference.catalog.tied
    return next(((first, *others) for first, others in tied.items() if name in (first, *others)), ())
