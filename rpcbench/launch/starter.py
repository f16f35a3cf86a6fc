"""The notebook's end of one starter process: sends it requests, turns its replies into handles.

Guarantees
- A starter that dies, at any moment, ends every wait here; the error holds what it wrote.
- A request that Ctrl-C or a deadline gave up leaves no worker behind.
- Requests are written by one thread, so that Ctrl-C never cuts one in two; replies are read by another, which also
  runs the exit callbacks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rpcbench.launch.base import ExitCallback
from rpcbench.launch.handle import ProcessHandle, tail
from rpcbench.words.config import WorldConfig
from rpcbench.words.errors import RpcError, ShutdownError

_START_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_ZYGOTE = Path(__file__).with_name("zygote.py")


class Starter:
    """One starter process, and the workers it started."""

    def __init__(self, mode: str, directory: Path, entry: str) -> None:
        self._directory = directory
        self._log = directory / "starter.err"
        self._entry = entry
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._handles: dict[int, ProcessHandle] = {}
        self._lost = ""
        self._stopping = False
        self._ready = threading.Event()
        self._requests: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = self._open(theirs)
        self._reader = threading.Thread(target=self._read, name="rpcbench-starter-replies", daemon=True)
        self._writer = threading.Thread(target=self._write, name="rpcbench-starter-requests", daemon=True)
        self._writer.start()
        self._reader.start()
        self._send(prepare=mode, entry=entry, directory=str(directory), sys_path=_sys_path(), notebook=os.getpid())

    def _open(self, channel: socket.socket) -> subprocess.Popen[bytes]:
        # Numpy's own thread pool would make the starter a process with threads; workers inherit the number.
        environ = {"OPENBLAS_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **os.environ}
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            arguments = [sys.executable, "-P", str(_ZYGOTE)]
            return subprocess.Popen(
                arguments, stdin=channel.fileno(), stdout=log, stderr=log, env=environ, start_new_session=True
            )
        finally:
            os.close(log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> bool:
        return bool(self._lost)

    def start(self, config: WorldConfig, on_exit: ExitCallback | None) -> ProcessHandle:
        """Start a worker; returns when its process is there. Errors: RpcError, ShutdownError."""
        if threading.current_thread() is self._reader:
            raise RuntimeError("a worker cannot be started from on_exit itself; hand that to another thread")
        deadline = time.monotonic() + _START_SECONDS
        if not self._ready.wait(_START_SECONDS):
            raise self._overdue()
        number, handle = self._enter(config.name, on_exit)
        try:
            self._send(start=number, config=config.to_json(), log=str(handle.log), **self._surroundings(config.name))
            if not handle.started(deadline - time.monotonic()):
                raise self._overdue()
        except BaseException:
            handle.abandon()
            raise
        return handle

    def _enter(self, name: str, on_exit: ExitCallback | None) -> tuple[int, ProcessHandle]:
        number = next(self._numbers)
        log = self._directory / f"{name}.log"
        handle = ProcessHandle(name, log, lambda which: self._send(signal=which, to=number), on_exit)
        with self._lock:
            if not self._lost:
                self._handles[number] = handle
                return number, handle
        raise self._gone()

    def _surroundings(self, name: str) -> dict[str, Any]:
        surroundings = {"cwd": str(Path.cwd()), "environ": dict(os.environ), "sys_path": _sys_path()}
        return {"name": name, "entry": self._entry, **surroundings}

    def _overdue(self) -> RpcError:
        return RpcError(f"the starter process {self.pid} did not answer in {_START_SECONDS:g} s\n{tail(self._log)}")

    def _gone(self) -> RpcError:
        return ShutdownError(self._lost) if self._stopping else RpcError(self._lost)

    def _send(self, **request: Any) -> None:
        self._requests.put(request)

    def _write(self) -> None:
        # When the starter is gone it is the reader who tells.
        with contextlib.suppress(OSError):
            while (request := self._requests.get()) is not None:
                self._channel.sendall(json.dumps(request).encode() + b"\n")
            self._channel.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        with contextlib.suppress(ConnectionError), self._channel.makefile("rb") as lines:
            for line in lines:
                self._take(json.loads(line))
        self._end()

    def _take(self, reply: dict[str, Any]) -> None:
        match reply:
            case {"ready": _}:
                self._ready.set()
            case {"started": number, "pid": pid}:
                self._handles[number].begin(pid)
            case {"failed": number, "error": error}:
                handle = self._forget(number)
                handle.refuse(RpcError(f"{handle.name} could not be started: {error}"))
            case {"exited": number, "status": status}:
                self._forget(number).end(status)

    def _forget(self, number: int) -> ProcessHandle:
        with self._lock:
            return self._handles.pop(number)

    def _end(self) -> None:
        """The starter has gone, and its workers with it: tell all who wait."""
        lost = self._obituary()
        with self._lock:
            self._lost = lost
            left, self._handles = self._handles, {}
        self._requests.put(None)
        self._ready.set()
        for handle in left.values():
            if handle.has_begun:
                _kill_group(handle.pid)
                handle.end(-signal.SIGKILL)
            else:
                handle.refuse(self._gone())
        self._writer.join()
        self._channel.close()

    def _obituary(self) -> str:
        try:
            status = self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._stopping:
            return "the cluster was shut down"
        return f"the starter process, which makes the workers, ended with status {status}\n{tail(self._log)}"

    def stop(self) -> None:
        """End the starter and all its workers; returns when they are gone, which takes 5 s at the very most."""
        self._stopping = True
        self._requests.put(None)
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if threading.current_thread() is not self._reader:
            self._reader.join(_CLOSE_SECONDS)


def _kill_group(pid: int) -> None:
    """What a worker started, and the worker itself where the system did not end it with the starter."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _sys_path() -> list[str]:
    return [entry for entry in sys.path if isinstance(entry, str)]
