"""The real `torchrun … -m rpcbench.worker`: its workers wait for a notebook, which joins, leaves, and joins again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import addresses
import pytest
from netlab import Host, hosts
from worlds import until

import rpcbench
from rpcbench.base.errors import RpcError, UnknownWorkerError, WorkerLostError
from rpcbench.cells.targets import Targets
from rpcbench.launch import torchrun_worker
from rpcbench.launch.join import AttachedCluster
from rpcbench.notebook.cluster_magic import NONE_RUNS, Commands
from rpcbench.transport import run_dir

__all__ = ["hosts"]

pytestmark = pytest.mark.process

SECONDS = 60.0
PAGE = Path(__file__).parents[2] / "docs" / "past-one-machine.md"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TRAIN = """
import torch
import rpcbench.distributed as dist

dist.init_process_group("gloo")
inputs = torch.arange(8.0).reshape(4, 2)[dist.get_rank()::2]
wanted, found = inputs @ torch.tensor([1.0, -2.0]), torch.zeros(2)
for _ in range(2000):
    gradient = inputs.T @ (inputs @ found - wanted)
    dist.all_reduce(gradient)
    found -= 0.01 * gradient
"""
ANOTHER = """
import sys, rpcbench
with rpcbench.Cluster.join(sys.argv[1]) as cluster:
    print(cluster.run("worker2", "found.round().tolist()"))
"""
DIES = """
import sys, rpcbench
cluster = rpcbench.Cluster.join(sys.argv[1])
cluster.run("worker1", "kept = 7")
for number in range(2, 9):  # the stop button, pressed before these cells came there
    cluster.agent.notify(1, "interrupt", {"cell": number})
cluster.run("worker1", "print('runs', flush=True)\\nimport time\\nwhile True: time.sleep(0.01)")
"""


class Ranks(NamedTuple):
    """A torchrun that runs, and the address at which its workers wait."""

    torchrun: subprocess.Popen[str]
    url: str

    def over(self) -> int:
        """Wait for the end of torchrun; return its exit status."""
        return self.torchrun.wait(SECONDS)


def invited(torchrun: subprocess.Popen[str]) -> Ranks:
    """Read the output of torchrun until its workers report that they wait."""
    assert torchrun.stdout is not None
    for line in torchrun.stdout:
        if found := re.search(r"2 workers wait for a notebook: %cluster join (\S+) .*Cluster\.join\(\"\1\"\)", line):
            return Ranks(torchrun, found[1])
    raise AssertionError(f"torchrun ended with {torchrun.wait()}")


@pytest.fixture
def ranks(no_leaks: None, tmp_path: Path) -> Iterator[Ranks]:
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "rpcbench.worker"]
    with (tmp_path / "stderr").open("w") as log:
        torchrun = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    with torchrun:
        try:
            yield invited(torchrun)
        finally:
            torchrun.send_signal(signal.SIGINT)
            torchrun.wait(SECONDS)


def notebook(program: str, ranks: Ranks) -> subprocess.Popen[str]:
    """Start another notebook, in a process of its own."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program, ranks.url], stdout=pipe, stderr=pipe, text=True)


def forget(socket: str) -> None:
    """Remove the socket of a killed process, which other processes would remove only after a day."""
    next(Path(os.environ["XDG_RUNTIME_DIR"]).rglob(socket)).unlink()


def test_a_notebook_joins_trains_and_leaves_and_the_next_one_finds_its_variables(ranks: Ranks) -> None:
    with rpcbench.Cluster.join(ranks.url) as cluster:
        assert rpcbench.cluster() is cluster and cluster.workers == ["worker1", "worker2"]
        assert list(cluster["worker1"]) == [] and cluster.spmd(lambda: os.environ["RANK"]) == ["0", "1"]
        cluster.run("all", TRAIN)
        found = cluster.run("all", "found.round().tolist(), os.environ['RANK']", push={"os": os})
        assert found == {"worker1": ([1.0, -2.0], "0"), "worker2": ([1.0, -2.0], "1")}
        assert cluster.remote("worker2", max, (3, 5)).to_here() == 5
        refused = notebook(ANOTHER, ranks)
        told = refused.communicate(timeout=SECONDS)[1]
        assert "notebook has joined the workers at" in told and "only one can at a time" in told
    another = notebook(ANOTHER, ranks)
    assert another.communicate(timeout=SECONDS) == ("[1.0, -2.0]\n", "")


