"""A worker that reads nothing blocks no caller for longer than the timeout of its call, on any thread."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from worlds import PATIENCE, stop

import rpcbench
from rpcbench import Cluster
from rpcbench.base.errors import RpcTimeoutError
from rpcbench.transport import stream

pytestmark = pytest.mark.process


@pytest.fixture(params=["unix", "tcp"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster whose worker1 is stopped. For the notebook, worker1 is far behind after 256 KiB."""
    monkeypatch.setenv("RPCBENCH_TRANSPORT", request.param)
    monkeypatch.setattr(stream, "_HELD_BACK", 1 << 18)
    with rpcbench.Cluster(1) as made:
        made.rpc_sync("worker1", len, ((),))
        stop(made.pid("worker1"))
        try:
            yield made
        finally:
            os.kill(made.pid("worker1"), signal.SIGCONT)


def here(job: Callable[[], None]) -> None:
    job()


def elsewhere(job: Callable[[], None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(job).result()


@pytest.mark.parametrize("on", [here, elsewhere])
def test_calls_to_a_stopped_worker_time_out_and_report_when_they_were_not_sent(
    cluster: Cluster, on: Callable[..., None]
) -> None:
    def calls() -> None:
        with pytest.raises(RpcTimeoutError, match="may still be running"):
            cluster.rpc_sync("worker1", len, ((),), timeout=0.2)
        small = [cluster.rpc_async("worker1", len, ((),), timeout=0.2) for _ in range(1000)]
        with pytest.raises(RpcTimeoutError, match="It has not been sent: worker1 is far behind") as caught:
            for _ in range(10_000):
                cluster.rpc_async("worker1", len, (bytes(4096),), timeout=0.2)
        assert not caught.value.maybe_executed
        for future in small:
            with pytest.raises(RpcTimeoutError):
                future.wait()

    on(calls)
    os.kill(cluster.pid("worker1"), signal.SIGCONT)
    assert cluster.rpc_sync("worker1", len, ((),), timeout=PATIENCE) == 0  # the call waits until there is room again
