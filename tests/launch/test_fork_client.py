"""The warm fork server: launchers share it, it is replaced if it is outdated, and it never outlives its notebook."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from launch_bench import SECONDS, Bench, gone, until

from rpcbench.launch import fork_client, fork_server
from rpcbench.launch.fork_server import ForkServer

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def nothing_left(leak_check):
    """As `no_leaks`; but these tests start fork servers of their own, so none is started for them."""
    with leak_check(warm=False):
        yield


STATES_ITS_VALUE = """
from launch_entries import answer

def main(config):
    answer(config, value={value})
"""


def lodger(tmp_path):
    """A launcher with one worker that stays, and the id of that worker's fork server."""
    made = Bench("fork", tmp_path)
    handle = made.start("idle")
    made.answer(handle)
    return made, made.fork_server_of(handle)


def test_later_launchers_share_the_warm_fork_server(tmp_path):
    first, server = lodger(tmp_path)
    first.launcher.close()
    assert not gone(server)
    second, found = lodger(tmp_path)
    third, shared = lodger(tmp_path)
    assert server == found == shared
    second.launcher.close()
    assert third.start("nothing").wait(SECONDS) == 0
    third.launcher.close()


def test_a_launcher_that_closes_ends_only_its_own_workers(tmp_path):
    staying, leaving = Bench("fork", tmp_path), Bench("fork", tmp_path)
    stays, stubborn = staying.start("idle"), leaving.start("stubborn")
    for bench, handle in ((staying, stays), (leaving, stubborn)):
        bench.answer(handle)
    leaving.launcher.close()
    assert stubborn.poll() == -signal.SIGKILL
    assert stays.poll() is None
    assert not leaving.directory.path.exists()
    assert staying.directory.path.exists()
    staying.launcher.close()
    assert stays.poll() == -signal.SIGTERM


@pytest.mark.long
def test_a_killed_warm_fork_server_is_replaced(tmp_path):
    first, server = lodger(tmp_path)
    first.launcher.close()
    os.kill(server, signal.SIGKILL)
    until(lambda: gone(server))
    second, found = lodger(tmp_path)
    assert found != server
    second.launcher.close()


def test_a_worker_has_the_directory_environment_and_path_of_its_start(tmp_path, monkeypatch):
    first, server = lodger(tmp_path)
    first.launcher.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("RPCBENCH_TEST", "later")
    monkeypatch.syspath_prepend("/another/place")
    second, found = lodger(tmp_path)
    said = second.answer(second.start("surroundings"))
    assert found == server
    assert said["cwd"] == str(elsewhere)
    assert said["environ"]["RPCBENCH_TEST"] == "later"
    assert said["sys_path"] == sys.path
    second.launcher.close()


