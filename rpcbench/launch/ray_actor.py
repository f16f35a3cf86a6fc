"""The Ray actor that keeps one worker on a node: it starts the worker's supervisor, and returns how the worker ended.

Guarantees
- The worker ends when `end` is called, and when the actor ends, in any way (see `supervisor`).
- Output of the worker outside cells goes to the actor's own log, where Ray's tools show it.

The second half of this file is about the Ray session of the notebook's process: the user's own, or one that launchers
begin, share and end together.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from rpcbench.base.errors import RpcError
from rpcbench.cells.worker_log import read_last_lines
from rpcbench.launch import supervisor
from rpcbench.launch.base import decode_shell_status
from rpcbench.transport.hosts import host_id

_AS_GRANDCHILD = ("sh", "-c", '"$@"; exit $?', "sh")
"""Starts a supervisor as a grandchild: Ray kills an actor's children, but the supervisor must end the worker first."""
HOOK = "PYTHONBREAKPOINT"
"""The environment variable that names the function which `breakpoint()` calls."""


class Arrival(NamedTuple):
    """The location of an actor."""

    host: str  # host id
    hostname: str
    pid: int
    log: str  # the path of its standard error; "" if unknown


class ActorExit(NamedTuple):
    """How a worker ended."""

    status: int  # as `subprocess` has it
    words: str  # the last lines that it wrote


class WorkerActor:
    """The actor of one worker. `keep` runs as long as the worker; the other methods run beside it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def arrive(self) -> Arrival:
        return Arrival(host_id(), socket.gethostname(), os.getpid(), _stderr_path())

    def keep(self, name: str, request: bytes) -> ActorExit:
        """Start the worker's supervisor, send it `request`, and wait for its end."""
        # `request` holds the secret: Ray stores the arguments of constructors, not those of methods.
        command = [*_AS_GRANDCHILD, sys.executable, "-P", "-m", "rpcbench.worker", name]
        environ = {key: value for key, value in os.environ.items() if key != HOOK}  # Ray sets it in each actor
        with _hearing_signals():
            self._process = process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=2, start_new_session=True, env=environ
            )
        assert process.stdin is not None
        with process.stdin as pipe:
            with contextlib.suppress(BrokenPipeError):  # it has ended already: its status reports that
                pipe.write(request)
            status = process.wait()
        return ActorExit(decode_shell_status(status), worker_log_lines(_stderr_path()) if status else "")

    def end(self) -> None:
        """End the worker and its child processes at once."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended already
                self._process.stdin.write(supervisor.COMMANDS[signal.SIGKILL])
            self._process.stdin.close()


@contextlib.contextmanager
def _hearing_signals() -> Iterator[None]:
    """Unblock all signals: Ray's threads block them, and a process started there would inherit that."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worker_log_lines(log: str) -> str:
    """Return the last lines of a log of Ray's, without its marker lines."""
    lines = read_last_lines(Path(log)).splitlines() if log else []
    return "\n".join(line for line in lines if not line.startswith((":job_id:", ":actor_name:", ":task_name:")))


def _stderr_path() -> str:
    """Return the path of the file that standard error goes to, or ""."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/fd/2").readlink())
    return ""


_lock = threading.Lock()  # guards the two below; launchers share the session
_ours: str | None = None  # the name of a session that launchers have begun
_users = 0  # the number of launchers that use it


def join_session(address: str | None) -> str | None:
    """Join or start Ray. Return the name of the session if it is ours, for `release_session`. RpcError if that
    fails."""
    global _ours, _users
    with _lock:
        if not ray.is_initialized():
            try:
                with _own_breakpoints():
                    ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as error:  # Ray raises errors of many types
                raise RpcError(f"Ray cannot be joined or started: {error}") from error
            _ours, _users = session_name(), 0
        elif _ours is None or _ours != session_name():  # the user's own
            return None
        _users += 1
        return _ours


@contextlib.contextmanager
def _own_breakpoints() -> Iterator[None]:
    """Keep the user's `breakpoint()`: Ray replaces it, in this process and in all that inherit its environment."""
    before = os.environ.get(HOOK)
    try:
        yield
    finally:
        os.environ.pop(HOOK, None)
        if before is not None:
            os.environ[HOOK] = before


def release_session(ours: str | None) -> None:
    """Release the session that `join_session` returned, and end it with its last user."""
    global _ours, _users
    with _lock:
        if ours is None or ours != _ours:
            return
        _users -= 1
        if not _users:
            _ours = None
            if session_name() == ours:  # else the user has ended it, and may have begun another one
                ray.shutdown()


def session_name() -> str:
    """Return the unique name of the Ray session; "" if there is none."""
    with contextlib.suppress(RayError, RuntimeError, AttributeError):  # it is just ending
        if ray.is_initialized():
            here = ray.get_runtime_context()
            return f"{here.get_session_name()} {here.get_job_id()}"
    return ""


def check_session() -> None:
    """Raise RpcError if the session has ended."""
    if not ray.is_initialized():
        raise RpcError("Ray was shut down, and the actors that start workers with it: make a new cluster")


def send_late_request(act: Callable[..., Any], *arguments: Any) -> None:
    """Send a request to Ray, if there is a session, and ignore Ray's errors. For requests that may come late."""
    if ray.is_initialized():  # else Ray would begin a session
        with contextlib.suppress(RayError):  # the actor or group has ended already
            act(*arguments)
