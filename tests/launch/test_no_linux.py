"""A notebook and its workers on a system that lacks what Python has on Linux alone, as macOS does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from worlds import PATIENCE, until

FOLDER = Path(__file__).parents[1] / "no_linux"

pytestmark = pytest.mark.process


def test_a_notebook_works_without_what_is_linux_alone_and_its_processes_end_with_it(no_leaks: None) -> None:
    paths = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(FOLDER / "program.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == -signal.SIGKILL and done.stderr == "", done.stderr
    pids = json.loads(done.stdout)
    until(lambda: not any(map(psutil.pid_exists, pids)), "the end of the workers and of their fork server")
