"""The launcher "local": workers as processes of this host, forked by a fork server, or spawned where fork is unsafe.

Guarantees
- Worker processes outlive neither `close` nor this process, in any way it ends; nor does the run directory.
- A worker gets the secret of its world over a pipe: no command line or environment shows it.
- If the fork server is lost, its workers are too, and the next `start` makes a new one. One that hangs is replaced as
  well, but keeps its workers until `close`. Launchers of this process share it, and it outlives them (`fork_client`).

`ForkServerLauncher` is the base of other launchers, too, which have the fork server guard the processes they start.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import ShutdownError
from rpcbench.base.ids import check_name
from rpcbench.launch import fork_client
from rpcbench.launch.base import ExitCallback, ProcessHandle
from rpcbench.launch.environment import find_interpreter
from rpcbench.launch.fork_client import ForkServerClient
from rpcbench.transport.run_dir import RunDirectory


def launcher_closed_error() -> ShutdownError:
    return ShutdownError("this launcher is closed and starts no workers; make a new cluster")


OWN_SECONDS = 0.5  # for workers to end by themselves at `close`


class ForkServerLauncher:
    """The base of launchers that have a run directory, and use the fork server that `take` returns."""

    environ: Mapping[str, str] = {}
    """Variables that workers have beside those of this process; set before `warm`."""

    def __init__(
        self, run_directory: RunDirectory, take: Callable[[], ForkServerClient] = fork_client.take_any
    ) -> None:
        self._directory, self._take = run_directory, take
        self._maker = os.getpid()  # a fork of this process ends no workers
        self._closed = False
        self._servers_lock = threading.Lock()  # guards `_servers`
        self._servers: list[ForkServerClient] = []  # the current one is the last; the others were lost, or hang

    def warm(self) -> None:
        """Begin to start the fork server. Returns at once."""
        self._working_server()

    def close(self) -> None:
        """End the workers (SIGTERM, SIGKILL after 0.5 s), and remove the run directory. The fork server stays warm."""
        if os.getpid() != self._maker:
            return
        self._closed = True
        try:
            self._end_workers()
            with self._servers_lock:
                held, self._servers = self._servers, []
            with contextlib.ExitStack() as every:  # runs all callbacks, the last first, even if one raises
                for server in held:
                    every.callback(fork_client.give_back, server)
                    every.callback(server.leave_directory, self._directory.path)
        finally:
            self._directory.remove_directory()

    def _working_server(self) -> ForkServerClient:
        """Return a fork server that works. ShutdownError if the launcher is closed."""
        with self._servers_lock:
            if self._closed:
                raise launcher_closed_error()
            if not self._servers or not self._servers[-1].is_working:
                self._servers.append(self._take())
                self._servers[-1].enter_directory(self._directory.path)
                self._guard_again(self._servers[-1])
            return self._servers[-1]

    def _guard_again(self, server: ForkServerClient) -> None:
        """Have a new fork server guard the processes that run: it replaces one that was lost."""

    def _end_workers(self) -> None:
        """End the workers that the fork server did not start."""


ENTRY = "rpcbench.launch.worker_main:main"
_MODES = ("fork", "spawn")


class ProcessLauncher(ForkServerLauncher):
    """A launcher of workers as processes of this host. For the methods see `Launcher`.

    Args:
        run_directory: Of the cluster's files; `close` removes it.
        start: "fork" or "spawn"; by default the value of RPCBENCH_START, else fork on Linux and spawn elsewhere.
        entry: The function that a worker calls with its WorldConfig, "module:function". In mode "fork" the fork server
            imports the module, which therefore must start no thread, open no socket and run no torch operation.
        python: The interpreter of workers; by default that of this process.

    Raises:
        ValueError: `start` is unknown, or `python` is no interpreter that suits.
    """

    far = False
    pins = True

    def __init__(
        self, run_directory: RunDirectory, start: str | None = None, entry: str = ENTRY, python: str | None = None
    ) -> None:
        self.mode = _resolve_mode(start)
        chosen = find_interpreter(python)
        super().__init__(run_directory, lambda: fork_client.take(self.mode, entry, self.environ, chosen))

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> ProcessHandle:
        """See `Launcher`. Workers have the current directory, environment and import path of this process; an RpcError
        contains the last output of the fork server; RuntimeError for a name that no member may have."""
        check_name(config.name)
        handle = self._working_server().start_worker(config, self._directory.path, on_exit)
        if self._closed:  # `close` ran meanwhile, and may have missed this worker
            handle.abandon_process()
            raise launcher_closed_error()
        return handle


def warm(start: str | None = None) -> None:
    """Begin to load torch for the workers of later clusters. Returns at once. ValueError for an unknown `start`."""
    fork_client.warm(_resolve_mode(start), ENTRY)


def default_mode() -> str:
    """Return how workers start by default: "fork" or "spawn"."""
    return _resolve_mode(None)


def _resolve_mode(start_mode: str | None) -> str:
    mode = start_mode or os.environ.get("RPCBENCH_START") or ("fork" if sys.platform == "linux" else "spawn")
    if mode not in _MODES:
        raise ValueError(f"start={mode!r} (or RPCBENCH_START) is not a way to start workers; use one of {_MODES}")
    return mode
