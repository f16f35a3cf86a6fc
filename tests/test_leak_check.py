"""The checks that other tests rely on: each kind of leak is reported, and a skipped browser test can fail."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from leaks import MARK

from rpcbench.launch.cluster import Cluster

GRACE = 0.2


def test_a_process_in_another_session_is_reported_and_ended(leak_check) -> None:
    with pytest.raises(AssertionError, match="process"), leak_check(GRACE):
        process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    assert process.wait(20) != 0


def test_a_thread_is_reported(leak_check) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="the-one-left", daemon=True)
    with pytest.raises(AssertionError, match="thread the-one-left"), leak_check(GRACE):
        thread.start()
    end.set()
    thread.join()


def test_the_thread_that_begins_with_an_import_of_quickjs_is_no_leak() -> None:
    pytest.importorskip("quickjs", reason="needs quickjs-ng, which the extra `lab` installs")
    tests = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {tests!r}); import leaks; leaks.mark_this_run()\n"
    code += f"with leaks.nothing_left({GRACE}, warm=False): import quickjs"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_descriptor_is_reported(leak_check) -> None:
    with pytest.raises(AssertionError, match="descriptor"), leak_check(GRACE):
        left = socket.socket()
    left.close()


def test_files_are_reported_except_shared_secrets(leak_check) -> None:
    with leak_check():
        secret = Path(os.environ["XDG_RUNTIME_DIR"], f"rpcbench-{os.geteuid()}", "key", "secret")
        secret.parent.mkdir(parents=True)
        secret.touch()
    with pytest.raises(AssertionError, match="rpcbench-abc"), leak_check(GRACE):
        Path(os.environ["XDG_RUNTIME_DIR"], "rpcbench-abc").mkdir()


def test_a_process_of_another_run_is_not_reported(leak_check) -> None:
    with leak_check(GRACE):
        others = {**os.environ, MARK: "that of another run"}
        pid = subprocess.check_output(["sh", "-c", "sleep 60 >&- 2>&- & echo $!"], env=others)
    os.kill(int(pid), signal.SIGKILL)


def test_the_warm_fork_server_is_shared_and_no_leak(leak_check) -> None:
    """A worker that it has forked is still reported."""
    with leak_check(), Cluster(1) as cluster:
        first = psutil.Process(cluster.pid("worker1")).ppid()
    with pytest.raises(AssertionError, match="process"), leak_check(GRACE):
        left = Cluster(1)
        assert psutil.Process(left.pid("worker1")).ppid() == first
    left.shutdown()


def test_resources_that_were_cleaned_up_are_not_reported(leak_check) -> None:
    with leak_check():
        subprocess.run([sys.executable, "-c", ""], check=True)
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        socket.socket().close()


@pytest.mark.parametrize(("required", "outcome"), [("", "1 skipped"), ("1", "1 failed")])
def test_a_skipped_browser_test_fails_where_one_is_required(tmp_path: Path, required: str, outcome: str) -> None:
    test = "import pytest\n@pytest.mark.browser\ndef test_it():\n    pytest.skip('no Chromium')\n"
    (tmp_path / "test_it.py").write_text(test)
    for name in ("addresses.py", "conftest.py", "leaks.py", "running.py", "exercises.py", "sizes.py"):
        (tmp_path / name).write_text(Path(__file__).with_name(name).read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    browser\n    alone\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "RPCBENCH_REQUIRE_BROWSER": required},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert outcome in done.stdout


@pytest.mark.process
def test_a_crash_of_a_test_process_fails_one_test_and_the_others_run(tmp_path: Path) -> None:
    """Also tests after it, and although other files are complete."""
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['running']")
    for number in range(4):
        (tmp_path / f"test_{number}.py").write_text("def test_passes(): pass")
    crashes = "import os\ndef test_a(): pass\ndef test_b(): os.abort()\ndef test_c(): pass\ndef test_d(): pass"
    (tmp_path / "test_last.py").write_text(crashes)
    arguments = [sys.executable, "-m", "pytest", "-n", "1", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "."]
    there = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(arguments, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=120)
    assert "1 failed, 7 passed" in run.stdout and "crashed while running 'test_last.py::test_b'" in run.stdout
