"""The fork server: a small process beside the notebook that starts workers, reports their exits and ends them.

Guarantees
- When the notebook ends, in any way, workers and guarded processes have their grace to end by themselves; then they
  are killed, and the run directories are removed. When the fork server ends, its workers are killed (Linux).
- After "leave" the workers with their log in that directory are ended: SIGTERM, and SIGKILL after 0.5 s.
- Mode "fork" imports torch and the entry's module once and runs no torch operation: a process that has run a
  parallel one has threads and locks that its forks inherit broken. While it has no request, it also imports what torch
  itself imports at the first optimizer, DDP or FSDP of a process; a request waits for one of these modules at most,
  which takes seconds on a busy machine. None is imported while workers are to be killed at a deadline. If one starts a
  thread, later workers are spawned.
- A worker inherits no descriptor of the fork server or of its siblings. The processes that a worker started end with
  it, unless they have a session of their own.
- A guarded process, started by others, ends with the notebook, and its own children end with it (Linux).
- No loop here polls, except while a directory is removed.
"""

# Theory of operation
#
# The notebook runs this file as a script, by path: no module of ours is imported before the import path of the
# notebook is known. Requests and replies are JSON lines over a socket, the script's standard input:
#
#     notebook (fork_client)                                        fork server
#       {"prepare": mode, "entry", "sys_path", "notebook": pid} --->  imports torch (mode "fork")
#                        <--- {"ready": {loaded file: time of its last change}}, again after the late imports
#       {"start": number, "log", "config", ...} ------------------->  fork, or spawn  --->  worker
#                        <--- {"started": number, "pid"} or {"failed": number, "error"}
#                        <--- {"exited": number, "status"}       <---  SIGCHLD
#       {"signal", "to": number}  {"guard": pid, "grace": seconds}
#       {"enter": run directory}  {"leave": run directory}
#
# One thread waits in a selector for: requests; the wake-up pipe of signals; a pidfd of the notebook; a pidfd of each
# guarded process. There is no second thread, as a process with threads cannot be forked safely. In the child of a
# fork, `serve_requests` returns the worker's request to `main`, which runs the worker.
#
#     serving ---- SIGTERM -----------------------------> end workers (SIGTERM, SIGKILL) ----------------------> exit
#        +-- end of file, or end of the notebook --> wait for their grace --> the same --> remove run directories -+

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
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Request = dict[str, Any]

