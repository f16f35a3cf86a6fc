"""A notebook without a browser: a kernel, and every message it sends, with the moment it arrived.

Moments are seconds of `time.monotonic`, which all processes of a host share. A reply or an output that does not come
in time is NotInTime, a BenchError, with what came instead. A cell has failed if it shows an error or its reply is one.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import AsyncKernelManager

from benchmarks.pairs import BenchError
from rpcbench.base.conditions import Condition

PATIENCE = 60.0
OPENED = "opened"
"""The name of the comm that `Kernel.open` has opened."""
_GLANCE_SECONDS = 0.2
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class NotInTime(BenchError):
    """What was waited for did not come."""


class Message(NamedTuple):
    """One message of the kernel, and the cell it belongs to."""

    at: float
    cell: str
    kind: str
    content: dict[str, Any]

    @property
    def text(self) -> str:
        """Of a stream; empty for others."""
        return str(self.content["text"]) if self.kind == "stream" else ""

    @property
    def is_idle(self) -> bool:
        return self.kind == "status" and self.content["execution_state"] == "idle"


class Ran(NamedTuple):
    """A cell that is over."""

    cell: str
    began: float
    ended: float
    messages: list[Message]
    replied: str = ""  # the error of its reply: a front end stops there, also where none is shown

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def text(self) -> str:
        return "".join(message.text for message in self.messages)

    @property
    def error(self) -> str:
        """The name of the error's class; empty if there was none."""
        return next((message.content["ename"] for message in self.messages if message.kind == "error"), self.replied)

    @property
    def traceback(self) -> str:
        lines = (line for message in self.messages if message.kind == "error" for line in message.content["traceback"])
        return _COLOUR.sub("", "\n".join(lines))

    @property
    def result(self) -> Message:
        """The first display or result. BenchError where there is none."""
        for message in self.messages:
            if message.kind in ("execute_result", "display_data"):
                return message
        raise BenchError(f"the cell shows no result: {self.text}{self.traceback}")


class Kernel:
    """One kernel and its client. Use `kernel(environ)`."""

    def __init__(self, manager: AsyncKernelManager, runner: asyncio.Runner) -> None:
        self._manager = manager
        self._runner = runner
        self._client = BlockingKernelClient()
        self._client.load_connection_info(manager.get_connection_info())
        self._client.start_channels()
        self.messages: list[Message] = []
        self.answers: list[str] = []  # to the questions that cells ask, in order; a question more waits for ever
        self._replies: dict[str, dict[str, Any]] = {}
        self._changes = Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, name="rpcbench-bench-reader", daemon=True)
        self._reader.start()
        self._wait_until_heard()

    def _wait_until_heard(self) -> None:
        """What the kernel sends before it knows that somebody listens is lost: ask until an answer comes."""
        asked: set[str] = set()
        deadline = time.monotonic() + PATIENCE
        while not self._changes.wait_for(lambda: any(m.is_idle and m.cell in asked for m in self.messages), 0.1):
            if time.monotonic() > deadline:
                raise NotInTime(f"the kernel did not answer in {PATIENCE:g} s")
            asked.add(self._client.kernel_info())

    @property
    def pid(self) -> int:
        pid: int = cast(Any, self._manager.provisioner).pid
        return pid

    def send(self, code: str) -> str:
        """Begin a cell; its name."""
        name: str = self._client.execute(code, stop_on_error=False)
        return name

    def wait(self, wanted: Callable[[Message], bool], what: str, patience: float = PATIENCE) -> Message:
        """The first message that is `wanted`."""
        seen = 0
        found: Message | None = None

        def came() -> bool:
            nonlocal seen, found
            while found is None and seen < len(self.messages):
                found = self.messages[seen] if wanted(self.messages[seen]) else None
                seen += 1
            return found is not None

        if not self._changes.wait_for(came, patience):
            last = [(message.kind, message.content) for message in self.messages[-5:]]
            raise NotInTime(f"waited {patience:g} s in vain for {what}; the last messages: {last}")
        assert found is not None
        return found

    def end(self, cell: str, began: float, patience: float = PATIENCE) -> Ran:
        """Wait until a cell is over."""
        idle = self.wait(lambda message: message.cell == cell and message.is_idle, "the end of a cell", patience)
        shown = [message for message in self.messages if message.cell == cell]
        reply = self._reply(cell, patience)
        return Ran(cell, began, idle.at, shown, reply["ename"] if reply["status"] == "error" else "")

    def _reply(self, cell: str, patience: float) -> dict[str, Any]:
        """It is sent before the cell is told to be over, by another way."""
        while cell not in self._replies:
            try:
                message = self._client.shell_channel.get_msg(timeout=patience)
            except queue.Empty:
                raise NotInTime(f"a cell is over, but its reply did not come in {patience:g} s") from None
            self._replies[message["parent_header"]["msg_id"]] = message["content"]
        return self._replies[cell]

    def run(self, code: str, error: str = "", patience: float = PATIENCE) -> Ran:
        """Run a cell to its end. BenchError if it does not end in this error, or in none."""
        began = time.monotonic()
        ran = self.end(self.send(code), began, patience)
        if ran.error != error:
            raise BenchError(f"{code!r} ended in {ran.error or 'no error'}, not in {error or 'none'}:\n{ran.traceback}")
        return ran

    def open(self, target: str) -> None:
        """Open a comm as an extension of a front end does. What comes by it are messages of the kind `comm_msg`."""
        content = {"comm_id": OPENED, "target_name": target, "data": {}}
        self._client.shell_channel.send(self._client.session.msg("comm_open", content))

    def interrupt(self) -> None:
        """What the stop button does."""
        self._runner.run(_awaited(self._manager.interrupt_kernel()))

    def kill(self) -> None:
        """End the kernel's own process at once."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._over = True
        self._reader.join()
        self._client.stop_channels()

    def _read(self) -> None:
        channels = {channel.socket: channel for channel in (self._client.iopub_channel, self._client.stdin_channel)}
        poller = zmq.Poller()
        for socket in channels:
            poller.register(socket, zmq.POLLIN)
        while not self._over:
            for socket, _ in poller.poll(int(_GLANCE_SECONDS * 1000)):
                self._take(channels[socket].get_msg())

    def _take(self, message: dict[str, Any]) -> None:
        at, cell = time.monotonic(), message["parent_header"].get("msg_id", "")
        if message["msg_type"] == "input_request" and self.answers:
            self._client.input(self.answers.pop(0))
        self.messages.append(Message(at, cell, message["msg_type"], message["content"]))
        self._changes.notify_all()


@contextmanager
def kernel(environ: dict[str, str], module: str = "") -> Iterator[Kernel]:
    """A kernel with these variables on top of ours; with `module` that one in place of ipykernel, which is then
    interrupted by a message."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory(prefix="rpcbench-kernel") as folder, asyncio.Runner() as runner:
        # The blocking manager leaves an event loop of its own open.
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
        if module:
            spec = cast(Any, manager.kernel_spec)
            spec.argv, spec.interrupt_mode = [sys.executable, "-m", module, "-f", "{connection_file}"], "message"
        runner.run(_awaited(manager.start_kernel(env={**os.environ, **environ}, **silent)))
        try:
            made = Kernel(manager, runner)
            try:
                yield made
            finally:
                made.close()
        finally:
            runner.run(_awaited(manager.shutdown_kernel(now=True)))


async def _awaited(what: Awaitable[Any]) -> Any:
    return await what
