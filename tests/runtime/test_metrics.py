"""`rpcbench.log`: values and steps, what it keeps, refuses and hands on; with an agent and without one."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from worlds import until, world

import rpcbench
from rpcbench.runtime import current, metrics
from rpcbench.runtime.metrics import BLOCK, KEPT, MOST_NAMES, MetricLog


@pytest.fixture(autouse=True)
def lone(monkeypatch):
    """The log of this process without an agent, empty, and no client."""
    monkeypatch.setattr(metrics, "WITHOUT_AGENT", MetricLog())
    monkeypatch.setattr(metrics, "_clients", [])
    return metrics.WITHOUT_AGENT


def points(kept, name="loss"):
    rows = [row for row in kept.table().values() if row["name"] == name]
    return [pair for row in rows for pair in zip(row["steps"], row["values"], strict=True)]


def test_steps_count_up_by_themselves_or_are_given(lone):
    rpcbench.log(loss=1)
    rpcbench.log(loss=0.5, step=10)
    rpcbench.log({"loss": 0.25, "train/lr": 0.1})
    assert points(lone) == [(0, 1.0), (10, 0.5), (11, 0.25)] and points(lone, "train/lr") == [(11, 0.1)]


def test_calls_of_one_turn_of_a_loop_have_one_step(lone):
    for turn in range(4):
        rpcbench.log(loss=turn)
        rpcbench.log(norm=turn)
        if turn % 2:
            rpcbench.log(accuracy=turn)
    assert points(lone) == points(lone, "norm") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert points(lone, "accuracy") == [(1, 1.0), (3, 3.0)]


@pytest.mark.parametrize(
    "value", [2, 2.0, True + 1, np.float32(2), np.array(2), np.int64(2), torch.tensor(2), torch.tensor(2.0)]
)
def test_numbers_and_tensors_of_no_dimensions_are_values(lone, value):
    rpcbench.log(loss=value)
    assert points(lone) == [(0, 2.0)]


def test_a_tensor_is_read_once(lone):
    class Counted(torch.Tensor):
        reads = 0

        def item(self):
            Counted.reads += 1
            return 2.0

    told = []
    rpcbench.log_to(lambda values, step: told.append(values))
    rpcbench.log(loss=torch.tensor(1.0).as_subclass(Counted))
    assert Counted.reads == 1 and told == [{"loss": 2.0}]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(2), r"loss is of shape \[2\]: log one number, such as loss.mean"),
        (torch.ones(1), r"loss is of shape \[1\]"),
        (np.ones((2, 3)), r"loss is of shape \[2, 3\]"),
        (torch.tensor(1j), "loss is of type complex"),
        ("0.5", "loss is of type str"),
        (None, "loss is of type NoneType"),
        ([0.5], "loss is of type list"),
        (type("Sharded", (), {"full_tensor": None})(), r"loss is a DTensor.* loss.full_tensor\(\)"),
    ],
)
def test_all_else_is_refused_with_what_to_do(lone, value, words):
    with pytest.raises(TypeError, match=words):
        rpcbench.log(lr=0.1, loss=value)
    assert lone.table() == {}, "a call is kept as a whole or not"


def test_wrong_names_and_steps_are_refused(lone):
    with pytest.raises(ValueError, match="texts of 1 to 200 characters"):
        rpcbench.log({"": 1})
    with pytest.raises(ValueError, match="texts of 1 to 200 characters"):
        rpcbench.log({3: 1})
    with pytest.raises(ValueError, match="53 bits"):
        rpcbench.log(loss=1, step=2**60)
    with pytest.raises(TypeError):
        rpcbench.log(loss=1, step=0.5)
    for number in range(MOST_NAMES):
        rpcbench.log({f"loss{number}": 1})
    with pytest.raises(ValueError, match="put numbers in step="):
        rpcbench.log(one_more=1)


def test_values_that_are_not_finite_are_kept_as_text(lone):
    for value in (1.0, math.nan, -math.inf, 1e30, 2.0):
        rpcbench.log(loss=value)
    (row,) = lone.table().values()
    assert (row["steps"], row["values"]) == ([0, 4], [1.0, 2.0])
    assert row["odd"] == [[1, 1, "nan"], [1, 2, "-inf"], [1, 3, "1e+30"]]


def test_a_smaller_step_begins_a_new_run(lone):
    for step in (0, 1, 1, 0, 1):
        rpcbench.log(loss=step, step=step)
    assert [(row["run"], row["steps"]) for row in lone.table().values()] == [(0, [0, 1, 1]), (1, [0, 1])]


def test_the_last_ten_thousand_points_are_kept(lone):
    for number in range(KEPT + 3 * BLOCK + 1):
        rpcbench.log(loss=number)
    kept = points(lone)
    assert KEPT <= len(kept) <= KEPT + BLOCK and kept[-1] == (KEPT + 3 * BLOCK, KEPT + 3 * BLOCK)
    assert [step for step, _ in kept] == [*range(kept[0][0], kept[-1][0] + 1)]
    assert len(lone.table()) <= KEPT // BLOCK + 2


class Run:
    def log(self, data, step=None, commit=None):
        self.told = "wandb", data, step


class Writer:
    told: tuple = ()

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None, new_style=False):
        self.told += ((tag, scalar_value, global_step),)


class Mlflow:
    def log_metrics(self, metrics, step=None, synchronous=None):
        self.told = "mlflow", metrics, step


def test_clients_get_what_is_logged():
    run, writer, mlflow, calls = Run(), Writer(), Mlflow(), []

    def call(values, step):
        calls.append((values, step))

    for client in (run, writer, mlflow, call, call):
        rpcbench.log_to(client)
    rpcbench.log(loss=torch.tensor(0.5), lr=1, step=7)
    values = {"loss": 0.5, "lr": 1.0}
    assert run.told == ("wandb", values, 7) and mlflow.told == ("mlflow", values, 7)
    assert writer.told == (("loss", 0.5, 7), ("lr", 1.0, 7)) and calls == [(values, 7)], "each client once"
    rpcbench.log_to(None)
    rpcbench.log(loss=1)
    assert len(calls) == 1
    with pytest.raises(TypeError, match="cannot use int: it takes a W&B run, a SummaryWriter"):
        rpcbench.log_to(3)


def test_tensorboards_own_writer_takes_it(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        rpcbench.log_to(writer)
        rpcbench.log(loss=0.5)
    assert [*tmp_path.iterdir()]


def test_an_error_of_a_client_is_the_callers_and_the_point_is_kept(lone):
    def refuse(values, step):
        raise ConnectionError("no tracker")

    rpcbench.log_to(refuse)
    with pytest.raises(ConnectionError, match="no tracker"):
        rpcbench.log(loss=0.5)
    assert points(lone) == [(0, 0.5)]


def test_an_agent_begins_with_what_was_logged_before_it(lone, tmp_path):
    woken = []
    stop = lone.add_watcher(lambda: woken.append(True))
    rpcbench.log(loss=1.0)
    with world(tmp_path, 2) as (here, there):
        rpcbench.log(loss=0.5)
        with current.use_agent(there):
            rpcbench.log(loss=9.0)
        assert points(here.part(MetricLog)) == [(0, 1.0), (1, 0.5)]
        assert here.tables()["metrics"] == here.part(MetricLog).table()
        assert points(there.part(MetricLog)) == [(0, 1.0), (1, 9.0)]
    assert points(lone) == [(0, 1.0)] and len(woken) == 3 and lone.copied_at is not None
    stop()
    rpcbench.log(loss=2.0)
    assert len(woken) == 3


def test_a_watcher_gets_blocks_that_grow_and_that_are_dropped(tmp_path):
    from rpcbench.telemetry.collector import Collector

    with world(tmp_path, 2) as (here, there):
        stop = here.part(Collector).subscribe(lambda: None)

        def seen():
            assert here.part(Collector).settle()
            return here.part(Collector).world()[there.id]["tables"].get("metrics", {})

        with current.use_agent(there):
            rpcbench.log(loss=0.5)
            until(lambda: seen() == there.part(MetricLog).table())
            for number in range(KEPT + 2 * BLOCK):
                rpcbench.log(loss=number)
        until(lambda: seen() == there.part(MetricLog).table() and "0.0" not in seen())
        stop()


def test_a_forked_child_logs_though_a_thread_had_the_lock():
    code = (
        "import os, rpcbench\nfrom rpcbench.runtime import metrics\nmetrics.WITHOUT_AGENT._lock.acquire()\n"
        "if os.fork() == 0:\n    rpcbench.log(loss=1)\n    os._exit(7)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "7\n"


def test_a_program_without_a_cluster_writes_its_csv(tmp_path):
    code = "import rpcbench\nrpcbench.log(loss=0.5)\nrpcbench.log(loss=0.25)\nprint(rpcbench.save_metrics('m.csv'))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ran.stdout == "m.csv\n", ran.stderr
    assert (tmp_path / "m.csv").read_text().splitlines() == [
        "name,worker,run,step,value", "loss,notebook,0,0,0.5", "loss,notebook,0,1,0.25",
    ]  # fmt: skip
