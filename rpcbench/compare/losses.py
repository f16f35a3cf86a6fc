"""Causes that lie in the loss: its function and options, its targets, the weights of rows, terms beside it.

The gradient of the model's output says which: if it is right, the difference is in a term that does not come from the
output; if it is that of a cross entropy, its targets, weights and options can be read from it.

Each function takes the evidence, and returns a sentence, or None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rpcbench.compare import reductions, relations
from rpcbench.compare.capture import BACKWARD, FORWARD, GRADIENT, INPUT, LOSS
from rpcbench.compare.cross_entropies import CrossEntropy, read_cross_entropy
from rpcbench.compare.evidence import Evidence
from rpcbench.compare.layouts import CUT, SUM, WHOLE, MeshShare
from rpcbench.compare.verdicts import RIGHT, WRONG, ValueVerdict

_BY_TOKENS = (
    "ranks with different numbers of rows or tokens must be weighted by these, so divide each rank's sum by the number "
    "of all"
)
_MOST_OUTPUTS = 8  # of which a gradient is looked at
_MOST_NAMES = 5  # of rows, or of terms
_SAME_WEIGHT = 1e-3  # relative difference of weights


def is_wrong_loss(evidence: Evidence) -> str | None:
    """The output of the model is right, and the loss is not."""
    if evidence.verdict.key.phase != LOSS or not _outputs_are_right(evidence):
        return None
    causes = (
        _is_multiple, _is_mean_of_means, _has_other_cross_entropy, _is_scaled_with_gradient, _has_other_term,
        _counts_vocabulary, _differs_on_same_rows, _has_targets_in_order, _has_related_gradient,
    )  # fmt: skip
    said = _describe_losses(evidence)
    for cause in causes:
        if (found := cause(evidence)) is not None:
            return f"{said}. {found[0].upper()}{found[1:]}"
    if len({float(value) for value in evidence.held.values.values()}) > 1:
        return (
            f"{said}. It is a mean of means ({_BY_TOKENS}), or has other targets than the reference's (look at their "
            "order and where they begin on a rank), or another loss function or option"
        )
    return (
        f"{said}. Look at its targets and their order, at the loss function and its options, at its normalization, and "
        "at its reductions"
    )


def _describe_losses(evidence: Evidence) -> str:
    losses = [f"{float(value):.6g}" for value in evidence.held.values.values()]
    mean = f"; their mean is {_mean_of(evidence):.6g}" if len({*losses}) > 1 else ""
    return (
        f"the model's output is right and the loss is not: {', '.join(dict.fromkeys(losses))} in place of "
        f"{float(evidence.whole):.6g}{mean}"
    )


def _mean_of(evidence: Evidence) -> float:
    losses = [float(value) for value in evidence.held.values.values()]
    return sum(losses) / len(losses)


def _outputs_are_right(evidence: Evidence) -> bool:
    turn = evidence.verdict.key.turn
    return not any(
        each.word == WRONG for each in evidence.earlier if each.key.phase == FORWARD and each.key.turn == turn
    )


# -- by the numbers alone
def _is_multiple(evidence: Evidence) -> str | None:
    mean, reference, allowed = _mean_of(evidence), float(evidence.whole), evidence.verdict.allowed
    if not mean or not reference or mean / reference <= 0:
        return None
    larger, smaller = (mean, reference) if abs(mean) > abs(reference) else (reference, mean)
    times = round(larger / smaller)
    if times < 2 or abs(larger - times * smaller) > 10 * allowed * times:
        return None
    return (
        f"it is exactly {times} times too {'large' if larger == mean else 'small'}: a sum over that many ranks, "
        "micro-batches, rows or tokens stands where a mean belongs, or the other way round"
    )


def _is_mean_of_means(evidence: Evidence) -> str | None:
    losses = {float(value) for value in evidence.held.values.values()}
    if len(losses) > 1 and (weights := reductions.describe_weights(evidence)) is not None:
        return f"a mean of means: {_BY_TOKENS}; {weights}"
    return None


def _counts_vocabulary(evidence: Evidence) -> str | None:
    """The loss is off by the logarithm of a number of ranks."""
    for dims in evidence.subsets_of_dims():
        off = abs(_mean_of(evidence) - float(evidence.whole)) - math.log(evidence.size_of(dims))
        if abs(off) <= 10 * evidence.verdict.allowed:
            return (
                f"it is off by log({evidence.size_of(dims)}), the number of ranks along {evidence.names_of(dims)}: "
                "each rank's whole scores are taken for a piece of the vocabulary, and counted once for each rank"
            )
    return None


def _differs_on_same_rows(evidence: Evidence) -> str | None:
    apart = evidence.dims_apart()
    if all(name in apart or evidence.agree_along(d) for d, name in enumerate(evidence.held.mesh.names)):
        return None
    return (
        "ranks with the same rows have different losses: each takes its piece of the vocabulary for the whole, in the "
        "label smoothing, the normalization, or a reduction that is left out; or their targets or options differ"
    )


def _has_targets_in_order(evidence: Evidence) -> str | None:
    dealt = [each for each in _input_shares(evidence) if each.deal not in ("", "as they are")]
    if not dealt:
        return None
    return f"the ranks have the inputs {dealt[0]}: targets must be dealt to them in the same order"


def _input_shares(evidence: Evidence) -> Sequence[MeshShare]:
    for each in evidence.earlier:
        if each.key.phase == INPUT and not each.key.name and each.fit is not None:
            return each.fit.layout.shares
    return ()


# -- by the gradient of the model's output
def _gradients_of_outputs(evidence: Evidence) -> list[tuple[ValueVerdict, ValueVerdict]]:
    """Return the gradients of the last outputs of modules that are right, each with the verdict on the output."""
    turn = evidence.verdict.key.turn
    outputs = {each.key: each for each in evidence.earlier if each.key.phase == FORWARD and each.word == RIGHT}
    found = [each for each in evidence.later if each.key.phase == BACKWARD and each.key.turn == turn and each.fit]
    pairs = [(each, outputs.get(each.key._replace(phase=FORWARD))) for each in found if each.shape]
    return [(each, output) for each, output in pairs if output is not None][:_MOST_OUTPUTS]


def _is_scaled_with_gradient(evidence: Evidence) -> str | None:
    """The loss and the gradient of the output have one factor."""
    mean, reference = _mean_of(evidence), float(evidence.whole)
    if not reference or abs(mean - reference) < 1e-2 * abs(reference):
        return None
    for gradient, _ in _gradients_of_outputs(evidence)[:1]:
        own = evidence.about(gradient)
        for dims in [(), *evidence.subsets_of_dims()]:
            factor = mean / reference * evidence.size_of(dims)
            if any(own.is_scaled_by(fit, factor) for fit in own.fits if not fit.layout.has_kind(SUM)):
                return (
                    f"the loss and its gradient are those of the reference, times {mean / reference:.5g}: a weight of "
                    "the loss, or what it is divided by, is another one"
                )
    return None


def _has_other_term(evidence: Evidence) -> str | None:
    """The gradient of the model's output is right: the difference lies beside it."""
    gradients = _gradients_of_outputs(evidence)
    if not gradients or gradients[0][0].word != RIGHT:
        return None
    off, turn = _mean_of(evidence) - float(evidence.whole), evidence.verdict.key.turn
    later = [each for each in evidence.later if each.key.turn == turn and each.key.phase in (BACKWARD, GRADIENT)]
    wrong = next((each for each in later if each.word == WRONG and each.key.name), None)
    known = _name_terms(evidence, off)
    if wrong is None and not known:
        return (
            "the gradient of the output and all other gradients are right, so only the number that the step returns is "
            f"off, by {off:.4g}: look at what is done with the loss after its backward, as a reduction or a broadcast "
            "of one rank's, and at terms without a gradient"
        )
    said = (
        f"the gradient of the output is right, so the difference of {off:.4g} is not in the targets or in what is "
        "computed from the output: a term of the loss beside it is left out, or counted otherwise, as a penalty of the "
        "weights or a balance of experts' load"
    )
    if known or wrong is None:
        return f"{said}; {known}"
    return f"{said}. The first gradient that differs by it is that of {wrong.key.name}"


