"""Workers that are kernels: their own behaviour; `tests/notebook/test_kernel.py` tests both kinds of workers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import elsewhere_provisioner
import psutil
import pytest
import torch
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.provisioning import KernelProvisionerFactory
from launch_bench import gone, until
from worlds import cluster_fixture

import rpcbench
from rpcbench.autograd import backward, context, get_gradients
from rpcbench.base.errors import CallCancelled, RpcError, WorkerLostError
from rpcbench.cells.runner import INTERRUPT, Cell, run_cell
from rpcbench.launch import kernel as kernel_process
from rpcbench.rpc import RRef
from rpcbench.runtime import current

pytestmark = pytest.mark.process

NUMBERS = itertools.count(1)
cluster = cluster_fixture(2, kind="kernel")  # two kernels, for tests that leave the cluster as it was


class Asked:
    """A cell that was sent to a worker."""

    def __init__(self, cluster, code, worker="worker1", **asked):
        self.cluster, self.worker, self.number = cluster, worker, next(NUMBERS)
        self.future = cluster.rpc_async(worker, run_cell, (Cell(self.number, code, **asked),))

    def interrupt(self):
        agent = self.cluster.agent
        agent.notify(agent.member(self.worker).id, INTERRUPT, {"cell": self.number})

    def answer(self):
        return self.future.wait()


def ask(cluster, code, worker="worker1"):
    """The value of a cell's last expression."""
    return Asked(cluster, code, worker, value=True).answer()[""]


@pytest.fixture
def console(cluster) -> Iterator[BlockingKernelClient]:
    """A client of worker1, like `jupyter console --existing FILE`."""
    client = BlockingKernelClient(connection_file=cluster.connection_file("worker1"))
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield client
    finally:
        client.stop_channels()
        client.context.destroy()


def run_in(console, code):
    """Run code as a console does; return the status, and the text that the console was shown."""
    shown = []
    reply = console.execute_interactive(code, timeout=60, output_hook=lambda m: shown.append(m["content"]))
    texts = [c.get("text") or c.get("data", {}).get("text/plain", "") for c in shown]
    return reply["content"]["status"], "".join(texts)


# -- properties
def test_each_worker_is_a_separate_kernel_process(cluster):
    for name in cluster.workers:
        assert cluster.rpc_sync(name, os.getpid) == cluster.pid(name)
        command = psutil.Process(cluster.pid(name)).cmdline()
        assert any("ipykernel" in word for word in command), command
        assert os.getsid(cluster.pid(name)) == cluster.pid(name) != os.getsid(0)
    assert ask(cluster, "isinstance(get_ipython(), __import__('ipykernel').zmqshell.ZMQInteractiveShell)")
    assert repr(cluster.agent.owner) == "<Cluster of worker1, worker2>"


def test_the_secret_is_hidden_and_connection_files_are_private_to_the_user(cluster):
    secret = cluster._config.secret.hex()
    for name in cluster.workers:
        for file in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{cluster.pid(name)}/{file}").read_bytes().decode(errors="replace")
        connection = Path(cluster.connection_file(name))
        assert stat.S_IMODE(connection.stat().st_mode) == 0o600
        assert connection.parent.stat().st_mode & 0o777 == 0o700
        assert json.loads(connection.read_text())["transport"] == "ipc"


def test_a_kernel_has_the_directory_path_and_threads_of_a_process_worker(cluster):
    here = ask(cluster, "import os, sys, torch\nos.getcwd(), sys.path, torch.get_num_threads(), sys.stdin.read()")
    assert here == (os.getcwd(), sys.path, 1, "")
    drawn = [ask(cluster, "(torch if 'torch' in dir() else __import__('torch')).rand(3)", n) for n in cluster.workers]
    assert not torch.equal(*drawn)


def test_output_of_calls_of_children_and_past_python_is_in_the_log(cluster):
    cluster.rpc_sync("worker1", print, ("by a call",))
    ask(cluster, "import os, subprocess, sys\nsubprocess.run(['echo', 'by a child'], stdout=sys.stdout).returncode")
    ask(cluster, "os.write(2, b'past Python\\n')")
    until(lambda: {"by a call", "by a child", "past Python"} <= set(cluster.log("worker1").splitlines()))


