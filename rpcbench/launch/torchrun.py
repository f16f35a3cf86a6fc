"""The launcher "torchrun": workers as ranks of one torchrun on this host, which start and end together.

Guarantees
- torchrun runs in a process of its own, without a terminal. It ends with `close` or with this process, in any way
  that ends, because a fork server guards it; the workers end with it (Linux).
- No command line or environment shows the secret: each rank reads its request from a file in the run directory, and
  removes it.
- When a rank ends, torchrun ends the others. Each handle has its own status, and names the rank that ended first. The
  processes that a rank started end with it.
- No socket listens beyond this host.
- When torchrun fails, the error contains torchrun's own message.

A named pipe in the run directory carries the reports of `torchrun_entry`: of each rank its pid, and of torchrun the
exit statuses of all ranks once one has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError
from rpcbench.base.ids import check_name
from rpcbench.cells.worker_log import log_path, open_private, read_last_lines
from rpcbench.launch.base import KILL_SECONDS, ExitCallback, ProcessHandle, exit_status_text
from rpcbench.launch.environment import Interpreter, find_interpreter
from rpcbench.launch.fork_client import ForkServerClient, worker_request
from rpcbench.launch.fork_server import TERM_SECONDS, kill_group
from rpcbench.launch.process import ENTRY, ForkServerLauncher, launcher_closed_error
from rpcbench.transport.run_dir import RunDirectory

_ENTRY_MODULE = "rpcbench.launch.torchrun_entry"


class RankHandle(ProcessHandle):
    """The handle of one rank."""

    fate = ""  # why torchrun ended it, if another rank was the first to end

    def __init__(self, config: WorldConfig, directory: Path, on_exit: ExitCallback | None) -> None:
        log = log_path(directory, config.name, config.incarnation)
        super().__init__(config.name, log, self._signal_worker, on_exit)

    def last_words(self) -> str:
        return "\n".join(filter(None, [self.fate, super().last_words()]))

    def _signal_worker(self, which: int) -> None:
        if self.has_begun and self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now; torchrun will report that
                os.kill(self.pid, which)


class TorchrunGang:
    """A running torchrun and its ranks, started with the current directory, environment and import path."""

    def __init__(
        self, directory: Path, configs: Sequence[WorldConfig], on_exit: ExitCallback | None, python: Interpreter
    ) -> None:
        self.grace = max(config.stop_seconds for config in configs)
        self._patience = configs[0].start_seconds  # for a rank's process to exist
        self._directory = directory
        self._ranks = [RankHandle(config, directory, on_exit) for config in configs]
        pipe = directory / "torchrun.pipe"
        with contextlib.suppress(FileExistsError):  # of an earlier gang
            os.mkfifo(pipe, 0o600)
        self._pipe = os.open(pipe, os.O_RDWR)  # a writer, too: there is no end of file when other writers close it
        for rank, config in enumerate(configs):
            with open_private(directory / f"rank{rank}.json", "w") as file:  # the rank removes it
                json.dump(worker_request(config, ENTRY, self._ranks[rank].log, python), file)
        self._process = self._start_torchrun(len(configs), configs[0].environ, python)
        self._reader = threading.Thread(target=self._read_reports, name="rpcbench-torchrun", daemon=True)
        self._reader.start()
        threading.Thread(target=self._await_end, name="rpcbench-torchrun-end", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid  # of torchrun itself

    @property
    def has_running_ranks(self) -> bool:
        return any(handle.poll() is None for handle in self._ranks)

    def wait_until_created(self, server: ForkServerClient) -> list[ProcessHandle]:
        """Return the handles, once the fork server guards torchrun and all ranks exist. RpcError if that fails."""
        try:
            server.guard(self.pid, self.grace)
            for handle in self._ranks:
                if not handle.wait_until_created(self._patience):
                    raise RpcError(
                        f"torchrun did not start {handle.name} in {self._patience:g} s:\n{self._last_output()}"
                    )
        except BaseException:  # Ctrl-C, too
            self.close()
            raise
        return [*self._ranks]

    def close(self) -> None:
        """End torchrun and its ranks. Then the files of the run directory are free for the next gang."""
        # The reader ends with torchrun. An exit callback may call this on the reader itself, which cannot be joined.
        for end, seconds in ((self._process.terminate, TERM_SECONDS), (self._process.kill, KILL_SECONDS)):
            if self._reader.is_alive():
                end()
                if threading.current_thread() is not self._reader:
                    self._reader.join(seconds)

    def _start_torchrun(self, count: int, more: Mapping[str, str], python: Interpreter) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(python.import_path())
        environ = {**os.environ, **more, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        command = [python.executable, "-m", _ENTRY_MODULE, "torchrun", str(self._directory), str(count)]
        with (self._directory / "torchrun.log").open("wb") as log:
            return subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _await_end(self) -> None:
        os.write(self._pipe, json.dumps({"over": self._process.wait()}).encode() + b"\n")

    def _read_reports(self) -> None:
        """Read the reports of ranks and of torchrun, until torchrun has ended."""
        with os.fdopen(self._pipe) as lines:
            for line in lines:
                report: dict[str, Any] = json.loads(line)
                if "pid" in report:
                    self._ranks[report["rank"]].process_created(report["pid"])
                elif "failed" in report:
                    self._rank_failed({int(rank): status for rank, status in report["failed"].items()}, report["first"])
                else:
                    self._torchrun_ended(report["over"])
                    return

    def _rank_failed(self, statuses: dict[int, int], first: int) -> None:
        """End all handles: rank `first` failed, and torchrun has ended the others."""
        reason = f"torchrun has ended it, as {self._ranks[first].name} ended ({exit_status_text(statuses[first])})"
        for rank, handle in enumerate(self._ranks):
            status = statuses.get(rank, -signal.SIGTERM)  # torchrun reports only ranks that failed
            handle.fate = reason if rank != first and status == -signal.SIGTERM else ""
            self._end_handle(handle, status)

    def _torchrun_ended(self, status: int) -> None:
        """End the handles that are left: torchrun has ended, without a report or before some ranks existed."""
        for handle in self._ranks:
            if handle.poll() is None:
                self._end_handle(handle, status)

    def _end_handle(self, handle: RankHandle, status: int) -> None:
        if handle.has_begun:
            kill_group(handle.pid)  # the processes that the rank started: torchrun does not end those
            handle.process_ended(status)
        else:
            handle.start_failed(RpcError(f"torchrun ended before {handle.name} had started:\n{self._last_output()}"))

    def _last_output(self) -> str:
        return read_last_lines(self._directory / "torchrun.log")


class TorchrunLauncher(ForkServerLauncher):
    """A launcher of workers as ranks of torchrun, with files in `run_directory`, and with the interpreter `python`, by
    default this one. For the methods see `Launcher`."""

    far = False
    pins = True
    inseparable = "torchrun starts its workers together and ends them together"

    def __init__(self, run_directory: RunDirectory, python: str | None = None) -> None:
        self._python = find_interpreter(python)
        super().__init__(run_directory)
        self._lock = threading.Lock()  # guards `_gang`
        self._gang: TorchrunGang | None = None

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> ProcessHandle:
        """Start one worker. See `start_all`."""
        return self.start_all([config], on_exit)[0]

    def start_all(self, configs: Sequence[WorldConfig], on_exit: ExitCallback | None = None) -> list[ProcessHandle]:
        """See `Launcher`. Workers have the current directory, environment and import path of this process. RpcError,
        with torchrun's own message, also while other workers run; RuntimeError for a name that no member may have."""
        for config in configs:
            check_name(config.name)
        server = self._working_server()
        with self._lock:
            if self._closed:
                raise launcher_closed_error()
            if self._gang is not None:
                if self._gang.has_running_ranks:
                    raise RpcError(f"{self.inseparable}; it starts no other workers while these run")
                self._gang.close()  # its ranks have ended; torchrun itself may still be ending
            self._gang = gang = TorchrunGang(self._directory.path, configs, on_exit, self._python)
        return gang.wait_until_created(server)

    def _guard_again(self, server: ForkServerClient) -> None:
        if self._gang is not None and self._gang.has_running_ranks:
            server.guard(self._gang.pid, self._gang.grace)

    def _end_workers(self) -> None:
        with self._lock:
            gang = self._gang
        if gang is not None:
            gang.close()
