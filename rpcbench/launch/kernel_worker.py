"""What makes a running kernel a worker: `join`, called in it by who launched it.

Guarantees
- Cells of the notebook run on the kernel's main thread with its shell, one after the other, and never in the midst of
  what another client of the kernel runs, nor that in theirs.
- SIGINT, output and displays are ours only while such a cell runs.
- When the world ends so does the kernel, in good order, and within seconds even where a cell runs on.
- A cell behaves as on a process worker (`CellShell`), in the namespace that the kernel's other clients see; what these
  run is shown to them, as ever. The kernel's shell is lent to a cell; between two of those it is the kernel's own
  again.
- What a cell awaits runs on the kernel's loop, and tasks that it leaves there go on. An interrupt cancels the cell, as
  in `asyncio.run`, and is told as a KeyboardInterrupt.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from ipykernel.compiler import XCachingCompiler
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.interactiveshell import InteractiveShell

from rpcbench.base.config import WorldConfig
from rpcbench.cells.output import OutputStream
from rpcbench.cells.runner import CellRunner, Job
from rpcbench.cells.shell import CellShell, NamedCompiler, Publisher, ResultHook
from rpcbench.cells.worker_main import SPARE_SECONDS, obey
from rpcbench.launch.worker_bootstrap import leave, settle_torch
from rpcbench.rpc.init import start_agent

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent


_LATEST = ("_", "__", "___")


class _Compiler(NamedCompiler, XCachingCompiler):
    """Code keeps the file names by which a debugger knows it."""


class KernelShell(CellShell, ZMQInteractiveShell):
    """What a kernel's shell is while a cell of the notebook has it."""

    interrupted = False

    async def _execute(self, code: str) -> Any:
        try:
            transformed = self.transform_cell(code)  # type: ignore[no-untyped-call]
            waits = self.should_run_async(code, transformed_cell=transformed)
        except Exception:  # noqa: BLE001  (`run_cell` comes upon it, too, and shows it)
            waits = False
        return await (self._on_loop(code, transformed) if waits else super()._execute(code))

    async def _on_loop(self, code: str, transformed: str) -> Any:
        result = None
        try:
            result = await self.run_cell_async(code, store_history=True, transformed_cell=transformed)
        finally:
            self.events.trigger("post_execute")
            self.events.trigger("post_run_cell", result)
        return result

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        error, running = exc_tuple[1] if exc_tuple else sys.exception(), self.displayhook.exec_result
        if self.interrupted and running is not None and isinstance(error, asyncio.CancelledError):
            running.error_in_exec = KeyboardInterrupt()
            exc_tuple = KeyboardInterrupt, running.error_in_exec, error.__traceback__
        super().showtraceback(exc_tuple, *args, **kwargs)


class _IdleShell(ZMQInteractiveShell):
    """What it is between two of those: what goes wrong in other threads, as in callbacks, is told in the log, too."""

    def _showtraceback(self, etype: Any, evalue: BaseException, stb: list[str]) -> None:
        if threading.current_thread() is threading.main_thread():
            super()._showtraceback(etype, evalue, stb)  # type: ignore[no-untyped-call]
        else:
            InteractiveShell._showtraceback(self, etype, evalue, stb)


class ShellLoan:
    """Lends the shell of this process's kernel, for cells that write to `outbox`."""

    def __init__(self, shell: Any, worker: str, outbox: OutputStream) -> None:
        self.shell = shell
        self._publisher = Publisher(parent=shell, shell=shell)  # type: ignore[no-untyped-call]
        self._hook = ResultHook(shell=shell, cache_size=shell.cache_size)  # type: ignore[no-untyped-call]
        self._publisher.outbox = self._hook.outbox = outbox
        shell.__class__ = _IdleShell
        shell.compile.worker = worker
        vars(shell).pop("_showtraceback", None)  # its own method, which ipykernel has put there: it would hide ours

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """While a cell runs. Not where an interrupt may come."""
        shell, publisher, hook = self.shell, self.shell.display_pub, self.shell.displayhook
        classes = shell.__class__, shell.compile.__class__
        shell.__class__, shell.compile.__class__ = KernelShell, _Compiler
        shell.interrupted = False
        self._put(self._publisher, self._hook)
        try:
            yield
        finally:
            self._put(publisher, hook)
            shell.__class__, shell.compile.__class__ = classes

    def _put(self, publisher: Any, hook: Any) -> None:
        """These show displays and results from now on; the latest results are the same for all."""
        for name in _LATEST:
            setattr(hook, name, getattr(self.shell.displayhook, name))
        self.shell.display_pub, self.shell.displayhook, self.shell.display_trap.hook = publisher, hook, hook


