"""Workers as processes of this host, forked from a starter that has torch loaded, or spawned where fork is not safe.

Guarantees
- Worker processes outlive neither `close` nor this process, however it ends; nor does the run directory.
- The secret of a world goes to its worker over a pipe: no command line or environment shows it.
- If the starter is lost, its workers are too; the next `start` makes a new one. It is shared with other launchers of
  this process, and outlives them (see `starters`).
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Self

from rpcbench.base.config import WorldConfig
from rpcbench.launch import starters
from rpcbench.launch.base import ExitCallback
from rpcbench.launch.handle import ProcessHandle, check_name
from rpcbench.launch.lease import Lease, ended
from rpcbench.transport.run_dir import RunDirectory

ENTRY = "rpcbench.launch.worker:main"
_MODES = ("fork", "spawn")


class ProcessLauncher:
    """Starts workers of one cluster, which keeps its files in `run_directory`. See `Launcher` for the methods.

    `start` is "fork" or "spawn"; by default what RPCBENCH_START says, else fork on Linux and spawn elsewhere.
    `entry` names what a worker runs, "module:function", called with its WorldConfig. In mode "fork" the module is
    imported before workers fork, and so must start no thread, open no socket and run no torch operation.
    """

    far = False

    def __init__(self, run_directory: RunDirectory, start: str | None = None, entry: str = ENTRY) -> None:
        self.mode = _mode(start)
        self._directory = run_directory
        self._maker = os.getpid()
        self._lease = Lease(run_directory.path, lambda: starters.take(self.mode, entry))

    def warm(self) -> None:
        """Begin to start the starter; returns at once."""
        self._lease.starter()

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> ProcessHandle:
        """Start a worker with this process's directory, environment and import path as they are now.

        Errors: ValueError for a name that no file can have, RpcError with the starter's last words, ShutdownError.
        """
        check_name(config.name)
        handle = self._lease.starter().start(config, self._directory.path, on_exit)
        if self._lease.closed:
            handle.abandon()
            raise ended()
        return handle

    def close(self) -> None:
        """End the workers (SIGTERM, SIGKILL after 0.5 s), and remove the run directory. The starter stays warm."""
        if os.getpid() != self._maker:
            return
        try:
            self._lease.end()
        finally:
            self._directory.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def warm(start: str | None = None) -> None:
    """Begin to load torch for the workers of clusters to come; returns at once. ValueError as `ProcessLauncher`."""
    starters.warm(_mode(start), ENTRY)


def default_mode() -> str:
    """How workers are started unless a cluster says otherwise: "fork" or "spawn"."""
    return _mode(None)


def _mode(asked: str | None) -> str:
    mode = asked or os.environ.get("RPCBENCH_START") or ("fork" if sys.platform == "linux" else "spawn")
    if mode not in _MODES:
        raise ValueError(f"start={mode!r} (or RPCBENCH_START) is no way to start workers; use one of {_MODES}")
    return mode
