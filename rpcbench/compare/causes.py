"""Explains the first wrong value: a sentence with the cause, and what to do.

Most causes are a transformation that turns the reference's value into the ranks' values: a sum in place of a mean, the
same piece on every rank. Such a cause is named only where its transformation gives the ranks' values, within the same
allowance as a right value. Others follow from what is right and what is not: of BatchNorm, of tied weights, of an
optimizer, and the last ones of `CAUSES`, which say where to look. If none applies the sentence says what was tried.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rpcbench.compare import (
    group_statistics,
    local_gradients,
    losses,
    module_causes,
    pieces,
    reductions,
    relations,
    updates,
)
from rpcbench.compare.capture import BACKWARD, FORWARD, GRADIENT, INITIAL, INPUT, STEP
from rpcbench.compare.evidence import Evidence, rank_words
from rpcbench.compare.layouts import (
    CUT,
    SUM,
    Coordinate,
    LayoutFit,
    fit_layout,
    norm_of,
)
from rpcbench.compare.verdicts import ABSENT, RIGHT, WRONG, ValueVerdict

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


# -- values that are not there, or not numbers
def _is_missing(evidence: Evidence) -> str | None:
    verdict = evidence.verdict
    if verdict.key.phase == BACKWARD and verdict.missing:
        return (
            f"this output has no gradient on {rank_words(evidence.runs.mesh.sizes, verdict.missing)}: the forward pass "
            "there does not use it, or cuts it off (detach, no_grad, a collective without a backward)"
        )
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
        "there does not use it. Where ranks reduce it, one that has none must take part with zeros, and get the result"
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
    if (cast := _is_cast(evidence)) is not None:
        return cast
    values = list(evidence.held.values.values())
    for dim in range(evidence.whole.dim()):
        if pieces.is_permuted(evidence, dim):
            return (
                f"the ranks have the parameter's initial values in another order along dimension {dim}: the piece of "
                "another rank, or heads, channels or columns that are dealt in another order. Order the pieces by the "
                "rank's coordinate"
            )
    if (other := _start_of_other(evidence) or _start_of_piece(evidence)) is not None:
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


def _is_cast(evidence: Evidence) -> str | None:
    """The parameter is the reference's, in another type."""
    verdict, (held, *others) = evidence.verdict, sorted(evidence.types)
    if others or verdict.dtype == held or not (dtype := getattr(torch, held)).is_floating_point:
        return None
    if not any(fit.error <= 2 * torch.finfo(dtype).eps * verdict.norm for fit in evidence.fits):
        return None
    return (
        f"the ranks have their parameters in {held}, and the reference in {verdict.dtype}: make both models in one "
        "type, or cast for computation alone (autocast, a mixed-precision policy)"
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


def _start_of_piece(evidence: Evidence) -> str | None:
    """The pieces begin with those of other ranks, with the reference's times a factor, or with the same numbers."""
    if (found := pieces.has_piece_of_other(evidence)) is not None:
        return (
            f"of the parameter's initial values, {found}: a broadcast runs over ranks with different pieces, or a rank "
            "takes its piece by another coordinate, or each draws its own piece with one seed"
        )
    for fit in evidence.fits:
        if not fit.layout.has_kind(SUM) and fit.factor and evidence.is_scaled_by(fit, fit.factor):
            return (
                f"the initial values are {fit.factor:.4g} times the reference's: they are scaled by another number, as "
                "by the width of a rank's piece in place of the whole one (fan-in, fan-out), or twice"
            )
    for layout in (fit.layout for fit in evidence.fits if fit.layout.has_kind(CUT)):
        cut = [d for d, share in enumerate(layout.shares) if share.kind == CUT]
        is_drawn = all(float(value.std()) > 0 for value in evidence.held.values.values() if value.numel() > 1)
        if is_drawn and all(evidence.agree_along(d) for d in cut):
            return (
                f"ranks along {evidence.names_of(cut)} begin with the same numbers in different pieces of the "
                "parameter: each draws its own piece, with one seed. Draw the whole parameter and cut it, or broadcast "
                "it from one rank and cut it there"
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
    if evidence.verdict.key.phase != INITIAL and (count := _count_known_rows(evidence)):
        return (
            f"rows are left out: the ranks have {count} of the {len(evidence.whole)} rows of the reference, and these "
            "are right. A capacity of experts is full, a micro-batch is left out, or rows are dropped where a size is "
            "not divisible by the number of ranks (pad it)"
        )
    return (
        f"the shapes do not fit: the reference has {whole}, the ranks have {listed}, and no way to cut or copy gives "
        "that. Rows may be missing: a micro-batch that is left out, or rows that are dropped where a size is not "
        "divisible by the number of ranks (pad it)"
    )


def _count_known_rows(evidence: Evidence) -> int:
    """Return how many rows of the reference the ranks have, together; 0 if some of theirs are no rows of it."""
    whole, found = evidence.whole, set[int]()
    for value in evidence.held.values.values():
        if value.shape[1:] != whole.shape[1:] or value.dim() < 2:
            return 0
        distances = torch.cdist(value.flatten(1).double(), whole.flatten(1).double())
        if len(value) and not evidence.is_near(norm_of(distances.amin(1))):
            return 0
        found |= set(distances.argmin(1).tolist()) if len(value) else set()
    return len(found) if len(found) < len(whole) else 0


# -- the values around the difference
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


def _is_detached(evidence: Evidence) -> str | None:
    """An output that has a gradient in the reference has none on the ranks."""
    key = evidence.verdict.key
    if key.phase not in (BACKWARD, GRADIENT):
        return None
    right = {each.key for each in evidence.earlier if each.key.phase == FORWARD and each.word == RIGHT}
    flows = [each for each in evidence.earlier if each.key.phase == BACKWARD and each.key.turn == key.turn]
    lost = [each for each in flows if each.word == ABSENT and each.key._replace(phase=FORWARD) in right]
    lost = [each for each in lost if each.key.name not in evidence.runs.partial_modules and not each.places]
    if not lost:
        return None
    return (
        f"the output of {lost[0].key.name or 'the model'} is right, and has no gradient on any rank, as it has in the "
        "reference: it is cut off from the backward pass (detach, no_grad, a collective without a backward)"
    )


def _is_put_together_wrong(evidence: Evidence) -> str | None:
    """The parts of a module that are on different ranks are right, and the module is not."""
    name = evidence.verdict.key.name
    if evidence.verdict.key.phase != FORWARD or name not in evidence.runs.partial_modules:
        return None
    parts = [each for each in evidence.earlier if each.key.phase == FORWARD and each.key.name.startswith(f"{name}.")]
    if not parts or any(each.word == WRONG for each in parts):
        return None
    return (
        "its parts on all ranks are right, and the module is not: what the parts send back is put together otherwise. "
        "Look at the order of rows or tokens, at the rank that they come from, at gates, and at the reduction"
    )


def _is_wrong_inside(evidence: Evidence) -> str | None:
    """The module's input is right, or is not: the fault is in it, or between it and the modules before."""
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
    if wrong := [each for each in inputs if each.word == WRONG]:
        relation = relations.is_related(evidence.about(wrong[0]))
        return (
            "its input is wrong already, and the outputs of all modules before it are right: the fault lies between "
            f"them, in the forward of {_outermost_wrong(evidence) or 'the model'}"
            + (f". Of the input, {relation}" if relation else "")
        )
    if not all(each.word == RIGHT for each in inputs):
        return None
    where = _write_slice(evidence)
    if (types := _write_cast_inputs(evidence, inputs)) is not None:
        return types
    return (
        f"its input is right and its output is not{where}: the fault is in its own forward, or in the collective at "
        "its end (a reduce_scatter or all_gather that is left out, or over other ranks)"
    )


def _write_slice(evidence: Evidence) -> str:
    """Return where the wrong ranks are, if these are the ones with one place along a dimension of the mesh."""
    fit = evidence.verdict.fit
    if fit is None or fit.layout.has_kind(SUM):
        return ""
    bad = {place for place, error in fit.by_rank.items() if not evidence.is_near(error)}
    for d, name in enumerate(evidence.held.mesh.names):
        along = {place[d] for place in bad}
        if len(along) == 1 and bad == {place for place in fit.by_rank if place[d] in along} != {*fit.by_rank}:
            return f" on {evidence.rank_names(bad)}, which are those with place {along.pop()} along {name}"
    return ""


def _write_cast_inputs(evidence: Evidence, inputs: list[ValueVerdict]) -> str | None:
    """The module's input has fewer digits than in the reference, and its output has as many."""
    for each in inputs if not evidence.types & _HALF_TYPES.keys() else ():
        given = evidence.about(each)
        coarse = given.types & _HALF_TYPES.keys()
        if coarse and each.dtype not in _HALF_TYPES and each.error > 0:
            return (
                f"its input {each.key.part} is in {' and '.join(sorted(coarse))} on the ranks and in {each.dtype} in "
                "the reference, and is rounded there: numbers that need more digits, as positions, times and counts, "
                "must not be cast"
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
    module_causes.has_other_option,
    module_causes.is_batch_norm,
    updates.is_running_statistic,
    _has_old_gradient,
    reductions.is_scaled,
    reductions.is_tied,
    relations.is_over_some_ranks,
    reductions.is_in_summands,
    reductions.has_bias_apart,
    reductions.is_over_other_group,
    losses.is_wrong_loss,
    group_statistics.is_normalized_by_own_rows,
    group_statistics.is_mean_of_means,
    pieces.is_same_piece,
    pieces.is_at_border,
    pieces.has_wrong_entry,
    pieces.is_mask_of_piece,
    group_statistics.has_same_noise,
    reductions.is_normalized_alone,
    reductions.is_cut_twice,
    reductions.is_other_expert,
    pieces.has_other_order,
    reductions.is_computed_again_otherwise,
    reductions.is_clipped,
    local_gradients.is_made_of_other_ranks,
    relations.is_related,
    _has_lower_precision,
    _is_one_rank,
    updates.has_drifted,
    updates.has_other_length,
    updates.has_other_decay,
    updates.has_other_gradient,
    updates.has_factor_for_each_range,
    updates.has_lost_state,
    updates.is_other_update,
    updates.is_not_optimized,
    _is_detached,
    reductions.is_half_reduced,
    reductions.is_cut_off,
    pieces.is_fused_block,
    module_causes.is_group_norm,
    module_causes.is_layer_norm,
    _is_put_together_wrong,
    _is_wrong_inside,
    _is_behind_backward,
)