def _name_terms(evidence: Evidence, off: float) -> str:
    """Return of which single number that a module gives out the difference is a multiple, if one has a short factor."""
    turn = evidence.verdict.key.turn
    numbers = [each for each in evidence.earlier if each.key.phase == FORWARD and not each.shape]
    for each in [each for each in numbers if each.key.turn == turn and each.word == RIGHT][:_MOST_NAMES]:
        value = float(evidence.about(each).whole)
        factor = off / value if value else 0.0
        if factor and abs(float(f"{factor:.2g}") - factor) * abs(value) <= 10 * evidence.verdict.allowed:
            name = f"{each.key.name or 'the model'}{each.key.part}"
            return f"it is {factor:.2g} times {name}, which the reference has as {value:.4g}"
    return ""


def _has_other_cross_entropy(evidence: Evidence) -> str | None:
    """Both losses are cross entropies of an output, and they differ in targets, weights or options."""
    for gradient, output in _gradients_of_outputs(evidence):
        scores, own = evidence.about(output).whole, evidence.about(gradient)
        if scores.dim() < 2 or scores.shape != own.whole.shape or (held := _join_like(own, output)) is None:
            continue
        rows = [each.flatten(0, -2) for each in (scores, own.whole, held)]
        wanted, found = read_cross_entropy(rows[0], rows[1]), read_cross_entropy(rows[0], rows[2])
        if wanted is not None and found is not None:
            return _compare_cross_entropies(wanted, found)
    return None


