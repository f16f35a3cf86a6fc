"""What a worker reported before it was restarted stays, and what it lost stays lost; none of it is in flight."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn
from worlds import until

import rpcbench
from rpcbench.base.errors import StageLostError
from rpcbench.pipeline import Pipeline, split
from rpcbench.rpc import rpc_async, rpc_sync
from rpcbench.telemetry import message_views
from rpcbench.telemetry.collector import MESSAGES, current_collector
from rpcbench.telemetry.message_views import collectives_view, messages_view
from rpcbench.telemetry.views import pipeline_view

pytestmark = pytest.mark.process


def test_messages_of_before_a_restart_are_not_in_flight() -> None:
    with rpcbench.Cluster(1) as cluster:
        collector = current_collector()
        stop = collector.subscribe(lambda: None, MESSAGES)
        assert collector.settle()  # else the worker may not report its first messages
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


def test_totals_go_on_over_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_views, "KEPT", 20)
    with rpcbench.Cluster(2) as cluster:
        collector = current_collector()
        totals: list[int] = []
        stop = collector.subscribe(lambda: totals.append(count_messages(collector.world())), MESSAGES)

        def call_often() -> int:
            for worker in cluster.workers * 50:
                rpc_sync(worker, abs, (-1,))
            assert collector.settle()
            return count_messages(collector.world())

        cluster.spmd(reduce_often)
        before = call_often()
        met = [collector.world()[worker]["met"] for worker in (1, 2)]
        for worker in cluster.workers:
            cluster.restart(worker)
        restarted = call_often()
        after = call_often()
        after_all = collector.world()
        stop()
    assert after - restarted == 200 and restarted >= before + 200, "a call and its result, 100 times"
    assert totals == sorted(totals)
    assert met[0] and [after_all[worker]["met"] for worker in (1, 2)] == met


def count_messages(world: dict[int, dict[str, object]]) -> int:
    view = messages_view(world)
    return view["counts"].get("messages", {"all": len(view["messages"])})["all"]


def states(world: dict[int, dict[str, object]]) -> set[str]:
    return {row["state"] for row in messages_view(world)["messages"].values() if row["kind"] == "Call"}


def test_what_a_killed_worker_told_stays_and_what_it_did_not_tell_stays_untold() -> None:
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
        until(lambda: keys(collector.world(), "untold"))
        gone = keys(collector.world(), "untold")
        cluster.restart("worker2")
        until(lambda: collector.world().get(2, {}).get("incarnation") == 1)
        assert rpc_sync("worker2", abs, (-1,)) == 1
        assert collector.settle()
        after = collector.world()
        stop()
    assert len(before) == 5 and {row["state"] for row in before.values()} == {"complete"}
    assert pipeline_view(after)["steps"] == before
    assert received <= keys(after, "received") and gone <= keys(after, "untold") and not keys(after, "under way")


def reduce_often() -> None:
    for _ in range(6):
        torch.distributed.all_reduce(torch.ones(2))


def test_a_restarted_worker_keeps_its_part_in_collectives_of_before() -> None:
    with rpcbench.Cluster(2) as cluster:
        collector = current_collector()
        stop = collector.subscribe(lambda: None, MESSAGES)
        cluster.spmd(reduce_often)
        assert collector.settle()
        before = collectives_view(collector.world())
        os.kill(cluster.pid("worker2"), signal.SIGKILL)
        until(lambda: collector.world()[2]["state"] == "lost")
        cluster.restart("worker2")
        until(lambda: collector.world().get(2, {}).get("incarnation") == 1)
        assert rpc_sync("worker2", abs, (-1,)) == 1 and collector.settle()
        after = collectives_view(collector.world())
        parts = collector.world()
        del parts[1]["tables"]["collectives"]  # as when worker1 has dropped its parts
        alone = collectives_view(parts)["collectives"]
        stop()
    reduced = {key for key, row in before["collectives"].items() if row["op"].startswith("all_reduce")}
    assert len(reduced) == 6
    assert {key: after["collectives"][key] for key in reduced} == {key: before["collectives"][key] for key in reduced}
    assert after["entries"] == before["entries"] and not alone


def keys(world: dict[int, dict[str, object]], state: str) -> set[str]:
    return {key for key, row in messages_view(world)["messages"].items() if row["state"] == state}


@pytest.mark.parametrize("name", ["worker1", "worker2"])
def test_a_step_that_has_ended_is_neither_failed_nor_running_after_a_worker_was_killed(name: str) -> None:
    """Whenever the worker dies, its last reports are lost with it; the driver has the result of each step."""
    with rpcbench.Cluster(2) as cluster:
        collector = current_collector()
        stop = collector.subscribe(lambda: None, MESSAGES)
        stages = split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), cluster.workers)
        sgd = (torch.optim.SGD, {"lr": 0.1})
        pipe = Pipeline(stages, microbatches=4, loss_fn=nn.functional.mse_loss, optimizer=sgd)
        threading.Timer(0.5, os.kill, (cluster.pid(name), signal.SIGKILL)).start()
        ended = -1
        with pytest.raises(StageLostError):
            while True:
                ended = pipe.step(torch.ones(8, 4), torch.ones(8, 2)).rows[0]["step"]
        assert collector.settle()

        def states() -> dict[int, str]:
            return {row["step"]: row["state"] for row in pipeline_view(collector.world())["steps"].values()}

        until(lambda: all(step > ended for step, state in states().items() if state == "failed"))
        cluster.restart(name)
        until(lambda: "running" not in states().values())
        stop()
