"""Reads a cross entropy back from the gradient of its scores: targets, weights of rows, smoothing, temperature.

A loss is one number, and its gradient has one for each score: a program's targets are in it, which no module has seen.
For scores z, chances p = softmax(z / T) and K classes the gradient of row i is

    w_i / T · (p - s / K - (1 - s) · [the target])

with the row's weight w_i (0 for a row that is ignored) and the label smoothing s.

Guarantees
- A reading is returned only if this formula gives the whole gradient with it.
- Pure: tensors in, a reading out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EXACT = 1e-3  # of the gradient's norm, by which the formula may differ from it
_LEAST_CLASSES = 4  # two unknown numbers are fitted to all classes but the target
_NO_WEIGHT = 1e-6  # of the largest row's gradient


class CrossEntropy(NamedTuple):
    """A loss as the gradient of its scores (rows, classes) shows it."""

    targets: Tensor  # (rows,): the class of each row; -1 for a row without weight
    weights: Tensor  # (rows,): double, as parts of their sum
    smoothing: float
    temperature: float


def read_cross_entropy(scores: Tensor, gradient: Tensor) -> CrossEntropy | None:
    """Return the cross entropy of scores (rows, classes) that has this gradient, up to a factor; None if none has."""
    scores, gradient = scores.double(), gradient.double()
    sizes = gradient.norm(dim=-1)
    used = sizes > _NO_WEIGHT * sizes.max()
    if scores.shape[-1] < _LEAST_CLASSES or not bool(used.any()) or not bool(gradient.isfinite().all()):
        return None
    z, g = scores[used], gradient[used]
    targets = g.argmin(-1)
    others = torch.ones_like(g, dtype=torch.bool).scatter(-1, targets[:, None], False)
    own, slopes = (each[others].reshape(len(each), -1) for each in (z, g))
    for smoothing, temperature in (_fit_smoothing(z, g, others), _fit_temperature(own, slopes)):
        if (weights := _fit_weights(z, g, targets, smoothing, temperature)) is not None:
            total = weights.sum()
            return CrossEntropy(
                torch.full(used.shape, -1).masked_scatter(used, targets),
                torch.zeros(used.shape, dtype=torch.float64).masked_scatter(used, weights / total),
                smoothing, temperature,
            )  # fmt: skip
    return None


def _fit_smoothing(scores: Tensor, gradient: Tensor, others: Tensor) -> tuple[float, float]:
    """Return the smoothing, at temperature 1: without the target a row's gradient is linear in its chances."""
    p, g = (each[others].reshape(len(each), -1) for each in (scores.softmax(-1), gradient))
    p_off, g_off = p - p.mean(-1, keepdim=True), g - g.mean(-1, keepdim=True)
    slope = (p_off * g_off).sum(-1) / p_off.square().sum(-1)
    smoothing = (p.mean(-1) - g.mean(-1) / slope) * scores.shape[-1]
    return round(float(smoothing.median()), 4) + 0.0, 1.0  # no -0.0


def _fit_temperature(scores: Tensor, gradient: Tensor) -> tuple[float, float]:
    """Return the temperature, without smoothing: the logarithm of a row's gradient is linear in its scores."""
    logs = gradient.clamp(min=torch.finfo(torch.float64).tiny).log()
    z_off, log_off = scores - scores.mean(-1, keepdim=True), logs - logs.mean(-1, keepdim=True)
    slope = float(((z_off * log_off).sum(-1) / z_off.square().sum(-1)).median())
    return 0.0, float(f"{1 / slope:.3g}") if slope > 0 else 1.0


def _fit_weights(z: Tensor, g: Tensor, targets: Tensor, smoothing: float, temperature: float) -> Tensor | None:
    """Return the weights with which the formula gives the gradient; None if none do."""
    classes = z.shape[-1]
    wanted = torch.full_like(z, smoothing / classes).scatter(-1, targets[:, None], 1 - smoothing + smoothing / classes)
    direction = (z / temperature).softmax(-1) - wanted
    weights = (direction * g).sum(-1) / direction.square().sum(-1)
    error = (g - weights[:, None] * direction).norm()
    return weights if bool((weights > 0).all()) and bool(error <= _EXACT * g.norm()) else None
