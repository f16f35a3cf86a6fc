"""The shell of a kernel, lent to a cell of the notebook: between two of those it is the kernel's own again.

Guarantees
- A cell behaves as on a process worker (`CellShell`), in the namespace that the kernel's other clients see; what these
  run is shown to them, as ever.
- What a cell awaits runs on the kernel's loop, and tasks that it leaves there go on. An interrupt cancels the cell, as
  in `asyncio.run`, and is told as a KeyboardInterrupt.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ipykernel.compiler import XCachingCompiler
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.interactiveshell import InteractiveShell

from rpcbench.launch.outbox import Outbox
from rpcbench.launch.shell import CellShell, NamedCompiler, Publisher, ResultHook

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


class Loan:
    """Lends the shell of this process's kernel, for cells that write to `outbox`."""

    def __init__(self, shell: Any, worker: str, outbox: Outbox) -> None:
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
