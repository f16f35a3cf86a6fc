"""The client of a fork server: it sends requests, completes handles from the replies, and keeps one server warm.

Guarantees
- A fork server that ends, at any moment, ends every wait here; the error contains the last lines of its log.
- A request abandoned because of Ctrl-C or a deadline leaves no worker behind.
- One thread writes the requests, so Ctrl-C never cuts one in two; another reads the replies and runs exit callbacks.
- A launcher keeps its server until that ends. Launchers share a server while a new one would be equal: same mode,
  entry and interpreter, same environment variables that matter when torch is loaded, and no loaded file changed. So a
  later cluster starts with torch loaded.
- At most one server is idle. All end with this process, in any way it ends; a fork of this process has none.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from rpcbench.base.conditions import Condition, Event
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError, ShutdownError
from rpcbench.cells.worker_log import log_path, open_private, read_last_lines
from rpcbench.launch.base import ExitCallback, ProcessHandle, has_ended
from rpcbench.launch.environment import Interpreter
from rpcbench.launch.fork_server import kill_group, signal_group
from rpcbench.transport.run_dir import RunDirectory

_CLOSE_SECONDS = 5.0
_GLANCE_SECONDS = 0.1
_HANG_SECONDS = 3.0  # without an exit report for a killed worker, after which the fork server counts as hung
_FORK_SERVER = Path(__file__).with_name("fork_server.py")


class ForkServerKey(NamedTuple):
    """The properties by which one fork server can replace another."""

    mode: str  # "fork" or "spawn"
    entry: str  # "module:function" that a worker runs
    environ: frozenset[tuple[str, str]]  # variables that matter when torch is loaded
    python: Interpreter = Interpreter()


class ForkServerClient:
    """One fork server, and the workers that it started, each for the run directory that has its log."""

    def __init__(self, kind: ForkServerKey) -> None:
        self.kind = kind
        self._maker = os.getpid()  # a fork of this process must not signal workers
        self._run_directory = RunDirectory()
        self._log = self._run_directory.path / "fork_server.err"
        self._numbers = itertools.count()  # of start requests
        self._lock = threading.Lock()  # guards `_handles` and `_lost`
        self._changes = Condition()  # notified when a handle is removed
        self._handles: dict[int, ProcessHandle] = {}  # by number: requested and not ended
        self._loaded: dict[str, int] = {}  # by file that the server loaded: when it was last changed
        self._lost = ""  # why the server ended; empty while it runs
        self.is_hung = False  # its process exists, but reports nothing
        self._stopping = False
        # Requests; a Flag is set once all before it are written; None ends the writer.
        self._requests: SimpleQueue[dict[str, Any] | Event | None] = SimpleQueue()
        self._channel, theirs = socket.socketpair()
        for end in (self._channel, theirs):
            end.setblocking(True)  # whatever the program's default timeout: the server's replies come at any time
        with theirs:
            self._process = self._start_server(theirs)
        self._reader = threading.Thread(target=self._read_replies, name="rpcbench-fork-server-replies", daemon=True)
        self._writer = threading.Thread(target=self._write_requests, name="rpcbench-fork-server-requests", daemon=True)
        self._writer.start()
        self._reader.start()
        path = kind.python.import_path()
        self._send_request(prepare=kind.mode, entry=kind.entry, sys_path=path, notebook=os.getpid())

    def _start_server(self, channel: socket.socket) -> subprocess.Popen[bytes]:
        # The thread pool of numpy would make the fork server a process with threads; workers inherit the number.
        environ = default_environment({**os.environ, **dict(self.kind.environ)})
        arguments = [self.kind.python.executable, "-P", str(_FORK_SERVER), str(self._run_directory.path)]
        with open_private(self._log) as log:
            return subprocess.Popen(
                arguments, stdin=channel.fileno(), stdout=log, stderr=log, env=environ, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended, even if the reader has not noticed that yet."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll() is not None
        try:  # WNOWAIT: the status stays for `Popen.wait`
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    @property
    def is_working(self) -> bool:
        return not self.has_ended and not self.is_hung

    def is_reusable(self) -> bool:
        """Return whether the server works, and a new one would load the same files."""
        return self.is_working and all(_changed_at(path) == time for path, time in self._loaded.items())

    def enter_directory(self, directory: Path) -> None:
        """Have the server remove `directory` if this process ends without `leave_directory`."""
        self._send_request(enter=str(directory))

    def guard(self, pid: int, grace: float) -> None:
        """Guard a process from now on: it ends with the notebook, within `grace` seconds, and its children (Linux)."""
        self._send_request(guard=pid, grace=grace)
        sent = Event()
        self._requests.put(sent)
        while not sent.wait(_GLANCE_SECONDS) and self._writer.is_alive():  # a writer that has ended sets no flag
            pass

    def start_worker(self, config: WorldConfig, directory: Path, on_exit: ExitCallback | None) -> ProcessHandle:
        """Start a worker, and return once its process exists. Raises RpcError and ShutdownError."""
        if threading.current_thread() is self._reader:  # it would wait for a reply that only it can read
            raise RuntimeError("a worker cannot be started from on_exit itself; hand that to another thread")
        number, handle = self._register_handle(config, directory, on_exit)
        try:
            request = worker_request(config, self.kind.entry, handle.log, self.kind.python)
            self._send_request(start=number, grace=config.stop_seconds, **request)
            if not handle.wait_until_created(config.start_seconds):  # the first one waits until torch is loaded
                late = f"the fork server {self.pid} did not answer in {config.start_seconds:g} s"
                raise RpcError(f"{late}\n{read_last_lines(self._log)}")
        except BaseException:  # Ctrl-C, too
            handle.abandon_process()
            raise
        return handle

    def leave_directory(self, directory: Path) -> None:
        """End the workers of `directory`, and return once they have ended, after 5 s at most."""
        self._send_request(leave=str(directory))
        if threading.current_thread() is self._reader:  # in an exit callback: no reply would be read meanwhile
            return
        left = self._changes.wait_for(lambda: not self._working_for(directory), _CLOSE_SECONDS)
        if not left and self._end_those_of(directory):
            return
        if not left:  # the server hangs and has no other workers, which would end with it
            self._process.kill()
        if not left or self._lost:
            self._reader.join(_CLOSE_SECONDS)

    def _end_those_of(self, directory: Path) -> bool:
        """Kill the workers of `directory` without the server, if it has others. Return whether it has."""
        with self._lock:
            numbers = {number: handle for number, handle in self._handles.items() if handle.log.parent == directory}
            others = len(self._handles) > len(numbers)
        if others:
            self.is_hung = True
            for number, handle in numbers.items():
                self._signal_worker(number, signal.SIGKILL)
                if handle.has_begun:
                    self._reply_received({"exited": number, "status": -signal.SIGKILL})
        return others

    def _working_for(self, directory: Path) -> bool:
        with self._lock:
            return any(handle.log.parent == directory for handle in self._handles.values())

    def _register_handle(
        self, config: WorldConfig, directory: Path, on_exit: ExitCallback | None
    ) -> tuple[int, ProcessHandle]:
        number, log = next(self._numbers), log_path(directory, config.name, config.incarnation)
        handle = ProcessHandle(config.name, log, lambda which: self._signal_worker(number, which), on_exit)
        with self._lock:
            if not self._lost:
                self._handles[number] = handle
                return number, handle
        raise self._loss_error()

    def _signal_worker(self, number: int, which: int) -> None:
        with self._lock:
            handle = self._handles.get(number)
        if handle is None or os.getpid() != self._maker:  # it has ended, or this is a fork of its owner
            return
        if not handle.has_begun:
            self._send_request(signal=which, to=number)  # only the server will have its pid
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended just now. Not sent by the server: it may hang
            (os.kill if which == signal.SIGINT else signal_group)(handle.pid, which)
        if which == signal.SIGKILL:
            watch = threading.Thread(
                target=self._detect_hang, args=(number, handle), name="rpcbench-fork-server-end", daemon=True
            )
            watch.start()

    def _detect_hang(self, number: int, handle: ProcessHandle) -> None:
        """Wait for the report that a killed process has ended; without one in time, the server hangs."""
        with contextlib.suppress(TimeoutError):
            handle.wait(_HANG_SECONDS)
        while handle.poll() is None and not self._lost:
            over = has_ended(handle)
            with contextlib.suppress(TimeoutError):  # also then, as this process itself may have been stopped
                handle.wait(_GLANCE_SECONDS)
            if over and handle.poll() is None:
                self.is_hung = True
                self._reply_received({"exited": number, "status": -signal.SIGKILL})

    def _loss_error(self) -> RpcError:
        return ShutdownError(self._lost) if self._stopping else RpcError(self._lost)

    def _send_request(self, **request: Any) -> None:
        self._requests.put(request)

    def _write_requests(self) -> None:
        gone = False  # the server has ended: the reader reports that, and the queue is emptied so that flags are set
        while (request := self._requests.get()) is not None:
            if isinstance(request, Event):
                request.set()
            elif not gone:
                try:
                    self._channel.sendall(json.dumps(request).encode() + b"\n")
                except OSError:
                    gone = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)  # the server ends, and its replies can still be read

    def _read_replies(self) -> None:
        with contextlib.suppress(ConnectionError), self._channel.makefile("rb") as lines:
            for line in lines:
                self._reply_received(json.loads(line))
        self._server_ended()

    def _reply_received(self, reply: dict[str, Any]) -> None:
        match reply:
            case {"ready": loaded}:
                self._loaded = loaded
            case {"started": number, "pid": pid}:
                self._handles[number].process_created(pid)
            case {"failed": number, "error": error}:
                handle = self._handles[number]
                handle.start_failed(RpcError(f"{handle.name} could not be started: {error}"))
                self._remove_handle(number)
            case {"exited": number, "status": status}:
                if ended := self._handles.get(number):  # else `_detect_hang` took a slow server for a hung one
                    ended.process_ended(status)
                    self._remove_handle(number)

    def _remove_handle(self, number: int) -> None:
        with self._lock:
            self._handles.pop(number, None)
        self._changes.notify_all()

    def _server_ended(self) -> None:
        """End all handles: the server has ended, and its workers with it."""
        lost = self._loss_reason()
        with self._lock:
            self._lost = lost
            left, self._handles = self._handles, {}
        self._changes.notify_all()
        self._requests.put(None)
        for handle in left.values():
            if handle.has_begun:
                kill_group(handle.pid)  # its children, and the worker itself where the system did not end it (macOS)
                handle.process_ended(-signal.SIGKILL)
            else:
                handle.start_failed(self._loss_error())
        self._writer.join()
        self._channel.close()
        self._run_directory.remove_directory()

    def _loss_reason(self) -> str:
        try:
            status = self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._stopping:
            return "this process ended its workers"
        return f"the fork server, which starts the workers, ended with status {status}\n{read_last_lines(self._log)}"

    def stop_server(self) -> None:
        """End the server and all its workers, and return once they have ended, after 5 s at most."""
        self._stopping = True
        self._requests.put(None)
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if threading.current_thread() is not self._reader:
            self._reader.join(_CLOSE_SECONDS)


def _changed_at(path: str) -> int | None:
    """Return the time of a file's last change in nanoseconds; None if there is no such file."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


