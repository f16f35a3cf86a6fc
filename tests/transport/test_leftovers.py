"""Directories that dead worlds have left are removed; directories that may be in use are kept."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcbench.transport.listeners import LocalListener
from rpcbench.transport.run_dir import shared_directory, shared_secret

DAYS = 24 * 3600.0


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:  # short enough for the names of sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield


@pytest.fixture
def past() -> Iterator[Path]:
    """The directory of a world, with the socket of a process that was killed."""
    path = shared_directory("past")
    shared_secret(path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path / "1.0.sock"))
    yield path


def ago(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAYS,) * 2)


def test_the_old_directory_of_a_dead_world_is_removed(past: Path) -> None:
    ago(past, 2)
    new = shared_directory("new")
    assert not past.exists() and new.exists()


def test_a_directory_that_is_recent_or_was_reused_is_kept(past: Path) -> None:
    ago(past, 0.9)
    shared_directory("new")
    ago(past, 2)
    assert shared_directory("past") == past, "a new process makes it recent"
    shared_directory("new")
    assert (past / "secret").exists()


def test_an_old_directory_with_other_files_is_kept(past: Path) -> None:
    (past / "0.address").touch()
    ago(past, 2)
    shared_directory("new")
    assert (past / "secret").exists()


def test_an_old_directory_is_kept_while_a_process_listens_in_it(past: Path) -> None:
    listener = LocalListener(past / "0.sock")
    ago(past, 2)
    shared_directory("new")
    assert (past / "secret").exists()
    listener.close()
    ago(past, 2)
    shared_directory("new")
    assert not past.exists()
