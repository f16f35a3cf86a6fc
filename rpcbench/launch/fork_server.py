"""The starter: a small process beside the notebook that starts workers, reports their exits and ends them.

Run as a script by path, with its own run directory as argument, so it imports nothing of ours before it knows the
notebook's import path. It talks in JSON lines over a socket on its standard input:
    requests  {"prepare": mode, ...}  {"start": number, ...}  {"signal": signal, "to": number}
              {"enter": run directory}  {"leave": run directory}  {"guard": pid, "grace": seconds}
    replies   {"ready": {file it has loaded: when that was changed}}  {"started": number, "pid": pid}
              {"failed": number, "error": text}  {"exited": number, "status": exit status}

Guarantees
- When the notebook is gone, however it went, workers and guarded processes have their grace to end by themselves; then
  they are ended, and the run directories go. When the starter is gone, so are its workers (Linux).
- After "leave" the workers with their log in that directory are ended: SIGTERM, SIGKILL after 0.5 s.
- Mode "fork" imports torch and the entry's module once and runs no torch operation: a process that has run a
  parallel one has threads and locks that its forks inherit broken.
- A worker inherits no descriptor of the starter or of its siblings; what a worker started ends with it, unless that
  made a session of its own.
- A process that is guarded, which others started, ends with the notebook, and what it started ends with it (Linux).
- Nothing here polls.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Request = dict[str, Any]

_WORKER = str(Path(__file__).with_name("worker_bootstrap.py"))
_CAUGHT = (signal.SIGCHLD, signal.SIGTERM)
_TERM_SECONDS = 0.5
_KILL_SECONDS = 2.0
_AGAIN_SECONDS = 0.05


class _Child(NamedTuple):
    """A worker: the number it was asked for by, the run directory that has its log, and seconds to end by itself."""

    number: int
    directory: str
    grace: float


class _Guarded(NamedTuple):
    """A process that others started, and seconds to end by itself."""

    pid: int
    grace: float


class ForkServer:
    """Serves one notebook until that goes."""

    def __init__(self, home: str) -> None:
        self._own = contextlib.ExitStack()
        self._channel = self._own.enter_context(socket.socket(fileno=os.dup(0)))
        self._wake, wake = (self._own.enter_context(end) for end in socket.socketpair())
        self._selector = self._own.enter_context(selectors.DefaultSelector())
        self._heard = b""
        self._children: dict[int, _Child] = {}
        self._directories = {home}
        self._overdue: dict[str, float] = {}
        self._guarded: dict[int, _Guarded] = {}  # by the descriptor that tells of its end
        self._mode = ""
        self._over = False
        self._orphaned = False
        _hide_input()
        self._listen(self._channel.fileno(), self._hear)
        self._catch_signals(wake)

    def _catch_signals(self, wake: socket.socket) -> None:
        for end in (self._wake, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        for number in _CAUGHT:
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._listen(self._wake.fileno(), self._woken)

    def _listen(self, descriptor: int, react: Callable[[], Request | None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, react)

    def serve(self) -> Request | None:
        """Serve until the notebook is gone, then None; but in each process forked for a worker, its request."""
        while not self._over:
            for key, _ in self._selector.select(self._rest()):
                request: Request | None = key.data()
                if request is not None:
                    return request
            self._kill_overdue()
        self._end_all()
        return None

    def _hear(self) -> Request | None:
        try:
            data = self._channel.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._orphan()
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            request = self._take(json.loads(line))
            if request is not None:
                return request
        return None

    def _take(self, request: Request) -> Request | None:
        if "prepare" in request:
            self._prepare(request)
        elif "start" in request:
            return self._start(request)
        elif "enter" in request:
            self._directories.add(request["enter"])
        elif "leave" in request:
            self._leave(request["leave"])
        elif "guard" in request:
            self._guard(_Guarded(request["guard"], request["grace"]))
        else:
            self._signal(request["to"], request["signal"])
        return None

    def _prepare(self, request: Request) -> None:
        self._mode = request["prepare"]
        self._watch(request["notebook"])
        loaded: dict[str, int] = {}
        if self._mode == "fork":
            sys.path[:] = request["sys_path"]
            loaded = _preload(request["entry"])
        os.chdir("/")
        self._tell({"ready": loaded})

    def _watch(self, notebook: int) -> None:
        """Notice the notebook's end even if a process that it forked still holds its end of our channel."""
        if not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(notebook)
        except ProcessLookupError:
            self._orphan()
            return
        self._own.callback(os.close, descriptor)
        self._listen(descriptor, self._orphan)

    def _orphan(self) -> None:
        self._over = self._orphaned = True

    def _guard(self, process: _Guarded) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            kill_group(process.pid)
            return
        self._guarded[descriptor] = process
        self._listen(descriptor, lambda: self._let_go(descriptor))

    def _let_go(self, descriptor: int) -> None:
        """A guarded process has ended."""
        self._selector.unregister(descriptor)
        kill_group(self._guarded.pop(descriptor).pid)
        os.close(descriptor)

    def _start(self, request: Request) -> Request | None:
        number = request["start"]
        request["starter"] = os.getpid()
        try:
            pid = self._fork() if self._mode == "fork" else _spawn(request)
        except OSError as error:
            self._tell({"failed": number, "error": f"{type(error).__name__}: {error}"})
            return None
        if pid == 0:
            return request
        self._children[pid] = _Child(number, str(Path(request["log"]).parent), request["grace"])
        self._tell({"started": number, "pid": pid})
        return None

    def _fork(self) -> int:
        """As `os.fork`; the child has nothing of the starter's, and no signal for it falls to our handlers."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT)
        try:
            pid = os.fork()
            if pid == 0:
                self._forget_all()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _CAUGHT)
        return pid

    def _forget_all(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in _CAUGHT:
            signal.signal(number, signal.SIG_DFL)
        self._own.close()
        for descriptor in self._guarded:
            os.close(descriptor)

    def _signal(self, number: int, which: int) -> None:
        for pid, child in self._children.items():
            if child.number == number:
                send = os.kill if which == signal.SIGINT else signal_group
                send(pid, which)

    def _woken(self) -> None:
        if signal.SIGTERM in self._wake.recv(1 << 12):
            self._over = True
        self._reap()

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                kill_group(pid)
                self._tell({"exited": self._children.pop(pid).number, "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, reply: dict[str, Any]) -> None:
        try:
            self._channel.sendall(json.dumps(reply).encode() + b"\n")
        except ConnectionError:
            self._orphan()

    def _leave(self, directory: str) -> None:
        self._directories.discard(directory)
        self._overdue[directory] = time.monotonic() + _TERM_SECONDS
        self._signal_all(directory, signal.SIGTERM)

    def _signal_all(self, directory: str, which: int) -> None:
        for pid, child in self._children.items():
            if child.directory == directory:
                signal_group(pid, which)

    def _rest(self) -> float | None:
        """Seconds until workers that were asked to end have had their time; None while none was."""
        if not self._overdue:
            return None
        return max(0.0, min(self._overdue.values()) - time.monotonic())

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for directory in [directory for directory, due in self._overdue.items() if due <= now]:
            del self._overdue[directory]
            self._signal_all(directory, signal.SIGKILL)

    def _hear_out(self) -> None:
        """What the notebook has said last, of the processes and directories that are to go with it."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # there is no more
            while data := self._channel.recv(1 << 16, socket.MSG_DONTWAIT):
                self._heard += data
        for line in self._heard.split(b"\n")[:-1]:
            request = json.loads(line)
            if request.keys() & {"enter", "guard"}:
                self._take(request)

    def _end_all(self) -> None:
        if self._orphaned:
            self._hear_out()
        for key in list(self._selector.get_map().values()):
            if key.fileobj != self._wake.fileno() and key.fileobj not in self._guarded:
                self._selector.unregister(key.fileobj)
        left = set(self._directories)
        if self._orphaned:
            self._let_all_end()
            self._kill_guarded()
        for directory in {child.directory for child in self._children.values()}:
            self._leave(directory)
        deadline = time.monotonic() + _TERM_SECONDS + _KILL_SECONDS
        while self._children and time.monotonic() < deadline:
            for key, _ in self._selector.select(self._rest()):
                key.data()
            self._kill_overdue()
        for directory in left if self._orphaned else ():
            _remove(directory)

    def _let_all_end(self) -> None:
        """Their world is over with the notebook, so they end by themselves: wait for that, as long as each may take."""
        begun = time.monotonic()
        while graces := [*(c.grace for c in self._children.values()), *(g.grace for g in self._guarded.values())]:
            if (rest := begun + max(graces) - time.monotonic()) <= 0:
                return
            for key, _ in self._selector.select(rest):
                key.data()

    def _kill_guarded(self) -> None:
        for descriptor, process in self._guarded.items():
            self._selector.unregister(descriptor)
            kill_group(process.pid)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def _remove(directory: str) -> None:
    """With all in it. Who is not ours to end (kernels of some provisioner) may write there while it goes itself."""
    deadline = time.monotonic() + _TERM_SECONDS + _KILL_SECONDS
    shutil.rmtree(directory, ignore_errors=True)
    while os.path.lexists(directory) and time.monotonic() < deadline:
        time.sleep(_AGAIN_SECONDS)  # nothing tells when they have gone
        shutil.rmtree(directory, ignore_errors=True)


