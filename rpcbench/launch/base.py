"""What every way of starting workers offers: a `Launcher` starts workers and hands out one `Handle` for each.

Rules
- An exit status is as `subprocess` has it: the code, or minus the number of the signal that ended the worker; or
  UNKNOWN, where nobody can tell.
- A launcher knows processes and nothing of RPC: it says that a worker's process ended, others say what that means.
- All methods may be called from any thread.

A launcher is found by its name (see `registry`): a callable `(directory: RunDirectory, **options) -> Launcher`. One
that is `far` may start workers on other hosts: the cluster listens there as well, with TLS, and each config names where
(`leader`); the worker works out itself where it is (`cells.worker_main`). Its handles are of what launches
workers, and no signal of this host reaches those: an interrupt, and the pid that users see, go through the agent.

`ProcessHandle` is the handle of a process of this host. It is given out once its process is there; `begin`, `refuse`
and `end` are the fork server's, on the thread that reads its replies. Only the first `end` counts.

Workers that were asked to end are waited for, then terminated (SIGTERM), then killed (SIGKILL). Those that end in time
run their `atexit` functions, finalizers and flushes of logs. Ctrl-C ends the wait, not the rest: when `stopped` returns
or raises, every worker has ended or was killed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import psutil

from rpcbench.base.conditions import Changes, Flag
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError

UNKNOWN = 256
"""The exit status of a worker that has ended nobody knows how; no process has it."""


class Handle(Protocol):
    """One started worker."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The exit status; None while the worker runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, waited for `timeout` seconds at most (None: until it is there); then TimeoutError."""

    def terminate(self) -> None:
        """Send SIGTERM to the worker, and to what it started as far as that can be reached. Does not wait."""

    def kill(self) -> None:
        """End the worker, and what it started, at once. Does not wait; harmless on a worker that has ended."""

    def interrupt(self) -> None:
        """Send SIGINT to the worker's process alone. Harmless on a worker that has ended, or may be on another host."""

    def last_words(self) -> str:
        """The last lines that the worker wrote outside any cell or call; empty if it wrote none."""


ExitCallback = Callable[[Handle, int], object]
"""(handle, exit status): called once, after `handle.poll()` knows it, on a thread of the launcher: must be brief."""


class Launcher(Protocol):
    """A way of starting workers. `far`: they may be on other hosts."""

    far: bool

    def warm(self) -> None:
        """Begin, in the background, whatever makes the first `start` quick."""

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> Handle:
        """Start one worker and return when its process is there (it has not joined yet).

        Errors: RpcError if it cannot be started, ShutdownError after `close`.
        """

    def close(self) -> None:
        """End all workers, within a bounded time. May be called again."""


@runtime_checkable
class Gang(Launcher, Protocol):
    """One that starts several workers as one: all of them or none."""

    def start_all(self, configs: Sequence[WorldConfig], on_exit: ExitCallback | None = None) -> Sequence[Handle]:
        """As `start`, for all of these."""


@runtime_checkable
class Inseparable(Gang, Protocol):
    """One whose workers come and go together. `inseparable` says why none of them is started or ended alone."""

    inseparable: str


_LAST_LINES = 20
_LAST_BYTES = 1 << 14
_FATAL = "Fatal Python error"


class ProcessHandle:
    """One worker process of this host. See `Handle` for the methods. `local`: its `pid` is that of a process here."""

    local = True

    def __init__(self, name: str, log: Path, send_signal: Callable[[int], None], on_exit: ExitCallback | None) -> None:
        self.name = name
        self.log = log
        self._send_signal = send_signal
        self._on_exit = on_exit
        self._answered = Flag()
        self._ended = Flag()
        self._ending = threading.Lock()
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
        return tail(self.log)

    def __repr__(self) -> str:
        state = "running" if self._status is None else f"exit status {self._status}"
        return f"<worker process {self.name} {self._pid}: {state}>"

    def started(self, timeout: float) -> bool:
        """Whether the process is there within `timeout` seconds; raises why it cannot be."""
        answered = self._answered.wait(timeout)
        if self._error is not None:
            raise self._error
        return answered

    def abandon(self) -> None:
        """Nobody will hold this handle: end the process, whether it is there yet or not, and tell nobody."""
        self._on_exit = None
        self.kill()

    def begin(self, pid: int) -> None:
        self._pid = pid
        self._answered.set()

    def refuse(self, error: RpcError) -> None:
        self._error = error
        self._answered.set()

    def end(self, status: int) -> None:
        if not self._ending.acquire(blocking=False):
            return
        self._status = status
        self._ended.set()
        if self._on_exit is None:
            return
        try:
            self._on_exit(self, status)
        except Exception:
            logging.getLogger(__name__).exception("on_exit of %s failed", self.name)


def check_name(name: str) -> None:
    """ValueError for a worker's name that no file can have."""
    if not name or "/" in name or "\0" in name:
        raise ValueError(f"a worker cannot be called {name!r}: its log file takes that name")


def log_of(directory: Path, worker: str, incarnation: int) -> Path:
    """The log of a worker: each incarnation has its own."""
    return directory / f"{worker}.{incarnation}.log"


def has_ended(handle: Handle) -> bool:
    """Whether its process has, of those that this host can tell of; also if its parent has not looked yet."""
    if not isinstance(handle, ProcessHandle) or not handle.local or not handle.has_begun:
        return False
    try:
        return bool(psutil.Process(handle.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def tail(log: Path) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    begin = text.rfind(_FATAL)
    return "\n".join(text.splitlines()[-_LAST_LINES:]) if begin < 0 else _fatal(text[begin:])


def _fatal(text: str) -> str:
    """Of what Python says when a signal such as SIGSEGV ends it: the signal, and the stack of the guilty thread."""
    first, *blocks = text.split("\n\n")
    return "\n".join([first, *(block for block in blocks if block.startswith("Current thread"))])


_TERM_SECONDS = 0.5
_KILL_SECONDS = 5.0


def stopped(running: Callable[[], Sequence[Handle]], changes: Changes, grace: float) -> list[str]:
    """Wait until none of the workers `running` is left, `grace` seconds at most; then end those that are. Returns the
    names of these. `changes` tells of each end."""

    def all_ended() -> bool:
        return not running()

    late: list[str] = []
    try:
        changes.wait_for(all_ended, grace)
    finally:
        late = [handle.name for handle in running()]
        try:
            for handle in running():
                handle.terminate()
            changes.wait_for(all_ended, _TERM_SECONDS)
        finally:  # also at a second Ctrl-C
            for handle in running():
                handle.kill()
            changes.wait_for(all_ended, _KILL_SECONDS)
    return late


def late_warning(late: Sequence[str], grace: float) -> str:
    """The warning that names workers which had to be terminated."""
    names, were = ", ".join(late), "was" if len(late) == 1 else "were"
    return (
        f"{names} had not ended {grace:g} s after being asked to, and {were} terminated: "
        f"atexit functions and finalizers there may not have run. Cluster(2, grace=10), in a notebook %cluster start 2 "
        f"--grace 10, waits longer."
    )
