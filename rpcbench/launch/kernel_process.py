"""One kernel that is a worker, from its launch to its end, on the event loop of its launcher.

Rules
- The handle is begun and then ended, or refused, once; by then no file of the kernel is left but its log.
- What keeps a kernel from joining ends it, with the reason as its last words.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError
from rpcbench.launch.base import ExitCallback
from rpcbench.launch.handle import ProcessHandle
from rpcbench.launch.starter import import_path

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
