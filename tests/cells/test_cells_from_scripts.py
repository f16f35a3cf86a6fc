"""`Cluster.run` runs a cell from plain Python, without a shell of IPython."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
from IPython import get_ipython
from worlds import cluster_fixture, until

from rpcbench import RemoteError, RpcTimeoutError, UnknownWorkerError, WorkerLostError, rpc
from rpcbench.cells.targets import TargetError

pytestmark = pytest.mark.process
cluster = cluster_fixture(2)


def test_run_pushes_variables_and_returns_values(cluster):
    assert get_ipython() is None
    assert cluster.run("worker1", "y = x + 1\nz = [y]", push={"x": 6}, want=("y", "z")) == {"y": 7, "z": [7]}
    assert cluster.run("worker1", "y * 2") == 14
    assert cluster.run("worker1", "y", want="y") == {"y": 7}
    assert cluster.run("worker1", "y = 0") is None
    assert cluster.run("worker1", "import asyncio\nawait asyncio.sleep(0, 'awaited')") == "awaited"


def test_a_task_that_no_cell_awaits_is_an_error_that_says_what_to_write(cluster):
    begin = "import asyncio\nasync def f(): return 7\ncoroutine = f()\n"
    with pytest.raises(RuntimeError, match="no running event loop") as caught:
        cluster.run("worker1", f"{begin}asyncio.create_task(coroutine)")
    assert "write `await asyncio.sleep(0)` in this cell" in caught.value.__notes__[0]
    cluster.run("worker1", "coroutine.close()")
    way = "await asyncio.sleep(0)\ntask = asyncio.create_task(coroutine)\nawait task"
    assert cluster.run("worker1", begin + way) == 7


def test_run_on_several_workers_returns_values_by_worker(cluster):
    pids = {name: cluster.pid(name) for name in cluster.workers}
    assert cluster.run("all", "import os\nos.getpid()") == pids
    assert cluster.run(["worker2", "worker1"], "os.getpid()") == pids
    assert cluster.run(["worker2"], "os.getpid()") == {"worker2": pids["worker2"]}
    assert cluster.run("[1:]", "me = os.getpid()", want=["me"]) == {"me": {"worker2": pids["worker2"]}}
    assert cluster.run("worker1,worker2", "1") == {"worker1": 1, "worker2": 1}


def say(text, fails=False):
    print(text)
    print("half a line", end="")
    warnings.warn("a warning", stacklevel=1)
    if fails:
        raise KeyError(text)


def pass_on(text):
    rpc.rpc_sync("worker2", say, (text,))


def test_output_of_calls_is_printed_here_before_they_return(cluster, capsys):
    cluster.rpc_sync("worker1", say, ("called",))
    printed = capsys.readouterr()
    assert printed.out == "[worker1] called\n[worker1] half a line\n"
    assert "[worker1] " in printed.err and "UserWarning: a warning" in printed.err
    with pytest.raises(KeyError):
        cluster.rpc_sync("worker1", say, ("failed", True))
    assert capsys.readouterr().out == "[worker1] failed\n[worker1] half a line\n"
    cluster.rpc_sync("worker1", pass_on, ("passed on",))
    assert "[worker2] passed on\n" in capsys.readouterr().out
    list(cluster.map(say, ["first", "second"], workers="worker2"))
    assert capsys.readouterr().out.splitlines()[::2] == ["[worker2] first", "[worker2] second"]
    cluster.run("worker1", "import rpcbench.rpc as rpc\nrpc.rpc_sync('worker2', print, ('of a cell',))")
    assert capsys.readouterr().out == "[worker2] of a cell\n"
    assert "called" in cluster.log("worker1"), "the log has it, too"


@rpc.functions.async_execution
def print_later(text):
    return rpc.rpc_async("worker2", str, (text,)).then(lambda done: print(done.value()))


def test_output_of_continuations_is_printed_before_the_call_returns(cluster, capsys):
    for text in ("one", "two", "three"):
        cluster.rpc_sync("worker1", print_later, (text,))
        assert capsys.readouterr().out == f"[worker1] {text}\n"


@rpc.functions.async_execution
def print_on_another_thread(text):
    printed = rpc.rpc_async("worker2", str, (text,)).then(lambda done: print(done.value()))
    while not printed.done():  # not `wait`: this thread would run the continuation
        time.sleep(0.001)
    return printed


def test_output_of_a_continuation_that_has_run_on_another_thread_is_printed_before_the_call_returns(cluster, capsys):
    for text in ("one", "two", "three"):
        cluster.rpc_sync("worker1", print_on_another_thread, (text,))
        assert capsys.readouterr().out == f"[worker1] {text}\n"


def test_a_call_that_prints_much_waits_for_the_notebook(cluster, capsys):
    cluster.rpc_sync("worker1", exec, ("for line in range(1000): print(line)",))
    assert capsys.readouterr().out.splitlines() == [f"[worker1] {line}" for line in range(1000)]


def test_output_of_workers_is_printed_in_the_calling_process(cluster, capsys):
    cluster.run("worker1", "import sys\nprint('out')\nprint('err', file=sys.stderr)\n%time 1\n7", want="sys")
    printed = capsys.readouterr()
    assert printed.out.startswith("out\n") and "Wall time" in printed.out and printed.out.endswith("7\n")
    assert printed.err == "err\n"
    cluster.run("all", "print('both')")
    assert sorted(capsys.readouterr().out.splitlines()) == ["[worker1] both", "[worker2] both"]


def test_a_display_is_printed_as_text(cluster, capsys):
    cluster.run("worker1", "display({'k': 1})\ndisplay({'image/png': 'x'}, raw=True)")
    assert capsys.readouterr().out == "{'k': 1}\n(image/png)\n"


def test_an_error_keeps_its_type_and_cause_and_lists_the_other_failed_workers(cluster):
    with pytest.raises(ZeroDivisionError) as caught:
        cluster.run("all", "1 / 0")
    assert isinstance(caught.value.__cause__, RemoteError)
    assert caught.value.__notes__ == ["also on worker2: ZeroDivisionError: division by zero"]
    with pytest.raises(SyntaxError):
        cluster.run("worker1", "x = = 1")
    with pytest.raises(NameError, match="'gone'"):
        cluster.run("worker1", "1", want=["gone"])
    with pytest.raises(UnknownWorkerError, match="worker9"):
        cluster.run("worker9", "1")
    with pytest.raises(TargetError, match="slice"):
        cluster.run("[x]", "1")


def test_a_cell_that_exceeds_its_timeout_is_interrupted(cluster):
    with pytest.raises(RpcTimeoutError, match=r"more than 0\.3 s and was interrupted"):
        cluster.run("worker1", "import time\nwhile True:\n    time.sleep(0.01)", timeout=0.3)
    assert cluster.run("worker1", "'still here'") == "still here"


def test_ctrl_c_interrupts_the_cell_on_its_worker(cluster, tmp_path):
    ready = tmp_path / "ready"

    def stop():
        until(ready.exists)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=stop)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        touch = f"pathlib.Path({str(ready)!r}).touch()"
        cluster.run("worker1", f"import pathlib, time\n{touch}\nwhile True:\n    time.sleep(0.01)")
    presser.join()
    assert cluster.run("worker1", "'still here'") == "still here"


def test_a_script_that_runs_cells_does_not_load_ipython(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport rpcbench\n"
        "if __name__ == '__main__':\n"
        "    with rpcbench.Cluster(1) as cluster:\n"
        "        print(cluster.run('worker1', '''\n            print('there')\n            6 * 7\n        '''))\n"
        "    print('IPython' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("there\n42\nFalse\n", "")


def test_a_cell_whose_worker_is_lost_raises_worker_lost_error(cluster):
    with pytest.raises(WorkerLostError, match="worker2"):
        cluster.run("worker2", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    cluster.restart("worker2")
