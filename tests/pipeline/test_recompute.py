"""Recomputed forwards, and the random numbers of both runs, on workers in their own processes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from worlds import cluster_fixture

from rpcbench import Cluster
from rpcbench.pipeline import Pipeline, PipelineError, split
from rpcbench.pipeline.ops import format_ops, parse_ops, validate_ops
from rpcbench.pipeline.recompute import seeded_rng, with_recompute
from rpcbench.pipeline.schedules import gpipe, one_f_one_b
from rpcbench.pipeline.simulate import simulate

RECOMPUTES = {
    "all": "all",
    "except_last": "except_last",
    "of the first stage": lambda stage, microbatch: stage == 0,
}


cluster = cluster_fixture(2)


def losses(cluster: Cluster, schedule: str, recompute: Any = "none") -> list[float]:
    """Return the losses of three steps with dropout, on the same data."""
    torch.manual_seed(11)
    layers = [nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)]
    net = nn.Sequential(*itertools.chain(*((layer, nn.Dropout(0.3)) for layer in layers)))
    x, y = torch.rand(29, 6), torch.randint(0, 4, (29,))
    sgd = (torch.optim.SGD, {"lr": 0.5})
    pipe = Pipeline(split(net, cluster.workers), schedule, 5, functional.cross_entropy, sgd, recompute=recompute)
    return [pipe.step(x, y).loss for _ in range(3)]


@pytest.mark.process
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_recomputed_forwards_have_the_same_dropout_and_losses(cluster: Cluster, schedule: str) -> None:
    plain = losses(cluster, schedule)
    assert [losses(cluster, schedule, recompute) for recompute in RECOMPUTES.values()] == [plain] * len(RECOMPUTES)


@pytest.mark.process
@pytest.mark.parametrize("schedules", [["sequential", "gpipe", "1f1b"], ["interleaved", "bfs", "zb1p"]])
def test_dropout_is_the_same_in_all_schedules_with_the_same_number_of_stages(
    cluster: Cluster, schedules: list[str]
) -> None:
    found = [losses(cluster, schedule) for schedule in schedules]
    assert found == found[:1] * len(found)


@pytest.mark.process
def test_dropout_differs_between_steps(cluster: Cluster) -> None:
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Dropout(0.5))
    x = torch.rand(8, 6)
    pipe = Pipeline(split(net, cluster.workers), "gpipe", 2, functional.mse_loss)
    with pipe.batch(x, x) as first, pipe.batch(x, x) as second:
        assert first.result.loss != second.result.loss


def test_seeded_is_repeatable_and_does_not_change_the_outer_random_state() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(2)
    torch.manual_seed(1)
    with seeded_rng(5):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), wanted)
    with seeded_rng(5):
        assert torch.equal(torch.rand(2), inside)


def test_recompute_operations_come_right_before_their_backward() -> None:
    assert format_ops(with_recompute(gpipe(1, 2), "all", 2)) == "0F0 0F1 0R0 0B0 0R1 0B1"
    assert format_ops(with_recompute(gpipe(1, 2), "except_last", 2)) == "0F0 0F1 0R0 0B0 0B1"
    assert with_recompute(gpipe(2, 2), "none", 2) == gpipe(2, 2)


def test_recomputing_takes_less_than_a_third_longer_and_keeps_one_activation() -> None:
    ops = with_recompute(one_f_one_b(4, 8), "all", 8)
    validate_ops(ops, 4, 8)
    played = simulate(ops)
    assert played.peak_live == (1, 1, 1, 1)
    assert played.makespan < 4 / 3 * simulate(one_f_one_b(4, 8)).makespan


@pytest.mark.parametrize("ops", ["0F0 0B0 0R0", "0F0 0I0 0R0 0W0"])
def test_a_recompute_after_its_backward_is_refused(ops: str) -> None:
    with pytest.raises(PipelineError, match=r"ops\[0\]\[2\] = 0R0 cannot be: its backward comes before"):
        validate_ops(parse_ops(ops), 1, 1)
