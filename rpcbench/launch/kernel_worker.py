"""What makes a running kernel a worker: `join`, called in it by who launched it.

Guarantees
- Cells of the notebook run on the kernel's main thread with its shell, one after the other, and never in the midst of
  what another client of the kernel runs, nor that in theirs.
- SIGINT, output and displays are ours only while such a cell runs.
- When the world ends so does the kernel, in good order, and within seconds even where a cell runs on.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from ipykernel.kernelapp import IPKernelApp

from rpcbench.base.config import WorldConfig
from rpcbench.launch.become import leave, settle_torch
from rpcbench.launch.cells import CellRunner, Job
from rpcbench.launch.kernel_shell import Loan
from rpcbench.launch.worker import SPARE_SECONDS, obey
from rpcbench.rpc.init import start_agent

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent


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
        self._loan = Loan(kernel.shell, agent.name, self._runner.outbox)
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
