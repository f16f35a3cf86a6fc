"""Turns a running Jupyter kernel into a worker: the launcher has the kernel call `join`.

Guarantees
- Cells of the notebook run on the kernel's main thread with its shell, one at a time, and never in the midst of code
  of another client of the kernel.
- SIGINT, output and displays are ours only while such a cell runs.
- When the world ends, the kernel ends in good order, within seconds even if a cell still runs.
- A cell behaves as on a process worker (`CellShell`), in the namespace of the kernel's other clients, which get the
  output of their own code as ever. The kernel's shell is lent to a cell, and is the kernel's own between cells.
- `await` in a cell runs on the kernel's event loop, and tasks that the cell leaves there continue. An interrupt cancels
  the cell, as in `asyncio.run`, and is reported as a KeyboardInterrupt.
"""

from __future__ import annotations

import _posixsubprocess
import asyncio
import atexit
import contextlib
import contextvars
import faulthandler
import gc
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ipykernel.compiler import XCachingCompiler
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.interactiveshell import InteractiveShell

from rpcbench.base.config import WorldConfig
from rpcbench.cells.output import OutputStream
from rpcbench.cells.runner import CellRunner, Job
from rpcbench.cells.shell import CellShell, NamedCompiler, ResultHook, WorkerDisplay
from rpcbench.launch.worker_bootstrap import configure_torch, exit_process
from rpcbench.launch.worker_main import SPARE_SECONDS, register_handlers
from rpcbench.rpc.init import start_agent
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.pool import PoolThread

_REPLACED = "original_"  # debugpy's prefix for a function that it has replaced
_MAIN = 1  # debugpy's number of the main thread
_ON_ITS_WAY = 0.1  # seconds for the event of a cell that has ended after a "continue"
_TELLING_SECONDS = 5.0  # for debugpy to reply
_LATEST = ("_", "__", "___")  # the latest results, which a display hook keeps as attributes


class _Compiler(NamedCompiler, XCachingCompiler):
    """A compiler that gives code the file names which debuggers of the kernel use."""


class KernelShell(CellShell, ZMQInteractiveShell):
    """The class of the kernel's shell while a cell of the notebook runs."""

    interrupted = False  # an interrupt has cancelled this cell

    async def _execute_cell(self, code: str) -> Any:
        try:
            transformed = self.transform_cell(code)  # type: ignore[no-untyped-call]
            waits = self.should_run_async(code, transformed_cell=transformed)
        except Exception:  # noqa: BLE001  (`run_cell` raises it again, and shows it)
            waits = False
        return await (self._on_loop(code, transformed) if waits else super()._execute_cell(code))

    async def _on_loop(self, code: str, transformed: str) -> Any:
        result = None
        try:
            result = await self.run_cell_async(code, store_history=True, transformed_cell=transformed)
        finally:
            self.events.trigger("post_execute")  # as `run_cell` does; `run_cell_async` leaves it to its caller
            self.events.trigger("post_run_cell", result)
        return result

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        error, running = exc_tuple[1] if exc_tuple else sys.exception(), self.displayhook.exec_result
        if self.interrupted and running is not None and isinstance(error, asyncio.CancelledError):  # not the cell's own
            running.error_in_exec = KeyboardInterrupt()
            exc_tuple = KeyboardInterrupt, running.error_in_exec, error.__traceback__
        super().showtraceback(exc_tuple, *args, **kwargs)


class _IdleShell(ZMQInteractiveShell):
    """The class of the kernel's shell between cells: errors in other threads, as of callbacks, also go to the log."""

    def _showtraceback(self, etype: Any, evalue: BaseException, stb: list[str]) -> None:
        if threading.current_thread() is threading.main_thread():
            super()._showtraceback(etype, evalue, stb)  # type: ignore[no-untyped-call]
        else:
            InteractiveShell._showtraceback(self, etype, evalue, stb)