def join(config: str) -> None:
    """Make this kernel the member that `config` (JSON of a WorldConfig) names. On its main thread."""
    assert isinstance(sys.__stdout__, TextIOWrapper) and sys.__stderr__ is not None
    sys.__stdout__.reconfigure(line_buffering=True)
    faulthandler.enable(sys.__stderr__)
    settle_torch(os.environ)
    gc.freeze()  # what is loaded by now stays: no collection, and IPython has one at its end, goes over it again
    kernel = IPKernelApp.instance().kernel
    agent = start_agent(WorldConfig.from_json(config), parts=[CellRunner, obey])
    stage = _Stage(kernel, agent)
    threading.Thread(target=stage.feed, name="rpcbench-cells", daemon=True).start()
    threading.Thread(target=_end, args=(agent, kernel), name="rpcbench-end", daemon=True).start()


class _Stage:
    """Performs cells on the kernel's loop."""

    def __init__(self, kernel: Any, agent: Agent) -> None:
        self._kernel = kernel
        self._runner = agent.part(CellRunner)
        self._loan = ShellLoan(kernel.shell, agent.name, self._runner.outbox)
        self._runner.talk.equip(kernel.shell)
        self._runner.shell, self._runner.elsewhere = kernel.shell, self._cancel_soon
        self._loop: asyncio.AbstractEventLoop = kernel.io_loop.asyncio_loop
        self._context = contextvars.copy_context()  # one for all cells, as a thread of their own has
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._cell: asyncio.Task[None] | None = None
        self._serving = self._loop.create_task(self._serve())
        self._serving.add_done_callback(_fail)

    def feed(self) -> None:
        """Hand what is asked for to the loop. On a thread of its own."""
        for job in self._runner.jobs():
            self._loop.call_soon_threadsafe(self._jobs.put_nowait, job)

    async def _serve(self) -> None:
        while True:
            job = await self._jobs.get()
            async with self._kernel._main_asyncio_lock:  # ipykernel's own: one request at a time
                with self._runner.in_charge(), self._loan.begin():
                    self._cell = self._loop.create_task(self._runner.perform(job), context=self._context)
                    await self._cell

    def _cancel_soon(self) -> None:
        """An interrupt has found the loop at work for others, or asleep. In the signal handler."""
        self._loop.call_soon_threadsafe(self._cancel, self._cell)

    def _cancel(self, cell: asyncio.Task[None] | None) -> None:
        if cell is not None and not cell.done():
            self._loan.shell.interrupted = True
            cell.cancel()


def _fail(serving: asyncio.Task[None]) -> None:
    """Without that no cell would ever run again: whoever waits shall hear of the kernel's end."""
    traceback.print_exception(serving.exception(), file=sys.__stderr__)
    os._exit(1)


def _end(agent: Agent, kernel: Any) -> None:
    """End the process once the world is over: in good order, unless a cell or a thread runs on."""
    agent.closing.wait()
    agent.part(CellRunner).stop()
    agent.shutdown(graceful=False)
    atexit.register(_leave)
    kernel.io_loop.add_callback(kernel.io_loop.stop)
    time.sleep(agent.config.stop_seconds + SPARE_SECONDS)  # where all is well, this thread goes with the process before
    os._exit(1)


def _leave() -> None:
    """The first of the `atexit` functions, as it came last: have the others run, and the interpreter not tidied up."""
    atexit.unregister(_leave)
    leave(0)
