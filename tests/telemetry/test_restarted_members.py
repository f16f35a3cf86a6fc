"""What a worker reported before it was restarted stays, and what it lost stays lost; none of it is in flight."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn
from worlds import until

import rpcbench
from rpcbench.pipeline import Pipeline, split
from rpcbench.rpc import rpc_async, rpc_sync
from rpcbench.telemetry.collector import MESSAGES, current_collector
from rpcbench.telemetry.message_views import messages_view
from rpcbench.telemetry.views import pipeline_view

pytestmark = pytest.mark.process


def test_messages_of_before_a_restart_are_not_in_flight() -> None:
    with rpcbench.Cluster(1) as cluster:
        collector = current_collector()
        stop = collector.subscribe(lambda: None, MESSAGES)
        for number in range(20):
            rpc_sync("worker1", abs, (number,))
        assert collector.settle()
        assert "received" in states(collector.world())
        cluster.restart("worker1")
        until(lambda: collector.world().get(1, {}).get("incarnation") == 1)
        assert rpc_sync("worker1", abs, (-1,)) == 1
        assert collector.settle()
        found = states(collector.world())
        stop()
    assert "received" in found and found <= {"received", "untold"}  # a receipt may have ended with its process


def states(world: dict[int, dict[str, object]]) -> set[str]:
    return {row["state"] for row in messages_view(world)["messages"].values() if row["kind"] == "Call"}


def test_what_a_killed_worker_told_stays_and_what_it_lost_stays_lost() -> None:
    with rpcbench.Cluster(2) as cluster:
        collector = current_collector()
        stop = collector.subscribe(lambda: None, MESSAGES)
        stages = split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), cluster.workers)
        sgd = (torch.optim.SGD, {"lr": 0.1})
        pipe = Pipeline(stages, microbatches=2, loss_fn=nn.functional.mse_loss, optimizer=sgd)
        for _ in range(5):
            pipe.step(torch.ones(4, 4), torch.ones(4, 2))
        assert collector.settle()
        before = pipeline_view(collector.world())["steps"]
        received = keys(collector.world(), "received")
        os.kill(cluster.pid("worker2"), signal.SIGSTOP)
        lost = rpc_async("worker2", abs, (-1,))
        os.kill(cluster.pid("worker2"), signal.SIGKILL)
        with pytest.raises(rpcbench.WorkerLostError):
            lost.wait()
        until(lambda: keys(collector.world(), "lost"))
        gone = keys(collector.world(), "lost")
        cluster.restart("worker2")
        until(lambda: collector.world().get(2, {}).get("incarnation") == 1)
        assert rpc_sync("worker2", abs, (-1,)) == 1
        assert collector.settle()
        after = collector.world()
        stop()
    assert len(before) == 5 and {row["state"] for row in before.values()} == {"complete"}
    assert pipeline_view(after)["steps"] == before
    assert received <= keys(after, "received") and gone <= keys(after, "lost") and not keys(after, "under way")


def keys(world: dict[int, dict[str, object]], state: str) -> set[str]:
    return {key for key, row in messages_view(world)["messages"].items() if row["state"] == state}
