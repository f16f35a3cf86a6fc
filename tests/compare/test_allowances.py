"""Round-off is measured: values move by the unit of their type, and nothing else does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rpcbench.compare.allowances import MovementMeter, RoundOff, allowed_error
from rpcbench.compare.capture import FORWARD, Capture, Kept, Key
from rpcbench.compare.layouts import BLOCK


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_value_moves_by_at_most_the_unit_of_its_type(dtype):
    value = torch.linspace(1, 2, 1000, dtype=torch.float64).to(dtype)
    moved = RoundOff(0, {}).move_value("", value)
    share = ((moved.double() - value.double()) / value.double()).abs()
    unit = torch.finfo(dtype).eps
    assert moved.dtype == dtype and 0 < share.max() <= unit, "and then it is rounded to the type"
    assert torch.equal(RoundOff(0, {}).move_value("", value), moved), "its generator is its own"


def test_a_coarser_type_of_the_ranks_counts_and_whole_numbers_stay():
    value = torch.ones(1000)
    moved = RoundOff(0, {"head": torch.bfloat16}).move_value("head", value)
    assert 1e-3 < (moved - value).abs().max() <= torch.finfo(torch.bfloat16).eps
    numbers = torch.arange(5)
    assert RoundOff(0, {}).move_value("", numbers) is numbers


def test_gradients_pass_a_value_that_was_moved():
    value = torch.ones(3, requires_grad=True)
    moved = RoundOff(0, {}).move_value("", value * 2)
    moved.sum().backward()
    assert torch.equal(value.grad, torch.full((3,), 2.0))


def run_layer(perturb=None, store=None):
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    with Capture(layer, perturb, store) as capture:
        layer(torch.ones(2, 8)).sum().backward()
    return capture


def test_a_moved_run_is_measured_and_not_kept():
    reference = run_layer()
    meter = MovementMeter(reference)
    run_layer(RoundOff(1, {}).move_value, meter.add_value)
    distances = meter.distances()
    output = Key(0, FORWARD, "")
    assert distances.keys() == reference.catalog.values.keys()
    assert 0 < distances[output][0] < 1e-5
    assert all(math.isfinite(distance) for calls in distances.values() for distance in calls.values())
    assert MovementMeter(reference).distances()[output][0] == math.inf, "a run without that value"


def test_a_large_value_is_measured_in_blocks():
    values = torch.linspace(-1, 1, BLOCK + 3), torch.linspace(-1, 1.1, BLOCK + 3)
    reference, key = run_layer(), Key(0, FORWARD, "large")
    reference.catalog.values[key] = {0: Kept(reference.spool.add_tensor(values[0]), None)}
    meter = MovementMeter(reference)
    meter.add_value(key, 0, values[1])
    assert meter.distances()[key][0] == pytest.approx(float((values[0].double() - values[1].double()).norm()))


def test_what_is_allowed_grows_with_the_movement_and_for_few_numbers():
    many, few = (allowed_error([1e-6, 2e-6], 1.0, count, torch.float32) for count in (10_000, 1))
    assert 4 * 2e-6 < many < few < 20 * 2e-6
    assert allowed_error([0.0], 1.0, 10_000, torch.float32) > 0, "one rounding of the value itself"
    assert allowed_error([1.0], 1.0, 5, torch.int64) == 0.0, "whole numbers are equal"