def test_rrefs_and_gradients_cross_between_notebook_and_kernels(cluster):
    ref = cluster.remote("worker1", torch.ones, (3,), {"requires_grad": True})
    assert isinstance(ref, RRef) and ref.to_here().sum().item() == 3
    x = torch.full((3,), 2.0, requires_grad=True)
    with current.use_agent(cluster.agent), context() as number:
        backward(number, [cluster.rpc_sync("worker2", torch.mul, (x, x)).sum()])
        assert get_gradients(number)[x].tolist() == [4.0, 4.0, 4.0]
    assert cluster.rpc_sync("worker1", _of_other, ("worker2",)) == cluster.pid("worker2")


def _of_other(name):
    return rpcbench.rpc.rpc_sync(name, os.getpid)


# -- other clients
def test_a_console_and_cells_share_variables_and_results(cluster, console):
    ask(cluster, "mine = 20\nmine")
    assert run_in(console, "print(mine)\nyours = mine + 1\n_ + yours") == ("ok", "20\n41")
    assert ask(cluster, "(_, yours)") == (41, 21)
    assert run_in(console, "1 / 0")[0] == "error"
    assert run_in(console, "_")[1] == "(41, 21)", "an error changes no result"


def test_a_console_is_shown_only_its_own_output(cluster, console):
    ask(cluster, "from IPython.display import display\nprint('not there')\ndisplay('nor that')\n'nor the value'")
    assert run_in(console, "print('mine')\ndisplay('this')") == ("ok", "mine\n'this'")


def test_cells_and_the_code_of_a_console_run_one_after_the_other(cluster, console, tmp_path):
    wait = "import asyncio, pathlib\nwhile not pathlib.Path({!r}).exists():\n    await asyncio.sleep(0.01)\n"
    go = tmp_path / "go"
    console.execute("order = []\n" + wait.format(str(go)) + "order.append('console')")
    until(lambda: cluster.rpc_sync("worker1", _has, ("order",)))
    cell = Asked(cluster, "order.append('cell')\nawait asyncio.sleep(0.05)\norder.append('cell again')")
    later = console.execute("order.append('console again')")
    assert ask(cluster, "1", "worker2") == 1
    go.touch()
    cell.answer()
    while console.get_shell_msg(timeout=60)["parent_header"].get("msg_id") != later:
        pass
    order = ask(cluster, "order")
    assert order[0] == "console" and order.index("cell again") == order.index("cell") + 1 and len(order) == 4


def _has(name):
    return name in sys.modules["__main__"].__dict__


def test_a_console_can_interrupt_its_own_code_by_a_message(cluster, console):
    console.execute("import time\nbegun = True\nwhile True:\n    time.sleep(0.01)")
    until(lambda: cluster.rpc_sync("worker1", _has, ("begun",)))
    console.session.send(console.control_channel.socket, "interrupt_request", {})
    while (reply := console.get_shell_msg(timeout=60)["content"]).get("ename") is None:
        pass
    assert reply["ename"] == "KeyboardInterrupt"
    assert ask(cluster, "'usable'") == "usable"


# -- asynchronous cells
def test_a_task_goes_on_after_its_cell_has_ended(cluster):
    ask(cluster, "import asyncio\nasync def later():\n    await asyncio.sleep(0.01)\n    return 'done'")
    ask(cluster, "task = asyncio.create_task(later())\n0")
    assert ask(cluster, "await task") == "done"


def test_context_variables_keep_their_values_from_cell_to_cell(cluster):
    ask(cluster, "import contextvars\nvar = contextvars.ContextVar('var', default=0)\nvar.set(3)\n0")
    assert ask(cluster, "import asyncio\nawait asyncio.sleep(0)\nvar.get()") == 3


