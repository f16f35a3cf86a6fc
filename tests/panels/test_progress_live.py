"""The progress panel of a real cluster: maps, of which items fail, a worker that is lost, and a training loop."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional
from worlds import PATIENCE, cluster_fixture, until

from rpcbench.base.errors import WorkerLostError
from rpcbench.pipeline import Pipeline, split
from rpcbench.telemetry import collector
from rpcbench.telemetry.progress_view import progress_view
from rpcbench.telemetry.summary import summarize_view

pytestmark = pytest.mark.process

cluster = cluster_fixture(2, scope="function")


@pytest.fixture
def seen(cluster):
    """`seen()`: the view that a panel has, once all members have reported."""
    source = collector.current_collector()
    stop = source.subscribe(lambda: None)

    def look():
        assert source.settle(PATIENCE)
        return progress_view(source.world())

    yield look
    stop()


def last_job(view):
    return max(view["jobs"].values(), key=lambda row: row["order"])


def refuse_seven(item):
    if item == 7:
        raise ValueError("seven is too many")
    return item


def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return path


def end_process(item):
    if item == 3:
        os._exit(1)
    return item


def test_what_runs_and_waits_is_seen_while_it_does(cluster, seen, tmp_path):
    paths = [str(tmp_path / str(n)) for n in range(9)]
    results = cluster.map(wait_for_file, paths)
    taken: list[str] = []
    thread = threading.Thread(target=lambda: taken.extend(results))
    thread.start()
    until(lambda: last_job(seen())["running"] == 2)
    row = last_job(seen())
    assert (row["name"], row["total"], row["done"], row["state"]) == ("wait_for_file", 9, 0, "runs")
    (tmp_path / "0").touch()
    until(lambda: last_job(seen())["done"] == 1)
    for path in paths:
        open(path, "w").close()
    thread.join(PATIENCE)
    row = last_job(seen())
    assert (row["state"], row["done"], row["running"], taken) == ("done", 9, 0, paths)
    assert row["rate"] > 0 and abs(row["end"] - time.time()) < PATIENCE and 0 < row["lasted"] < PATIENCE


@pytest.mark.parametrize("ordered", [True, False])
def test_a_failing_item_is_told_with_its_number(cluster, seen, ordered):
    with pytest.raises(ValueError, match="seven"):
        list(cluster.map(refuse_seven, range(20), ordered=ordered))
    row = last_job(seen())
    assert (row["state"], row["failed"], row["running"]) == ("failed", 1, 0) and row["ended"] < 20
    assert row["error"] == "ValueError: seven is too many, while cluster.map ran item 7: 7"
    assert "(failed: ValueError: seven is too many" in summarize_view(seen())


def test_a_lost_worker_fails_its_item(cluster, seen):
    with pytest.raises(WorkerLostError):
        list(cluster.map(end_process, range(9)))
    row = last_job(seen())
    assert (row["state"], row["failed"]) == ("failed", 1) and row["error"].startswith("WorkerLostError: ")


def test_a_fit_is_seen_with_its_loss(cluster, seen):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    stages = split(model, cluster.workers)
    pipe = Pipeline(stages, microbatches=2, loss_fn=functional.cross_entropy, optimizer=(torch.optim.SGD, {"lr": 0.1}))
    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(5)]
    running = []
    history = pipe.fit(batches, 2, on_step=lambda _: running.append(last_job(seen())), progress=False)
    assert [row["done"] for row in running] == [*range(1, 11)] and {row["state"] for row in running} == {"runs"}
    row = last_job(seen())
    assert (row["kind"], row["name"], row["total"], row["state"]) == ("fit", "Sequential", 10, "done")
    assert row["note"] == f"epoch 2 of 2, loss {history.losses[-1]:.4g}"
