"""The handle of a worker process of this host, and the end of its log.

Rules: a handle is given out once its process is there; `begin`, `refuse` and `end` are the starter's, on the thread
that reads its replies. Only the first `end` counts.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from rpcbench.base.conditions import Flag
from rpcbench.base.errors import RpcError
from rpcbench.launch.base import ExitCallback, Handle

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
