"""A program that gets Ctrl-C in each kind of wait in turn, and prints how long each wait lasted after it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import rpcbench
import rpcbench.rpc as rpc
from rpcbench.base.errors import ShutdownError

_after: list[float] = []


def stand_still() -> None:
    while not rpc.cancelled():
        threading.Event().wait(0.01)


def interrupted(name: str, wait: Callable[[], Any]) -> None:
    """Wait, with Ctrl-C after a third of a second."""
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        wait()
    except KeyboardInterrupt:
        print(name, time.monotonic() - _after[-1], flush=True)


def ring(*_: object) -> None:
    _after.append(time.monotonic())
    signal.raise_signal(signal.SIGINT)


def join(name: str, world_size: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method="file:///nowhere/waits")
    rpc.init_rpc(name, rank=0, world_size=world_size, rpc_backend_options=options)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, ring)
    interrupted("init_rpc", lambda: join("alone", 2))
    with rpcbench.Cluster(2) as cluster:
        call, other = cluster.rpc_async("worker1", stand_still), cluster.rpc_async("worker2", stand_still)
        rref = cluster.remote("worker2", stand_still)
        interrupted("wait", call.wait)
        interrupted("then", call.then(lambda done: None).wait)
        interrupted("wait_all", lambda: rpcbench.wait_all([call, other]))
        interrupted("rpc_sync", lambda: cluster.rpc_sync("worker1", stand_still))
        interrupted("to_here", rref.to_here)
        interrupted("wait_for", lambda: cluster.wait_for(5))
        call.cancel(), other.cancel()
        print("usable" if cluster.rpc_sync("worker1", max, (1, 2)) == 2 else "", 0, flush=True)
    join("alone", 1)
    late = rpc.rpc_async("alone", time.sleep, (30,))
    interrupted("shutdown", rpc.shutdown)
    try:
        late.wait()
    except ShutdownError:
        print("done", 0, flush=True)


if __name__ == "__main__":
    main()
