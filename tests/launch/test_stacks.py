"""Where the threads of workers are: as they report it themselves, and from outside where they do not respond."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sizes import long
from torch.utils.file_baton import FileBaton
from worlds import stop, until

import rpcbench
from rpcbench.base.errors import UnknownWorkerError, WorkerLostError
from rpcbench.launch import stacks
from rpcbench.launch.status import WorkerRecord
from rpcbench.launch.worker_main import STACKS_SIGNAL, WorkerLocation, stacks_file
from rpcbench.runtime import deadlocks
from rpcbench.transport import run_dir

# ---- pure

DUMP = """Thread 0x00007f0000000003 (most recent call first):
  File "{stdlib}threading.py", line 324 in wait
  File "{ours}/runtime/pool.py", line 12 in _work
  File "{stdlib}threading.py", line 975 in run

Current thread 0x00007f0000000001 (most recent call first):
  File "<ipython-input-3-0123456789ab>", line 4 in nap
  File "<ipython-input-3-0123456789ab>", line 5 in <module>
  File "/x/IPython/core/interactiveshell.py", line 3577 in run_code
  File "{ours}/cells/runner.py", line 200 in perform
"""


def dump(text: str) -> str:
    return text.format(stdlib=deadlocks.STDLIB, ours=os.path.dirname(rpcbench.__file__))


def test_a_report_from_outside_is_reduced_to_the_users_program() -> None:
    (thread,) = stacks.parse_dump(dump(DUMP))
    assert thread.name == "MainThread"
    assert thread.report_lines("worker1", "\nimport ctypes\n\ndef nap():\n    pass\nnap()") == [
        "Cell worker1[3], line 4 in nap", "Cell worker1[3], line 5: nap()"
    ]  # fmt: skip


def test_a_report_without_the_users_program_is_shown_whole() -> None:
    alone = dump(DUMP).split("\n\n")[0]
    (thread,) = stacks.parse_dump(alone)
    assert thread.report_lines("worker1", "")[0].startswith(f"{deadlocks.STDLIB}threading.py:324 in wait")
    assert len(thread.report_lines("worker1", "")) == 3


def test_a_cell_of_a_kernel_is_named_without_its_number() -> None:
    text = dump(DUMP).replace("<ipython-input-3-0123456789ab>", "/tmp/ipykernel_12/3456.py")
    assert stacks.parse_dump(text)[0].report_lines("worker1", "")[1] == "Cell worker1, line 5"


def test_a_process_without_a_handler_is_not_signalled() -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            assert not stacks._handles_signal(other.pid)
            assert not stacks._handles_signal(0x3FFFFFFF), "no such process"
        finally:
            other.kill()


def test_a_worker_on_another_host_is_told_to_be_out_of_reach() -> None:
    record = WorkerRecord(1, "worker1", 0, WorkerLocation("another", "node7", os.getpid()), "", 0)
    said = stacks._from_outside(None, "worker1", record, "")  # type: ignore[arg-type]
    assert said.startswith("worker1 does not respond, and runs on another host, node7, where no signal from here")


def test_a_file_that_a_killed_worker_has_left_keeps_no_directory(tmp_path: Path) -> None:
    folder = tmp_path / "world"
    folder.mkdir()
    stacks_file(str(folder), "worker1").touch()
    os.utime(folder, (0, 0))
    run_dir.remove_unused(tmp_path)
    assert not folder.exists()


# ---- workers

WAYS: dict[str, dict[str, Any]] = {
    "process": {},
    "kernel": {"kind": "kernel"},
    "command": {"launcher": "command", "options": {"template": "{cmd}"}, "address": "127.0.0.1"},
}


@pytest.fixture(scope="module", params=["process", *long("kernel", "command")])
def cluster(request: pytest.FixtureRequest) -> Iterator[rpcbench.Cluster]:
    """Two workers of each kind, for tests that leave them idle."""
    with rpcbench.Cluster(2, **WAYS[request.param]) as made:
        yield made


class Beside:
    """A cell that runs on a worker while a test looks."""

    def __init__(self, cluster: rpcbench.Cluster, worker: str, code: str) -> None:
        self.cluster, self.worker, self.failed = cluster, worker, None
        self.thread = threading.Thread(target=self._run, args=(code,))

    def _run(self, code: str) -> None:
        try:
            self.cluster.run(self.worker, code)
        except (KeyboardInterrupt, rpcbench.RpcError) as error:
            self.failed = error

    def __enter__(self) -> Beside:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.interrupt(self.worker)
        self.thread.join(60)
        assert not self.thread.is_alive()


def seen(look: Callable[[], str], *texts: str) -> str:
    """Look until all texts are there, and return the report."""
    found = [""]

    def there() -> bool:
        found[0] = look()
        return all(text in found[0] for text in texts)

    until(there, f"{texts} in the report")
    return found[0]


@pytest.mark.process
def test_a_busy_cell_is_named_with_its_line_by_the_worker_itself(cluster: rpcbench.Cluster) -> None:
    with Beside(cluster, "worker1", "total = 0\nwhile True:\n    total += 1"):
        begins = "worker1:\n  runs the cell: total = 0 …\n"
        said = seen(lambda: cluster.stack("worker1"), begins, "MainThread runs", "Cell worker1[")
        assert said.startswith(begins) and ("while True:" in said or "total += 1" in said)
        assert "does not respond" not in said
        every = seen(cluster.stack, "worker1:", "worker2: nothing to do, and no thread waits")
        assert repr(every) == str(every)


@pytest.mark.process
def test_a_cell_that_holds_pythons_lock_is_reported_by_a_signal(cluster: rpcbench.Cluster) -> None:
    # It lets other threads run now and then: an interrupt reaches the worker of a command as a message.
    code = "import ctypes, time\n\ndef nap():\n    ctypes.PyDLL(None).sleep(8)\n\n"
    code += "while True:\n    nap()\n    time.sleep(0.5)"
    with Beside(cluster, "worker1", code):
        said = seen(lambda: cluster.stack("worker1"), "does not respond", "line 4 in nap", "line 7: nap()")
    lines = said.splitlines()
    assert lines[:2] == [
        "worker1 does not respond: its code lets no other thread run, or its host is overloaded. From outside:",
        "  runs the cell: import ctypes, time …",
    ]
    main = lines[lines.index("  MainThread") :]
    assert "line 4 in nap" in main[1] and main[2].strip().startswith("Cell worker1")
    assert main[2].endswith("line 7: nap()")
    assert cluster.run("worker1", "1 + 1") == 2, "the signal has done no harm"


@pytest.mark.process
def test_a_stopped_process_is_named_and_goes_on_unharmed(cluster: rpcbench.Cluster) -> None:
    pid = cluster.pid("worker2")
    stop(pid)
    try:
        assert cluster.stack("worker2") == (
            f"worker2 is stopped, by a signal or a debugger: kill -CONT {pid} lets its process go on"
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: cluster.stack("worker2") == "worker2: nothing to do, and no thread waits")


@pytest.mark.process
def test_a_call_inside_a_library_has_the_lines_of_the_library(cluster: rpcbench.Cluster, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    call = cluster.rpc_async("worker1", FileBaton.wait, (FileBaton(str(lock)),))  # waits until the file is gone
    try:
        said = seen(lambda: cluster.stack("worker1"), "wait, a call of notebook", " in wait: time.sleep(")
    finally:
        lock.unlink()
    call.wait()
    assert "torch/utils/file_baton.py" in said


@pytest.mark.process
def test_unknown_and_lost_workers_are_errors(no_leaks: None) -> None:
    with rpcbench.Cluster(1) as made:
        with pytest.raises(UnknownWorkerError, match="wroker1"):
            made.stack("wroker1")
        made.kill("worker1")
        with pytest.raises(WorkerLostError):
            made.stack("worker1")


@pytest.mark.process
def test_a_worker_whose_program_has_taken_the_signal_is_spared(no_leaks: None) -> None:
    with rpcbench.Cluster(1) as made:
        pid = made.pid("worker1")
        made.rpc_sync("worker1", signal_default)
        code = "import ctypes, time\nwhile True:\n    ctypes.PyDLL(None).sleep(4)\n    time.sleep(0.5)"
        with Beside(made, "worker1", code):
            said = seen(lambda: made.stack("worker1"), "has no handler that would report more")
        assert psutil.pid_exists(pid) and made.run("worker1", "3") == 3 and str(pid) in said


def signal_default() -> None:
    import faulthandler

    faulthandler.unregister(STACKS_SIGNAL)
