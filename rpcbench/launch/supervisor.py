"""The supervisor: the process that a launch command runs on a worker's host; it starts the worker and ends it in time.

Guarantees
- The first line of standard input is the request, JSON with the secret. A later line `terminate` or `kill` ends the
  worker by that signal. At the end of the input the launcher has ended: the worker ends by itself, with its world, or
  is killed after its `stop_seconds`. ssh, srun, `kubectl exec -i` and `docker exec -i` all forward that. SIGTERM and
  SIGHUP are forwarded to the worker, which is killed after 0.5 s.
- Processes that the worker leaves are killed, and its files removed. If the supervisor is killed, so is the worker
  (Linux), but its directory stays.
- A host that cannot reach the notebook is reported, with what it met there, before a worker starts.
- Its exit status is the worker's, or 128 plus the number of the signal that ended the worker, as in shells.
- It imports neither torch nor the wire.
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

from rpcbench.base.config import PROTOCOL, WorldConfig
from rpcbench.base.errors import RpcError, VersionMismatch
from rpcbench.launch.environment import is_installed
from rpcbench.launch.fork_server import TERM_SECONDS, Request, kill_group, signal_group
from rpcbench.transport import hosts, listeners
from rpcbench.transport.hosts import host_id
from rpcbench.transport.preambles import WELCOME, make_preamble
from rpcbench.transport.run_dir import RunDirectory

ENTRY = "rpcbench.launch.worker_main:remote_main"
COMMANDS = {signal.SIGTERM: b"terminate\n", signal.SIGKILL: b"kill\n"}
"""The lines on its standard input that end the worker, by their signals."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)  # forwarded to the worker
_REACH_SECONDS = 10.0  # for the notebook's host to answer
_REACH_PAUSE = 0.1  # seconds between two tries
_BOOTSTRAP = str(Path(__file__).with_name("worker_bootstrap.py"))


def supervisor_request(config: WorldConfig) -> bytes:
    """Return the request for a worker's supervisor: the line for its standard input."""
    fields = {
        "config": config.to_json(),
        "versions": _required_versions(),
        "cwd": str(Path.cwd()),
        "sys_path": [entry for entry in sys.path if isinstance(entry, str) and not is_installed(entry)],
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }
    return json.dumps(fields).encode() + b"\n"


def main(arguments: Sequence[str]) -> int:
    """Run the worker of this name to its end, and return the exit status."""
    try:
        with _provide_directory(_read_request(arguments)) as worker_request:
            grace = WorldConfig.from_json(worker_request["config"]).stop_seconds
            return _Supervisor(_start_worker(worker_request), grace).wait_for_status()
    except RpcError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _read_request(arguments: Sequence[str]) -> Request:
    """Read and return the request. RpcError if there is none, or if it is from another version."""
    if len(arguments) != 1 or sys.stdin.isatty():
        raise RpcError(
            "rpcbench.worker NAME is started by a launcher, which sends on standard input which world to join; "
            "standard input must not be a terminal: no `ssh -t`, no `docker exec -t`"
        )
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        line = pipe.readline()  # unbuffered, so that the lines that follow stay in the pipe for `_Supervisor`
    if not line.endswith(b"\n"):
        raise RpcError(
            f"{arguments[0]} received no world to join: the command must forward standard input (srun does, "
            "docker and kubectl need -i), and its launcher must still run"
        )
    worker_request: Request = json.loads(line)
    if worker_request["versions"] != _required_versions():
        raise VersionMismatch(", ".join(_required_versions()), ", ".join(worker_request["versions"]), "the notebook")
    return {**worker_request, "name": arguments[0]}


def _required_versions() -> list[str]:
    """Return the versions that must be equal before a worker starts; `transport.handshake` compares more later."""
    return [f"protocol {PROTOCOL}", f"Python {'.'.join(platform.python_version_tuple()[:2])}"]


@contextlib.contextmanager
def _provide_directory(worker_request: Request) -> Iterator[Request]:
    """Provide a directory for the worker's sockets, and yield the request with it."""
    config = WorldConfig.from_json(worker_request["config"])
    if hosts.is_shared(config.host, config.directory):  # the notebook's host: its directory serves
        yield worker_request
        return
    _check_reachable(config)
    directory = RunDirectory()
    try:
        yield {**worker_request, "config": replace(config, directory=str(directory.path), host=host_id()).to_json()}
    finally:
        directory.remove_directory()


