"""A cross entropy is read back from the gradient of its scores, with each option of torch's; no other loss is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from rpcbench.compare.cross_entropies import CrossEntropy, read_cross_entropy

ROWS, CLASSES = 12, 7
DRAWN = torch.Generator().manual_seed(3)
SCORES = torch.randn(ROWS, CLASSES, generator=DRAWN)
TARGETS = torch.randint(CLASSES, (ROWS,), generator=DRAWN)


def read(temperature: float = 1.0, **options: Any) -> CrossEntropy | None:
    scores = SCORES.clone().requires_grad_()
    loss = functional.cross_entropy(scores / temperature, TARGETS, **options)
    loss.backward()
    assert scores.grad is not None
    return read_cross_entropy(SCORES, scores.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_targets_and_smoothing(reduction: str, smoothing: float) -> None:
    found = read(label_smoothing=smoothing, reduction=reduction)
    assert found is not None and torch.equal(found.targets, TARGETS)
    assert (found.smoothing, found.temperature) == (pytest.approx(smoothing, abs=1e-3), 1.0)
    assert torch.allclose(found.weights, torch.full((ROWS,), 1 / ROWS, dtype=torch.float64), rtol=1e-3)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_temperature(temperature: float) -> None:
    found = read(temperature)
    assert found is not None and torch.equal(found.targets, TARGETS)
    assert (found.smoothing, found.temperature) == (0.0, pytest.approx(temperature, rel=1e-2))


def test_rows_that_are_ignored_have_no_target_and_no_weight() -> None:
    ignored = TARGETS[0] == TARGETS
    found = read(ignore_index=int(TARGETS[0]))
    assert found is not None and torch.equal(found.targets, TARGETS.masked_fill(ignored, -1))
    assert bool((found.weights[ignored] == 0).all()) and float(found.weights.sum()) == pytest.approx(1)


def test_weights_of_classes() -> None:
    weights = torch.arange(1.0, CLASSES + 1)
    found = read(weight=weights)
    assert found is not None
    assert torch.allclose(found.weights.float(), weights[TARGETS] / weights[TARGETS].sum(), rtol=1e-3)


@pytest.mark.parametrize("classes", [3, CLASSES])
def test_another_loss_is_no_cross_entropy(classes: int) -> None:
    scores = SCORES[:, :classes].clone().requires_grad_()
    functional.mse_loss(scores, torch.zeros_like(scores)).backward()
    assert scores.grad is not None and read_cross_entropy(scores.detach(), scores.grad) is None
    assert read_cross_entropy(scores.detach(), torch.zeros_like(scores)) is None
