"""A real kernel, driven as a front end drives it: every message is kept with the cell it belongs to."""

from __future__ import annotations

import os
import queue
import re
import signal
from dataclasses import dataclass, field

import addresses
import pytest
import zmq

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NOT_OUTPUT = {"status", "execute_input", "comm_open", "comm_msg", "comm_close"}


@dataclass
class Reply:
    """How a cell ended, and what it showed, in order."""

    status: str
    ename: str
    evalue: str
    outputs: list[tuple[str, dict]] = field(default_factory=list)
    strays: list[dict] = field(default_factory=list)
    prompts: list[tuple[str, bool]] = field(default_factory=list)
    payload: list[dict] = field(default_factory=list)
    comms: list[dict] = field(default_factory=list)

    def show(self, kind, content):
        """Add an output. Text joins the text of the same stream before it, as in a notebook."""
        last, before = self.outputs[-1] if self.outputs else ("", {})
        if kind == last == "stream" and content["name"] == before["name"]:
            before["text"] += content["text"]
        else:
            self.outputs.append((kind, content))

    @property
    def text(self):
        return "".join(c["text"] for kind, c in self.outputs if kind == "stream")

    @property
    def results(self):
        """Mime bundles of displays and results."""
        return [c["data"] for kind, c in self.outputs if kind in ("display_data", "execute_result")]

    @property
    def traceback(self):
        lines = [line for kind, c in self.outputs if kind == "error" for line in c["traceback"]]
        return _COLOUR.sub("", "\n".join(lines))


class Kernel:
    """One kernel and its client."""

    def __init__(self, kind=""):
        self.kind = kind  # of its workers
        self.hangs = False
        self.manager = addresses.kernel_manager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code, stop_at=(), answers=(), when=None, timeout=60, allow_stdin=True):
        """Run a cell to its end. For each of `stop_at`, lists of texts: press the stop button when all are shown.

        `answers` are texts for its prompts, or functions to call instead of an answer; `when` has functions to call
        when a text is shown.
        """
        assert not self.hangs, "a test before this one has left the kernel in a cell that does not end"
        reply = Reply("", "", "")
        stops, answers, deeds = list(stop_at), list(answers), dict(when or {})
        # After an error, ipykernel aborts cells that arrive within a moment, also one sent after the reply.
        cell = self.client.execute(code, allow_stdin=allow_stdin, stop_on_error=False)

        def hook(message):
            kind, content = message["msg_type"], message["content"]
            if kind.startswith("comm_"):
                reply.comms.append(message)
            if kind in _NOT_OUTPUT:
                return
            reply.show(kind, content)
            if stops and all(text in reply.text for text in stops[0]):
                stops.pop(0)
                self.interrupt()
            for text in [text for text in deeds if text in reply.text]:
                deeds.pop(text)()

        def asked(message):
            reply.prompts.append((message["content"]["prompt"], message["content"]["password"]))
            answer = answers.pop(0)
            answer() if callable(answer) else self.client.input(answer)

        self._read(cell, hook, asked, reply, timeout)
        content = self.answer(cell, timeout)
        reply.payload = content.get("payload", [])
        reply.status, reply.ename, reply.evalue = content["status"], content.get("ename", ""), content.get("evalue", "")
        return reply

    def _read(self, cell, hook, asked, reply, timeout):
        while True:
            message = self._next(timeout)
            if message["msg_type"] == "input_request":
                if message["parent_header"].get("msg_id") == cell:  # else of a prompt that ended unread
                    asked(message)
            elif message["parent_header"].get("msg_id") != cell:
                reply.strays.append(message)
            elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return
            else:
                hook(message)

    def _next(self, timeout):
        """The next message that the kernel sends, be it output or a question."""
        channels = {c.socket: c for c in (self.client.iopub_channel, self.client.stdin_channel)}
        poller = zmq.Poller()
        for socket in channels:
            poller.register(socket, zmq.POLLIN)
        ready = poller.poll(timeout * 1000)
        if not ready:
            self.hangs = True
            raise queue.Empty
        return channels[ready[0][0]].get_msg(timeout=timeout)

    def answer(self, cell, timeout=60):
        """The reply to a cell; `wait_for_ready` may have left others behind."""
        while (message := self.client.get_shell_msg(timeout=timeout))["parent_header"].get("msg_id") != cell:
            pass
        return message["content"]

    def complete(self, marked, timeout=60):
        """What Tab offers at the `|` in the code, and the code with the first offer taken: it must land right."""
        cursor = marked.index("|")
        code = marked.replace("|", "", 1)
        content = self.answer(self.client.complete(code, cursor), timeout)
        assert content["status"] == "ok"
        matches = content["matches"]
        taken = code[: content["cursor_start"]] + matches[0] + code[content["cursor_end"] :] if matches else code
        return matches, taken

    def inspect(self, marked, detail=0, timeout=60):
        """What Shift-Tab shows at the `|` in the code; empty if nothing is found."""
        cursor = marked.index("|")
        content = self.answer(self.client.inspect(marked.replace("|", "", 1), cursor, detail), timeout)
        return _COLOUR.sub("", content["data"]["text/plain"]) if content["found"] else ""

    def say(self, comm, data, buffers=(), subshell=None):
        """What a front end says to a comm; the message's id."""
        message = self.client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        message["header"]["subshell_id"] = subshell
        self.client.session.send(self.client.shell_channel.socket, message, buffers=list(buffers))
        return message["header"]["msg_id"]

    def interrupt(self):
        """What the stop button does: a signal to the whole process group of the kernel."""
        os.killpg(os.getpgid(self.manager.provisioner.pid), signal.SIGINT)

    def value(self, expression):
        """The repr of an expression in the notebook."""
        return self.run(f"{expression}").results[0]["text/plain"]

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


