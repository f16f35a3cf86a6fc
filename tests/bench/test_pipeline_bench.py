"""Pipelines compared with those of torch: equal training, counted calls, and idle shares as simulated."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import idle_shares, pipelines
from benchmarks.__main__ import main
from benchmarks.pipeline_sides import MODELS, SCHEDULES, FixedCost, Order, Side, Steps, cost, ours, theirs
from rpcbench.launch.cluster import Cluster
from rpcbench.pipeline import simulate
from rpcbench.pipeline.ops import Op, parse_ops

TRIES = 40  # of about a second; one is enough on an idle machine


@pytest.fixture(scope="module", autouse=True)
def tracker() -> None:
    """Start the process that multiprocessing keeps, so that no test reports it as a leak."""
    resource_tracker.ensure_running()


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Side, Side]]:
    with ours() as mine, theirs() as other:
        yield mine, other


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize(("model", "schedule"), list(itertools.product(MODELS, SCHEDULES)))
def test_losses_equal_those_of_torch_distributed_pipelining(
    sides: tuple[Side, Side], model: str, schedule: str
) -> None:
    order = Order(model, schedule, 5, 11, torch.float64)
    mine, other = (side.run(order) for side in sides)
    assert mine.losses == pytest.approx(other.losses, rel=1e-12)
    assert len(set(mine.losses)) == 5, "each step changes the loss"
    assert min(mine.cpu, other.cpu) > 0 and len(mine.seconds) == len(other.seconds) == 5


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.alone
def test_idle_shares_equal_those_of_the_simulator(no_leaks: None) -> None:
    """The simulation includes the present lag of this machine; the benchmark shows the lag of an idle one."""
    plan = idle_shares.Plan(steps=1)
    with Cluster(plan.workers) as cluster:
        for name in idle_shares.SCHEDULES:
            found: list[idle_shares.Idle] = []
            while not any(each.is_explained for each in found):
                assert len(found) < TRIES, found
                found.append(idle_shares.idle(name, cluster.workers, plan))


def test_the_lag_is_the_waiting_time_beyond_the_schedule() -> None:
    ops = parse_ops("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert idle_shares.lag(ops, simulate(ops, cost).spans) == 0
    assert idle_shares.lag(ops, simulate(ops, cost, transfer=0.25).spans) == pytest.approx(0.25)
    alone = parse_ops("0F0 0B0")
    assert idle_shares.lag(alone, simulate(alone, cost).spans) == 0


def test_a_stage_of_fixed_cost_has_the_costs_of_the_simulator() -> None:
    told = {word: cost(Op.parse_op(word)) for word in ("0F0", "3F0", "0B0", "3B0", "0I0", "3I0", "0W0", "3W0")}
    assert told == {"0F0": 1, "3F0": 1, "0B0": 2, "3B0": 2, "0I0": 0, "3I0": 1, "0W0": 2, "3W0": 1}
    stage = FixedCost(0.0)
    stage(torch.zeros(2, 4)).sum().backward()
    assert stage.before.grad is not None and stage.weight.grad is not None


def test_an_idle_share_is_accepted_within_three_points() -> None:
    assert [idle_shares.Idle("x", 0.25, measured).ok for measured in (0.27, 0.23, 0.29, 0.21)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.long
@pytest.mark.process
def test_the_command_measures_all_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], no_leaks: None) -> None:
    assert main(["--pipeline", "--quick", "--seed", "3", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    lines = {line["title"]: line for line in found["lines"]}
    assert found["seed"] == 3 and len(lines) == 4 + 3 + len(idle_shares.SCHEDULES)
    calls = lines["driver's messages to a worker in a step"]
    assert "in a plain loop" in lines["an operation that does nothing"]["beside"]
    assert calls["value"] == 1 and calls["bound"] == 2 and calls["ok"]
    ratios = [line["value"] for title, line in lines.items() if title.endswith(SCHEDULES) and line["bound"] == 1]
    assert len(ratios) == 4 and all(ratio > 0 for ratio in ratios)
    assert "geometric mean" in capsys.readouterr().out


def test_the_overhead_excludes_the_time_of_the_operation_itself() -> None:
    assert 0 < pipelines.alone(torch.ones(4, 1)) < 60
    found = [pipelines._overhead(whole, 60.0) for whole in (210.0, 211.0)]
    assert [line.ok for line in found] == [True, False] and found[0].value == 150
    assert found[0].measured == "210 µs" and found[0].beside.startswith("60 µs of it") and "150 µs" in found[0].beside


def test_the_rate_is_all_samples_divided_by_all_seconds() -> None:
    order = Order("MLP", "gpipe", 3, 0)
    mine, other = Steps([0.25, 0.25, 1.0], [0.0] * 3, 2.0), Steps([0.5, 0.5, 0.5], [0.0] * 3, 3.0)
    line = pipelines._compared(order, mine, other)
    assert line.title == "MLP, gpipe" and line.measured == "512 samples/s" and line.value == 1 and line.ok
    assert line.beside == "torch 512: 1.00x, in CPU time 1.50x"
    assert not pipelines._compared(order, other._replace(seconds=[0.5, 0.5, 0.6]), other).ok


def test_a_line_that_misses_its_goal_is_marked() -> None:
    made = [
        pipelines.Line("a", "1", "", "at most 2", 1, 2, True),
        pipelines.Line("b", "3", "", "at most 2", 3, 2, False),
    ]
    console = Console(width=150, record=True)
    console.print(pipelines.as_table(made, pipelines.QUICK, 5))
    shown = [line for line in console.export_text().splitlines() if "at most 2" in line]
    assert ["✓" in line for line in shown] == [True, False] and "✗" in shown[1]
