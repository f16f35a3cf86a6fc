"""Clusters of real processes: their calls, losses and ends, which leave nothing behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from launch_bench import gone
from sizes import long
from worlds import PATIENCE, cluster_fixture, stop, until

import rpcbench
from rpcbench.base.errors import (
    ConnectionLostError,
    RpcError,
    SerializationError,
    ShutdownError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpcbench.launch.process import ProcessLauncher
from rpcbench.rpc import RRef, remote, rpc_sync
from rpcbench.transport import stream

pytestmark = pytest.mark.process
cluster = cluster_fixture(2)  # two workers, for tests that leave the cluster as it was


def test_calls_run_in_the_processes_of_the_named_workers(cluster: rpcbench.Cluster) -> None:
    assert cluster.workers == ["worker1", "worker2"]
    assert {cluster.rpc_sync(name, os.getpid) for name in cluster.workers} == {cluster.pid(n) for n in cluster.workers}
    assert torch.equal(cluster.rpc_sync("worker2", torch.add, (torch.ones(2), 1)), torch.full((2,), 2.0))
    assert rpcbench.cluster() is cluster and "worker1, worker2" in repr(cluster)


def test_the_device_maps_of_a_cluster_apply_to_all_members(no_leaks: None) -> None:
    with rpcbench.Cluster(2, device_maps={"worker2": {"cpu": "cpu"}}) as made:
        assert made.rpc_sync("worker1", rpc_sync, ("worker2", torch.add, (torch.ones(2), 1))).tolist() == [2, 2]
        said = made.agent.machine.read_node(lambda node: [m.devices.maps for m in node.members.members.values()])
        assert said == [(("worker2", "cpu", "cpu"),)] * 3
    with pytest.raises(ValueError, match="source devices with invalid indices in its device map for worker1: cuda:99"):
        rpcbench.Cluster(1, device_maps={"worker1": {"cuda:99": "cpu"}})


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def test_status_reports_the_state_the_calls_and_the_resources_of_each_worker(
    cluster: rpcbench.Cluster, tmp_path: Path
) -> None:
    future = cluster.rpc_async("worker1", wait_for_file, (str(tmp_path / "go"),))
    first, second = cluster.status()
    assert (first.name, first.pid, first.state, first.incarnation) == ("worker1", cluster.pid("worker1"), "ready", 0)
    assert (first.calls, second.calls) == (1, 0)
    assert first.uptime > 0 and first.memory is not None and 1 << 20 < first.memory < 1 << 30
    (tmp_path / "go").touch()
    future.wait()
    burn = "import time; until = time.process_time() + 0.3\nwhile time.process_time() < until: pass"
    cluster.rpc_sync("worker2", exec, (burn,))
    first, second = cluster.status()
    assert first.calls == 0 and second.cpu > first.cpu
    rows = json.loads(json.dumps(cluster.status().json()))["workers"]
    assert [(row["name"], row["pid"], row["state"], row["gpu"]) for row in rows] == [
        (each.name, each.pid, "ready", None) for each in (first, second)
    ]


def test_status_shows_a_stopped_worker_and_a_killed_one(no_leaks: None) -> None:
    with rpcbench.Cluster(2) as made:
        pid = made.pid("worker1")
        try:
            stop(pid)
            os.kill(made.pid("worker2"), signal.SIGKILL)
            until(lambda: made.status()[1].state == "killed by SIGKILL", "the news")
            first, second = made.status()
            assert first.state == "stopped" and (second.memory, second.uptime) == (None, 0.0)
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_cluster_stays_usable_after_bad_input(cluster: rpcbench.Cluster) -> None:
    with pytest.raises(UnknownWorkerError, match="worker9"):
        cluster.rpc_sync("worker9", os.getpid)
    with pytest.raises(UnknownWorkerError, match="worker9"):
        cluster.pid("worker9")
    with pytest.raises(SerializationError, match=r"args\[0\]"):
        cluster.rpc_sync("worker1", print, (threading.Lock(),))
    assert cluster.rpc_sync("worker1", max, (1, 2)) == 2


def test_two_clusters_can_run_at_once_and_refuse_each_others_rrefs(cluster: rpcbench.Cluster) -> None:
    with rpcbench.Cluster(1) as other:
        assert rpc_sync("worker1", os.getpid) == other.pid("worker1") != cluster.pid("worker1")
        foreign = remote("worker1", max, (1, 2))
        with pytest.raises(RpcError, match="another world"):
            cluster.rpc_sync("worker1", print, (foreign,))
    assert cluster.rpc_sync("worker1", max, (1, 2)) == 2


def test_scale_starts_and_stops_workers(cluster: rpcbench.Cluster) -> None:
    cluster.scale(3)
    assert cluster.workers == ["worker1", "worker2", "worker3"] and cluster.rpc_sync("worker3", max, (1, 2)) == 2
    cluster.scale(2)
    assert cluster.workers == ["worker1", "worker2"]
    with pytest.raises(WorkerLostError, match="worker3 is gone"):
        cluster.rpc_sync("worker3", max, (1, 2))


def test_a_killed_worker_is_named_with_its_signal_and_the_others_go_on(cluster: rpcbench.Cluster) -> None:
    for _ in range(3):
        theirs = cluster.rpc_async("worker2", _call_there, ("worker1",))
        until(lambda: cluster.rpc_sync("worker1", _stuck) == 1)
        mine = cluster.rpc_async("worker1", _forever)
        begin = time.monotonic()
        os.kill(cluster.pid("worker1"), signal.SIGKILL)
        for waiting in (mine, theirs):
            with pytest.raises(WorkerLostError, match=r"worker1 was lost before _forever had finished.*SIGKILL"):
                waiting.wait()
        assert time.monotonic() - begin < 5
        with pytest.raises(WorkerLostError, match=r"worker1 is gone \(its process ended \(killed by SIGKILL\)\)"):
            cluster.rpc_sync("worker1", max, (1, 2))
        assert repr(cluster) == "<Cluster of worker2; lost: worker1>"
        assert cluster.lost == ["worker1"]
        assert cluster.rpc_sync("worker2", max, (1, 2)) == 2
        cluster.restart("worker1")
        assert cluster.rpc_sync("worker2", _ask_there, ("worker1",)) == cluster.pid("worker1")


_waiting: list[None] = []


def _forever() -> None:
    _waiting.append(None)
    threading.Event().wait()


def _stuck() -> int:
    return len(_waiting)


def _call_there(name: str) -> None:
    rpc_sync(name, _forever)


def _ask_there(name: str) -> int:
    return rpc_sync(name, os.getpid)


def test_a_worker_that_exits_is_named_with_its_exit_code(cluster: rpcbench.Cluster) -> None:
    with pytest.raises(WorkerLostError, match=r"worker2 was lost before _exit had finished.*exit code 3"):
        cluster.rpc_sync("worker2", os._exit, (3,))
    cluster.scale(2)
    assert cluster.workers == ["worker1", "worker2"]


def test_the_error_of_a_lost_worker_ends_with_its_last_lines(cluster: rpcbench.Cluster) -> None:
    code = "import os\nfor n in range(20):\n    os.write(2, b'line %d\\n' % n)\nos._exit(3)"
    with pytest.raises(WorkerLostError, match=r"(?s)exit code 3.*its last output:.*line 19"):
        cluster.rpc_sync("worker1", exec, (code,))
    cluster.restart("worker1")


class Leaving:
    """A worker's handle; once it is looked at, `scale` has ended another worker."""

    def __init__(self, handles: dict[str, Any], other: str) -> None:
        self._handle, self._handles, self._other = handles["worker1"], handles, other

    def poll(self) -> int | None:
        self._handles.pop(self._other, None)
        return self._handle.poll()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def test_a_look_at_the_workers_is_not_disturbed_by_scale(
    cluster: rpcbench.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for look in (cluster.watched, lambda: cluster.lost, cluster.status):
        handles: dict[str, Any] = dict(cluster._handles)
        handles["worker1"] = Leaving(handles, "worker2")
        with monkeypatch.context() as patch:
            patch.setattr(cluster, "_handles", handles)
            look()
        assert "worker2" not in handles


def test_scale_lets_a_lost_worker_go(cluster: rpcbench.Cluster) -> None:
    cluster.scale(3)
    cluster.kill("worker3")
    assert cluster.lost == ["worker3"]
    cluster.scale(2)
    assert (cluster.workers, cluster.lost) == (["worker1", "worker2"], [])


def test_a_restarted_worker_has_no_values_of_its_predecessor(cluster: rpcbench.Cluster) -> None:
    kept: RRef[list[int]] = cluster.remote("worker1", list, ((1, 2),))
    assert kept.to_here() == [1, 2]
    cluster.rpc_sync("worker1", _waiting.extend, ([None] * 9,))
    before = cluster.pid("worker1")
    cluster.restart("worker1")
    assert cluster.pid("worker1") == cluster.rpc_sync("worker1", os.getpid) != before
    assert cluster.rpc_sync("worker1", _stuck) == 0
    with pytest.raises(WorkerLostError, match="was lost with the worker1 that held it; worker1 has been started again"):
        kept.to_here()
    for use in (lambda: cluster.rpc_sync("worker2", list, (kept,)), lambda: kept.rpc_sync().append(3)):
        with pytest.raises(WorkerLostError, match=r"its owner is lost|worker1 has been started again"):
            use()
    anew = cluster.remote("worker1", list, ((3,),))
    assert anew.to_here() == [3]


def test_a_forked_child_of_a_killed_worker_does_not_delay_the_loss(cluster: rpcbench.Cluster) -> None:
    """Like a child of a DataLoader, it inherits descriptors, and lives on when its parent is killed."""
    child, sockets = cluster.rpc_sync("worker1", _fork)
    try:
        assert sockets == []
        busy = cluster.rpc_async("worker1", _forever)
        os.kill(cluster.pid("worker1"), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            busy.wait()
        assert time.monotonic() - begin < 5 and not gone(child)
    finally:
        os.kill(child, signal.SIGKILL)
    cluster.restart("worker1")


def _fork() -> tuple[int, list[str]]:
    """Fork a child that sleeps in a session of its own; return its id and its sockets."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        targets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        os.write(write, "\n".join(target for target in targets if target.startswith("socket:")).encode())
        os.close(write)
        time.sleep(60)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        return child, told.read().split()


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_fork_ends_with_its_call_or_cell_and_its_error_is_not_the_last_output_of_the_worker(
    cluster: rpcbench.Cluster,
) -> None:
    deeds = {
        "return 1": 0, "raise ValueError('of the fork')": 1, "sys.exit(3)": 3, "sys.exit(1 << 40)": 0,
        "sys.stdout = sys.stderr = None": 0, "sys.stderr.close(); raise ValueError": 1,
    }  # fmt: skip
    for deed, status in deeds.items():
        exec(f"def do():\n    import sys\n    {deed}", scope := {})
        assert cluster.rpc_sync("worker1", _status_of_a_fork, (scope["do"],)) == status
    cluster.run("worker1", "import os\nif not (child := os.fork()):\n    raise ValueError('of the fork')")
    assert cluster.run("worker1", "waited(child)", push={"waited": _waited}) == 1
    log = _log_of(cluster, "worker1").read_text()
    assert log.count("of the fork") >= 2 and "closed epoll" not in log
    os.kill(cluster.pid("worker1"), signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="SIGKILL") as told:
        cluster.rpc_sync("worker1", _forever)
    assert "of the fork" not in str(told.value)
    cluster.restart("worker1")


def _status_of_a_fork(deed: Callable[[], object]) -> object:
    return _waited(child) if (child := os.fork()) else deed()


def _waited(child: int) -> int | None:
    """Return the exit status of a child; kill it, and return None, if it does not end."""
    deadline = time.monotonic() + PATIENCE / 2
    while time.monotonic() < deadline:
        if (done := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(done[1])
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _log_of(cluster: rpcbench.Cluster, name: str) -> Path:
    return Path(max(Path(cluster.agent.config.directory).glob(f"{name}.*.log"), key=os.path.getmtime))


def test_a_call_that_closes_all_descriptors_ends_with_an_error_and_the_worker_can_be_started_again(
    no_leaks: None,
) -> None:
    """The numbers of the closed descriptors are used anew, by any part of the process: the worker may serve or end."""
    with rpcbench.Cluster(1) as cluster:
        worker = psutil.Process(cluster.pid("worker1"))
        with pytest.raises((ConnectionLostError, WorkerLostError), match="before closerange had finished"):
            cluster.rpc_sync("worker1", os.closerange, (3, 1000))
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()  # the descriptors by which it would end are gone, too
        cluster.restart("worker1")
        assert cluster.rpc_sync("worker1", max, (1, 2)) == 2


def test_workers_of_a_killed_fork_server_are_lost_and_can_be_started_again(no_leaks: None) -> None:
    with rpcbench.Cluster(2) as cluster:
        server = psutil.Process(cluster.pid("worker1")).parent()
        busy = [cluster.rpc_async(name, _forever) for name in cluster.workers]
        assert server is not None
        server.kill()
        for future in busy:
            with pytest.raises(WorkerLostError, match="SIGKILL"):
                future.wait()
        cluster.scale(1)
        assert cluster.rpc_sync("worker1", max, (1, 2)) == 2


@pytest.mark.parametrize("n", [0, -1])
def test_a_cluster_without_workers_is_refused(cluster: rpcbench.Cluster, n: int) -> None:
    for wrong in (lambda: rpcbench.Cluster(n), lambda: cluster.scale(n)):
        with pytest.raises(ValueError, match="at least one worker"):
            wrong()


# -- Ctrl-C
@pytest.fixture
def driver(no_leaks: None, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver that waits in a call that never ends."""
    script = Path(__file__).with_name("interrupted.py")
    command = [sys.executable, str(script), "once", str(tmp_path / "sign")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        until(lambda: (tmp_path / "sign").exists())
        yield process


def test_ctrl_c_ends_the_wait_and_the_worker_goes_on(driver: subprocess.Popen[str]) -> None:
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.communicate(timeout=20)[0] == "interrupted 2\n"
    assert driver.returncode == 0


@pytest.mark.long
def test_ctrl_c_at_any_moment_of_a_call_leaves_nothing_behind(no_leaks: None) -> None:
    script = Path(__file__).with_name("interrupted.py")
    command = [sys.executable, str(script), "often", ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("nothing left after") and done.returncode == 0, done.stderr


@pytest.mark.long
def test_ctrl_c_at_any_moment_of_a_wait_for_workers_leaves_the_cluster_usable(no_leaks: None) -> None:
    script = Path(__file__).with_name("interrupted.py")
    command = [sys.executable, str(script), "waiting", ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("usable 2\n", 0), done.stderr


# -- ends
def test_shutdown_leaves_nothing_behind_and_can_be_repeated(no_leaks: None) -> None:
    made = rpcbench.Cluster(1)
    made.shutdown()
    made.shutdown()
    assert repr(made) == "<Cluster: shut down>"
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        made.rpc_sync("worker1", max, (1, 2))


def test_shutdown_ends_calls_in_flight_and_workers_that_do_not_answer(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_CLOSE_SECONDS", 0.2)
    made = rpcbench.Cluster(2, grace=0.5)
    busy = made.rpc_async("worker1", _forever)
    stop(made.pid("worker2"))
    stopped = made.rpc_async("worker2", len, (torch.ones(1 << 22),))
    begin = time.monotonic()
    with pytest.warns(RuntimeWarning, match="worker2 had not ended"):
        made.shutdown()
    assert time.monotonic() - begin < 10
    for future in (busy, stopped):
        with pytest.raises(ShutdownError, match="the cluster was stopped while this ran"):
            future.wait()


SCRIPT = """
import rpcbench, sys, time
cluster = rpcbench.Cluster(1)
kept = cluster.remote("worker1", bytes, (1000,))
kept.to_here()
busy = cluster.rpc_async("worker1", time.sleep, (600,))
print("ready", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["sys.stdin.read()", *long("pass", "raise SystemExit(3)", "import os; os._exit(1)")])
def test_a_driver_leaves_nothing_however_it_ends(no_leaks: None, end: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(end=end)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with driver:
        assert driver.stdout is not None and driver.stdout.readline() == b"ready\n"
        if "stdin" in end:
            driver.kill()
        driver.wait(30)


def test_the_error_of_a_worker_that_cannot_start_quotes_its_output(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = functools.partial(ProcessLauncher, entry="no_such_module:main")
    monkeypatch.setattr("rpcbench.launch.process.ProcessLauncher", broken)
    with pytest.raises(RpcError, match="no_such_module"):
        rpcbench.Cluster(1, start="spawn")


def test_the_error_of_a_worker_that_fails_to_join_quotes_its_output(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = functools.partial(ProcessLauncher, entry="launch_entries:fail")
    monkeypatch.setattr("rpcbench.launch.process.ProcessLauncher", broken)
    with pytest.raises(RpcError, match=r"worker[12] ended \(exit code 1\) before it could serve:\n[\s\S]*the reason"):
        rpcbench.Cluster(2)


@pytest.mark.long
def test_spawned_workers_serve_calls_like_forked_ones(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCBENCH_START", "spawn")
    with rpcbench.Cluster(1) as cluster:
        assert psutil.Process(cluster.pid("worker1")).cmdline()[-1] == "worker1"
        assert cluster.rpc_sync("worker1", os.getpid) == cluster.pid("worker1")