STUCK = {
    "sleeping": "import time\n{begun}\ntime.sleep(60)",
    "busy": "{begun}\nwhile True:\n    pass",
    "awaiting": "import asyncio\n{begun}\nawait asyncio.sleep(60)",
    "busy after awaiting": "import asyncio\nawait asyncio.sleep(0)\n{begun}\nwhile True:\n    pass",
    "awaiting in turns": "import asyncio\n{begun}\nwhile True:\n    await asyncio.sleep(0)",
}


@pytest.mark.parametrize("how", STUCK)
def test_an_interrupt_ends_its_cell_and_a_late_one_does_not_hit_the_next(cluster, tmp_path, how):
    sign = tmp_path / "begun"
    begun = f"__import__('pathlib').Path({str(sign)!r}).touch()"
    cell = Asked(cluster, STUCK[how].format(begun=begun))
    until(sign.exists)
    cell.interrupt()
    with pytest.raises(CallCancelled, match="worker1 ended by KeyboardInterrupt"):
        cell.answer()
    cell.interrupt()
    assert ask(cluster, "import asyncio\nawait asyncio.sleep(0.01)\n'next'") == "next"
    assert ask(cluster, "'and next'") == "and next"


def test_an_interrupt_of_a_task_group_ends_all_its_tasks(cluster, tmp_path):
    sign = tmp_path / "begun"
    cell = Asked(
        cluster,
        "import asyncio, pathlib\nended = []\n"
        "async def child():\n    try:\n        await asyncio.sleep(60)\n    finally:\n        ended.append(1)\n"
        "async with asyncio.TaskGroup() as group:\n"
        "    group.create_task(child()), group.create_task(child())\n"
        f"    await asyncio.sleep(0.01)\n    pathlib.Path({str(sign)!r}).touch()",
    )
    until(sign.exists)
    cell.interrupt()
    with pytest.raises(CallCancelled):
        cell.answer()
    assert ask(cluster, "ended") == [1, 1]


def test_an_external_sigint_ends_the_running_cell_and_not_the_kernel(cluster, tmp_path):
    sign = tmp_path / "begun"
    touch = f"import time, pathlib\npathlib.Path({str(sign)!r}).touch()"
    cell = Asked(cluster, f"{touch}\nfor _ in range(2000):\n    time.sleep(0.05)")
    until(sign.exists)
    cluster.interrupt("worker1")
    with pytest.raises(CallCancelled):
        cell.answer()
    os.kill(cluster.pid("worker1"), signal.SIGINT)
    with contextlib.suppress(CallCancelled):  # the kernel may handle the signal only now
        ask(cluster, "'hit'")
    assert ask(cluster, "'usable'") == "usable"


# -- how they end
def test_a_killed_kernel_is_reported_as_lost_and_can_be_restarted(cluster):
    before, file = cluster.pid("worker2"), cluster.connection_file("worker2")
    ref = cluster.remote("worker2", list)
    cell = Asked(cluster, "import time\ntime.sleep(60)", "worker2")
    os.kill(before, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=r"worker2 was lost.*killed by SIGKILL"):
        cell.answer()
    cluster.restart("worker2")
    assert cluster.pid("worker2") != before and cluster.connection_file("worker2") == file
    assert cluster.status()[1].incarnation == 1
    assert ask(cluster, "'time' in globals()", "worker2") is False
    with pytest.raises(RpcError, match="worker2"):
        ref.to_here()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        pytest.param("import os\nos._exit(3)", "exit code 3", marks=pytest.mark.long),
        ("import ctypes\nctypes.string_at(0)", r"(?s)SIGSEGV.*Segmentation fault"),
    ],
)
def test_the_loss_of_a_kernel_is_reported_with_its_status_and_output(cluster, code, words):
    with pytest.raises(WorkerLostError, match=words):
        ask(cluster, code, "worker2")
    cluster.restart("worker2")


def test_scale_and_shutdown_leave_no_process_and_no_file(no_leaks):
    with rpcbench.Cluster(1, kind="kernel") as made:
        directory = Path(made.connection_file("worker1")).parent
        child = ask(made, "import subprocess\nsubprocess.Popen(['sleep', '60']).pid")
        made.scale(2)
        made.scale(1)
        until(lambda: [path.name for path in directory.glob("*.json")] == ["worker1.json"])
        assert ask(made, "2") == 2
    until(lambda: gone(child))
    assert not directory.exists()


