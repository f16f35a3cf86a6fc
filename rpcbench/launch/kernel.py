"""Workers that are Jupyter kernels of this host: `jupyter console --existing FILE` sees what their cells have made.

They are launched through jupyter_client, so a kernel spec may name any provisioner, and told by a request over their
own signed channel to join the world. Guarantees
- No command line or environment shows the secret; connection files, sockets and logs lie in the run directory.
- Kernels outlive neither `close` nor this process, however it ends; nor does the run directory: a starter guards them.
  Kernels of other provisioners than jupyter_client's own end with the world, soon after.
- An exit is noticed at once where the provisioner is jupyter_client's own (Linux), else as often as that polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from jupyter_client.manager import AsyncKernelManager

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError
from rpcbench.launch import starters
from rpcbench.launch.base import ExitCallback
from rpcbench.launch.handle import ProcessHandle, check_name, log_of
from rpcbench.launch.kernel_process import KernelProcess
from rpcbench.launch.lease import Lease, ended
from rpcbench.launch.starter import Starter
from rpcbench.transport.run_dir import RunDirectory

_START_SECONDS = 60.0
_TERM_SECONDS = 0.5
_KILL_SECONDS = 5.0


class KernelLauncher:
    """Starts workers of one cluster, which keeps its files in `run_directory`. See `Launcher` for the methods.

    `kernel` names a kernel spec; its kernel must be an ipykernel of the same Python. RpcError where there is none,
    ModuleNotFoundError without ipykernel.
    """

    far = False

    def __init__(self, run_directory: RunDirectory, kernel: str = "python3") -> None:
        import ipykernel  # noqa: F401  (whose absence is told before anything starts)

        _check_spec(kernel)
        self._spec = kernel
        self._directory = run_directory
        self._maker = os.getpid()
        self._lease = Lease(run_directory.path, starters.take_any, self._have_guarded)
        self._kernels: set[KernelProcess] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rpcbench-kernels", daemon=True)
        self._thread.start()

    def warm(self) -> None:
        """Have the starter that guards the kernels."""
        self._lease.starter()

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> ProcessHandle:
        """Start a worker with this process's directory, environment and import path as they are now.

        Errors: ValueError for a name that no file can have, RpcError where it cannot be launched, ShutdownError.
        """
        check_name(config.name)
        if threading.current_thread() is self._thread:
            raise RuntimeError("a worker cannot be started from on_exit itself; hand that to another thread")
        self._lease.starter()
        log = log_of(self._directory.path, config.name, config.incarnation)
        kernel = KernelProcess(config, self._manager(config), log, self._soon, on_exit)
        try:
            self._soon(lambda: self._see_to(kernel))
            if not kernel.handle.started(_START_SECONDS):
                raise RpcError(f"{config.name} was not launched within {_START_SECONDS:g} s")
            if kernel.is_local:
                self._lease.starter().guard(kernel.handle.pid, config.stop_seconds)
        except BaseException:
            kernel.handle.abandon()
            raise
        return kernel.handle

    def connection_file(self, name: str) -> Path:
        """Where clients find the worker of that name, also after it was started again."""
        return self._directory.path / f"{name}.json"

    def _manager(self, config: WorldConfig) -> AsyncKernelManager:
        sockets = self._directory.path / f"k{config.id}.{config.incarnation}"
        return AsyncKernelManager(
            kernel_name=self._spec,
            connection_file=str(self.connection_file(config.name)),
            transport="ipc",
            ip=str(sockets),
        )

    def _have_guarded(self, starter: Starter) -> None:
        for kernel in list(self._kernels):
            if kernel.handle.has_begun and kernel.is_local:
                starter.guard(kernel.handle.pid, kernel.grace)

    def close(self) -> None:
        """End the workers (SIGTERM, SIGKILL after 0.5 s), and remove the run directory. The starter stays warm."""
        if os.getpid() != self._maker:
            return
        self._lease.shut()
        try:
            self._soon(self._end_all)
            if threading.current_thread() is not self._thread:
                self._thread.join(_TERM_SECONDS + 2 * _KILL_SECONDS)
            self._lease.end()
        finally:
            self._directory.remove()

    # -- the loop
    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _soon(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: all has ended
            self._loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        task.add_done_callback(asyncio.Task.result)  # an error is told in the log

    async def _see_to(self, kernel: KernelProcess) -> None:
        if self._lease.closed:
            kernel.handle.refuse(ended())
            return
        self._kernels.add(kernel)
        try:
            await kernel.live()
        finally:
            self._kernels.remove(kernel)

    async def _end_all(self) -> None:
        """End all kernels, and then the loop."""
        for which, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            for kernel in list(self._kernels):
                await kernel.signal(which)
            if others := self._work - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=seconds)
        self._loop.stop()


def _check_spec(kernel: str) -> None:
    try:
        KernelSpecManager().get_kernel_spec(kernel)
    except NoSuchKernel:
        raise RpcError(
            f"Jupyter knows no kernel {kernel!r}; `jupyter kernelspec list` shows which there are, and "
            "`python -m ipykernel install --sys-prefix` installs python3"
        ) from None