def worker_request(config: WorldConfig, entry: str, log: Path, python: Interpreter) -> dict[str, Any]:
    """Return the request for `worker_bootstrap.run_worker`, without "parent": a worker with surroundings as here."""
    surroundings = {
        "cwd": str(Path.cwd()),
        "environ": config.pinned_environment(os.environ),
        "sys_path": python.import_path(),
    }
    return {"name": config.name, "entry": entry, "config": config.to_json(), "log": str(log), **surroundings}


def default_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which numpy has as many threads as torch by default: one."""
    return {"OPENBLAS_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1"), **environ}


# Prefixes of environment variables that torch and its libraries read when they are loaded.
_READ_WHILE_LOADING = (
    "ATEN_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "SYMPY_", "TORCH",
    "TRITON_",
)  # fmt: skip


class _ServerPool:
    """The fork servers of this process, with a reference count for each."""

    def __init__(self) -> None:
        self.forget_servers()

    def forget_servers(self) -> None:
        """Forget all servers. Called in a fork of this process, too: they belong to its parent."""
        # Held while a server is made: a second thread needs that same server and could only wait for it.
        self._lock = threading.Lock()
        self._warm: ForkServerClient | None = None  # the latest: kept while it is idle
        self._users: dict[ForkServerClient, int] = {}  # reference counts

    def warm_up_server(self, mode: str, entry: str) -> None:
        """Begin to start a fork server, unless a suitable one runs. Returns at once."""
        self._acquire_server(_make_server_key(mode, entry, {}, Interpreter()), users=0)

    def take_server(self, mode: str, entry: str, environ: Mapping[str, str], python: Interpreter) -> ForkServerClient:
        """Return a fork server of this mode ("fork" or "spawn"), entry and interpreter, with these variables if they
        count when torch is loaded; the caller has to give it back."""
        return self._acquire_server(_make_server_key(mode, entry, environ, python), users=1)

    def take_any_server(self) -> ForkServerClient:
        """Return a server to guard processes that others start: the warm one, or one that loads nothing. As
        `take_server`."""
        return self._acquire_server(None, users=1)

    def _acquire_server(self, kind: ForkServerKey | None, users: int) -> ForkServerClient:
        with self._lock:
            warm = self._warm
            if warm is None or not (warm.kind == kind and warm.is_reusable() if kind else warm.is_working):
                self._warm = warm = ForkServerClient(kind or ForkServerKey("spawn", "", frozenset()))
            self._users[warm] = self._users.get(warm, 0) + users
        self._stop_unused()
        return warm

    def return_server(self, server: ForkServerClient) -> None:
        with self._lock:
            if server in self._users:
                self._users[server] -= 1
        self._stop_unused()

    def stop_idle_servers(self) -> None:
        """Keep no server warm: idle ones end now, the others when their last user gives them back."""
        with self._lock:
            self._warm = None
        self._stop_unused()

    def end_servers(self) -> None:
        with self._lock:
            self._warm = None
            self._users = dict.fromkeys(self._users, 0)
        self._stop_unused()

    def _stop_unused(self) -> None:
        """Stop the servers that have no users and are not the warm one."""
        with self._lock:
            idle = [server for server, users in self._users.items() if not users and server is not self._warm]
            for server in idle:
                del self._users[server]
        for server in idle:  # not under the lock: this waits for the end of processes
            server.stop_server()


def _make_server_key(mode: str, entry: str, environ: Mapping[str, str], python: Interpreter) -> ForkServerKey:
    every = {**os.environ, **environ}
    counting = {name: value for name, value in every.items() if name.startswith(_READ_WHILE_LOADING)}
    return ForkServerKey(mode, entry, frozenset(counting.items()), python)


_ours = _ServerPool()
warm, take, take_any = _ours.warm_up_server, _ours.take_server, _ours.take_any_server
give_back, stop_idle = _ours.return_server, _ours.stop_idle_servers
os.register_at_fork(after_in_child=_ours.forget_servers)
atexit.register(_ours.end_servers)
