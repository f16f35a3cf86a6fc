"""The interface of launchers: a `Launcher` starts workers and returns a `Handle` for each; `wait_or_terminate` ends
workers.

Rules
- An exit status is as `subprocess` has it: the code, or minus the number of the signal that ended the worker; or
  UNKNOWN, if it cannot be found out.
- A launcher manages processes and has no part in RPC: it reports that a worker's process ended, not the consequences.
- All methods may be called from any thread.
- A launcher is made by name (see `registry`), by a callable `(directory: RunDirectory, **options) -> Launcher`.
- One that is `far` may start workers on other hosts. Then the cluster also listens, with TLS, at the address that each
  config has as `leader`; the worker finds out its own location (`launch.worker_main`). The handles are of the local
  processes that launch workers, and no signal of this host reaches a worker: interrupts, and the pid that users see,
  go through the agent.
- A worker that ends within its grace runs its `atexit` functions, finalizers and flushes of logs. When
  `wait_or_terminate` returns or raises, also by Ctrl-C, every worker has ended or was killed.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from rpcbench.base.conditions import Condition, Event
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError
from rpcbench.cells.worker_log import read_last_lines
from rpcbench.launch.fork_server import TERM_SECONDS

UNKNOWN = 256
"""The exit status of a worker if the real one cannot be found out; no process has this one."""


class Handle(Protocol):
    """One started worker."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit status; None while the worker runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status, at most `timeout` seconds (None: without limit); then TimeoutError."""

    def terminate(self) -> None:
        """Send SIGTERM to the worker, and to its child processes within reach. Does not wait."""

    def kill(self) -> None:
        """End the worker and its child processes at once. Does not wait; harmless on a worker that has ended."""

    def interrupt(self) -> None:
        """Send SIGINT to the worker's process alone. Harmless on a worker that has ended, or may be on another host."""

    def last_words(self) -> str:
        """Return the last lines that the worker wrote outside any cell or call; empty if it wrote none."""

    # It may have more attributes, as `ProcessHandle` has them: `host`, `command` and `subject`.


ExitCallback = Callable[[Handle, int], object]
"""(handle, exit status): called once, after `handle.poll()` returns it, on a thread of the launcher; must be brief."""


class Launcher(Protocol):
    """A way of starting workers. It may have more attributes:

    - `start_all(configs, on_exit) -> handles`: starts several workers as a unit, all of them or none.
    - `inseparable`: why no worker is started or ended alone, a string for error messages.
    - `pins`: True if a worker has its config's `gpu` in its environment (`WorldConfig.pinned_environment`).
    - `gpu_advice`: else, how its workers get their GPUs, for error messages.
    - `environ`: the variables of all configs, which the cluster sets before `warm`.
    - `connection_file(name) -> path`: returns the file by which other clients connect to a Jupyter kernel.
    """

    far: bool  # workers may be on other hosts

    def warm(self) -> None:
        """Prepare, in the background, so that the first `start` is quick."""

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> Handle:
        """Start one worker, and return when its process exists; it has not joined the world yet.

        Args:
            config: The worker's.
            on_exit: Called when it has ended.

        Raises:
            RpcError: It cannot be started.
            ShutdownError: The launcher is closed.
        """

    def close(self) -> None:
        """End all workers, within a bounded time. Idempotent."""


ARRIVAL = "its arrival"
"""The label of the calls that a new worker gets, in errors."""


