"""The metrics panel of a real cluster: ranks that log in cells and functions, a record, the CSV, a notebook alone."""

from __future__ import annotations

import csv
import os
import signal

import pytest
from worlds import PATIENCE, cluster_fixture, until

import rpcbench
from rpcbench.runtime import metrics
from rpcbench.runtime.metrics import MetricLog
from rpcbench.telemetry import collector
from rpcbench.telemetry.metric_views import metrics_view
from rpcbench.telemetry.summary import summarize_view

pytestmark = pytest.mark.process

cluster = cluster_fixture(3, scope="function")


@pytest.fixture(autouse=True)
def lone(monkeypatch):
    monkeypatch.setattr(metrics, "WITHOUT_AGENT", MetricLog())


def train(bad):
    import torch
    import torch.distributed as dist

    for step in range(50):
        loss = torch.tensor(1.0 + 0.01 * (step % 3))
        rpcbench.log(loss=loss * (100 if dist.get_rank() == bad else 1), step=step)


def test_ranks_are_compared_and_the_one_that_diverges_is_named(cluster):
    source = collector.current_collector()
    stop = source.subscribe(lambda: None)
    cluster.spmd(train, 2)
    assert source.settle(PATIENCE)
    view = metrics_view(source.world())
    stop()
    assert {key: (row["count"], row["state"]) for key, row in view["curves"].items()} == {
        "1/loss": (50, ""), "2/loss": (50, ""), "3/loss": (50, "far"),
    }  # fmt: skip


def test_cells_log_and_the_panel_saves_all_of_them(cluster, tmp_path):
    cluster.run("all", "import rpcbench\nfor i in range(3): rpcbench.log(loss=i)")
    rpcbench.log(lr=0.1)
    made = rpcbench.panel("metrics")
    try:
        path = made.save(tmp_path / "metrics.csv")
        until(lambda: len(made.latest_view()["curves"]) == 4)
        assert "loss at step 2: median 2, from 2 to 2 on 3 ranks" in summarize_view(made.latest_view())
    finally:
        made.close()
    with open(path) as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 10
    assert {row["worker"] for row in rows if row["name"] == "loss"} == {"worker1", "worker2", "worker3"}
    assert rpcbench.save_metrics(tmp_path / "again.csv").read_text() == path.read_text()


def test_a_record_has_them_and_is_played(cluster, tmp_path):
    with rpcbench.record(tmp_path / "run.json"):
        cluster.run("all", "import rpcbench\nfor i in range(3): rpcbench.log(loss=i)")
    made = rpcbench.replay(tmp_path / "run.json", "metrics")
    try:
        assert [row["value"] for row in made.panel.latest_view()["curves"].values()] == [2.0, 2.0, 2.0]
    finally:
        made.close()


def test_a_notebook_without_a_cluster_has_the_panel_until_one_starts():
    rpcbench.log(loss=0.5)
    made = rpcbench.panel("metrics")
    try:
        assert "loss at step 0: 0.5" in summarize_view(made.latest_view()) and made.phase["name"] == "live"
        rpcbench.log(loss=0.25)
        until(lambda: made.latest_view()["curves"]["0/loss"]["value"] == 0.25)
        with rpcbench.Cluster(1):
            rpcbench.log(loss=0.125)
            until(lambda: made.phase["name"] == "stopped")
            assert [row["value"] for row in rpcbench.panel("metrics").latest_view()["curves"].values()] == [0.125]
        assert made.latest_view()["curves"]["0/loss"]["value"] == 0.25
    finally:
        made.close()


def test_a_killed_worker_keeps_its_curve_also_once_it_is_started_again(cluster):
    log = "import rpcbench\nfor i in range(3): rpcbench.log(loss=i)"
    made = rpcbench.panel("metrics")

    def curves():
        return {key: (row["count"], row["ended"]) for key, row in made.latest_view()["curves"].items()}

    try:
        cluster.run("all", log)
        until(lambda: curves() == {"1/loss": (3, ""), "2/loss": (3, ""), "3/loss": (3, "")})
        os.kill(cluster.pid("worker2"), signal.SIGKILL)
        until(lambda: curves()["2/loss"] == (3, "lost"))
        cluster.restart("worker2")
        until(lambda: curves()["2/loss"] == (3, "restarted"))
        cluster.run("worker2", log.replace("loss=i", "loss=i, step=3 + i"))
        before = {"1/loss": (3, ""), "2/loss": (3, "restarted"), "3/loss": (3, "")}
        until(lambda: curves() == {**before, "2.1/loss": (3, "")})
        cluster.run("all", "rpcbench.log(b=2.09)")
        until(lambda: curves() == {**before, "2.1/loss": (3, ""), **dict.fromkeys(("1/b", "2.1/b", "3/b"), (1, ""))})
        cluster.run("all", log.replace("loss=i", "loss=i, step=i"))  # the others begin a new run
        until(lambda: "2/loss" not in curves() and curves()["1/loss"] == (3, ""))
    finally:
        made.close()