class ShellLoan:
    """The loan of the kernel's shell to cells, which write to `output_stream`."""

    def __init__(self, shell: Any, worker: str, output_stream: OutputStream) -> None:
        self.shell = shell
        self._publisher = WorkerDisplay(parent=shell, shell=shell)  # type: ignore[no-untyped-call]
        self._hook = ResultHook(shell=shell, cache_size=shell.cache_size)  # type: ignore[no-untyped-call]
        self._publisher.output_stream = self._hook.output_stream = output_stream
        shell.__class__ = _IdleShell
        shell.compile.worker = worker
        vars(shell).pop("_showtraceback", None)  # ipykernel sets it on the instance, which would hide our method

    @contextlib.contextmanager
    def lend_shell(self) -> Iterator[None]:
        """Lend the shell while a cell runs. Enter and leave it only where no interrupt can come."""
        shell, publisher, hook = self.shell, self.shell.display_pub, self.shell.displayhook
        classes = shell.__class__, shell.compile.__class__  # a second shell would have its own namespace and history
        shell.__class__, shell.compile.__class__ = KernelShell, _Compiler
        shell.interrupted = False
        self._install_hooks(self._publisher, self._hook)
        try:
            yield
        finally:
            self._install_hooks(publisher, hook)
            shell.__class__, shell.compile.__class__ = classes

    def _install_hooks(self, publisher: Any, hook: Any) -> None:
        """Install a display publisher and a display hook; the latest results are carried over."""
        for name in _LATEST:
            setattr(hook, name, getattr(self.shell.displayhook, name))
        self.shell.display_pub, self.shell.displayhook, self.shell.display_trap.hook = publisher, hook, hook


def divert_calls(stream: Any, name: str, output_stream: OutputStream) -> None:
    """Have a stream of the kernel pass text that calls write to `output_stream`: no client of the kernel made them."""
    write_to_kernel = stream.write

    def write(text: str) -> int:
        if not isinstance(threading.current_thread(), PoolThread):
            return write_to_kernel(text)  # type: ignore[no-any-return]
        output_stream.write(name, text)
        return len(text)

    stream.write = write  # of this object: users' logging handlers keep the stream itself


def join(config: str) -> None:
    """Make this kernel the member that `config` (JSON of a WorldConfig) describes. Called on its main thread."""
    assert isinstance(sys.__stdout__, TextIOWrapper) and sys.__stderr__ is not None
    sys.__stdout__.reconfigure(line_buffering=True)
    faulthandler.enable(sys.__stderr__)
    configure_torch(os.environ)
    gc.freeze()  # loaded modules stay: collections, of which IPython has one at exit, then skip them
    kernel = IPKernelApp.instance().kernel
    if debugger := kernel_debugger(kernel):
        prepare_debugger(debugger)
    agent = start_agent(WorldConfig.from_json(config), parts=[CellRunner, register_handlers])
    stage = _KernelCells(kernel, agent)
    threading.Thread(target=stage.pass_cells_to_loop, name="rpcbench-cells", daemon=True).start()
    threading.Thread(target=_end_with_world, args=(agent, kernel), name="rpcbench-end", daemon=True).start()


def kernel_debugger(kernel: Any) -> Any:
    """Return the debugger of a kernel, which JupyterLab uses; None without debugpy, and in an ipykernel before 7.2,
    which cannot be told to hide frames."""
    found = getattr(kernel, "debugger", None)
    return found if hasattr(found, "kernel_modules") else None


def prepare_debugger(debugger: Any) -> None:
    """Have JupyterLab's debugger of this kernel show no frame of this package, and leave child processes alone."""
    debugger.kernel_modules.append(str(Path(__file__).parents[1]))
    spare_child_processes()


async def _end_stop(kernel: Any) -> None:
    """Have JupyterLab's debugger notice that an interrupt has ended a stop of this thread, which debugpy does not."""
    debugger = kernel_debugger(kernel)
    if debugger is None or _MAIN not in debugger.stopped_threads:
        return
    import debugpy

    async def end() -> None:
        await asyncio.sleep(_ON_ITS_WAY)
        async with kernel._control_lock:  # no request meanwhile, and none after the end of the debugger
            if _MAIN in debugger.stopped_threads:
                await tell()

    async def tell() -> None:
        arguments = {"threadId": _MAIN, "singleThread": True}
        await debugger.process_request({"type": "request", "seq": 0, "command": "continue", "arguments": arguments})
        if _MAIN in debugger.stopped_threads:  # else debugpy has told of it before its reply
            body = {"threadId": _MAIN, "allThreadsContinued": False}
            debugger._handle_event({"type": "event", "seq": 0, "event": "continued", "body": body})

    debugpy.trace_this_thread(True)  # the interrupt was raised in the trace function, which Python then removes
    ending = asyncio.run_coroutine_threadsafe(end(), kernel.control_thread.io_loop.asyncio_loop)
    with contextlib.suppress(TimeoutError):  # before the next cell: "continue" would resume a stop of that
        await asyncio.wait_for(asyncio.wrap_future(ending), _TELLING_SECONDS)


