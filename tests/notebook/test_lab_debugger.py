"""JupyterLab's debugger in cells on kernel workers, through a real kernel: a client that speaks as JupyterLab does."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ipykernel.debugger import Debugger

from rpcbench.launch.kernel_worker import kernel_debugger
from rpcbench.notebook.lab_debugger import worker_code

KNOWS_FRAMES = "kernel_modules" in inspect.signature(Debugger).parameters
needs_debugger = pytest.mark.skipif(not KNOWS_FRAMES, reason="ipykernel is older than 7.2")

CELL = """%%remote worker1
def twice(n):
    doubled = n * 2
    return doubled
result = twice(21)
print('res' 'ult', result)"""


class Panel:
    """JupyterLab's debugger panel: requests on the control channel, events on IOPub."""

    def __init__(self, kernel):
        self.kernel, self.client = kernel, kernel.client
        self._numbers = itertools.count(1)
        self._ended = set()  # message ids of requests that are through
        self.shown = []  # text of the cell

    def ask(self, command, **arguments):
        asked = {"type": "request", "seq": next(self._numbers), "command": command, "arguments": arguments}
        message = self.client.session.msg("debug_request", asked)
        self.client.control_channel.send(message)
        while (reply := self.client.get_control_msg(timeout=60))["parent_header"]["msg_id"] != message["msg_id"]:
            pass
        assert reply["content"]["request_seq"] == asked["seq"]
        return reply["content"]

    def mark(self, cell, *lines):
        """Set breakpoints in a cell, as clicks beside its lines do; gives the cell's path."""
        path = self.ask("dumpCell", code=cell)["body"]["sourcePath"]
        wanted = [{"line": line} for line in lines]
        reply = self.ask("setBreakpoints", source={"path": path}, breakpoints=wanted, sourceModified=False)
        assert [one["line"] for one in reply["body"]["breakpoints"]] == list(lines)
        assert self.ask("configurationDone")["success"]
        return path

    def until(self, event):
        """The next event of this kind."""
        while True:
            message = self._next()
            if message["msg_type"] == "debug_event" and message["content"]["event"] == event:
                return message["content"]["body"]

    def _next(self):
        message = self.client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream":
            self.shown.append(message["content"]["text"])
        if message["content"].get("execution_state") == "idle":
            self._ended.add(message["parent_header"]["msg_id"])
        return message

    def stop(self):
        """Wait until a thread stops; give its number and its frames."""
        thread = self.until("stopped")["threadId"]
        return thread, self.ask("stackTrace", threadId=thread)["body"]["stackFrames"]

    def variables(self, frame):
        (local, *_) = self.ask("scopes", frameId=frame["id"])["body"]["scopes"]
        found = self.ask("variables", variablesReference=local["variablesReference"])["body"]["variables"]
        return {one["name"]: one["value"] for one in found}

    def begin(self, cell):
        self.shown.clear()
        return self.client.execute(cell, stop_on_error=False)

    def end(self, cell):
        """Wait for the end of a cell; give its reply and the text that it has shown."""
        while cell not in self._ended:
            self._next()
        return self.kernel.answer(cell), "".join(self.shown)


def place(frame):
    return frame["name"], frame["source"]["path"], frame["line"]


@pytest.fixture
def panel(own_kernel):
    """The panel with the debugger on; afterwards it is off, and both workers run cells without a stop."""
    made = Panel(own_kernel)
    assert made.ask("initialize", clientID="test", adapterID="", pathFormat="path")["success"]
    assert made.ask("attach")["success"]
    yield made
    made.ask("disconnect", restart=False, terminateDebuggee=False)
    after = own_kernel.run(CELL.replace("worker1", "all"))
    assert (after.status, sorted(after.text.splitlines())) == ("ok", ["[worker1] result 42", "[worker2] result 42"])


@pytest.mark.parametrize(
    ("cell", "part"),
    [
        ("%%remote worker1\nx = 1", ("x = 1\n", 1)),
        ("%%remote all -o y\n\ny = 2\n", ("\ny = 2\n", 1)),
        ("x = 1", ("x = 1\n", 0)),  # under %autoremote the whole cell is the worker's
        ("%%remote worker1", ("", 1)),
        ("", ("\n", 0)),
    ],
)
def test_a_worker_compiles_the_cell_below_its_first_line(cell, part):
    assert worker_code(cell) == part


def test_a_kernel_without_a_debugger_that_hides_frames_has_none() -> None:
    new, old = SimpleNamespace(kernel_modules=[]), SimpleNamespace()
    assert kernel_debugger(SimpleNamespace(debugger=new)) is new
    for kernel in (SimpleNamespace(debugger=old), SimpleNamespace(debugger=None), SimpleNamespace()):
        assert kernel_debugger(kernel) is None


