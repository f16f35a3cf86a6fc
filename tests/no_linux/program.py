"""A notebook on a system that lacks what is Linux alone: each part of rpcbench that has another way there, once.

It prints the pids of its fork server and its workers, and kills itself in the end.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import tempfile
import threading
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn import functional
from worlds import until

import rpcbench
from rpcbench.base.errors import WorkerLostError
from rpcbench.launch import process
from rpcbench.pipeline import Pipeline, split

FOUND = """
import os, pathlib, select, signal, socket, rpcbench.transport.sockets
names = [(select, "epoll"), (os, "eventfd"), (os, "memfd_create"), (os, "pidfd_open"), (signal, "pidfd_send_signal")]
found = [name for module, name in [*names, (socket, "MSG_CMSG_CLOEXEC")] if hasattr(module, name)]
found += [str(each) for each in [pathlib.Path("/proc/self/fd")] if each.exists()]
found + ["linux"] * bool(rpcbench.transport.sockets._ACKNOWLEDGED)
"""
BUSY = """
import pathlib, time
pathlib.Path(begun).touch()
time.sleep(600)
"""


def use_calls(cluster: rpcbench.Cluster) -> None:
    large = torch.arange(1 << 20, dtype=torch.float32)
    assert torch.equal(cluster.rpc_sync("worker1", torch.neg, (large,)), -large)
    rref = cluster.remote("worker1", torch.add, (large, 1))
    assert torch.equal(rref.to_here(), large + 1)
    assert cluster.rpc_sync("worker2", lambda held: held.to_here()[-1].item(), (rref,)) == 1 << 20


def use_pipeline() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.rand(8, 4), torch.randint(0, 2, (8,))
    expected = functional.cross_entropy(model(x), y).item()
    pipe = Pipeline(split(model, ["worker1", "worker2"]), microbatches=2, loss_fn=functional.cross_entropy)
    with pipe.batch(x, y) as batch:
        assert abs(batch.loss - expected) < 1e-6


def use_stop_button(cluster: rpcbench.Cluster, folder: Path) -> None:
    begun = folder / "begun"

    def press() -> None:
        until(begun.exists, "the cell to begin")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    try:
        cluster.run("worker1", BUSY, push={"begun": str(begun)})
    except KeyboardInterrupt:
        assert cluster.rpc_sync("worker1", max, (1, 2)) == 2
        return
    raise AssertionError("the cell was not interrupted")


def hold_interpreter(begun: str) -> None:
    """Let no other thread of this process run for a while."""
    Path(begun).touch()
    ctypes.PyDLL(None).sleep(4)


def use_stacks(cluster: rpcbench.Cluster, folder: Path) -> None:
    begun = folder / "held"
    held = cluster.rpc_async("worker2", hold_interpreter, (str(begun),))
    until(begun.exists, "the call to begin")
    report = str(cluster.stack("worker2"))
    assert "worker2 does not respond" in report and "hold_interpreter" in report, report
    held.wait()


def lose_worker(cluster: rpcbench.Cluster) -> None:
    os.kill(cluster.pid("worker2"), signal.SIGKILL)
    until(lambda: cluster.lost == ["worker2"], "the loss of worker2")
    try:
        cluster.rpc_sync("worker2", max, (1, 2))
    except WorkerLostError:
        cluster.restart("worker2")
        assert cluster.rpc_sync("worker2", max, (1, 2)) == 2
        return
    raise AssertionError("a call to a killed worker returned")


def main() -> None:
    assert not hasattr(select, "epoll") and process.default_mode() == "spawn"
    with rpcbench.Cluster(1):
        pass  # it ends in order
    cluster = rpcbench.Cluster(2)
    assert cluster.run("all", FOUND) == {"worker1": [], "worker2": []}
    with tempfile.TemporaryDirectory() as folder:
        use_calls(cluster)
        use_pipeline()
        use_stop_button(cluster, Path(folder))
        use_stacks(cluster, Path(folder))
        lose_worker(cluster)
    workers = [cluster.pid(name) for name in cluster.workers]
    print(json.dumps([*workers, psutil.Process(workers[0]).ppid()]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