def spare_child_processes() -> None:
    """Have debugpy debug no process that this one starts: that would wait for JupyterLab, which never attaches."""
    from debugpy.server import api  # not `debugpy.configure`, which first lists all installed packages

    api._config["subProcess"] = False
    for module in (os, subprocess, _posixsubprocess):  # where it listens already, it has replaced their functions
        for name in [name for name in vars(module) if name.startswith(_REPLACED)]:
            setattr(module, name.removeprefix(_REPLACED), getattr(module, name))


class _KernelCells:
    """The loop that runs cells on the kernel's event loop, one at a time."""

    def __init__(self, kernel: Any, agent: Agent) -> None:
        self._kernel = kernel
        self._runner = agent.part(CellRunner)
        self._loan = ShellLoan(kernel.shell, agent.name, self._runner.output_stream)
        for name in ("stdout", "stderr"):
            divert_calls(getattr(sys, name), name, self._runner.output_stream)
        self._runner.cell_messages.install_hooks(kernel.shell)
        self._runner.shell, self._runner.elsewhere = kernel.shell, self._cancel_soon
        self._loop: asyncio.AbstractEventLoop = kernel.io_loop.asyncio_loop
        self._context = contextvars.copy_context()  # of all cells: they share context variables
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._cell: asyncio.Task[None] | None = None  # the latest
        self._serving = self._loop.create_task(self._serve_cells())
        self._serving.add_done_callback(_serving_failed)

    def pass_cells_to_loop(self) -> None:
        """Pass requested cells to the loop. Runs on a thread of its own, as waiting for them blocks."""
        for job in self._runner.queued_jobs():
            self._loop.call_soon_threadsafe(self._jobs.put_nowait, job)

    async def _serve_cells(self) -> None:
        while True:
            job = await self._jobs.get()
            async with self._kernel._main_asyncio_lock:  # ipykernel's own: one request at a time
                with self._runner.handling_signals(), self._loan.lend_shell():
                    self._cell = self._loop.create_task(self._runner.perform_job(job), context=self._context)
                    await self._cell
                await _end_stop(self._kernel)

    def _cancel_soon(self) -> None:
        """Cancel the cell: an interrupt came while the loop ran other code, or slept. Called in the signal handler."""
        self._loop.call_soon_threadsafe(self._cancel_cell, self._cell)

    def _cancel_cell(self, cell: asyncio.Task[None] | None) -> None:
        if cell is not None and not cell.done():
            self._loan.shell.interrupted = True
            cell.cancel()


def _serving_failed(serving: asyncio.Task[None]) -> None:
    # Without `_serve_cells` no cell would ever run again. The end of the process is reported to those that wait.
    traceback.print_exception(serving.exception(), file=sys.__stderr__)
    os._exit(1)


def _end_with_world(agent: Agent, kernel: Any) -> None:
    """End the process once the world has ended: in good order, unless a cell or a thread keeps running."""
    agent.links.closing.wait()
    agent.part(CellRunner).stop_serving()
    agent.shutdown(graceful=False)
    atexit.register(_leave_at_exit)
    kernel.io_loop.add_callback(kernel.io_loop.stop)
    time.sleep(agent.config.stop_seconds + SPARE_SECONDS)  # in good order, the process ends before this returns
    os._exit(1)


def _leave_at_exit() -> None:
    # The last registered `atexit` function runs first: this one runs the others, without the interpreter's cleanup.
    atexit.unregister(_leave_at_exit)
    exit_process(0)
