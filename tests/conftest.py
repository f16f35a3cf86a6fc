"""What all tests share: a check that nothing is left behind, and no silent skipping of browser tests in CI."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share few cores; read when torch is loaded

import psutil
import pytest
from hypothesis import settings

settings.register_profile("rpcbench", deadline=None)  # a loaded machine is no reason to fail
settings.load_profile("rpcbench")

MARK = "RPCBENCH_TEST_MARK"
HELD = ("socket:", "pipe:", "/memfd:", "anon_inode:")
LeakCheck = Callable[..., AbstractContextManager[None]]


@pytest.fixture(scope="session")
def leak_check() -> LeakCheck:
    """`with leak_check():` fails if processes, threads, descriptors or files made inside outlive it by `grace` s.

    With descriptors=False they may: of a library that keeps some.
    """
    return _nothing_left


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """The leak check around one test, and around the function-scoped fixtures requested after it."""
    with _nothing_left():
        yield


@contextlib.contextmanager
def _nothing_left(grace: float = 10.0, descriptors: bool = True) -> Iterator[None]:
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)  # inherited by every descendant, also by those that leave our session
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        _cool_starters()
        threads, held, shared = set(threading.enumerate()), _held(), _shared_memory()

        def left() -> list[str]:
            gc.collect()
            return [
                *(f"process {process.pid}: {process.info['name']}" for process in _marked(mark)),
                *(f"thread {thread.name}" for thread in set(threading.enumerate()) - threads),
                *(f"descriptor {fd} of {target}" for fd, target in (_held() - held if descriptors else ())),
                *(f"file {path}" for path in _files(Path(runtime))),
                *(f"shared memory {name}" for name in _shared_memory() - shared),
            ]

        yield
        _cool_starters()
        deadline = time.monotonic() + grace
        while (leaks := left()) and time.monotonic() < deadline:
            time.sleep(0.02)  # nothing announces the end of a process that is not our child
        for process in _marked(mark):
            process.kill()
        assert leaks == []


def _cool_starters() -> None:
    """What is kept warm for later clusters is no leak; and one from before would not pass the mark on."""
    if starters := sys.modules.get("rpcbench.launch.starters"):
        starters.cool()


def _marked(mark: str) -> list[psutil.Process]:
    """Living processes, other than this one, that were started with the mark in their environment."""
    found = psutil.process_iter(["name", "environ", "status"])
    return [
        process
        for process in found
        if process.pid != os.getpid()
        and (process.info["environ"] or {}).get(MARK) == mark
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def _held() -> set[tuple[str, str]]:
    """Open descriptors of this process that could keep a peer alive or hold memory."""
    targets = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the directory
            targets.add((entry.name, os.readlink(entry)))
    return {(fd, target) for fd, target in targets if target.startswith(HELD)}


def _files(runtime: Path) -> list[Path]:
    """Sockets anywhere, and whatever else is no shared directory of this user (that one stays, with its secrets)."""
    shared = runtime / f"rpcbench-{os.geteuid()}"
    return [path for path in runtime.rglob("*") if path.is_socket() or not path.is_relative_to(shared)]


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "rpcbench" in name or name.startswith(f"torch_{os.getpid()}_")}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Where RPCBENCH_REQUIRE_BROWSER is set, a browser test that was skipped has failed; and RPCBENCH_REQUIRE_RAY."""
    report = yield
    for mark in ("browser", "ray"):
        required = f"RPCBENCH_REQUIRE_{mark.upper()}"
        if report.skipped and item.get_closest_marker(mark) and os.environ.get(required):
            report.outcome = "failed"
            report.longrepr = f"skipped, though {required} is set: {report.longrepr}"
    return report
