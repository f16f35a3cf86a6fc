"""Workers of each kind end in order at each kind of end: their exit handlers run."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
from sizes import long
from worlds import PATIENCE, stop, until

import rpcbench
from rpcbench.base.conditions import Condition
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import ShutdownError
from rpcbench.base.futures import Future
from rpcbench.launch import command, fork_client, ranks
from rpcbench.launch.actions import Actions
from rpcbench.launch.base import UNKNOWN, Handle, ProcessHandle, exit_status_text, wait_or_terminate

KINDS: dict[str, dict[str, Any]] = {
    "fork": {"start": "fork"},
    "spawn": {"start": "spawn"},
    "kernel": {"kind": "kernel"},
    "command": {"launcher": "command", "options": {"template": "{cmd}"}},
    "torchrun": {"launcher": "torchrun"},
}
EACH = ["fork", *long("spawn", "kernel", "command", "torchrun")]
LAST_DEEDS = """
import atexit, logging.handlers, os, time, weakref
from pathlib import Path
class Thing: pass
thing = Thing()
weakref.finalize(thing, Path(folder, f"{name}.finalized").touch)
log = logging.handlers.MemoryHandler(100, target=logging.FileHandler(Path(folder, f"{name}.log")))
logging.getLogger("theirs").addHandler(log)
logging.getLogger("theirs").warning("the last record")
def last():
    time.sleep(0.3)
    Path(folder, f"{name}.exited").touch()
atexit.register(last)
"""


def prepare(cluster: rpcbench.Cluster, folder: Path) -> None:
    for name in cluster.workers:
        cluster.run(name, LAST_DEEDS, push={"folder": str(folder), "name": name})


def deeds(folder: Path) -> set[str]:
    """The traces of the exit handlers of workers."""
    logs = [path for path in folder.glob("*.log") if "the last record" in path.read_text()]
    return {path.name for path in (*folder.glob("*.exited"), *folder.glob("*.finalized"), *logs)}


def all_of(*names: str) -> set[str]:
    return {f"{name}.{deed}" for name in names for deed in ("exited", "finalized", "log")}


@pytest.mark.process
@pytest.mark.parametrize("kind", EACH)
def test_exit_handlers_run_at_scale_restart_and_shutdown(no_leaks: None, kind: str, tmp_path: Path) -> None:
    with rpcbench.Cluster(3, grace=25.0, **KINDS[kind]) as cluster:
        prepare(cluster, tmp_path)
        if not cluster.inseparable:
            cluster.scale(2)
            assert deeds(tmp_path) == all_of("worker3")
            cluster.restart("worker1")
            assert deeds(tmp_path) == all_of("worker1", "worker3")
    assert deeds(tmp_path) >= all_of("worker2")
    assert cluster.inseparable == "" or deeds(tmp_path) == all_of("worker1", "worker2", "worker3")


@pytest.mark.process
@pytest.mark.parametrize("kind", EACH)
def test_exit_handlers_run_when_the_notebook_is_terminated(kind: str, tmp_path: Path) -> None:
    program = f"""
        import os, signal, sys
        sys.path[:0] = {sys.path!r}
        from pathlib import Path
        import rpcbench
        from test_stopping import KINDS, prepare
        cluster = rpcbench.Cluster(2, grace=25.0, **KINDS[{kind!r}])
        prepare(cluster, Path({str(tmp_path)!r}))
        os.kill(os.getpid(), signal.SIGTERM)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGTERM
    until(lambda: deeds(tmp_path) == all_of("worker1", "worker2"), "the last deeds")


