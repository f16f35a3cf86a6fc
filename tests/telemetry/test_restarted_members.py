"""Messages to a worker that was restarted: nobody knows any more whether they arrived, and none is in flight."""

from __future__ import annotations

import pytest
from worlds import until

import rpcbench
from rpcbench.rpc import rpc_sync
from rpcbench.telemetry.collector import MESSAGES, current_collector
from rpcbench.telemetry.message_views import messages_view

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
    assert "untold" in found and "under way" not in found


def states(world: dict[int, dict[str, object]]) -> set[str]:
    return {row["state"] for row in messages_view(world)["messages"].values() if row["kind"] == "Call"}
