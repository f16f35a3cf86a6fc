"""Real processes: the environment of a worker, the report of its end, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from launch_bench import SECONDS, SECRET, Bench, both, gone, until
from worlds import stop

from rpcbench.base.errors import RpcError, ShutdownError
from rpcbench.launch import fork_client
from rpcbench.launch.process import ProcessLauncher
from rpcbench.transport.run_dir import RunDirectory

pytestmark = pytest.mark.process


ENDS = {
    "nothing": (0, ""),
    "leave": (7, "leaving with seven"),
    "fail": (1, "LookupError: the reason"),
    "crash": (-signal.SIGSEGV, "Segmentation fault"),
}


def test_the_exit_status_and_the_last_output_of_a_worker_are_reported(shared):
    told = queue.SimpleQueue()
    handles = {task: shared.start(task, lambda *news: told.put((*news, news[0].poll()))) for task in ENDS}
    for task, (status, words) in ENDS.items():
        assert handles[task].wait(SECONDS) == status
        assert words in handles[task].last_words()
        assert stat.S_IMODE(handles[task].log.stat().st_mode) == 0o600
    news = [told.get(timeout=SECONDS) for _ in ENDS]
    assert sorted(news, key=lambda each: each[0].name) == [
        (handles[task], status, status) for task, (status, _) in sorted(ENDS.items())
    ]
    assert told.empty()


def test_a_worker_ends_by_kill_and_by_external_signals(shared):
    killed, terminated = shared.start("idle"), shared.start("idle")
    for handle in (killed, terminated):
        assert shared.answer(handle)["pid"] == handle.pid
        assert handle.poll() is None
    killed.kill()
    os.kill(terminated.pid, signal.SIGTERM)
    assert killed.wait(SECONDS) == -signal.SIGKILL
    assert terminated.wait(SECONDS) == -signal.SIGTERM
    killed.kill()
    killed.interrupt()


def test_wait_raises_timeout_error_at_its_limit(forked):
    handle = forked.start("idle")
    with pytest.raises(TimeoutError, match=handle.name):
        handle.wait(0.01)
    handle.kill()
    handle.wait(SECONDS)


def test_interrupt_reaches_the_handler_of_the_worker(shared):
    handle = shared.start("interruptible")
    shared.answer(handle)
    handle.interrupt()
    assert handle.wait(SECONDS) == 21


def test_a_worker_has_the_environment_of_its_caller_and_no_descriptors_of_siblings(shared, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RPCBENCH_TEST", "héllo\udcff")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.syspath_prepend("/somewhere/else")
    sibling = shared.start("idle")
    handle = shared.start("surroundings")
    born = shared.answer(handle)
    sibling.kill()
    assert born["cwd"] == str(tmp_path)
    assert born["environ"] == dict(os.environ)
    assert born["sys_path"] == sys.path
    assert born["main"] is None
    assert born["session"]
    assert born["interrupt_ignored"]
    assert born["defaults"] == [True, True]
    assert born["secret"] == SECRET.hex()
    assert born["descriptors"] == {"0": os.devnull, "1": str(handle.log), "2": str(handle.log)}


def test_sibling_workers_draw_different_random_numbers(forked):
    drawn = [forked.answer(forked.start("draw"))["numbers"] for _ in range(2)]
    assert all(one != other for one, other in zip(*drawn, strict=True))


def test_torch_has_one_thread_unless_the_caller_sets_omp_num_threads(shared, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plain = shared.start("draw")
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    asked = shared.start("draw")
    assert shared.answer(plain)["threads"] == 1
    assert shared.answer(asked)["threads"] == 2


def test_a_forked_worker_can_run_parallel_matmul_and_backward(forked):
    handles = [forked.start("train") for _ in range(2)]
    for handle in handles:
        assert forked.answer(handle) == {"threads": 2, "gradient": [512.0]}


def test_the_secret_is_on_no_command_line_and_in_no_environment(shared):
    handle = shared.start("idle")
    shared.answer(handle)
    for pid in (handle.pid, shared.fork_server_of(handle)):
        for file in ("cmdline", "environ"):
            seen = Path(f"/proc/{pid}/{file}").read_bytes()
            assert seen
            assert SECRET not in seen
            assert SECRET.hex().encode() not in seen
    handle.kill()


def test_children_of_a_killed_worker_end_with_it(forked):
    handle = forked.start("parent")
    child = forked.answer(handle)["child"]
    os.kill(handle.pid, signal.SIGKILL)
    assert handle.wait(SECONDS) == -signal.SIGKILL
    until(lambda: gone(child))


def test_workers_outlive_the_threads_that_started_them(forked):
    handles = []
    threads = [threading.Thread(target=lambda: handles.append(forked.start("idle"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len({forked.answer(handle)["pid"] for handle in handles}) == 4
    assert [handle.poll() for handle in handles] == [None] * 4
    for handle in handles:
        handle.kill()
        assert handle.wait(SECONDS) == -signal.SIGKILL


def test_an_exit_callback_that_starts_a_worker_is_logged_and_later_starts_work(forked, caplog):
    ended = threading.Event()

    def restart(handle, status):
        ended.set()
        forked.start("nothing")

    forked.start("nothing", restart)
    assert ended.wait(SECONDS)
    assert forked.start("nothing").wait(SECONDS) == 0
    assert "hand that to another thread" in caplog.text


@pytest.mark.parametrize("name", ["", "a/b", "nul\0", "worker1\n", "." * 300])
def test_a_worker_name_that_members_would_refuse_is_refused(bench, name):
    with pytest.raises(RuntimeError, match="Worker name must match"):
        bench.launcher.start(dataclasses.replace(bench.config("nothing"), name=name))


def test_an_unknown_start_mode_is_refused(monkeypatch):
    monkeypatch.setenv("RPCBENCH_START", "teleport")
    with pytest.raises(ValueError, match=r"teleport.*fork.*spawn"):
        ProcessLauncher(RunDirectory())


@both
def test_close_ends_all_workers_and_can_be_repeated(bench):
    handles = [bench.start("idle"), bench.start("stubborn"), bench.start("parent")]
    child = [bench.answer(handle) for handle in handles][2]["child"]
    bench.launcher.close()
    assert [handle.poll() for handle in handles] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM]
    until(lambda: gone(child))
    assert not bench.directory.path.exists()
    bench.launcher.close()
    with pytest.raises(ShutdownError):
        bench.start("nothing")


def test_close_works_before_any_start(bench):
    bench.launcher.warm()
    bench.launcher.close()


@both
def test_close_ends_workers_that_have_only_just_started(bench):
    handles = [bench.start("idle") for _ in range(4)]
    bench.launcher.close()
    # One that has not begun to run within the grace still blocks SIGTERM, and gets SIGKILL.
    assert {handle.poll() for handle in handles} <= {-signal.SIGTERM, -signal.SIGKILL}


@both
def test_workers_of_a_killed_fork_server_end_and_the_server_is_replaced(bench):
    told = threading.Event()
    handle = bench.start("parent", lambda *_: told.set())
    child = bench.answer(handle)["child"]
    os.kill(bench.fork_server_of(handle), signal.SIGKILL)
    assert handle.wait(SECONDS) == -signal.SIGKILL
    assert told.wait(SECONDS)
    until(lambda: gone(handle.pid) and gone(child))
    assert bench.start("nothing").wait(SECONDS) == 0


def test_a_terminated_fork_server_leaves_the_directory_to_the_notebook(bench):
    handle = bench.start("idle")
    bench.answer(handle)  # it runs, and no longer blocks SIGTERM
    os.kill(bench.fork_server_of(handle), signal.SIGTERM)
    assert handle.wait(SECONDS) == -signal.SIGTERM
    until(lambda: _starts(bench))
    assert bench.directory.path.exists()


def _starts(bench):
    try:
        return bench.start("nothing").wait(SECONDS) == 0
    except RpcError:  # the old fork server is still ending
        return False


def test_a_fork_server_that_cannot_import_its_entry_raises_the_reason(tmp_path):
    bench = Bench("fork", tmp_path, entry="no_such_module:main")
    with (
        contextlib.closing(bench.launcher),
        pytest.raises(RpcError, match=r"ended with status 1[\s\S]*No module named 'no_such_module'"),
    ):
        bench.start("nothing")


def test_an_entry_module_with_threads_is_refused(tmp_path, monkeypatch):
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    Path(tmp_path, "threaded.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    bench = Bench("fork", tmp_path, entry="threaded:main")
    with contextlib.closing(bench.launcher), pytest.raises(RpcError, match="cannot be forked safely"):
        bench.start("nothing")


def test_a_start_that_timed_out_leaves_no_worker(bench):
    running = bench.start("idle")
    stopped = bench.fork_server_of(running)
    stop(stopped)
    ended = []  # a handler runs on another thread, where a failure would not fail this test
    with pytest.raises(RpcError, match="did not answer"):
        bench.start("idle", lambda *_: ended.append("a worker that no handle stands for"), start_seconds=0.1)
    os.kill(stopped, signal.SIGCONT)
    bench.start("nothing").wait(SECONDS)
    until(lambda: [child.pid for child in psutil.Process(stopped).children()] == [running.pid])
    assert not ended


def test_close_is_bounded_when_the_fork_server_hangs(bench, monkeypatch):
    monkeypatch.setattr(fork_client, "_CLOSE_SECONDS", 0.2)
    handle = bench.start("idle")
    stop(bench.fork_server_of(handle))
    begin = time.monotonic()
    bench.launcher.close()
    assert time.monotonic() - begin < 5
    assert handle.wait(SECONDS) == -signal.SIGKILL
    until(lambda: gone(handle.pid))


@contextlib.contextmanager
def notebook_to_kill(mode, answers):
    """Start another process with two workers; yield the process and the facts that it printed."""
    script = Path(__file__).with_name("killed_parent.py")
    with subprocess.Popen([sys.executable, script, mode, answers], stdout=subprocess.PIPE) as notebook:
        facts = json.loads(notebook.stdout.readline())
        try:
            until(lambda: len(list(answers.glob("*.json"))) == 2)
            yield notebook, facts
        finally:
            notebook.kill()
            for pid in [facts["holder"], *facts["workers"]]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("mode", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_killed_notebook_leaves_no_process_and_no_directory(mode, tmp_path):
    with notebook_to_kill(mode, tmp_path) as (notebook, facts):
        notebook.kill()
        until(lambda: all(gone(pid) for pid in [*facts["workers"], facts["fork_server"]]))
        until(lambda: not Path(facts["directory"]).exists())
        assert not gone(facts["holder"])


@pytest.mark.parametrize("mode", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_of_a_killed_fork_server_end_while_the_notebook_is_stopped(mode, tmp_path):
    with notebook_to_kill(mode, tmp_path) as (notebook, facts):
        notebook.send_signal(signal.SIGSTOP)
        os.kill(facts["fork_server"], signal.SIGKILL)
        until(lambda: all(gone(pid) for pid in facts["workers"]))
        shutil.rmtree(facts["directory"])