def test_a_join_that_fails_at_its_end_leaves_the_workers_to_the_next_one(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: AttachedCluster) -> None:
        raise OSError("too many open files")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="too many open files"):
        patch.setattr(AttachedCluster, "_answer_questions", fail)
        rpcbench.Cluster.join(ranks.url)
    with rpcbench.Cluster.join(ranks.url) as cluster:
        assert cluster.rpc_sync("worker1", max, (1, 2)) == 2


@pytest.mark.long
def test_a_killed_notebook_can_join_again(ranks: Ranks) -> None:
    """Its running cell can be interrupted by the worker's name, and its interrupts hit no cell of the new notebook."""
    killed = notebook(DIES, ranks)
    with killed:
        assert killed.stdout is not None and killed.stdout.readline() == "runs\n"
        killed.kill()
    forget("0.0.sock")
    with rpcbench.Cluster.join(ranks.url) as cluster:
        cluster.interrupt("worker2")  # idle: without effect
        cluster.interrupt("worker1")
        try:
            assert [cluster.run("worker1", "kept") for _ in range(3)] == [7, 7, 7]
        except KeyboardInterrupt:
            pytest.fail("a cell was taken for one that another notebook has interrupted")
        with pytest.raises(rpcbench.RpcTimeoutError):
            cluster.run("worker1", "import time\nwhile True: time.sleep(0.01)", timeout=0.5)
        assert cluster.run("all", "1 + 1") == {"worker1": 2, "worker2": 2}


def test_join_has_one_deadline_for_all_of_its_waits() -> None:
    def wait_for(count: int, timeout: float) -> None:
        raise RpcError(f"{count} members within {timeout:.2f} s")

    joining = AttachedCluster.__new__(AttachedCluster)
    slow = SimpleNamespace(wait_or_cancel=lambda: time.sleep(0.1) or 2)  # longer than the deadline
    machine = SimpleNamespace(read_node=lambda question: 1)
    joining.agent = SimpleNamespace(machine=machine, call=lambda *to, **how: slow, wait_for=wait_for)  # type: ignore[assignment]
    with pytest.raises(RpcError, match=r"3 members within 0\.01 s"):
        joining._await_workers(time.monotonic() + 0.05)


@pytest.mark.long
def test_a_notebook_can_use_and_leave_workers_that_only_torchrun_can_restart(ranks: Ranks) -> None:
    bound: list[object] = []
    do = Commands(Targets(), bound.append).run_action
    assert do("join", [ranks.url]) == (
        "2 workers: worker1, worker2. %%remote worker1 runs a cell there, %cluster stop leaves them."
    )
    (cluster,) = bound
    assert isinstance(cluster, AttachedCluster)
    rows = do("status", [])
    assert [(row.name, row.state, row.pid == cluster.pid(row.name)) for row in rows] == [
        ("worker1", "ready", True), ("worker2", "ready", True)
    ]  # fmt: skip
    for refused in (["scale", "3"], ["restart", "worker1"], ["logs"]):
        with pytest.raises(RpcError, match="torchrun has started"):
            do(refused[0], refused[1:])
    with pytest.raises(RpcError, match="its output outside cells goes to torchrun's output"):
        cluster.find_log("worker1")
    with pytest.raises(UnknownWorkerError, match="name worker3: did you mean worker"):
        cluster.interrupt("worker3")
    assert do("stop", []) == "This notebook has left its workers; they stay until torchrun ends."
    assert do("status", []) == NONE_RUNS and repr(cluster).endswith(": left>")
    do("join", [ranks.url])
    ranks.torchrun.send_signal(signal.SIGTERM)
    assert ranks.over() == 1
    until(lambda: rpcbench.cluster().lost == ["worker1", "worker2"])
    assert "torchrun has ended it (SIGTERM)" in str(do("status", []))
    assert do("list", []) == NONE_RUNS  # a notebook without workers may join or start others
    with pytest.raises(RpcError, match=rf"no workers answer at {ranks.url}: check that"):
        AttachedCluster(ranks.url, timeout=0.5)


