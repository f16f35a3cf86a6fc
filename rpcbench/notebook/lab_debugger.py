"""JupyterLab's debugger in `%%remote` cells on kernel workers: breakpoints, variables and steps in its own panel.

JupyterLab sends requests of the debug adapter protocol to the notebook's kernel. Each kernel worker has ipykernel's
debugger as well: requests for it pass over its control channel, and its events come back over its IOPub channel.

Guarantees
- Nothing is sent to a worker before a cell runs while the debugger is on and has a breakpoint.
- On a worker only the thread that reached the breakpoint stops: the others serve, and the stop button ends the cell.
- JupyterLab shows one stop at a time. Stops of other workers wait, and are shown in order once that one continues.
- A busy worker delays no cell; it gets breakpoints when a cell begins once it is idle. A lost worker's stop ends.
- Processes that the notebook's kernel or a worker starts run without the debugger.
- All state is used on the kernel's control thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq.asyncio
from ipykernel.compiler import get_file_name
from IPython.core.error import InputRejected
from jupyter_client.asynchronous.client import AsyncKernelClient

from rpcbench.base.errors import RpcError
from rpcbench.cells.runner import is_busy
from rpcbench.launch.cluster import Cluster
from rpcbench.launch.kernel_worker import prepare_debugger
from rpcbench.notebook import warn_on_stderr
from rpcbench.notebook.cluster_magic import running

_PATIENCE = 30.0  # seconds that a cell waits for idle workers: another client's code may run there
_LOOK = 0.5  # seconds between two looks whether a worker that sends nothing still exists
_STEP = 0.3  # seconds in which a step stops again, before the stop of another worker is shown
_OF_STOP = {
    "stackTrace", "scopes", "variables", "evaluate", "setVariable", "richInspectVariables", "copyToGlobals",
    "exceptionInfo", "continue", "next", "stepIn", "stepOut",
}  # fmt: skip
"""Requests about the stop that JupyterLab shows."""
_OF_ALL = ("setBreakpoints", "setExceptionBreakpoints")
_PROCESSES = (
    "JupyterLab's breakpoints stop in cells on kernel workers, and {} are none: start workers with "
    "%cluster start 2 --kind kernel, or write breakpoint() into the cell."
)
_BUSY = "{} is busy: it gets JupyterLab's breakpoints when a cell begins after its present one has ended."

Message = dict[str, Any]
"""A request, reply or event of the debug adapter protocol."""


def worker_code(cell: str) -> tuple[str, int]:
    """Return the code of the cell that a worker compiles, and the number of lines above it in the cell."""
    code = cell if cell.endswith("\n") else f"{cell}\n"  # as IPython passes it on
    first, _, rest = code.partition("\n")
    return (rest, 1) if first.startswith("%%remote") else (code, 0)


@dataclass(frozen=True, slots=True)
class Stop:
    """A thread that has stopped: of a worker, or of the notebook."""

    where: WorkerDebugger | None
    event: Message

    @property
    def thread_id(self) -> int:
        found: int = self.event["body"]["threadId"]
        return found


class WorkerDebugger:
    """The debugger of one kernel worker. `gone` tells whether the worker has ended; `hear` takes its events."""

    def __init__(
        self, name: str, file: str, gone: Callable[[], bool], hear: Callable[[WorkerDebugger, Message | None], None]
    ) -> None:
        self.name = name
        self._gone, self._hear = gone, hear
        self._context = zmq.asyncio.Context()
        self._client = AsyncKernelClient(connection_file=file, context=self._context)
        self._turn = asyncio.Lock()  # one request at a time
        self._numbers = itertools.count(1)
        self._cells: dict[str, tuple[str, int]] = {}  # by path there: path here, and lines above the worker's part
        self._placed: dict[str, Message] = {}  # the arguments sent last, by what they are of
        self._listening: asyncio.Task[None] | None = None

    async def attach_to_worker(self) -> None:
        """Begin. Waits for the worker's main thread to be idle."""
        self._client.load_connection_file()
        self._client.start_channels(shell=False, stdin=False, hb=False)
        self._listening = asyncio.create_task(self._receive_events())
        # Otherwise all threads would stop, and no thread could receive the stop button's interrupt.
        apart = {"stopAllThreadsOnSuspend": False, "steppingResumesAllThreads": False}
        begins = {"clientID": "rpcbench", "adapterID": "", "pathFormat": "path"}
        begun = await self.send_request("initialize", begins, math.inf)
        if not (begun.get("success") and (await self.send_request("attach", apart)).get("success")):
            self.close()
            raise RpcError(f"the debugger of {self.name} does not start")

    async def send_request(self, command: str, arguments: Message, patience: float = _PATIENCE) -> Message:
        """Return the worker's reply; one without success if it has ended, or does not reply in time: ipykernel sends no
        reply where its debugger fails."""
        number, until = next(self._numbers), time.monotonic() + patience
        request = {"type": "request", "seq": number, "command": command, "arguments": arguments}
        async with self._turn:
            sent = self._client.session.msg("debug_request", request)
            if not self._gone():
                self._client.control_channel.send(sent)
            while not self._gone() and time.monotonic() < until:
                with contextlib.suppress(queue.Empty):
                    reply = await self._client.get_control_msg(timeout=_LOOK)
                    if reply["parent_header"].get("msg_id") == sent["header"]["msg_id"]:
                        answer: Message = reply["content"]
                        return answer
        reason = f"{self.name} has ended" if self._gone() else f"the debugger of {self.name} does not reply"
        return {"type": "response", "request_seq": number, "success": False, "command": command, "message": reason}

    async def set_breakpoints(self, wanted: dict[str, tuple[str, Message]], cells: dict[str, str]) -> None:
        """Set breakpoints that differ from those set before. `wanted`: command and arguments, by what they are of;
        `cells`: texts of the notebook's cells, by path."""
        for key, (command, arguments) in list(wanted.items()):
            if self._placed.get(key) != arguments:
                self._placed[key] = arguments
                # also functions of the notebook's cells that calls run there
                await self.send_request(command, arguments)
                if key in cells:
                    await self._place_cell(key, cells[key], arguments)

    async def _place_cell(self, path: str, cell: str, arguments: Message) -> None:
        code, above = worker_code(cell)
        reply = await self.send_request("dumpCell", {"code": code})
        if not reply.get("success"):  # the worker has ended, or another client has ended its debugger
            return
        there = reply["body"]["sourcePath"]
        self._cells[there] = path, above
        lines = [{**each, "line": each["line"] - above} for each in arguments["breakpoints"] if each["line"] > above]
        await self.send_request("setBreakpoints", {**arguments, "source": {"path": there}, "breakpoints": lines})

    async def forward_request(self, message: Message) -> Message:
        """Pass on a request of JupyterLab about a stop here, and return the reply in the notebook's paths and lines."""
        reply = await self.send_request(message["command"], message.get("arguments", {}))
        for frame in reply.get("body", {}).get("stackFrames", []):
            frame["name"] = f"{self.name}: {frame['name']}"
            source = frame.get("source", {})
            path, above = self._cells.get(source.get("path", ""), (None, 0))
            if path is not None:
                source["path"], frame["line"] = path, frame["line"] + above
        return {**reply, "request_seq": message["seq"]}

    async def detach_from_worker(self) -> None:
        """Let all threads continue, and end."""
        await self.send_request("disconnect", {"restart": False, "terminateDebuggee": False})
        self.close()

    def close(self) -> None:
        """End without a word to the worker. Idempotent."""
        if self._listening is not None:
            self._listening.cancel()

    async def _receive_events(self) -> None:
        try:
            while not self._gone():
                with contextlib.suppress(queue.Empty):
                    message = await self._client.get_iopub_msg(timeout=_LOOK)
                    if message["msg_type"] == "debug_event":
                        self._hear(self, message["content"])
            self._hear(self, None)
        finally:
            async with self._turn:  # a request may still wait for a reply, and notice the worker's end
                self._client.stop_channels()
                self._context.destroy(linger=0)