def _preload(entry: str) -> dict[str, int]:
    """Import what every worker needs; gives the files that were loaded, and when each was changed.

    All of it is laid out so that forks share it: a collection would touch every page.
    """
    import numpy.random  # noqa: F401  (torch does without, and every worker seeds it)
    import torch

    torch.set_num_threads(1)
    for module in ("rpcbench.base.config", "rpcbench.launch.worker_bootstrap", entry.partition(":")[0]):
        importlib.import_module(module)
    if threading.active_count() > 1:
        raise RuntimeError(f"importing {entry} started a thread; a process with threads cannot be forked safely")
    loaded = _loaded()
    sys.stdout.flush()
    gc.disable()
    gc.collect()
    gc.freeze()
    return loaded


def _loaded() -> dict[str, int]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {file: Path(file).stat().st_mtime_ns for file in files if file and Path(file).is_file()}


def signal_group(pid: int, which: int) -> None:
    """Signal an unreaped worker and what it started; the worker alone if it has not made its session yet."""
    try:
        os.killpg(pid, which)
    except (ProcessLookupError, PermissionError):
        os.kill(pid, which)


def kill_group(pid: int) -> None:
    """What a process that has ended, or will now, has started. Its number cannot be in use again so soon, or at all
    while its group has members."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _spawn(request: Request) -> int:
    """Start a new interpreter that reads `request` from its standard input; its process id."""
    read, write = os.pipe()
    # A worker that ends before it has read its request is reported as any other.
    with contextlib.suppress(BrokenPipeError), os.fdopen(write, "wb") as pipe:
        try:
            arguments = [sys.executable, "-P", _WORKER, request["name"]]
            actions = [(os.POSIX_SPAWN_DUP2, read, 0)]
            pid = os.posix_spawn(sys.executable, arguments, request["environ"], file_actions=actions)
        finally:
            os.close(read)
        pipe.write(json.dumps(request).encode())
    return pid


def _hide_input() -> None:
    """What is imported here must not read requests."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def main() -> None:
    request = ForkServer(sys.argv[1]).serve()
    if request is not None:
        from rpcbench.launch import worker_bootstrap

        worker_bootstrap.run(request)
    os._exit(0)


if __name__ == "__main__":
    main()
