"""`rpcbench.measure_hardware`: the description of a machine gives back the times measured there."""

import pytest
import torch

import rpcbench
from rpcbench.simulation import measurements
from rpcbench.simulation.costs import collective_seconds, kernel_time
from rpcbench.simulation.measurements import RankMeasurements, describe_machine
from rpcbench.simulation.rank_log import FORWARD, Collective, Kernel, ModelPart

PART = ModelPart("", FORWARD)


def measured(slower: float = 1.0) -> RankMeasurements:
    products = [(1e6, 1e-4 * slower), (1e9, 0.01 * slower)]
    reduced = [(1e3, 1e-4 * slower), (1e6, 1e-3 * slower)]
    return RankMeasurements(
        {"float32": products, "bfloat16": products}, [(1e8, 0.01)], [(1e4, 1e-5), (1e8, 0.05)],
        {"all_reduce": reduced, "all_gather": reduced},
    )  # fmt: skip


def test_a_description_gives_back_the_mean_of_the_ranks_times():
    machine = describe_machine("here", [measured(), measured(3.0)], 1e9)
    for flops, seconds in ((1e6, 2e-4), (1e9, 0.02)):
        kernel = Kernel(0, "mm", "matmul", "float32", int(flops), 1, PART)
        assert kernel_time(kernel, machine).seconds == pytest.approx(seconds)
    assert kernel_time(Kernel(0, "add", "memory", "float32", 0, 10**8, PART), machine).seconds == pytest.approx(0.05)
    attention = Kernel(0, "sdpa", "attention", "float32", 10**8, 1, PART)
    assert kernel_time(attention, machine).seconds == pytest.approx(0.01)
    for kind in ("all_reduce", "all_gather"):
        rows = Collective(0, 1, kind, kind, "world", (0, 1), None, 10**6, "", "", False, PART)
        assert collective_seconds(rows, 0, machine) == pytest.approx(2e-3)


def test_workers_are_measured_together():
    with rpcbench.Cluster(2) as cluster:
        machine = rpcbench.measure_hardware(cluster)
        assert cluster.spmd(lambda: 1) == [1, 1]
    assert machine.source == "measured on 2 ranks"
    assert {*machine.flops} == {"float32", "bfloat16"}
    assert {*machine.collective_factors} == {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    assert all(factor > 0 for factor in machine.collective_factors.values())
    assert max(share for _, share in machine.efficiency.matmul) == 1.0


def test_a_slow_operator_is_run_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now, runs = [0.0], []

    def run(a: torch.Tensor, b: torch.Tensor) -> object:
        now[0] += 7.0
        runs.append((a, b))
        return a

    monkeypatch.setattr(measurements.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measurements.c10d, "barrier", lambda: None)
    pairs = [(torch.ones(1), torch.ones(1))] * 16
    assert measurements._mean_seconds(run, pairs) == 7.0
    assert len(runs) == 2  # a warm-up, and one that counts