def _check_reachable(config: WorldConfig) -> None:
    """Connect to the notebook, and hang up. RpcError says what this host met there."""
    try:
        met = _first_answer(listeners.split_address(config.leader.removeprefix("tls://")), config.secret)
    except OSError as error:
        met = f"no answer in {_REACH_SECONDS:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
    if met:
        raise RpcError(
            f"{config.name}, on host {socket.gethostname()}, cannot reach the notebook at {config.leader}: {met}. Let "
            "connections to that port through, or name an address of the notebook that this host can reach: "
            'address="HOST:PORT", in a notebook --address HOST:PORT'
        )


def _first_answer(place: tuple[str, int], secret: bytes) -> str:
    """Return what is wrong with the answer there; empty for the notebook's, and where each connection is reset, as the
    notebook does while many wait for it: the worker will try for longer. OSError where no process listens."""
    deadline = time.monotonic() + _REACH_SECONDS
    while True:
        try:
            return _one_answer(place, secret)
        except (ConnectionResetError, BrokenPipeError):
            if time.monotonic() >= deadline:
                return ""
            time.sleep(_REACH_PAUSE)


def _one_answer(place: tuple[str, int], secret: bytes) -> str:
    with socket.create_connection(place, _REACH_SECONDS) as sock:
        sock.sendall(make_preamble(secret))
        try:
            answer = sock.recv(len(WELCOME))
        except TimeoutError:  # the notebook is busy, as its system has answered: the worker will try for longer
            return ""
    return "" if answer == WELCOME else "another service answers, or a cluster with another secret"


def _start_worker(worker_request: Request) -> subprocess.Popen[bytes]:
    """Start the worker, with this host's Python and environment, the variables of the request, and the notebook's
    directories if they exist here."""
    threads = worker_request["threads"]
    here = {**({"OMP_NUM_THREADS": threads} if threads else {}), **os.environ}
    environ = WorldConfig.from_json(worker_request["config"]).pinned_environment(here)
    cwd, theirs = _accessible_paths(worker_request)
    bootstrap_request = {
        "config": worker_request["config"], "entry": ENTRY, "log": None, "parent": os.getpid(), "environ": environ,
        "cwd": cwd,
        "sys_path": [*theirs, *(entry for entry in sys.path if entry not in theirs)],
    }  # fmt: skip
    command = [sys.executable, "-P", _BOOTSTRAP, worker_request["name"]]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:  # it has ended already: its status reports that
        pipe.write(json.dumps(bootstrap_request).encode())
    return child


def _accessible_paths(worker_request: Request) -> tuple[str, list[str]]:
    """Return the directory and import path of the worker: the notebook's, as far as this user can access them here."""
    cwd = worker_request["cwd"] if os.access(f"{worker_request['cwd']}/", os.X_OK) else str(Path.cwd())
    return cwd, [entry for entry in worker_request["sys_path"] if os.access(entry or cwd, os.R_OK)]


class _Supervisor:
    """The loop that waits for the end of the worker, the end of the input, and signals."""

    def __init__(self, child: subprocess.Popen[bytes], grace: float) -> None:
        self._child = child
        self._grace = grace
        self._partial_line = b""  # an incomplete line
        self._due: float | None = None  # when the worker is killed (monotonic seconds)
        self._selector = selectors.PollSelector()  # epoll refuses a regular file as standard input
        self._wake, wake = socket.socketpair()
        for end in (self._wake, wake):
            end.setblocking(False)
        self._wakes = wake  # keeps the descriptor open that signals are written to
        signal.set_wakeup_fd(wake.fileno())
        for number in (*_ENDING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(self._wake, selectors.EVENT_READ, self._signal_received)
        self._selector.register(0, selectors.EVENT_READ, self._read_commands)

    def wait_for_status(self) -> int:
        """Wait for the end of the worker, kill the processes that it started, and return the exit status."""
        while (status := self._child.poll()) is None:
            for key, _ in self._selector.select(None if self._due is None else max(0.0, self._due - time.monotonic())):
                key.data()
            if self._due is not None and self._due <= time.monotonic():
                self._due = None
                signal_group(self._child.pid, signal.SIGKILL)
        kill_group(self._child.pid)
        return status if status >= 0 else 128 - status

    def _read_commands(self) -> None:
        if not (data := os.read(0, 1 << 12)):
            self._selector.unregister(0)
            self._end_in(self._grace)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for which, line in COMMANDS.items():
            if line.rstrip() in lines:
                signal_group(self._child.pid, which)

    def _signal_received(self) -> None:
        if set(self._wake.recv(1 << 12)) & set(_ENDING):
            self._end_in(TERM_SECONDS)
            signal_group(self._child.pid, signal.SIGTERM)

    def _end_in(self, seconds: float) -> None:
        """Kill the worker in `seconds`, unless it is to be killed earlier."""
        due = time.monotonic() + seconds
        self._due = due if self._due is None else min(due, self._due)