@pytest.mark.process
@pytest.mark.parametrize("kind", ["fork", "kernel"])
def test_shutdown_interrupts_the_running_cell_and_cancels_a_queued_one(
    no_leaks: None, kind: str, tmp_path: Path
) -> None:
    code = "import time; from pathlib import Path\ntry:\n    Path(begun).touch()\n    time.sleep(600)\n"
    code += "finally:\n    Path(begun + '.ended').touch()"
    failures: list[BaseException] = []

    def run(cell: str, begun: Path) -> None:
        try:
            cluster.run("worker1", cell, push={"begun": str(begun)})
        except BaseException as error:
            failures.append(error)

    with rpcbench.Cluster(1, **KINDS[kind]) as cluster:
        first = threading.Thread(target=run, args=(code, tmp_path / "first"))
        first.start()
        until((tmp_path / "first").exists, "the cell to begin")
        second = threading.Thread(target=run, args=(code, tmp_path / "second"))
        second.start()
        until(lambda: cluster.watched()[0].calls == 2, "the second cell to wait")
    first.join()
    second.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "first.ended"]
    assert len(failures) == 2


@pytest.mark.process
@pytest.mark.parametrize("kind", EACH)
def test_shutdown_names_workers_that_do_not_end_in_time(no_leaks: None, kind: str) -> None:
    cluster = rpcbench.Cluster(2, grace=1.0, **KINDS[kind])
    cluster.run("worker2", "import atexit, time; atexit.register(time.sleep, 600)")
    with pytest.warns(RuntimeWarning, match=r"worker2 had not ended 1 s after being asked to, and w.* terminated"):
        cluster.shutdown()


@pytest.mark.process
def test_scale_and_restart_name_a_worker_that_does_not_end_in_time(no_leaks: None) -> None:
    never = "import atexit, time; atexit.register(time.sleep, 600)"
    with rpcbench.Cluster(2, grace=0.2) as cluster:
        cluster.run("all", never)
        with pytest.warns(RuntimeWarning, match="worker1 had not ended"):
            cluster.restart("worker1")
        assert cluster.run("worker1", "'atexit' in globals()") is False
        with pytest.warns(RuntimeWarning, match="worker2 had not ended"):
            cluster.scale(1)
        assert cluster.workers == ["worker1"] and cluster.lost == []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a loaded machine 0.2 s are too few for any worker
            cluster.shutdown()


@pytest.mark.parametrize("grace", [-1.0, float("inf"), float("nan")])
def test_an_invalid_grace_is_refused(grace: float) -> None:
    with pytest.raises(ValueError, match="workers have between 0 and 86,400 seconds to end"):
        rpcbench.Cluster(1, grace=grace)


class Fake:
    """A handle whose worker ends by itself, by SIGTERM, or by SIGKILL only."""

    def __init__(self, name: str, changes: Condition, ends_by: str = "") -> None:
        self.name, self.changes, self.ends_by = name, changes, ends_by
        self.asked: list[str] = []
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def _end(self, by: str) -> None:
        self.asked.append(by)
        if self.ends_by == by:
            self.status = 0
            self.changes.notify_all()

    def terminate(self) -> None:
        self._end("terminate")

    def kill(self) -> None:
        self._end("kill")


class Interrupting(Fake):
    """One that Ctrl-C follows soon after the first look at it."""

    looks = 0

    def poll(self) -> int | None:
        self.looks += 1
        if self.looks == 1:
            threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        return super().poll()


def see_to(*handles: Fake, grace: float = 0.05) -> list[str]:
    def running() -> list[Any]:
        return [handle for handle in handles if handle.poll() is None]

    return wait_or_terminate(running, handles[0].changes, grace)


def test_stopped_waits_and_then_sends_sigterm_and_sigkill() -> None:
    changes = Condition()
    quick, late, stubborn = (Fake(*of) for of in (("a", changes), ("b", changes, "terminate"), ("c", changes, "kill")))
    threading.Timer(0.01, quick._end, [""]).start()
    assert see_to(quick, late, stubborn, grace=2.0) == ["b", "c"]
    assert (quick.asked, late.asked, stubborn.asked) == ([""], ["terminate"], ["terminate", "kill"])


def test_ctrl_c_ends_the_wait_and_terminates_the_workers() -> None:
    worker = Interrupting("a", Condition(), "terminate")
    with pytest.raises(KeyboardInterrupt):
        see_to(worker, grace=600.0)
    assert worker.status == 0