class LabDebugger:
    """Replaces a kernel's `do_debug_request`, and calls the original for what concerns the notebook."""

    def __init__(self, shell: Any) -> None:
        self._shell, self._kernel = shell, shell.kernel
        self._loop: asyncio.AbstractEventLoop = self._kernel.control_thread.io_loop.asyncio_loop
        self._own, self._show = self._kernel.do_debug_request, self._kernel.debugger.event_callback
        self._cells: dict[str, str] = {}  # texts of cells, by path
        self._wanted: dict[str, tuple[str, Message]] = {}  # as in `WorkerDebugger.set_breakpoints`
        self._workers: dict[tuple[str, int], tuple[WorkerDebugger, asyncio.Task[None]]] = {}  # by file and process id
        self._shown: Stop | None = None  # by JupyterLab
        self._waiting: deque[Stop] = deque()  # to be shown
        prepare_debugger(self._kernel.debugger)  # no thread stops that holds a lock of ours, which this class needs
        self._kernel.do_debug_request = self.answer_request
        self._kernel.debugger.event_callback = functools.partial(self._event_received, None)
        shell.events.register("pre_run_cell", self._prepare_for_cell)

    def restore_kernel(self) -> None:
        """Restore the kernel's own functions, and end all debuggers of workers."""
        self._shell.events.unregister("pre_run_cell", self._prepare_for_cell)
        self._kernel.do_debug_request, self._kernel.debugger.event_callback = self._own, self._show
        asyncio.run_coroutine_threadsafe(self._detach_workers(), self._loop)

    async def answer_request(self, message: Message) -> Message:
        """Reply to a request of JupyterLab, as the kernel's `do_debug_request`."""
        command, arguments = message["command"], message.get("arguments", {})
        if self._shown is not None and self._shown.where is not None and command in _OF_STOP:
            return await self._shown.where.forward_request(message)
        reply: Message = await self._own(message)
        if command == "dumpCell":
            self._cells[reply["body"]["sourcePath"]] = arguments["code"]
        elif command in _OF_ALL:
            self._wanted[arguments.get("source", {}).get("path", "")] = command, arguments
            await self._place_breakpoints()
        elif command == "debugInfo" and self._shown is not None and self._shown.where is not None:
            reply["body"]["stoppedThreads"] = [self._shown.thread_id]  # for a page that was loaded again
        elif command == "disconnect":
            await self._detach_workers()
        return reply

    # -- workers
    def _prepare_for_cell(self, info: Any) -> None:
        """Have workers get the breakpoints before a cell runs, which does not run if this is interrupted. On the main
        thread."""
        transformers = self._shell.ast_transformers
        transformers[:] = [each for each in transformers if not isinstance(each, _Rejection)]
        if not (self._wanted and self._kernel.debugger.is_started and isinstance(cluster := running(), Cluster)):
            return
        try:
            self._prepare_workers(cluster, info)
        except KeyboardInterrupt:  # IPython would report it, and run the cell
            transformers.append(_Rejection())

    def _prepare_workers(self, cluster: Cluster, info: Any) -> None:
        if cluster.kind == "kernel":
            new = [name for name in cluster.workers if _process_of_worker(cluster, name) not in self._workers]
            busy = [
                name
                for name in new
                if cluster.agent.call(name, is_busy, label="the start of the debugger", own=True).wait()
            ]
            idle = [name for name in new if name not in busy]
            busy += asyncio.run_coroutine_threadsafe(self._attach_workers(cluster, idle), self._loop).result()
            if busy:
                warn_on_stderr(_BUSY.format(", ".join(busy)))
        elif worker_code(info.raw_cell)[1] and self._has_breakpoints(info.raw_cell):
            warn_on_stderr(_PROCESSES.format(", ".join(cluster.workers)))

    def _has_breakpoints(self, cell: str) -> bool:
        path = get_file_name(cell)  # type: ignore[no-untyped-call]
        return bool(self._wanted.get(path, ("", {}))[1].get("breakpoints"))

    async def _attach_workers(self, cluster: Cluster, names: list[str]) -> list[str]:
        """Attach to these workers, and set all breakpoints on all; return the workers that are late."""
        tasks = {}
        for name in names:
            file, pid = _process_of_worker(cluster, name)
            made = WorkerDebugger(name, file, cluster.end_of(name), self._event_received)
            task = asyncio.create_task(made.attach_to_worker())
            self._workers[file, pid], tasks[task] = (made, task), name
        _, late = await asyncio.wait(tasks, timeout=_PATIENCE) if tasks else (set(), set())
        for task in late:
            task.add_done_callback(lambda _: asyncio.ensure_future(self._place_breakpoints()))
        await self._place_breakpoints()
        for task in tasks.keys() - late:
            if error := task.exception():
                warn_on_stderr(f"{error}: breakpoints do not stop there.")
        return sorted(tasks[task] for task in late)

    async def _place_breakpoints(self) -> None:
        """Set all breakpoints on all workers that are attached."""
        for worker, attaching in list(self._workers.values()):
            if _is_attached(attaching):
                await worker.set_breakpoints(self._wanted, self._cells)

    async def _detach_workers(self) -> None:
        ended, self._workers, self._wanted = list(self._workers.values()), {}, {}
        self._shown = None
        self._waiting.clear()
        for worker, attaching in ended:
            if _is_attached(attaching):
                await worker.detach_from_worker()
            else:
                attaching.cancel()
                worker.close()

    # -- stops
    def _event_received(self, where: WorkerDebugger | None, event: Message | None) -> None:
        """Show an event, or remember it to be shown; None once the worker has ended."""
        if event is None:
            self._worker_ended(where)
        elif event["event"] == "stopped":
            stop = Stop(where, event)
            if self._shown is None or (self._shown.where, self._shown.thread_id) == (where, stop.thread_id):
                self._shown = stop  # also the end of a step, before stops of others that wait
                self._show(event)
            else:
                self._waiting.append(stop)
        elif event["event"] == "continued":
            self._thread_continued(where, event)
        elif where is None:
            self._show(event)

    def _thread_continued(self, where: WorkerDebugger | None, event: Message) -> None:
        thread = None if event["body"].get("allThreadsContinued") else event["body"]["threadId"]

        def goes_on(stop: Stop) -> bool:
            return stop.where is where and thread in (None, stop.thread_id)

        self._waiting = deque(stop for stop in self._waiting if not goes_on(stop))
        if self._shown is not None and goes_on(self._shown):
            self._shown = None
            self._show(event)
            self._loop.call_later(_STEP, self._show_next)

    def _show_next(self) -> None:
        if self._shown is None and self._waiting:
            self._shown = self._waiting.popleft()
            self._show(self._shown.event)

    def _worker_ended(self, where: WorkerDebugger | None) -> None:
        """End the stops of a worker that has ended, and forget its debugger."""
        for key in [key for key, (worker, _) in self._workers.items() if worker is where]:
            del self._workers[key]
        body = {"threadId": self._shown.thread_id if self._shown else 0, "allThreadsContinued": True}
        self._thread_continued(where, {"type": "event", "event": "continued", "seq": 0, "body": body})


def _process_of_worker(cluster: Cluster, name: str) -> tuple[str, int]:
    """Return the connection file and the process id of a worker."""
    return cluster.connection_file(name), cluster.pid(name)


def _is_attached(attaching: asyncio.Task[None]) -> bool:
    return attaching.done() and not attaching.cancelled() and attaching.exception() is None


class _Rejection:
    """Keeps a cell from running, as a transformer of its syntax tree."""

    def visit(self, node: object) -> object:
        raise InputRejected("interrupted before the cell began")
