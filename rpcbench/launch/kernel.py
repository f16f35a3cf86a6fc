"""The launcher "kernel": workers that are Jupyter kernels of this host, open to `jupyter console --existing FILE`.

jupyter_client starts kernels, by any provisioner; a request over its signed channel has a kernel join the world.

Guarantees
- No command line or environment shows the secret; connection files, sockets and logs are in the run directory.
- Kernels outlive neither `close` nor this process, in any way it ends, nor does the run directory: a fork server
  guards them. Kernels of provisioners other than jupyter_client's own end soon after the world.
- An exit is noticed at once if the provisioner is jupyter_client's own (Linux), else when the provisioner polls.
- The handle of a kernel is begun and then ended, or refused, once; by then all its files but the log are removed.
- An error that keeps a kernel from joining ends it, and is the last line of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError
from rpcbench.base.ids import check_name
from rpcbench.cells.worker_log import log_path, open_private
from rpcbench.launch.base import KILL_SECONDS, ExitCallback, ProcessHandle
from rpcbench.launch.environment import Interpreter, find_interpreter
from rpcbench.launch.fork_client import ForkServerClient, default_environment
from rpcbench.launch.fork_server import TERM_SECONDS
from rpcbench.launch.process import ForkServerLauncher, launcher_closed_error
from rpcbench.transport.run_dir import RunDirectory

Soon = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
"""Runs a coroutine on the event loop; callable on any thread."""

_ARGUMENTS = [
    "--IPKernelApp.capture_fd_output=False",  # output of C code goes to the log
    "--IPKernelApp.quiet=False",  # and so does Python's outside the notebook's cells
    "--HistoryManager.hist_file=:memory:",  # no file outside the run directory
]
_GUARDED = "--IPKernelApp.parent_handle=1"
"""For a kernel that a fork server guards: one that polls its parent itself ends by `os._exit`, without `atexit`."""
_LOCAL = "local-provisioner"
# Run in the kernel, which might be another Python; any error ends it.
_JOIN = """\
import os, sys, traceback
try:
    if sys.version_info[:2] != {version}:
        raise RuntimeError(f"the kernel runs Python {{sys.version.split()[0]}}, this process {version[0]}.{version[1]}")
    sys.path[:] = {path}
    from rpcbench.launch.kernel_worker import join
    join({config!r})
except BaseException:
    traceback.print_exc(file=sys.__stderr__)
    os._exit(1)
