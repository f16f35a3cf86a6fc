"""The notebook's end of a fork server: it sends requests, turns replies into handles, and keeps one server warm.

Guarantees
- A server that dies, at any moment, ends every wait here; the error holds what it wrote.
- A request that Ctrl-C or a deadline gave up leaves no worker behind.
- Requests are written by one thread, so that Ctrl-C never cuts one in two; replies are read by another, which also
  runs the exit callbacks.
- A launcher has one server for as long as that lives. Launchers share it as long as a new one would be no different:
  same mode and entry, same variables that count when torch is loaded, no change of a file that it has loaded. So a
  cluster that comes later finds torch loaded.
- At most one server serves nobody. All end with this process at the latest, however that ends. A fork of this process
  has none of them.
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
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from rpcbench.base.conditions import Changes, Flag
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError, ShutdownError
from rpcbench.launch.base import ExitCallback, ProcessHandle, has_ended, log_of, tail
from rpcbench.launch.fork_server import kill_group, signal_group
from rpcbench.transport.run_dir import RunDirectory

_START_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_GLANCE_SECONDS = 0.1
_HANG_SECONDS = 3.0
_FORK_SERVER = Path(__file__).with_name("fork_server.py")


class Kind(NamedTuple):
    """What makes one starter as good as another: mode, entry, and variables that count when torch is loaded."""

    mode: str
    entry: str
    environ: frozenset[tuple[str, str]]


class ForkServerClient:
    """One starter process, and the workers it started, each on behalf of the run directory that has its log."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._maker = os.getpid()
        self._home = RunDirectory()
        self._log = self._home.path / "starter.err"
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._changes = Changes()
        self._handles: dict[int, ProcessHandle] = {}
        self._loaded: dict[str, int] = {}
        self._lost = ""
        self.hangs = False
        self._stopping = False
        self._requests: SimpleQueue[dict[str, Any] | Flag | None] = SimpleQueue()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = self._open(theirs)
        self._reader = threading.Thread(target=self._read, name="rpcbench-starter-replies", daemon=True)
        self._writer = threading.Thread(target=self._write, name="rpcbench-starter-requests", daemon=True)
        self._writer.start()
        self._reader.start()
        self._send(prepare=kind.mode, entry=kind.entry, sys_path=import_path(), notebook=os.getpid())

    def _open(self, channel: socket.socket) -> subprocess.Popen[bytes]:
        # Numpy's own thread pool would make the starter a process with threads; workers inherit the number.
        environ = {"OPENBLAS_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **os.environ}
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            arguments = [sys.executable, "-P", str(_FORK_SERVER), str(self._home.path)]
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
        """Whether its process has ended, also if nothing else was told of that yet."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def is_good(self) -> bool:
        """Whether it works, and one made now would have loaded the same."""
        works = not self.lost and not self.hangs
        return works and all(_changed_at(path) == time for path, time in self._loaded.items())

    def enter(self, directory: Path) -> None:
        """Remove `directory`, too, if this process ends without `leave`."""
        self._send(enter=str(directory))

    def guard(self, pid: int, grace: float) -> None:
        """End this process, too, if the notebook ends, from when this returns, and it does not end by itself in `grace`
        seconds; and its children when it ends (Linux)."""
        self._send(guard=pid, grace=grace)
        sent = Flag()
        self._requests.put(sent)
        while not sent.wait(_GLANCE_SECONDS) and self._writer.is_alive():  # it ends with the starter
            pass

    def start(self, config: WorldConfig, directory: Path, on_exit: ExitCallback | None) -> ProcessHandle:
        """Start a worker; returns when its process is there. Errors: RpcError, ShutdownError."""
        if threading.current_thread() is self._reader:
            raise RuntimeError("a worker cannot be started from on_exit itself; hand that to another thread")
        number, handle = self._enter(config, directory, on_exit)
        try:
            asked = {"config": config.to_json(), "grace": config.stop_seconds, "log": str(handle.log)}
            self._send(start=number, **asked, **self._surroundings(config.name))
            if not handle.started(_START_SECONDS):
                raise self._overdue()
        except BaseException:
            handle.abandon()
            raise
        return handle

    def leave(self, directory: Path) -> None:
        """End the workers of `directory`; returns when they are gone, which takes 5 s at the very most. A starter that
        hangs is killed, unless it has other workers: they would go with it."""
        self._send(leave=str(directory))
        if threading.current_thread() is self._reader:
            return
        left = self._changes.wait_for(lambda: not self._working_for(directory), _CLOSE_SECONDS)
        if not left and self._end_those_of(directory):
            return
        if not left:
            self._process.kill()
        if not left or self._lost:
            self._reader.join(_CLOSE_SECONDS)

    def _end_those_of(self, directory: Path) -> bool:
        """Kill them without the starter; whether others are left, which keep it alive."""
        with self._lock:
            numbers = {number: handle for number, handle in self._handles.items() if handle.log.parent == directory}
            others = len(self._handles) > len(numbers)
        if others:
            self.hangs = True
            for number, handle in numbers.items():
                self._signal(number, signal.SIGKILL)
                if handle.has_begun:
                    self._take({"exited": number, "status": -signal.SIGKILL})
        return others

    def _working_for(self, directory: Path) -> bool:
        with self._lock:
            return any(handle.log.parent == directory for handle in self._handles.values())

    def _enter(self, config: WorldConfig, directory: Path, on_exit: ExitCallback | None) -> tuple[int, ProcessHandle]:
        number, log = next(self._numbers), log_of(directory, config.name, config.incarnation)
        handle = ProcessHandle(config.name, log, lambda which: self._signal(number, which), on_exit)
        with self._lock:
            if not self._lost:
                self._handles[number] = handle
                return number, handle
        raise self._gone()

    def _signal(self, number: int, which: int) -> None:
        """Without the starter, which may hang, where the process is there already."""
        with self._lock:
            handle = self._handles.get(number)
        if handle is None or os.getpid() != self._maker:  # it has ended; a fork of this process ends nobody
            return
        if not handle.has_begun:
            self._send(signal=which, to=number)
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            (os.kill if which == signal.SIGINT else signal_group)(handle.pid, which)
        if which == signal.SIGKILL:
            watch = threading.Thread(target=self._miss, args=(number, handle), name="rpcbench-starter-end", daemon=True)
            watch.start()

    def _miss(self, number: int, handle: ProcessHandle) -> None:
        """A process was killed just now. If nobody tells of its end in time, the starter hangs."""
        for seconds in (_HANG_SECONDS, _GLANCE_SECONDS):  # twice, as this process may have been stopped meanwhile
            with contextlib.suppress(TimeoutError):
                handle.wait(seconds)
        if handle.poll() is None and not self._lost and has_ended(handle):
            self.hangs = True
            self._take({"exited": number, "status": -signal.SIGKILL})

    def _surroundings(self, name: str) -> dict[str, Any]:
        surroundings = {"cwd": str(Path.cwd()), "environ": dict(os.environ), "sys_path": import_path()}
        return {"name": name, "entry": self.kind.entry, **surroundings}

    def _overdue(self) -> RpcError:
        return RpcError(f"the starter process {self.pid} did not answer in {_START_SECONDS:g} s\n{tail(self._log)}")

    def _gone(self) -> RpcError:
        return ShutdownError(self._lost) if self._stopping else RpcError(self._lost)

    def _send(self, **request: Any) -> None:
        self._requests.put(request)

    def _write(self) -> None:
        gone = False  # then it is the reader who tells
        while (request := self._requests.get()) is not None:
            if isinstance(request, Flag):
                request.set()
            elif not gone:
                try:
                    self._channel.sendall(json.dumps(request).encode() + b"\n")
                except OSError:
                    gone = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        with contextlib.suppress(ConnectionError), self._channel.makefile("rb") as lines:
            for line in lines:
                self._take(json.loads(line))
        self._end()

    def _take(self, reply: dict[str, Any]) -> None:
        match reply:
            case {"ready": loaded}:
                self._loaded = loaded
            case {"started": number, "pid": pid}:
                self._handles[number].begin(pid)
            case {"failed": number, "error": error}:
                handle = self._handles[number]
                handle.refuse(RpcError(f"{handle.name} could not be started: {error}"))
                self._forget(number)
            case {"exited": number, "status": status}:
                if (ended := self._handles.get(number)) is not None:  # else the starter hung when it was to tell
                    ended.end(status)
                    self._forget(number)

    def _forget(self, number: int) -> None:
        with self._lock:
            self._handles.pop(number, None)
        self._changes.tell()

    def _end(self) -> None:
        """The starter has gone, and its workers with it: tell all who wait."""
        lost = self._obituary()
        with self._lock:
            self._lost = lost
            left, self._handles = self._handles, {}
        self._changes.tell()
        self._requests.put(None)
        for handle in left.values():
            if handle.has_begun:
                kill_group(handle.pid)  # and the worker, where the system did not end it with the starter
                handle.end(-signal.SIGKILL)
            else:
                handle.refuse(self._gone())
        self._writer.join()
        self._channel.close()
        self._home.remove()

    def _obituary(self) -> str:
        try:
            status = self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._stopping:
            return "this process ended its workers"
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


def _changed_at(path: str) -> int | None:
    """When a file was last changed; None if it is not there."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


def import_path() -> list[str]:
    """What this process imports from; a worker shall, too."""
    return [entry for entry in sys.path if isinstance(entry, str)]


_READ_WHILE_LOADING = (
    "ATEN_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH"
)  # fmt: skip


class _Starters:
    def __init__(self) -> None:
        # Held while a starter is made: whoever comes meanwhile needs that one starter and could only wait.
        self._lock = threading.Lock()
        self._warm: ForkServerClient | None = None
        self._users: dict[ForkServerClient, int] = {}

    def take(self, kind: Kind, users: int) -> ForkServerClient:
        with self._lock:
            if self._warm is None or self._warm.kind != kind or not self._warm.is_good():
                self._warm = ForkServerClient(kind)
            warm = self._warm
            self._users[warm] = self._users.get(warm, 0) + users
            idle = self._take_idle()
        _stop(idle)
        return warm

    def take_any(self) -> ForkServerClient:
        with self._lock:
            if self._warm is None or self._warm.lost or self._warm.hangs:
                self._warm = ForkServerClient(Kind("spawn", "", frozenset()))
            self._users[self._warm] = self._users.get(self._warm, 0) + 1
            return self._warm

    def give_back(self, starter: ForkServerClient) -> None:
        with self._lock:
            if starter in self._users:
                self._users[starter] -= 1
            idle = self._take_idle()
        _stop(idle)

    def cool(self) -> None:
        with self._lock:
            self._warm = None
            idle = self._take_idle()
        _stop(idle)

    def end(self) -> None:
        with self._lock:
            self._warm = None
            starters = list(self._users)
            self._users.clear()
        _stop(starters)

    def _take_idle(self) -> list[ForkServerClient]:
        """Those that serve nobody and will not."""
        idle = [starter for starter, users in self._users.items() if not users and starter is not self._warm]
        for starter in idle:
            del self._users[starter]
        return idle


def _stop(starters: list[ForkServerClient]) -> None:
    for starter in starters:
        starter.stop()


_ours = _Starters()


def warm(mode: str, entry: str) -> None:
    """Begin to start a starter, if a fitting one is not there; returns at once."""
    _ours.take(_kind(mode, entry), users=0)


def take(mode: str, entry: str) -> ForkServerClient:
    """A starter of this mode ("fork" or "spawn") and entry, to be given back."""
    return _ours.take(_kind(mode, entry), users=1)


def take_any() -> ForkServerClient:
    """A starter to guard what others start, to be given back: the warm one, else one that loads nothing."""
    return _ours.take_any()


def give_back(starter: ForkServerClient) -> None:
    """Whoever took it needs it no more."""
    _ours.give_back(starter)


def cool() -> None:
    """Keep none warm: those that serve nobody end now, the others when they serve nobody any more."""
    _ours.cool()


def _kind(mode: str, entry: str) -> Kind:
    counting = {name: value for name, value in os.environ.items() if name.startswith(_READ_WHILE_LOADING)}
    return Kind(mode, entry, frozenset(counting.items()))


def _end() -> None:
    _ours.end()


def _forget() -> None:
    global _ours
    _ours = _Starters()


os.register_at_fork(after_in_child=_forget)
atexit.register(_end)
