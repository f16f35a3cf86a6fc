"""Workers that are Jupyter kernels of this host: `jupyter console --existing FILE` sees what their cells have made.

They are launched through jupyter_client, so a kernel spec may name any provisioner, and told by a request over their
own signed channel to join the world. Guarantees
- No command line or environment shows the secret; connection files, sockets and logs lie in the run directory.
- Kernels outlive neither `close` nor this process, however it ends; nor does the run directory: a starter guards them.
  Kernels of other provisioners than jupyter_client's own end with the world, soon after.
- An exit is noticed at once where the provisioner is jupyter_client's own (Linux), else as often as that polls.
- The handle of a kernel is begun and then ended, or refused, once; by then no file of the kernel is left but its log.
- What keeps a kernel from joining ends it, with the reason as its last words.
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
from rpcbench.launch import fork_client
from rpcbench.launch.base import ExitCallback, ProcessHandle, check_name, log_of
from rpcbench.launch.fork_client import ForkServerClient, import_path
from rpcbench.launch.process import ForkServerLease, ended
from rpcbench.transport.run_dir import RunDirectory

Soon = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
"""Has work done on the loop; callable from any thread."""

_ARGUMENTS = [
    "--IPKernelApp.capture_fd_output=False",  # what is written past Python goes to the log
    "--IPKernelApp.quiet=False",  # and so does what Python writes outside the notebook's cells
    "--HistoryManager.hist_file=:memory:",
]
_GUARDED = "--IPKernelApp.parent_handle=1"
"""For a kernel that a starter guards: one that looks after its parent itself ends by `os._exit`, once that has gone."""
_LOCAL = "local-provisioner"
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
    """A kernel of the kernel spec `manager.kernel_name`; its connection file and sockets lie where `manager` says."""

    def __init__(
        self, config: WorldConfig, manager: AsyncKernelManager, log: Path, soon: Soon, on_exit: ExitCallback | None
    ) -> None:
        self.handle = ProcessHandle(config.name, log, lambda which: soon(lambda: self.signal(which)), on_exit)
        self.grace = config.stop_seconds
        self._manager = manager
        assert manager.kernel_spec is not None  # the launcher has looked
        named = manager.kernel_spec.metadata.get("kernel_provisioner", {}).get("provisioner_name", _LOCAL)
        self._more = [*_ARGUMENTS, _GUARDED] if named == _LOCAL and hasattr(os, "pidfd_open") else _ARGUMENTS
        self._unwanted = False
        self._surroundings = str(Path.cwd()), _environ()
        self._code = _JOIN.format(version=sys.version_info[:2], path=import_path(), config=config.to_json())

    async def live(self) -> None:
        """Launch the kernel, have it join the world, and wait for its end."""
        try:
            await self._launch()
        except Exception as error:  # noqa: BLE001  (whatever a provisioner raises)
            await self._manager.cleanup_resources()
            self.handle.refuse(RpcError(f"{self.handle.name} could not be launched: {type(error).__name__}: {error}"))
            return
        status = -signal.SIGKILL
        joining = asyncio.create_task(self._have_it_join())
        try:
            self.handle.local = self.is_local
            if pid := getattr(self._provisioner, "pid", None):
                self.handle.begin(pid)
            status = await self._end()
        finally:
            joining.cancel()
            await asyncio.wait([joining])
            await self._manager.cleanup_resources()
            if self.handle.has_begun:
                self.handle.end(status)
            else:
                self.handle.refuse(RpcError(f"{self.handle.name} ended with {status}:\n{self.handle.last_words()}"))

    async def _launch(self) -> None:
        cwd, environ = self._surroundings
        log = os.open(self.handle.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            await self._manager.start_kernel(cwd=cwd, env=environ, stdout=log, stderr=log, extra_arguments=self._more)
        finally:
            os.close(log)
        if self._unwanted:
            await self.signal(signal.SIGKILL)

    async def _have_it_join(self) -> None:
        client = self._manager.client(context=self._manager.context)
        client.start_channels(iopub=False, stdin=False, hb=False, control=False)
        try:
            # An expression, as the text of a cell would be kept.
            asked = {"joined": f"[exec({self._code!r}, {{}}), __import__('os').getpid()][1]"}
            client.execute("", silent=True, store_history=False, allow_stdin=False, user_expressions=asked)
            answer = (await client.get_shell_msg())["content"]
        finally:
            client.stop_channels()
        joined = answer.get("user_expressions", {}).get("joined", answer)
        if joined["status"] != "ok":
            with self.handle.log.open("a") as log:
                log.write(f"the kernel could not be asked to join: {joined.get('ename')}: {joined.get('evalue')}\n")
            await self.signal(signal.SIGKILL)
        elif not self.handle.has_begun:  # its provisioner knows no process
            self.handle.begin(int(joined["data"]["text/plain"]))

    async def _end(self) -> int:
        """Its exit status."""
        if self.is_local and hasattr(os, "pidfd_open"):
            await _readable(os.pidfd_open(self.handle.pid))
        return await self._provisioner.wait() or 0

    @property
    def is_local(self) -> bool:
        """Whether its process is known to be one of this host."""
        return isinstance(self._provisioner, LocalProvisioner)

    @property
    def _provisioner(self) -> Any:
        return self._manager.provisioner

    async def signal(self, which: int) -> None:
        """SIGINT for the kernel alone, SIGTERM or SIGKILL for it and what it has started."""
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


async def _readable(descriptor: int) -> None:
    """Until it is readable; then it is closed."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _environ() -> dict[str, str]:
    """This process's; numpy shall have as many threads as torch, one by default, and debugpy say nothing in the log."""
    more = {"OPENBLAS_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    return {**more, **os.environ}


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
        self._lease = ForkServerLease(run_directory.path, fork_client.take_any, self._have_guarded)
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

    def _have_guarded(self, starter: ForkServerClient) -> None:
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