@needs_debugger
@pytest.mark.process
def test_a_cell_stops_on_its_worker_and_goes_on_step_by_step(panel):
    path = panel.mark(CELL, 3)
    cell = panel.begin(CELL)
    thread, frames = panel.stop()
    assert [place(frame) for frame in frames[:2]] == [("worker1: twice", path, 3), ("worker1: <module>", path, 5)]
    assert len(frames) == 2, "no frame of the machinery is shown"
    assert panel.variables(frames[0])["n"] == "21"
    assert panel.ask("evaluate", expression="n + 1", frameId=frames[0]["id"], context="repl")["body"]["result"] == "22"
    assert panel.ask("debugInfo")["body"]["stoppedThreads"] == [thread]
    panel.ask("next", threadId=thread)
    thread, frames = panel.stop()
    assert place(frames[0]) == ("worker1: twice", path, 4)
    assert panel.variables(frames[0])["doubled"] == "42"
    panel.ask("continue", threadId=thread)
    reply, text = panel.end(cell)
    assert (reply["status"], text) == ("ok", "result 42\n")


@needs_debugger
@pytest.mark.process
def test_workers_that_stop_at_once_are_shown_one_after_the_other(panel):
    everywhere = CELL.replace("worker1", "all")
    panel.mark(everywhere, 4)
    cell, names = panel.begin(everywhere), []
    for _ in range(2):
        thread, frames = panel.stop()
        names.append(frames[0]["name"])
        panel.ask("continue", threadId=thread)
    assert sorted(names) == ["worker1: twice", "worker2: twice"]
    assert panel.end(cell)[0]["status"] == "ok"


@needs_debugger
@pytest.mark.process
@pytest.mark.xfail(sys.version_info >= (3, 12), reason="debugpy stops by sys.monitoring there, and hears no interrupt")
def test_the_stop_button_ends_a_cell_that_stands_at_a_breakpoint(panel):
    panel.mark(CELL, 3)
    cell = panel.begin(CELL)
    thread, _ = panel.stop()
    panel.kernel.interrupt()
    assert panel.until("continued")["threadId"] == thread
    reply, text = panel.end(cell)
    assert (reply["ename"], "result" in text) == ("KeyboardInterrupt", False)
    cell = panel.begin(CELL)
    thread, _ = panel.stop()  # the next cell stops again
    panel.ask("continue", threadId=thread)
    assert panel.end(cell)[1] == "result 42\n"


@needs_debugger
@pytest.mark.process
def test_a_function_of_the_notebook_stops_in_a_call_on_a_worker(panel):
    defines = "def shifted(n):\n    return n + 1"
    path = panel.mark(defines, 2)
    assert panel.end(panel.begin(defines))[0]["status"] == "ok"
    cell = panel.begin("print(cluster.rpc_sync('worker2', shifted, (41,)))")
    thread, frames = panel.stop()
    assert place(frames[0]) == ("worker2: shifted", path, 2)
    panel.ask("continue", threadId=thread)
    assert panel.end(cell)[1] == "42\n"


@pytest.mark.long
@needs_debugger
@pytest.mark.process
def test_the_end_of_a_worker_ends_its_stop(panel):
    panel.mark(CELL, 3)
    cell = panel.begin(CELL)
    thread, _ = panel.stop()
    panel.ask("evaluate", expression="__import__('os').kill(__import__('os').getpid(), 9)", context="repl")
    assert panel.until("continued")["threadId"] == thread
    assert panel.end(cell)[0]["ename"] == "WorkerLostError"
    assert panel.end(panel.begin("%cluster restart worker1"))[0]["status"] == "ok"
    cell = panel.begin(CELL)
    thread, frames = panel.stop()  # the new process has the breakpoints, too
    assert frames[0]["name"] == "worker1: twice"
    panel.ask("continue", threadId=thread)
    assert panel.end(cell)[1] == "result 42\n"


@pytest.mark.long
@needs_debugger
@pytest.mark.process
def test_a_busy_worker_gets_its_breakpoints_when_it_is_idle(panel, tmp_path):
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists():\n    time.sleep(0.01)"
    panel.end(panel.begin(f"%%remote worker1 --async\n{wait}"))
    panel.end(panel.begin("held = _"))
    panel.mark(CELL, 3)
    assert "worker1 is busy: it gets JupyterLab's breakpoints when" in panel.end(panel.begin("'here'"))[1]
    (tmp_path / "go").touch()
    panel.end(panel.begin("held.wait()"))
    cell = panel.begin(CELL)
    thread, _ = panel.stop()
    panel.ask("continue", threadId=thread)
    assert panel.end(cell)[1] == "result 42\n"


def test_processes_start_without_the_debugger_also_where_it_listens_already():
    starts = (
        "import subprocess, sys, debugpy\nfrom rpcbench.launch.kernel_worker import spare_child_processes\n"
        "debugpy.listen(('127.0.0.1', 0))\nspare_child_processes()\n"
        "subprocess.run([sys.executable, '-c', 'import sys; print(sys.modules.get(\"pydevd\"))'], check=True)"
    )
    ran = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True, timeout=200, check=True)
    assert ran.stdout == "None\n"


@needs_debugger
@pytest.mark.process
def test_process_workers_are_told_to_be_none_of_its_workers(panel):
    panel.mark(CELL, 3)
    assert panel.end(panel.begin("%cluster start 1 --name plain"))[0]["status"] == "ok"
    try:
        reply, text = panel.end(panel.begin(CELL))
        assert reply["status"] == "ok"
        assert "breakpoints stop in cells on kernel workers, and worker1 are none: start workers with %cluster" in text
        assert text.endswith("result 42\n")
    finally:
        panel.end(panel.begin("%cluster stop"))
        panel.end(panel.begin("%cluster use main"))