class ProcessHandle:
    """A worker process of this host; see `Handle`. The launcher calls `process_created` or `start_failed`, and after
    `process_created` `process_ended`."""

    local = True  # `pid` is that of a process of this host
    host, command = "", ""  # of a worker that a command starts
    subject = "its process"  # that has the exit status

    def __init__(self, name: str, log: Path, send_signal: Callable[[int], None], on_exit: ExitCallback | None) -> None:
        self.name = name
        self.log = log
        self._send_signal = send_signal
        self._on_exit = on_exit
        self._answered = Event()  # set by `process_created` and `start_failed`
        self._ended = Event()
        self._ending = threading.Lock()  # taken by the first `process_ended` and never released: later ones do nothing
        self._pid: int | None = None
        self._error: RpcError | None = None
        self._status: int | None = None

    @property
    def has_begun(self) -> bool:
        return self._pid is not None

    @property
    def pid(self) -> int:
        assert self._pid is not None, "not started yet"
        return self._pid

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.name} (process {self.pid}) still runs after {timeout:g} s")
        assert self._status is not None
        return self._status

    def terminate(self) -> None:
        self._send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._send_signal(signal.SIGKILL)

    def interrupt(self) -> None:
        self._send_signal(signal.SIGINT)

    def last_words(self) -> str:
        return read_last_lines(self.log)

    def __repr__(self) -> str:
        state = "running" if self._status is None else f"exit status {self._status}"
        return f"<worker process {self.name} {self._pid}: {state}>"

    def wait_until_created(self, timeout: float) -> bool:
        """Return whether the process exists within `timeout` seconds. Raises the error of a start that failed."""
        answered = self._answered.wait(timeout)
        if self._error is not None:
            raise self._error
        return answered

    def abandon_process(self) -> None:
        """End the process, whether it exists yet or not, without the exit callback: no caller gets this handle."""
        self._on_exit = None
        self.kill()

    def process_created(self, pid: int) -> None:
        self._pid = pid
        self._answered.set()

    def start_failed(self, error: RpcError) -> None:
        self._error = error
        self._answered.set()

    def process_ended(self, status: int) -> None:
        if not self._ending.acquire(blocking=False):
            return
        self._status = status
        self._ended.set()
        if self._on_exit is None:
            return
        try:
            self._on_exit(self, status)
        except Exception:  # of a user's callback: the thread has more handles to end
            logging.getLogger(__name__).exception("on_exit of %s failed", self.name)


def has_ended(handle: Handle) -> bool:
    """Return whether a process of this host has ended, even if its parent has not reaped it; False for others."""
    if not isinstance(handle, ProcessHandle) or not handle.local or not handle.has_begun:
        return False
    try:
        return bool(psutil.Process(handle.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def exit_status_text(status: int) -> str:
    """Return the text for an exit status."""
    if status == UNKNOWN:
        return "exit status unknown"
    if status >= 0:
        return f"exit code {status}"
    named = -status in {*signal.Signals}  # most real-time signals have no name
    return f"killed by {signal.Signals(-status).name if named else f'signal {-status}'}"


def decode_shell_status(status: int) -> int:
    """Return the exit status for that of a shell, or of a supervisor: 128 plus the number of a signal."""
    return 128 - status if status - 128 in {*signal.Signals} else status


KILL_SECONDS = 5.0  # how long to wait after SIGKILL


def wait_or_terminate(running: Callable[[], Sequence[Handle]], changes: Condition, grace: float) -> list[str]:
    """Wait up to `grace` seconds until no worker in `running()` is left; then terminate (SIGTERM) those that are, and
    kill them. Return the names of these. `changes` is notified of each end."""

    def all_ended() -> bool:
        return not running()

    late: list[str] = []
    try:
        changes.wait_for(all_ended, grace)
    finally:  # also at Ctrl-C, which ends only the wait
        late = [handle.name for handle in running()]
        try:
            for handle in running():
                handle.terminate()
            changes.wait_for(all_ended, TERM_SECONDS)
        finally:  # also at a second Ctrl-C
            for handle in running():
                handle.kill()
            changes.wait_for(all_ended, KILL_SECONDS)
    return late


def late_warning(late: Sequence[str], grace: float) -> str:
    """Return the text of the warning that names workers which had to be terminated."""
    names, were = ", ".join(late), "was" if len(late) == 1 else "were"
    return (
        f"{names} had not ended {grace:g} s after being asked to, and {were} terminated: "
        f"atexit functions and finalizers there may not have run. Cluster(2, grace=10), in a notebook %cluster start 2 "
        f"--grace 10, waits longer."
    )