@pytest.mark.long
def test_a_killed_rank_is_reported_as_lost_and_torchrun_ends_the_other(ranks: Ranks) -> None:
    with rpcbench.Cluster.join(ranks.url) as cluster:
        waits = [cluster.rpc_async(name, time.sleep, (SECONDS,), timeout=0) for name in cluster.workers]
        cluster.kill("worker2")
        forget("2.0.sock")
        with pytest.raises(WorkerLostError, match="worker2 was lost"):
            waits[1].wait()
        with pytest.raises(WorkerLostError, match=r"worker1 was lost.*torchrun has ended it \(SIGTERM\)"):
            waits[0].wait()
        assert ranks.over() == 1
        until(lambda: cluster.lost == ["worker1", "worker2"])


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_busy_workers_end_with_torchrun(ranks: Ranks, number: signal.Signals, tmp_path: Path) -> None:
    """One is blocked in C, so Python calls no handler there; after SIGKILL the system ends the workers (SIGTERM). The
    other one ends in order."""
    last = "import atexit, time\natexit.register(lambda: (time.sleep(0.2), done.touch()))\nNone"
    deaf = "import ctypes\nlock, mutex = ctypes.CDLL(None).pthread_mutex_lock, bytes(64)\nlock(mutex)\nlock(mutex)"
    with rpcbench.Cluster.join(ranks.url) as cluster:
        cluster.run("worker2", last, push={"done": tmp_path / "done"})
        timer = threading.Timer(1.0, ranks.torchrun.send_signal, (number,))
        timer.start()
        with pytest.raises(WorkerLostError, match=r"worker1.*torchrun has ended it \(SIG(INT|TERM)\)"):
            cluster.run("worker1", deaf)
        timer.join()
        assert ranks.over() == (1 if number == signal.SIGINT else -number)
        until((tmp_path / "done").exists, "the last deed of worker2")


@pytest.mark.long
def test_a_terminated_fork_of_a_cell_does_not_end_its_worker(ranks: Ranks) -> None:
    """The fork does not share the worker's handling of signals."""
    code = "import multiprocessing, time\nchild = multiprocessing.get_context('fork').Process(target=time.sleep, "
    code += "args=(600,))\nchild.start()\nchild.terminate()\nchild.join(60)\nchild.exitcode"
    with rpcbench.Cluster.join(ranks.url) as cluster:
        assert cluster.run("all", code) == {"worker1": -signal.SIGTERM, "worker2": -signal.SIGTERM}
        assert cluster.run("all", "1 + 1") == {"worker1": 2, "worker2": 2}