def _join_like(gradient: Evidence, output: ValueVerdict) -> Tensor | None:
    """Return the ranks' gradients, put together as the output is; None if ranks that have it whole differ."""
    if output.fit is None or output.mesh != gradient.held.mesh or gradient.held.missing:
        return None
    shares = output.fit.layout.shares
    if output.fit.layout.has_kind(SUM) or any(
        share.kind == WHOLE and not gradient.agree_along(d) for d, share in enumerate(shares)
    ):
        return None
    return gradient.join_pieces(output.fit.layout)


def _has_related_gradient(evidence: Evidence) -> str | None:
    """The gradient of the output has a simple relation to that of the reference."""
    for gradient, output in _gradients_of_outputs(evidence)[:1]:
        own, shares = evidence.about(gradient), output.fit.layout.shares if output.fit else ()
        cuts = [d for d, share in enumerate(shares) if share.kind == CUT]  # a mean over fewer rows is steeper
        for scale in (float(own.size_of(cuts)), 1.0):
            if found := relations.find_relation(own, scale):
                return f"of its gradient by {gradient.key.name or 'the output'}, {found}"
    return None


def _compare_cross_entropies(wanted: CrossEntropy, found: CrossEntropy) -> str | None:
    """Return in which way a cross entropy differs from the reference's, in words."""
    shown = "the gradient of the scores shows a cross entropy, and"
    left_out, added = (found.targets < 0) & (wanted.targets >= 0), (found.targets >= 0) & (wanted.targets < 0)
    wanted_place, own_place = "in the reference", "on the ranks"
    for rows, there, elsewhere in ((left_out, wanted_place, own_place), (added, own_place, wanted_place)):
        if bool(rows.any()):
            return (
                f"{shown} {_list_rows(rows)} {there}, and not {elsewhere}: look at ignore_index, the padding and "
                "masks of targets"
            )
    other = found.targets != wanted.targets
    if bool(other.any()):
        row = int(other.nonzero()[0])
        return (
            f"{shown} the ranks have other targets in {int(other.sum())} of {len(other)} rows (class "
            f"{int(found.targets[row])} in place of {int(wanted.targets[row])} in row {row}): look at their order, "
            "their shift, and where a rank's begin"
        )
    for option in ("smoothing", "temperature"):
        one, two = getattr(found, option), getattr(wanted, option)
        if abs(one - two) > 1e-3:
            word = "label smoothing" if option == "smoothing" else "temperature"
            return f"{shown} the ranks have a {word} of {one:.3g}, the reference one of {two:.3g}"
    return _compare_weights(wanted, found, shown)


def _compare_weights(wanted: CrossEntropy, found: CrossEntropy, shown: str) -> str | None:
    used = wanted.targets >= 0
    ratio = (found.weights[used] / wanted.weights[used]).double()
    if bool(((ratio - 1).abs() < _SAME_WEIGHT).all()):
        return None
    classes = wanted.targets[used]
    of_class = {each: ratio[classes == each] for each in sorted(set(classes.tolist()))}
    if all(bool(((each - each[0]).abs() < _SAME_WEIGHT).all()) for each in of_class.values()):
        listed = ", ".join(f"{float(each[0]):.3g} for {number}" for number, each in of_class.items())
        return f"{shown} the ranks give the classes other weights ({listed}, as parts of the reference's)"
    return (
        f"{shown} the rows have other weights than in the reference, from {float(ratio.min()):.3g} to "
        f"{float(ratio.max()):.3g} times: look at what each row, rank or micro-batch is divided by, and at masks"
    )


def _list_rows(rows: Tensor) -> str:
    numbers = torch.nonzero(rows)[:, 0].tolist()
    words = [str(each) for each in numbers[:_MOST_NAMES]] + (["others"] if len(numbers) > _MOST_NAMES else [])
    return f"row {words[0]} counts" if len(words) == 1 else f"rows {', '.join(words[:-1])} and {words[-1]} count"
