"""Causes that lie in statistics of a rank's own numbers: a norm over its own rows, a variance that leaves the other
ranks' means out, a mean of means, and random numbers that are the same on all ranks.

Guarantees
- A sentence is returned only if the ranks' own inputs, which are right, give the wrong values that way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rpcbench.compare.capture import FORWARD
from rpcbench.compare.evidence import Evidence
from rpcbench.compare.layouts import CUT, SUM, Coordinate, norm_of
from rpcbench.compare.verdicts import RIGHT

_LARGEST = 1 << 22  # numbers of an input that is tried
_LEAST = 3  # numbers of a channel on a rank
_CLOSE = 1e-2  # of a deviation, by which an epsilon may move it
_LEAST_SIGNS = 16  # of noise that are equal by chance once in 2 ** 16


class CutInput(NamedTuple):
    """A right input of the module, of which each rank has a piece."""

    words: str
    whole: Tensor
    pieces: dict[Coordinate, Tensor]  # as the ranks have them
    dims: set[int]  # along which it is cut


def _find_cut_inputs(evidence: Evidence) -> Iterator[CutInput]:
    """Yield the inputs of the module that are right and cut; none if the value that is wrong is no output."""
    for each in evidence.inputs() if evidence.verdict.key.phase == FORWARD else ():
        if math.prod(each.shape) > _LARGEST:
            continue
        if each.word != RIGHT or each.fit is None or each.fit.layout.has_kind(SUM) or each.mesh != evidence.held.mesh:
            continue
        dims = {share.dim for share in each.fit.layout.shares if share.kind == CUT}
        given = evidence.about(each)
        if dims and given.held.values.keys() == evidence.held.values.keys():
            pieces = {place: value.double() for place, value in given.held.values.items()}
            yield CutInput(each.key.part, given.whole.double(), pieces, dims)


# -- norms
def is_normalized_by_own_rows(evidence: Evidence) -> str | None:
    """Each channel of a rank is a line of its input, with the mean and the deviation of the reference's whole one."""
    for given in _find_cut_inputs(evidence):
        for channels in {1, given.whole.dim() - 1} - {0} - given.dims if given.whole.dim() > 1 else ():
            if given.whole.shape != evidence.whole.shape or not _are_lines(evidence, given, channels):
                continue
            if all(_has_statistics(evidence, value, channels) for value in evidence.held.values.values()):
                return (
                    "each rank normalizes by the mean and the variance of its own part of the values, and the "
                    "reference by those of the whole: its outputs have the reference's mean and deviation on each rank "
                    "by itself. Add up the sums and the squares over the ranks, as SyncBatchNorm does"
                )
            if _leaves_means_out(evidence, given, channels):
                return (
                    "the values are divided by the mean of the ranks' own variances: the differences between the "
                    "ranks' means are left out. Take the deviations from the mean of all ranks, or add the variance of "
                    "the means"
                )
    return None


def _by_channel(value: Tensor, channels: int) -> Tensor:
    """Return a matrix with the numbers of each channel in a row."""
    return value.double().movedim(channels, 0).flatten(1)