def test_a_changed_variable_that_torch_reads_when_loaded_makes_a_new_fork_server(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, server = lodger(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    second, found = lodger(tmp_path)
    assert found != server
    assert second.answer(second.start("draw"))["threads"] == 2
    assert first.start("nothing").wait(SECONDS) == 0, "the first launcher keeps its own fork server"
    first.launcher.close()
    until(lambda: gone(server))
    second.launcher.close()


def test_a_worker_runs_the_new_text_of_a_changed_entry_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "edited_entry.py"
    values = []
    for value in (1, 2):
        source.write_text(STATES_ITS_VALUE.format(value=value))
        os.utime(source, (value, value))  # another second: compiled files of Python have no finer times
        bench = Bench("fork", tmp_path, entry="edited_entry:main")
        values.append(bench.answer(bench.start("any"))["value"])
        bench.launcher.close()
    assert values == [1, 2]


@pytest.mark.long
def test_each_worker_loads_the_modules_of_the_user_anew(tmp_path, monkeypatch):
    import rpcbench

    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "edited_module.py"
    found = []
    for value in (1, 2):
        source.write_text(f"def value(): return {value}{' ' * value}\n")
        with rpcbench.Cluster(1) as cluster:
            server = psutil.Process(cluster.pid("worker1")).ppid()
            found.append((cluster.rpc_sync("worker1", eval, ("__import__('edited_module').value()",)), server))
    assert [value for value, _ in found] == [1, 2]
    assert found[0][1] == found[1][1], "the fork server was warm"


NOTEBOOK = """
import os, sys
from rpcbench.launch import fork_client, process
process.warm("fork")
print(fork_client._ours._warm.pid, fork_client._ours._warm._run_directory.path, flush=True)
{then}
"""


def warm_notebook(then):
    script = textwrap.dedent(NOTEBOOK).format(then=then)
    notebook = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid, home = notebook.stdout.readline().split()
    return notebook, int(pid), Path(home)


def test_an_idle_fork_server_ends_with_a_killed_notebook():
    notebook, server, home = warm_notebook("sys.stdin.read()")
    until(lambda: psutil.Process(server).cmdline()[-1:] and home.exists())
    with notebook:
        notebook.kill()
    until(lambda: gone(server) and not home.exists())


def test_an_idle_fork_server_ends_with_a_notebook_that_exits():
    notebook, server, home = warm_notebook("")
    with notebook:
        assert notebook.wait(SECONDS) == 0
    until(lambda: gone(server) and not home.exists())


def test_a_fork_of_the_notebook_has_no_fork_server():
    then = "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint(fork_client._ours._warm, flush=True)"
    notebook, server, _ = warm_notebook(then)
    with notebook:
        assert notebook.stdout.readline() == "None\n", "in the fork"
        assert "ForkServerClient object" in notebook.stdout.readline()
    until(lambda: gone(server))


@pytest.mark.long
def test_stop_idle_ends_the_fork_server_and_the_next_launcher_gets_a_new_one(tmp_path):
    first, server = lodger(tmp_path)
    first.launcher.close()
    fork_client.stop_idle()
    assert gone(server)
    second, found = lodger(tmp_path)
    assert found != server
    second.launcher.close()


def test_a_fork_server_without_requests_imports_what_a_training_needs_and_starts_no_thread(tmp_path):
    first, server = lodger(tmp_path)
    client = first.launcher._working_server()
    until(lambda: any(file.endswith("torch/distributed/fsdp/__init__.py") for file in client._loaded))
    assert len(os.listdir(f"/proc/{server}/task")) == 1, "else a fork could inherit a lock that is held for ever"
    said = first.answer(first.start("modules"))
    assert said == {"late": ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"], "threads": 1}
    assert client.is_reusable()
    first.launcher.close()


def bare_server(late):
    """A fork server without a notebook, in this process."""
    server = ForkServer.__new__(ForkServer)
    server._mode, server._late, server._loaded = "fork", late, {}
    server._over, server._overdue, server._children = False, {}, {}
    return server


def test_a_late_import_comes_after_a_kill_and_a_quiet_time():
    server, rests = bare_server(["late"]), []
    server._overdue["directory"] = 0.0  # due
    server._selector = SimpleNamespace(select=lambda rest: rests.append(rest) or [])
    server._import_late = lambda: setattr(server, "_over", True)
    server._end_all = lambda: None
    assert server.serve_requests() is None
    assert rests == [0.0, fork_server._QUIET_SECONDS]


def test_a_fork_server_with_a_thread_of_a_late_import_forks_no_more(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    text = "import threading\nend = threading.Event()\nthread = threading.Thread(target=end.wait)\nthread.start()\n"
    (tmp_path / "late_with_thread.py").write_text(text)
    server, told = bare_server(["late_with_thread", "later"]), []
    server._send_reply = told.append
    monkeypatch.setattr(fork_server, "_share_pages", lambda: None)
    server._import_late()
    late = sys.modules.pop("late_with_thread")
    late.end.set()
    late.thread.join()
    assert (server._mode, server._late, len(told)) == ("spawn", [], 1)
    assert "importing late_with_thread started a thread" in capsys.readouterr().err


def test_take_any_returns_the_warm_fork_server(tmp_path):
    first, server = lodger(tmp_path)
    guardian = fork_client.take_any()
    assert guardian.pid == server
    first.launcher.close()
    fork_client.give_back(guardian)


def test_a_default_timeout_of_the_programs_sockets_does_not_end_the_connection_to_the_fork_server(tmp_path):
    fork_client.stop_idle()
    made = Bench("spawn", tmp_path)
    default = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)  # the server's first reply takes longer
    try:
        made.launcher._working_server()
    finally:
        socket.setdefaulttimeout(default)
    assert made.start("nothing").wait(SECONDS) == 0
    made.launcher.close()


def test_an_idle_fork_server_that_hangs_is_ended_when_another_one_replaces_it(monkeypatch):
    monkeypatch.setattr(fork_client, "_CLOSE_SECONDS", 0.2)
    hung = fork_client.take_any()
    fork_client.give_back(hung)
    hung.is_hung = True
    other = fork_client.take_any()
    assert other is not hung
    until(lambda: gone(hung.pid))  # it is killed, and not waited for long
    fork_client.give_back(other)
    fork_client.stop_idle()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="guarding needs Linux")
@pytest.mark.parametrize("end", ["of the guarded", "of the notebook"])
def test_a_guarded_process_ends_with_the_notebook_and_its_children_with_either(end):
    script = textwrap.dedent(
        """
        import subprocess, sys, time
        from rpcbench.launch import fork_client
        group = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
        guarded = subprocess.Popen([sys.executable, "-c", group], start_new_session=True, stdin=-1, stdout=-1)
        child = int(guarded.stdout.readline())
        fork_client.take_any().guard(guarded.pid, 0.2)
        print(guarded.pid, child, flush=True)
        input()
        guarded.kill()
        guarded.wait()
        input()
        """
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as notebook:
        guarded, child = map(int, notebook.stdout.readline().split())
        if end == "of the notebook":
            notebook.kill()
        else:
            notebook.stdin.write("\n")
            notebook.stdin.flush()
        until(lambda: gone(guarded) and gone(child))
        notebook.kill()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="guarding needs Linux")
def test_guard_returns_only_after_its_request_was_sent(monkeypatch):
    guardian, sent, gate = fork_client.take_any(), [], threading.Event()

    class Slow:
        makefile = guardian._channel.makefile  # of the reader, which may begin only now

        def sendall(self, data, channel=guardian._channel):
            assert gate.wait(SECONDS)
            sent.append(data)
            channel.sendall(data)

    with monkeypatch.context() as patch, subprocess.Popen(["sleep", "600"], start_new_session=True) as guarded:
        patch.setattr(guardian, "_channel", Slow())
        asking = threading.Thread(target=guardian.guard, args=(guarded.pid, 0.2))
        asking.start()
        asking.join(0.2)
        assert asking.is_alive() and sent == []
        gate.set()
        asking.join(SECONDS)
        assert not asking.is_alive() and f'"guard": {guarded.pid}'.encode() in sent[-1]
        guarded.kill()
    fork_client.give_back(guardian)
    fork_client.stop_idle()
    guardian.guard(guarded.pid, 0.2)  # without effect and without a wait: the fork server is gone


def test_a_fork_server_handles_the_last_requests_of_a_notebook_that_has_ended(tmp_path):
    """The first request fills one read, and names a notebook that has already ended."""
    notebook = subprocess.Popen([sys.executable, "-c", ""])
    notebook.wait()
    home, entered = tmp_path / "home", tmp_path / "entered"
    home.mkdir(), entered.mkdir()
    guarded = subprocess.Popen(["sleep", "600"], start_new_session=True)
    first = json.dumps({"prepare": "spawn", "notebook": notebook.pid, "pad": ""})
    padded = first[:-2] + "x" * ((1 << 16) - 1 - len(first)) + first[-2:] + "\n"
    requests = {"enter": str(entered)}, {"guard": guarded.pid, "grace": 0.2}
    later = "".join(json.dumps(request) + "\n" for request in requests)
    command = [sys.executable, "-P", str(fork_client._FORK_SERVER)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.sendall((padded + later).encode())
        try:
            subprocess.run([*command, str(home)], stdin=theirs, check=True, timeout=SECONDS)
            assert guarded.wait(SECONDS) == -signal.SIGKILL
            assert not entered.exists()
        finally:
            guarded.kill()
            guarded.wait()