"""


class KernelProcess:
    """A kernel, from its launch to its exit. `manager` has its kernel spec and its connection file."""

    def __init__(
        self, config: WorldConfig, manager: AsyncKernelManager, log: Path, soon: Soon, on_exit: ExitCallback | None,
        python: Interpreter,
    ) -> None:  # fmt: skip
        self.handle = ProcessHandle(config.name, log, lambda which: soon(lambda: self.send_signal(which)), on_exit)
        self.grace = config.stop_seconds
        self._manager = manager
        assert manager.kernel_spec is not None  # `KernelLauncher` has checked
        named = manager.kernel_spec.metadata.get("kernel_provisioner", {}).get("provisioner_name", _LOCAL)
        self._more = [*_ARGUMENTS, _GUARDED] if named == _LOCAL and hasattr(os, "pidfd_open") else _ARGUMENTS
        self._unwanted = False  # killed before its process exists
        # As of the call of `start`, as the loop runs later. debugpy writes no warning to the log.
        environ = default_environment({"PYDEVD_DISABLE_FILE_VALIDATION": "1", **config.pinned_environment(os.environ)})
        self._surroundings: dict[str, Any] = {"cwd": str(Path.cwd()), "env": environ}
        self._code = _JOIN.format(version=sys.version_info[:2], path=python.import_path(), config=config.to_json())

    async def run_until_exit(self) -> None:
        """Launch the kernel, have it join the world, and wait for its end."""
        try:
            await self._launch_kernel()
        except Exception as error:  # noqa: BLE001  (provisioners raise errors of any type)
            await self._manager.cleanup_resources()
            self.handle.start_failed(
                RpcError(f"{self.handle.name} could not be launched: {type(error).__name__}: {error}")
            )
            return
        status = -signal.SIGKILL
        joining = asyncio.create_task(self._have_it_join())
        try:
            self.handle.local = self.is_local
            if pid := getattr(self._provisioner, "pid", None):  # others begin once the kernel has sent its pid
                self.handle.process_created(pid)
            status = await self._wait_for_exit()
        finally:
            joining.cancel()
            await asyncio.wait([joining])
            await self._manager.cleanup_resources()
            if self.handle.has_begun:
                self.handle.process_ended(status)
            else:
                self.handle.start_failed(
                    RpcError(f"{self.handle.name} ended with {status}:\n{self.handle.last_words()}")
                )

    async def _launch_kernel(self) -> None:
        with open_private(self.handle.log) as log:  # the kernel has a duplicate
            await self._manager.start_kernel(
                **self._surroundings, stdout=log.fileno(), stderr=log.fileno(), extra_arguments=self._more
            )
        if self._unwanted:
            await self.send_signal(signal.SIGKILL)

    async def _have_it_join(self) -> None:
        client = self._manager.client(context=self._manager.context)
        client.start_channels(iopub=False, stdin=False, hb=False, control=False)
        try:
            # An expression: the text of a cell would be kept in the history, with the secret.
            expressions = {"joined": f"[exec({self._code!r}, {{}}), __import__('os').getpid()][1]"}
            client.execute("", silent=True, store_history=False, allow_stdin=False, user_expressions=expressions)
            answer = (await client.get_shell_msg())["content"]
        finally:
            client.stop_channels()
        joined = answer.get("user_expressions", {}).get("joined", answer)
        if joined["status"] != "ok":
            with self.handle.log.open("a") as log:
                log.write(f"the kernel could not be asked to join: {joined.get('ename')}: {joined.get('evalue')}\n")
            await self.send_signal(signal.SIGKILL)
        elif not self.handle.has_begun:  # its provisioner has no pid
            self.handle.process_created(int(joined["data"]["text/plain"]))

    async def _wait_for_exit(self) -> int:
        if self.is_local and hasattr(os, "pidfd_open"):  # else `wait` polls
            await _wait_readable(os.pidfd_open(self.handle.pid))
        return await self._provisioner.wait() or 0

    @property
    def is_local(self) -> bool:
        """Whether its process is certainly one of this host."""
        return isinstance(self._provisioner, LocalProvisioner)

    @property
    def _provisioner(self) -> Any:
        return self._manager.provisioner

    async def send_signal(self, which: int) -> None:
        """Send SIGINT to the kernel alone, SIGTERM or SIGKILL to it and its child processes."""
        if not self._manager.has_kernel:
            self._unwanted = which != signal.SIGINT
        elif which == signal.SIGKILL:
            await self._provisioner.kill()
        elif which == signal.SIGTERM:
            await self._provisioner.terminate()
        elif self.is_local:
            os.kill(self.handle.pid, which)
        else:
            await self._manager.interrupt_kernel()


async def _wait_readable(descriptor: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


class KernelLauncher(ForkServerLauncher):
    """A launcher of Jupyter kernels as workers. For the methods see `Launcher`.

    Args:
        run_directory: Of the cluster's files; `close` removes it.
        kernel: The name of a kernel spec, for an ipykernel of the same Python.
        python: The interpreter that runs the kernels, in place of the one that the spec names.

    Raises:
        RpcError: There is no such kernel spec.
        ValueError: `python` is no interpreter that suits.
        ModuleNotFoundError: ipykernel is not installed.
    """

    far = False
    pins = True

    def __init__(self, run_directory: RunDirectory, kernel: str = "python3", python: str | None = None) -> None:
        import ipykernel  # noqa: F401  (if it is missing, the error comes before any process starts)

        _check_spec(kernel)
        self._python = find_interpreter(python, ["ipykernel"])
        super().__init__(run_directory)
        self._spec = kernel
        self._kernels: set[KernelProcess] = set()
        self._work: set[asyncio.Task[None]] = set()  # references, as the loop itself keeps none to its tasks
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="rpcbench-kernels", daemon=True)
        self._thread.start()

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> ProcessHandle:
        """See `Launcher`. Workers have the current directory, environment and import path of this process. ValueError
        for a name that is no file name."""
        check_name(config.name)
        if threading.current_thread() is self._thread:  # it would wait for work that only it can do
            raise RuntimeError("a worker cannot be started from on_exit itself; hand that to another thread")
        self._working_server()
        log = log_path(self._directory.path, config.name, config.incarnation)
        kernel = KernelProcess(config, self._make_manager(config), log, self._run_soon, on_exit, self._python)
        try:
            self._run_soon(lambda: self._run_to_end(kernel))
            if not kernel.handle.wait_until_created(config.start_seconds):
                raise RpcError(f"{config.name} was not launched within {config.start_seconds:g} s")
            if kernel.is_local:
                self._working_server().guard(kernel.handle.pid, config.stop_seconds)
        except BaseException:  # Ctrl-C, too
            kernel.handle.abandon_process()
            raise
        return kernel.handle

    def connection_file(self, name: str) -> Path:
        """Return the connection file of a worker; it keeps this path when the worker is started again."""
        return self._directory.path / f"{name}.json"

    def _make_manager(self, config: WorldConfig) -> AsyncKernelManager:
        sockets = self._directory.path / f"k{config.id}.{config.incarnation}"
        manager = AsyncKernelManager(
            kernel_name=self._spec,
            connection_file=str(self.connection_file(config.name)),
            transport="ipc",  # sockets in the run directory, which other users cannot reach
            ip=str(sockets),
        )
        if self._python.own:
            assert manager.kernel_spec is not None  # `_check_spec` has found it
            manager.kernel_spec.argv[:1] = [self._python.executable]
        return manager

    def _guard_again(self, server: ForkServerClient) -> None:
        for kernel in list(self._kernels):
            if kernel.handle.has_begun and kernel.is_local:
                server.guard(kernel.handle.pid, kernel.grace)

    def _end_workers(self) -> None:
        self._run_soon(self._end_all)
        # An exit callback may call this on the loop's own thread, which cannot be joined.
        if threading.current_thread() is not self._thread:
            self._thread.join(TERM_SECONDS + 2 * KILL_SECONDS)

    # -- the loop
    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _run_soon(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: all kernels have ended
            self._loop.call_soon_threadsafe(self._begin_task, work)

    def _begin_task(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        task.add_done_callback(asyncio.Task.result)  # raises its error, which asyncio then logs

    async def _run_to_end(self, kernel: KernelProcess) -> None:
        if self._closed:
            kernel.handle.start_failed(launcher_closed_error())
            return
        self._kernels.add(kernel)
        try:
            await kernel.run_until_exit()
        finally:
            self._kernels.remove(kernel)

    async def _end_all(self) -> None:
        for which, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            for kernel in list(self._kernels):
                await kernel.send_signal(which)
            if others := self._work - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=seconds)
        self._loop.stop()


def _check_spec(kernel: str) -> None:
    try:
        KernelSpecManager().get_kernel_spec(kernel)
    except NoSuchKernel:
        raise RpcError(
            f"Jupyter has no kernel {kernel!r}; `jupyter kernelspec list` lists the kernels, and "
            "`python -m ipykernel install --sys-prefix` installs python3"
        ) from None
