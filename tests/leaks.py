"""The leak check: processes, threads, descriptors, files and memory that a test made must be gone when it ends.

The check counts only its own test; other runs may go on beside it:

- A process belongs to this run if it descends from this process, or carries `MARK` with the run's value in its
  environment: every descendant inherits that, also one that leaves the session and one whose parent ends. A process of
  the test is one of this run that did not exist when the test began.
- Files are those below a runtime directory that is made for the test alone.
- Threads, descriptors and shared memory are those of this process.

The warm fork server (`rpcbench.launch.fork_client`) is no leak: it is started before the test, if there is none, so
that tests that start workers share one that has torch loaded. If a test replaces it, the new one ends with the test.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

MARK = "RPCBENCH_TEST_MARK"
HELD = ("socket:", "pipe:", "/memfd:", "anon_inode:")
_RUNTIME = os.environ.get("XDG_RUNTIME_DIR", "")
LeakCheck = Callable[..., AbstractContextManager[None]]


class Ours(NamedTuple):
    """A process of this run; `began` distinguishes it from a later one with the same id."""

    pid: int
    began: float
    name: str


def mark_this_run() -> None:
    """Mark the processes that this one starts from now on as its own."""
    os.environ[MARK] = uuid.uuid4().hex


@contextlib.contextmanager
def nothing_left(
    grace: float = 10.0, descriptors: bool = True, but: tuple[str, ...] = (), warm: bool = True
) -> Iterator[None]:
    """Fail if processes, threads, descriptors or files made inside outlive the block by `grace` s.

    With descriptors=False, descriptors may: some libraries keep theirs. Processes whose names begin with one of `but`
    may, too. With warm=False no fork server is started for the test.
    """
    fork_server = _warm_fork_server() if warm else _warm()
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("quickjs")  # a thread of its own begins with its import and stays
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        threads, held, shared = set(threading.enumerate()), _held(), _shared_memory()
        pools = {_pool_of(thread) for thread in threads} - {None}
        processes = _processes()

        def new() -> list[Ours]:
            return [process for process in _processes() - processes if not process.name.startswith(but)]

        def left() -> list[str]:
            gc.collect()
            return [
                *(f"process {process.pid}: {process.name}" for process in new()),
                *(_told(thread) for thread in set(threading.enumerate()) - threads if _pool_of(thread) not in pools),
                *(f"descriptor {fd} of {target}" for fd, target in (_held() - held if descriptors else ())),
                *(f"file {path}" for path in _files(Path(runtime))),
                *(f"shared memory {name}" for name in _shared_memory() - shared),
            ]

        yield
        if _warm() is not fork_server:
            cool_fork_server()
        deadline = time.monotonic() + grace
        while (leaks := left()) and time.monotonic() < deadline:
            time.sleep(0.02)  # no notification reports the end of a process that is not a child
        for process in new():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(process.pid).kill()
        assert not leaks, f"left behind: {leaks}"


def _pool_of(thread: threading.Thread) -> object:
    """The pool of an agent, if this is a thread of one: an agent of the whole module may need more threads while a test
    runs, and ends them itself."""
    return getattr(thread, "_pool", None)


def _told(thread: threading.Thread) -> str:
    """The name and the stack of a thread."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"thread {thread.name}:\n{''.join(traceback.format_stack(frame))}"


def cool_fork_server() -> None:
    """End the fork server that is kept warm for later clusters."""
    if servers := sys.modules.get("rpcbench.launch.fork_client"):
        servers.stop_idle()


def _warm_fork_server() -> object:
    """Return the warm fork server; begin to start one if a test may use it and there is none."""
    if "rpcbench.launch.cluster" in sys.modules:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", _RUNTIME)  # its files outlive a directory that a test has set
            importlib.import_module("rpcbench.launch.process").warm()
    return _warm()


def _warm() -> object:
    servers = sys.modules.get("rpcbench.launch.fork_client")
    return servers and servers._ours._warm


def _processes() -> set[Ours]:
    """Live processes of this run, other than this one; descendants count even before they have an environment."""
    mark, found, this = os.environ[MARK], set(), psutil.Process()
    children = {child.pid for child in this.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if process == this or process.create_time() < this.create_time():
                continue  # older than this run, which is known at once
            info = process.as_dict(["name", "environ", "status"])
            ours = process.pid in children or (info["environ"] or {}).get(MARK) == mark
            if ours and info["status"] != psutil.STATUS_ZOMBIE:
                found.add(Ours(process.pid, process.create_time(), info["name"]))
    return found


def _held() -> set[tuple[str, str]]:
    """Open descriptors of this process that could keep a peer alive or hold memory. The first three are pytest's."""
    targets = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists the directory
            targets.add((entry.name, os.readlink(entry)))
    return {(fd, target) for fd, target in targets if int(fd) > 2 and target.startswith(HELD)}


def _files(runtime: Path) -> list[Path]:
    """Sockets anywhere, and files outside the shared directory of this user (that one stays, with its secrets)."""
    shared = runtime / f"rpcbench-{os.geteuid()}"
    walk = os.walk(runtime)  # unlike `Path.rglob`, it tolerates directories that disappear
    found = (Path(top, name) for top, folders, files in walk for name in (*folders, *files))
    return [path for path in found if path.is_socket() or not path.is_relative_to(shared)]


def _shared_memory() -> set[str]:
    """Named blocks of this process; torch puts its id into the name."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}