# -- missing packages, and other ways to launch
def test_a_missing_package_is_named_with_its_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    with pytest.raises(RpcError, match=r"need ipykernel, .*: pip install ipykernel jupyter-client"):
        rpcbench.Cluster(1, kind="kernel")


def test_an_invalid_option_is_refused_with_its_name():
    with pytest.raises(ValueError, match="kind='thread' is not a kind of worker"):
        rpcbench.Cluster(1, kind="thread")
    with pytest.raises(ValueError, match="start='fork' is for workers of kind 'process'"):
        rpcbench.Cluster(1, kind="kernel", start="fork")
    with pytest.raises(RpcError, match="has no kernel 'nope'; `jupyter kernelspec list`"):
        rpcbench.Cluster(1, kind="kernel", kernel="nope")
    with rpcbench.Cluster(1) as made, pytest.raises(RuntimeError, match="worker1 is not a kernel"):
        made.connection_file("worker1")


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """A function that writes a kernel spec named "mine"."""

    def write(**fields):
        folder = tmp_path / "kernels" / "mine"
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps({"display_name": "mine", "language": "python", **fields}))

    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    return write


def test_the_error_of_a_kernel_that_does_not_start_quotes_its_output(spec, no_leaks):
    spec(argv=[sys.executable, "-c", "import sys; print('none today', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(RpcError, match=r"worker1 ended \(exit code 3\) before it could serve:\nnone today"):
        rpcbench.Cluster(1, kind="kernel", kernel="mine")


def test_a_kernel_of_another_python_is_refused(monkeypatch, no_leaks):
    monkeypatch.setattr(kernel_process, "sys", SimpleNamespace(version_info=(3, 99, 0)))
    with pytest.raises(RpcError, match=r"the kernel runs Python 3\.\d+\.\d+, this process 3\.99"):
        rpcbench.Cluster(1, kind="kernel", patience=150)  # on a busy machine, too


def test_the_error_of_a_kernel_that_cannot_be_launched_names_the_cause(spec, no_leaks, caplog):
    spec(argv=["/no/such/program"])
    with pytest.raises(RpcError, match="worker1 could not be launched: FileNotFoundError"):
        rpcbench.Cluster(1, kind="kernel", kernel="mine")


@pytest.fixture
def elsewhere(spec):
    """A kernel spec "mine" whose kernels are launched by the provisioner of these tests."""
    spec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        metadata={"kernel_provisioner": {"provisioner_name": "elsewhere"}},
    )


def test_another_provisioner_can_launch_the_kernels(elsewhere, monkeypatch, no_leaks):
    factory = KernelProvisionerFactory.instance()
    monkeypatch.setitem(factory.provisioners, "elsewhere", elsewhere_provisioner.ENTRY_POINT)
    with rpcbench.Cluster(1, kind="kernel", kernel="mine") as made:
        assert made.pid("worker1") in elsewhere_provisioner.LAUNCHED
        assert ask(made, "import os\nos.getpid()") == made.pid("worker1")
        with pytest.raises(WorkerLostError, match="killed by SIGKILL"):
            ask(made, "import signal\nos.kill(os.getpid(), signal.SIGKILL)")


@pytest.mark.parametrize("kernel", [pytest.param("python3", marks=pytest.mark.long), "mine"])
def test_a_killed_notebook_leaves_no_kernel_and_no_file(kernel, elsewhere):
    script = Path(__file__).with_name("killed_kernels.py")
    with subprocess.Popen([sys.executable, script, kernel], stdout=subprocess.PIPE) as notebook:
        try:
            facts = json.loads(notebook.stdout.readline())
        finally:
            notebook.kill()
        until(lambda: all(gone(pid) for pid in facts["processes"]))
        until(lambda: not Path(facts["directory"]).exists())
