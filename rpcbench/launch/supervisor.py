"""The process that a command starts on some host: it starts a worker beside itself, and ends it in good time.

It is asked by one JSON line on standard input, which holds the secret; then it watches that input. Guarantees
- A line `terminate` or `kill` there ends the worker by that signal. When the input ends, whoever launched it is gone:
  the worker ends by itself, with its world, or is killed after its `stop_seconds`. ssh, srun, `kubectl exec -i` and
  `docker exec -i` all pass that on. A SIGTERM or SIGHUP goes on to the worker, which has 0.5 s then.
- What the worker and what it started have left, processes and files, goes with it. If this process is killed, so is
  the worker (Linux), though its directory stays.
- Its status is the worker's, or 128 and the number of the signal that ended it, as shells have it.
- Imports neither torch nor the wire.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rpcbench.base.config import PROTOCOL, WorldConfig
from rpcbench.base.errors import RpcError, VersionMismatch
from rpcbench.launch.fork_server import kill_group, signal_group
from rpcbench.transport.hosts import host_id
from rpcbench.transport.run_dir import RunDirectory

ENTRY = "rpcbench.cells.worker_main:remote_main"
TOLD = {signal.SIGTERM: b"terminate\n", signal.SIGKILL: b"kill\n"}
"""The lines on its standard input that end the worker, by their signals."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_TERM_SECONDS = 0.5
_BOOTSTRAP = str(Path(__file__).with_name("worker_bootstrap.py"))

Request = dict[str, Any]


def request(config: WorldConfig) -> bytes:
    """What the outpost of a worker is told: the line for its standard input."""
    told = {
        "config": config.to_json(),
        "versions": _versions(),
        "cwd": str(Path.cwd()),
        "sys_path": [entry for entry in sys.path if isinstance(entry, str) and not _installed(entry)],
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }
    return json.dumps(told).encode() + b"\n"


def main(arguments: Sequence[str]) -> int:
    """Have the worker of this name, to its end; the exit status."""
    try:
        with _home(_heard(arguments)) as asked:
            grace = WorldConfig.from_json(asked["config"]).stop_seconds
            return _Watch(_start(asked), grace).status()
    except RpcError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _heard(arguments: Sequence[str]) -> Request:
    """The request. RpcError where there is none, or it comes from another version."""
    if len(arguments) != 1 or sys.stdin.isatty():
        raise RpcError(
            "rpcbench.worker NAME is started by a launcher, which says on standard input which world to join; "
            "that is no terminal: no `ssh -t`, no `docker exec -t`"
        )
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        line = pipe.readline()  # and no more: the watch reads the lines that follow
    if not line.endswith(b"\n"):
        raise RpcError(
            f"{arguments[0]} was not told which world to join: the command must pass standard input on (srun does, "
            "docker and kubectl need -i), and whoever launched it must still be there"
        )
    asked: Request = json.loads(line)
    if asked["versions"] != _versions():
        raise VersionMismatch(", ".join(_versions()), ", ".join(asked["versions"]), "the notebook")
    return {**asked, "name": arguments[0]}


def _versions() -> list[str]:
    """What must be the same before two processes talk; `transport.handshake` compares more once they do."""
    return [f"protocol {PROTOCOL}", f"Python {'.'.join(platform.python_version_tuple()[:2])}"]


@contextlib.contextmanager
def _home(asked: Request) -> Iterator[Request]:
    """Inside, the worker has a directory for its sockets; on the notebook's own host that is the notebook's."""
    config = WorldConfig.from_json(asked["config"])
    if config.host == host_id():
        yield asked
        return
    directory = RunDirectory()
    try:
        yield {**asked, "config": replace(config, directory=str(directory.path), host=host_id()).to_json()}
    finally:
        directory.remove()


def _start(asked: Request) -> subprocess.Popen[bytes]:
    """The worker's process: this host's Python and environment, the notebook's directories where they are here."""
    threads = asked["threads"]
    environ = {**({"OMP_NUM_THREADS": threads} if threads else {}), **os.environ}
    cwd, theirs = _found(asked)
    told = {
        "config": asked["config"], "entry": ENTRY, "log": None, "starter": os.getpid(), "environ": environ, "cwd": cwd,
        "sys_path": [*theirs, *(entry for entry in sys.path if entry not in theirs)],
    }  # fmt: skip
    command = [sys.executable, "-P", _BOOTSTRAP, asked["name"]]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:  # one that has ended already tells by that
        pipe.write(json.dumps(told).encode())
    return child


def _found(asked: Request) -> tuple[str, list[str]]:
    """The notebook's directory, or else ours, and of its import path what is here; and may be used by this user."""
    cwd = asked["cwd"] if os.access(f"{asked['cwd']}/", os.X_OK) else str(Path.cwd())
    return cwd, [entry for entry in asked["sys_path"] if os.access(entry or cwd, os.R_OK)]


def _installed(entry: str) -> bool:
    """Whether it belongs to this Python, and not to the user: another host has its own."""
    return any(Path(entry).is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix) if entry)


class _Watch:
    """Waits for the end of the worker, of the input, and for signals."""

    def __init__(self, child: subprocess.Popen[bytes], grace: float) -> None:
        self._child = child
        self._grace = grace
        self._heard = b""
        self._due: float | None = None
        self._selector = selectors.PollSelector()  # takes files as well
        self._wake, wake = socket.socketpair()
        for end in (self._wake, wake):
            end.setblocking(False)
        self._wakes = wake  # the signals'
        signal.set_wakeup_fd(wake.fileno())
        for number in (*_ENDING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._selector.register(0, selectors.EVENT_READ, self._read)

    def status(self) -> int:
        """The exit status, once the worker and what it has started are gone."""
        while (status := self._child.poll()) is None:
            for key, _ in self._selector.select(None if self._due is None else max(0.0, self._due - time.monotonic())):
                key.data()
            if self._due is not None and self._due <= time.monotonic():
                self._due = None
                signal_group(self._child.pid, signal.SIGKILL)
        kill_group(self._child.pid)
        return status if status >= 0 else 128 - status

    def _read(self) -> None:
        if not (data := os.read(0, 1 << 12)):
            self._selector.unregister(0)
            self._end_in(self._grace)
        *lines, self._heard = (self._heard + data).split(b"\n")
        for which, line in TOLD.items():
            if line.rstrip() in lines:
                signal_group(self._child.pid, which)

    def _woken(self) -> None:
        if set(self._wake.recv(1 << 12)) & set(_ENDING):
            self._end_in(_TERM_SECONDS)
            signal_group(self._child.pid, signal.SIGTERM)

    def _end_in(self, seconds: float) -> None:
        """Kill the worker then, if nothing has asked for that earlier."""
        due = time.monotonic() + seconds
        self._due = due if self._due is None else min(due, self._due)