@pytest.mark.long
def test_workers_of_torchrun_serve_on_two_hosts_over_tls(
    hosts: tuple[Host, Host], no_leaks: None, tmp_path: Path
) -> None:
    """Rank 0 is on one host, rank 1 and the notebook on the other."""
    here, there = hosts
    run_dir.make_secret(tmp_path / "secret")
    env = {"RPCBENCH_SECRET_FILE": f"{tmp_path}/secret"}  # the name of each host is an address of loopback there
    torchrun = tmp_path / "torchrun.py"
    torchrun.write_text("from torch.distributed.run import main\nmain()")
    (line,) = re.findall(r"^torchrun (--nnodes 2 .*)$", PAGE.read_text(), re.MULTILINE)
    asked = line.replace("10.0.0.1", here.address).replace("--nproc-per-node 4", "--nproc-per-node 1")
    running = [
        host.start(torchrun, *asked.replace("$NODE", str(node)).split(), env=env) for node, host in enumerate(hosts)
    ]
    (program := tmp_path / "notebook.py").write_text(f"TRAIN = {TRAIN!r}\n{ELSEWHERE}")
    try:
        ranks = invited(running[0])
        assert ranks.url == f"tcp://{here.address}:29501"
        unfound = {**env, "RPCBENCH_BIND": "127.0.0.1"}  # it can connect; no worker of another host can connect to it
        told = there.start(program, ranks.url, env=unfound).communicate(timeout=SECONDS)
        assert told[0].splitlines() == ["[1.0, -2.0]", "ready ready", "True"], told
        last = there.start(program, ranks.url, "stays", env=env)
        assert last.stdout is not None and last.stdout.readline() == "stays\n"
        running[0].send_signal(signal.SIGINT)
        assert "worker1 is gone (torchrun has ended it (SIGINT))" in last.communicate(timeout=SECONDS)[0]
    finally:
        for each in running:
            each.send_signal(signal.SIGINT)
        for each in running:
            each.communicate(timeout=SECONDS)


ELSEWHERE = """
import sys, rpcbench
from rpcbench.transport.hosts import host_id

with rpcbench.Cluster.join(sys.argv[1]) as cluster:
    if sys.argv[2:] == ["stays"]:
        print("stays", flush=True)
        cluster.agent.links.closing.wait(30)
        try:
            cluster.run("worker1", "1")
        except rpcbench.WorkerLostError as error:
            print(error)
    else:
        cluster.run("all", TRAIN)
        print(cluster.run("worker1", "found.round().tolist()"))
        print(*(row.state for row in cluster.status()))
        print(cluster.rpc_sync("worker2", host_id) == host_id() != cluster.rpc_sync("worker1", host_id))
"""


@pytest.mark.long
def test_the_commands_of_the_documentation_lead_to_the_same_address(no_leaks: None) -> None:
    """The lines of docs/past-one-machine.md, with another port."""
    (line,) = re.findall(r"^torchrun (--nproc-per-node .*)$", PAGE.read_text(), re.MULTILINE)
    joins = re.findall(r"^%cluster join (\S+)$", PAGE.read_text(), re.MULTILINE)
    with addresses.ports(2) as port:
        asked = line.replace("29500", str(port)).split()
        with subprocess.Popen([*TORCHRUN, *asked], stdout=subprocess.PIPE, text=True) as torchrun:
            try:
                assert joins[0].replace("29501", str(port + 1)) == invited(torchrun).url
            finally:
                torchrun.send_signal(signal.SIGINT)


# -- in this process
def test_the_meeting_place_depends_on_the_hosts_and_the_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On one host it is local; with a secret, or on several hosts, rank 0 listens at its address, beside the store."""
    given = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "box", "MASTER_PORT": "29500"}
    for name, value in {**given, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RPCBENCH_SECRET_FILE", "RPCBENCH_MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert torchrun_worker.is_torchrun_rank() and torchrun_worker.rendezvous_url() == "tcp://localhost:29501"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert torchrun_worker.rendezvous_url() == "tcp://box:29501"
    monkeypatch.setenv("RPCBENCH_MASTER_PORT", "29700")
    assert torchrun_worker.rendezvous_url() == "tcp://box:29700"
    run_dir.make_secret(tmp_path / "secret")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RPCBENCH_SECRET_FILE", f"{tmp_path}/secret")
    assert torchrun_worker.rendezvous_url() == "tcp://box:29700"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not torchrun_worker.is_torchrun_rank()
    with pytest.raises(RuntimeError, match=r"torchrun --nproc-per-node 2 -m rpcbench\.worker"):
        torchrun_worker.torchrun_world_size()