def _are_lines(evidence: Evidence, given: CutInput, channels: int) -> bool:
    """Return whether each channel of a rank's output is a factor and an offset to its input."""
    left = 0.0
    for place, value in evidence.held.values.items():
        own, wanted = (_by_channel(each, channels) for each in (value, given.pieces[place]))
        if own.shape != wanted.shape or own.shape[1] < _LEAST:
            return False
        x, y = (each - each.mean(1, keepdim=True) for each in (wanted, own))
        factor = (x * y).sum(1, keepdim=True) / x.square().sum(1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        left = max(left, norm_of(y - factor * x))
    return evidence.is_near(left)


def _has_statistics(evidence: Evidence, value: Tensor, channels: int) -> bool:
    """Return whether a rank's channels have the mean and the deviation of those of the reference."""
    own, whole = (_by_channel(each, channels) for each in (value, evidence.whole))
    deviation = whole.std(1, correction=0)
    is_same = (own.std(1, correction=0) - deviation).abs() <= _CLOSE * deviation
    return bool((is_same & ((own.mean(1) - whole.mean(1)).abs() <= _CLOSE * deviation)).all())


def _leaves_means_out(evidence: Evidence, given: CutInput, channels: int) -> bool:
    variance = torch.stack([_by_channel(each, channels).var(1, correction=0) for each in given.pieces.values()]).mean(0)
    wanted = (_by_channel(given.whole, channels).var(1, correction=0) / variance).sqrt()
    spread = _by_channel(evidence.whole, channels).std(1, correction=0)
    layouts = (fit.layout for fit in evidence.fits if not fit.layout.has_kind(SUM))
    joined = next((each for each in map(evidence.join_pieces, layouts) if each is not None), None)
    if joined is None or bool((wanted < 1 + _CLOSE).all()):
        return False
    found = _by_channel(joined, channels).std(1, correction=0) / spread
    return bool(((found - wanted).abs() <= _CLOSE * wanted).all())


# -- means
def is_mean_of_means(evidence: Evidence) -> str | None:
    """The output is the mean of an input over a dimension that is cut, and the ranks' is the mean of their means."""
    inputs = list(_find_cut_inputs(evidence))
    for given in inputs:
        for dim in given.dims:
            kept = given.whole.shape[:dim] + given.whole.shape[dim + 1 :]
            if kept != evidence.whole.shape:
                continue
            masks = [each for each in inputs if _may_be_mask(each, given, dim)]
            for mask in (None, *masks):
                if _is_mean_of_means(evidence, given, mask, dim):
                    return (
                        f"the value is a mean over dimension {dim} of the input, and the ranks have the mean of their "
                        "own means there, though they have different counts. Add up the sums and the counts over the "
                        "ranks, and divide then"
                    )
    return None


def _may_be_mask(mask: CutInput, given: CutInput, dim: int) -> bool:
    is_binary = bool(((mask.whole == 0) | (mask.whole == 1)).all())
    return is_binary and mask.whole.shape == given.whole.shape[: mask.whole.dim()] and mask.whole.dim() > dim


def _is_mean_of_means(evidence: Evidence, given: CutInput, mask: CutInput | None, dim: int) -> bool:
    if not evidence.is_near(norm_of(_mean(given.whole, mask and mask.whole, dim) - evidence.whole)):
        return False
    means = [_mean(value, mask and mask.pieces[place], dim) for place, value in given.pieces.items()]
    if any(each.shape != evidence.whole.shape for each in means):
        return False  # it is cut along others too
    wanted = torch.stack(means).mean(0)
    return all(evidence.is_near(norm_of(value - wanted)) for value in evidence.held.values.values())


def _mean(value: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    if mask is None:
        return value.mean(dim)
    mask = mask.reshape(*mask.shape, *(1 for _ in range(value.dim() - mask.dim())))
    return (value * mask).sum(dim) / mask.expand_as(value).sum(dim)


# -- random numbers
def has_same_noise(evidence: Evidence) -> str | None:
    """A term that is added to an input, or taken from it, has the same signs on all ranks, and not in the reference."""
    for given in _find_cut_inputs(evidence):
        if given.whole.shape != evidence.whole.shape or evidence.verdict.fit is None:
            continue
        wanted = {place: evidence.piece_of(evidence.verdict.fit.layout, place) for place in given.pieces}
        if any(each is None or each.shape != given.pieces[place].shape for place, each in wanted.items()):
            continue
        for signs in (_signs_added, _signs_multiplied):
            found = [signs(value, given.pieces[place]) for place, value in evidence.held.values.items()]
            right = [signs(each, given.pieces[place]) for place, each in wanted.items() if each is not None]
            if _vary_along(found[0], given.dims) and _are_same_signs(found) and not _are_same_signs(right):
                return (
                    f"what is added to the input{given.words} or taken from it has the same signs on all ranks, and "
                    "other ones in each piece of the reference: ranks with different rows draw the same random "
                    "numbers. Give each its own seed, or draw those of the whole batch and take the rank's rows"
                )
    return None


def _signs_added(value: Tensor, given: Tensor) -> Tensor:
    return (value - given).sign()


def _signs_multiplied(value: Tensor, given: Tensor) -> Tensor:
    return (value.abs() - given.abs()).sign()


def _vary_along(signs: Tensor, dims: set[int]) -> bool:
    """Return whether rows, or other pieces that are dealt to the ranks, have different signs: a bias has the same."""
    return any(bool((signs != signs.narrow(dim, 0, 1)).any()) for dim in dims)


def _are_same_signs(found: list[Tensor]) -> bool:
    """Return whether all have the same signs, of both kinds, and enough of them for this to be no chance."""
    first, *others = found
    count = first.numel() * len(others)
    is_mixed = 4 * min(int((first > 0).sum()), int((first < 0).sum())) >= first.numel() - 1
    return count >= _LEAST_SIGNS and is_mixed and all(torch.equal(first, each) for each in others)
