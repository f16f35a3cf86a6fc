"""Workers that torchrun starts, all at once, on this host: they live and die together, as its ranks do.

Guarantees
- torchrun runs as a process of its own, without a terminal. It ends with `close` or this process, however that ends (a
  starter guards it), and the workers with it (Linux).
- No command line or environment shows the secret: each rank finds its request in a file of the run directory, which it
  takes away.
- When a rank ends, torchrun ends the others: each handle has its own status, and says who was the first. What a rank
  has started goes with it.
- Nothing listens beyond this host.
- Where torchrun fails, the error has its own words.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError
from rpcbench.launch import starters
from rpcbench.launch.base import ExitCallback
from rpcbench.launch.handle import ProcessHandle, check_name
from rpcbench.launch.lease import Lease, ended
from rpcbench.launch.starter import Starter
from rpcbench.launch.torchrun_gang import TorchrunGang
from rpcbench.transport.run_dir import RunDirectory


class TorchrunLauncher:
    """Starts workers of one cluster, which keeps its files in `run_directory`. See `Inseparable`."""

    far = False
    inseparable = "torchrun starts its workers together and ends them together"

    def __init__(self, run_directory: RunDirectory) -> None:
        self._directory = run_directory
        self._maker = os.getpid()
        self._lock = threading.Lock()
        self._gang: TorchrunGang | None = None
        self._lease = Lease(run_directory.path, starters.take_any, self._have_guarded)

    def warm(self) -> None:
        """Have the starter that guards torchrun."""
        self._lease.starter()

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> ProcessHandle:
        """As `start_all`, for one."""
        return self.start_all([config], on_exit)[0]

    def start_all(self, configs: Sequence[WorldConfig], on_exit: ExitCallback | None = None) -> list[ProcessHandle]:
        """Start them all with this process's directory, environment and import path as they are now.

        Errors: ValueError for a name that no file can have, RpcError with torchrun's words, or while others run;
        ShutdownError.
        """
        for config in configs:
            check_name(config.name)
        starter = self._lease.starter()
        with self._lock:
            if self._lease.closed:
                raise ended()
            if self._gang is not None:
                if self._gang.runs:
                    raise RpcError(f"{self.inseparable}; it starts no more beside them")
                self._gang.close()
            self._gang = gang = TorchrunGang(self._directory.path, configs, on_exit)
        return gang.started(starter)

    def _have_guarded(self, starter: Starter) -> None:
        if self._gang is not None and self._gang.runs:
            starter.guard(self._gang.pid, self._gang.grace)

    def close(self) -> None:
        """End torchrun (SIGTERM, SIGKILL after 0.5 s), and its workers; remove the run directory."""
        if os.getpid() != self._maker:
            return
        self._lease.shut()
        try:
            with self._lock:
                gang = self._gang
            if gang is not None:
                gang.close()
            self._lease.end()
        finally:
            self._directory.remove()
