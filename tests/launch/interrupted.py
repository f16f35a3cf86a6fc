"""A driver for Ctrl-C: `once` gets one in a call that never ends; `often` gets hundreds while it calls, and `waiting`
while it waits for workers."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import rpcbench
from rpcbench.base.ids import Tables
from rpcbench.runtime import current


def touch_and_wait(path: str) -> None:
    Path(path).touch()
    threading.Event().wait()


def once(cluster: rpcbench.Cluster, sign: str) -> None:
    try:
        cluster.rpc_sync("worker1", touch_and_wait, (sign,))
    except KeyboardInterrupt:
        print("interrupted", cluster.rpc_sync("worker1", max, (1, 2)), flush=True)


def often(cluster: rpcbench.Cluster, sign: str) -> None:
    """Interrupt small and large calls and RRefs by Ctrl-C at any point: results stay right, and nothing is left."""
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    large, chance, rounds = torch.ones(1 << 18), random.Random(7), 0
    for _ in range(200):
        try:
            # If the first signal hits a finalizer, Python drops it: a second one follows later.
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + chance.random() * 0.01, 2)
            while True:
                cluster.rpc_async("worker1", torch.sum, (large,))
                assert cluster.remote("worker1", torch.add, (rounds, 1)).to_here() == rounds + 1
                rounds += 1
        except KeyboardInterrupt:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    deadline = time.monotonic() + 10
    while any(left := [_left(cluster.agent.tables()), *(cluster.rpc_sync(n, _my_tables) for n in cluster.workers)]):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    print("nothing left after", rounds, "rounds", flush=True)


def waiting(cluster: rpcbench.Cluster, sign: str) -> None:
    """Interrupt waits for workers by Ctrl-C at any point: a worker that joins later is still noticed."""
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    chance = random.Random(7)
    for wait in (lambda: cluster._await(lambda: False, [], "nothing"), lambda: cluster.wait_for(2)) * 500:
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + chance.random() * 1e-4, 2)
            wait()
        except KeyboardInterrupt:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    cluster.restart("worker1")
    print("usable", cluster.rpc_sync("worker1", max, (1, 2)), flush=True)


def _left(tables: Tables) -> Tables:
    gc.collect()
    return {name: rows for name, rows in tables.items() if rows}


def _my_tables() -> Tables:
    return _left(current.current_agent().tables())


if __name__ == "__main__":
    with rpcbench.Cluster(1) as made:
        globals()[sys.argv[1]](made, sys.argv[2])
