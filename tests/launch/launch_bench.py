"""Helpers for tests of processes: a bounded wait for a condition, and a launcher with the answers of its workers."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import psutil
import pytest
from sizes import long

from rpcbench.base.config import WorldConfig
from rpcbench.launch.process import ProcessLauncher
from rpcbench.transport.run_dir import RunDirectory

ENTRY = "launch_entries:main"
SECONDS = 60.0
SECRET = b"\xabs" * 16
_NUMBERS = itertools.count(1)


def until(condition, seconds=SECONDS):
    """Wait until `condition()` is true; for facts about other processes, which come without notice."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def gone(pid):
    """Whether the process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Bench:
    """A launcher, and a folder where its workers leave answers."""

    def __init__(self, mode, folder, entry=ENTRY):
        self.folder = folder
        self.directory = RunDirectory()
        self.launcher = ProcessLauncher(self.directory, start=mode, entry=entry)

    def config(self, task, **changes):
        number, given = next(_NUMBERS), {"cluster": task, "directory": str(self.folder), "secret": SECRET, **changes}
        return WorldConfig(name=f"{task}{number}", id=number, **given)

    def start(self, task, on_exit=None, **changes):
        return self.launcher.start(self.config(task, **changes), on_exit)

    def answer(self, handle):
        path = Path(self.folder, f"{handle.name}.json")
        until(lambda: path.exists() or handle.poll() is not None)
        assert path.exists(), handle.last_words()
        return json.loads(path.read_text())

    def fork_server_of(self, handle):
        return psutil.Process(handle.pid).ppid()


both = pytest.mark.parametrize("bench", ["fork", *long("spawn")], indirect=True)