_WORKER = str(Path(__file__).with_name("worker_bootstrap.py"))
_CAUGHT = (signal.SIGCHLD, signal.SIGTERM)
TERM_SECONDS = 0.5  # from SIGTERM to SIGKILL
_KILL_SECONDS = 2.0  # how long to wait for the end of processes after SIGKILL
_AGAIN_SECONDS = 0.05  # between attempts to remove a directory
_QUIET_SECONDS = 0.5  # without a request before a late import: the first workers do not wait for it
# Each of the first three takes a third to a whole second on an idle machine, up to six on a busy one; a request that
# comes meanwhile waits. The others are small then.
_LATE = ("sympy", "torch._inductor.config", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")


class _Child(NamedTuple):
    """A worker that was started and has not been reaped."""

    number: int  # of its start request
    directory: str  # the run directory that has its log
    grace: float  # seconds to end by itself when the notebook has ended


class _Guarded(NamedTuple):
    """A process started by others that ends with the notebook."""

    pid: int
    grace: float  # seconds to end by itself


class ForkServer:
    """The server of one notebook; it ends with the notebook."""

    def __init__(self, run_directory: str) -> None:
        self._own = contextlib.ExitStack()  # descriptors that a forked worker closes
        self._channel = self._own.enter_context(socket.socket(fileno=os.dup(0)))
        self._wake, wake = (self._own.enter_context(end) for end in socket.socketpair())
        self._selector = self._own.enter_context(selectors.DefaultSelector())
        self._partial_request = b""  # an incomplete request
        self._children: dict[int, _Child] = {}  # by pid
        self._directories = {run_directory}  # removed if the notebook ends without "leave"
        self._overdue: dict[str, float] = {}  # by run directory: when its workers are killed (monotonic seconds)
        self._guarded: dict[int, _Guarded] = {}  # by pidfd
        self._mode = ""  # "fork" or "spawn"
        self._late: list[str] = []  # modules to import while there is no request
        self._loaded: dict[str, int] = {}  # by file: the time of its last change when it was loaded
        self._over = False  # leave the loop
        self._orphaned = False  # the notebook has ended
        _hide_input()
        self._watch_descriptor(self._channel.fileno(), self._read_requests)
        self._catch_signals(wake)

    def _catch_signals(self, wake: socket.socket) -> None:
        for end in (self._wake, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        for number in _CAUGHT:
            signal.signal(number, lambda *_: None)  # a handler must exist for the wake-up descriptor to be written
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers inherit that, until their entry sets a handler
        self._watch_descriptor(self._wake.fileno(), self._signal_received)

    def _watch_descriptor(self, descriptor: int, react: Callable[[], Request | None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, react)

    def serve_requests(self) -> Request | None:
        """Serve until the notebook has ended, and return None; in a process forked for a worker, return its request."""
        while not self._over:
            may_import = not self._overdue  # else `select` may return for a kill, and the next one may be due soon
            events = self._selector.select(self._seconds_to_wait())
            for key, _ in events:
                request: Request | None = key.data()
                if request is not None:
                    return request
            self._kill_overdue()
            if may_import and not events:
                self._import_late()
        self._end_all()
        return None

    def _read_requests(self) -> Request | None:
        try:
            data = self._channel.recv(1 << 16)
        except ConnectionResetError:
            data = b""  # the notebook was killed with replies unread
        if not data:
            self._notebook_ended()
        *lines, self._partial_request = (self._partial_request + data).split(b"\n")
        for line in lines:
            request = self._handle_request(json.loads(line))
            if request is not None:
                return request
        return None

    def _handle_request(self, request: Request) -> Request | None:
        if "prepare" in request:
            self._prepare_server(request)
        elif "start" in request:
            return self._start_worker(request)
        elif "enter" in request:
            self._directories.add(request["enter"])
        elif "leave" in request:
            self._end_workers_of(request["leave"])
        elif "guard" in request:
            self._guard_process(_Guarded(request["guard"], request["grace"]))
        else:
            self._signal_worker(request["to"], request["signal"])
        return None

    def _prepare_server(self, request: Request) -> None:
        self._mode = request["prepare"]
        self._watch_notebook(request["notebook"])
        if self._mode == "fork":
            sys.path[:] = request["sys_path"]
            _preload_modules(request["entry"])
            self._loaded = _find_loaded_files()
            self._late += _LATE
        os.chdir("/")  # after the imports, which may be relative; no directory of the notebook stays in use
        self._send_reply({"ready": self._loaded})

    def _import_late(self) -> None:
        """Import the next module that workers of a training need; after the last one report all files."""
        if not self._late:
            return
        module = self._late.pop(0)
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001  (a worker that needs it gets the same error)
            traceback.print_exc()
        if warning := _thread_warning(module):
            sys.stderr.write(f"{warning}: workers are spawned from now on\n")
            self._mode, self._late = "spawn", []
        if not self._late:
            _share_pages()
            self._loaded = _find_loaded_files() | self._loaded
            self._send_reply({"ready": self._loaded})

    def _watch_notebook(self, notebook: int) -> None:
        # End of file is not enough: a process that the notebook forked may hold its end of the channel.
        if not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(notebook)
        except ProcessLookupError:
            self._notebook_ended()
            return
        self._own.callback(os.close, descriptor)
        self._watch_descriptor(descriptor, self._notebook_ended)

    def _notebook_ended(self) -> None:
        self._over = self._orphaned = True

    def _guard_process(self, process: _Guarded) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:  # it has ended already: only its children are left
            kill_group(process.pid)
            return
        self._guarded[descriptor] = process
        self._watch_descriptor(descriptor, lambda: self._let_go(descriptor))

    def _let_go(self, descriptor: int) -> None:  # when a guarded process has ended
        self._selector.unregister(descriptor)
        kill_group(self._guarded.pop(descriptor).pid)
        os.close(descriptor)

    def _start_worker(self, request: Request) -> Request | None:
        number = request["start"]
        request["parent"] = os.getpid()  # the parent that the worker ends with
        try:
            pid = self._fork_worker() if self._mode == "fork" else _spawn_worker(request)
        except OSError as error:
            self._send_reply({"failed": number, "error": f"{type(error).__name__}: {error}"})
            return None
        if pid == 0:
            return request  # this process is the worker: `serve_requests` returns it
        self._children[pid] = _Child(number, str(Path(request["log"]).parent), request["grace"])
        self._send_reply({"started": number, "pid": pid})
        return None

    def _fork_worker(self) -> int:
        """Fork as `os.fork` does; the child has no descriptor and no signal handler of the fork server."""
        # Blocked until the child has reset its handlers: a signal before would go to the fork server's wake-up pipe.
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

    def _signal_worker(self, number: int, which: int) -> None:
        for pid, child in self._children.items():
            if child.number == number:
                send = os.kill if which == signal.SIGINT else signal_group  # an interrupt is for the cell alone
                send(pid, which)

    def _signal_received(self) -> None:
        if signal.SIGTERM in self._wake.recv(1 << 12):
            self._over = True
        self._reap_workers()

    def _reap_workers(self) -> None:
        for pid in list(self._children):  # all of them: several SIGCHLD may arrive as one
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                kill_group(pid)  # processes that the worker started
                self._send_reply(
                    {"exited": self._children.pop(pid).number, "status": os.waitstatus_to_exitcode(status)}
                )

    def _send_reply(self, reply: dict[str, Any]) -> None:
        try:
            self._channel.sendall(json.dumps(reply).encode() + b"\n")
        except ConnectionError:
            self._notebook_ended()

    def _end_workers_of(self, directory: str) -> None:
        self._directories.discard(directory)
        self._overdue[directory] = time.monotonic() + TERM_SECONDS
        self._signal_all(directory, signal.SIGTERM)

    def _signal_all(self, directory: str, which: int) -> None:
        for pid, child in self._children.items():
            if child.directory == directory:
                signal_group(pid, which)

    def _seconds_to_wait(self) -> float | None:
        """Return the seconds until the next workers have to be killed, or the next late import; None without any."""
        if not self._overdue:
            return _QUIET_SECONDS if self._late else None
        return max(0.0, min(self._overdue.values()) - time.monotonic())

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for directory in [directory for directory, due in self._overdue.items() if due <= now]:
            del self._overdue[directory]
            self._signal_all(directory, signal.SIGKILL)

    def _read_last_requests(self) -> None:
        """Read the notebook's last requests, for processes to guard and directories to remove."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # all are read; the pidfd may be ahead of them
            while data := self._channel.recv(1 << 16, socket.MSG_DONTWAIT):
                self._partial_request += data
        for line in self._partial_request.split(b"\n")[:-1]:
            request = json.loads(line)
            if request.keys() & {"enter", "guard"}:
                self._handle_request(request)

    def _end_all(self) -> None:
        if self._orphaned:
            self._read_last_requests()
        for key in list(self._selector.get_map().values()):  # from now on only signals and guarded processes matter
            if key.fileobj != self._wake.fileno() and key.fileobj not in self._guarded:
                self._selector.unregister(key.fileobj)
        left = set(self._directories)  # a copy: `_end_workers_of` removes those with workers
        if self._orphaned:
            self._await_graces()
            self._kill_guarded()
        for directory in {child.directory for child in self._children.values()}:
            self._end_workers_of(directory)
        deadline = time.monotonic() + TERM_SECONDS + _KILL_SECONDS
        while self._children and time.monotonic() < deadline:
            for key, _ in self._selector.select(self._seconds_to_wait()):
                key.data()
            self._kill_overdue()
        for directory in left if self._orphaned else ():
            _remove_directory(directory)

    def _await_graces(self) -> None:
        """Wait for workers and guarded processes, each for its grace: they end by themselves when their world ends."""
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


def _remove_directory(directory: str) -> None:
    deadline = time.monotonic() + TERM_SECONDS + _KILL_SECONDS
    shutil.rmtree(directory, ignore_errors=True)
    # Kernels of some provisioners are not ours to end, and may write there until they end; no event reports that.
    while os.path.lexists(directory) and time.monotonic() < deadline:
        time.sleep(_AGAIN_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)


def _preload_modules(entry: str) -> None:
    """Import the modules that every worker needs."""
    import numpy.random  # noqa: F401  (torch does not import it, and every worker seeds it)
    import torch

    torch.set_num_threads(1)  # before any operation: a thread pool would not survive a fork
    for module in ("rpcbench.base.config", "rpcbench.launch.worker_bootstrap", entry.partition(":")[0]):
        importlib.import_module(module)
    if warning := _thread_warning(entry):
        raise RuntimeError(warning)
    _share_pages()


def _thread_warning(module: str) -> str:
    """Return the reason not to fork after the import of a module; empty if this process has one thread."""
    if threading.active_count() == 1:
        return ""
    return f"importing {module} started a thread; a process with threads cannot be forked safely"


def _share_pages() -> None:
    """Have forks share the pages of what is loaded, until one is written."""
    sys.stdout.flush()  # else each fork would write the buffered text again
    gc.disable()  # a collection in a worker would write to all pages
    gc.collect()
    gc.freeze()


def _find_loaded_files() -> dict[str, int]:
    """Return the files of the loaded modules, each with the time of its last change."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {file: Path(file).stat().st_mtime_ns for file in files if file and Path(file).is_file()}


def signal_group(pid: int, which: int) -> None:
    """Signal a worker that was not reaped, and the processes that it started."""
    try:
        os.killpg(pid, which)
    except (ProcessLookupError, PermissionError):  # it has no session yet, so it has started no process either
        os.kill(pid, which)


def kill_group(pid: int) -> None:
    """Kill the processes that a process started which has ended, or will end now."""
    # Its pid cannot be in use again so soon, or at all while its group has members.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _spawn_worker(request: Request) -> int:
    """Start a new interpreter that reads `request` from its standard input, and return its pid."""
    read, write = os.pipe()
    # BrokenPipeError: a worker that ends before it has read its request is reported as any other.
    with contextlib.suppress(BrokenPipeError), os.fdopen(write, "wb") as pipe:
        try:
            arguments = [sys.executable, "-P", _WORKER, request["name"]]
            actions = [(os.POSIX_SPAWN_DUP2, read, 0)]
            pid = os.posix_spawn(sys.executable, arguments, request["environ"], file_actions=actions)
        finally:
            os.close(read)
        pipe.write(json.dumps(request).encode())
    return pid


def _hide_input() -> None:  # modules that are imported here must not read requests from standard input
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def main() -> None:
    request = ForkServer(sys.argv[1]).serve_requests()
    if request is not None:
        from rpcbench.launch import worker_bootstrap

        worker_bootstrap.run_worker(request)
    os._exit(0)  # without finalizers of torch, which take half a second


if __name__ == "__main__":
    main()
