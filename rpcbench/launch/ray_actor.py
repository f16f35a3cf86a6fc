"""The actor that keeps one worker on a node of a Ray cluster: it starts its supervisor, and tells how it ended.

The secret comes as the argument of a method, through Ray's own channel; Ray keeps arguments of constructors, not these.
Guarantees
- The worker ends when `end` is called, and when this actor goes, however it does (see `supervisor`).
- What the worker writes outside cells and calls is in the actor's own log, where Ray's tools look for it.

The session in Ray that this process has is the user's own, or one that launchers begin, share, and end together.
Without a session, Ray begins one with whatever is asked of it. So what may come late goes through `tell`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from rpcbench.base.errors import RpcError
from rpcbench.launch import supervisor
from rpcbench.launch.base import tail
from rpcbench.transport.hosts import host_id

_APART = ("sh", "-c", '"$@"; exit $?', "sh")
"""Ray kills the children of an actor that it ends. The outpost must be none: it has to end the worker first."""


HOOK = "PYTHONBREAKPOINT"
"""What `breakpoint()` calls."""


class Arrival(NamedTuple):
    """Where an actor is: the identity of its host, its process there, and the file it writes to; "" where unknown."""

    host: str
    pid: int
    log: str


class Ending(NamedTuple):
    """How a worker ended: the exit status, as `subprocess` has it, and the last lines it wrote."""

    status: int
    words: str


class Keeper:
    """One actor. `keep` takes as long as the worker lives, the other methods are called beside it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def arrive(self) -> Arrival:
        return Arrival(host_id(), os.getpid(), _log())

    def keep(self, name: str, request: bytes) -> Ending:
        """Start the worker, tell its outpost what it is to do, and wait for its end."""
        command = [*_APART, sys.executable, "-P", "-m", "rpcbench.worker", name]
        environ = {key: value for key, value in os.environ.items() if key != HOOK}  # Ray sets it in each actor
        with _hearing_signals():
            self._process = process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=2, start_new_session=True, env=environ
            )
        assert process.stdin is not None
        with process.stdin as pipe:
            with contextlib.suppress(BrokenPipeError):  # one that has ended already tells by that
                pipe.write(request)
            status = process.wait()
        return Ending(_as_subprocess(status), words(_log()) if status else "")

    def end(self) -> None:
        """End the worker, and what it has started, at once."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended already
                self._process.stdin.write(supervisor.TOLD[signal.SIGKILL])
            self._process.stdin.close()


@contextlib.contextmanager
def _hearing_signals() -> Iterator[None]:
    """On Ray's threads all signals are blocked, and what is started there would inherit that."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def words(log: str) -> str:
    """The last lines of a log of Ray's, without its marks."""
    lines = tail(Path(log)).splitlines() if log else []
    return "\n".join(line for line in lines if not line.startswith((":job_id:", ":actor_name:", ":task_name:")))


def _log() -> str:
    """The file that standard error goes to."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/fd/2").readlink())
    return ""


def _as_subprocess(status: int) -> int:
    """An outpost says as shells do by which signal the worker was ended."""
    return 128 - status if status > 128 and status - 128 in {*signal.Signals} else status


_lock = threading.Lock()
_ours: str | None = None  # the name of a session that launchers have begun
_users = 0  # launchers in that


def enter(address: str | None) -> str | None:
    """Have a session; its name where it is ours, to be left. RpcError where Ray cannot be joined or started."""
    global _ours, _users
    with _lock:
        if not ray.is_initialized():
            try:
                with _own_breakpoints():
                    ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as error:  # Ray raises plain ones, too
                raise RpcError(f"Ray cannot be joined or started: {error}") from error
            _ours, _users = name(), 0
        elif _ours is None or _ours != name():
            return None
        _users += 1
        return _ours


@contextlib.contextmanager
def _own_breakpoints() -> Iterator[None]:
    """Ray would have `breakpoint()` be its own, here and in all that is started from here."""
    before = os.environ.get(HOOK)
    try:
        yield
    finally:
        os.environ.pop(HOOK, None)
        if before is not None:
            os.environ[HOOK] = before


def leave(ours: str | None) -> None:
    """What `enter` has returned is needed no more. A session that the user has begun since is none of ours."""
    global _ours, _users
    with _lock:
        if ours is None or ours != _ours:
            return
        _users -= 1
        if not _users:
            _ours = None
            if name() == ours:
                ray.shutdown()


def name() -> str:
    """That of the session, which no other one has; "" where there is none."""
    with contextlib.suppress(RayError, RuntimeError, AttributeError):  # it ends just now
        if ray.is_initialized():
            here = ray.get_runtime_context()
            return f"{here.get_session_name()} {here.get_job_id()}"
    return ""


def check() -> None:
    """RpcError where the session has been ended."""
    if not ray.is_initialized():
        raise RpcError("Ray was shut down, and with it what started these workers: make a new cluster")


def tell(act: Callable[..., Any], *arguments: Any) -> None:
    """Tell Ray something, unless it is gone, or the session that this was about: then all of that is over."""
    if ray.is_initialized():  # else Ray would begin a session
        with contextlib.suppress(RayError):
            act(*arguments)
