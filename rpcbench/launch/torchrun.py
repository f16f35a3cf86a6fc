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

Ranks and torchrun's own process (`torchrun_entry`) tell by a named pipe in the run directory: each rank its pid, and
torchrun how the ranks have ended once one has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError
from rpcbench.launch import fork_client
from rpcbench.launch.base import ExitCallback, ProcessHandle, check_name, log_of, tail
from rpcbench.launch.fork_client import ForkServerClient, import_path
from rpcbench.launch.fork_server import kill_group
from rpcbench.launch.process import ENTRY, ForkServerLease, ended
from rpcbench.transport.run_dir import RunDirectory

_START_SECONDS = 60.0
_TERM_SECONDS = 0.5
_KILL_SECONDS = 5.0
_INSIDE = "rpcbench.launch.torchrun_entry"


class RankHandle(ProcessHandle):
    """One rank. `fate` says what else there is to say of its end."""

    fate = ""

    def __init__(self, config: WorldConfig, directory: Path, on_exit: ExitCallback | None) -> None:
        super().__init__(config.name, log_of(directory, config.name, config.incarnation), self._signal, on_exit)

    def last_words(self) -> str:
        return "\n".join(filter(None, [self.fate, super().last_words()]))

    def _signal(self, which: int) -> None:
        if self.has_begun and self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now, and torchrun is about to tell
                os.kill(self.pid, which)


class TorchrunGang:
    """torchrun, started with this process's directory, environment and import path as they are now."""

    def __init__(self, directory: Path, configs: Sequence[WorldConfig], on_exit: ExitCallback | None) -> None:
        self.grace = max(config.stop_seconds for config in configs)
        self._directory = directory
        self._ranks = [RankHandle(config, directory, on_exit) for config in configs]
        pipe = directory / "torchrun.pipe"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(pipe, 0o600)
        self._pipe = os.open(pipe, os.O_RDWR)  # to write, too: so it never ends, whoever comes and goes
        for rank, config in enumerate(configs):
            _leave(directory / f"rank{rank}.json", _request(config, self._ranks[rank].log))
        self._process = self._start(len(configs))
        self._reader = threading.Thread(target=self._hear, name="rpcbench-torchrun", daemon=True)
        self._reader.start()
        threading.Thread(target=self._await_end, name="rpcbench-torchrun-end", daemon=True).start()

    @property
    def pid(self) -> int:
        """That of torchrun itself."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether a rank does."""
        return any(handle.poll() is None for handle in self._ranks)

    def started(self, starter: ForkServerClient) -> list[ProcessHandle]:
        """The handles, once the starter guards torchrun and all ranks are there. RpcError, with torchrun's words, where
        that fails."""
        try:
            starter.guard(self.pid, self.grace)
            for handle in self._ranks:
                if not handle.started(_START_SECONDS):
                    raise RpcError(f"torchrun did not start {handle.name} in {_START_SECONDS:g} s:\n{self._words()}")
        except BaseException:
            self.close()
            raise
        return [*self._ranks]

    def close(self) -> None:
        """End torchrun, and with it its ranks; what both share is free then for the next one."""
        for end, seconds in ((self._process.terminate, _TERM_SECONDS), (self._process.kill, _KILL_SECONDS)):
            if self._reader.is_alive():
                end()
                if threading.current_thread() is not self._reader:
                    self._reader.join(seconds)

    def _start(self, count: int) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(import_path()), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", _INSIDE, "torchrun", str(self._directory), str(count)]
        with (self._directory / "torchrun.log").open("wb") as log:
            return subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _await_end(self) -> None:
        os.write(self._pipe, _line({"over": self._process.wait()}))

    def _hear(self) -> None:
        """Until torchrun has ended."""
        with os.fdopen(self._pipe) as lines:
            for line in lines:
                told: dict[str, Any] = json.loads(line)
                if "pid" in told:
                    self._ranks[told["rank"]].begin(told["pid"])
                elif "failed" in told:
                    self._failed({int(rank): status for rank, status in told["failed"].items()}, told["first"])
                else:
                    self._over(told["over"])
                    return

    def _failed(self, statuses: dict[int, int], first: int) -> None:
        """A rank was the first to fail, and torchrun has ended the others."""
        told = f"torchrun has ended it, as {self._ranks[first].name} ended ({_words(statuses[first])})"
        for rank, handle in enumerate(self._ranks):
            status = statuses.get(rank, -signal.SIGTERM)
            handle.fate = told if rank != first and status == -signal.SIGTERM else ""
            self._end(handle, status)

    def _over(self, status: int) -> None:
        """torchrun itself has ended, and so has who is left."""
        for handle in self._ranks:
            if handle.poll() is None:
                self._end(handle, status)

    def _end(self, handle: RankHandle, status: int) -> None:
        if handle.has_begun:
            kill_group(handle.pid)  # what it has started; torchrun leaves that
            handle.end(status)
        else:
            handle.refuse(RpcError(f"torchrun ended before {handle.name} was there:\n{self._words()}"))

    def _words(self) -> str:
        return tail(self._directory / "torchrun.log")


def _request(config: WorldConfig, log: Path) -> dict[str, Any]:
    """As for `become`."""
    surroundings = {"cwd": str(Path.cwd()), "environ": dict(os.environ), "sys_path": import_path()}
    return {"name": config.name, "entry": ENTRY, "config": config.to_json(), "log": str(log), **surroundings}


def _leave(path: Path, request: dict[str, Any]) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(request, file)


def _line(told: dict[str, Any]) -> bytes:
    return json.dumps(told).encode() + b"\n"


def _words(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


class TorchrunLauncher:
    """Starts workers of one cluster, which keeps its files in `run_directory`. See `Inseparable`."""

    far = False
    inseparable = "torchrun starts its workers together and ends them together"

    def __init__(self, run_directory: RunDirectory) -> None:
        self._directory = run_directory
        self._maker = os.getpid()
        self._lock = threading.Lock()
        self._gang: TorchrunGang | None = None
        self._lease = ForkServerLease(run_directory.path, fork_client.take_any, self._have_guarded)

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

    def _have_guarded(self, starter: ForkServerClient) -> None:
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