_NAMES = "sorted(name for name in globals() if not name.startswith('_'))"


class Shared:
    """A kernel with a cluster of two, for all tests: another one only where a test has left it unusable."""

    def __init__(self, kind):
        self.kind = kind
        self.kernel = None

    def usable(self):
        if self.kernel is None:
            self.kernel = Kernel(self.kind)
            started = self.kernel.run(f"%load_ext rpcbench\n%cluster start 2 --kind {self.kind}")
            assert started.status == "ok", started.traceback
            assert "worker1, worker2" in started.text
            # A worker may be slow to answer the stop button; one that answers costs no time.
            self.kernel.run("import rpcbench.cells.client as _desk\n_desk._HANDLING_SECONDS = _desk.PATIENCE = 60.0")
        return self.kernel

    def drop(self):
        if self.kernel is not None:
            self.kernel.close()
            self.kernel = None


@pytest.fixture(scope="session", params=["process", "kernel"])
def shared(request):
    """The parameter is the kind of the workers."""
    made = Shared(request.param)
    try:
        yield made
        if made.kernel is not None:
            assert "stopped" in made.kernel.run("%cluster stop").text
            assert "No cluster runs" in made.kernel.run("%cluster stop").text
    finally:
        made.drop()


@pytest.fixture(scope="module")
def kernel(shared):
    """The shared kernel. Afterwards names that tests have left are gone, and two workers of its kind serve."""
    try:
        yield from _left_as_found(shared.usable())
    except BaseException:
        shared.drop()
        raise


@pytest.fixture(scope="module")
def own_kernel():
    """A kernel with two kernel workers for one module alone: its tests leave a debugger loaded in all of them."""
    made = Shared("kernel")
    try:
        yield made.usable()
    finally:
        made.drop()


def _left_as_found(shared_kernel):
    here, there = shared_kernel.value(_NAMES), shared_kernel.run(f"%%remote worker1\nprint({_NAMES})").text
    yield shared_kernel
    for magic, before in (("", here), ("%%remote all\n", there)):
        forget = f"for name in set({_NAMES}) - set({before}):\n    del globals()[name]"
        done = shared_kernel.run(f"{magic}{forget}")
        assert done.status == "ok", done.traceback
    now = shared_kernel.value("(cluster.workers, cluster.kind == 'kernel')")
    assert now == f"(['worker1', 'worker2'], {shared_kernel.kind == 'kernel'})"
