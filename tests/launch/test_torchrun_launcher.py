"""Workers that the real torchrun starts for a notebook: `Cluster(2, launcher="torchrun")`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch_bench import gone
from worlds import until

import rpcbench
from rpcbench.base.errors import RpcError, WorkerLostError

pytestmark = pytest.mark.process

SECONDS = 60.0
TOGETHER = """
import torch
import rpcbench.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
"""
DIES = """
import os, signal, rpcbench
cluster = rpcbench.Cluster(2, launcher="torchrun")
print("runs", flush=True)
cluster.run("all", "while True: pass")
"""


def test_workers_of_torchrun_serve_like_others_and_start_and_end_together(no_leaks: None) -> None:
    with rpcbench.Cluster(2, launcher="torchrun") as cluster:
        cluster.run("all", TOGETHER)
        assert cluster.run("all", "total.item(), __name__") == {
            "worker1": (11.0, "__main__"), "worker2": (11.0, "__main__")
        }  # fmt: skip
        secret, directory = cluster.agent.config.secret.hex(), Path(cluster.agent.config.directory)
        shown = [psutil.Process(cluster.pid(name)) for name in cluster.workers]
        assert secret not in str([(process.cmdline(), process.environ()) for process in shown + shown[0].parents()[:1]])
        assert not any(secret in path.read_text() for path in directory.glob("*.log"))
        assert not [*directory.glob("*.json")]
        for parted in (lambda: cluster.restart("worker1"), lambda: cluster.scale(1), lambda: cluster.scale(3)):
            with pytest.raises(RpcError, match="torchrun starts its workers together and ends them together"):
                parted()
        cluster.interrupt("worker1")  # idle: without effect
        waits = cluster.rpc_async("worker1", time.sleep, (SECONDS,), timeout=0)
        cluster.kill("worker2")
        first = r"torchrun has ended it, as worker2 ended \(killed by SIGKILL\)"
        with pytest.raises(WorkerLostError, match=rf"^worker1 was lost before sleep had finished.*\n  {first}$"):
            waits.wait()
        until(lambda: cluster.lost == ["worker1", "worker2"])
        assert [row.state for row in cluster.status()] == ["killed by SIGTERM", "killed by SIGKILL"]
        cluster.scale(2)
        assert cluster.run("all", "1 + 1") == {"worker1": 2, "worker2": 2} and cluster.lost == []


@pytest.mark.long
def test_torchrun_listens_on_no_port_and_children_of_a_rank_end_with_it(no_leaks: None) -> None:
    """torchrun's own store would be open to each process that can reach this host."""
    with rpcbench.Cluster(2, launcher="torchrun") as cluster:
        there = [cluster.pid("worker1"), *(process.pid for process in psutil.Process(cluster.pid("worker1")).parents())]
        opened = [psutil.Process(pid).net_connections("tcp") for pid in there[: there.index(os.getpid())]]
        assert len(opened) == 2 and not [each for every in opened for each in every if each.status == "LISTEN"]
        child = cluster.run("worker1", "import subprocess\nsubprocess.Popen(['sleep', '600']).pid")
        cluster.kill("worker1")
        until(lambda: gone(child))


@pytest.mark.long
def test_a_killed_notebook_leaves_nothing_behind(no_leaks: None) -> None:
    with subprocess.Popen([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True) as notebook:
        assert notebook.stdout is not None and notebook.stdout.readline() == "runs\n"
        notebook.kill()


def test_the_error_of_a_failed_torchrun_quotes_its_output(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PET_MONITOR_INTERVAL", "nonsense"
    )  # torchrun reads options that its command lacks from such variables
    with pytest.raises(RpcError, match=r"torchrun ended before worker1 had started:\n(.|\n)*nonsense"):
        rpcbench.Cluster(2, launcher="torchrun")


@pytest.mark.long
@pytest.mark.parametrize(("entry", "told"), [("fail", "LookupError: the reason"), ("leave", "seven")])
def test_the_error_of_a_rank_that_cannot_serve_quotes_its_output(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch, entry: str, told: str
) -> None:
    monkeypatch.setattr("rpcbench.launch.torchrun.ENTRY", f"launch_entries:{entry}")
    with pytest.raises(RpcError, match=f"(?s)worker1 ended .*before it could serve:.*{told}"):
        rpcbench.Cluster(1, launcher="torchrun")