# -- logs, kills and failed starts
@pytest.mark.process
@pytest.mark.parametrize("kind", ["fork", *long("kernel", "command")])
def test_the_log_of_a_restarted_worker_has_no_output_of_its_predecessor(no_leaks: None, kind: str) -> None:
    crash = "import ctypes; ctypes.string_at(0)"
    later = "|its connection closed" if kind == "command" else ""  # a command may end later than its connection
    with rpcbench.Cluster(1, **KINDS[kind]) as cluster:
        with pytest.raises(rpcbench.WorkerLostError, match=f"Segmentation fault{later}"):
            cluster.run("worker1", crash)
        until(lambda: "Segmentation fault" in cluster.log("worker1"), "the last words")
        cluster.restart("worker1")
        assert cluster.log("worker1") == ""
        with pytest.raises(rpcbench.WorkerLostError, match=f"SIGKILL{later}") as told:
            cluster.run("worker1", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert "Segmentation" not in str(told.value) and "Segmentation" not in cluster.log("worker1")
        cluster.restart("worker1")
        assert cluster.run("worker1", "1 + 1") == 2


@pytest.mark.process
def test_workers_can_end_and_start_while_the_fork_server_is_stopped(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "_HANG_SECONDS", 0.3)
    with rpcbench.Cluster(3, grace=0.0) as cluster:
        hung = cluster._launcher._working_server()  # type: ignore[attr-defined]
        stop(hung.pid)
        try:
            cluster.kill("worker1")
            assert cluster.lost == ["worker1"]
            cluster.restart("worker1")
            cluster.restart("worker2")
            assert cluster.run("all", "1 + 1") == {"worker1": 2, "worker2": 2, "worker3": 2}
        finally:
            os.kill(hung.pid, signal.SIGCONT)


@pytest.mark.process
def test_kill_ends_the_worker_of_a_command_by_a_message(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # this process does not kill the command
    monkeypatch.setattr(command._Command, "_end_command", lambda command: None)
    with rpcbench.Cluster(1, grace=60.0, **KINDS["command"]) as cluster:
        cluster.kill("worker1")
        assert cluster.lost == ["worker1"]


@pytest.mark.process
def test_a_failed_scale_leaves_no_new_worker_and_can_be_repeated(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rpcbench.Cluster(1) as cluster:
        meet = cluster._assign_ranks

        def fail(*_: object) -> dict[str, Future[None]]:
            raise rpcbench.RpcError("they have joined, and then this")

        monkeypatch.setattr(cluster, "_assign_ranks", fail)
        with pytest.raises(rpcbench.RpcError, match="and then this"):
            cluster.scale(3)
        assert (cluster.workers, cluster.lost) == (["worker1"], [])
        monkeypatch.setattr(cluster, "_assign_ranks", meet)
        cluster.scale(3)
        assert cluster.run("all", "1 + 1") == {"worker1": 2, "worker2": 2, "worker3": 2}


RANKS = "import os\n[os.environ[each] for each in ('RANK', 'WORLD_SIZE', 'MASTER_PORT')]"


@pytest.mark.process
@pytest.mark.parametrize("kind", ["fork", *long("command")])
def test_a_worker_that_does_not_respond_holds_up_no_start_of_another(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with rpcbench.Cluster(2, **KINDS[kind]) as cluster:
        pid = cluster.pid("worker1")
        stop(pid)
        try:
            monkeypatch.setattr(ranks, "_RESPONSE_SECONDS", 0.5)
            with pytest.warns(RuntimeWarning, match="worker1.* did not respond"):  # others may be late, too
                cluster.restart("worker2")
            with pytest.warns(RuntimeWarning, match="worker1.* did not respond"):
                cluster.scale(3)
            assert cluster.workers == ["worker1", "worker2", "worker3"]
            assert cluster.rpc_sync("worker2", rpcbench.rpc.rpc_sync, ("worker3", max, (3, 4))) == 4
        finally:
            os.kill(pid, signal.SIGCONT)
        monkeypatch.undo()
        if kind == "command":  # there worker1 says where the ranks meet
            cluster.restart("worker2")
        until(lambda: len({port for *_, port in cluster.run("all", RANKS).values()}) == 1)
        assert [place[:2] for place in cluster.run("all", RANKS).values()] == [["0", "3"], ["1", "3"], ["2", "3"]]


def test_a_rank_of_an_earlier_generation_that_comes_late_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks._Latest, "generation", 8)
    monkeypatch.setattr(ranks, "address_here", lambda: "127.0.0.1")
    monkeypatch.setenv("RANK", "3")
    ranks.set_rank({"RANK": "1"}, "worker2 joined", 7)
    assert os.environ["RANK"] == "3"


@pytest.mark.parametrize(
    ("status", "text"),
    [(3, "exit code 3"), (-9, "killed by SIGKILL"), (-37, "killed by signal 37"), (UNKNOWN, "exit status unknown")],
)
def test_each_exit_status_has_a_text(status: int, text: str) -> None:
    assert exit_status_text(status) == text


def test_a_handle_keeps_and_reports_its_first_exit_status(tmp_path: Path) -> None:
    told: list[int] = []
    handle = ProcessHandle("worker1", tmp_path / "log", lambda which: None, lambda handle, status: told.append(status))
    handle.process_created(1)
    handle.process_ended(-9)
    handle.process_ended(0)
    assert (handle.poll(), told) == (-9, [-9])


@pytest.mark.process
def test_a_start_that_fails_leaves_a_restarted_worker_lost_and_a_new_one_unknown(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rpcbench.Cluster(2) as cluster:
        monkeypatch.setattr(cluster._launcher, "_working_server", _no_fork_server)
        with pytest.raises(rpcbench.RpcError, match="no fork_server"):
            cluster.restart("worker2")
        assert (cluster.workers, cluster.lost) == (["worker1"], ["worker2"])
        with pytest.raises(rpcbench.RpcError, match="no fork_server"):
            cluster.scale(4)
        assert (cluster.workers, cluster.lost) == (["worker1"], ["worker2"])
        monkeypatch.undo()
        cluster.scale(3)
        assert cluster.workers == ["worker1", "worker2", "worker3"] and cluster.lost == []


def _no_fork_server() -> None:
    raise rpcbench.RpcError("no fork_server")


@pytest.mark.process
def test_scale_during_and_after_shutdown_raises_shutdown_error(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = rpcbench.Cluster(1)
    launch, close, launched = cluster._launch_workers, cluster._launcher.close, threading.Event()

    def late(configs: list[WorldConfig]) -> list[Handle]:
        ending.start()
        until(lambda: cluster._ended, "the end to begin")
        try:
            return launch(configs)
        finally:
            launched.set()

    ending = threading.Thread(target=cluster.shutdown)
    monkeypatch.setattr(cluster, "_launch_workers", late)
    monkeypatch.setattr(cluster._launcher, "close", lambda: (launched.wait(PATIENCE), close()))
    with pytest.raises(ShutdownError, match="this cluster is shut down"):
        cluster.scale(3)
    ending.join()
    with pytest.raises(ShutdownError, match="this cluster is shut down"):
        cluster.scale(3)


@pytest.mark.process
def test_scale_with_too_few_descriptors_fails_before_any_start(no_leaks: None) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with rpcbench.Cluster(1) as cluster:
        there = psutil.Process().num_fds()
        resource.setrlimit(resource.RLIMIT_NOFILE, (there + 10, limit[1]))
        try:
            with pytest.raises(rpcbench.RpcError, match=r"to start 4 workers opens about 24 in .* may open \d+ more"):
                cluster.scale(5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert (cluster.workers, cluster.lost) == (["worker1"], [])


@pytest.mark.process
def test_a_call_says_that_a_click_on_stop_has_ended_it(no_leaks: None) -> None:
    cluster = rpcbench.Cluster(1)
    try:
        call = cluster.rpc_async("worker1", time.sleep, (60,))
        cluster.agent.part(Actions).begin_action("stop", "all").result(60)
        with pytest.raises(ShutdownError, match=r"^a click on Stop has stopped the cluster while this ran$"):
            call.wait()
    finally:
        cluster.shutdown()
