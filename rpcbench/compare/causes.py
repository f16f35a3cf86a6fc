"""Explains the first wrong value: a sentence with the cause, and what to do.

Most causes are a transformation that turns the reference's value into the ranks' values: a sum in place of a mean, the
same piece on every rank. Such a cause is named only where its transformation gives the ranks' values, within the same
allowance as a right value. Others follow from what is right and what is not: of BatchNorm, of tied weights, of an
optimizer, and the last ones of `CAUSES`, which say where to look. If none applies the sentence says what was tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rpcbench.compare import pieces, reductions, updates
from rpcbench.compare.capture import BACKWARD, FORWARD, GRADIENT, INITIAL, INPUT, LOSS, STEP
from rpcbench.compare.compare_runs import Runs
from rpcbench.compare.evidence import Evidence, dims_of_kind, first_along, rank_words
from rpcbench.compare.layouts import (
    CUT,
    SUM,
    WHOLE,
    Coordinate,
    LayoutFit,
    MeshShare,
    fit_layout,
)
from rpcbench.compare.verdicts import RIGHT, WRONG, ValueVerdict

_HALF_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

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


def explain_masks(runs: Runs, verdicts: Sequence[ValueVerdict]) -> tuple[str, str] | None:
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


def _compare_masks(runs: Runs, name: str, verdict: ValueVerdict) -> str | None:
    assert verdict.fit is not None and verdict.mesh is not None
    masks = {place: catalog.masks.get(name) for place, catalog in runs.ranks.items()}
    for d, share in enumerate(verdict.fit.layout.shares):
        along = verdict.mesh.names[d]
        whole = runs.mesh.names.index(along)
        for place, mask in masks.items():
            other = masks[first_along(place, whole)]
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
    if not verdict.places:
        return (
            "no rank has a gradient: the parameter is frozen (requires_grad), the forward pass does not use it or cuts "
            "it off (detach, no_grad, a call outside of the autograd context), or its reduction is put off to a later "
            "step (no_sync)"
        )
    return (
        f"the parameter has no gradient on {rank_words(evidence.runs.mesh.sizes, verdict.missing)}: the forward pass "
        "there does not use it"
    )


def _is_not_finite(evidence: Evidence) -> str | None:
    """The reference may have infinite numbers, as of a mask."""
    if bool(evidence.whole.isnan().any()):
        return "the reference itself has NaN here, and the ranks have other numbers there: look at the reference first"
    is_finite = bool(evidence.whole.isfinite().all())
    kinds = {place: _kind_not_finite(value, is_finite) for place, value in evidence.held.values.items()}
    bad = [place for place, kind in kinds.items() if kind]
    if not bad:
        return None
    spread = evidence.verdict.key.phase == GRADIENT and 1 < len(bad) == len(kinds)
    return (
        f"{kinds[bad[0]]} is born here, on {evidence.rank_names(bad)}: the reference has none here, and everything "
        "before it is right" + (". A reduction may have spread it from one rank" if spread else "")
    )


def _kind_not_finite(value: Tensor, is_wanted_finite: bool) -> str:
    """Return which numbers a value has that the reference has not; empty if there are none."""
    if bool(value.isnan().any()):
        return "NaN"
    return "infinity" if is_wanted_finite and not bool(value.isfinite().all()) else ""


# -- before the first forward
def _has_other_start(evidence: Evidence) -> str | None:
    if evidence.verdict.key.phase != INITIAL:
        return None
    values = list(evidence.held.values.values())
    for dim in range(evidence.whole.dim()):
        if pieces.is_permuted(evidence, dim):
            return (
                f"the ranks have the parameter's initial values in another order along dimension {dim}: the piece of "
                "another rank, or heads, channels or columns that are dealt in another order. Order the pieces by the "
                "rank's coordinate"
            )
    if (other := _start_of_other(evidence)) is not None:
        return other
    bad = _places_apart(evidence)
    starts = [each for each in (*evidence.earlier, *evidence.later) if each.key.phase == INITIAL]
    if bad and all(each.word != WRONG for each in starts):
        return (
            f"this parameter alone begins with other values on {evidence.rank_names(bad)}: it was changed or loaded "
            "there, or a broadcast has left it out"
        )
    if bad:
        return (
            f"the parameter begins with other values on {evidence.rank_names(bad)}: give all ranks the same seed, or "
            "broadcast the parameters before the first step"
        )
    if all(torch.equal(values[0], each) for each in values):
        return (
            "the parameter begins with other values than the reference's: make both models with the same seed, or load "
            "the same weights into both"
        )
    return (
        "the parameter begins with different initial values on different ranks: give all the same seed, or broadcast "
        "the parameters before the first step"
    )


def _start_of_other(evidence: Evidence) -> str | None:
    """The parameter begins with the transposed values, or with those of another one of its shape."""

    def is_start(values: Tensor) -> bool:
        sizes = evidence.held.mesh.sizes
        fits = (fit_layout(values, evidence.held.values, sizes, fit.layout) for fit in evidence.fits)
        return any(evidence.is_near(fit.error) for fit in fits if not fit.layout.has_kind(SUM))

    key, shape = evidence.verdict.key, evidence.whole.shape
    if len(shape) == 2 and shape[0] == shape[1] and is_start(evidence.whole.T):
        return "the parameter begins with the reference's values, transposed: transpose it where it is loaded or copied"
    leaf = key.name.rpartition(".")[2]
    others = [each for each in (*evidence.earlier, *evidence.later) if each.key.phase == INITIAL and each.key != key]
    for each in [each for each in others if each.key.name.endswith(leaf) and tuple(each.shape) == shape][:_MOST_STARTS]:
        if is_start(evidence.about(each).whole):
            return (
                f"the parameter begins with the values of {each.key.name}: it is loaded or copied under another name, "
                "or layers are numbered otherwise"
            )
    return None


_MOST_STARTS = 64  # parameters of a shape that are looked at


def _is_cut_short(evidence: Evidence) -> str | None:
    """The pieces do not make up the tensor."""
    if evidence.fits or evidence.held.missing or not evidence.held.values:
        return None
    whole = tuple(evidence.whole.shape)
    shapes = {tuple(value.shape) for value in evidence.held.values.values()}
    listed = " and ".join(map(str, sorted(shapes)))
    return (
        f"the shapes do not fit: the reference has {whole}, the ranks have {listed}, and no way to cut or copy gives "
        "that. Rows may be missing: a micro-batch that is left out, or rows that are dropped where a size is not "
        "divisible by the number of ranks (pad it)"
    )


# -- the loss
_BY_TOKENS = (
    "ranks with different numbers of rows or tokens must be weighted by these, so divide each rank's sum by the number "
    "of all"
)


def _is_wrong_loss(evidence: Evidence) -> str | None:
    if evidence.verdict.key.phase != LOSS or not _outputs_are_right(evidence):
        return None
    losses = {place: float(value) for place, value in evidence.held.values.items()}
    reference, mean = float(evidence.whole), sum(losses.values()) / len(losses)
    for dims in evidence.subsets_of_dims():
        if abs(abs(mean - reference) - math.log(evidence.size_of(dims))) <= 10 * evidence.verdict.allowed:
            return (
                f"the loss is off by log({evidence.size_of(dims)}), the number of ranks along "
                f"{evidence.names_of(dims)}: each rank's whole scores are taken for a piece of the vocabulary, and "
                "counted once for each rank"
            )
    if (multiple := _multiple_of(mean, reference, evidence.verdict.allowed)) is not None:
        return (
            f"the model's output is right, and the loss is {multiple} (the mean of the ranks is {mean:.6g}, the "
            f"reference's {reference:.6g}): a sum over that many micro-batches, rows or tokens stands where a mean "
            "belongs, or the other way round"
        )
    listed = ", ".join(f"{each:.6g}" for each in dict.fromkeys(losses.values()))
    said = f"the model's output is right and the loss is not: {listed} in place of {reference:.6g}"
    if len({*losses.values()}) > 1 and (weights := reductions.describe_weights(evidence)) is not None:
        return f"{said}; their mean is {mean:.6g}. A mean of means: {_BY_TOKENS}; {weights}"
    apart = evidence.dims_apart()
    if any(name not in apart and not evidence.agree_along(d) for d, name in enumerate(evidence.held.mesh.names)):
        return (
            f"{said}. Ranks with the same rows have different losses: each takes its piece of the vocabulary for the "
            "whole, in the label smoothing, the normalization, or a reduction that is left out"
        )
    if dealt := [d for d, share in enumerate(_input_shares(evidence)) if share.deal not in ("", "as they are")]:
        return (
            f"{said}. The ranks have the inputs {_input_shares(evidence)[dealt[0]]}: targets must be dealt to them in "
            "the same order"
        )
    if len({*losses.values()}) > 1:
        return (
            f"{said}; their mean is {mean:.6g}. A mean of means ({_BY_TOKENS}), or other targets than the reference's "
            "(look at their order and where they begin on a rank), or another loss function or option (label smoothing)"
        )
    return (
        f"{said}. Look at its targets and their order, its normalization, its reductions, its label smoothing, and at "
        "terms that are added to it, as that of a balanced load, where each rank takes its own tokens for all"
    )


def _multiple_of(mean: float, reference: float, allowed: float) -> str | None:
    """Return the whole number by which a loss is too large or too small, in words."""
    if not mean or not reference or mean / reference <= 0:
        return None
    larger, smaller = (mean, reference) if abs(mean) > abs(reference) else (reference, mean)
    times = round(larger / smaller)
    if times < 2 or abs(larger - times * smaller) > 10 * allowed * times:
        return None
    return f"exactly {times} times too {'large' if larger == mean else 'small'}"


def _input_shares(evidence: Evidence) -> Sequence[MeshShare]:
    for each in evidence.earlier:
        if each.key.phase == INPUT and not each.key.name and each.fit is not None:
            return each.fit.layout.shares
    return ()


def _outputs_are_right(evidence: Evidence) -> bool:
    turn = evidence.verdict.key.turn
    return not any(
        each.word == WRONG for each in evidence.earlier if each.key.phase == FORWARD and each.key.turn == turn
    )


def _has_old_gradient(evidence: Evidence) -> str | None:
    """The gradient of the step before is still in it."""
    key = evidence.verdict.key
    before = key._replace(turn=key.turn - 1)
    if key.phase != GRADIENT or before not in evidence.runs.reference.catalog.values:
        return None
    both = evidence.whole + evidence.runs.read_whole(before, None)
    fits = (fit_layout(both, evidence.held.values, evidence.held.mesh.sizes, fit.layout) for fit in evidence.fits)
    if any(evidence.is_near(fit.error) for fit in fits):
        return "the gradient of the step before is still in it: call zero_grad before each step"
    return None


def _is_put_together_wrong(evidence: Evidence) -> str | None:
    """The parts of a module that are on different ranks are right, and the module is not."""
    name = evidence.verdict.key.name
    if evidence.verdict.key.phase != FORWARD or name not in evidence.runs.partial_modules:
        return None
    parts = [each for each in evidence.earlier if each.key.phase == FORWARD and each.key.name.startswith(f"{name}.")]
    if not parts or any(each.word == WRONG for each in parts):
        return None
    return (
        "its parts on all ranks are right, and the module is not: what the parts send back is put together in another "
        "order than that in which the rows or tokens were sent, or comes from another rank"
    )


def _is_wrong_inside(evidence: Evidence) -> str | None:
    """What goes into the module is right, or is not: the fault is in it, or between it and the modules before."""
    key = evidence.verdict.key
    inputs = [
        each
        for each in evidence.earlier
        if each.key.phase == INPUT and each.key.name == key.name and each.key.turn == key.turn
    ]
    if key.phase != FORWARD or not inputs:
        return None
    if (given := _explain_wrong_rows(evidence)) is not None:
        return given
    if any(each.word == WRONG for each in inputs):
        return (
            "its input is wrong already, and the outputs of all modules before it are right: the fault lies between "
            f"them, in the forward of {_outermost_wrong(evidence) or 'the model'}"
        )
    if all(each.word == RIGHT for each in inputs):
        return (
            "its input is right and its output is not: the fault is in its own forward, or in the collective at its "
            "end (a reduce_scatter or all_gather that is left out, or over other ranks)"
        )
    return None


def _outermost_wrong(evidence: Evidence) -> str:
    """Return the path of the module in which the input of a module has become wrong: the innermost one around it whose
    own input is not wrong."""
    key = evidence.verdict.key
    inputs = [each for each in evidence.earlier if each.key.phase == INPUT and each.key.turn == key.turn]
    called = {each.key.name for each in inputs}  # a list of modules is not
    wrong = {each.key.name for each in inputs if each.word == WRONG}
    parent = key.name.rpartition(".")[0]
    while parent and (parent in wrong or parent not in called):
        parent = parent.rpartition(".")[0]
    return parent


def _explain_wrong_rows(evidence: Evidence) -> str | None:
    """The model is called with other values than the reference."""
    fed = [each for each in evidence.earlier if each.key.phase == INPUT and not each.key.name and each.word == WRONG]
    given = next((each for each in fed if each.key.turn == evidence.verdict.key.turn and each.fit is not None), None)
    if given is None or given.fit is None:
        return None
    bad = evidence.about(given)
    apart = [place for place, error in given.fit.by_rank.items() if not bad.is_near(error)]
    where = f" on {bad.rank_names(apart)}" if apart else ""
    return (
        f"what the model is called with differs from the reference's{where}: look at where a rank's rows begin and "
        "end, their order, and padding"
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


def _is_batch_norm(evidence: Evidence) -> str | None:
    if "BatchNorm" not in evidence.kind or evidence.verdict.key.phase not in (FORWARD, STEP):
        return None
    return (
        "each rank or micro-batch normalizes by the mean and the variance of its own rows, and the reference by those "
        "of the whole batch: use SyncBatchNorm, or a norm without statistics of the batch"
    )


def _is_group_norm(evidence: Evidence) -> str | None:
    names = evidence.runs.reference.catalog.modules.get(evidence.verdict.key.name)
    starts = [
        each for each in evidence.earlier if names and each.key.phase == INITIAL and each.key.name in names.parameters
    ]
    if evidence.kind != "GroupNorm" or evidence.verdict.key.phase != FORWARD:
        return None
    if not (along := set().union(*(dims_of_kind(each, CUT) for each in starts))):
        return None
    return (
        f"the channels are cut along {' and '.join(sorted(along))}, and each rank makes groups of its own: give it "
        "whole ones, and divide num_groups by the number of ranks"
    )


def _is_layer_norm(evidence: Evidence) -> str | None:
    key, kind = evidence.verdict.key, evidence.kind
    inputs = [each for each in evidence.earlier if each.key == key._replace(phase=INPUT, part=each.key.part)]
    cut = [each for each in inputs if each.word == RIGHT and each.fit is not None and each.fit.layout.has_kind(CUT)]
    if key.phase != FORWARD or not kind.endswith(("LayerNorm", "RMSNorm")) or not cut or cut[0].fit is None:
        return None
    if all(share.dim != len(cut[0].shape) - 1 for share in cut[0].fit.layout.shares):
        return None
    return (
        "each rank has a piece of every row, and the row is not normalized as a whole: add up what its mean and its "
        "variance are made of over the ranks, in forward and in backward"
    )


def _is_behind_backward(evidence: Evidence) -> str | None:
    """The gradients of the outputs are right, and that of a parameter is not."""
    turn = evidence.verdict.key.turn
    flows = [each for each in evidence.earlier if each.key.phase == BACKWARD and each.key.turn == turn]
    if evidence.verdict.key.phase != GRADIENT or not flows or any(each.word == WRONG for each in flows):
        return None
    said = "the gradients of all modules' outputs are right, and this parameter's is not: the fault lies behind them"
    if reductions.most_calls(evidence) > 1:
        return (
            f"{said}, in the accumulation. A gradient is zeroed, reduced or clipped between micro-batches, or one of "
            "them is left out: reduce the sum of all, once"
        )
    return f"{said}, in a hook, a clipping, or the reduction over the ranks, or in the order of these"


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
        if (
            evidence.verdict.key.phase != STEP
            and share < 4 * torch.finfo(torch.bfloat16).eps
            and _is_spread(evidence, nearest)
        ):
            return (
                f"the values are right to {share:.0e}, all of them a little off: a part of the computation has fewer "
                "digits than meant (bfloat16 or float16 in a reduction, or TF32), or an option or a weight is a little "
                "another one (an eps, a step that its weights have not made)"
            )
    return None


def _is_spread(evidence: Evidence, fit: LayoutFit) -> bool:
    """Return whether the difference is spread over the values like round-off: on all ranks, and over many numbers."""
    return all(error > evidence.verdict.allowed / 10 for error in fit.by_rank.values())


CAUSES: tuple[Cause, ...] = (
    _is_missing,
    _is_not_finite,
    _is_cut_short,
    updates.is_stepped_more,
    updates.is_not_stepped,
    _has_other_start,
    pieces.has_same_rows,
    pieces.is_reordered,
    _is_batch_norm,
    updates.is_running_statistic,
    _has_old_gradient,
    reductions.is_scaled,
    reductions.is_tied,
    reductions.is_in_summands,
    reductions.has_bias_apart,
    reductions.is_over_other_group,
    _is_wrong_loss,
    pieces.is_same_piece,
    pieces.is_at_border,
    pieces.has_wrong_entry,
    pieces.is_mask_of_piece,
    reductions.is_normalized_alone,
    reductions.is_cut_twice,
    reductions.is_other_expert,
    pieces.has_other_order,
    reductions.is_clipped,
    _has_lower_precision,
    _is_one_rank,
    updates.has_drifted,
    updates.has_other_length,
    updates.has_other_decay,
    updates.is_other_update,
    updates.is_not_optimized,
    reductions.is_half_reduced,
    reductions.is_cut_off,
    pieces.is_fused_block,
    _is_group_norm,
    _is_layer_norm,
    _is_put_together_wrong,
    _is_wrong_inside,
    _is_behind_backward,
)
