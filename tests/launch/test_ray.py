"""Workers in a Ray cluster of the user, with one node and three CPUs, started once for all tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch_bench import gone, until
from ray_here import MARKS, START, begun, free, groups, outposts, prepared, start

import rpcbench
from rpcbench.base.errors import CallCancelled, RpcError, WorkerLostError
from rpcbench.cells.runner import Cell, run_cell

pytestmark = MARKS

CPUS = 3
SECONDS = 60.0


@pytest.fixture(scope="module")
def session(leak_check):
    """A session of Ray that belongs to the user."""
    with prepared(leak_check):
        import ray

        begun(lambda: ray.init(num_cpus=CPUS, **START))
        until(lambda: free() == CPUS)  # Ray counts them a moment later
        yield


@pytest.fixture
def nothing_left(session):
    """Afterwards no more workers are left than before, Ray has as many CPUs as before, and still runs."""
    import ray

    before = there()
    yield
    settled(before)
    assert ray.is_initialized()


def there():
    """The numbers of free CPUs, of supervisors and of placement groups."""
    return free(), len(outposts()), len(groups())


def settled(wanted):
    """Wait until the numbers are these again; Ray counts with a delay."""
    with contextlib.suppress(AssertionError):
        until(lambda: there() == wanted, SECONDS)
    assert there() == wanted


@pytest.fixture(scope="module")
def pair(session):
    """Two workers, for tests that leave two workers."""
    with start(2) as made:
        yield made


def ask_other():
    return rpcbench.rpc.rpc_sync("worker2", max, (3, 5))


def test_workers_run_cells_and_call_each_other(pair):
    assert pair.run("all", "import os; os.getpid()") == {name: pair.pid(name) for name in pair.workers}
    assert pair.run("all", "os.getcwd()") == dict.fromkeys(pair.workers, os.getcwd())
    assert pair.run("worker1", "os.environ.get('PYTHONBREAKPOINT')") is None, (
        "breakpoint() keeps the setting of the user"
    )
    assert pair.rpc_sync("worker1", ask_other) == 5
    assert {row.name: (row.pid, row.state) for row in pair.status()} == {
        name: (pair.pid(name), "ready") for name in pair.workers
    }


def test_the_secret_is_on_no_command_line_and_in_no_environment(pair):
    secret = pair._config.secret.hex()
    for outpost in outposts():
        for process in (outpost, *outpost.parents()[:2], *outpost.children()):
            for shown in ("cmdline", "environ"):
                assert secret not in Path(f"/proc/{process.pid}/{shown}").read_text()
    assert len(outposts()) == 2


def test_an_interrupt_ends_a_running_cell(pair):
    asked = pair.rpc_async("worker1", run_cell, (Cell(1, "import time; time.sleep(100)"),))
    for _ in range(100):  # the cell may not have begun
        pair.interrupt("worker1")
        if asked.done():
            break
        time.sleep(0.1)
    with pytest.raises(CallCancelled, match="ended by KeyboardInterrupt"):
        asked.wait()
    assert pair.run("worker1", "1 + 1") == 2


def test_a_killed_worker_ends_with_its_children_and_restarts_in_its_placement_group(pair):
    (place,) = groups()
    child = pair.run("worker2", "import subprocess; subprocess.Popen(['sleep', '1000']).pid")
    pair.kill("worker2")
    assert pair.lost == ["worker2"]
    until(lambda: gone(child))
    pair.restart("worker2")
    assert pair.rpc_sync("worker1", ask_other) == 5
    assert groups() == [place]


def test_a_crashed_worker_is_reported_with_its_signal_and_output(pair):
    with pytest.raises(WorkerLostError, match=r"worker2 .*killed by SIGSEGV(.|\n)*string_at"):
        pair.run("worker2", "import ctypes; ctypes.string_at(0)")
    pair.restart("worker2")


def test_a_worker_ends_with_its_actor_and_its_log_has_the_reason_of_ray(pair):
    pid, actor = pair.pid("worker2"), pair._handles["worker2"].pid
    child = pair.run("worker2", "import subprocess; subprocess.Popen(['sleep', '1000']).pid")
    os.kill(actor, signal.SIGKILL)
    until(lambda: "worker2" in pair.lost)
    assert "The actor is dead because its worker process has died" in pair.log("worker2")
    assert "exit status unknown" in repr(next(row for row in pair.watched() if row.name == "worker2"))
    until(lambda: gone(pid) and gone(child))
    pair.restart("worker2")


def test_scale_starts_and_stops_workers_and_frees_their_cpus(pair):
    before = free()
    pair.scale(4)
    assert pair.run("all", "1 + 1") == dict.fromkeys([f"worker{i}" for i in (1, 2, 3, 4)], 2)
    assert [len(each["bundles"]) for each in groups()] == [2, 2]
    pair.scale(2)
    until(lambda: free() == before, SECONDS)


def test_an_interrupted_start_leaves_nothing(pair, monkeypatch):
    from rpcbench.launch import ray_launcher

    class Kept(ray_launcher._RayWorker):
        def __init__(self, config, *of):
            if config.name == "worker4":
                raise KeyboardInterrupt
            super().__init__(config, *of)

    before = there()
    monkeypatch.setattr(ray_launcher, "_RayWorker", Kept)
    with pytest.raises(KeyboardInterrupt):
        pair.scale(4)
    settled(before)
    assert pair.workers == ["worker1", "worker2"]


def test_a_request_for_too_many_cpus_is_refused_and_reserves_nothing(pair):
    before, there = free(), groups()
    with pytest.raises(RpcError, match=r"Ray found no place for worker1, .*worker7 in 1 s") as caught:
        start(7, patience=1)
    told = str(caught.value)
    assert "requested: 7 x {'CPU': 0.5}, PACK" in told
    assert f"'CPU': {float(CPUS)}" in told
    assert "PENDING" in told
    assert groups() == there
    until(lambda: free() == before, SECONDS)


def test_a_request_for_an_unknown_resource_is_refused_as_infeasible(pair):
    with pytest.raises(RpcError, match=r"INFEASIBLE(.|\n)*1 x {'CPU': 0.5, 'magic': 1}"):
        start(1, patience=1, resources={"magic": 1})


def test_invalid_options_are_refused(session):
    with pytest.raises(ValueError, match="strategy='ALONE' is not one of Ray's"):
        start(1, strategy="ALONE")
    with pytest.raises(ValueError, match="has to request a resource"):
        start(1, cpus=0)


def test_the_error_of_a_worker_that_cannot_start_quotes_its_output(nothing_left):
    nowhere = "203.0.113.7"
    with pytest.raises(RpcError, match=rf"worker1 on \S+ ended \(exit code 1\) before it could serve(.|\n)*{nowhere}"):
        start(1, runtime_env={"env_vars": {"RPCBENCH_BIND": nowhere}})


def test_the_session_of_the_user_outlives_a_cluster(nothing_left):
    with start(1) as cluster:
        assert cluster.run("worker1", "6 * 7") == 42


DIES = """
import sys, time, rpcbench
options = {"cpus": 0.5, "ray_address": sys.argv[1]}
cluster = rpcbench.Cluster(1, launcher="ray", options=options, address="127.0.0.1")
print(cluster.pid("worker1"), cluster.run("worker1", "import subprocess; subprocess.Popen(['sleep', '1000']).pid"))
sys.stdout.flush()
time.sleep(1000)
"""


def test_workers_end_with_a_killed_notebook(nothing_left):
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", DIES, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as notebook:
        worker, child = map(int, notebook.stdout.readline().split())
        assert not gone(worker) and not gone(child)
        notebook.kill()
    until(lambda: gone(worker) and gone(child))


def test_workers_end_with_the_session_of_ray(session):
    import ray

    cluster = start(1)
    pid = cluster.pid("worker1")
    ray.shutdown()
    try:
        until(lambda: cluster.lost == ["worker1"])
        until(lambda: gone(pid))
        with pytest.raises(RpcError, match="Ray was shut down"):
            cluster.restart("worker1")
    finally:
        cluster.shutdown()


class Sessions:
    """The part of Ray that handles sessions: each has a name of its own."""

    def __init__(self):
        self.begun, self.here = 0, ""

    def is_initialized(self):
        return bool(self.here)

    def init(self, **options):
        self.begun += 1
        self.here = f"session {self.begun}"

    def shutdown(self):
        self.here = ""

    def get_runtime_context(self):
        return SimpleNamespace(get_session_name=lambda: self.here, get_job_id=lambda: "01000000")


@pytest.fixture
def sessions(monkeypatch):
    pytest.importorskip("ray")
    from rpcbench.launch import ray_actor

    made = Sessions()
    monkeypatch.setattr(ray_actor, "ray", made)
    return made, ray_actor


@pytest.mark.parametrize("before", [None, "pudb.set_trace"])
def test_a_session_restores_the_breakpoint_variable(sessions, monkeypatch, before):
    ray, ours = sessions
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONBREAKPOINT", before)
    begin = ray.init

    def init(*words, **named):
        os.environ["PYTHONBREAKPOINT"] = "ray.util.rpdb._driver_set_trace"
        begin(*words, **named)

    monkeypatch.setattr(ray, "init", init)
    ours.release_session(ours.join_session(None))
    assert os.environ.get("PYTHONBREAKPOINT") == before


def test_a_session_of_launchers_ends_with_the_last_launcher(sessions):
    ray, ours = sessions
    first, second = ours.join_session(None), ours.join_session(None)
    ours.release_session(first)
    assert ray.here == "session 1"
    ours.release_session(second)
    assert not ray.here


def test_a_session_that_the_user_has_started_later_stays(sessions):
    ray, ours = sessions
    first = ours.join_session(None)
    ray.shutdown()
    ray.init()
    second = ours.join_session(None)
    ours.release_session(first)
    ours.release_session(second)
    assert ray.here == "session 2"


def test_a_launcher_of_an_earlier_session_does_not_end_a_later_one(sessions):
    ray, ours = sessions
    first = ours.join_session(None)
    ray.shutdown()
    second = ours.join_session(None)
    ours.release_session(first)
    assert ray.here == "session 2"
    ours.release_session(second)
    assert not ray.here
