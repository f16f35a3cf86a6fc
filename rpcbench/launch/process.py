"""Workers as processes of this host, forked from a starter that has torch loaded, or spawned where fork is not safe.

Guarantees
- Worker processes outlive neither `close` nor this process, however it ends; nor does the run directory.
- The secret of a world goes to its worker over a pipe: no command line or environment shows it.
- If the starter is lost, its workers are too; the next `start` makes a new one. It is shared with other launchers of
  this process, and outlives them (see `fork_client`).

`ForkServerLease` is a launcher's hold on the warm fork server, on behalf of its run directory.
- The fork server has been told of the directory, so that it goes with this process. One that is lost or hangs is
  replaced; one that hangs keeps its workers until `end`.
- After `shut` no request gets it any more; after `end` no worker of the directory is left, and the fork server stays
  warm.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import ShutdownError
from rpcbench.launch import fork_client
from rpcbench.launch.base import ExitCallback, ProcessHandle, check_name
from rpcbench.launch.fork_client import ForkServerClient
from rpcbench.transport.run_dir import RunDirectory


def ended() -> ShutdownError:
    """What a launcher says that is closed."""
    return ShutdownError("this launcher is closed and starts no workers; make a new cluster")


class ForkServerLease:
    """`take` takes a starter; `told` is called with each one that is taken."""

    def __init__(
        self,
        directory: Path,
        take: Callable[[], ForkServerClient],
        told: Callable[[ForkServerClient], object] = lambda starter: None,
    ) -> None:
        self.closed = False
        self._directory, self._take, self._told = directory, take, told
        self._lock = threading.Lock()
        self._starter: ForkServerClient | None = None
        self._hang: list[ForkServerClient] = []

    def starter(self) -> ForkServerClient:
        """The starter. ShutdownError once it is shut."""
        with self._lock:
            if self.closed:
                raise ended()
            if self._starter is not None and self._starter.lost:
                fork_client.give_back(self._starter)
                self._starter = None
            elif self._starter is not None and self._starter.hangs:
                self._hang.append(self._starter)
                self._starter = None
            if self._starter is None:
                self._starter = self._take()
                self._starter.enter(self._directory)
                self._told(self._starter)
            return self._starter

    def shut(self) -> None:
        """No more workers."""
        with self._lock:
            self.closed = True

    def end(self) -> None:
        """End the workers (SIGTERM, SIGKILL after 0.5 s), and give the starter back. May be called again."""
        with self._lock:
            self.closed = True
            held, self._starter, self._hang = [*self._hang, self._starter], None, []
        with contextlib.ExitStack() as every:
            for starter in filter(None, held):
                every.callback(fork_client.give_back, starter)
                every.callback(starter.leave, self._directory)


ENTRY = "rpcbench.cells.worker_main:main"
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
        self._lease = ForkServerLease(run_directory.path, lambda: fork_client.take(self.mode, entry))

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
    fork_client.warm(_mode(start), ENTRY)


def default_mode() -> str:
    """How workers are started unless a cluster says otherwise: "fork" or "spawn"."""
    return _mode(None)


def _mode(asked: str | None) -> str:
    mode = asked or os.environ.get("RPCBENCH_START") or ("fork" if sys.platform == "linux" else "spawn")
    if mode not in _MODES:
        raise ValueError(f"start={mode!r} (or RPCBENCH_START) is no way to start workers; use one of {_MODES}")
    return mode
