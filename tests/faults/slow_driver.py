"""A driver that is stopped while it watches a worker with many changes."""

from __future__ import annotations

import time

import rpcbench
from rpcbench.runtime.publisher import TELEMETRY, WATCH


def churn(seconds: float) -> int:
    """Report many small changes of the tables."""
    until, rounds = time.monotonic() + seconds, 0
    from rpcbench.runtime import current

    note = current.current_agent().links.bus.record_change
    while time.monotonic() < until:
        for _ in range(500):
            row = {"call": rounds, "to": 0, "label": "x" * 200, "since": 0.0}
            note("CallStarted", "calls", str(rounds), lambda row=row: row)
            rounds += 1
        time.sleep(0.01)
    return rounds


if __name__ == "__main__":
    with rpcbench.Cluster(1) as cluster:
        heard: list[int] = []
        cluster.agent.on_notice(TELEMETRY, lambda source, data: heard.append(source))
        cluster.agent.notify(1, WATCH, True)
        while not heard:
            time.sleep(0.01)
        call = cluster.rpc_async("worker1", churn, (6,))
        print(cluster.pid("worker1"), flush=True)
        assert call.wait() > 0
        print("usable" if cluster.rpc_sync("worker1", max, (1, 2)) == 2 else "", flush=True)
